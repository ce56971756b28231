"""A second machine's loss changes nothing but the time."""

import dataclasses
import threading
import time

import pytest

from flrce.config.experiment import ModelSection
from flrce_arena import job
from flrce_arena.execute import get_executor, run_cell_batches
from flrce_arena.machine import CellBatch
from flrce_arena.plan import ArenaPlan

SMALL = {"rounds": 30, "clients": 6, "per_round": 3, "engine": {"workers": 1}}
PLAN = {"seeds": [1, 2, 3], "tasks": {"labels": SMALL}, "methods": {"fedavg": {}, "fedprox": {}}}


@pytest.mark.slow
def test_a_lost_node(tmp_path, monkeypatch, caplog):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    plan = ArenaPlan.from_tables(PLAN)
    near = job.run_plan(plan, tmp_path / "near")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        lost = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        busy: list[float] = []

        def pull() -> None:
            """Once both nodes are at work."""
            ray_is_up = time.monotonic() + 60
            while time.monotonic() < ray_is_up and not (tmp_path / "far" / "running").exists():
                time.sleep(0.05)
            time.sleep(0.5)
            cluster.remove_node(lost, allow_graceful=False)
            busy.append(time.monotonic())

        puller = threading.Thread(target=pull)
        puller.start()
        far = job.run_plan(plan, tmp_path / "far", get_executor("ray", {}))
        puller.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert busy
    assert not far.failed
    assert far.judged == near.judged
    assert any("Ray worker was lost" in record.message for record in caplog.records)


@pytest.mark.slow
def test_a_stack_that_fails_costs_one_cell(tmp_path, monkeypatch):
    """One cell kills its process, another names data that are not there: the others end all the
    same.
    """
    plan = ArenaPlan.from_tables({**PLAN, "tasks": {"labels": {**SMALL, "rounds": 2}}})
    (tmp_path / "deadly.py").write_text("import os\n\ndef Net():\n    os._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)  # spawned processes have it too
    cells = [
        cell for method in plan.methods for cell in plan.list_evaluation_cells("labels", method, {})
    ]
    broken = cells[0].experiment.model_copy(update={"clients": 5000})  # more than there are samples
    deadly = cells[3].experiment.model_copy(update={"model": ModelSection(name="deadly:Net")})
    cells[0] = dataclasses.replace(cells[0], experiment=broken)
    cells[3] = dataclasses.replace(cells[3], experiment=deadly)
    ended = list(run_cell_batches([CellBatch(tuple(cells), "cpu")], tmp_path, 1))
    assert len(ended) == len(cells)
    why = {cell.label: p for cell, p in ended if isinstance(p, str)}
    assert set(why) == {cells[0].label, cells[3].label}
    assert "5000" in why[cells[0].label]
    assert "process ended (7)" in why[cells[3].label]
