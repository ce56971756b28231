"""Data of one's own in every form: what is made of it, what is told, what is refused."""

import json
import logging

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import flrce
import flrce.core.files
import flrce.data.cache
from flrce import Experiment, Source
from flrce.cli.cli import main
from flrce.data.federation import federate
from flrce.data.user import from_arrays, from_path, to_source
from flrce.errors import BadInput

QUICK = {
    "rounds": 2,
    "clients": 4,
    "per_round": 2,
    "recipe": {"name": "fedavg"},
    "engine": {"workers": 1},
}


def blobs(N=120, K=3):
    rng = np.random.default_rng(0)
    y = rng.integers(0, K, N)
    return (rng.normal(size=(N, 5)) + 3 * y[:, None]).astype(np.float32), y


def table(path, rows=60, label=lambda i: i % 3, extra=""):
    lines = ["height,weight,y,client"] + [
        f"{i % 7},{i % 5}.5,{label(i)},c{i % 4}" for i in range(rows)
    ]
    path.write_text("\n".join(lines) + "\n" + extra)
    return path


# arrays


@pytest.mark.parametrize(
    "make", [np.asarray, torch.as_tensor, lambda v: v.tolist()], ids=["numpy", "torch", "lists"]
)
def test_arrays_tensors_and_lists(make):
    x, y = blobs()
    source = from_arrays(make(x), make(y))
    assert source.x.dtype == np.float32
    np.testing.assert_array_equal(source.x, x)
    assert source.y.tolist() == y.tolist()
    assert source.classes == ("0", "1", "2")


def test_scattered_labels_become_dense_classes(caplog):
    x, y = blobs()
    with caplog.at_level(logging.INFO, "flrce"):
        source = from_arrays(x, np.array([0, 5, 1000])[y])
    assert source.classes == ("0", "5", "1000")
    assert source.y.tolist() == y.tolist()
    assert "labels 0, 5, 1000 are numbered 0..2" in caplog.text


def test_a_class_that_happens_to_be_missing_keeps_its_place():
    assert from_arrays(np.zeros((4, 2), np.float32), [0, 1, 3, 3]).y.tolist() == [0, 1, 3, 3]
    assert from_arrays(np.zeros((4, 2), np.float32), [0, 1, 3, 3]).outputs == 4


def test_text_labels_and_true_false():
    x = np.zeros((3, 2), np.float32)
    assert from_arrays(x, ["cat", "ant", "cat"]).classes == ("ant", "cat")
    assert from_arrays(x, ["cat", "ant", "cat"]).y.tolist() == [1, 0, 1]
    assert from_arrays(x, [True, False, True]).y.tolist() == [1, 0, 1]


def test_floats_are_values_and_tables_of_0_and_1_are_labels(caplog):
    x = np.zeros((4, 2), np.float32)
    assert from_arrays(x, [0.5, 1.25, 3.0, 2.0]).kind == "values"
    assert from_arrays(x, np.eye(4, dtype=int)).kind == "labels"
    assert from_arrays(x, np.eye(4)).kind == "values"
    assert from_arrays(x, [0.0, 1.0, 0.0, 1.0], kind="classes").y.tolist() == [0, 1, 0, 1]
    caplog.clear()
    from_arrays(x, [0.0, 1.0, 0.0, 1.0])
    assert "say kind='classes'" in caplog.text


def test_ids_that_look_like_pixels_are_told_of(caplog):
    ids = np.random.default_rng(0).integers(0, 30, (20, 6)).astype(np.uint8)
    assert from_arrays(ids, np.arange(20) % 2).scale == 1 / 255
    assert "if they are token ids say layout='tokens'" in caplog.text
    caplog.clear()
    source = from_arrays(ids, np.arange(20) % 2, layout="tokens")
    assert (source.x.dtype, source.vocabulary, source.scale) == (np.int64, ids.max() + 1, 1.0)
    assert not caplog.text


def test_ids_in_step_are_next_symbols():
    ids = np.random.default_rng(0).integers(0, 30, (20, 7))
    source = from_arrays(ids[:, :-1], ids[:, 1:])
    assert (source.kind, source.has_token_ids, source.predicts_every_position) == (
        "tokens",
        True,
        True,
    )
    one = from_arrays(ids[:, :-1], ids[:, -1], kind="tokens")
    assert (one.kind, one.has_token_ids, one.predicts_every_position) == ("tokens", True, False)


def test_channels_last_are_turned_and_told_of(caplog):
    x = np.random.default_rng(0).integers(0, 255, (6, 9, 8, 3)).astype(np.uint8)
    source = from_arrays(x, np.arange(6) % 2)
    assert source.shape == (3, 9, 8)
    np.testing.assert_array_equal(source.x[2, :, 4, 5], x[2, 4, 5])
    assert "channels last" in caplog.text
    assert from_arrays(x.transpose(0, 3, 1, 2), np.arange(6) % 2).shape == (3, 9, 8)


