"""Atomic writes, append-only files with a running hash, and locks on run directories."""

import errno
import hashlib
import mmap
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

try:
    import fcntl
except ModuleNotFoundError:  # not a POSIX system; runs that are not saved work without it
    fcntl = None  # type: ignore[assignment]

CHUNK_BYTES = 2**24  # one system call reads at most 2 GiB
O_DIRECT = getattr(os, "O_DIRECT", 0) if fcntl else 0  # Linux only
DIRECT_BYTES, HASH_BYTES = 2**20, 2**18  # bytes written at a time; and hashed, while in the cache
# Run directories hold clients' names, losses and updates, so only their owner may read them.
PRIVATE_FILE_MODE = 0o600
PRIVATE_FOLDER_MODE = 0o700
BY_UMASK = 0o666  # of files to share: pages, figures, tables, exported models


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents for their owner only; others stay as they are.

    >>> import tempfile
    >>> made = Path(tempfile.mkdtemp()) / "runs" / "a"
    >>> make_folder(made)
    >>> oct(made.parent.stat().st_mode & 0o777)
    '0o700'
    """
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=PRIVATE_FOLDER_MODE, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def refuse_writable_by_others(folder: Path) -> None:
    """Raise BadInput if another user can write into a folder of pickled jobs, which are code.

    The folder must belong to the user, without write access for group and others, and no parent
    may let everybody rename it.
    """
    if folder.is_symlink():
        raise BadInput(
            f"{folder} is a symbolic link, but jobs are loaded from it as code; name the folder"
            " itself"
        )
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise BadInput(
            f"{folder} belongs to another user, but jobs are loaded from it as code; use a"
            " folder of your own"
        )
    if status.st_mode & 0o022:
        raise BadInput(
            f"other users can write to {folder}, but jobs are loaded from it as code; run chmod"
            f" go-w {folder}"
        )
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & 0o002 and not mode & stat.S_ISVTX:
            raise BadInput(
                f"every user can write to {parent}, which contains {folder}; run chmod o-w"
                f" {parent}, or use another folder"
            )


def write_atomically(path: Path, data: bytes, mode: int = PRIVATE_FILE_MODE) -> None:
    """Write a temporary file, sync it to disk and rename it into place."""
    write_chunks(path, [data], mode)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files to share into a folder, which is made if it is missing; BadInput if it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomically(folder / name, data, BY_UMASK)
    except OSError as why:
        raise BadInput(
            f"{folder} cannot be written: {why.strerror or why}; give a folder that can"
        ) from why


def write_chunks(
    path: Path, pieces: Iterable[bytes | memoryview], mode: int = PRIVATE_FILE_MODE
) -> dict[str, Any]:
    """As `write_atomically` for a file in pieces. Returns its mark: length and SHA-256."""
    if not path.name or path.is_dir():  # "/" and "." have no name
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a rename would replace the device or pipe
        raise OSError(errno.EINVAL, "it is a device or a pipe", str(path))
    aside = path.with_name(path.name + ".part")
    try:
        aside.unlink(missing_ok=True)  # left by a killed process; may be a link
        with open(
            aside, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, mode)
        ) as f:
            hit_failpoint("aside.opened")
            length, digest = DirectWriter(f.fileno()).write(pieces)
            hit_failpoint("aside.written")
            os.fsync(f.fileno())
        hit_failpoint("aside.synced")
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    hit_failpoint("aside.renamed")
    return {"sha256": digest, "bytes": length}


class DirectWriter:
    """Writes a new file past the page cache where the file system can (O_DIRECT).

    A checkpoint is synced at once and read after a failure only: to copy it into the page cache
    costs several times the processor time of the transfer, and drives out what others need. Bytes
    go through one aligned buffer, in which they are hashed too. The last, unfilled buffer is
    written as usual, and so is everything once the file system refuses.
    """

    def __init__(self, handle: int) -> None:
        self.handle, self.direct = handle, bool(O_DIRECT)
        self.digest, self.length, self.filled = hashlib.sha256(), 0, 0
        self.buffer: memoryview | None = None

    def write(self, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
        """Every byte of the pieces; returns their number and SHA-256."""
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while view:
                view = view[self._append(view) :]
        if self.buffer is not None:
            self._use_page_cache()
            write_all_bytes(self.handle, self.buffer[: self.filled])
        return self.length, self.digest.hexdigest()

    def _append(self, view: memoryview) -> int:
        """Copy and hash what fits into the buffer; a full one is written."""
        if self.buffer is None:
            self.buffer = memoryview(mmap.mmap(-1, DIRECT_BYTES))
        size = min(len(view), DIRECT_BYTES - self.filled, HASH_BYTES)
        part = self.buffer[self.filled : self.filled + size]
        part[:] = view[:size]
        self.digest.update(part)
        self.length += size
        self.filled += size
        if self.filled == DIRECT_BYTES:
            self._flush(self.buffer)
        return size

    def _flush(self, buffer: memoryview) -> None:
        self.filled, done = 0, 0
        if self.direct:
            try:
                flags = fcntl.fcntl(self.handle, fcntl.F_GETFL)
                fcntl.fcntl(self.handle, fcntl.F_SETFL, flags | O_DIRECT)
                done = os.write(self.handle, buffer)
            except OSError as why:
                if why.errno != errno.EINVAL:
                    raise
            if done < len(buffer):
                self._use_page_cache()
        write_all_bytes(self.handle, buffer[done:])

    def _use_page_cache(self) -> None:
        self.direct = False
        if O_DIRECT:
            flags = fcntl.fcntl(self.handle, fcntl.F_GETFL)
            fcntl.fcntl(self.handle, fcntl.F_SETFL, flags & ~O_DIRECT)


def write_all_bytes(handle: int, data: bytes | memoryview) -> None:
    """Write every byte. One system call may write fewer, for example on a nearly full disk."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def hash_file(path: Path, max_bytes: int | None = None) -> dict[str, Any]:
    """The mark (length, SHA-256) of a file, or of its first `max_bytes`; read in chunks."""
    with open_regular(path) as file:
        length, sha256 = hash_prefix(file, max_bytes)
    return {"sha256": sha256, "bytes": length}


