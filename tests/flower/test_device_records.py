"""Devices on Flower that come, go and tell their batteries, and parts of a model that stay with
them.
"""

import json

import numpy as np
import pytest
import torch
from autofl import autofl
from fedjoule import fedjoule
from flwr.app import ArrayRecord
from torch import nn

import flrce
from flower_helpers import plain_app, start
from flrce import Experiment
from flrce.flower import FLrce, Local, LocalGrid, RecipeStrategy, client, client_app, introduce
from flrce.flower.engine import FlowerEngine
from flrce.flower.metrics import ClientReports
from flrce.flower.options import FlowerOptions
from flrce.methods.catalogue import recipes
from flrce_client import power_supply

NODES = 4


def test_a_node_that_vanishes_and_returns_is_booked(tmp_path):
    """Gone while it trains: its download is waste. Nobody asks it then; back under another id it is
    the same one.
    """

    def spoil(content, partition, t):
        if t == 2 and 1001 in grid.contexts:
            grid.drop_node(1001)

    class Comes(LocalGrid):
        def push_messages(self, messages):
            for message in messages:
                told = message.content.config_records.get("config", {})
                trains = message.metadata.message_type == "train"
                if trains and told.get("server-round") == 4 and 7 not in self.contexts:
                    self.add_node({"partition-id": 1}, 7)
            return super().push_messages(messages)

    grid = Comes(introduce(plain_app(spoil=spoil)), NODES, threads=1)
    settings = {
        "state": tmp_path,
        "min_available_nodes": 1,
        "wait_for_nodes": 1,
        "ask_names": "each",
    }
    result = FLrce(fraction_train=1.0, **settings).start(grid, start(), 6)
    gone = [record for record in result.history if "1" in record.rejected]
    assert [record.t for record in gone] == [2]
    assert "Node Unavailable" in gone[0].rejected["1"]
    assert gone[0].bytes_wasted > 0
    assert ["1" in record.chosen for record in result.history] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert "1" in result.history[-1].replied
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert lines[0]["why"]["nodes"]["1"] == 1001
    assert lines[-1]["why"]["nodes"]["1"] == 7
    assert lines[0]["clients"] == lines[-1]["clients"] == NODES  # no fifth client


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def load(context):
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    x = torch.from_numpy(rng.normal(size=(12, 3)).astype(np.float32))
    return Local(
        net(),
        x,
        (x[:, 0] > 0).long(),
        np.arange(8),
        np.arange(8, 12),
        kept=context.run_config["kept"],
    )


def test_batteries_are_read_from_the_device_and_told_as_last_reported(tmp_path, monkeypatch):
    """/sys/class/power_supply of each device -> its reply -> what a selector sees, also of who is
    not asked again.
    """
    (tmp_path / "BAT0").mkdir()
    (tmp_path / "BAT0" / "type").write_text("Battery\n")
    (tmp_path / "BAT0" / "capacity").write_text("40\n")
    monkeypatch.setattr(
        client, "get_battery_metric", lambda: power_supply.get_battery_metric(tmp_path)
    )
    grid = LocalGrid(client_app(load), NODES, {"kept": ()})
    seen = []
    levels = FlowerEngine.battery_levels

    def watched(self, clients):
        seen.append(levels(self, clients))
        return seen[-1]

    monkeypatch.setattr(FlowerEngine, "battery_levels", watched)
    result = RecipeStrategy(recipes.fedavg(P=1), min_train_nodes=1).start(
        grid, ArrayRecord(net().state_dict()), 5
    )
    asked = {client for record in result.history[:-1] for client in record.replied}
    assert len(asked) > 1
    assert seen[0] is None
    assert all(level == pytest.approx(0.4) for level in seen[-1].tolist())
    claims = ClientReports(FlowerOptions())
    claims.batteries = {"a": 0.2, "b": 0.8}
    assert claims.battery_levels(["a", "c", "b"]).tolist() == pytest.approx(
        [0.2, 0.5, 0.8]
    )  # c did not say: the mean
    assert claims.battery_levels(["c"]) is None


def test_the_servers_own_judgement_sees_whole_models_where_heads_stay_with_clients():
    first = ArrayRecord(net().state_dict())
    seen = []
    strategy = RecipeStrategy(recipes.fedper(P=NODES), model=net(), sample_shape=(3,))
    grid = LocalGrid(client_app(load), NODES, {"kept": strategy.kept})
    result = strategy.start(grid, first, 3, evaluate_fn=lambda t, arrays: seen.append((t, arrays)))
    assert [t for t, _ in seen] == [0, 1, 2, 3]
    for t, arrays in seen:
        net().load_state_dict(
            {name: torch.from_numpy(a.numpy().copy()) for name, a in arrays.items()}
        )  # all are there
        same = [name for name in first if np.array_equal(arrays[name].numpy(), first[name].numpy())]
        assert same == (
            list(first) if t == 0 else ["2.weight", "2.bias"]
        )  # the head as it was at first
    assert set(result.arrays) == set(first)


@pytest.mark.parametrize(
    "profile", [None, "phone"], ids=["nobody tells joules", "a profile models them"]
)
@pytest.mark.parametrize("recipe", [fedjoule(P=2), fedjoule(500.0, P=2), autofl(P=2)])
def test_methods_that_mind_energy_run_on_measured_nodes(recipe, profile):
    """Seconds are measured, so that the machine has a say in who is chosen; joules may be
    unknown.
    """
    strategy = RecipeStrategy(recipe, min_available_nodes=NODES, device=profile)
    result = strategy.start(LocalGrid(plain_app(), NODES, threads=2), start(), 5)
    assert [record.outcome for record in result.history] == ["committed"] * 5
    assert all(1 <= len(record.chosen) <= 2 for record in result.history)
    assert any(record.joules for record in result.history) == bool(profile)


def test_slow_devices_take_as_long_on_flower_as_in_the_simulator():
    """Whoever is slow by data.trouble is so in the modelled costs of both engines."""
    slow = {"piece": "slow-labels", "share": 0.5, "profile": "raspberry-pi-4"}
    common = {"rounds": 1, "clients": 4, "per_round": 4, "model": {"name": "mlp"}}
    seconds = [
        flrce.run(
            Experiment(
                data={"partition": "iid", "trouble": [slow]},
                fleet={"profile": "laptop-cpu"},
                engine={"name": name, "workers": 1},
                **common,
            )
        ).summary["seconds"]
        for name in ("simulator", "flower")
    ]
    assert seconds[0] == seconds[1]
