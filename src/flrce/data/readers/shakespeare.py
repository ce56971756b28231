"""Shakespeare by speaking role (LEAF, Caldas et al. 2018): the next character after each window of 80.

Two public forms: LEAF's json (`all_data*.json`, or train/ and test/), and plain text, one file a role with one line of
the play a line (LEAF's raw_data/by_play_and_character). Of plain text LEAF keeps roles with more than two lines and
at least one window; line ends become spaces, runs of spaces one.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from flrce.data.pool import joined, owned
from flrce.data.readers.files import steps
from flrce.data.readers.leaf import files, pooled
from flrce.data.readers.text import encoded, vocabulary, windows_of
from flrce.data.sources import Source
from flrce.errors import BadInput
from flrce.reading import read_text_limited, shown

LENGTH = 80  # characters of a window
LINES = 3  # a role with fewer is left out
LIMIT = 64 << 20  # bytes of one role's text
REMEDY = "give LEAF's json files, or one .txt file a role"


def shakespeare(folder: Path, progress: bool = False) -> Source:
    """LEAF's task: windows of 80 characters by 1, and the character after each."""
    if files(folder):
        return _leaf(folder, "shakespeare")
    return by_role(_texts(folder, progress), "shakespeare", folder=folder)


def shakespeare_tokens(folder: Path, progress: bool = False) -> Source:
    """The same text for models that tell the next character at every position: windows of 80 by 80."""
    if not files(folder):
        return by_role(_texts(folder, progress), "shakespeare-tokens", stride=LENGTH, every=True, folder=folder)
    told = _leaf(folder, "shakespeare-tokens")
    assert told.group is not None
    kept = np.concatenate([np.flatnonzero(told.group == g)[::LENGTH] for g in range(len(told.groups))])
    x, y = told.x[kept], np.concatenate([told.x[kept][:, 1:], told.y[kept][:, None]], 1)
    held = None if told.held is None else told.held[kept]
    return Source(told.name, x, y, told.classes, told.group[kept], told.groups, kind="tokens", held=held)


def by_role(
    roles: Mapping[str, str], name: str, stride: int = 1, every: bool = False, folder: Path | None = None
) -> Source:
    """A source from each role's lines; with `every`, y holds the next character at every position.

    At stride 1 all plays make 4.2 million windows, 2.7 GB of ids.
    """
    kept = {role: text for role, lines in roles.items() if (text := cleaned(lines))}
    if not kept:
        raise BadInput(
            f"{shown(folder or Path(name))} has no role with {LINES} lines and {LENGTH} characters; {REMEDY}"
        )
    symbols = vocabulary(kept.values())
    parts = []
    for role, text in kept.items():
        x, y = windows(encoded(text, symbols), stride, every)
        parts.append(owned(Source(name, x, y, symbols, kind="tokens"), role))
    return joined(parts)


def cleaned(lines: str) -> str:
    """A role's text as LEAF reads it, or "" where LEAF leaves the role out."""
    text = re.sub("  +", " ", lines.replace("\n", " "))
    return text if len(lines.removesuffix("\n").split("\n")) >= LINES and len(text) > LENGTH else ""


def windows(ids: NDArray[np.int64], stride: int, every: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(n, 80) ids and the id after each, or (n, 80) ids after every one."""
    spans = sliding_window_view(ids, LENGTH + 1)[::stride]
    x = np.ascontiguousarray(spans[:, :-1])
    return x, np.ascontiguousarray(spans[:, 1:] if every else spans[:, -1])


def _texts(folder: Path, progress: bool) -> dict[str, str]:
    found = sorted(folder.glob("*.txt")) or sorted(folder.glob("raw_data/by_play_and_character/*.txt"))
    if not found:
        raise BadInput(f"{shown(folder)} holds neither json nor txt files; {REMEDY}")
    return {path.stem: _read(path) for path in steps(found, "shakespeare", progress)}


def _read(path: Path) -> str:
    return read_text_limited(path, LIMIT, REMEDY).replace("\r\n", "\n")


def _leaf(folder: Path, name: str) -> Source:
    rows = pooled(folder)
    if not all(isinstance(text, str) and len(text) == LENGTH for _, x, _, _ in rows for text in x[:1]):
        raise BadInput(f"{shown(folder)} holds samples that are no texts of {LENGTH} characters; {REMEDY}")
    return windows_of(rows, name, shown(folder))


def roles_of(lines: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Texts by play and role, from objects with `play`, `role` and `text`."""
    return {f"{line['play']}: {line['role']}": line["text"] + "\n" for line in lines}
