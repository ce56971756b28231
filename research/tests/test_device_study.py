"""The study that runs the reproduction on a GPU machine: its groups, its staging, its records."""

import gzip
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from flrce_reproduction import plan, records
from flrce_reproduction.plan import DatasetSizes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "studies"))
import reproduce_device as study  # noqa: E402

SIZES = {
    "cifar10": DatasetSizes(50_000, 10),
    "cifar100": DatasetSizes(50_000, 100),
    "femnist": DatasetSizes(15_647, 62, 31),
    "speech": DatasetSizes(64_721, 30, 1881),
}


@pytest.fixture
def sizes(monkeypatch):
    monkeypatch.setattr(
        "flrce_reproduction.execute.read_dataset_sizes", lambda name, data: SIZES[name]
    )


def test_the_groups_hold_every_cell_of_the_tables_once(sizes, tmp_path):
    request = plan.ReproductionRequest(
        ("table3", "fig-motivation"),
        study.DATASETS,
        plan.REGIMES,
        (0, 1, 2, 3, 4),
        rates=study.RATES,
    )
    wanted = {cell.name: cell.experiment.recipe for cell in plan.plan_cells(request, SIZES)}
    names = []
    for group in study.list_groups():
        if group.kind in ("table", "motivation"):
            names += [cell.name for cell in study.build_cells(group, tmp_path, "cpu", None)[0]]
    assert sorted(names) == sorted(wanted)
    assert len(names) == 7 * 4 * 2 * 5 + 3 * 3 * 5


def test_every_method_of_the_wide_table_is_a_valid_experiment(sizes, tmp_path):
    wide = json.loads(study.WIDE_PLAN.read_text())
    listed = [method for group in wide["groups"] for method in group]
    assert sorted(listed) == sorted(wide["methods"])
    assert not {*listed} & {*plan.TRAINED_METHODS}  # the tables have those
    groups = [g for g in study.list_groups() if g.kind == "wide" and g.dataset == "speech"]
    for group in groups:
        cells, _ = study.build_cells(group, tmp_path, "cpu", 3)
        assert {cell.method for cell in cells} == {*group.methods}
        assert all(cell.experiment.rounds == 3 for cell in cells)
        assert all(cell.experiment.train.lr == 0.05 for cell in cells)


def test_files_in_pieces_are_joined_once_all_are_there(tmp_path):
    first, second, work = tmp_path / "a", tmp_path / "b", tmp_path / "work"
    for part, files in (
        (first, {"x.npz.0": b"12", "x.npz.last": b"2"}),
        (second, {"x.npz.1": b"3"}),
    ):
        part.mkdir()
        for name, content in files.items():
            (part / name).write_bytes(content)
    study.add_files(first, work)
    assert not (work / "packed/x.npz").exists()
    study.add_files(second, work)
    assert (work / "packed/x.npz").read_bytes() == b"123"
    assert [path.name for path in (work / "packed").iterdir()] == ["x.npz"]


def test_collected_groups_become_records(tmp_path):
    kept = ROOT / "results" / "records"
    runs = records.read_records(kept)
    some = [run for name, run in runs.items() if name.startswith("cifar10/quantity/fedavg")]
    group = next(g for g in study.list_groups() if g.name == "table-cifar10-quantity-0")
    study.write_group(group, some, {"cifar10": SIZES["cifar10"]}, tmp_path / "work", 1.0, {})
    study.collect(tmp_path / "work", tmp_path / "out")
    assert gzip.decompress((tmp_path / "out/records-0.jsonl.gz").read_bytes())
    study.merge(Namespace(source=tmp_path / "out", to=tmp_path / "results", replace=True))
    found = records.read_records(tmp_path / "results" / "records")
    assert found == {run.cell: run for run in some}
    assert records.read_stored_sizes(tmp_path / "results/records") == {"cifar10": SIZES["cifar10"]}
