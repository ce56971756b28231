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
# what a client's name may not have on the wire, and how long it is
ODD, LONGEST = (re.compile(r"[^\w.:@+-]+"), 64)
# a question by its keys; Alpaca and Dolly have more to it under MORE
PROMPT_KEYS = ("prompt", "instruction")
MORE, ANSWERS = ("input", "context"), ("response", "output")
START, STOP = "<|im_start|>", "<|im_end|>"  # ChatML's marks of a turn


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
    """Windows of `length` ids and the id after each, by client: its first `most` (0: all), if it
    has `least` or more.

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
    made = Source(
        name,
        np.stack([sample.x for sample in samples]),
        np.stack([sample.y for sample in samples]),
        (),
        kind="tokens",
        held=held if held.any() else None,
        ids=ids,
    )
    known = list(dict.fromkeys(sample.owner for sample in samples))
    if known == [""]:
        return made
    place = {owner: i for i, owner in enumerate(known)}
    group = np.array([place[sample.owner] for sample in samples], np.int64)
    return replace(made, group=group, groups=make_wire_names(known))


def make_wire_names(owners: Sequence[str]) -> tuple[str, ...]:
    """Clients' names as they may be on the wire; two that would become one are told apart by a
    digest.
    """
    short = [ODD.sub("_", owner)[:LONGEST] for owner in owners]
    count = Counter(short)
    return tuple(
        name if count[name] == 1 or name == owner else f"{name[: LONGEST - 9]}-{_hash_name(owner)}"
        for name, owner in zip(short, owners, strict=True)
    )


def _hash_name(owner: str) -> str:
    return hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def split_windows(ids: Sequence[int], length: int, end: int) -> Iterator[tuple[TokenIds, TokenIds]]:
    """Stretches of a text without overlap; the last is filled up with `end`, and left out if it is
    under a quarter.
    """
    for start in range(0, len(ids) - 1, length):
        part = ids[start : start + length + 1]
        if start and 4 * (len(part) - 1) < length:
            return
        yield pad_window(part[:-1], part[1:], length, end)


def encode_dialogue(
    tokens: Tokenizer, prompt: str, response: str, length: int
) -> tuple[TokenIds, TokenIds, bool]:
    """A prompt with its response, and whether all of both is there; what is learnt is the response
    and its end.

    Turns bear ChatML's marks where the model knows them. Where both are too long, the response
    keeps its first ids, up to half of the window, and the prompt its last.
    """
    marks = tokens.specials
    if START in marks and STOP in marks:
        asked = [marks[START], *tokens.encode("user\n" + prompt), marks[STOP], *tokens.encode("\n")]
        asked += [marks[START], *tokens.encode("assistant\n")]
        told = [*tokens.encode(response), marks[STOP]]
    else:
        asked, told = tokens.encode(prompt + "\n"), [*tokens.encode(response), tokens.end]
    whole = len(asked) + len(told) <= length + 1
    told = told[: max(length + 1 - len(asked), (length + 1) // 2)]
    asked = asked[max(len(asked) + len(told) - length - 1, 0) :]
    ids = [*asked, *told]
    x, y = pad_window(
        ids[:-1], [*[IGNORED_TARGET] * (len(asked) - 1), *told][-len(ids) + 1 :], length, tokens.end
    )
    return x, y, whole


def pad_window(
    x: Sequence[int], y: Sequence[int], length: int, end: int
) -> tuple[TokenIds, TokenIds]:
    """x and y at full length; what was added does not count."""
    rest = length - len(x)
    return np.array([*x, *[end] * rest], np.int64), np.array(
        [*y, *[IGNORED_TARGET] * rest], np.int64
    )


def _iter_folder_samples(path: Path, tokens: Tokenizer, length: int) -> Iterator[TextSample]:
    """The windows of each .txt file, which is one client's."""
    missing = MissingCharacters(tokens)
    for file in sorted(path.glob("*.txt")):
        text = read_text_limited(file, MAX_FILE_BYTES, TEXT_REMEDY, expansion=8)
        missing.warn_once(text, format_path(file))
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
        if (dialogue := _find_dialogue(row, where)) is not None:
            if not dialogue[1]:
                empty += 1
                continue
            missing.warn_once(dialogue[1], where)
            x, y, whole = encode_dialogue(tokens, *dialogue, length)
            cut += not whole
            yield TextSample(owner, held, x, y)
        elif "text" in row:
            text = _get_text(row, "text", where)
            missing.warn_once(text, where)
            ids = tokens.encode(text)
            for x, y in split_windows(ids, length, tokens.end):
                yield TextSample(owner, held, x, y)
        else:
            raise BadInput(f'{where} has neither "text" nor "prompt" and "response"; {TEXT_REMEDY}')
    if empty:
        told = "%s: %d lines with an empty response are left out: there is nothing to learn"
        log.warning(told, format_path(path), empty)
    if cut:
        told = "%s: %d lines do not fit into %d ids: prompts lose their beginning, responses"
        log.warning(f"{told} their end; raise data.length", format_path(path), cut, length)


def _find_dialogue(row: Mapping[str, Any], where: str) -> tuple[str, str] | None:
    """The prompt and the response of a line; None where it has not both."""
    asked, answered = (
        next((key for key in keys if key in row), "") for keys in (PROMPT_KEYS, ANSWERS)
    )
    if not asked or not answered:
        return None
    more = [_get_text(row, key, where) for key in MORE if key in row and asked == "instruction"]
    prompt = "\n".join(filter(None, (_get_text(row, asked, where), *more)))
    return prompt, _get_text(row, answered, where)


def _get_client(row: Mapping[str, Any], group: str, where: str) -> str:
    """The client of a line; "" where nothing says so."""
    keys = (
        tuple(key.strip() for key in group.split(","))
        if group
        else next((some for some in CLIENT_KEYS if all(key in row for key in some)), ())
    )
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
