"""Data as newcomers have it: tables with gaps and texts, pictures of all sizes, data sets of dicts,
odd labels.
"""

import logging

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flrce
from flrce import BadInput, Source
from flrce.cli.cli import main
from flrce.data.user import from_arrays, from_path, to_source

X = np.arange(12, dtype=np.float32).reshape(6, 2)


def written(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


# tables


def test_a_missing_label_is_no_class(tmp_path):
    path = written(tmp_path / "a.csv", "age,risk", "31,high", "42,", "53,low", "64,none")
    with pytest.raises(
        BadInput, match=r"column 'risk' lacks 1 values; fill them in, or .* fill = 'drop'"
    ):
        Source.from_csv(path, target="risk", fill="mean")
    source = Source.from_csv(path, target="risk", fill="drop")
    assert (source.classes, source.x[:, 0].tolist()) == (
        ("high", "low", "none"),
        [31, 53, 64],
    )  # none is a word


def test_a_missing_client_is_no_client(tmp_path):
    path = written(tmp_path / "a.csv", "a,who,y", "1,ann,0", "2,,1", "3,bob,1")
    with pytest.raises(BadInput, match="column 'who' lacks 1 values"):
        Source.from_csv(path, group="who", fill=0)
    assert Source.from_csv(path, group="who", fill="drop").groups == ("ann", "bob")


def test_gaps_are_told_by_column_texts_too(tmp_path):
    path = written(tmp_path / "a.csv", "a,town,b,y", "1,Oslo,,0", "2,,3,1", "3,Bonn,4,1")
    with pytest.raises(BadInput, match=r"NaN in 2 of 3 samples \(columns town, b\)"):
        Source.from_csv(path)
    assert (
        Source.from_csv(path, fill="drop").x.tolist() == [[3, 1, 4]]
        or len(Source.from_csv(path, fill="drop").y) == 1
    )
    assert len(Source.from_csv(path, fill="mean").y) == 3


def test_columns_that_are_no_features(tmp_path, caplog):
    path = written(
        tmp_path / "a.csv", ",id,a,y", *(f"{i},{900 + i},{i % 3},{i % 2}" for i in range(6))
    )
    source = Source.from_csv(path, ignore="id")
    assert source.x[:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert source.shape == (1,)
    assert "the column without a name counts rows and is left out" in caplog.text
    with pytest.raises(BadInput, match="no column 'idd' to ignore; did you mean 'id'"):
        Source.from_csv(path, ignore=["idd"])
    with pytest.raises(BadInput, match=r"data.ignore names a column of a table"):
        to_source((X, [0, 1] * 3), ignore="a")


def test_decimal_commas(tmp_path):
    path = written(tmp_path / "a.csv", "a;b;y", "1,5;x,y;0", "-2;z;1", ";u;1")
    source = Source.from_csv(path, fill=0)
    assert source.x[:, 0].tolist() == [1.5, -2, 0]
    assert source.shape == (4,)  # a, and a column for each text of b


def test_clients_whose_texts_differ(tmp_path):
    for k, towns in enumerate((["Oslo", "Oslo"], ["Bonn", "Rome"])):
        written(
            tmp_path / "all" / f"clinic{k}" / "train.csv",
            "town,y",
            *(f"{town},{i}" for i, town in enumerate(towns)),
        )
        written(tmp_path / "all" / f"clinic{k}" / "test.csv", "town,y", f"{towns[0]},1")
    source = from_path(tmp_path / "all")
    assert (source.shape, source.groups) == ((3,), ("clinic0", "clinic1"))
    assert (
        source.x.tolist() == np.eye(3)[[1, 1, 1, 0, 0, 2]].tolist()
    )  # test.csv before train.csv; Bonn, Oslo, Rome
    assert source.held.tolist() == [True, False, False, True, False, False]
    written(tmp_path / "all" / "clinic2" / "train.csv", "city,y", "Rome,0")
    with pytest.raises(
        BadInput, match=r"clinic2/train.csv and .*clinic0/test.csv differ in column 'city'"
    ):
        from_path(tmp_path / "all")


def test_clients_are_standardised_together(tmp_path):
    for k in range(2):
        written(tmp_path / f"clinic{k}.csv", "a,y", f"{10 * k},0", f"{10 * k},1")
    source = from_path(tmp_path, standardise=True)
    assert source.x[:, 0].tolist() == [-1, -1, 1, 1]  # mean 5, deviation 5, of both clinics


# pictures


def picture(path, size, mode):
    Image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, 100 if mode == "L" else (100,) * len(mode)).save(path)


def test_pictures_of_all_sizes_and_modes(tmp_path):
    for i, mode in enumerate(("L", "RGB", "RGBA", "L")):
        picture(tmp_path / "pets" / ("cat" if i % 2 else "dog") / f"{i}.png", (8 + i, 9), mode)
    with pytest.raises(BadInput, match=r"is 11x9 where 9x9 is expected; .* say data.size = 9"):
        from_path(tmp_path / "pets")
    source = from_path(tmp_path / "pets", size=6)
    assert source.x.shape == (4, 3, 6, 6)
    assert (source.x == 100).all()
    for form in (
        lambda: from_path(written(tmp_path / "a.csv", "a,y", "1,0"), size=6),
        lambda: to_source((X, X), size=6),
    ):
        with pytest.raises(BadInput, match=r"data.size is about folders of images"):
            form()


def test_a_client_with_grey_pictures_among_others_with_colours(tmp_path):
    for k, mode in enumerate(("L", "RGB")):
        for i in range(2):
            picture(tmp_path / f"phone{k}" / ("day" if i else "night") / f"{i}.png", (5, 4), mode)
    source = from_path(tmp_path)
    assert (source.shape, source.groups) == ((3, 4, 5), ("phone0", "phone1"))
    assert (source.x == 100).all()


# data sets


class Dicts(Dataset):
    def __init__(self, extra=()):
        self.extra = dict(extra)

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return {
            "pixels": torch.full((1, 3, 3), float(i)),
            "kind": "cat" if i % 2 else "dog",
            "who": f"u{i % 3}",
            **self.extra,
        }


def test_a_data_set_of_dicts():
    source = to_source(Dicts(), target="kind", group="who")
    assert (source.shape, source.classes, source.groups) == (
        (1, 3, 3),
        ("cat", "dog"),
        ("u0", "u1", "u2"),
    )
    assert source.x[4, 0, 0, 0] == 4
    assert to_source(Dicts({"note": "x"}), target="kind", group="who", ignore="note").shape == (
        1,
        3,
        3,
    )
    with pytest.raises(BadInput, match=r"'pixels'.* beside other columns .*'note'.*ignore"):
        to_source(Dicts({"note": "x"}), target="kind", group="who")
    with pytest.raises(BadInput, match="no label column; name it with target"):
        to_source(Dicts())
    both = Source.from_dataset(Dicts(), test=Dicts(), target="kind", group="who")
    assert both.held.tolist() == [False] * 6 + [True] * 6


def test_a_loader_is_no_data_set():
    with pytest.raises(BadInput, match=r"give its data set, loader.dataset"):
        to_source(DataLoader(TensorDataset(torch.zeros(4, 2), torch.zeros(4))))


# labels


def test_odd_labels(caplog):
    assert from_arrays(X, np.array([[0], [1]] * 3)).kind == "classes"  # a column
    assert from_arrays(X, [-1, 1] * 3).classes == ("-1", "1")
    for y, match in (
        (["a", None] * 3, "y lacks 3 of 6 labels"),
        (np.zeros(6, complex), "y holds complex128"),
    ):
        with pytest.raises(BadInput, match=match):
            from_arrays(X, y)
    caplog.clear()
    from_arrays(X, np.eye(6, dtype=int))
    from_arrays(X, np.eye(6))
    assert [r.args[1:] for r in caplog.records] == [(6, "labels"), (6, "values")]
    caplog.clear()
    from_arrays(X, np.ones((6, 2), int))
    assert not caplog.records


def test_a_single_class_is_told_of(caplog):
    with caplog.at_level(logging.WARNING, "flrce"):
        asked = flrce.Experiment(
            rounds=1, clients=2, per_round=1, data={"partition": "iid", "minimum": 2}
        )
        flrce.run(asked, data=(X, ["yes"] * 6))
    assert "every sample is of class 'yes'" in caplog.text


def test_a_source_is_shown_in_one_line():
    source = from_arrays(X, ["a", "b"] * 3, ["u", "v"] * 3, [0, 0, 0, 0, 0, 1])
    assert (
        repr(source) == "Source('mine': 6 samples (2,) float32, 2 classes, 2 groups, 1 for judging)"
    )


def test_the_network_that_auto_chose_is_told(caplog):
    caplog.set_level(logging.INFO, "flrce")
    x = np.zeros((40, 3, 16, 16), np.uint8)
    tables = {"rounds": 1, "clients": 2, "per_round": 2, "data": {"partition": "iid"}}
    flrce.run(flrce.Experiment(**tables), data=(x, np.arange(40) % 2))
    parameters = 768 * 64 + 64 + 64 * 2 + 2
    assert f"'auto' is mlp: {parameters:,} parameters, 0.79 MB per round of 2" in caplog.text


def test_a_file_as_out_and_an_unknown_fill_are_told(tmp_path, capsys):
    path = written(tmp_path / "wine.csv", "a,y", "1,0", "2,1")
    assert main(["run", "--set", "rounds=1", "--out", str(path)]) == 2
    assert "wine.csv is a file; name a folder for the run" in capsys.readouterr().err
    assert main(["run", f"--set=data.path={path}", "--set=data.fill=none", "--no-save"]) == 2
    assert "data.fill = 'none': use a number, 'mean' or 'drop'" in capsys.readouterr().err
