"""A second machine's loss changes nothing but the time."""

import threading
import time

import pytest

from flrce.arena import job
from flrce.arena.execute import executor
from flrce.arena.plan import Plan

SMALL = {"rounds": 30, "clients": 6, "per_round": 3, "engine": {"workers": 1}}
PLAN = {"seeds": [1, 2, 3], "tasks": {"labels": SMALL}, "methods": {"fedavg": {}, "fedprox": {}}}


@pytest.mark.row(37, "arena on Ray: a node killed in the middle", "its cells run again, the same records")
@pytest.mark.slow
def test_a_lost_node(tmp_path, monkeypatch, seen):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    plan = Plan.of(PLAN)
    near = job.run(plan, tmp_path / "near")
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
        far = job.run(plan, tmp_path / "far", executor("ray", {}))
        puller.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert busy
    assert not far.failed
    assert far.judged == near.judged
    seen(f"{len(far.judged)} cells, the same on one node of two")