def test_three_axes_are_grey_images_or_series():
    x = np.zeros((6, 3, 40), np.float32)
    assert from_arrays(x, np.arange(6) % 2).shape == (1, 3, 40)
    assert from_arrays(x, np.arange(6) % 2, layout="series").shape == (3, 40)


def test_missing_values():
    x = np.array([[1, np.nan], [3, 4], [5, 8]], np.float32)
    with pytest.raises(BadInput, match="NaN in 1 of 3 samples; set fill"):
        from_arrays(x, [0, 1, 0])
    assert from_arrays(x, [0, 1, 0], fill="mean").x[0].tolist() == [1, 6]
    assert from_arrays(x, [0, 1, 0], fill=-1).x[0].tolist() == [1, -1]
    dropped = from_arrays(x, [0, 1, 0], group=["a", "b", "c"], test=[0, 0, 1], fill="drop")
    assert (dropped.y.tolist(), dropped.groups, dropped.held.tolist()) == (
        [1, 0],
        ("b", "c"),
        [False, True],
    )


def test_standardising_uses_training_samples_only(caplog):
    x = np.array([[0.0, 500], [2, 500], [900, 500]], np.float32)
    source = from_arrays(x, [0, 1, 0], test=[0, 0, 1], standardise=True)
    assert source.x.tolist() == [[-1, 0], [1, 0], [899, 0]]
    assert not caplog.text
    from_arrays(x, [0, 1, 0])
    assert "features reach 900; data.standardise = true helps" in caplog.text


@pytest.mark.parametrize(
    ("x", "y", "more", "match"),
    [
        ([[1, 2], [3]], [0, 1], {}, "rows of different lengths"),
        (np.zeros((2, 2)), [0, 1, 2], {}, "2 samples but 3 labels"),
        (np.zeros((0, 2)), [], {}, "holds no samples"),
        ([["a", "b"], ["c", "d"]], [0, 1], {}, "holds text"),
        (np.zeros((2, 2)), [0, 1], {"kind": "labels"}, "of 0 and 1"),
        (np.zeros((2, 2)), [0.5, 1], {"kind": "classes"}, "no classes"),
        (np.zeros((2, 2)), [0, 1], {"layout": "tokens"}, "token ids"),
        (np.zeros((2, 2, 2, 2)), [0, 1], {"layout": "series"}, "is no series"),
        (np.zeros((2, 2)), [0, 1], {"test": ["train", "tset"]}, "use train and test"),
        (np.zeros((2, 2)), [0, 7], {"classes": ["a", "b"]}, "but 2 classes are named"),
        (np.array([[np.nan], [1]]), [0, 1], {"fill": "median"}, "use 'mean', 'drop' or a number"),
        (np.zeros((2, 2)), np.array([np.nan, 1]), {}, "y holds NaN"),
        (np.zeros((2, 2)), np.array([1e300, 0.5]), {}, "y holds NaN"),
        (3.0, [0], {}, "one entry a sample"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_bad_arrays_say_what_to_do(x, y, more, match):
    with pytest.raises(BadInput, match=match):
        from_arrays(x, y, **more)


# tables


def test_csv(tmp_path):
    source = Source.from_csv(table(tmp_path / "people.csv"))
    assert (source.name, source.shape, source.classes) == ("people", (2,), ("0", "1", "2"))
    assert source.x[8].tolist() == [1, 3.5]
    assert source.groups == ("c0", "c1", "c2", "c3")
    assert federate(source, "given", 4, 0).clients == source.groups


def test_csv_columns_by_name(tmp_path):
    rows = [f"{i % 3};{i}.5;{'xyz'[i % 3]};{'train' if i % 4 else 'test'}" for i in range(12)]
    (tmp_path / "a.csv").write_text("\n".join(["ward;temp;city;split", *rows]))
    source = Source.from_csv(tmp_path / "a.csv", target="temp", group="ward")
    assert (source.kind, source.outputs, source.groups) == ("values", 1, ("0", "1", "2"))
    assert source.x[:3].tolist() == np.eye(3).tolist()  # one column for each city
    assert source.held.tolist() == [i % 4 == 0 for i in range(12)]
    both = Source.from_csv(tmp_path / "a.csv", target=["temp", "ward"])
    assert (both.kind, both.outputs) == ("values", 2)


def test_a_column_of_gaps(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,y\n1,?,0\n2,4,1\n3,8,0\n")
    with pytest.raises(BadInput, match="NaN in 1 of 3 samples"):
        Source.from_csv(tmp_path / "a.csv")
    assert Source.from_csv(tmp_path / "a.csv", fill="mean").x[0].tolist() == [1, 6]


@pytest.mark.parametrize(
    ("text", "more", "match"),
    [
        ("", {}, "is empty"),
        ("a,y\n", {}, "no samples below its header"),
        ("1,2\n3,4\n", {}, "no header line"),
        ("a,a\n3,4\n", {}, "different name for each column"),
        ("a,b\n3,4\n", {}, "no label column; name it with target = one of a, b"),
        ("y\n3\n", {}, "no column left for features"),
        ("a,y\n3,4\n5\n", {}, "line 3 has 1 cells where 2 are expected"),
        ("a,y\n3,4\n5,\n", {}, "lacks 1 values"),
        ("a,y\n3,4\n5,2\n", {"target": "x"}, "no column 'x' for target"),
        ("a,y\n" + "\n".join(f"word{i % 60},1" for i in range(120)), {}, "60 different texts"),
    ],
)
def test_malformed_csv(tmp_path, text, more, match):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(BadInput, match=match):
        Source.from_csv(tmp_path / "a.csv", **more)


def test_csv_that_is_no_text(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"a,y\n\xff\xfe,1\n")
    with pytest.raises(BadInput, match="UTF-8"):
        Source.from_csv(tmp_path / "a.csv")
    with pytest.raises(BadInput, match="cannot be read"):
        Source.from_csv(tmp_path / "none.csv")


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"a": i, "b": i / 2, "label": "no" if i % 2 else "yes"}) for i in range(8)
        )
    )
    source = from_path(path)
    assert (source.classes, source.shape) == (("no", "yes"), (2,))
    path.write_text(
        "\n".join(json.dumps({"x": [i, i + 1], "y": i % 2, "group": f"g{i % 2}"}) for i in range(8))
    )
    assert from_path(path).groups == ("g0", "g1")
    for text, match in [
        ("{", "line 1 is no json"),
        ('{"a": 1}\n{"b": 1}', "line 2 has other keys"),
        ("", "no samples"),
    ]:
        path.write_text(text)
        with pytest.raises(BadInput, match=match):
            from_path(path)


