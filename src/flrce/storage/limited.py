"""Read the files of a run directory: regular files only, and no more bytes than expected.

A run directory may come from somebody else. A file in it may be a link to a device, a pipe, a
folder, or much larger than what a run writes.
"""

import errno
import gzip
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 2**20
MAX_LINE_BYTES = 2**26  # of one line of a ledger
MAX_DOCUMENT_BYTES = 2**28  # of a JSON file: the partition of a million clients has about 200 MB


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read. OSError for a link, a folder, a pipe or a device."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as why:
        if why.errno == errno.ELOOP:
            raise OSError(
                errno.ELOOP, "it is a symbolic link; put the file itself in its place", str(path)
            ) from why
        raise
    except ValueError as why:  # a null character
        raise OSError(errno.EINVAL, "its name holds a null character", str(path)) from why
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = "folder" if stat.S_ISDIR(mode) else "device or a pipe"
        raise OSError(errno.EINVAL, f"it is a {kind}, not a regular file", str(path))
    return open(path, "rb", opener=lambda name, flags: handle)


def read_limited(path: Path, limit: int) -> bytes:
    """The bytes of a regular file. OSError, before allocation, if it has more than `limit`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(limit + 1) if size <= limit else b""
    if max(size, len(data)) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return data


def hash_prefix(file: BinaryIO, length: int | None = None) -> tuple[int, str]:
    """The number of bytes read, at most `length`, and their SHA-256. Rewinds the file."""
    digest, count = hashlib.sha256(), 0
    file.seek(0)
    while data := file.read(CHUNK_BYTES if length is None else min(CHUNK_BYTES, length - count)):
        digest.update(data)
        count += len(data)
    file.seek(0)
    return count, digest.hexdigest()


def split_lines(
    file: BinaryIO | gzip.GzipFile,
    length: int | None = None,
    limit: int = MAX_LINE_BYTES,
    half: bool = False,
) -> Iterator[bytes]:
    """The complete lines in the next `length` bytes of an open file.

    An incomplete last line is skipped unless `half` is set. ValueError for a line of more than
    `limit` bytes.
    """
    rest = length
    while rest is None or rest > 0:
        line = file.readline(limit + 1 if rest is None else min(limit + 1, rest))
        if len(line) > limit:
            raise ValueError(f"{Path(str(file.name)).name} has a line of more than {limit} bytes")
        if not line.endswith(b"\n"):
            if half and line:
                yield line
            return
        rest = None if rest is None else rest - len(line)
        yield line


def describe_error(why: BaseException) -> str:
    """The text of an error, without errno and path."""
    return str((why.strerror if isinstance(why, OSError) else None) or why)
