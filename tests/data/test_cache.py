"""The prepared cache: the same bytes back, and every fault named; and the adapter that fills it
from packed data.
"""

import hashlib
import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from flrce.data import cache
from flrce.data.sources import Source
from flrce.errors import BadInput

quick = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def example(**changes) -> Source:
    x = np.arange(6 * 1 * 2 * 3, dtype=np.uint8).reshape(6, 1, 2, 3)
    y, group = np.array([0, 1, 1, 2, 1, 0]), np.array([0, 0, 1, 1, 0, 1])
    names = ("zéro", "one\n", "\x1b[2Jtwo")
    return replace(
        Source("mine", x, y, names, group, ("w1", "../w2"), scale=1 / 255, shift=-0.1), **changes
    )


def same(a: Source, b: Source) -> bool:
    fields = ("name", "classes", "groups", "scale", "shift")
    groups = (a.group is None) == (b.group is None) and (
        a.group is None or np.array_equal(a.group, b.group)
    )
    exact = a.x.dtype == b.x.dtype and a.x.tobytes() == b.x.tobytes() and a.x.shape == b.x.shape
    return (
        exact
        and groups
        and np.array_equal(a.y, b.y)
        and all(getattr(a, f) == getattr(b, f) for f in fields)
    )


def refused(folder: Path, *words: str, verify: bool = True) -> None:
    with pytest.raises(BadInput) as caught:
        cache.load_prepared(folder, verify)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_round_trip(tmp_path):
    folder = cache.write_prepared(example(), tmp_path / "new" / "mine")
    for verify in (True, False):
        loaded = cache.load_prepared(folder, verify)
        assert same(loaded, example())
        assert isinstance(loaded.x, np.memmap)
        assert not loaded.x.flags.writeable
    assert sorted(p.name for p in folder.iterdir()) == ["group.npy", "meta.json", "x.npy", "y.npy"]
    assert [p.name for p in folder.parent.iterdir()] == ["mine"]  # nothing is left beside it
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["counts"] == [2, 3, 1]
    assert meta["version"] == 1
    assert np.array_equal(np.load(folder / "x.npy", allow_pickle=False), example().x)


@quick
@given(
    arrays.arrays(
        st.sampled_from([np.uint8, np.float32]),
        st.tuples(st.integers(0, 5), st.integers(1, 2), st.integers(1, 4), st.integers(1, 4)),
    ),
    st.lists(st.text(st.characters(), max_size=5), min_size=1, max_size=3),
    st.floats(-9, 9),
    st.booleans(),
)
def test_any_source_comes_back_bit_for_bit(tmp_path_factory, x, names, scale, grouped):
    codes = np.arange(len(x)) % len(names)
    group, groups = (codes, tuple(names)) if grouped else (None, ())
    source = Source("any", x, codes, tuple(names), group, groups, scale=scale)
    folder = cache.write_prepared(source, tmp_path_factory.mktemp("any") / "c")
    assert same(cache.load_prepared(folder), source)


@quick
@given(st.sampled_from(["x.npy", "y.npy", "group.npy", "meta.json"]), st.data())
def test_any_flipped_bit_is_found(tmp_path_factory, name, data):
    folder = cache.write_prepared(example(), tmp_path_factory.mktemp("flip") / "c")
    content = bytearray((folder / name).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / name).write_bytes(content)
    refused(folder, name)


@pytest.mark.parametrize("name", ["x.npy", "y.npy", "group.npy", "meta.json"])
@pytest.mark.parametrize("verify", [True, False])
def test_missing_and_truncated_files_are_named(tmp_path, name, verify):
    folder = cache.write_prepared(example(), tmp_path / "c")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    refused(folder, name, "prepare", verify=verify)
    (folder / name).unlink()
    refused(folder, name, "prepare", verify=verify)
    (folder / name).mkdir()
    refused(folder, name, verify=verify)


def test_what_is_no_cache_is_refused(tmp_path):
    refused(tmp_path / "nowhere", "meta.json")
    for content in ("", "[]", "{}", "[" * 100_000, '{"version": 1e999}'):
        (tmp_path / "meta.json").write_text(content)
        refused(tmp_path, "meta.json")


def reseal(folder: Path, **changes: object) -> None:
    """A meta.json that is consistent with itself but not with this program or the arrays."""
    meta = {**json.loads((folder / "meta.json").read_text()), **changes, "seal": ""}
    seal = hashlib.sha256((json.dumps(meta, indent=1) + "\n").encode()).hexdigest()
    (folder / "meta.json").write_text(json.dumps({**meta, "seal": seal}, indent=1) + "\n")


def test_forged_descriptions_are_refused(tmp_path):
    folder = cache.write_prepared(example(), tmp_path / "c")
    files = json.loads((folder / "meta.json").read_text())["files"]
    forged = {
        "schema version 2": {"version": 2},
        "other shapes": {"shape": [6, 1, 3, 2]},
        "labels beyond": {"classes": ["a"]},
        "group codes beyond": {"groups": []},
        "files": {"files": {**files, "../../etc/passwd": files["x.npy"]}},
        "x.npy": {"files": {"y.npy": files["y.npy"]}},
    }
    for word, changes in forged.items():
        cache.write_prepared(example(), folder)
        reseal(folder, **changes)
        refused(folder, word)


