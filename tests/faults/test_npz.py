"""Row 33: an .npz that a stranger made is weighed before it is unpacked: one line, quickly, in
little memory.
"""

import io
import random
import resource
import struct
import time
import zipfile

import numpy as np
import pytest
from harness import in_child
from numpy.lib import format as npy

from flrce.cli.cli import main
from flrce.core import files
from flrce.data.sources import load_source
from flrce.errors import BadInput

row33 = pytest.mark.row(33, "hostile .npz", "one line, < 2 s, < 500 MB")


def header(shape, descr="<f4", order=False, size=None):
    """An array's description, and nothing after it; `size` lies about its length."""
    text = repr({"descr": descr, "fortran_order": order, "shape": shape}).encode() + b"\n"
    return npy.MAGIC_PREFIX + b"\x01\x00" + struct.pack("<H", size or len(text)) + text


def archive(path, method=zipfile.ZIP_STORED, **members):
    with zipfile.ZipFile(path, "w", method) as z:
        for name, data in members.items():
            z.writestr(f"{name}.npy", data)
    return path


def array(value):
    out = io.BytesIO()
    np.save(out, value)
    return out.getvalue()


def good(path):
    np.savez(path, x=np.random.default_rng(0).random((40, 3)), y=np.arange(40) % 4)
    return path


def bad_crc(path):
    data = bytearray(good(path).read_bytes())
    data[len(data) // 3] ^= 255
    path.write_bytes(data)


def encrypted(path):
    data = bytearray(good(path).read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.find(signature)
        while at >= 0:
            data[at + offset] |= 1
            at = data.find(signature, at + 4)
    path.write_bytes(data)


def bomb(path):
    """3 GB of zeros in 3 MB."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z,
        z.open("x.npy", "w", force_zip64=True) as f,
    ):
        f.write(header((3_000_000, 1024), "|u1"))
        zeros = bytes(1 << 24)
        left = 3_000_000 * 1024
        while left:
            f.write(zeros[: min(left, len(zeros))])
            left -= min(left, len(zeros))
    with zipfile.ZipFile(path, "a") as z:
        z.writestr("y.npy", array(np.zeros(3, int)))


ones, labels = np.ones((4, 2)), np.arange(4)
CASES = {
    "empty": (lambda p: p.write_bytes(b""), "no plain .npz"),
    "text": (lambda p: p.write_text("x,y\n1,2\n"), "no plain .npz"),
    "truncated": (lambda p: p.write_bytes(good(p).read_bytes()[:300]), "no plain .npz"),
    "bad crc": (bad_crc, "no plain .npz"),
    "npy": (lambda p: p.write_bytes(array(ones)), "single array"),
    "encrypted": (encrypted, "encrypted"),
    "0-d x": (lambda p: np.savez(p, x=np.array(3.0), y=labels), "must"),
    "0-d y": (lambda p: np.savez(p, x=ones, y=np.array(3)), "must"),
    "2-d y": (lambda p: np.savez(p, x=ones, y=np.array([["a", "b"]] * 4)), "must"),
    "objects": (
        lambda p: np.savez(p, x=np.array([print] * 4, dtype=object), y=labels),
        "holds object",
    ),
    "records": (
        lambda p: np.savez(p, x=np.zeros(4, [("a", "f4"), ("b", "i4")]), y=labels),
        "save numbers",
    ),
    "complex": (lambda p: np.savez(p, x=ones.astype(complex), y=labels), "save numbers"),
    "overflow": (lambda p: np.savez(p, x=ones * 1e300, y=labels), "infinity"),
    "no x": (lambda p: np.savez(p, y=labels), "lacks x"),
    "absurd shape": (lambda p: archive(p, x=header((10**12, 10**6)), y=array(labels)), "claims"),
    "giant shape": (lambda p: archive(p, x=header((10**30,)), y=array(labels)), "claims"),
    "negative shape": (lambda p: archive(p, x=header((-4, 2)), y=array(labels)), "claims"),
    "many axes": (lambda p: archive(p, x=header((1,) * 40) + bytes(4), y=array(labels)), "claims"),
    "too short": (
        lambda p: archive(p, x=header((4, 2)) + bytes(7), y=array(labels)),
        "claims 32 bytes but holds 7",
    ),
    "too long": (
        lambda p: archive(p, x=header((4, 2)) + bytes(99), y=array(labels)),
        "claims 32 bytes",
    ),
    "long header": (
        lambda p: archive(p, x=header((4, 2), size=60000), y=array(labels)),
        "no plain .npz",
    ),
    "code for a header": (
        lambda p: archive(p, x=header("__import__('os')"), y=array(labels)),
        "npz",
    ),
    "deep header": (
        lambda p: archive(
            p, x=npy.MAGIC_PREFIX + b"\x01\x00" + struct.pack("<H", 9000) + b"(" * 9000
        ),
        "no plain .npz",
    ),
    "odd dtype": (lambda p: archive(p, x=header((4, 2), "<q99"), y=array(labels)), "npz"),
    "version 9": (
        lambda p: archive(p, x=npy.MAGIC_PREFIX + b"\x09\x00" + bytes(99)),
        "no plain .npz",
    ),
    "lzma": (lambda p: archive(p, zipfile.ZIP_LZMA, x=array(ones)[:50], y=array(labels)), "npz"),
    "bomb": (bomb, "would unpack to 3.1 GB"),
}


@row33
@pytest.mark.parametrize("case", CASES)
def test_hostile_files(case, tmp_path):
    make, line = CASES[case]
    path = tmp_path / "mine.npz"
    make(path)

    def child():
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        with pytest.raises(BadInput) as refused:
            load_source("digits", str(path))
        text = str(refused.value)
        assert line in text
        assert "\n" not in text
        assert time.process_time() - began < 2
        assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 500e6

    assert in_child(child) == 0


@row33
def test_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "mine.npz"
    path.write_bytes(good(path).read_bytes()[:300])
    assert main(["run", "--set", f"data.path={path}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no plain .npz" in error


@row33
def test_too_large_for_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "get_available_memory", lambda: 1000.0)
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    with pytest.raises(BadInput, match="give fewer samples"):
        load_source("digits", str(good(tmp_path / "mine.npz")))


def refuses(path) -> bool:
    try:
        load_source("digits", str(path))
    except BadInput:
        return True
    return False


@row33
@pytest.mark.parametrize("seed", range(3))
def test_mutated_files(seed, tmp_path, seen):
    """Any bytes: arrays, or one line."""
    rng, path = random.Random(seed), tmp_path / "mine.npz"
    np.savez_compressed(
        path,
        x=np.arange(60.0).reshape(20, 3),
        y=np.arange(20) % 4,
        group=np.array(["a", "bc"] * 10),
    )
    whole, refused = path.read_bytes(), 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 5)):
            at = rng.randrange(len(data))
            if rng.random() < 0.7:
                data[at] = rng.randrange(256)
            else:
                del data[at : at + rng.randrange(60)]
        path.write_bytes(data)
        refused += refuses(path)
    assert refused > 150
    seen(f"{refused} of 300 refused")