def _make_private(handle: int) -> None:
    """Remove the access that an earlier version gave to other users."""
    with suppress(PermissionError):  # the file belongs to another user
        os.fchmod(handle, PRIVATE_FILE_MODE)


class LineFile:
    """An append-only file of lines, with the SHA-256 of its contents."""

    def __init__(self, path: Path) -> None:
        self.path, self.handle, self.size, self.hash = path, -1, 0, hashlib.sha256()

    def verify(self, mark: Mapping[str, Any] | None) -> None:
        """Raise ValueError unless the file begins with the bytes that the mark describes."""
        if not mark or not mark["bytes"]:
            return
        actual = hash_file(self.path, mark["bytes"])
        if actual["bytes"] < mark["bytes"]:
            raise ValueError(
                f"{self.path.name} has {actual['bytes']} bytes, fewer than the {mark['bytes']}"
                " committed"
            )
        if mark["sha256"] and actual["sha256"] != mark["sha256"]:
            raise ValueError(f"{self.path.name} has changed since it was written")

    def open(self, mark: Mapping[str, Any] | None) -> None:
        """Truncate the file to the mark (without one, to nothing) and open it to append."""
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
    """The lock on a run directory's `lock` file. The system releases it when the process ends.

    If somebody deletes the file, another process can lock the folder. The first process then finds
    another file in its place, and `check_ownership` raises before it overwrites anything.
    """

    def __init__(self, path: Path) -> None:
        if fcntl is None:
            raise BadInput(f"{path.parent}: this system has no file locks; run without saving")
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
        """Raise BadInput if another process has taken the folder over."""
        try:
            is_owner = self.handle >= 0 and os.path.samestat(
                os.fstat(self.handle), os.stat(self.path)
            )
        except FileNotFoundError:
            is_owner = False
        if not is_owner:
            raise BadInput(
                f"{self.path.parent} was taken over by {self._read_owner()}; this run ends"
            )

    def _read_owner(self) -> str:
        """The current owner, as the lock file names it."""
        try:
            return read_limited(self.path, 1000).decode(errors="replace").strip() or "another run"
        except FileNotFoundError:
            return "another process"
        except OSError:
            return "another run"

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


_held_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_locks() -> None:
    """Release the locks in a forked worker, which may outlive its parent."""
    for lock in list(_held_locks):
        lock.close()


os.register_at_fork(after_in_child=_release_locks)
