"""What a run says beforehand that it will take, against what it takes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flrce
from flrce.core import memory_limits
from flrce.errors import BadInput
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.simulation.runs import build_simulation

MODEL = 4_400_000  # floats, a large model: 32 of them are 563 MB, far above what allocators keep
HELPERS = Path(__file__).resolve().parents[1] / "helpers"  # stub_engine.py
CODE = """
import sys
from pathlib import Path
import torch
from flrce.core import loop
from flrce.core.pieces import (Payload)
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.core.types import Reply
from stub_engine import StubEngine

class Large(StubEngine):
    def __init__(self, D):
        self.trainable = D
    def clients(self, t):
        return [f"c{i}" for i in range(12)]
    def reply(self, task, w):
        return Reply(task.client, task.t, Payload({"u": torch.full((self.trainable,), 1e-3 * task.k)}), n=10)

def most(D):
    engine, recipe = Large(D), CATALOGUE[sys.argv[3]](P=int(sys.argv[2]))
    state = loop.make_initial_state(recipe, engine, torch.zeros(D))
    for done in loop.rounds(recipe, engine, state, 2, seed=0):
        pass
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmHWM"].split()[0])  # its own peak; ru_maxrss begins with that of whoever started it

small = most(1000)
print(most(int(sys.argv[1])) - small)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are told in /proc")
@pytest.mark.parametrize(
    ("recipe", "P"), [("fedavg", 4), ("fedavg", 10), ("median", 10), ("frugal", 10)]
)
def test_the_server_takes_no_more_than_it_says(recipe, P):
    """The figure has room for what workers' pipes and the run's files take, 6 models as measured;
    here is neither.
    """
    said = memory_limits.estimate_server_bytes(CATALOGUE[recipe](P=P), 12, MODEL, MODEL)
    command = [sys.executable, "-c", CODE, str(MODEL), str(P), recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HELPERS)
    took = int(done.stdout)
    assert took < said
    assert took > 4 * MODEL * 2 * P * 0.85


def test_a_large_model_with_ten_clients_fits_where_it_is_said_to(monkeypatch, caplog):
    """135 million floats: 28 models for the server (33 with an average), ten for a worker; 24 GiB
    hold both.
    """
    D = 135_000_000
    recipe = CATALOGUE["fedavg"](P=10)
    assert memory_limits.estimate_server_bytes(recipe, 100, D, D) == pytest.approx(
        4 * D * 28, rel=0.01
    )
    averaged = CATALOGUE["flrce"](
        P=10, preset="default"
    )  # keeps a sum in float64, makes it anew, and hands back a model of it
    assert memory_limits.estimate_server_bytes(averaged, 100, D, D) == pytest.approx(
        4 * D * 33, rel=0.01
    )
    assert 4 * D * (33 + memory_limits.WORKER_MODEL_COPIES) < 24 << 30
    monkeypatch.setattr(memory_limits, "get_available_memory", lambda: 18 << 30)
    memory_limits.check_memory(recipe, 100, D, D)
    assert "15.1 GB for the server, and on a CPU 5.4 GB" in caplog.text


def test_the_sketch_that_is_advised_leaves_room_for_a_worker(monkeypatch):
    """20 clients: V has 10.8 GB, 26 GB in all. Of 24 GB less a worker's 5.4 the rest takes 15.1:
    3.4 are left.
    """
    D = 135_000_000
    monkeypatch.setattr(memory_limits, "get_available_memory", lambda: 24_000_000_000)
    with pytest.raises(
        BadInput, match=r'piece = "relationship", sketch = 33554432\)'
    ):  # 2.7 GB; twice that: 5.4
        memory_limits.check_memory(CATALOGUE["flrce"](P=10, preset="paper"), 20, D, D)


