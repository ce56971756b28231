"""Text of one's own as token ids of a language model: to be continued, or answered.

Forms: lines of json (also .jsonl.gz) with `text`, or with `prompt` and `response`, of which only
the response is learnt, by these names or as Alpaca and Dolly have them; a folder of .txt files, one
a client.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path, read_text_limited
from flrce.data.readers.columns import read_json_objects
from flrce.data.sources import IGNORED_TARGET, Source
from flrce.data.text_features import load_tokenizer
from flrce.errors import BadInput
from flrce.formats.tokenizers import Tokenizer

log = logging.getLogger("flrce")
TokenIds = NDArray[np.int64]
MAX_FILE_BYTES = 4 << 30  # bytes of one file, unpacked
# keys that name a line's client, unless told
CLIENT_KEYS = (("client",), ("group",), ("play", "role"))
TEXT_REMEDY = (
    'give json lines with "text", or with "prompt" and "response", or a folder of .txt files'
)
FORBIDDEN_IN_NAMES = re.compile(r"[^\w.:@+-]+")  # in clients' names in messages
MAX_NAME_CHARACTERS = 64
# a prompt by its keys; Alpaca and Dolly have more of it under CONTEXT_KEYS
PROMPT_KEYS, CONTEXT_KEYS = ("prompt", "instruction"), ("input", "context")
RESPONSE_KEYS = ("response", "output")
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"  # ChatML's marks


@dataclass(frozen=True)
class TextSample:
    """A window of ids and what is learnt of it, whose it is, and whether it is for judging."""

    owner: str  # "" where nothing names it
    held: bool
    x: TokenIds  # (length,)
    y: TokenIds  # (length,)


def from_text(
    path: Path | str,
    tokenizer: str,
    length: int = 128,
    most: int = 0,
    least: int = 0,
    name: str = "",
    **how: Any,
) -> Source:
    """Windows of `length` ids with the next ids, by client: the first `most` of each (0: all).

    `group` names the key of a line's client, or several with commas between them; `test` the key
    that marks lines for judging.
    """
    keys = (how.pop("group", ""), how.pop("test", ""))
    if how:
        raise BadInput(f"data.{min(how)} is not for text; drop it, or drop data.tokenizer")
    path, (tokens, ids) = Path(path), load_tokenizer(tokenizer)
    if length < 2:
        raise BadInput(f"data.length = {length}: a window needs 2 ids at least")
    if path.is_dir():
        samples = _iter_folder_samples(path, tokens, length)
    else:
        samples = _iter_json_samples(path, tokens, length, keys)
    taken = list(_take_first(samples, most))
    if not taken:
        raise BadInput(f"{format_path(path)} holds no text; {TEXT_REMEDY}")
    counts = Counter(sample.owner for sample in taken)
    kept = [sample for sample in taken if counts[sample.owner] >= least]
    if not kept:
        raise BadInput(
            f"data.least = {least}: no client of {format_path(path)} has so many windows; lower it"
        )
    return _build_source(kept, name or path.name.split(".")[0], ids)


class MissingCharacters:
    """Characters without a token, such as control characters: each is reported where it is first.

    Tokenizers leave them out.
    """

    def __init__(self, tokens: Tokenizer) -> None:
        self.tokens = tokens
        self.seen: set[str] = set()

    def warn_once(self, text: str, where: str) -> None:
        for character in sorted(set(text) - self.seen):
            self.seen.add(character)
            if not character.isspace() and not self.tokens.encode(character):
                log.warning(
                    "%s: the tokenizer has no token for %a (U+%04X); it is left out of all texts",
                    where,
                    character,
                    ord(character),
                )


def _take_first(samples: Iterable[TextSample], most: int) -> Iterator[TextSample]:
    """The first `most` samples of each client; 0: all."""
    taken: Counter[str] = Counter()
    for sample in samples:
        if not most or taken[sample.owner] < most:
            taken[sample.owner] += 1
            yield sample


def _build_source(samples: Sequence[TextSample], name: str, ids: int) -> Source:
    held = np.array([sample.held for sample in samples])
    x, y = (np.stack([getattr(sample, name) for sample in samples]) for name in "xy")
    source = Source(name, x, y, (), kind="tokens", held=held if held.any() else None, ids=ids)
    known = list(dict.fromkeys(sample.owner for sample in samples))
    if known == [""]:
        return source
    place = {owner: i for i, owner in enumerate(known)}
    group = np.array([place[sample.owner] for sample in samples], np.int64)
    return replace(source, group=group, groups=make_wire_names(known))


def make_wire_names(owners: Sequence[str]) -> tuple[str, ...]:
    """Clients' names as messages allow them; equal results are told apart by a digest."""
    short = [FORBIDDEN_IN_NAMES.sub("_", owner)[:MAX_NAME_CHARACTERS] for owner in owners]
    count, names = Counter(short), []
    for name, owner in zip(short, owners, strict=True):
        if count[name] > 1 and name != owner:
            digest = hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()
            name = f"{name[: MAX_NAME_CHARACTERS - 9]}-{digest[:8]}"
        names.append(name)
    return tuple(names)


def split_windows(ids: Sequence[int], length: int, end: int) -> Iterator[tuple[TokenIds, TokenIds]]:
    """Parts of a text without overlap. The last is padded, or dropped if it is under a quarter."""
    for start in range(0, len(ids) - 1, length):
        part = ids[start : start + length + 1]
        if start and 4 * (len(part) - 1) < length:
            return
        yield pad_window(part[:-1], part[1:], length, end)


