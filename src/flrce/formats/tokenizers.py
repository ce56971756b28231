"""Tokenizers as the files of language models hold them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flrce.core.files import read_limited
from flrce.errors import BadInput, format_one_line
from flrce.formats.bpe import GPT2_PATTERN, TOKENIZER_PATTERNS, Tokenizer
from flrce.formats.spelling import (
    SPACE_MARK,
    ByteLevelSpelling,
    MetaspaceSpelling,
    TokenSpelling,
    make_split_patterns,
)

FILE_REMEDY = "give a GGUF file, or a folder with config.json, *.safetensors and tokenizer.json"
MAX_FILE_BYTES = 64 << 20  # bytes of a config or tokenizer file: twice the largest in use
MAX_TOKEN_IDS = 1 << 24  # far above any vocabulary
SPACE_WORD_PATTERN = (
    f"{SPACE_MARK}[^{SPACE_MARK}]*|[^{SPACE_MARK}]+"  # a word begins with every space
)
NORMAL, UNKNOWN, MARKS = (
    1,
    2,
    (3, 4),
)  # kinds of tokens in a GGUF file and in SentencePiece's; 6 is a byte
NFC_NORMALIZERS = (
    {"type": "NFC"},
    {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
)  # a normalizer such as Qwen2's
WHOLE_WORD_TOKENIZERS = (
    "llama-bpe",
    "llama3",
)  # kinds that take a word as it stands before they merge


def load_gguf_tokenizer(path: Path, values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer among a GGUF file's values."""
    kind, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "default")
    if kind == "llama":
        return _load_gguf_sentencepiece(path, values)
    if kind != "gpt2" or pre not in TOKENIZER_PATTERNS:
        what, known = (
            f"{format_one_line(kind, 20)!r}, {format_one_line(pre, 20)!r}",
            ", ".join(sorted(TOKENIZER_PATTERNS)),
        )
        raise BadInput(
            f"{path} has a tokenizer {what}; read are llama's, and gpt2's of the kinds {known}"
        )
    try:
        tokens = tuple(values["tokenizer.ggml.tokens"])
        kinds = values.get("tokenizer.ggml.token_type", [1] * len(tokens))
        merges = tuple(_parse_merge(line) for line in values["tokenizer.ggml.merges"])
        end = int(values["tokenizer.ggml.eos_token_id"])
    except (KeyError, TypeError, ValueError) as why:
        raise BadInput(
            f"{path} has no complete tokenizer: {format_one_line(why, 80)}; download it again"
        ) from why
    if not 0 <= end < len(tokens):
        raise BadInput(
            f"{path} ends texts with id {end}, of {len(tokens)} tokens; download it again"
        )
    marks = {
        token: i for i, (token, of) in enumerate(zip(tokens, kinds, strict=False)) if of in MARKS
    }
    return Tokenizer(
        tokens, merges, TOKENIZER_PATTERNS[pre], marks, end, whole=pre in WHOLE_WORD_TOKENIZERS
    )


