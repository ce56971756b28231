"""Shakespeare by role (LEAF, Caldas et al. 2018): the next character after windows of 80.

Two public forms: LEAF's json (`all_data*.json`, or train/ and test/), and plain text, one file a
role with one line of the play a line (LEAF's raw_data/by_play_and_character). Of plain text LEAF
keeps roles with more than two lines and at least one window; line ends become spaces, runs of
spaces one.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from flrce.core.files import format_path, read_text_limited
from flrce.data.pool import assign_to_client, join_sources
from flrce.data.readers.files import track_progress
from flrce.data.readers.leaf import (
    build_character_source,
    build_vocabulary,
    encode_characters,
    list_leaf_files,
    read_leaf_users,
)
from flrce.data.sources import Source
from flrce.errors import BadInput

WINDOW_LENGTH = 80  # characters of a window
MIN_ROLE_LINES = 3  # a role with fewer is left out
MAX_FILE_BYTES = 64 << 20  # bytes of one role's text
FILE_REMEDY = "give LEAF's json files, or one .txt file a role"


def read_shakespeare(folder: Path, progress: bool = False) -> Source:
    """LEAF's task: windows of 80 characters by 1, and the character after each."""
    if list_leaf_files(folder):
        return _read_leaf(folder, "shakespeare")
    return build_role_source(_read_role_texts(folder, progress), "shakespeare", folder=folder)


def read_shakespeare_tokens(folder: Path, progress: bool = False) -> Source:
    """The same text with the next character at every position: windows of 80 by 80."""
    if not list_leaf_files(folder):
        roles = _read_role_texts(folder, progress)
        return build_role_source(roles, "shakespeare-tokens", WINDOW_LENGTH, True, folder)
    source = _read_leaf(folder, "shakespeare-tokens")
    assert source.group is not None
    kept = np.concatenate(
        [np.flatnonzero(source.group == g)[::WINDOW_LENGTH] for g in range(len(source.groups))]
    )
    x, y = source.x[kept], np.concatenate([source.x[kept][:, 1:], source.y[kept][:, None]], 1)
    held = None if source.held is None else source.held[kept]
    return Source(
        source.name,
        x,
        y,
        source.classes,
        source.group[kept],
        source.groups,
        kind="tokens",
        held=held,
    )


def build_role_source(
    roles: Mapping[str, str],
    name: str,
    stride: int = 1,
    every: bool = False,
    folder: Path | None = None,
) -> Source:
    """A source from each role's lines; with `every`, y holds the next character at every position.

    At stride 1 all plays make 4.2 million windows, 2.7 GB of ids.
    """
    kept = {role: text for role, lines in roles.items() if (text := clean_role_text(lines))}
    if not kept:
        raise BadInput(
            f"{format_path(folder or Path(name))} has no role with {MIN_ROLE_LINES} lines and"
            f" {WINDOW_LENGTH} characters; {FILE_REMEDY}"
        )
    symbols = build_vocabulary(kept.values())
    parts = []
    for role, text in kept.items():
        x, y = slide_windows(encode_characters(text, symbols), stride, every)
        parts.append(assign_to_client(Source(name, x, y, symbols, kind="tokens"), role))
    return join_sources(parts)


def clean_role_text(lines: str) -> str:
    """A role's text as LEAF reads it, or "" where LEAF leaves the role out."""
    text = re.sub("  +", " ", lines.replace("\n", " "))
    if len(lines.removesuffix("\n").split("\n")) >= MIN_ROLE_LINES and len(text) > WINDOW_LENGTH:
        return text
    return ""


def slide_windows(
    ids: NDArray[np.int64], stride: int, every: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(n, 80) ids and the id after each, or (n, 80) ids after every one."""
    spans = sliding_window_view(ids, WINDOW_LENGTH + 1)[::stride]
    x = np.ascontiguousarray(spans[:, :-1])
    return x, np.ascontiguousarray(spans[:, 1:] if every else spans[:, -1])


def _read_role_texts(folder: Path, progress: bool) -> dict[str, str]:
    files = sorted(folder.glob("*.txt")) or sorted(
        folder.glob("raw_data/by_play_and_character/*.txt")
    )
    if not files:
        raise BadInput(f"{format_path(folder)} holds neither json nor txt files; {FILE_REMEDY}")
    return {
        path.stem: read_text_limited(path, MAX_FILE_BYTES, FILE_REMEDY).replace("\r\n", "\n")
        for path in track_progress(files, "shakespeare", progress)
    }


def _read_leaf(folder: Path, name: str) -> Source:
    rows = read_leaf_users(folder)
    firsts = [text for _, x, _, _ in rows for text in x[:1]]
    if not all(isinstance(text, str) and len(text) == WINDOW_LENGTH for text in firsts):
        raise BadInput(
            f"{format_path(folder)} holds samples that are no texts of {WINDOW_LENGTH} characters;"
            f" {FILE_REMEDY}"
        )
    return build_character_source(rows, name, format_path(folder))
