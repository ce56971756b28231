"""Row 32: compiled kernels are code; damaged or foreign ones are built again, never loaded."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from flrce.core import c_compiler
from flrce.training.batches import SampleBatches, Samples
from flrce.training.cpu import Kernel, build_kernel, explain_no_kernel

row32 = pytest.mark.row(32, "damaged or foreign kernel cache", "rebuilt, same bits, never loaded")
NET = nn.Sequential(nn.Linear(3, 7))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLRCE_CACHE", str(tmp_path))
    return tmp_path / "native"


def trained() -> torch.Tensor:
    why = explain_no_kernel(NET, (3,))
    if why:
        pytest.skip(why)
    made = build_kernel(NET, (3,))
    assert isinstance(made, Kernel)
    w, _, _ = made.train(
        torch.ones(28),
        SampleBatches(Samples(torch.ones(1, 3), torch.tensor([1])), np.array([0]), np.array([1])),
        7.0,
    )
    return w


def only(cache: Path) -> Path:
    (found,) = cache.glob("*.so")
    return found


@row32
def test_damaged_builds_are_made_again(cache, seen):
    """Loading one of these may kill the process, so a hash is compared first: none of them survives
    a look.
    """
    good = trained()
    path, rng = only(cache), random.Random(0)
    whole = path.read_bytes()
    for i in range(60):
        data = bytearray(whole)
        if i % 3 == 0:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if bytes(data) == whole:
            continue
        path.unlink()
        path.write_bytes(data)
        path.chmod(0o500)
        assert not c_compiler._is_intact(path), i
    assert torch.equal(trained(), good)
    assert path.read_bytes() == whole
    seen("60 damaged files, none loaded")


@row32
@pytest.mark.parametrize(
    "how", ["no hash", "wrong hash", "odd hash", "writable", "a link", "another owner"]
)
def test_builds_that_cannot_be_trusted_are_made_again(cache, how, tmp_path):
    good = trained()
    path = only(cache)
    whole, mark = path.read_bytes(), path.with_suffix(".sha256")
    if how == "no hash":
        mark.unlink()
    elif how == "wrong hash":
        mark.write_text("0" * 64)
    elif how == "odd hash":
        mark.write_bytes(b"\xff\xfe")
    elif how == "writable":
        path.chmod(0o777)
    elif how == "a link":
        (tmp_path / "elsewhere.so").write_bytes(whole)
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere.so")
    elif os.geteuid():
        pytest.skip("only root gives files away")
    else:
        os.chown(path, 12345, 12345)
    assert not c_compiler._is_intact(path)
    assert torch.equal(trained(), good)
    found = path.lstat()
    assert (found.st_uid, found.st_mode & 0o777, path.is_symlink()) == (os.geteuid(), 0o500, False)
    assert c_compiler._is_intact(path)


@row32
def test_a_shared_cache_is_closed_or_refused(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    trained()
    assert cache.stat().st_mode & 0o022 == 0
    if not os.geteuid():
        os.chown(cache, 12345, 12345)
        assert "belongs to user 12345; set FLRCE_CACHE" in explain_no_kernel(NET, (3,))