def test_pandas_and_parquet(tmp_path):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {
            "a": [1, 2, 3, 4],
            "b": [0.5, None, 1.0, 2.0],
            "city": ["x", "y", "x", "y"],
            "label": pd.Categorical(["no", "yes", "no", "yes"]),
        }
    )
    source = Source.from_pandas(frame, fill="mean")
    assert source.classes == ("no", "yes")
    np.testing.assert_allclose(source.x[1], [2, 3.5 / 3, 1])
    assert to_source(frame, fill="mean").y.tolist() == [0, 1, 0, 1]
    nullable = pd.DataFrame({"a": pd.array([1, 2, None], dtype="Int64"), "y": [0, 1, 0]})
    with pytest.raises(BadInput, match="NaN in 1 of 3 samples"):
        to_source(nullable)
    try:
        frame.to_parquet(tmp_path / "a.parquet")
    except ImportError:
        with pytest.raises(BadInput, match="does not exist"):
            Source.from_parquet(tmp_path / "a.parquet")
        (tmp_path / "a.parquet").write_bytes(b"PAR1")
        with pytest.raises(BadInput, match=r"pip install .*pyarrow"):
            Source.from_parquet(tmp_path / "a.parquet")
    else:
        assert from_path(tmp_path / "a.parquet", fill=0).y.tolist() == [0, 1, 0, 1]
        (tmp_path / "b.parquet").write_bytes(b"nonsense")
        with pytest.raises(BadInput, match="is no parquet file"):
            Source.from_parquet(tmp_path / "b.parquet")


# other libraries' data sets


class Letters(Dataset):
    classes = ("aye", "bee", "sea")

    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i >= 12:
            raise IndexError
        return torch.full((1, 4, 4), float(i)), i % 2  # "sea" does not occur


def test_torch_datasets():
    source = Source.from_dataset(Letters())
    assert (source.shape, source.classes, len(source.y)) == ((1, 4, 4), ("aye", "bee", "sea"), 12)
    x, y = blobs()
    train = TensorDataset(torch.tensor(x), torch.tensor(y))
    both = Source.from_dataset(train, test=TensorDataset(torch.tensor(x[:9]), torch.tensor(y[:9])))
    assert both.held.sum() == 9
    assert not both.held[: len(x)].any()


def test_datasets_of_odd_items_are_refused():
    with pytest.raises(BadInput, match="different shapes"):
        Source.from_dataset([(np.zeros(3), 0), (np.zeros(4), 1)])
    with pytest.raises(BadInput, match=r"a pair \(x, y\) is expected"):
        Source.from_dataset([np.zeros(3), np.zeros(3)])