def _load_gguf_sentencepiece(path: Path, values: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece's BPE in a GGUF file."""
    first: Literal["always", "never"] = (
        "always" if values.get("tokenizer.ggml.add_space_prefix", True) else "never"
    )
    tokens, kinds, scores = (
        values.get(f"tokenizer.ggml.{key}", ()) for key in ("tokens", "token_type", "scores")
    )
    try:
        return make_sentencepiece_tokenizer(
            tokens, kinds, scores, int(values["tokenizer.ggml.eos_token_id"]), first
        )
    except (KeyError, TypeError, ValueError) as why:
        raise BadInput(
            f"{path} has no complete tokenizer: {format_one_line(why, 80)}; download it again"
        ) from why


def make_sentencepiece_tokenizer(
    tokens: Sequence[str],
    kinds: Sequence[int],
    scores: Sequence[float],
    end: int,
    first: Literal["always", "never"],
) -> Tokenizer:
    """SentencePiece's BPE: no merges, but a kind and a score for each token."""
    if not len(tokens) == len(kinds) == len(scores) or not 0 <= end < len(tokens):
        raise ValueError(
            f"{len(tokens)} tokens, {len(kinds)} kinds, {len(scores)} scores, {end} for the end"
        )
    tokens = tuple(map(str, tokens))
    ranked = {
        token: float(score)
        for token, of, score in zip(tokens, kinds, scores, strict=True)
        if of == NORMAL
    }
    marks = {
        token: i
        for i, (token, of) in enumerate(zip(tokens, kinds, strict=True))
        if of in (UNKNOWN, *MARKS)
    }
    return Tokenizer(
        tokens,
        (),
        make_split_patterns(list(ranked)),
        marks,
        end,
        spelling=MetaspaceSpelling(first),
        scores=ranked,
    )


def _parse_merge(line: Any) -> tuple[str, str]:
    """A merge, written "a b" or ["a", "b"]."""
    parts = line.split(" ") if isinstance(line, str) else list(line)
    if len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
        raise ValueError(f"merge {format_one_line(line, 30)!r}")
    return parts[0], parts[1]


def load_json_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a HuggingFace folder."""
    path = folder / "tokenizer.json"
    told = read_json(path)
    model = told.get("model", {})
    try:
        if model.get("type", "BPE") != "BPE":
            raise ValueError(f"a model {format_one_line(model.get('type'), 30)!r}, read is BPE")
        composed = told.get("normalizer") in NFC_NORMALIZERS
        spaced = (
            None if composed else parse_metaspace(told.get("normalizer"), told.get("pre_tokenizer"))
        )
        vocabulary = dict(model["vocab"])
        marks = {each["content"]: int(each["id"]) for each in told.get("added_tokens", ())}
        vocabulary |= marks
        if not all(type(i) is int and 0 <= i < MAX_TOKEN_IDS for i in vocabulary.values()):
            raise ValueError("an id that is no whole number from 0 on")
        tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
        for token, i in vocabulary.items():
            tokens[i] = token
        merges = tuple(_parse_merge(line) for line in model["merges"])
        if spaced is None:
            spelling: TokenSpelling = ByteLevelSpelling(composed)
            patterns = tuple(_parse_split_patterns(told.get("pre_tokenizer") or {}))
        else:
            spelling, patterns = (
                spaced[0],
                spaced[1] or make_split_patterns([t for t in tokens if t not in marks]),
            )
            if not model.get("byte_fallback"):
                raise ValueError("no byte_fallback, so that some characters have no token")
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as why:
        raise BadInput(
            f"{path} is no BPE that is read: {format_one_line(why, 100)}; use another model"
        ) from why
    config = folder / "tokenizer_config.json"
    named = read_json(config).get("eos_token") if config.is_file() else None
    name = named.get("content") if isinstance(named, dict) else named
    end = next((marks[each] for each in (str(name), "<|endoftext|>", "</s>") if each in marks), 0)
    whole = bool(model.get("ignore_merges"))
    return Tokenizer(tuple(tokens), merges, patterns, marks, end, whole, spelling)


def parse_metaspace(
    normalizer: Any, cutter: Any
) -> tuple[MetaspaceSpelling, tuple[str, ...]] | None:
    """How SentencePiece's spelling is told in a tokenizer.json, with patterns if words are cut;
    None: it is not.
    """
    steps = list((normalizer or {}).get("normalizers", [normalizer] if normalizer else []))
    kinds = [step.get("type") for step in steps]
    cutter = cutter or {}
    if not steps and cutter.get("type") != "Metaspace":
        return None
    if not steps:
        if cutter.get("replacement", SPACE_MARK) != SPACE_MARK:
            raise ValueError(f"spaces are written {format_one_line(cutter['replacement'], 10)!r}")
        scheme = cutter.get(
            "prepend_scheme", "always" if cutter.get("add_prefix_space", True) else "never"
        )
        first: Literal["missing", "never"] = "never" if scheme == "never" else "missing"
        return MetaspaceSpelling(first), (SPACE_WORD_PATTERN,) if cutter.get("split", True) else ()
    plain = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    if kinds not in (["Prepend", "Replace"], ["Replace"]) or steps[-1] != plain:
        raise ValueError(
            f"it normalises texts by {format_one_line(', '.join(map(str, kinds)), 60)}"
        )
    if len(steps) == 2 and steps[0].get("prepend") != SPACE_MARK:
        raise ValueError(f"it puts {format_one_line(steps[0].get('prepend'), 10)!r} before texts")
    if cutter and (cutter.get("type"), cutter.get("pattern")) != ("Split", {"String": " "}):
        raise ValueError(
            f"a pre_tokenizer {format_one_line(cutter.get('type'), 30)!r} beside a normalizer"
        )
    return MetaspaceSpelling(
        "always" if len(steps) == 2 else "never"
    ), ()  # spaces are gone where words would be cut at them


def _parse_split_patterns(step: Mapping[str, Any]) -> list[str]:
    """The patterns that a tokenizer.json cuts words by."""
    kind = step.get("type")
    if kind == "Sequence":
        return [
            pattern for each in step["pretokenizers"] for pattern in _parse_split_patterns(each)
        ]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return [GPT2_PATTERN] if step.get("use_regex", True) else []
    if kind == "Digits":
        return [r"\p{N}" if step.get("individual_digits") else r"\p{N}+"]
    if (
        kind == "Split"
        and step.get("behavior") == "Isolated"
        and "Regex" in step.get("pattern", {})
    ):
        return [str(step["pattern"]["Regex"])]
    raise ValueError(f"a pre_tokenizer {format_one_line(kind, 30)!r} that is not known")


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file, or BadInput."""
    raw = read_limited(path, MAX_FILE_BYTES, FILE_REMEDY, expansion=8)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as why:
        raise BadInput(
            f"{path} cannot be read: {format_one_line(why, 120)}; {FILE_REMEDY}"
        ) from why
    if not isinstance(found, dict):
        raise BadInput(f"{path} holds no object; {FILE_REMEDY}")
    return found
