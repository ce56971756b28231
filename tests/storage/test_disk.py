"""Large files past the page cache: the same bytes and hash wherever the file system refuses."""

import errno
import fcntl
import hashlib
import os
from itertools import pairwise

import numpy as np
import pytest

from flrce.storage import disk

BUFFER = disk.DIRECT_BYTES
SIZES = [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER + 4097]


def split_unevenly(data: bytes) -> list[memoryview]:
    """Pieces that end neither with a buffer nor with a block of the disk."""
    cuts = [0, 3, 3, 70_001, len(data)]
    return [memoryview(data)[a:b] for a, b in pairwise(cuts)]


def write_and_check(path, size):
    data = np.random.default_rng(size).bytes(size)
    mark = disk.write_chunks(path, split_unevenly(data))
    assert path.read_bytes() == data
    assert mark == {"bytes": size, "sha256": hashlib.sha256(data).hexdigest()}
    assert not path.with_name("state.part").exists()


def refuse_direct(real, errors):
    """os.write as a file system does that accepts O_DIRECT and then fails with these errors."""

    def write(handle, data):
        if fcntl.fcntl(handle, fcntl.F_GETFL) & disk.O_DIRECT:
            reason = errors.pop(0)
            if reason:
                raise OSError(reason, os.strerror(reason))
            return real(handle, data[:4096])  # a short write
        return real(handle, data)

    return write


@pytest.mark.parametrize("size", SIZES)
def test_every_byte_is_written_and_hashed(tmp_path, size):
    write_and_check(tmp_path / "state", size)


@pytest.mark.parametrize("size", SIZES)
def test_a_system_without_direct_writes(tmp_path, size, monkeypatch):
    monkeypatch.setattr(disk, "O_DIRECT", 0)
    write_and_check(tmp_path / "state", size)


@pytest.mark.skipif(not disk.O_DIRECT, reason="this system has no O_DIRECT")
@pytest.mark.parametrize("reason", [errno.EINVAL, 0])
def test_a_file_system_that_refuses_or_writes_less(tmp_path, reason, monkeypatch):
    monkeypatch.setattr(os, "write", refuse_direct(os.write, [reason]))
    write_and_check(tmp_path / "state", 3 * BUFFER + 5)


@pytest.mark.skipif(not disk.O_DIRECT, reason="this system has no O_DIRECT")
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "write", refuse_direct(os.write, [errno.ENOSPC]))
    with pytest.raises(OSError, match="No space"):
        disk.write_chunks(path, [bytes(BUFFER)])
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]
