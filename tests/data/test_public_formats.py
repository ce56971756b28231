"""Readers of text, tables and series in their public forms: files in the true format, malformed
ones, real data.
"""

import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from flrce import Experiment, run
from flrce.data import cache
from flrce.data.federation import federate
from flrce.data.readers import read_dataset
from flrce.data.readers.shakespeare import WINDOW_LENGTH, build_role_source, clean_role_text
from flrce.data.sources import Source
from flrce.errors import BadInput

VERSE = (
    "Full fathom five thy father lies;\nOf his bones are coral made;\nThose are pearls that were"
    " his eyes:\n"
)


def spelled(source, ids):
    return "".join(source.classes[i] for i in ids)


# Shakespeare


def leaf(path, users):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    counts = [len(y) for _, y in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": counts, "user_data": data}))


def sliding(text, n):
    return [text[i : i + WINDOW_LENGTH] for i in range(n)], [
        text[i + WINDOW_LENGTH] for i in range(n)
    ]


def test_leafs_json(tmp_path):
    text = clean_role_text(VERSE * 3)
    leaf(
        tmp_path / "data" / "train" / "all_data_train.json",
        {"THE_TEMPEST_ARIEL": sliding(text, 90)},
    )
    leaf(
        tmp_path / "data" / "test" / "all_data_test.json",
        {"THE_TEMPEST_ARIEL": sliding(text[100:], 5)},
    )
    source = read_dataset("shakespeare", tmp_path)
    assert (source.kind, source.shape, source.outputs, source.vocabulary) == (
        "tokens",
        (80,),
        80,
        80,
    )
    assert spelled(source, source.x[7]) == text[7:87]
    assert source.classes[source.y[7]] == text[87]
    assert source.groups == ("THE_TEMPEST_ARIEL",)
    assert source.held.sum() == 5
    every = read_dataset("shakespeare-tokens", tmp_path)
    assert every.predicts_every_position
    assert len(every.y) == 2  # windows 0 and 80 of 90 and 5
    assert spelled(every, every.y[0]) == text[1:81]


def test_plain_text_by_role(tmp_path):
    (tmp_path / "ARIEL.txt").write_text(VERSE)
    (tmp_path / "GHOST.txt").write_text("Mark me.\n" * 2)  # too few lines
    (tmp_path / "BOATSWAIN.txt").write_text("Here.\n" * 3)  # no window
    source = read_dataset("shakespeare", tmp_path)
    text = VERSE.replace("\n", " ")
    assert source.groups == ("ARIEL",)
    assert len(source.y) == len(text) - 80
    assert spelled(source, source.x[-1]) + source.classes[source.y[-1]] == text[-81:]
    every = read_dataset("shakespeare-tokens", tmp_path)
    assert spelled(every, every.x[0]) == text[:80]
    assert spelled(every, every.y[0]) == text[1:81]


def test_malformed_shakespeare(tmp_path):
    with pytest.raises(BadInput, match="neither json nor txt"):
        read_dataset("shakespeare", tmp_path)
    (tmp_path / "A.txt").write_text("Short.\n")
    with pytest.raises(BadInput, match="no role with 3 lines and 80 characters"):
        read_dataset("shakespeare", tmp_path)
    (tmp_path / "B.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="no UTF-8 text"):
        read_dataset("shakespeare", tmp_path)
    for users, match in [
        ({"A": (["abc"], ["d"])}, "no texts of 80 characters"),
        ({"A": ([[1.0]], [1])}, "no texts of 80 characters"),
        ({"A": (["a" * 80, 3], ["d", "e"])}, "mixes texts and numbers"),
        ({"A": (["a" * 80, "b" * 79], ["d", "e"])}, "several lengths"),
        ({"A": (["a" * 80], ["de"])}, "more than one next character"),
    ]:
        leaf(tmp_path / "a.json", users)
        with pytest.raises(BadInput, match=match):
            read_dataset("shakespeare", tmp_path)


def test_the_plays_by_leafs_rule(real_data):
    with gzip.open(real_data / "shakespeare.jsonl.gz", "rt") as lines:
        spoken = [json.loads(line) for line in lines]
    roles = {f"{line['play']}: {line['role']}": line["text"] + "\n" for line in spoken}
    kept = {role: text for role, lines in roles.items() if (text := clean_role_text(lines))}
    assert len(kept) == 1135
    assert (
        sum(len(text) - 80 for text in kept.values()) == 4_167_139
    )  # LEAF: 1,129 and 4.2 million, another edition
    few = build_role_source(dict(list(roles.items())[:40]), "few", stride=80, every=True)
    assert few.y.shape == few.x.shape
    np.testing.assert_array_equal(few.x[:, 1:], few.y[:, :-1])


# fed-heart


def hospital(path, rows=30, change=lambda row, i: row):
    rng = np.random.default_rng(0)
    lines = []
    for i in range(rows):
        row = [
            50 + i % 9,
            i % 2,
            1 + i % 4,
            120,
            200 + i,
            0,
            i % 3,
            150,
            0,
            round(rng.random(), 2),
            2,
            "?",
            "?",
            i % 4 % 2,
        ]
        lines.append(",".join(map(str, change(row, i))))
    path.write_text("\n".join(lines) + "\n")


def hospitals(folder, **more):
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        hospital(folder / f"processed.{name}.data", **more)


def test_hospitals(tmp_path):
    hospitals(tmp_path, change=lambda row, i: [*row[:4], "?", *row[5:]] if i == 3 else row)
    source = read_dataset("fed-heart", tmp_path)
    assert (source.shape, source.classes, len(source.y)) == ((13,), ("healthy", "ill"), 4 * 29)
    first = source.x[(source.group == 0) & ~source.held]
    np.testing.assert_allclose(first.mean(0), 0, atol=1e-5)
    assert set(np.round(first.std(0, ddof=1), 4).tolist()) == {0, 1}  # some columns never vary here


def test_malformed_hospitals(tmp_path):
    with pytest.raises(BadInput, match=r"cleveland\.data cannot be read"):
        read_dataset("fed-heart", tmp_path)
    for change, match in [
        (lambda row, i: row[:-1] if i == 4 else row, "line 5 has 13 cells where 14 are expected"),
        (lambda row, i: ["old", *row[1:]], "column age holds text"),
        (lambda row, i: ["?", *row[1:]], "fewer than 4 patients"),
    ]:
        hospitals(tmp_path, change=change)
        with pytest.raises(BadInput, match=match):
            read_dataset("fed-heart", tmp_path)


@pytest.fixture
def heart(real_data, tmp_path) -> Path:
    """The hospitals' files as UCI has them."""
    with np.load(real_data / "heart.npz") as z:
        for name in np.unique(z["group"]):
            rows = np.concatenate([z["x"], z["grade"][:, None]], 1)[z["group"] == name]
            text = "\n".join(
                ",".join("?" if np.isnan(v) else f"{v:g}" for v in row) for row in rows
            )
            (tmp_path / f"processed.{name}.data").write_text(text + "\n")
    return tmp_path


def test_fed_heart_is_flambys(heart):
    source = read_dataset("fed-heart", heart)
    train = np.bincount(source.group[~source.held]).tolist()
    test = np.bincount(source.group[source.held]).tolist()
    assert (train, test) == ([199, 172, 30, 85], [104, 89, 16, 45])  # as in FLamby's README


def test_hospitals_learn_together(heart):
    experiment = Experiment(
        rounds=15,
        clients=4,
        per_round=4,
        data={"partition": "given"},
        model={"name": "logistic"},
        train={"lr": 0.05, "epochs": 2},
        recipe={"name": "fedavg"},
        engine={"workers": 1},
    )
    assert (
        run(experiment, data=read_dataset("fed-heart", heart)).summary["accuracy_weighted"] > 0.7
    )  # chance: .55


# packed for the experiments


@pytest.fixture(scope="module")
def packed():
    path = Path(__file__).resolve().parents[2] / "experiments" / "adapters" / "packed.py"
    spec = importlib.util.spec_from_file_location("packed", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_packed_hospitals_are_the_public_ones(real_data, heart, packed):
    one, two = packed.fed_heart(real_data / "heart.npz"), read_dataset("fed-heart", heart)
    np.testing.assert_allclose(one.x, two.x, atol=1e-6)  # packed in single precision
    np.testing.assert_array_equal(one.held, two.held)


def test_packed_series_and_tables(real_data, packed):
    watch = packed.smartwatch(real_data / "smartwatch.npz")
    assert (watch.shape, watch.outputs, len(watch.groups)) == ((6, 128), 7, 10)
    assert 3500 < len(watch.y) < 3700
    scores = packed.chem97(real_data / "tabular.npz")
    assert (scores.kind, scores.outputs, scores.shape, len(scores.groups)) == (
        "values",
        1,
        (3,),
        131,
    )
    vowel = packed.vowel(real_data / "tabular.npz")
    assert (vowel.outputs, vowel.shape, len(vowel.groups)) == (11, (9,), 15)


def test_subjects_learn_together(real_data, packed):
    experiment = Experiment(
        rounds=3,
        clients=10,
        per_round=10,
        data={"partition": "given"},
        train={"lr": 0.1, "epochs": 1},
        recipe={"name": "fedavg"},
        engine={"workers": 1},
    )
    assert (
        run(experiment, data=packed.smartwatch(real_data / "smartwatch.npz")).summary["accuracy"]
        > 0.4
    )  # of 1/7


# prepared


@pytest.mark.parametrize("kind", ["classes", "values", "tokens", "every", "labels"])
def test_every_kind_is_prepared_and_mapped(kind, tmp_path):
    rng, N = np.random.default_rng(0), 40
    ids = rng.integers(0, 9, (N, 6))
    x, y, classes = {
        "classes": (rng.random((N, 3), np.float32), rng.integers(0, 2, N), ("a", "b")),
        "values": (rng.random((N, 3), np.float32), rng.random((N, 2), np.float32), ()),
        "tokens": (ids[:, :-1], ids[:, -1], tuple("abcdefghi")),
        "every": (ids[:, :-1], np.where(ids[:, 1:] == 3, -100, ids[:, 1:]), tuple("abcdefghi")),
        "labels": (
            rng.random((N, 3), np.float32),
            rng.integers(0, 2, (N, 4)).astype(np.uint8),
            tuple("wxyz"),
        ),
    }[kind]
    told = "tokens" if kind == "every" else kind
    source = Source(
        "made",
        x,
        y,
        classes,
        np.arange(N) % 4,
        tuple("pqrs"),
        kind=told,
        held=np.arange(N) % 5 == 0,
    )
    back = cache.load_prepared(cache.write_prepared(source, tmp_path / "made"))
    assert (back.kind, back.outputs, back.has_token_ids, back.predicts_every_position) == (
        told,
        source.outputs,
        source.has_token_ids,
        source.predicts_every_position,
    )
    for name in ("x", "y", "group", "held"):
        np.testing.assert_array_equal(getattr(back, name), getattr(source, name))
    one, two = (federate(s, "given", 4, 0).describe() for s in (source, back))
    assert one == two


@pytest.mark.parametrize(
    ("kind", "x", "y", "match"),
    [
        (
            "classes",
            np.zeros((4, 2), np.float64),
            np.zeros(4, np.int64),
            "uint8, float32 or int64 ids",
        ),
        ("values", np.zeros((4, 2), np.float32), np.zeros(4, np.int64), "needs y of f4"),
        ("tokens", np.zeros((4, 2), np.int64), np.full(4, 7), "beyond its 1 classes"),
        ("tokens", np.full((4, 2), -1), np.zeros(4, np.int64), "token ids below 0"),
        ("labels", np.zeros((4, 2), np.float32), np.zeros(4, np.uint8), "with 2 axes for labels"),
    ],
)
def test_what_does_not_fit_is_not_prepared(kind, x, y, match, tmp_path):
    with pytest.raises(BadInput, match=match):
        cache.write_prepared(Source("made", x, y, ("a",), kind=kind), tmp_path / "made")
