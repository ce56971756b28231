"""Files that are there whole or not at all, and a folder that one process owns."""

import fcntl
import hashlib
import os
import platform
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flrce.errors import BadInput
from flrce.store.failpoint import failpoint

CHUNK = 2**24  # bytes read at a time: one call of the system returns at most 2 GiB
PRIVATE = 0o600  # of files with clients' updates in them


def write_through(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file aside, make sure it is on disk, and rename it into place."""
    write_pieces(path, [data], mode)


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview], mode: int = 0o666) -> dict[str, Any]:
    """The same for a file that comes piece by piece; returns its mark, the length and SHA-256."""
    aside, length, found = path.with_name(path.name + ".part"), 0, hashlib.sha256()
    try:
        aside.unlink(missing_ok=True)  # whatever was left there, a link perhaps
        with open(aside, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, mode)) as f:
            failpoint("aside.opened")
            for piece in pieces:
                write_all(f.fileno(), piece)
                length += len(piece)
                found.update(piece)
            failpoint("aside.written")
            os.fsync(f.fileno())
        failpoint("aside.synced")
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    failpoint("aside.renamed")
    return {"sha256": found.hexdigest(), "bytes": length}


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write every byte: the system may take fewer at a time, above all on a disk that fills up."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def hashed(path: Path, most: int | None = None) -> dict[str, Any]:
    """The length and SHA-256 of a file, or of its first `most` bytes; little of it is in memory at a time."""
    found, length = hashlib.sha256(), 0
    with open(path, "rb") as f:
        while data := f.read(CHUNK if most is None else min(CHUNK, most - length)):
            found.update(data)
            length += len(data)
    return {"sha256": found.hexdigest(), "bytes": length}


class Lines:
    """An append-only file of lines and the SHA-256 of what it holds."""

    def __init__(self, path: Path) -> None:
        self.path, self.handle, self.size, self.hash = path, -1, 0, hashlib.sha256()

    def verify(self, mark: Mapping[str, Any] | None) -> None:
        """ValueError unless the file begins with what the mark describes."""
        if not mark or not mark["bytes"]:
            return
        found = hashed(self.path, mark["bytes"])
        if found["bytes"] < mark["bytes"]:
            raise ValueError(f"{self.path.name} has {found['bytes']} bytes, fewer than the {mark['bytes']} committed")
        if mark["sha256"] and found["sha256"] != mark["sha256"]:
            raise ValueError(f"{self.path.name} is not as it was written")

    def open(self, mark: Mapping[str, Any] | None) -> None:
        """Cut to the mark, or to nothing, and make ready to append."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND | os.O_NOFOLLOW
        self.handle = os.open(self.path, flags, 0o644)
        self.size = mark["bytes"] if mark else 0
        failpoint("lines.opened")
        os.ftruncate(self.handle, self.size)
        failpoint("lines.cut")
        self.hash = hashlib.sha256()
        for start in range(0, self.size, CHUNK):
            self.hash.update(os.pread(self.handle, min(CHUNK, self.size - start), start))

    def append(self, lines: bytes) -> None:
        write_all(self.handle, lines)
        self.size += len(lines)
        self.hash.update(lines)
        failpoint("lines.written")

    def sync(self) -> None:
        os.fsync(self.handle)
        failpoint("lines.synced")

    @property
    def mark(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self.hash.hexdigest()}

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


class Lock:
    """A folder's `lock` file, held while its run lives. The system lets go of it when the process dies.

    Whoever deletes the file can take the folder over; the former owner then finds another file in its place and `check`
    refuses, before anything of the new owner's is overwritten.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.handle = path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self.handle, 200, 0).decode(errors="replace").strip()
            self.close()
            raise BadInput(f"{path.parent} is in use by {owner or 'another run'}; wait, or stop it") from None
        os.ftruncate(self.handle, 0)
        os.pwrite(self.handle, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        _held.add(self)

    def check(self) -> None:
        """Refuse to go on once the folder belongs to somebody else."""
        try:
            mine = self.handle >= 0 and os.path.samestat(os.fstat(self.handle), os.stat(self.path))
        except FileNotFoundError:
            mine = False
        if not mine:
            owner = self.path.read_text(errors="replace").strip() if self.path.exists() else "somebody"
            raise BadInput(f"{self.path.parent} was taken over by {owner or 'another run'}; this run ends here")

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _let_go() -> None:
    """A forked worker must not keep its dead parent's folder locked."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go)
