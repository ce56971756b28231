"""What a run says beforehand that it will take, against what it takes."""

import subprocess
import sys

import pytest

from flrce.errors import BadInput
from flrce.recipes import CATALOGUE
from flrce.round import memory

MODEL = 4_400_000  # floats, a large model: 32 of them are 563 MB, far above what allocators keep
CODE = """
import sys
from pathlib import Path
import torch
from flrce import loop
from flrce.engines.pretend import Pretend
from flrce.pieces import Payload
from flrce.recipes import CATALOGUE
from flrce.types import Reply

class Large(Pretend):
    def __init__(self, D):
        self.trainable = D
    def clients(self, t):
        return [f"c{i}" for i in range(12)]
    def reply(self, task, w):
        return Reply(task.client, task.t, Payload({"u": torch.full((self.trainable,), 1e-3 * task.k)}), n=10)

def most(D):
    engine, recipe = Large(D), CATALOGUE[sys.argv[3]](P=int(sys.argv[2]))
    state = loop.initial(recipe, engine, torch.zeros(D))
    for done in loop.rounds(recipe, engine, state, 2, seed=0):
        pass
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmHWM"].split()[0])  # its own peak; ru_maxrss begins with that of whoever started it

small = most(1000)
print(most(int(sys.argv[1])) - small)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are told in /proc")
@pytest.mark.parametrize(("recipe", "P"), [("fedavg", 4), ("fedavg", 10), ("median", 10), ("flrce", 10)])
def test_the_server_takes_no_more_than_it_says(recipe, P):
    """The figure has room for what workers' pipes and the run's files take, 6 models as measured; here is neither."""
    said = memory.needed(CATALOGUE[recipe](P=P), 12, MODEL, MODEL)
    command = [sys.executable, "-c", CODE, str(MODEL), str(P), recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    took = int(done.stdout)
    assert took < said
    assert took > 4 * MODEL * 2 * P * 0.85


def test_a_large_model_with_ten_clients_fits_where_it_is_said_to(monkeypatch, caplog):
    """135 million floats: 28 models for the server (33 with an average), ten for a worker; 24 GiB hold both."""
    D = 135_000_000
    recipe = CATALOGUE["fedavg"](P=10)
    assert memory.needed(recipe, 100, D, D) == pytest.approx(4 * D * 28, rel=0.01)
    averaged = CATALOGUE["flrce"](P=10)  # keeps a sum in float64, makes it anew, and hands back a model of it
    assert memory.needed(averaged, 100, D, D) == pytest.approx(4 * D * 33, rel=0.01)
    assert 4 * D * (33 + memory.WORKER) < 24 << 30
    monkeypatch.setattr(memory, "available", lambda: 18 << 30)
    memory.preflight(recipe, 100, D, D)
    assert "15.1 GB for the server, and on a CPU 5.4 GB" in caplog.text


def test_the_sketch_that_is_advised_leaves_room_for_a_worker(monkeypatch):
    """20 clients: V has 10.8 GB, 26 GB in all. Of 24 GB less a worker's 5.4 the rest takes 15.1: 3.4 are left."""
    D = 135_000_000
    monkeypatch.setattr(memory, "available", lambda: 24_000_000_000)
    with pytest.raises(BadInput, match=r'piece = "relationship", sketch = 33554432\)'):  # 2.7 GB; twice that: 5.4
        memory.preflight(CATALOGUE["flrce"](P=10, preset="paper"), 20, D, D)
