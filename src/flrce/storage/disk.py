"""Files that are there whole or not at all, and a folder that one process owns."""

import errno
import fcntl
import hashlib
import os
import platform
import stat
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flrce.errors import BadInput
from flrce.storage.failpoint import hit_failpoint
from flrce.storage.limited import hash_prefix, open_regular, read_limited

CHUNK_BYTES = 2**24  # bytes read at a time: one call of the system returns at most 2 GiB
# of every file in a run directory: names and losses of clients, their updates, models trained on
# them
PRIVATE_FILE_MODE = 0o600
PRIVATE_FOLDER = 0o700
# of files that are made to be handed on: pages, figures, tables, exported adapters
BY_UMASK = 0o666


def make_folder(folder: Path) -> None:
    """Make a folder of runs, and those above it that are missing, for its owner alone. One that
    exists stays as it is.

    >>> import tempfile
    >>> made = Path(tempfile.mkdtemp()) / "runs" / "a"
    >>> make_folder(made)
    >>> oct(made.parent.stat().st_mode & 0o777)
    '0o700'
    """
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def refuse_writable_by_others(folder: Path) -> None:
    """BadInput if anybody but the user can put files into a folder from which code is loaded
    (pickled jobs).

    The folder is the user's own and neither its group nor others may write to it; no folder above
    it lets everybody rename what is in it.
    """
    if folder.is_symlink():
        raise BadInput(
            f"{folder} is a symbolic link; jobs are read from it as code: name the folder itself"
        )
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise BadInput(
            f"{folder} belongs to another user; jobs are read from it as code: name a folder of"
            " your own"
        )
    if found.st_mode & 0o022:
        raise BadInput(
            f"{folder} can be written by others; jobs are read from it as code: chmod go-w {folder}"
        )
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & 0o002 and not mode & stat.S_ISVTX:
            raise BadInput(
                f"{folder} lies in {parent}, which everybody can change; chmod o-w {parent}, or use"
                " another"
            )


def write_atomically(path: Path, data: bytes, mode: int = PRIVATE_FILE_MODE) -> None:
    """Write a file aside, make sure it is on disk, and rename it into place; readable by its owner
    alone.
    """
    write_chunks(path, [data], mode)


def write_chunks(
    path: Path, pieces: Iterable[bytes | memoryview], mode: int = PRIVATE_FILE_MODE
) -> dict[str, Any]:
    """The same for a file that comes piece by piece; returns its mark, the length and SHA-256."""
    if not path.name or path.is_dir():  # "/" and "." have no name
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # renaming over a device or a pipe would replace it
        raise OSError(errno.EINVAL, "it is a device or a pipe", str(path))
    aside, length, found = path.with_name(path.name + ".part"), 0, hashlib.sha256()
    try:
        aside.unlink(missing_ok=True)  # whatever was left there, a link perhaps
        with open(
            aside, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, mode)
        ) as f:
            hit_failpoint("aside.opened")
            for piece in pieces:
                write_all_bytes(f.fileno(), piece)
                length += len(piece)
                found.update(piece)
            hit_failpoint("aside.written")
            os.fsync(f.fileno())
        hit_failpoint("aside.synced")
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    hit_failpoint("aside.renamed")
    return {"sha256": found.hexdigest(), "bytes": length}


def write_all_bytes(handle: int, data: bytes | memoryview) -> None:
    """Write every byte: the system may take fewer at a time, above all on a disk that fills up."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def hash_file(path: Path, most: int | None = None) -> dict[str, Any]:
    """The length and SHA-256 of a file, or of its first `most` bytes; little of it is in memory at
    a time.
    """
    with open_regular(path) as file:
        length, sha256 = hash_prefix(file, most)
    return {"sha256": sha256, "bytes": length}


def _make_private(handle: int) -> None:
    """A file that an earlier version left readable by others."""
    with suppress(PermissionError):  # another user's; it could be opened all the same
        os.fchmod(handle, PRIVATE_FILE_MODE)


class LineFile:
    """An append-only file of lines and the SHA-256 of what it holds."""

    def __init__(self, path: Path) -> None:
        self.path, self.handle, self.size, self.hash = path, -1, 0, hashlib.sha256()

    def verify(self, mark: Mapping[str, Any] | None) -> None:
        """ValueError unless the file begins with what the mark describes."""
        if not mark or not mark["bytes"]:
            return
        found = hash_file(self.path, mark["bytes"])
        if found["bytes"] < mark["bytes"]:
            raise ValueError(
                f"{self.path.name} has {found['bytes']} bytes, fewer than the {mark['bytes']}"
                " committed"
            )
        if mark["sha256"] and found["sha256"] != mark["sha256"]:
            raise ValueError(f"{self.path.name} is not as it was written")

    def open(self, mark: Mapping[str, Any] | None) -> None:
        """Cut to the mark, or to nothing, and make ready to append."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND | os.O_NOFOLLOW
        self.handle = os.open(self.path, flags, PRIVATE_FILE_MODE)
        _make_private(self.handle)
        self.size = mark["bytes"] if mark else 0
        hit_failpoint("lines.opened")
        os.ftruncate(self.handle, self.size)
        hit_failpoint("lines.cut")
        self.hash = hashlib.sha256()
        for start in range(0, self.size, CHUNK_BYTES):
            self.hash.update(os.pread(self.handle, min(CHUNK_BYTES, self.size - start), start))

    def append(self, lines: bytes) -> None:
        write_all_bytes(self.handle, lines)
        self.size += len(lines)
        self.hash.update(lines)
        hit_failpoint("lines.written")

    def sync(self) -> None:
        os.fsync(self.handle)
        hit_failpoint("lines.synced")

    @property
    def mark(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self.hash.hexdigest()}

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


class FolderLock:
    """A folder's `lock` file, held while its run lives. The system lets go of it when the process
    dies.

    Whoever deletes the file can take the folder over; the former owner then finds another file in
    its place and `check` refuses, before anything of the new owner's is overwritten.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.handle = (
            path,
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE_MODE),
        )
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self.handle, 200, 0).decode(errors="replace").strip()
            self.close()
            raise BadInput(
                f"{path.parent} is in use by {owner or 'another run'}; wait, or stop it"
            ) from None
        _make_private(self.handle)
        os.ftruncate(self.handle, 0)
        os.pwrite(self.handle, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        _held_locks.add(self)

    def check_ownership(self) -> None:
        """Refuse to go on once the folder belongs to somebody else."""
        try:
            mine = self.handle >= 0 and os.path.samestat(os.fstat(self.handle), os.stat(self.path))
        except FileNotFoundError:
            mine = False
        if not mine:
            raise BadInput(
                f"{self.path.parent} was taken over by {self._read_owner()}; this run ends here"
            )

    def _read_owner(self) -> str:
        """Who has the folder now, by the file that lies there."""
        try:
            return read_limited(self.path, 1000).decode(errors="replace").strip() or "another run"
        except FileNotFoundError:
            return "somebody"
        except OSError:
            return "another run"

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


_held_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_locks() -> None:
    """A forked worker must not keep its dead parent's folder locked."""
    for lock in list(_held_locks):
        lock.close()


os.register_at_fork(after_in_child=_release_locks)