def test_huggingface():
    hf = pytest.importorskip("datasets")
    made = hf.Dataset.from_dict(
        {
            "a": list(range(8)),
            "b": [i / 2 for i in range(8)],
            "label": [0, 1] * 4,
            "client": ["u", "v"] * 4,
        },
        features=hf.Features(
            {
                "a": hf.Value("int64"),
                "b": hf.Value("float32"),
                "client": hf.Value("string"),
                "label": hf.ClassLabel(names=["no", "yes", "maybe"]),
            }
        ),
    )
    source = to_source(made)
    assert (source.classes, source.groups, source.shape) == (
        ("no", "yes", "maybe"),
        ("u", "v"),
        (2,),
    )
    split = to_source(hf.DatasetDict({"train": made, "test": made.select(range(3))}))
    assert (len(split.y), split.held.sum()) == (11, 3)
    pixels = np.random.default_rng(0).integers(0, 255, (6, 5, 4, 3)).astype(np.uint8)
    pytest.importorskip("PIL")
    from PIL import Image

    images = hf.Dataset.from_dict(
        {"image": [Image.fromarray(p) for p in pixels], "label": [0, 1] * 3}
    )
    np.testing.assert_array_equal(to_source(images).x, pixels.transpose(0, 3, 1, 2))
    texts = to_source(hf.Dataset.from_dict({"text": ["one", "two"], "label": [0, 1]}))
    assert texts.preprocessing.columns[0].is_text
    with pytest.raises(
        BadInput, match=r"beside other columns \('u'\); .*data\.group.*data\.ignore"
    ):
        to_source(images.add_column("u", ["a"] * 6))
    with pytest.raises(BadInput, match="no label column"):
        to_source(hf.Dataset.from_dict({"text": ["one", "two"], "b": [0, 1]}))


@pytest.mark.parametrize("value", [{"bytes": "a"}, ["a", "b"], b"a"], ids=["dict", "list", "bytes"])
def test_nested_cells_are_no_text(value, tmp_path):
    """Before, a dict in a cell was hashed as if it were a sentence."""
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": range(40), "odd": [value] * 40, "y": [0, 1] * 20})
    with pytest.raises(BadInput, match=f"column 'odd' holds {type(value).__name__} values"):
        to_source(frame)
    if not isinstance(value, bytes):
        path = tmp_path / "t.jsonl"
        path.write_text("".join(json.dumps({"odd": value, "y": i % 2}) + "\n" for i in range(40)))
        with pytest.raises(BadInput, match="column 'odd' holds"):
            from_path(path)


def test_an_array_of_another_name_is_one_line():
    with pytest.raises(BadInput, match="'weights' is no array or setting; give x, y"):
        to_source({"x": np.zeros((4, 2)), "y": [0, 1, 0, 1], "weights": np.ones(4)})


def test_a_stream_is_one_line():
    class Stream:
        column_names = ("x", "label")

    with pytest.raises(BadInput, match="streams samples; load it without streaming=True"):
        to_source(Stream())


# folders


def picture(path, value):
    Image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 5), value, np.uint8)).save(path)


def test_folder_per_class(tmp_path):
    for i in range(6):
        picture(tmp_path / "pets" / ("cat" if i % 2 else "dog") / f"{i}.png", 40 * i)
    source = from_path(tmp_path / "pets")
    assert (source.name, source.classes, source.shape, source.held) == (
        "pets",
        ("cat", "dog"),
        (1, 6, 5),
        None,
    )
    assert sorted(source.x[:, 0, 0, 0].tolist()) == [0, 40, 80, 120, 160, 200]


def test_folder_per_class_with_a_split(tmp_path):
    for i in range(6):
        picture(
            tmp_path / ("test" if i > 3 else "train") / ("cat" if i % 2 else "dog") / f"{i}.png",
            40 * i,
        )
    source = from_path(tmp_path)
    assert source.classes == ("cat", "dog")
    assert source.x[source.held][:, 0, 0, 0].tolist() == [200, 160]


def test_folder_per_client(tmp_path):
    for i in range(12):
        picture(tmp_path / f"phone{i % 3}" / ("cat" if i % 2 else "dog") / f"{i}.png", 20 * i)
    source = from_path(tmp_path)
    assert source.groups == ("phone0", "phone1", "phone2")
    assert source.classes == ("cat", "dog")
    for i in range(12):
        row = source.x[:, 0, 0, 0].tolist().index(20 * i)
        assert (source.group[row], source.y[row]) == (i % 3, 1 - i % 2)


