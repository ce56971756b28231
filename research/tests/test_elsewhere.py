"""Reproduction on other machines: the same folders as here."""

from test_remote_runs import posted, rounds_of

from flrce.simulation import executors
from flrce_reproduction import cli as app
from flrce_reproduction import plan, records
from flrce_reproduction.execute import execute_cells, load_dataset, read_dataset_sizes


def test_reproduce_elsewhere_fills_the_same_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "get_remote_executor", lambda where, settings: posted)
    request = plan.ReproductionRequest(
        ("table3",), ("digits",), ("quantity",), (0,), plan.QUICK, {}, (), "cpu", 1
    )
    cells = [
        c
        for c in plan.plan_cells(request, {"digits": read_dataset_sizes("digits", None)})
        if c.method in ("fedavg", "flrce")
    ]
    short = [
        c.__class__(**{**vars(c), "experiment": c.experiment.model_copy(update={"rounds": 2})})
        for c in cells
    ]
    assert short
    seen = []
    for out, run in (
        (tmp_path / "near", execute_cells),
        (tmp_path / "far", app._build_remote_executor("ray", None)),
    ):
        run(
            short,
            out,
            lambda name: load_dataset(name, None),
            lambda cell, done: seen.append((cell.name, done.record.t)),
        )
    assert rounds_of(tmp_path / "near") == rounds_of(tmp_path / "far")
    assert {(cell.name, 2) for cell in short} <= set(seen)
    assert all(records.read_cell_run(cell, tmp_path / "far") for cell in short)
    assert not (tmp_path / "far" / executors.SHARED_FOLDER_MARK).exists()
