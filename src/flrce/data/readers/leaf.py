"""LEAF's json files, each with users, num_samples and user_data {user: {x, y}}: FEMNIST, and texts
as token ids, one a character.

Of FEMNIST, LEAF keeps NIST's black ink on white paper (1.0 is paper); it is turned here so that
ink is bright as in EMNIST. A pool that is dark already (mean at most one half) stays as it is.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path, read_limited
from flrce.data.pool import assign_to_client, join_sources
from flrce.data.readers.files import check_labels, track_progress
from flrce.data.readers.idx import EMNIST_CLASSES
from flrce.data.sources import Source
from flrce.errors import BadInput

MAX_FILE_BYTES = 4 << 30  # bytes of one file; LEAF's own have some 100 MB
FILE_REMEDY = "make it afresh with LEAF's preprocess.sh"
PIXELS_PER_IMAGE = 28 * 28
#: LEAF's 80 symbols of Shakespeare, in its order; a text within them has them for its vocabulary,
#: whatever it uses
SHAKESPEARE_SYMBOLS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)


UserSamples = tuple[NDArray[np.uint8], NDArray[np.int64]]  # (n, 784), (n,) of one user


def _make_leaf_error(path: Path, problem: str) -> BadInput:
    return BadInput(f"{format_path(path)} {problem}; {FILE_REMEDY}")


def list_leaf_files(folder: Path) -> list[Path]:
    """The json files to pool: in the folder, else in train/ and test/, else in all_data/."""
    for root in (folder, folder / "data"):
        for parts in (("",), ("train", "test"), ("all_data",)):
            files = [path for part in parts for path in sorted((root / part).glob("*.json"))]
            if files:
                return files
    return []


def read_femnist_leaf(folder: Path, progress: bool = False) -> Source:
    """FEMNIST with the writer of each character; training and test files are one pool."""
    files = list_leaf_files(folder)
    if not files:
        raise _make_leaf_error(folder, "holds no json files")
    owners: list[str] = []
    parts: list[UserSamples] = []
    for path in track_progress(files, "femnist", progress):
        for user, rows, labels in parse_leaf_file(path):
            owners.append(user)
            parts.append(_convert_samples(path, user, rows, labels))
    if not parts:
        raise _make_leaf_error(folder, "names no users")
    names, codes = np.unique(np.array(owners, object), return_inverse=True)
    x = np.concatenate([x for x, _ in parts]).reshape(-1, 1, 28, 28)
    y = np.concatenate([y for _, y in parts])
    if not len(y):
        raise _make_leaf_error(folder, "holds no samples")
    if x.mean() > 127.5:
        np.subtract(255, x, out=x)
    group = np.repeat(codes, [len(y) for _, y in parts]).astype(np.int64)
    return Source("femnist", x, y, EMNIST_CLASSES, group, tuple(map(str, names)), scale=1 / 255)


def read_leaf_users(path: Path) -> list[tuple[str, list[Any], list[Any], bool]]:
    """(user, x, y, is for evaluation) of a file or a folder's; users without samples left out."""
    files = [path] if path.is_file() else list_leaf_files(path)
    if not files:
        raise _make_leaf_error(path, "holds no json files")
    rows = [
        (user, x, y, file.parent.name == "test")
        for file in files
        for user, x, y in parse_leaf_file(file)
        if x
    ]
    if not rows:
        raise _make_leaf_error(path, "holds no samples")
    return rows


def parse_leaf_file(path: Path) -> list[tuple[str, list[Any], list[Any]]]:
    """Each user of one file, with x and y as they stand there."""
    try:
        content = json.loads(read_limited(path, MAX_FILE_BYTES, FILE_REMEDY, expansion=4))
    except BadInput:
        raise
    except (ValueError, RecursionError) as why:
        raise _make_leaf_error(path, "is no complete json") from why
    match content:
        case {"users": list(names), "num_samples": list(counts), "user_data": dict(data)}:
            complete = len(names) == len(counts)
        case _:
            complete = False
    if not complete:
        raise _make_leaf_error(path, "is no LEAF file: users, num_samples and user_data must agree")
    if twice := [user for user, times in Counter(map(str, names)).items() if times > 1]:
        raise _make_leaf_error(path, f"lists user {twice[0]!a:.80} more than once")
    return [
        (str(user), *_get_user_samples(path, user, count, data))
        for user, count in zip(names, counts, strict=True)
    ]