def test_an_array_of_objects_is_never_unpickled(tmp_path):
    folder = cache.write_prepared(example(), tmp_path / "c")
    np.save(folder / "y.npy", np.array([print] * 6, object), allow_pickle=True)
    raw = (folder / "y.npy").read_bytes()
    files = json.loads((folder / "meta.json").read_text())["files"]
    reseal(
        folder,
        files={**files, "y.npy": {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}},
    )
    refused(folder, "y.npy", "no plain .npy")


def test_writing_again_replaces_and_open_maps_stay(tmp_path):
    folder = cache.write_prepared(example(), tmp_path / "c")
    before = cache.load_prepared(folder)
    cache.write_prepared(example(x=example().x + 1, group=None, groups=()), folder)
    after = cache.load_prepared(folder)
    assert after.x[0, 0, 0, 0] == 1
    assert after.group is None
    assert before.x[0, 0, 0, 0] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_failed_write_leaves_the_old_cache(tmp_path, monkeypatch):
    folder = cache.write_prepared(example(), tmp_path / "c")
    real, calls = os.rename, []

    def failing(source, target):
        calls.append(target)
        if len(calls) == 2:  # the new one moving in
            raise OSError("disk gone")
        real(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="disk gone"):
        cache.write_prepared(example(name="other"), folder)
    assert same(cache.load_prepared(folder), example())
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_folder_of_something_else_is_kept(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BadInput, match="no prepared data set"):
        cache.write_prepared(example(), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_link_to_the_cache_stays_a_link(tmp_path):
    (tmp_path / "big-disk").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "big-disk")
    cache.write_prepared(example(), tmp_path / "c")
    assert (tmp_path / "c").is_symlink()
    assert same(cache.load_prepared(tmp_path / "c"), example())


@pytest.mark.parametrize(
    "changes",
    [
        {"x": np.zeros((6, 2), np.float64)},
        {"x": np.zeros((5, 2), np.uint8)},
        {"y": np.array([0, 1, 1, 2, 1, 3])},
        {"y": np.zeros(6, np.int32)},
        {"group": np.array([0, 0, 1, 1, 0, 2])},
        {"group": np.array([0, 0, 1])},
        {"scale": float("nan")},
        {"name": 3},
    ],
)
def test_sources_that_would_not_load_are_not_written(tmp_path, changes):
    with pytest.raises(BadInput):
        cache.write_prepared(example(**changes), tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_home_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FLRCE_DATA", str(tmp_path / "a"))
    assert cache.get_data_folder() == tmp_path / "a"
    monkeypatch.delenv("FLRCE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.get_data_folder() == tmp_path / "flrce" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.get_data_folder() == Path.home() / ".cache" / "flrce" / "data"


def test_prepare_reads_and_writes(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setenv("FLRCE_DATA", str(tmp_path / "home"))
    for value, name in enumerate(["ant", "cat"]):
        (tmp_path / "in" / name).mkdir(parents=True)
        image.fromarray(np.full((2, 2), value, np.uint8)).save(tmp_path / "in" / name / "1.png")
    assert cache.prepare_dataset("images", tmp_path / "in") == tmp_path / "home" / "images"
    loaded = cache.load_prepared(tmp_path / "home" / "images")
    assert loaded.x.reshape(2, 4).tolist() == [[0] * 4, [1] * 4]
    assert loaded.classes == ("ant", "cat")
    with pytest.raises(BadInput, match="no reader"):
        cache.prepare_dataset("../images", tmp_path / "in")


# The adapter for packed data


def packed():
    path = Path(__file__).parents[2] / "experiments" / "adapters" / "packed.py"
    spec = importlib.util.spec_from_file_location("packed", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_packed_speech(tmp_path):
    rng = np.random.default_rng(0)
    levels = rng.integers(0, 256, (3, 1, 32, 32), dtype=np.uint8)
    differences = np.diff(levels, axis=3, prepend=np.uint8(0))  # modulo 256
    scale, offset = rng.random(32, np.float32) + 1, rng.random(32, np.float32)
    np.savez(
        tmp_path / "speech.npz",
        x_dt=differences,
        scale=scale,
        offset=offset,
        y=np.array([1, 0, 1], np.uint8),
        speaker=np.array([1, 1, 0], np.int16),
        speaker_hash=np.array(["ab", "cd"]),
        classes=np.array(["no", "yes"]),
    )
    source = packed().speech(tmp_path / "speech.npz")
    assert [source.groups[k] for k in source.group] == ["cd", "cd", "ab"]
    assert [source.classes[k] for k in source.y] == ["yes", "no", "yes"]
    for c in range(32):
        values = levels[:, 0, c] * np.float64(scale[c]) + offset[c]
        z = (values - values.mean()) / values.std()
        assert np.abs(source.x[:, 0, c] * source.scale + source.shift - z).max() <= 6 / 255 + 1e-4


def test_packed_characters_have_bright_ink(tmp_path):
    x = np.full((2, 1, 28, 28), 255, np.uint8)
    x[0, 0, 5, 5] = 0
    np.savez(
        tmp_path / "femnist.npz",
        x=x,
        y=np.array([61, 10], np.uint8),
        client=np.array([40, 7], np.int16),
    )
    source = packed().femnist(tmp_path / "femnist.npz")
    assert source.x.sum() == source.x[0, 0, 5, 5] == 255
    assert [source.classes[k] for k in source.y] == ["z", "A"]
    assert [source.groups[k] for k in source.group] == ["40", "7"]
