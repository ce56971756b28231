"""Texts with labels: trained from csv, jsonl, DataFrames, data sets and Python, and predicted."""

import csv
import json

import numpy as np
import pytest
from sklearn.utils import murmurhash3_32

import flrce
from flrce.cli.cli import main
from flrce.data.text_features import ROW_NORM, hash_texts
from flrce.data.user import to_source
from flrce.errors import BadInput

GOOD = ["a lovely warm film", "great acting and a great plot", "i loved every minute of it"]
BAD = ["a dull cold film", "awful acting and no plot", "i hated every minute of it"]
NEW = ["great film i loved it", "dull plot awful film"]
SMALL = {"rounds": 8, "clients": 3, "per_round": 3, "seed": 2, "recipe": {"name": "fedavg"}}


def make_rows():
    """(text, label, client): 60 texts, each different by a number that says nothing."""
    texts = [(text, label) for label, some in (("good", GOOD), ("bad", BAD)) for text in some]
    return [(f"{t} {i}", y, f"c{i % 3}") for i, (t, y) in enumerate(texts * 10)]


def write_csv(path, rows):
    with open(path, "w", newline="") as opened:
        csv.writer(opened).writerows([("review", "label", "client"), *rows])
    return path


def run_on(data, out=None, **more):
    experiment = flrce.Experiment(**SMALL, data={"partition": "given", **more})
    return flrce.run(experiment, out, data=data)


def test_hashed_words_by_hand():
    """Words and pairs of words, each at its hash with the hash's sign, scaled to one length."""
    rows = hash_texts(["Red fish, red", ""], 32)
    expected = np.zeros(32)
    for gram in ("red", "fish", "red", "red fish", "fish red"):
        code = murmurhash3_32(gram, seed=0)
        expected[abs(code) % 32] += 1 if code >= 0 else -1
    np.testing.assert_allclose(rows[0], ROW_NORM * expected / np.linalg.norm(expected), rtol=1e-5)
    assert not rows[1].any()


def test_a_csv_of_texts_is_trained_and_predicted(tmp_path, capsys):
    train = write_csv(tmp_path / "train.csv", make_rows())
    args = [f"--set=data.path={train}", "--set=data.partition=given", "--set=clients=3"]
    args += ["--set=per_round=3", "--set=rounds=8", "--set=recipe.name=fedavg"]
    assert main(["run", *args, f"--out={tmp_path / 'run'}"]) == 0
    assert "column 'review' is read as text: 4096 hashed n-grams" in capsys.readouterr().err
    new = tmp_path / "new.txt"
    new.write_text("\n".join(NEW) + "\n")
    assert main(["predict", str(tmp_path / "run"), str(new), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"]["label"] == ["good", "bad"]
    model = flrce.load(tmp_path / "run")
    assert model.predict(NEW).values.tolist() == ["good", "bad"]
    assert model.predict({"review": NEW}).values.tolist() == ["good", "bad"]
    assert model.network[1].weight.shape == (2, 4096)  # auto is linear


def test_jsonl_frames_and_datasets_give_the_same_samples(tmp_path):
    rows = make_rows()
    expected = to_source(write_csv(tmp_path / "a.csv", rows))
    names = ("review", "label", "client")
    items = [dict(zip(names, row, strict=True)) for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    forms = [to_source(tmp_path / "a.jsonl"), to_source(NamedItems(items))]
    pandas = pytest.importorskip("pandas")
    forms.append(to_source(pandas.DataFrame(items)))
    for source in forms:
        assert np.array_equal(source.x, expected.x)
        assert source.classes == ("bad", "good")
        assert source.groups == ("c0", "c1", "c2")
        assert source.features == ("review",)


def test_huggingface_texts_with_named_classes():
    hf = pytest.importorskip("datasets")
    rows = make_rows()
    columns = {"text": [row[0] for row in rows], "label": [int(row[1] == "good") for row in rows]}
    kinds = {"text": hf.Value("string"), "label": hf.ClassLabel(names=["neg", "pos"])}
    data = hf.Dataset.from_dict(columns, features=hf.Features(kinds))
    source = to_source(hf.DatasetDict({"train": data, "test": data}))
    assert source.classes == ("neg", "pos")
    assert source.held.sum() == len(rows)


class NamedItems:
    """A data set of dicts."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def test_texts_from_python_with_and_without_clients():
    rows = make_rows()
    texts, labels, clients = (list(column) for column in zip(*rows, strict=True))
    pooled = to_source((texts, labels, clients))
    apart = to_source(
        {
            c: ([t for t, _, o in rows if o == c], [y for _, y, o in rows if o == c])
            for c in ["c0", "c1", "c2"]
        }
    )
    assert apart.groups == pooled.groups == ("c0", "c1", "c2")
    assert apart.x.shape == pooled.x.shape == (60, 4096)
    assert run_on((texts, labels, clients)).summary["accuracy"] > 0.9


def test_texts_beside_numbers_are_not_standardised():
    rows = make_rows()
    table = {
        "stars": np.arange(60.0) % 7,
        "body": np.array([row[0] for row in rows]),
        "label": np.array([row[1] for row in rows]),
    }
    source = to_source(table, text="body", buckets=64, standardise=True)
    assert source.shape == (65,)
    assert source.x[:, 0].mean() == pytest.approx(0, abs=1e-6)
    assert source.x[:, 0].std() == pytest.approx(1, rel=1e-5)
    np.testing.assert_array_equal(source.x[:, 1:], hash_texts(table["body"], 64))


def test_categories_and_names_are_no_text(caplog):
    towns = np.array([f"town {i % 4}" for i in range(40)])
    names = np.array([f"Ann{i}" for i in range(40)])
    source = to_source({"town": towns, "name": names, "y": np.arange(40) % 2})
    assert source.features == ("town",)
    assert "'name' is left out as an identifier" in caplog.text


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"text": "bdy"}, "no column 'bdy' for text; did you mean 'body'"),
        ({"buckets": 64, "ignore": "body"}, "has no text column; name it in data.text"),
    ],
)
def test_mistakes_about_text_are_told(how, message):
    rows = make_rows()
    table = {"body": [r[0] for r in rows], "a": np.arange(60) % 5, "y": [r[1] for r in rows]}
    with pytest.raises(BadInput, match=message):
        to_source(table, **how)


def test_a_tokenizer_makes_ids_of_the_text(tmp_path):
    pytest.importorskip("tokenizers", reason="needs flrce[llm]")
    from flrce.formats.language import open_language_model
    from language_files import SIZES, weights, write_folder

    folder = write_folder(tmp_path / "model", weights())
    path = write_csv(tmp_path / "train.csv", make_rows())
    how = {"text": "review", "tokenizer": str(folder), "length": 12}
    source = to_source(path, **how)
    tokens = open_language_model(folder).tokenizer()
    ids = tokens.encode(make_rows()[0][0])[:12]
    assert source.x[0].tolist() == [*[tokens.end] * (12 - len(ids)), *ids]
    assert source.kind == "classes"
    assert source.vocabulary == SIZES["vocabulary"]  # new texts may have other ids
    tables = {**SMALL, "rounds": 1, "model": {"name": "gru"}}
    data = {"path": str(path), "partition": "given", **how}
    flrce.run(flrce.Experiment.from_tables({**tables, "data": data}), tmp_path / "run")
    assert flrce.load(tmp_path / "run").predict(NEW).probabilities.shape == (2, 2)
