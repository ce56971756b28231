"""Tokenizers of language models: tokenizer.json, tokenizer.model, or the values of a GGUF file.

The libraries `tokenizers` and `sentencepiece` do the work. Both are given the vocabulary without
its special tokens, so that text that is written like a special token stays text.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flrce.core.files import read_limited
from flrce.core.host import choose_start_method
from flrce.errors import BadInput, format_one_line
from flrce.formats.libraries import import_library, translate_errors

FILE_REMEDY = "give a GGUF file, or a folder with config.json, *.safetensors and tokenizer.json"
MAX_FILE_BYTES = 64 << 20  # bytes of a config or tokenizer file: twice the largest in use
MAX_TOKEN_IDS = 1 << 24  # far above any vocabulary
PROBE_CHARACTERS = 1000  # of a text that a folder's patterns are tried on
PROBE_CPU_SECONDS = 2  # that all such texts may take; common patterns take less than a tenth
PROBED_LETTERS = " aA0!\n\t\u00e9\u4e2d"
PROBED_PROSE = "The 12 cats, don't run 3.5 miles!\n"
#: kinds of tokens in a GGUF file and in SentencePiece's
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
#: how a GGUF file's gpt2 tokenizer cuts words, by the names that the file uses
GGUF_PRE_TOKENIZERS = {
    "default": "gpt2",
    "gpt-2": "gpt2",
    "smollm": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
}
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text <-> token ids of one model."""

    tokens: tuple[str, ...]  # id -> token, as the file has it
    encode_text: Callable[[str], list[int]]
    decode_ids: Callable[[list[int]], str]
    specials: Mapping[str, int] = field(default_factory=dict)  # tokens that text never becomes
    end: int = 0  # the id that ends a text

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        # a lone surrogate, which json may hold, has no UTF-8
        return self.encode_text(text.encode("utf-8", "replace").decode())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids without special tokens; bytes that are no UTF-8 are replaced."""
        specials = set(self.specials.values())
        return self.decode_ids([int(i) for i in ids if i not in specials])


def load_json_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a HuggingFace folder."""
    path = folder / "tokenizer.json"
    content = read_json(path)
    with translate_errors(f"{path} is no usable tokenizer"):
        specials = {
            str(token["content"]): int(token["id"]) for token in content.get("added_tokens", ())
        }
        plain = {**content, "added_tokens": [], "post_processor": None}
        plain |= {"truncation": None, "padding": None}
        library = import_library("tokenizers").Tokenizer.from_str(json.dumps(plain))
        tokens = list_tokens({**library.get_vocab(), **specials})
        _refuse_slow_patterns(library, list(_find_patterns(plain)), path)
        return _wrap_tokenizer(library, tokens, specials, _find_end_token(folder, specials))


def _find_patterns(content: Any) -> Iterator[str]:
    """The regular expressions of a tokenizer.json."""
    inner = content.values() if isinstance(content, dict) else content
    for value in inner if isinstance(content, dict | list) else ():
        yield from _find_patterns(value)
    if isinstance(content, dict) and isinstance(content.get("Regex"), str):
        yield content["Regex"]


def _refuse_slow_patterns(library: Any, patterns: Sequence[str], path: Path) -> None:
    """BadInput for patterns that take cubic time or more: they never end on a long word, and
    nothing can interrupt the library.

    Texts of one letter, and prose, are tried in a child whose processor time is limited.
    """
    if not patterns or choose_start_method() != "fork":
        return
    letters = dict.fromkeys(PROBED_LETTERS + "".join(patterns))
    child = os.fork()
    if not child:
        _encode_probes(library, list(letters)[:200])
    if os.waitpid(child, 0)[1]:
        raise BadInput(
            f"{path}: its patterns take more than {PROBE_CPU_SECONDS} s for texts of"
            f" {PROBE_CHARACTERS} characters; use another model"
        )