def encode_dialogue(
    tokens: Tokenizer, prompt: str, response: str, length: int
) -> tuple[TokenIds, TokenIds, bool]:
    """A prompt with its response, of which the response is learnt; and whether both fit in.

    Turns bear ChatML's marks where the model knows them. Where both are too long, the response
    keeps its first ids, up to half of the window, and the prompt its last.
    """
    marks = tokens.specials
    if TURN_START in marks and TURN_END in marks:
        start, end = marks[TURN_START], marks[TURN_END]
        asked = [start, *tokens.encode("user\n" + prompt), end, *tokens.encode("\n")]
        asked += [start, *tokens.encode("assistant\n")]
        answer = [*tokens.encode(response), end]
    else:
        asked, answer = tokens.encode(prompt + "\n"), [*tokens.encode(response), tokens.end]
    whole = len(asked) + len(answer) <= length + 1
    answer = answer[: max(length + 1 - len(asked), (length + 1) // 2)]
    asked = asked[max(len(asked) + len(answer) - length - 1, 0) :]
    ids = [*asked, *answer]
    learnt = [*[IGNORED_TARGET] * (len(asked) - 1), *answer][-len(ids) + 1 :]
    return (*pad_window(ids[:-1], learnt, length, tokens.end), whole)


def pad_window(
    x: Sequence[int], y: Sequence[int], length: int, end: int
) -> tuple[TokenIds, TokenIds]:
    """x and y at full length; what was added does not count."""
    rest = length - len(x)
    padded = [*x, *[end] * rest], [*y, *[IGNORED_TARGET] * rest]
    return np.array(padded[0], np.int64), np.array(padded[1], np.int64)


def _iter_folder_samples(path: Path, tokens: Tokenizer, length: int) -> Iterator[TextSample]:
    """The windows of each .txt file, which is one client's."""
    missing = MissingCharacters(tokens)
    for file in sorted(path.glob("*.txt")):
        text = read_text_limited(file, MAX_FILE_BYTES, TEXT_REMEDY, expansion=8)
        for number, line in enumerate(text.split("\n"), 1):
            missing.warn_once(line, f"{format_path(file)} line {number}, client {file.stem!r}")
        ids = tokens.encode(text.replace("\r\n", "\n"))
        for x, y in split_windows(ids, length, tokens.end):
            yield TextSample(file.stem, False, x, y)


def _iter_json_samples(
    path: Path, tokens: Tokenizer, length: int, keys: tuple[str, str]
) -> Iterator[TextSample]:
    """The samples of each line of json; `keys` name its client and whether it is for judging."""
    empty, cut, named = 0, 0, None
    missing = MissingCharacters(tokens)
    for number, row in read_json_objects(path, MAX_FILE_BYTES, TEXT_REMEDY):
        where = f"{format_path(path)} line {number}"
        owner, held = _get_client(row, keys[0], where), _is_test_row(row, keys[1], where)
        if named not in (None, bool(owner)):
            what = "names no client" if named else "names its client"
            raise BadInput(f"{where} {what}, unlike those before it; name all, or none")
        named = bool(owner)
        whose = f"{where}, client {owner!r}" if owner else where
        if (dialogue := _find_dialogue(row, where)) is not None:
            if not dialogue[1]:
                empty += 1
                continue
            missing.warn_once("".join(dialogue), whose)
            x, y, whole = encode_dialogue(tokens, *dialogue, length)
            cut += not whole
            yield TextSample(owner, held, x, y)
        elif "text" in row:
            text = _get_text(row, "text", where)
            missing.warn_once(text, whose)
            ids = tokens.encode(text)
            for x, y in split_windows(ids, length, tokens.end):
                yield TextSample(owner, held, x, y)
        else:
            raise BadInput(f'{where} has neither "text" nor "prompt" and "response"; {TEXT_REMEDY}')
    file = format_path(path)
    if empty:
        log.warning("%s: %d lines with an empty response are left out", file, empty)
    if cut:
        text = "%s: %d lines do not fit into %d ids: prompts lose their beginning, responses"
        log.warning(f"{text} their end; raise data.length", file, cut, length)


def _find_dialogue(row: Mapping[str, Any], where: str) -> tuple[str, str] | None:
    """The prompt and the response of a line; None where it has not both."""
    asked = next((key for key in PROMPT_KEYS if key in row), "")
    answered = next((key for key in RESPONSE_KEYS if key in row), "")
    if not asked or not answered:
        return None
    keys = CONTEXT_KEYS if asked == "instruction" else ()
    context = [_get_text(row, key, where) for key in keys if key in row]
    prompt = "\n".join(filter(None, (_get_text(row, asked, where), *context)))
    return prompt, _get_text(row, answered, where)


def _get_client(row: Mapping[str, Any], group: str, where: str) -> str:
    """The client of a line; "" where nothing says so."""
    if group:
        keys = tuple(key.strip() for key in group.split(","))
    else:
        keys = next((some for some in CLIENT_KEYS if all(key in row for key in some)), ())
    for key in keys:
        if not isinstance(row.get(key), str | int):
            raise BadInput(
                f"{where} has no {key!r} that names its client; set data.group, or add it"
            )
    return ":".join(str(row[key]) for key in keys)


def _is_test_row(row: Mapping[str, Any], test: str, where: str) -> bool:
    if not test:
        return False
    if row.get(test) not in (True, False, 0, 1, "train", "test"):
        raise BadInput(f"{where}: {test!r} must be true or false, or train or test")
    return row[test] in (True, 1, "test")


def _get_text(row: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(row[key], str):
        raise BadInput(f"{where}: {key!r} is no text; {TEXT_REMEDY}")
    return str(row[key])
