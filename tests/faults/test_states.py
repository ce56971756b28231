"""Row 38: states of users' own pieces, of every kind of value, in every role, killed and resumed to
the same bits.
"""

import json
from pathlib import Path

import pytest
from harness import KILLED, in_child

from flrce.cli.cli import main

row38 = pytest.mark.row(
    38, "a piece of one's own holds any state", "same bits, or refused at the start"
)
FILES = ("rounds.jsonl", "clients.jsonl", "summary.json", "model.safetensors")
#: every piece's answer depends on each bit and type of its state; tables change in rows of clients
#: that did not train
PIECES = '''
import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import flrce
from flrce.core.types import Selection


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Inner:
    name: str
    value: Any = None
    next: "Inner | None" = None


def told(value):
    """Every bit and type of a value as text."""
    if isinstance(value, torch.Tensor):
        return f"T{value.dtype}{tuple(value.shape)}{value.stride()}{value.tolist()!r}"
    if isinstance(value, np.ndarray):
        return f"N{value.dtype}{value.shape}{value.flags.f_contiguous}{value.tobytes()!r}"
    if isinstance(value, dict):
        return "D" + "".join(f"{key!r}:{told(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return type(value).__name__ + "".join(map(told, value))
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__ + "".join(told(getattr(value, name)) for name in value.__dataclass_fields__)
    return f"{type(value).__name__}{value!r}"


def share(state):
    return int.from_bytes(hashlib.sha256(told(state).encode()).digest()[:6], "big") / 2**48


@dataclass(frozen=True)
class State:
    table: torch.Tensor = field(metadata={"rows": True})
    pairs: torch.Tensor = field(metadata={"rows": True, "square": True})
    wide: torch.Tensor = field(metadata={"rows": True, "fill": -2.0})
    late: Any = field(default=None, metadata={"rows": True})
    count: Any = 0
    values: Any = None
    more: Any = None


def begin(M):
    return State(torch.arange(M, dtype=torch.float64) / 7, torch.eye(M), torch.full((M, 3), 0.5))


def go_on(state, t, M):
    table = state.table * 0.9 + torch.arange(len(state.table)) / (t + 2)  # everybody's row, whoever trained
    state.wide[t % len(state.wide)] += t  # in place, one row that may be anybody's
    wide = state.wide.double() if t == 3 else state.wide
    late = torch.arange(M) * t if t >= 2 else None
    values = {
        "none": None, "yes": True, "one": 1, "float": 0.1 * t, "text": "\\ud7ff", 7: (1, [2.0, (3,)], {}), -1: [],
        "numbers": {"a": 1.5, "b": t}, "inner": Inner("x", Pair(t, np.float32(0.1)), Inner("y", {1: (t,)})),
        "tensor": torch.arange(6, dtype=torch.int16).reshape(2, 3).t() + t, "half": torch.tensor(t / 3).half(),
        "complex": 1j * t, "bytes": bytes([t]), "large": 3 ** (700 * t), "nan": float("inf"),
    }
    more = (np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(["ab", "c"]), np.int8(t), {3: torch.ones(2) * t})
    count = (1.5, 2, "now text", None)[t % 4]  # of another type in each round
    return State(table, state.pairs + table[:, None] * 1e-3, wide, late, count, values, more)


class Remembering:
    def initial_state(self, M, d, D):
        return begin(M)

    def observe(self, state, event):
        return go_on(state, event.t, event.M)


@dataclass(frozen=True)
class Choosing(Remembering, flrce.Selector):
    def select(self, state, view, rng):
        start = int(share(state) * len(view.pool))
        return Selection(tuple((start + 3 * i) % len(view.pool) for i in range(view.P)))


@dataclass(frozen=True)
class Summing(Remembering, flrce.Aggregator):
    def __call__(self, w, updates, state):
        return w + updates.U.mean(0) * (0.5 + share(state))


@dataclass(frozen=True)
class Stepping(flrce.ServerStep):
    def initial_state(self, M, d, D):
        return {"state": None, "t": 0, 5: Pair(1, Inner("z"))}  # no dataclass at all

    def step(self, w, target, updates, state):
        w = torch.lerp(w, target, 0.5 + share(state) / 2)
        return w, {**state, "state": [*(state["state"] or []), share(state)], "t": state["t"] + 1}


@dataclass(frozen=True)
class Ending(Remembering, flrce.StopRule):
    def __call__(self, history):
        return ""

    def distance_from_start(self, state):
        return share(state)


@dataclass(frozen=True)
class Averaging(Remembering, flrce.ServerAverage):
    def initial_state(self, M, d, D):
        return None

    def observe(self, state, event):
        return Pair(event.w_next, Inner("mean", event.t)) if state is None else state._replace(second=event.t)

    def model(self, state, w):
        return w if state is None else torch.lerp(w, state.first, share(state.second))


@dataclass(frozen=True)
class Assigning(Remembering, flrce.LocalTrainer):
    def assign(self, tasks, state, view):
        return tasks if share(state) < 0.9 else list(tasks)
'''
EXPERIMENT = """
rounds = 5
clients = 7
per_round = 2
[train]
epochs = 1
[recipe]
name = "fedavg"
selector = "stateful_pieces:Choosing"
trainer = "stateful_pieces:Assigning"
aggregator = "stateful_pieces:Summing"
server = "stateful_pieces:Stepping"
stop = "stateful_pieces:Ending"
average = "stateful_pieces:Averaging"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "stateful_pieces.py").write_text(PIECES)
    (tmp_path / "mine.toml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(*more: str):
    def work():
        code = main(["run", "mine.toml", *more])
        assert code == 0, code

    return work


def contents(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in FILES}


@row38
def test_states_of_every_kind_come_back_to_the_same_bits(folder, seen):
    """Killed in the middle of a commit, and in another run after each round."""
    assert in_child(run("--out", "whole")) == 0
    wanted = contents(folder / "whole")
    assert in_child(run("--out", "once"), "commit.ready:3") == KILLED
    assert in_child(run("--out", "once", "--resume"), log=folder / "log") == 0, (
        folder / "log"
    ).read_text()
    assert contents(folder / "once") == wanted
    for i in range(5):
        more = ["--resume"] if i else []
        assert in_child(run("--out", "often", *more), "commit.done:1") == KILLED
    assert in_child(run("--out", "often", "--resume")) == 0
    assert contents(folder / "often") == wanted
    assert json.loads(wanted["summary.json"])["rounds"] == 5
    seen("6 kills, same bits")


@row38
@pytest.mark.parametrize("out", [[], ["--out", "run"]], ids=["without a folder", "with one"])
@pytest.mark.parametrize(
    ("state", "what"),
    [
        ("{1, 2}", "is a set"),
        ("Inner('x', {(1, 2): 3})", "(1, 2), a tuple"),
        ("[Inner('x', object())]", "is a object"),
    ],
)
def test_a_state_that_could_not_be_resumed_is_refused_at_the_start(
    folder, seen, capfd, state, what, out
):
    text = PIECES.replace(
        'return {"state": None, "t": 0, 5: Pair(1, Inner("z"))}', f"return {state}"
    )
    assert text != PIECES
    (folder / "stateful_pieces.py").write_text(text)
    assert in_child(lambda: main(["run", "mine.toml", *out]) == 2 or 1 / 0) == 0
    line = capfd.readouterr().err.strip()
    assert "server Stepping cannot be resumed: its state" in line, line
    assert what in line, line
    assert "a state may hold None, bool, int" in line
    assert "Traceback" not in line
    seen("refused in one line")