def _encode_probes(library: Any, letters: Sequence[str]) -> None:
    """Encode the texts, and end this process: by a signal where they take too long."""
    import resource  # of systems that can fork

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library reports panics there
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (PROBE_CPU_SECONDS, PROBE_CPU_SECONDS + 1))
    prose = PROBED_PROSE * (PROBE_CHARACTERS // len(PROBED_PROSE))
    runs = [letter * PROBE_CHARACTERS for letter in letters]
    for text in (prose, *runs, *(f"{run}\0" for run in runs)):
        try:
            library.encode(text, add_special_tokens=False)
        except BaseException as why:  # others are said where a text of the user's is encoded
            os._exit(1 if "retry-limit" in str(why) else 0)
    os._exit(0)


def _find_end_token(folder: Path, specials: Mapping[str, int]) -> int:
    """The id that ends a text: by tokenizer_config.json, else by its usual names."""
    config = folder / "tokenizer_config.json"
    named = read_json(config).get("eos_token") if config.is_file() else None
    name = named.get("content") if isinstance(named, dict) else named
    candidates = (str(name), "<|endoftext|>", "</s>")
    return next((specials[token] for token in candidates if token in specials), 0)


def list_tokens(vocabulary: Mapping[str, int]) -> tuple[str, ...]:
    """id -> token; ids without a token are empty."""
    if not all(0 <= i < MAX_TOKEN_IDS for i in vocabulary.values()):
        raise ValueError(f"an id outside 0..{MAX_TOKEN_IDS - 1}")
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, i in vocabulary.items():
        tokens[i] = token
    return tuple(tokens)


def _wrap_tokenizer(
    library: Any, tokens: tuple[str, ...], specials: Mapping[str, int], end: int
) -> Tokenizer:
    """Around a tokenizers.Tokenizer."""

    def encode_text(text: str) -> list[int]:
        with translate_errors("the tokenizer cannot encode a text", "use another model"):
            ids: list[int] = library.encode(text, add_special_tokens=False).ids
            return ids

    def decode_ids(ids: list[int]) -> str:
        return str(library.decode(ids, skip_special_tokens=False))

    return Tokenizer(tokens, encode_text, decode_ids, specials, end)


def load_gguf_tokenizer(path: Path, values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer among a GGUF file's values: SentencePiece's ("llama") or bytes ("gpt2")."""
    kind, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "default")
    if kind != "llama" and (kind != "gpt2" or pre not in GGUF_PRE_TOKENIZERS):
        known = ", ".join(sorted(GGUF_PRE_TOKENIZERS))
        raise BadInput(
            f"{path} has a tokenizer {format_one_line(kind, 20)!r}, {format_one_line(pre, 20)!r};"
            f" supported are llama, and gpt2 of the kinds {known}"
        )
    with translate_errors(f"{path} has no complete tokenizer"):
        tokens = tuple(map(str, values["tokenizer.ggml.tokens"]))
        kinds = values.get("tokenizer.ggml.token_type", [1] * len(tokens))
        end = int(values["tokenizer.ggml.eos_token_id"])
        if len(kinds) != len(tokens) or not 0 <= end < len(tokens):
            raise ValueError(f"{len(tokens)} tokens, {len(kinds)} kinds, {end} for the end")
        if kind == "gpt2":
            return _build_byte_level_bpe(tokens, kinds, values["tokenizer.ggml.merges"], end, pre)
        scores = values.get("tokenizer.ggml.scores", ())
        if len(scores) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens, {len(scores)} scores")
        prefix = bool(values.get("tokenizer.ggml.add_space_prefix", True))
        return _build_sentencepiece_bpe(tokens, kinds, scores, end, prefix)


def _build_byte_level_bpe(
    tokens: tuple[str, ...], kinds: Sequence[int], merges: Sequence[str], end: int, pre: str
) -> Tokenizer:
    """GPT-2's BPE over bytes."""
    lib = import_library("tokenizers")
    words = lib.pre_tokenizers
    rule = GGUF_PRE_TOKENIZERS[pre]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise ValueError("a merge that is no pair")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = lib.Tokenizer(lib.models.BPE(vocabulary, pairs, ignore_merges=rule == "llama3"))
    steps = [words.ByteLevel(add_prefix_space=False, use_regex=rule != "llama3")]
    if rule == "digits":
        steps.insert(0, words.Digits(individual_digits=True))
    elif rule == "llama3":
        steps.insert(0, words.Split(lib.Regex(LLAMA3_PATTERN), "isolated"))
    library.pre_tokenizer = words.Sequence(steps)
    library.decoder = lib.decoders.ByteLevel()
    marks = (CONTROL, USER_DEFINED)
    specials = {token: i for i, token in enumerate(tokens) if kinds[i] in marks}
    return _wrap_tokenizer(library, tokens, specials, end)


def _build_sentencepiece_bpe(
    tokens: tuple[str, ...], kinds: Sequence[int], scores: Sequence[float], end: int, prefix: bool
) -> Tokenizer:
    """SentencePiece's BPE from a kind and a score for each token."""
    model = import_library("transformers.utils.sentencepiece_model_pb2_new").ModelProto()
    for token, kind, score in zip(tokens, kinds, scores, strict=True):
        model.pieces.add(piece=token, type=int(kind), score=float(score))
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.eos_id = end
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    return _wrap_sentencepiece(model)


def load_sentencepiece_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.model file."""
    raw = read_limited(path, MAX_FILE_BYTES, "use another model", expansion=8)
    model = import_library("transformers.utils.sentencepiece_model_pb2_new").ModelProto()
    with translate_errors(f"{path} is no usable SentencePiece model", "use another model"):
        model.ParseFromString(raw)
        if not model.pieces:
            raise ValueError("it has no pieces")
        return _wrap_sentencepiece(model)


def _wrap_sentencepiece(model: Any) -> Tokenizer:
    """Around a SentencePiece ModelProto."""
    tokens = tuple(piece.piece for piece in model.pieces)
    marks = (UNKNOWN, CONTROL, USER_DEFINED)
    specials = {token: i for i, token in enumerate(tokens) if model.pieces[i].type in marks}
    for piece in model.pieces:
        if piece.type == USER_DEFINED:  # text would become it
            piece.type = CONTROL
    library = import_library("sentencepiece").SentencePieceProcessor(
        model_proto=model.SerializeToString()
    )
    return Tokenizer(tokens, library.encode, library.decode, specials, model.trainer_spec.eos_id)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file, or BadInput."""
    raw = read_limited(path, MAX_FILE_BYTES, FILE_REMEDY, expansion=8)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as why:
        raise BadInput(
            f"{path} cannot be read: {format_one_line(why, 120)}; {FILE_REMEDY}"
        ) from why
    if not isinstance(content, dict):
        raise BadInput(f"{path} holds no object; {FILE_REMEDY}")
    return content
