"""Text of one's own as token ids of a language model: to be continued, or answered.

Forms: lines of json (also .jsonl.gz) with `text`, or with `prompt` and `response`, of which only
the response is learnt, by these names or as Alpaca and Dolly have them; a folder of .txt files, one
a client.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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


def from_text(
    path: Path | str,
    tokenizer: str,
    length: int = 128,
    most: int = 0,
    least: int = 0,
    group: str = "",
    test: str = "",
    name: str = "",
    **how: Any,
) -> Source:
    """Windows of `length` ids and the id after each, by client: its first `most` (0: all), if it
    has `least` or more.

    `group` names the key of a line's client, or several with commas between them; `test` the key
    that marks lines for judging.
    """
    if how:
        raise BadInput(f"data.{min(how)} is not for text; drop it, or drop data.tokenizer")
    path, (tokens, ids) = Path(path), load_tokenizer(tokenizer)
    if length < 2:
        raise BadInput(f"data.length = {length}: a window needs 2 ids at least")
    x: list[TokenIds] = []
    y: list[TokenIds] = []
    owners: list[str] = []
    held: list[bool] = []
    taken: dict[str, int] = {}
    for owner, judged, (asked, answers) in _iter_samples(path, tokens, length, group, test):
        if most and taken.get(owner, 0) >= most:
            continue
        taken[owner] = taken.get(owner, 0) + 1
        x.append(asked)
        y.append(answers)
        owners.append(owner)
        held.append(judged)
    if not x:
        raise BadInput(f"{format_path(path)} holds no text; {TEXT_REMEDY}")
    kept = [i for i, owner in enumerate(owners) if taken[owner] >= least]
    if not kept:
        raise BadInput(
            f"data.least = {least}: no client of {format_path(path)} has so many windows; lower it"
        )
    x, y, owners, held = ([each[i] for i in kept] for each in (x, y, owners, held))  # type: ignore[assignment]
    made = Source(
        name or path.name.split(".")[0],
        np.stack(x),
        np.stack(y),
        (),
        kind="tokens",
        held=np.array(held) if any(held) else None,
        ids=ids,
    )
    known = list(dict.fromkeys(owners))
    if known == [""]:
        return made
    place = {owner: i for i, owner in enumerate(known)}
    return replace(
        made,
        group=np.array([place[owner] for owner in owners], np.int64),
        groups=make_wire_names(known),
    )


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


def _iter_samples(
    path: Path, tokens: Tokenizer, length: int, group: str, test: str
) -> Iterator[tuple[str, bool, tuple[TokenIds, TokenIds]]]:
    """(client, whether for judging, ids and answers) of every sample."""
    if path.is_dir():
        for file in sorted(path.glob("*.txt")):
            text = read_text_limited(file, MAX_FILE_BYTES, TEXT_REMEDY, expansion=8).replace(
                "\r\n", "\n"
            )
            for pair in split_windows(tokens.encode(text), length, tokens.end):
                yield file.stem, False, pair
        return
    empty, cut, named = 0, 0, None
    for number, row in read_json_objects(path, MAX_FILE_BYTES, TEXT_REMEDY):
        where = f"{format_path(path)} line {number}"
        owner, judged = _get_client(row, group, where), _is_test_row(row, test, where)
        if named not in (None, bool(owner)):
            what = "names no client" if named else "names its client"
            raise BadInput(f"{where} {what}, unlike those before it; name all, or none")
        named = bool(owner)
        asked, told = (
            next((key for key in keys if key in row), "") for keys in (PROMPT_KEYS, ANSWERS)
        )
        if asked and told:
            more = (
                (_get_text(row, key, where) for key in MORE if key in row)
                if asked == "instruction"
                else ()
            )
            prompt = "\n".join(filter(None, (_get_text(row, asked, where), *more)))
            response = _get_text(row, told, where)
            if not response:
                empty += 1
                continue
            x, y, whole = encode_dialogue(tokens, prompt, response, length)
            cut += not whole
            yield owner, judged, (x, y)
        elif "text" in row:
            for pair in split_windows(
                tokens.encode(_get_text(row, "text", where)), length, tokens.end
            ):
                yield owner, judged, pair
        else:
            raise BadInput(f'{where} has neither "text" nor "prompt" and "response"; {TEXT_REMEDY}')
    if empty:
        log.warning(
            "%s: %d lines with an empty response are left out: there is nothing to learn",
            format_path(path),
            empty,
        )
    if cut:
        log.warning(
            "%s: %d lines do not fit into %d ids: prompts lose their beginning, responses their"
            " end; raise data.length",
            format_path(path),
            cut,
            length,
        )


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
