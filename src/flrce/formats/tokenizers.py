"""Tokenizers as the files of language models hold them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flrce.errors import BadInput, brief
from flrce.formats.bpe import GPT2, PATTERNS, Tokenizer
from flrce.formats.spelling import SPACE, Letters, Spaces, Spelling, cuts
from flrce.reading import read_limited

REMEDY = "give a GGUF file, or a folder with config.json, *.safetensors and tokenizer.json"
MOST = 64 << 20  # bytes of a config or tokenizer file: twice the largest in use
IDS = 1 << 24  # far above any vocabulary
EACH = f"{SPACE}[^{SPACE}]*|[^{SPACE}]+"  # a word begins with every space
NORMAL, UNKNOWN, MARKS = 1, 2, (3, 4)  # kinds of tokens in a GGUF file and in SentencePiece's; 6 is a byte
COMPOSED = ({"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFC"}]})  # a normalizer such as Qwen2's
WHOLE = ("llama-bpe", "llama3")  # kinds that take a word as it stands before they merge


def from_gguf(path: Path, values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer among a GGUF file's values."""
    kind, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "default")
    if kind == "llama":
        return _scored(path, values)
    if kind != "gpt2" or pre not in PATTERNS:
        what, known = f"{brief(kind, 20)!r}, {brief(pre, 20)!r}", ", ".join(sorted(PATTERNS))
        raise BadInput(f"{path} has a tokenizer {what}; read are llama's, and gpt2's of the kinds {known}")
    try:
        tokens = tuple(values["tokenizer.ggml.tokens"])
        kinds = values.get("tokenizer.ggml.token_type", [1] * len(tokens))
        merges = tuple(_pair(line) for line in values["tokenizer.ggml.merges"])
        end = int(values["tokenizer.ggml.eos_token_id"])
    except (KeyError, TypeError, ValueError) as why:
        raise BadInput(f"{path} has no complete tokenizer: {brief(why, 80)}; download it again") from why
    if not 0 <= end < len(tokens):
        raise BadInput(f"{path} ends texts with id {end}, of {len(tokens)} tokens; download it again")
    marks = {token: i for i, (token, of) in enumerate(zip(tokens, kinds, strict=False)) if of in MARKS}
    return Tokenizer(tokens, merges, PATTERNS[pre], marks, end, whole=pre in WHOLE)


def _scored(path: Path, values: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece's BPE in a GGUF file."""
    first: Literal["always", "never"] = "always" if values.get("tokenizer.ggml.add_space_prefix", True) else "never"
    tokens, kinds, scores = (values.get(f"tokenizer.ggml.{key}", ()) for key in ("tokens", "token_type", "scores"))
    try:
        return scored(tokens, kinds, scores, int(values["tokenizer.ggml.eos_token_id"]), first)
    except (KeyError, TypeError, ValueError) as why:
        raise BadInput(f"{path} has no complete tokenizer: {brief(why, 80)}; download it again") from why


def scored(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float], end: int, first: Literal["always", "never"]
) -> Tokenizer:
    """SentencePiece's BPE: no merges, but a kind and a score for each token."""
    if not len(tokens) == len(kinds) == len(scores) or not 0 <= end < len(tokens):
        raise ValueError(f"{len(tokens)} tokens, {len(kinds)} kinds, {len(scores)} scores, {end} for the end")
    tokens = tuple(map(str, tokens))
    ranked = {token: float(score) for token, of, score in zip(tokens, kinds, scores, strict=True) if of == NORMAL}
    marks = {token: i for i, (token, of) in enumerate(zip(tokens, kinds, strict=True)) if of in (UNKNOWN, *MARKS)}
    return Tokenizer(tokens, (), cuts(list(ranked)), marks, end, spelling=Spaces(first), scores=ranked)


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
        composed = told.get("normalizer") in COMPOSED
        spaced = None if composed else spaces(told.get("normalizer"), told.get("pre_tokenizer"))
        vocabulary = dict(model["vocab"])
        marks = {each["content"]: int(each["id"]) for each in told.get("added_tokens", ())}
        vocabulary |= marks
        if not all(type(i) is int and 0 <= i < IDS for i in vocabulary.values()):
            raise ValueError("an id that is no whole number from 0 on")
        tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
        for token, i in vocabulary.items():
            tokens[i] = token
        merges = tuple(_pair(line) for line in model["merges"])
        if spaced is None:
            spelling: Spelling = Letters(composed)
            patterns = tuple(_cuts(told.get("pre_tokenizer") or {}))
        else:
            spelling, patterns = spaced[0], spaced[1] or cuts([t for t in tokens if t not in marks])
            if not model.get("byte_fallback"):
                raise ValueError("no byte_fallback, so that some characters have no token")
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as why:
        raise BadInput(f"{path} is no BPE that is read: {brief(why, 100)}; use another model") from why
    config = folder / "tokenizer_config.json"
    named = read_json(config).get("eos_token") if config.is_file() else None
    name = named.get("content") if isinstance(named, dict) else named
    end = next((marks[each] for each in (str(name), "<|endoftext|>", "</s>") if each in marks), 0)
    whole = bool(model.get("ignore_merges"))
    return Tokenizer(tuple(tokens), merges, patterns, marks, end, whole, spelling)


def spaces(normalizer: Any, cutter: Any) -> tuple[Spaces, tuple[str, ...]] | None:
    """How SentencePiece's spelling is told in a tokenizer.json, with patterns if words are cut; None: it is not."""
    steps = list((normalizer or {}).get("normalizers", [normalizer] if normalizer else []))
    kinds = [step.get("type") for step in steps]
    cutter = cutter or {}
    if not steps and cutter.get("type") != "Metaspace":
        return None
    if not steps:
        if cutter.get("replacement", SPACE) != SPACE:
            raise ValueError(f"spaces are written {brief(cutter['replacement'], 10)!r}")
        scheme = cutter.get("prepend_scheme", "always" if cutter.get("add_prefix_space", True) else "never")
        first: Literal["missing", "never"] = "never" if scheme == "never" else "missing"
        return Spaces(first), (EACH,) if cutter.get("split", True) else ()
    plain = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if kinds not in (["Prepend", "Replace"], ["Replace"]) or steps[-1] != plain:
        raise ValueError(f"it normalises texts by {brief(', '.join(map(str, kinds)), 60)}")
    if len(steps) == 2 and steps[0].get("prepend") != SPACE:
        raise ValueError(f"it puts {brief(steps[0].get('prepend'), 10)!r} before texts")
    if cutter and (cutter.get("type"), cutter.get("pattern")) != ("Split", {"String": " "}):
        raise ValueError(f"a pre_tokenizer {brief(cutter.get('type'), 30)!r} beside a normalizer")
    return Spaces("always" if len(steps) == 2 else "never"), ()  # spaces are gone where words would be cut at them


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
    raw = read_limited(path, MOST, REMEDY, expansion=8)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as why:
        raise BadInput(f"{path} cannot be read: {brief(why, 120)}; {REMEDY}") from why
    if not isinstance(found, dict):
        raise BadInput(f"{path} holds no object; {REMEDY}")
    return found
