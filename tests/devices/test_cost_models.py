"""Costs as a piece: by hand, in the simulator and over Flower, after a kill, and in every table."""

import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import flrce
from flrce.cli.cli import main
from flrce.cli.run import list_further_costs
from flrce.core.cost_table import BASIS_FIELDS, COSTS, add_cost_row
from flrce.core.types import ClientCost
from flrce.devices.cost_models import ClientLoad, CostTable, price_loads
from flrce.devices.costs import DeviceProfile
from flrce.errors import BadInput
from flrce.simulation import runs
from flrce.storage.read import read_runs
from training import cut_and_resumed

EXTENSIONS = Path(__file__).resolve().parents[2] / "examples" / "extensions"
DEVICE = DeviceProfile(
    "plain",
    idle_watts=1,
    active_watts=10,
    flops=1e6,
    batch_seconds=0.5,
    up_bits=8e3,
    down_bits=16e3,
    up_joules=0.01,
    down_joules=0.001,
)
# 4 batches of 0.5 s and 1e6 FLOPs: 3 s, 30 J; up 1000 B: 1 s, 10 J; down 2000 B: 1 s, 2 J
COST = DEVICE.estimate_cost(bytes_down=2000, bytes_up=1000, flops=1e6, batches=4)
SMALL = {"rounds": 3, "clients": 8, "per_round": 4, "recipe": {"name": "fedavg"}}
SMALL |= {"train": {"epochs": 1}, "engine": {"workers": 1, "kernel": "torch"}}
TABLE = """client,hour,up_bits,active_watts,network_joules
*,,,,0.002
a*,,4e3,,
a*,22-1,2e3,20,
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "costs.csv"
    path.write_text(TABLE)
    return CostTable(str(path))


def load(client, hour=12):
    return ClientLoad(client, DEVICE, COST, start=3600.0 * (24 + hour) + 5)


def test_a_table_replaces_what_it_names_by_client_and_hour(table):
    assert (COST.seconds, COST.joules) == (5.0, 42.0)
    other, day, night, later = table.price([load("b"), load("a1"), load("a1", 23), load("a1", 2)])
    assert other == replace(COST, other={**COST.other, "network_joules": 0.002 * 3000})
    assert (day.transfer_seconds, day.joules) == (3.0, 42.0)  # 1000 B at 4 kbit/s: 2 s
    assert night.transfer_seconds == 5.0  # at 2 kbit/s: 4 s
    assert night.joules == 72.0  # 3 s at 20 W, 12 J of the radio
    assert later == day


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hour\n3\n", "the columns are wrong"),
        ("client,watts\na,3\n", "column 'watts' is unknown"),
        ("client,hour\na,24\n", "line 2: hour 24"),
        ("client,up_bits\na,0\n", "line 2: up_bits = 0: must be above 0"),
        ("client,up_bits\na,x\n", "line 2: could not convert"),
        ("client,idle_watts\na,-1\n", "idle_watts = -1: must be 0 or more"),
        ("client,idle_watts\na,nan\n", "idle_watts = nan: must be 0 or more"),
    ],
)
def test_a_malformed_table_is_an_error_of_one_line(tmp_path, text, complaint):
    path = tmp_path / "costs.csv"
    path.write_text(text)
    with pytest.raises(BadInput, match=complaint) as problem:
        flrce.Experiment(**SMALL, fleet={"costs": str(path)})
    assert "\n" not in str(problem.value)


@dataclass(frozen=True)
class Given(flrce.CostModel):
    """Gives what it is told to."""

    costs: tuple

    def price(self, loads):
        return self.costs


@pytest.mark.parametrize(
    ("costs", "complaint"),
    [
        ((), "0 costs for 1 loads"),
        ((ClientCost(joules=float("nan")),), "finite numbers"),
        ((ClientCost(other={"joules": 1.0}),), "no free name"),  # the field would win
        ((ClientCost(other={"bytes_up": 1.0}),), "no free name"),
        ((ClientCost(other={"Water Use": 1.0}),), "no free name"),
    ],
)
def test_what_a_model_gives_is_checked(costs, complaint):
    with pytest.raises(BadInput, match=complaint):
        price_loads(Given(costs), [load("a")])


def test_a_cell_is_divided_among_the_clients_of_a_round():
    cells = _import_cells().SharedCells(cells=2, up_bits=6e3, joules_per_byte=0.0)
    loads = [load("0"), load("2"), load("4"), load("1"), load("3", hour=2)]
    ups = [cost.transfer_seconds - 1.0 for cost in cells.price(loads)]
    # 8000 bits at 6/3 kbit/s; at 6/2 kbit/s; by night at 12/2 kbit/s
    assert ups == pytest.approx([4, 4, 4, 8 / 3, 4 / 3])


def _import_cells():
    sys.path.insert(0, str(EXTENSIONS))
    try:
        return importlib.import_module("shared_cells")
    finally:
        sys.path.remove(str(EXTENSIONS))


@pytest.fixture
def experiment(monkeypatch):
    monkeypatch.syspath_prepend(str(EXTENSIONS))
    costs = {"piece": "shared_cells:SharedCells", "cells": 2, "up_bits": 1e5}
    return flrce.Experiment(**SMALL, fleet={"costs": costs})


def test_simulator_and_flower_book_the_same(experiment, tmp_path):
    pytest.importorskip("flwr")
    here = runs.run(experiment, tmp_path / "here")
    there = runs.run(experiment.with_tables({"engine": {"name": "flower"}}), tmp_path / "there")
    plain = runs.run(flrce.Experiment(**SMALL))
    for one, two, without in zip(here.history, there.history, plain.history, strict=True):
        assert (one.joules, one.seconds, one.other) == (two.joules, two.seconds, two.other)
        assert one.seconds > without.seconds
        assert one.other["network_joules"] == pytest.approx(
            1e-6 * (without.bytes_up + without.bytes_down)
        )


def test_a_killed_run_resumes_to_the_same_bits(experiment, tmp_path):
    runs.run(experiment, tmp_path / "straight")
    cut_and_resumed(experiment, tmp_path / "cut", tmp_path / "straight")


def test_a_budget_goes_by_the_model_of_the_whole_round(experiment):
    """The estimate is exact: a budget pays for two rounds, and not for a hair less."""
    history = runs.run(experiment).history
    spent = sum(h.seconds for h in history[:2])
    for budget, rounds in ((spent * 1.0001, 2), (spent * 0.999, 1)):
        stopped = runs.run(experiment.with_tables({"stop": {"seconds": budget}}))
        assert sum(h.outcome == "committed" for h in stopped.history) == rounds


def test_a_client_that_leaves_has_spent_its_share_of_the_priced_cost():
    priced = replace(
        DEVICE.estimate_cost(2000, 1000, 1e6, 4), transfer_seconds=4.0, other={"litres": 7.0}
    )
    # twice as slow: 2 s down, 3 s of training, 2 s up; gone after 6 s
    left = DEVICE.truncate_cost(priced, 6.0)
    assert (left.bytes_down, left.bytes_up, left.seconds) == (2000, 500, 6.0)
    assert left.other["litres"] == 6.0
    assert DEVICE.truncate_cost(COST, 100.0) == COST


@dataclass(frozen=True)
class Water(flrce.CostModel):
    """Half a litre for every client."""

    def price(self, loads):
        return [replace(load.cost, other={"cooling_water": 0.5}) for load in loads]


def test_a_new_cost_is_in_the_tables_of_a_reader_who_does_not_know_it(tmp_path, monkeypatch):
    experiment = flrce.Experiment(**SMALL, fleet={"costs": f"{__name__}:Water"})
    result = flrce.run(experiment, tmp_path / "run")
    assert result.summary["cooling_water"] == 3 * 4 * 0.5
    monkeypatch.delitem(COSTS, "cooling_water")
    assert read_runs([tmp_path / "run"])[0].summary["cooling_water"] == 6.0
    assert "cooling_water" in COSTS
    assert main(["whatif", str(tmp_path / "run"), "--budget", "cooling_water=4"]) == 0


def test_a_model_that_names_other_amounts_keeps_what_the_joules_rest_on():
    """`replace(cost, other={...})` drops the parts of the joules, which are none of its business."""
    priced = replace(COST, other={"cents": 1.0})
    (booked,) = price_loads(Given((priced,)), [load("a")])
    assert booked.other == {**COST.other, "cents": 1.0}
    (half,) = price_loads(Given((replace(priced, joules=COST.joules / 2),)), [load("a")])
    parts = {name: amount for name, amount in half.other.items() if name in BASIS_FIELDS}
    assert parts == pytest.approx({name: amount / 2 for name, amount in COST.other.items()})


def test_a_cost_without_a_unit_has_a_plain_heading():
    assert add_cost_row("euro_cents")
    entry = {"mean": 3.0, "low": 3.0, "high": 3.0, "n": 1}
    try:
        headings = [column.heading for column in list_further_costs([{"euro_cents": entry}])]
    finally:
        del COSTS["euro_cents"]
    assert "euro cents" in headings


def test_whatif_tells_two_costs_in_one_unit_apart(tmp_path, monkeypatch, capsys):
    (tmp_path / "costs.csv").write_text("client,hour,network_joules\n*,,1e-4\n")
    runs.run(
        flrce.Experiment(**SMALL, fleet={"costs": str(tmp_path / "costs.csv")}), tmp_path / "run"
    )
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["whatif", str(tmp_path / "run"), "--budget", "rounds=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("network") == 2  # spent and saved, beside the joules of devices