def test_workers_are_counted_with_the_server(monkeypatch, caplog):
    """28 models for the server, 10 for each worker, of 0.54 GB: 15.1 and 5.4 GB. Three workers want
    31.3 GB in all.
    """
    D = 135_000_000
    recipe = CATALOGUE["fedavg"](P=10)
    each = memory_limits.estimate_worker_bytes(D)
    assert each == 4 * D * 10
    monkeypatch.setattr(memory_limits, "get_available_memory", lambda: 26_000_000_000)
    memory_limits.check_memory(recipe, 100, D, D, workers=(2, each))  # 25.9
    assert (
        "15.1 GB for the server, and on a CPU 5.4 GB and a batch's activations for each of 2"
        " workers" in caplog.text
    )
    said = (
        "3 of engine.workers with 5.4 GB each need 16.2 GB beside the server's 15.1 GB, but 26.0 GB"
        " are available"
    )
    with pytest.raises(BadInput, match=re.escape(f"{said}; set engine.workers = 2")):
        memory_limits.check_memory(recipe, 100, D, D, workers=(3, each))
    few = CATALOGUE["fedavg"](
        P=2
    )  # 12 models, 6.5 GB; of 30 workers two train at once, the others wait: 17.3
    memory_limits.check_memory(few, 100, D, D, workers=(30, each))
    monkeypatch.setattr(memory_limits, "get_available_memory", lambda: 17_000_000_000)
    with pytest.raises(BadInput, match=r"set engine\.workers = 1"):
        memory_limits.check_memory(few, 100, D, D, workers=(30, each))
    # nine tenths of 28 GB less 15.1 are 10.1 for workers, which is one of them
    monkeypatch.setattr(memory_limits, "get_available_memory", lambda: 28_000_000_000)
    assert memory_limits.estimate_spare_bytes(recipe, 100, D, D) // each == 1


def test_a_batch_s_attention_belongs_to_a_worker(monkeypatch, caplog):
    """0.4 GB for the server, 4.5 GB for each of two workers, most of it a batch's attention."""
    monkeypatch.setattr(memory_limits, "get_available_memory", lambda: 5_000_000_000)
    recipe, D = CATALOGUE["fedavg"](P=10), 3_571_428  # 28 models are 0.4 GB, 10 are 143 MB
    each = memory_limits.estimate_worker_bytes(D, kept=4_357_142_880)
    with pytest.raises(
        BadInput, match=r"2 of engine\.workers with 4\.5 GB each .* set engine\.workers = 1"
    ):
        memory_limits.check_memory(recipe, 100, D, D, workers=(2, each))
    assert "4.5 GB and a batch's activations but for attention for each of 2 workers" in caplog.text
    monkeypatch.setattr(memory_limits, "get_available_memory", lambda: 4_000_000_000)
    with pytest.raises(BadInput, match="or per_round, or take a smaller model"):
        memory_limits.check_memory(recipe, 100, D, D, workers=(2, each))


def test_a_run_counts_the_workers_that_it_hired(monkeypatch):
    """As many as memory holds where the number is left to it; those that are asked for are refused
    together.
    """
    few = flrce.Experiment(
        clients=6, per_round=4, engine={"kernel": "torch", "device": "cpu", "workers": 3}
    )
    built = build_simulation(few)
    recipe, d, D = built.recipe, built.engine.trainable, built.engine.size
    each, server = 40 * D, memory_limits.estimate_server_bytes(recipe, 6, d, D)
    assert built.engine.worker_processes == (3, each)
    monkeypatch.setattr(memory_limits, "get_available_memory", lambda: server + 3 * each - 1)
    with pytest.raises(BadInput, match=r"3 of engine\.workers with .* set engine\.workers = 2"):
        built.initial_state()
    built.engine.close()
    monkeypatch.setattr(
        memory_limits, "get_available_memory", lambda: (server + 2 * each) * 10 // 9 + 10
    )
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    built = build_simulation(
        few.model_copy(update={"engine": few.engine.model_copy(update={"workers": "auto"})})
    )
    built.initial_state()
    built.engine.close()
    assert built.engine.worker_processes == (2, each)
