"""LEAF's FEMNIST: json files, each with users, num_samples and user_data {user: {x, y}}.

LEAF keeps NIST's black ink on white paper (1.0 is paper); it is turned here so that ink is bright as in EMNIST. A pool
that is dark already (mean at most one half) stays as it is.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.data.readers.files import check_labels, steps
from flrce.data.readers.idx import BY_CLASS
from flrce.data.sources import Source
from flrce.errors import BadInput
from flrce.reading import read_limited, shown

LIMIT = 4 << 30  # bytes of one file; LEAF's own have some 100 MB
REMEDY = "make it afresh with LEAF's preprocess.sh"
PIXELS = 28 * 28

Part = tuple[NDArray[np.uint8], NDArray[np.int64]]  # (n, 784), (n,) of one user


def files(folder: Path) -> list[Path]:
    """The json files to pool: those in the folder, else in train/ and test/, else in all_data/; also below data/."""
    for root in (folder, folder / "data"):
        for parts in (("",), ("train", "test"), ("all_data",)):
            found = [path for part in parts for path in sorted((root / part).glob("*.json"))]
            if found:
                return found
    return []


def leaf(folder: Path, progress: bool = False) -> Source:
    """FEMNIST with the writer of each character; training and test files are one pool."""
    found = files(folder)
    if not found:
        raise BadInput(f"{shown(folder)} holds no json files; {REMEDY}")
    owners: list[str] = []
    parts: list[Part] = []
    for path in steps(found, "femnist", progress):
        for user, rows, labels in users(path):
            owners.append(user)
            parts.append(_samples(path, user, rows, labels))
    if not parts:
        raise BadInput(f"{shown(folder)} names no users; {REMEDY}")
    names, codes = np.unique(np.array(owners, object), return_inverse=True)
    x = np.concatenate([x for x, _ in parts]).reshape(-1, 1, 28, 28)
    y = np.concatenate([y for _, y in parts])
    if not len(y):
        raise BadInput(f"{shown(folder)} holds no samples; {REMEDY}")
    if x.mean() > 127.5:
        np.subtract(255, x, out=x)
    group = np.repeat(codes, [len(y) for _, y in parts]).astype(np.int64)
    return Source("femnist", x, y, BY_CLASS, group, tuple(map(str, names)), scale=1 / 255)


def pooled(path: Path) -> list[tuple[str, list[Any], list[Any], bool]]:
    """(user, x, y, whether it is for judging) of one file or a folder's; users without samples are left out."""
    found = [path] if path.is_file() else files(path)
    if not found:
        raise BadInput(f"{shown(path)} holds no json files; {REMEDY}")
    rows = [(user, x, y, file.parent.name == "test") for file in found for user, x, y in users(file) if x]
    if not rows:
        raise BadInput(f"{shown(path)} holds no samples; {REMEDY}")
    return rows


def users(path: Path) -> list[tuple[str, list[Any], list[Any]]]:
    """Each user of one file, with x and y as they stand there."""
    try:
        content = json.loads(read_limited(path, LIMIT, REMEDY, expansion=4))
    except BadInput:
        raise
    except (ValueError, RecursionError) as why:
        raise BadInput(f"{shown(path)} is no complete json; {REMEDY}") from why
    match content:
        case {"users": list(names), "num_samples": list(counts), "user_data": dict(data)} if len(names) == len(counts):
            pass
        case _:
            raise BadInput(f"{shown(path)} is no LEAF file: users, num_samples and user_data must agree; {REMEDY}")
    if twice := [user for user, times in Counter(map(str, names)).items() if times > 1]:
        raise BadInput(f"{shown(path)} lists user {twice[0]!a:.80} more than once; {REMEDY}")
    return [(str(user), *_listed(path, user, count, data)) for user, count in zip(names, counts, strict=True)]


def _listed(path: Path, user: object, count: object, data: dict[str, object]) -> tuple[list[Any], list[Any]]:
    match data.get(user) if isinstance(user, str) and _writable(user) else None:
        case {"x": list(rows), "y": list(labels)} if len(rows) == len(labels) == count:
            return rows, labels
        case _:
            raise BadInput(f"{shown(path)} lacks samples of user {user!a:.80}, or counts them wrongly; {REMEDY}")


def _writable(name: str) -> bool:
    """Whether a name can be written to a file: json may hold halves of surrogate pairs."""
    return name == name.encode(errors="ignore").decode()


def _samples(path: Path, user: str, rows: list[Any], labels: list[Any]) -> Part:
    """One writer's characters."""
    try:
        pixels = np.array(rows, np.float32).reshape(len(rows), PIXELS)
        exact = np.array(labels)
        y = exact.astype(np.int64)
    except (ValueError, TypeError, OverflowError) as why:
        raise BadInput(f"{shown(path)} user {user!a:.80} has samples that are not {PIXELS} numbers; {REMEDY}") from why
    if not ((pixels >= 0) & (pixels <= 1)).all():  # also false for NaN
        raise BadInput(f"{shown(path)} user {user!a:.80} has pixels outside 0 to 1; {REMEDY}")
    if exact.dtype.kind not in "iuf" or (exact != y).any():  # text and halves would be rounded to a class
        raise BadInput(f"{shown(path)} user {user!a:.80} has labels that are no whole numbers; {REMEDY}")
    check_labels(path, y, len(pixels), len(BY_CLASS), REMEDY)
    return np.rint(pixels * 255).astype(np.uint8), y
