"""Tokenizers as the files of language models hold them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flrce.errors import BadInput, brief
from flrce.formats.bpe import GPT2, PATTERNS, Tokenizer

REMEDY = "give a GGUF file, or a folder with config.json, *.safetensors and tokenizer.json"
MOST = 256 << 20  # bytes of a config or tokenizer file
IDS = 1 << 24  # far above any vocabulary
WHOLE = ("llama-bpe", "llama3")  # kinds that take a word as it stands before they merge


def from_gguf(path: Path, values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer among a GGUF file's values."""
    kind, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in PATTERNS:
        what, known = f"{brief(kind, 20)!r}, {brief(pre, 20)!r}", ", ".join(sorted(PATTERNS))
        raise BadInput(f"{path} has a tokenizer {what}; read are byte-level BPEs (gpt2) of the kinds {known}")
    try:
        tokens = tuple(values["tokenizer.ggml.tokens"])
        kinds = values.get("tokenizer.ggml.token_type", [1] * len(tokens))
        merges = tuple(_pair(line) for line in values["tokenizer.ggml.merges"])
        end = int(values["tokenizer.ggml.eos_token_id"])
    except (KeyError, TypeError, ValueError) as why:
        raise BadInput(f"{path} has no complete tokenizer: {brief(why, 80)}; download it again") from why
    if not 0 <= end < len(tokens):
        raise BadInput(f"{path} ends texts with id {end}, of {len(tokens)} tokens; download it again")
    marks = {token: i for i, (token, of) in enumerate(zip(tokens, kinds, strict=False)) if of in (3, 4)}
    return Tokenizer(tokens, merges, PATTERNS[pre], marks, end, whole=pre in WHOLE)


def _pair(line: Any) -> tuple[str, str]:
    """A merge, written "a b" or ["a", "b"]."""
    parts = line.split(" ") if isinstance(line, str) else list(line)
    if len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
        raise ValueError(f"merge {brief(line, 30)!r}")
    return parts[0], parts[1]


def from_json(folder: Path) -> Tokenizer:
    """The tokenizer of a HuggingFace folder."""
    path = folder / "tokenizer.json"
    told = read_json(path)
    model = told.get("model", {})
    try:
        if model.get("type", "BPE") != "BPE":
            raise ValueError(f"a model {brief(model.get('type'), 30)!r}, read is BPE")
        if told.get("normalizer"):
            raise ValueError("it normalises texts first")
        vocabulary = dict(model["vocab"])
        marks = {each["content"]: int(each["id"]) for each in told.get("added_tokens", ())}
        vocabulary |= marks
        if not all(type(i) is int and 0 <= i < IDS for i in vocabulary.values()):
            raise ValueError("an id that is no whole number from 0 on")
        tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
        for token, i in vocabulary.items():
            tokens[i] = token
        merges = tuple(_pair(line) for line in model["merges"])
        patterns = tuple(_cuts(told.get("pre_tokenizer") or {}))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as why:
        raise BadInput(f"{path} is no byte-level BPE: {brief(why, 100)}; use another model") from why
    config = folder / "tokenizer_config.json"
    named = read_json(config).get("eos_token") if config.is_file() else None
    name = named.get("content") if isinstance(named, dict) else named
    end = marks.get(str(name), marks.get("<|endoftext|>", 0))
    return Tokenizer(tuple(tokens), merges, patterns, marks, end, whole=bool(model.get("ignore_merges")))


def _cuts(step: Mapping[str, Any]) -> list[str]:
    """The patterns that a tokenizer.json cuts words by."""
    kind = step.get("type")
    if kind == "Sequence":
        return [pattern for each in step["pretokenizers"] for pattern in _cuts(each)]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return [GPT2] if step.get("use_regex", True) else []
    if kind == "Digits":
        return [r"\p{N}" if step.get("individual_digits") else r"\p{N}+"]
    if kind == "Split" and step.get("behavior") == "Isolated" and "Regex" in step.get("pattern", {}):
        return [str(step["pattern"]["Regex"])]
    raise ValueError(f"a pre_tokenizer {brief(kind, 30)!r} that is not known")


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file, or BadInput."""
    try:
        if path.stat().st_size > MOST:
            raise ValueError(f"more than {MOST} bytes")
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as why:
        raise BadInput(f"{path} cannot be read: {brief(why, 120)}; {REMEDY}") from why
    if not isinstance(found, dict):
        raise BadInput(f"{path} holds no object; {REMEDY}")
    return found