def _get_user_samples(
    path: Path, user: object, count: object, data: dict[str, object]
) -> tuple[list[Any], list[Any]]:
    # json may hold halves of surrogate pairs, which no file can
    writable = isinstance(user, str) and user == user.encode(errors="ignore").decode()
    match data.get(user) if isinstance(user, str) and writable else None:
        case {"x": list(rows), "y": list(labels)} if len(rows) == len(labels) == count:
            return rows, labels
        case _:
            raise _make_leaf_error(
                path, f"lacks samples of user {user!a:.80}, or counts them wrongly"
            )


def _convert_samples(path: Path, user: str, rows: list[Any], labels: list[Any]) -> UserSamples:
    """One writer's characters."""
    try:
        pixels = np.array(rows, np.float32).reshape(len(rows), PIXELS_PER_IMAGE)
        exact = np.array(labels)
        y = exact.astype(np.int64)
    except (ValueError, TypeError, OverflowError) as why:
        problem = f"user {user!a:.80} has samples that are not {PIXELS_PER_IMAGE} numbers"
        raise _make_leaf_error(path, problem) from why
    if not ((pixels >= 0) & (pixels <= 1)).all():  # also false for NaN
        raise _make_leaf_error(path, f"user {user!a:.80} has pixels outside 0 to 1")
    # text and halves would be rounded to a class
    if exact.dtype.kind not in "iuf" or (exact != y).any():
        raise _make_leaf_error(path, f"user {user!a:.80} has labels that are no whole numbers")
    check_labels(path, y, len(pixels), len(EMNIST_CLASSES), FILE_REMEDY)
    return np.rint(pixels * 255).astype(np.uint8), y


def build_vocabulary(texts: Iterable[str]) -> tuple[str, ...]:
    """The symbols of these texts, in order; a symbol's place is its id."""
    symbols: set[str] = set()
    for text in texts:
        symbols.update(text)
    if symbols <= set(SHAKESPEARE_SYMBOLS):
        return tuple(SHAKESPEARE_SYMBOLS)
    return tuple(sorted(symbols))


def encode_characters(text: str, symbols: Sequence[str]) -> NDArray[np.int64]:
    """(len(text),) ids; every character must be among the symbols."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    known = np.array([ord(symbol) for symbol in symbols], np.uint32)
    order = np.argsort(known)
    return order[np.searchsorted(known[order], points)].astype(np.int64)


def build_character_source(
    rows: list[tuple[str, list[Any], list[Any], bool]], name: str, where: str
) -> Source:
    """Users' windows of characters and the character after each, some for judging."""
    for user, x, y, _ in rows:
        if not all(isinstance(text, str) for text in (*x, *y)):
            raise BadInput(f"{where} user {user!a:.80} mixes texts and numbers; give texts only")
    symbols = build_vocabulary(text for _, x, y, _ in rows for text in (*x, *y))
    parts, held = [], []
    for user, x, y, test in rows:
        lengths = {len(text) for text in x}
        if lengths != {len(rows[0][1][0])} or any(len(character) != 1 for character in y):
            raise BadInput(
                f"{where} user {user!a:.80} has texts of several lengths, or more than one next"
                " character"
            )
        ids = encode_characters("".join(x), symbols).reshape(len(x), -1)
        following = encode_characters("".join(y), symbols)
        source = Source(name, ids, following, symbols, kind="tokens")
        parts.append(assign_to_client(source, user))
        held.append(test)
    return join_sources(parts, held if any(held) else ())
