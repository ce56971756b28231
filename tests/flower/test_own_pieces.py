"""Client pieces of one's own on Flower from the command line; names in messages import nothing."""

import json
import sys
import types
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from flrce.cli.cli import main
from flrce.core.pieces import MalformedPayload
from flrce.flower.wire import read_piece, write_piece
from flrce.methods import own_pieces
from flrce.storage.read import read_run
from flrce.training.links import Link

OWN = """
from dataclasses import dataclass, field
import flrce
import torch
from flrce.core.pieces import NoCompression
from flrce.core.types import Payload

@dataclass(frozen=True)
class HalfGradient(flrce.Link):
    factor: float = 0.5

    def begin_round(self, w, local, carry):
        return {"done": torch.zeros(1)}

    def step(self, g, w, state):
        return self.factor * g, {"done": state["done"] + 1}

    def ends_training(self, state):
        return bool(state["done"] >= 2)

    def end_round(self, w, state):
        return {}, {"done": state["done"]}

    def list_extra_sizes(self, d):
        return {"done": 1}

@dataclass(frozen=True)
class Doubled(flrce.Compressor):
    factor: float = 2.0

    def encode(self, u, layout, rng, carry):
        return Payload({"u": self.factor * u.float()}), carry

    def decode(self, payload, layout, rng):
        return payload.buffers["u"] / self.factor
"""
TOML = """
rounds = 2
clients = 4
per_round = 2
[engine]
workers = 1
[train]
epochs = 2
batch = 8
update = ["halved:HalfGradient", { piece = "sgd", lr = 0.05 }]
[recipe]
name = "fedavg"
compressor = { piece = "halved:Doubled", factor = 4.0 }
"""


@pytest.fixture
def registered(monkeypatch):
    """What the test registers is forgotten after it."""
    found = {}
    monkeypatch.setattr(own_pieces, "OWN_PIECES", found)
    return found


def test_own_links_and_compressors_run_on_flower_as_in_the_simulator(
    tmp_path, monkeypatch, capsys, registered
):
    (tmp_path / "halved.py").write_text(OWN)
    (tmp_path / "halved.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "halved", raising=False)
    assert main(["run", "halved.toml", "--out", "here", "--json"]) == 0
    assert main(["run", "halved.toml", "--set", 'engine.name="flower"', "--out", "there"]) == 0
    capsys.readouterr()
    here, there = read_run(tmp_path / "here"), read_run(tmp_path / "there")
    assert [h.chosen for h in here.rounds] == [h.chosen for h in there.rounds]
    assert [h.accuracy for h in here.rounds] == [h.accuracy for h in there.rounds]
    for run in (here, there):  # both clients stop after two steps, which is what is booked
        assert {line["batches"] for line in run.costs} == {2}
    assert here.summary["joules"] == pytest.approx(there.summary["joules"])
    assert "halved:HalfGradient" in registered["link"]
    assert json.loads((tmp_path / "there" / "summary.json").read_text())["rounds"] == 2


@dataclass(frozen=True)
class Unnamed(Link):
    factor: float = 1.0

    def step(self, g, w, state):
        return g, state


def test_a_name_in_a_message_imports_nothing(tmp_path, monkeypatch, registered):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("trap:Link", "os:system", "test_own_pieces:Unnamed"):
        with pytest.raises(MalformedPayload, match="is not one of"):
            read_piece("link", {"link.0": name}, "link.0")
    assert "trap" not in sys.modules


def test_installed_packages_register_by_their_entry_points(monkeypatch, registered):
    module = types.ModuleType("flrce_test_plugin")
    module.Unnamed, module.number = Unnamed, 3
    monkeypatch.setitem(sys.modules, "flrce_test_plugin", module)
    point = EntryPoint("plugin", "flrce_test_plugin", "flrce.pieces")
    monkeypatch.setattr(own_pieces, "entry_points", lambda group: [point])
    own_pieces.register_installed_pieces.__wrapped__()
    message = write_piece("link", Unnamed(2.0), "link.0")
    assert message["link.0"] == own_pieces.name_class(Unnamed)
    assert read_piece("link", message, "link.0") == Unnamed(2.0)


def test_evaluations_that_a_stop_reads_are_billed_as_in_the_simulator(
    tmp_path, monkeypatch, capsys
):
    text = TOML.replace("halved:HalfGradient", "clip").partition("[recipe]")[0]
    text += '[recipe]\nname = "fedavg"\nstop = { piece = "patience", rounds = 9 }\n'
    (tmp_path / "patient.toml").write_text(text.replace("[engine]", "[engine]\neval_every = 2"))
    monkeypatch.chdir(tmp_path)
    for name in ("simulator", "flower"):
        given = ["--set", f'engine.name="{name}"', "--set", 'engine.kernel="torch"']
        assert main(["run", "patient.toml", *given, "--out", name]) == 0
    here, there = (read_run(tmp_path / name) for name in ("simulator", "flower"))
    outcomes = [[line["outcome"] for line in run.costs] for run in (here, there)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].count("evaluated") == 4
    assert here.summary["bytes_down"] == there.summary["bytes_down"]
    assert here.summary["joules"] == pytest.approx(there.summary["joules"])
