"""Readers against tiny files in the public formats, and against files that are cut, foreign or
hostile.
"""

import gzip
import json
import os
import pickle
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flrce.data.readers import DATASET_READERS, read_dataset
from flrce.data.readers.cifar import CIFAR10, CIFAR100, PIXELS_PER_IMAGE, CifarArchive
from flrce.data.readers.idx import EMNIST_CLASSES, read_idx
from flrce.data.readers.speech import build_speech_source, compute_mfcc, mel_filters
from flrce.errors import BadInput
from flrce.formats import plain_pickle

REAL = Path(os.environ.get("FLRCE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
RNG = np.random.default_rng(0)
PIXEL_ROWS = RNG.integers(0, 256, (15, PIXELS_PER_IMAGE), dtype=np.uint8)  # (15, 3072)
quick = settings(deadline=None, max_examples=60)


def refused(name: str, folder: Path, *words: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_dataset(name, folder)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


# CIFAR


def python2_batch(data: np.ndarray, labels: list[int], key: str = "labels") -> bytes:
    """A batch as Python 2's cPickle wrote the originals (protocol 2, byte strings)."""

    def text(word: str) -> bytes:
        return b"U" + bytes([len(word)]) + word.encode()

    rows, columns = data.shape
    shape = b"K" + bytes([rows]) + b"M" + struct.pack("<H", columns) + b"\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01"
        + shape
    )
    array += b"cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    array += b"T" + struct.pack("<I", data.size) + data.tobytes() + b"tb"
    numbers = b"]q\x08(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    names = b"]q\x09(" + text("a.png") + text("b.png") + b"e"
    return (
        b"\x80\x02}q\x01("
        + text("data")
        + b"q\x02"
        + array
        + text(key)
        + numbers
        + text("filenames")
        + names
        + b"u."
    )


def python3_batch(
    data: np.ndarray, labels: list[int], key: str = "labels", protocol: int = 2
) -> bytes:
    names = [b"a.png", b""]
    return pickle.dumps({b"data": data, key.encode(): labels, b"filenames": names}, protocol)


def classes_of(layout: CifarArchive) -> list[str]:
    return [f"class{i}" for i in range(layout.classes)]


def write_python(layout: CifarArchive, folder: Path, batch=python2_batch) -> np.ndarray:
    """The set's training files with 15 images in all, a test file that must be left, and the labels
    written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    y = np.arange(15) * 7 % layout.classes
    for name, rows in zip(layout.files, np.split(np.arange(15), len(layout.files)), strict=True):
        (folder / name).write_bytes(batch(PIXEL_ROWS[rows], y[rows].tolist(), layout.label_key))
    (folder / ("test_batch" if layout is CIFAR10 else "test")).write_bytes(b"never read")
    (folder / layout.meta).write_bytes(pickle.dumps({layout.names_key: classes_of(layout)}, 2))
    return y


BATCHES = {
    "python 2": python2_batch,
    **{
        f"python 3, protocol {p}": lambda *args, p=p: python3_batch(*args, protocol=p)
        for p in (2, 3, 4, 5)
    },
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("layout", [CIFAR10, CIFAR100], ids=lambda layout: layout.name)
def test_cifar_python_batches(tmp_path, layout, batch):
    y = write_python(layout, tmp_path / layout.folder, batch)
    source = read_dataset(layout.name, tmp_path)  # finds the folder that unpacking makes
    assert source.x.dtype == np.uint8
    assert np.array_equal(source.x, PIXEL_ROWS.reshape(15, 3, 32, 32))
    assert source.y.tolist() == y.tolist()
    assert source.classes == tuple(classes_of(layout))
    assert source.group is None
    assert 255 * source.scale + source.shift == pytest.approx(1)
    assert 0 * source.scale + source.shift == -1


def test_the_handmade_batch_is_a_true_pickle():
    content = pickle.loads(python2_batch(PIXEL_ROWS[:3], [1, 2, 3]), encoding="bytes")
    assert np.array_equal(content[b"data"], PIXEL_ROWS[:3])
    assert content[b"labels"] == [1, 2, 3]


def test_fortran_order_is_kept(tmp_path):
    write_python(
        CIFAR10, tmp_path, lambda data, *rest: python3_batch(np.asfortranarray(data), *rest)
    )
    assert np.array_equal(read_dataset("cifar10", tmp_path).x.reshape(15, -1), PIXEL_ROWS)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_batch_cannot_run_code(tmp_path, protocol):
    canary = tmp_path / "canary"
    crafted = pickle.dumps({b"data": Evil(canary), b"labels": [1]}, protocol)
    pickle.loads(crafted)
    assert canary.exists()  # the trap works on an unpickler
    canary.unlink()
    write_python(CIFAR10, tmp_path)
    (tmp_path / "data_batch_3").write_bytes(crafted)
    refused("cifar10", tmp_path, "data_batch_3")
    assert not canary.exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x80\x02cos\nsystem\nU\x04trueq\x00\x85R.", "os.system"),
        (b"\x80\x02cbuiltins\neval\nU\x011\x85R.", "builtins.eval"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (
            b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00zip\x86R.",
            "calls a function",
        ),
        (b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85\x85R.", "calls a function"),
        (b"\x80\x02}(]K\x01u.", "a list for a key"),
        (b"\x80\x02]K\x01a.", "no dictionary"),
        (b"\x80\x02}", "complete"),
        (b"", "complete"),
        (b"\x80\x02R.", "complete"),
        (b"\x80\x02h\x07.", "complete"),
        (b"PK\x03\x04 a zip", "complete"),
        (b"\x80\x02(i__main__\nX\n.", "__main__.X"),
    ],
)
def test_what_is_no_plain_data_is_refused(content, why):
    with pytest.raises(ValueError, match=why):
        plain_pickle.load_pickled_arrays(content)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4), inner)
    ),
    max_leaves=12,
)


@quick
@given(st.dictionaries(st.text(max_size=5), plain), st.sampled_from([2, 3, 4, 5]))
def test_plain_data_comes_back(content, protocol):
    assert plain_pickle.load_pickled_arrays(pickle.dumps(content, protocol)) == content


@quick
@given(st.data())
def test_mutated_pickles_are_read_or_refused(data):
    raw = bytearray(
        data.draw(st.sampled_from([batch(PIXEL_ROWS[:1, :40], [3]) for batch in BATCHES.values()]))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for content in (bytes(raw), bytes(raw[:cut])):
        try:
            found = plain_pickle.build_array(plain_pickle.load_pickled_arrays(content).get("data"))
        except ValueError:
            continue
        assert found.dtype == np.uint8


def test_too_many_opcodes_are_refused(monkeypatch):
    monkeypatch.setattr(plain_pickle, "MAX_ARRAY_OPCODES", 1000)
    with pytest.raises(ValueError, match="opcodes"):
        plain_pickle.load_pickled_arrays(b"\x80\x02" + b"N" * 2000 + b".")


def test_damaged_cifar_files_are_named(tmp_path):
    def fresh(**changes: bytes | None) -> Path:
        write_python(CIFAR10, tmp_path)
        for name, content in changes.items():
            (
                (tmp_path / name).unlink()
                if content is None
                else (tmp_path / name).write_bytes(content)
            )
        return tmp_path

    good = python2_batch(PIXEL_ROWS[:3], [1, 2, 3])
    refused("cifar10", fresh(data_batch_2=None), "data_batch_2", "unpack")
    (tmp_path / "data_batch_2").write_bytes(good)
    refused("cifar10", fresh(data_batch_2=good[:-500]), "data_batch_2")
    refused(
        "cifar10",
        fresh(data_batch_2=python2_batch(PIXEL_ROWS[:2], [1, 2])),
        "data_batch_2",
        "2 images",
    )
    refused(
        "cifar10",
        fresh(data_batch_2=python2_batch(PIXEL_ROWS[:3], [1, 2])),
        "data_batch_2",
        "2 labels",
    )
    refused(
        "cifar10",
        fresh(data_batch_2=python2_batch(PIXEL_ROWS[:3], [1, 2, 10])),
        "data_batch_2",
        "label 10",
    )
    refused(
        "cifar10", fresh(data_batch_2=python2_batch(PIXEL_ROWS[:3, :3000], [1, 2, 3])), "(3, 3000)"
    )
    refused(
        "cifar10",
        fresh(data_batch_2=pickle.dumps({"data": 1, "labels": [1]}, 2)),
        "data_batch_2",
        "no uint8",
    )
    refused(
        "cifar10",
        fresh(data_batch_2=pickle.dumps({"labels": ["1"]}, 2)),
        "data_batch_2",
        "'labels'",
    )
    fresh(data_batch_2=good)
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": ["a"]}, 2))
    refused("cifar10", tmp_path, "batches.meta", "1 classes instead of 10")


def test_an_array_may_not_claim_more_than_it_holds(tmp_path):
    write_python(CIFAR10, tmp_path)
    raw = python2_batch(PIXEL_ROWS[:3], [1, 2, 3])
    huge = raw.replace(b"K\x03M\x00\x0c\x86", b"J\xff\xff\xff\x7fM\x00\x0c\x86")  # 2^31 - 1 rows
    assert huge != raw
    (tmp_path / "data_batch_1").write_bytes(huge)
    refused("cifar10", tmp_path, "data_batch_1", "claims shape")


def test_an_array_of_wide_characters_is_refused(tmp_path):
    write_python(CIFAR10, tmp_path)
    raw = python3_batch(
        np.full((3, PIXELS_PER_IMAGE), 0xE9, np.uint8), [1, 2, 3]
    )  # each byte is the two of UTF-8's e acute
    (tmp_path / "data_batch_1").write_bytes(
        raw.replace(b"\xc3\xa9", b"\xdb\x82", 1)
    )  # U+06C2, no latin-1
    refused("cifar10", tmp_path, "data_batch_1", "no bytes")


# Images


def save_png(path: Path, pixels: np.ndarray) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(path)


def test_image_folders(tmp_path):
    for name, count in (("cat", 2), ("ant", 1)):
        for i in range(count):
            save_png(tmp_path / name / f"{i}.png", np.full((3, 4, 5), 10 * i + len(name), np.uint8))
    (tmp_path / "cat" / "notes.txt").write_text("ignored")
    source = read_dataset("images", tmp_path)
    assert source.x.shape == (3, 3, 4, 5)
    assert source.classes == ("ant", "cat")
    assert source.y.tolist() == [0, 1, 1]
    assert source.x[:, 0, 0, 0].tolist() == [3, 3, 13]


def test_grey_images_have_one_channel_unless_one_is_coloured(tmp_path):
    save_png(tmp_path / "a" / "1.png", np.full((1, 4, 4), 9, np.uint8))
    assert read_dataset("images", tmp_path).x.shape == (1, 1, 4, 4)
    save_png(tmp_path / "b" / "1.png", np.full((3, 4, 4), 9, np.uint8))
    assert read_dataset("images", tmp_path).x.shape == (2, 3, 4, 4)


def test_odd_images_are_named(tmp_path):
    refused("images", tmp_path, str(tmp_path))
    save_png(tmp_path / "a" / "1.png", np.zeros((1, 4, 4), np.uint8))
    bad = tmp_path / "a" / "2.png"
    bad.write_bytes(b"GIF89a, by its looks")
    refused("images", tmp_path, "2.png", "PNG")
    save_png(bad, np.zeros((1, 5, 4), np.uint8))
    refused("images", tmp_path, "2.png", "4x5")
    save_png(bad, RNG.integers(0, 256, (1, 4, 4), dtype=np.uint8))
    bad.write_bytes(bad.read_bytes()[:50])
    refused("images", tmp_path, "2.png", "cut short")
    save_png(bad, np.zeros((1, 4, 4), np.uint16))
    refused("images", tmp_path, "2.png", "8 bits")


def test_a_file_name_cannot_break_the_line(tmp_path):
    save_png(tmp_path / "a" / "1.png", np.zeros((1, 4, 4), np.uint8))
    (tmp_path / "a" / "2\n\x1b[2J.png").write_bytes(b"?")
    refused("images", tmp_path, r"2\n\x1b[2J.png")


# idx


def idx_bytes(array: np.ndarray) -> bytes:
    kind = {1: 0x08, 4: 0x0C}[array.dtype.itemsize]
    return (
        bytes([0, 0, kind, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_idx(folder: Path, name: str, array: np.ndarray) -> None:
    content = idx_bytes(array)
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), rng.integers(
        0, 10, count, dtype=np.uint8
    )


def test_mnist_below_the_folder_that_a_download_makes(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    x, y = digits(2, 1)
    write_idx(raw, "train-images-idx3-ubyte", x)
    write_idx(raw, "train-labels-idx1-ubyte", y)
    assert np.array_equal(read_dataset("mnist", tmp_path).x[:, 0], x)
    refused("fashion-mnist", tmp_path, "train-images-idx3-ubyte.gz")  # never digits for clothes


@pytest.mark.parametrize("end", ["", ".gz"])
def test_mnist_pools_both_parts(tmp_path, end):
    (x, y), (x2, y2) = digits(6, 1), digits(2, 2)
    write_idx(tmp_path, f"train-images-idx3-ubyte{end}", x)
    write_idx(tmp_path, f"train-labels-idx1-ubyte{end}", y)
    assert len(read_dataset("mnist", tmp_path).y) == 6
    write_idx(tmp_path, f"t10k-images-idx3-ubyte{end}", x2)
    refused("mnist", tmp_path, "t10k-labels-idx1-ubyte.gz")
    write_idx(tmp_path, f"t10k-labels-idx1-ubyte{end}", y2)
    source = read_dataset("mnist", tmp_path)
    assert np.array_equal(source.x[:, 0], np.concatenate([x, x2]))
    assert source.y.tolist() == [*y, *y2]
    assert (source.scale, source.shift) == (1 / 255, 0)
    fashion = read_dataset(
        "fashion-mnist", tmp_path
    )  # the same file names; keeps to the training part
    assert np.array_equal(fashion.x[:, 0], x)
    assert fashion.classes[9] == "Ankle boot"


def test_emnist_is_turned_upright(tmp_path):
    upright = np.zeros((2, 28, 28), np.uint8)
    upright[:, 3, 20] = [200, 100]  # row 3, column 20
    (tmp_path / "gzip").mkdir()
    for part, row in (("train", 0), ("test", 1)):
        stored = upright[row : row + 1].transpose(0, 2, 1)
        write_idx(tmp_path / "gzip", f"emnist-byclass-{part}-images-idx3-ubyte.gz", stored)
        write_idx(
            tmp_path / "gzip",
            f"emnist-byclass-{part}-labels-idx1-ubyte.gz",
            np.array([36 + row], np.uint8),
        )
    source = read_dataset("femnist", tmp_path)
    assert np.array_equal(source.x[:, 0], upright)
    assert [source.classes[k] for k in source.y] == ["a", "b"]
    assert len(source.classes) == 62


def test_idx_claims_are_checked_before_memory_is_taken(tmp_path):
    path = tmp_path / "a.gz"
    claims = {
        "1e12 items": struct.pack(">4I", 0x803, 10**6, 1000, 1000),
        "most items": struct.pack(">4I", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1),
        "more than gzip can pack": struct.pack(">4I", 0x803, 10**6, 28, 28),
    }
    for header in claims.values():
        path.write_bytes(gzip.compress(header + bytes(100)))
        with pytest.raises(BadInput, match=r"a\.gz claims"):
            read_idx(path, 3)


def test_a_gzip_bomb_is_read_no_further_than_its_header_says(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(struct.pack(">2I", 0x801, 10) + bytes(50_000_000)))
    with pytest.raises(BadInput, match="holds more"):
        read_idx(path, 1)


def test_damaged_idx_files_are_named(tmp_path):
    x, y = digits(5, 1)
    whole = gzip.compress(idx_bytes(x))
    images = tmp_path / "train-images-idx3-ubyte.gz"
    write_idx(tmp_path, "train-labels-idx1-ubyte.gz", y)
    refused("mnist", tmp_path, images.name)
    damaged = {
        "cut": whole[: len(whole) // 2],
        "cut after the header": gzip.compress(idx_bytes(x)[:-1]),
        "flipped": whole[:200] + bytes([whole[200] ^ 255]) + whole[201:],
        "no gzip": idx_bytes(x),
        "labels instead": gzip.compress(idx_bytes(y)),
        "integers instead": gzip.compress(idx_bytes(x.astype(">i4"))),
        "other size": gzip.compress(idx_bytes(x[:, :20])),
        "empty": b"",
        "one image fewer": gzip.compress(idx_bytes(x[:4])),
    }
    for content in damaged.values():
        images.write_bytes(content)
        refused("mnist", tmp_path, images.name)


@st.composite
def idx_contents(draw: st.DrawFn) -> bytes:
    """Two sides and as many bytes as they say."""
    sides = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    return struct.pack(">2I", *sides) + draw(
        st.binary(min_size=sides[0] * sides[1], max_size=sides[0] * sides[1])
    )


@quick
@given(st.one_of(st.binary(max_size=80), idx_contents()), st.booleans())
def test_any_bytes_are_an_idx_file_or_refused(tmp_path_factory, content, packed):
    path = tmp_path_factory.mktemp("idx") / ("a.gz" if packed else "a")
    whole = b"\0\0\x08\x02" + content
    path.write_bytes(gzip.compress(whole) if packed else whole)
    sides = struct.unpack(">2I", content[:8]) if len(content) >= 8 else (1, 1)
    if len(content) == 8 + sides[0] * sides[1]:
        assert read_idx(path, 2).tobytes() == content[8:]
    else:
        with pytest.raises(BadInput, match=path.name):
            read_idx(path, 2)


# LEAF


def leaf_file(users: dict[str, list[int]], paper: float = 1.0) -> dict:
    """Characters as a blank sheet with one half-grey pixel at the label's place."""

    def image(label: int) -> list[float]:
        pixels = [paper] * 784
        pixels[label] = 0.5
        return pixels

    data = {
        user: {"x": [image(label) for label in labels], "y": labels}
        for user, labels in users.items()
    }
    return {
        "users": list(users),
        "num_samples": [len(labels) for labels in users.values()],
        "user_data": data,
    }


def test_leaf_pools_its_files_by_writer(tmp_path):
    for part, users in (("train", {"f1_05": [3, 61], "f0_12": [10]}), ("test", {"f1_05": [4]})):
        folder = tmp_path / "data" / part
        folder.mkdir(parents=True)
        (folder / f"all_data_0_{part}.json").write_text(json.dumps(leaf_file(users)))
    source = read_dataset("femnist", tmp_path)
    assert source.y.tolist() == [3, 61, 10, 4]
    assert source.groups == ("f0_12", "f1_05")
    assert source.group.tolist() == [1, 1, 0, 1]
    assert source.classes == EMNIST_CLASSES
    # paper 1.0 -> 255 -> 0; ink 0.5 -> rint(127.5) = 128 (to even) -> 127
    assert source.x.reshape(4, 784)[0, :5].tolist() == [0, 0, 0, 127, 0]
    assert (source.x.reshape(4, 784).sum(1) == 127).all()


def test_leaf_that_is_bright_on_dark_stays(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(leaf_file({"w": [1]}, paper=0.0)))
    assert read_dataset("femnist", tmp_path).x.reshape(784)[:3].tolist() == [0, 128, 0]


def test_damaged_leaf_files_are_named(tmp_path):
    refused("femnist", tmp_path, str(tmp_path), "EMNIST")
    path = tmp_path / "all_data_0.json"
    good = leaf_file({"w\n1": [1, 2]})

    def changed(**user_data: object) -> str:
        return json.dumps(
            {**good, "user_data": {"w\n1": {**good["user_data"]["w\n1"], **user_data}}}
        )

    text = json.dumps(good)
    bright, nan = [[2.0] * 784] * 2, [[float("nan")] * 784] * 2
    wrong = [
        text[:-9],
        "[1, 2]",
        "[" * 100_000,
        "{}",
        json.dumps({**good, "num_samples": [3]}),
        json.dumps({**good, "num_samples": [10**12]}),
        json.dumps({**good, "users": ["x"]}),
        json.dumps({**good, "users": [["x"]]}),
        changed(y=[1]),
        changed(y=[1, 62]),
        changed(y=[1, -1]),
        changed(y=[1, 10**30]),
        changed(x=[[0.0] * 783] * 2),
        changed(x=[[0.0] * 784, [0.0]]),
        changed(x=[["a"] * 784] * 2),
        changed(x=bright),
        changed(x=nan),
        changed(y=[1, 1.5]),
        changed(y=["1", "2"]),
        json.dumps({"users": [], "num_samples": [], "user_data": {}}),
        json.dumps({**good, "users": ["w\n1"] * 2, "num_samples": [2, 2]}),
        text.replace("w\\n1", "\\ud800"),
    ]
    path.write_text(text)
    assert len(read_dataset("femnist", tmp_path).y) == 2
    for content in wrong:
        path.write_text(content)
        refused("femnist", tmp_path, tmp_path.name)


# Speech


def chirp() -> np.ndarray:
    n = np.arange(12_000) / 16_000  # 0.75 s from 200 Hz upwards
    return (8000 * np.sin(2 * np.pi * (200 * n + 900 * n**2))).astype(np.int16)


def write_wav(
    path: Path, samples: np.ndarray, rate: int = 16_000, channels: int = 1, width: int = 2
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())


def padded(samples: np.ndarray) -> np.ndarray:
    return np.pad(samples, (0, 16_000 - len(samples)))


def test_mfcc_is_librosas():
    # librosa 0.11.0: librosa.feature.mfcc(y=padded(chirp()) / 32768, sr=16000, n_mfcc=32)
    expected = {
        (0, 0): -361.6362,
        (0, 15): -555.4240,
        (0, 31): -631.5319,
        (1, 3): 108.5522,
        (5, 10): -66.7768,
        (12, 20): -54.0086,
        (31, 7): -3.48845,
        (31, 24): -0.71584,
    }
    found = compute_mfcc(padded(chirp())[None])[0]
    assert found.shape == (32, 32)
    assert {place: pytest.approx(found[place], abs=2e-3) for place in expected} == expected
    assert found.mean() == pytest.approx(-17.30176, abs=1e-3)
    assert found.std() == pytest.approx(99.16112, abs=1e-3)


def test_mfcc_of_silence():
    # every band at 10 log10(1e-10) = -100 dB; orthonormal DCT of a constant: -100 sqrt(128), then
    # zeros
    found = compute_mfcc(np.zeros((1, 16_000), np.int16))[0]
    assert found[0] == pytest.approx(-100 * 128**0.5, abs=1e-3)
    assert np.abs(found[1:]).max() < 1e-3


def test_a_clip_does_not_depend_on_its_block():
    loud, quiet = padded(chirp()), padded(chirp()) // 100
    both = compute_mfcc(np.stack([loud, quiet]))
    assert np.allclose(both[1], compute_mfcc(quiet[None])[0], atol=1e-3)


def test_mel_filters_have_equal_area():
    # a triangle of height 2 / base has area 1; at 7.8 Hz a bin the wide ones are summed finely
    # enough
    assert np.allclose(mel_filters()[64:].sum(1) * 8000 / 1024, 1, atol=0.02)


def test_speech_folders(tmp_path):
    write_wav(tmp_path / "yes" / "0a7c2a8d_nohash_0.wav", chirp())
    write_wav(tmp_path / "yes" / "0a7c2a8d_nohash_1.wav", np.tile(chirp(), 3))  # 2.25 s, cut
    write_wav(tmp_path / "no" / "ffff0000_nohash_0.wav", chirp() // 8)
    write_wav(tmp_path / "_background_noise_" / "pink_noise.wav", chirp())
    (tmp_path / "testing_list.txt").write_text("yes/0a7c2a8d_nohash_0.wav\n")
    source = read_dataset("speech", tmp_path)
    assert source.classes == ("no", "yes")
    assert source.y.tolist() == [0, 1, 1]
    assert source.groups == ("0a7c2a8d", "ffff0000")
    assert source.group.tolist() == [1, 0, 0]
    cut = np.tile(chirp(), 3)[:16_000]
    raw = compute_mfcc(np.stack([padded(chirp() // 8), padded(chirp()), cut])).astype(np.float64)
    for c in range(32):
        z = (raw[:, c] - raw[:, c].mean()) / raw[:, c].std()
        seen = source.x[:, 0, c] * source.scale + source.shift
        assert np.abs(seen - z.clip(-6, 6)).max() <= 6 / 255 + 1e-6


def test_speech_below_the_folder_that_a_download_makes(tmp_path):
    write_wav(
        tmp_path / "SpeechCommands" / "speech_commands_v0.02" / "yes" / "ab_nohash_0.wav", chirp()
    )
    assert read_dataset("speech", tmp_path).groups == ("ab",)


def test_a_constant_coefficient_is_zero():
    features = np.full((2, 1, 32, 32), 5.0, np.float32)
    source = build_speech_source(features, np.array([0, 1]), ("a", "b"), np.array([0, 0]), ("s",))
    # round(6 * 255 / 12) = round(127.5) = 128 -> 128 * 12 / 255 - 6 = 0.0235
    assert np.unique(source.x).tolist() == [128]


def test_damaged_speech_is_named(tmp_path):
    refused("speech", tmp_path, str(tmp_path))
    path = tmp_path / "yes" / "0a7c2a8d_nohash_0.wav"
    write_wav(path, chirp())
    whole = path.read_bytes()
    lies = whole[:40] + struct.pack("<I", 2**32 - 2) + whole[44:]
    endless = whole[:12] + b"LIST" + struct.pack("<I", 2**32 - 1) + whole[12:]
    for content in (whole[:-100], whole[:30], b"", b"ID3 an mp3", lies, endless):
        path.write_bytes(content)
        refused("speech", tmp_path, path.name)
    forms = [{"rate": 8000}, {"channels": 2}, {"width": 1}]
    for form in forms:
        write_wav(path, chirp(), **form)
        refused("speech", tmp_path, path.name, "16 bits at 16000 Hz")
    write_wav(path, chirp()[:0])
    refused("speech", tmp_path, path.name)
    write_wav(path, chirp())
    write_wav(path.with_name("holiday.wav"), chirp())
    refused("speech", tmp_path, "holiday.wav", "_nohash_")


# All


@pytest.mark.parametrize("name", DATASET_READERS)
def test_an_empty_or_missing_folder_is_named(tmp_path, name):
    refused(name, tmp_path, str(tmp_path))
    refused(name, tmp_path / "nowhere", "nowhere")


def test_unknown_names_get_a_hint(tmp_path):
    refused("cifar-10", tmp_path, "cifar10")


def test_links_are_followed(tmp_path):
    write_python(CIFAR10, tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert len(read_dataset("cifar10", tmp_path / "link").y) == 15


def test_a_progress_bar_changes_nothing(tmp_path, capsys):
    write_python(CIFAR10, tmp_path)
    assert np.array_equal(
        read_dataset("cifar10", tmp_path, progress=True).x, read_dataset("cifar10", tmp_path).x
    )
    assert "cifar10" in capsys.readouterr().out