def test_file_per_client_and_own_test_files(tmp_path):
    for k in range(3):
        (tmp_path / "a").mkdir(exist_ok=True)
        table(tmp_path / "a" / f"clinic{k}.csv", rows=10 + k)
        (tmp_path / "b" / f"clinic{k}").mkdir(parents=True)
        table(tmp_path / "b" / f"clinic{k}" / "train.csv", rows=8)
        table(tmp_path / "b" / f"clinic{k}" / "test.csv", rows=4)
    files = from_path(tmp_path / "a")
    assert np.bincount(files.group).tolist() == [10, 11, 12]
    split = from_path(tmp_path / "b")
    assert [int(split.held[split.group == k].sum()) for k in range(3)] == [4, 4, 4]
    federation = federate(split, "given", 3, 0)
    assert federation.clients == ("clinic0", "clinic1", "clinic2")
    assert [len(held) for held in federation.held] == [4, 4, 4]


def test_clients_that_do_not_fit_together(tmp_path):
    table(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("one,y\n1,0\n2,1\n")
    with pytest.raises(BadInput, match="make them alike"):
        from_path(tmp_path)


def test_empty_folders(tmp_path):
    with pytest.raises(BadInput, match="one folder a class"):
        from_path(tmp_path)
    with pytest.raises(BadInput, match="is no folder"):
        Source.from_folder(tmp_path / "none")


# LEAF


def leaf(path, users):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    counts = [len(y) for _, y in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": counts, "user_data": data}))


def test_leaf_numbers_with_a_split(tmp_path):
    leaf(tmp_path / "train" / "a.json", {"u": ([[0.5, 1], [2, 3]], [0, 1]), "v": ([[4, 5]], [1])})
    leaf(tmp_path / "test" / "a.json", {"u": ([[6, 7]], [1])})
    source = from_path(tmp_path)
    assert source.groups == ("u", "v")
    assert source.held.tolist() == [False, False, False, True]
    assert source.x[3].tolist() == [6, 7]


def test_leaf_texts(tmp_path):
    leaf(
        tmp_path / "all_data.json",
        {"HAMLET": (["to b", "o be"], ["e", " "]), "GHOST": (["mark"], [" "])},
    )
    source = Source.from_leaf(tmp_path / "all_data.json")
    assert (source.kind, source.has_token_ids, source.shape) == ("tokens", True, (4,))
    assert ["".join(source.classes[i] for i in row) for row in source.x] == ["to b", "o be", "mark"]
    assert [source.classes[i] for i in source.y] == ["e", " ", " "]
    assert [source.groups[g] for g in source.group] == ["HAMLET", "HAMLET", "GHOST"]


def test_malformed_leaf(tmp_path):
    path = tmp_path / "a.json"
    leaf(path, {"u": (["abc", "ab"], ["c", "d"])})
    with pytest.raises(BadInput, match="several lengths"):
        from_path(path)
    leaf(path, {"u": ([], [])})
    with pytest.raises(BadInput, match="no samples"):
        from_path(path)
    nobody = '{"users": ["u"], "num_samples": [1], "user_data": {}}'
    for text, match in [
        ("{", "no complete json"),
        ("[]", "no LEAF file"),
        (nobody, "lacks samples of user 'u'"),
    ]:
        path.write_text(text)
        with pytest.raises(BadInput, match=match):
            from_path(path)


# in a run


@pytest.mark.parametrize("form", ["tuple", "dict", "dataset", "frame", "csv", "npz"])
def test_run_takes_any_of_them(form, tmp_path):
    x, y = blobs()
    if form == "frame":
        data = pytest.importorskip("pandas").DataFrame(
            {**{f"f{i}": x[:, i] for i in range(5)}, "y": y}
        )
    else:
        np.savez(tmp_path / "a.npz", x=x, y=y)
        data = {
            "tuple": (x, y),
            "dict": {"x": x, "y": y},
            "npz": tmp_path / "a.npz",
            "csv": tmp_path / "a.csv",
            "dataset": TensorDataset(torch.tensor(x), torch.tensor(y)),
        }[form]
        rows = "\n".join(
            ",".join(map(repr, [*map(float, row), int(label)]))
            for row, label in zip(x, y, strict=True)
        )
        (tmp_path / "a.csv").write_text("a,b,c,d,e,y\n" + rows)
    plain = flrce.run(Experiment(**QUICK), data=from_arrays(x, y))
    assert (
        flrce.run(Experiment(**QUICK), data=data).summary["accuracy"] == plain.summary["accuracy"]
    )


def test_columns_are_named_for_tables_only():
    x, y = blobs()
    named = Experiment(**QUICK, data={"target": "y"})
    assert flrce.run(named, data={"a": x[:, 0], "b": x[:, 1], "y": y}).summary["rounds"] == 2
    with pytest.raises(BadInput, match="target names a column of a table, a tuple has none"):
        flrce.run(named, data=(x, y))


def test_run_refuses_what_it_does_not_know():
    with pytest.raises(BadInput, match="data is a int; give"):
        flrce.run(Experiment(**QUICK), data=3)


def test_an_experiment_file_names_columns(tmp_path, capsys):
    table(tmp_path / "a.csv", label=lambda i: f"{i % 3}.25")
    common = [
        "data",
        "info",
        "--set",
        f"data.path='{tmp_path / 'a.csv'}'",
        "--set",
        "clients=4",
        "--set",
        "per_round=2",
    ]
    assert main([*common, "--set", "data.target=weight", "--set", "data.partition=natural"]) == 0
    assert "1 values" in capsys.readouterr().out
    assert main([*common, "--set", "data.target=wieght"]) == 2
    assert "did you mean 'weight'?" in capsys.readouterr().err
    assert main(["data", "info", "--set", "data.target=weight"]) == 2
    assert "give data.path, or drop it" in capsys.readouterr().err


def test_images_are_prepared_and_then_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLRCE_DATA", str(tmp_path / "cache"))
    for i in range(60):
        picture(tmp_path / "pets" / ("cat" if i % 2 else "dog") / f"{i}.png", 4 * i)
    for name in ("images", "pets"):
        assert (
            main(["data", "prepare", "images", "--from", str(tmp_path / "pets"), "--as", name]) == 0
        )
        assert f'data.name = "{name}"' in capsys.readouterr().out
        short = [
            word
            for pair in ("clients=4", "per_round=2", "rounds=1", f"data.name={name}")
            for word in ("--set", pair)
        ]
        assert main(["run", *short, "--out", str(tmp_path / name)]) == 0
    capsys.readouterr()
    assert main(["data", "list"]) == 0
    assert "pets" in capsys.readouterr().out
    assert (
        main(["data", "prepare", "images", "--from", str(tmp_path / "pets"), "--as", "../pets"])
        == 2
    )
    assert (
        main(["data", "prepare", "images", "--from", str(tmp_path / "pets"), "--as", "cifar10"])
        == 2
    )


# what is no table of plain columns


def test_a_csv_is_cut_by_the_rules_of_csv(tmp_path):
    """Not at U+2028, U+0085 or a form feed; a cell may hold line ends, or 131,073 characters and
    more.
    """
    path = tmp_path / "a.csv"
    odd = "\u2028\x85\x0c\u2029\x1c"
    path.write_text(
        f'a,note,y\n1,"a{odd}b",0\n2,"two\nlines",1\n3,plain,0\n', encoding="utf-8", newline=""
    )
    source = from_path(path)
    assert len(source.y) == 3
    assert source.x.shape == (3, 4)  # a, and a column for each of three notes
    path.write_text("a,note,y\n" + "".join(f"{i % 5},{'x' * 200_000},{i % 2}\n" for i in range(10)))
    assert from_path(path, ignore="note").x.shape == (10, 1)
    path.write_text("a,y\r1,0\r2,1\r")  # of an old Mac
    assert from_path(path).y.tolist() == [0, 1]
    path.write_text('a,b,y\n1,"2\n3",0\n1,2\n')
    with pytest.raises(BadInput, match="line 4 has 2 cells"):
        from_path(path)


def test_a_cell_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(flrce.core.files, "MAX_CELL_CHARACTERS", 1000)
    (tmp_path / "a.csv").write_text('a,y\n1,"' + "2,3\n" * 999)
    with pytest.raises(BadInput, match="is a quotation mark not closed"):
        from_path(tmp_path / "a.csv")


def test_json_lines_are_cut_at_line_feeds(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [
        json.dumps({"a": i, "city": "x\u2028y" if i % 2 else "z", "y": i % 3}, ensure_ascii=False)
        for i in range(9)
    ]
    path.write_text("\n".join(rows), encoding="utf-8")
    assert len(from_path(path).y) == 9


@pytest.mark.parametrize("key", ["target", "group", "test", "ignore", "features"])
@pytest.mark.parametrize("form", ["npz", "leaf", "jsonl", "images", "prepared"])
def test_columns_are_named_of_tables_only(form, key, tmp_path, capsys):
    x, y = blobs(24)
    path = tmp_path / f"a.{form}"
    if form == "npz":
        np.savez(path, x=x, y=y, group=y)
    elif form == "leaf":
        path = tmp_path / "a.json"
        leaf(path, {"a": (x.tolist(), y.tolist())})
    elif form == "jsonl":
        path.write_text(
            "".join(
                json.dumps({"x": a.tolist(), "y": int(b)}) + "\n" for a, b in zip(x, y, strict=True)
            )
        )
    elif form == "images":
        picture(path / "cat" / "1.png", 3)
        picture(path / "dog" / "1.png", 9)
    else:
        flrce.data.cache.write_prepared(from_arrays(x, y), path)
    assert (
        main(
            [
                "run",
                "--set",
                f"data.path={path}",
                "--set",
                f"data.{key}=y",
                "--set",
                "per_round=2",
                "--set",
                "clients=2",
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert f"data.{key}" in error
    assert error.count("\n") == 1


# one data set a client


def clients(sizes=(30, 40, 50), K=3):
    x, y = blobs(sum(sizes), K)
    cuts = np.cumsum(sizes)[:-1]
    return list(zip(np.split(x, cuts), np.split(y, cuts), strict=True))


@pytest.mark.parametrize("sizes", [(30, 40, 50), (40, 40, 40), (40, 40, 40, 40, 40), (60, 60)])
@pytest.mark.parametrize("form", ["list", "tuple", "dict", "tensors", "lists", "datasets"])
def test_a_pair_for_each_client(form, sizes):
    pairs = clients(sizes)
    names = [f"clinic-{i}" for i in range(len(sizes))]
    made = {
        "list": lambda: pairs,
        "tuple": lambda: tuple(pairs),
        "dict": lambda: dict(zip(names, pairs, strict=True)),
        "tensors": lambda: [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs],
        "lists": lambda: [[x.tolist(), y.tolist()] for x, y in pairs],
        "datasets": lambda: [
            TensorDataset(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs
        ],
    }[form]()
    source = to_source(made)
    assert source.kind == "classes"
    assert np.bincount(source.group).tolist() == list(sizes)
    if form == "dict":
        assert source.groups == tuple(names)
    quick = {**QUICK, "clients": len(sizes)}
    result = flrce.run(Experiment.from_tables(quick), data=made)
    assert result.summary["rounds"] == 2
    federation = federate(source, "given", len(sizes), 0)
    assert [
        len(a) + len(b) for a, b in zip(federation.train, federation.held, strict=True)
    ] == list(sizes)


def test_a_client_with_labels_of_its_own():
    x = np.zeros((30, 4), np.float32)
    source = to_source(
        {"a": (x, np.full(30, 3)), "b": (x, np.full(30, 7)), "c": (x[:0], np.zeros(0, int))}
    )
    assert source.groups == ("a", "b")
    assert source.classes == ("3", "7")


def test_clients_as_they_were_given_or_shared_out_anew(caplog):
    data = {"partition": "iid"}
    assert (
        flrce.run(
            Experiment.from_tables({**QUICK, "clients": 2, "data": data}), data=clients()
        ).summary["rounds"]
        == 2
    )
    with pytest.raises(BadInput, match="only 3 groups"):
        flrce.run(Experiment.from_tables({**QUICK, "clients": 9}), data=clients())


def test_a_run_on_clients_data_is_resumed(tmp_path):
    quick = Experiment.from_tables({**QUICK, "clients": 3})
    first = flrce.run(quick, tmp_path / "run", data=clients())
    assert 'partition = "given"' in (tmp_path / "run" / "experiment.toml").read_text()
    assert flrce.run(quick, tmp_path / "run", resume=True, data=clients()).summary == first.summary


def test_samples_are_not_taken_for_clients():
    ids = [(np.arange(6) + i, np.arange(6) + i + 1) for i in range(9)]
    assert to_source(ids).kind == "tokens"
    images = [(np.zeros((3, 8, 8), np.float32), np.array([0, 1, 1])) for _ in range(9)]
    assert to_source(images).kind == "labels"
    assert len(to_source([(np.zeros(4, np.float32), i % 2) for i in range(9)]).y) == 9
    x, y = blobs(12)
    assert to_source((x.tolist(), y.tolist())).group is None


def test_training_and_test_pairs():
    x, y = blobs(90)
    source = to_source({"train": (x[:60], y[:60]), "test": (x[60:], y[60:])})
    assert source.held.sum() == 30
    with pytest.raises(BadInput, match="beside train"):
        to_source({"train": (x, y), "extra": (x, y)})


@pytest.mark.parametrize(
    "data",
    [
        {"a": (np.zeros((5, 3)), np.zeros(5, int)), "b": (np.zeros((6, 4)), np.zeros(6, int))},
        {"a": [[1, 2], [3]], "y": [0, 1]},
        {"a": [1, 2, 3], "y": [0, 1]},
        {"a": np.zeros((3, 2)), "y": [0, 1, 0]},
        {"a": 3, "y": [0, 1]},
        [(np.zeros((5, 3)), np.zeros(5, int)), (np.zeros((6, 4)), np.zeros(6, int))],
        {"a": (np.zeros((5, 3)), ["x"] * 5), "b": (np.zeros((6, 3)), np.zeros(6, int))},
    ],
)
def test_dicts_that_are_neither_clients_nor_columns(data):
    with pytest.raises(BadInput, match=r"make them alike|give a dict of columns"):
        to_source(data)


# columns that only tell rows apart


def noise(rows=300, **more):
    """Two columns of noise, and labels in the order of the rows."""
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=rows),
        "b": rng.normal(size=rows),
        **more,
        "y": np.arange(rows) * 2 // rows,
    }


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("patient_id", lambda n: np.arange(n)),
        ("n", lambda n: np.arange(n) + 5000),
        ("n", lambda n: -np.arange(n)),
        ("n", lambda n: np.sort(np.random.default_rng(1).choice(10**6, n, replace=False))),
        ("n", lambda n: np.arange(n, dtype=float)),
        ("patientId", lambda n: np.arange(n) // 3),
        ("Patient ID", lambda n: np.random.default_rng(1).choice(10**6, n, replace=False)),
        ("name", lambda n: np.array([f"p{i:04d}" for i in range(n)])),
    ],
)
def test_identifiers_are_no_features(name, make, caplog):
    source = to_source(noise(**{name: make(300)}))
    assert source.features == ("a", "b")
    assert f"column {name!r} is left out as an identifier" in caplog.text
    assert "data.features" in caplog.text
    if make(300).dtype.kind != "U":
        assert to_source(noise(**{name: make(300)}), features=["a", "b", name]).x.shape[1] == 3
    caplog.clear()
    assert to_source(noise(**{name: make(300)}), ignore=name).features == ("a", "b")
    assert "identifier" not in caplog.text


def test_identifiers_of_shuffled_rows(caplog):
    order = np.random.default_rng(2).permutation(300)
    table = {key: values[order] for key, values in noise(n=np.arange(300) + 1).items()}
    assert to_source(table).features == ("a", "b")
    gaps = np.sort(np.random.default_rng(1).choice(10**6, 300, replace=False))
    table = {key: values[order] for key, values in noise(n=gaps).items()}
    assert to_source(table).features == ("a", "b")  # its name says nothing, but it sorts the labels
    table = noise(n=np.arange(300) % 100, client=np.arange(300) // 100)
    assert to_source(table, group="client").features == ("a", "b")  # counts each client's rows


def test_a_column_that_tells_the_label_is_named(caplog):
    """A measurement taken after the diagnosis: numbers with fractions, so no identifier."""
    rng = np.random.default_rng(4)
    leak = np.arange(300) + rng.uniform(0.1, 0.9, 300)
    order = rng.permutation(300)
    table = {key: values[order] for key, values in noise(late=leak).items()}
    assert to_source(table).features == ("a", "b", "late")
    assert "column 'late' alone tells the label of every row" in caplog.text
    assert "data.ignore" in caplog.text
    caplog.clear()
    to_source(table, ignore="late")
    to_source(noise(constant=np.zeros(300)))  # rows sorted by label: ties tell nothing
    assert "alone tells" not in caplog.text


def test_a_run_lists_the_features_of_its_table(tmp_path, capsys):
    path = table(tmp_path / "t.csv")
    tables = ["--set", f"data.path={path}", "--set", "clients=4", "--set", "per_round=2"]
    assert main(["run", "--no-save", "--set", "rounds=1", *tables]) == 0
    assert "features: height, weight" in capsys.readouterr().err


def test_numbers_that_tell_something_stay_features():
    rng = np.random.default_rng(3)
    table = noise(
        age=rng.integers(20, 90, 300),
        income=rng.choice(10**6, 300, replace=False),
        city=["x", "y", "z"] * 100,
    )
    table["y"] = rng.integers(0, 2, 300)
    assert to_source({key: np.asarray(value) for key, value in table.items()}).features == (
        "a",
        "b",
        "age",
        "income",
        "city",
    )


def test_info_lists_the_features(tmp_path, capsys):
    table = noise(patient_id=np.arange(300))
    lines = [
        ",".join(table),
        *(",".join(map(str, row)) for row in zip(*table.values(), strict=True)),
    ]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    words = [
        "data",
        "info",
        "--set",
        f"data.path={tmp_path / 'a.csv'}",
        "--set",
        "clients=4",
        "--set",
        "per_round=2",
    ]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "features: a, b\n" in shown.out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["features"] == ["a", "b"]
    assert main([*words, "--set", "data.features=patient_id"]) == 0
    assert "features: patient_id\n" in capsys.readouterr().out
    assert main([*words, "--set", "data.features=nobody"]) == 2
    assert "no column 'nobody' for features" in capsys.readouterr().err
