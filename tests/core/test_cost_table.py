"""One table of costs feeds everything that shows one: a row and a place where it is booked are all
that a new cost needs.
"""

import json
from dataclasses import replace

import pytest

from flrce.cli.cli import main
from flrce.core.checked_replies import book_costs
from flrce.core.cost_table import COSTS, Cost, list_spent_costs
from flrce.core.payloads import is_plausible_cost
from flrce.core.pending import DueTasks
from flrce.core.types import ClientCost, Reply, RoundRecord, Task
from flrce.devices.costs import DeviceProfile
from flrce.methods.stopping.budget import CostBudget, CostLimit
from flrce.report import tables
from flrce.report.page import build_report_payload, render_report
from flrce.report.target_costs import find_cost_to_target
from flrce.report.tracking import list_round_metrics
from flrce.storage.ledger_lines import parse_record, to_client_line, to_round_line
from flrce.storage.read import read_runs

LITRES_PER_JOULE = 5e-7  # cooling water: 1.8 litres a kWh
LITRES = Cost("litres", "Water", ((1.0, "l"), (1e-3, "ml"), (1e-6, "µl")), optional=True)


SETTINGS = ["rounds=3", "clients=8", "per_round=3", "train.epochs=1", "engine.workers=1"]
COMPARE = ["compare", "--recipes", "fedavg,flrce", "--seeds", "0-1"]
COMPARE += [part for setting in SETTINGS for part in ("--set", setting)]
estimate_plain = DeviceProfile.estimate_cost


def estimate_with_water(profile, *args, **kwargs):
    spent = estimate_plain(profile, *args, **kwargs)
    return replace(spent, other={"litres": LITRES_PER_JOULE * spent.joules})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two recipes whose devices use water: one place books it, one row names it."""
    place = tmp_path_factory.mktemp("water") / "all"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceProfile, "estimate_cost", estimate_with_water)
        patch.setitem(COSTS, "litres", LITRES)
        assert main([*COMPARE, "--out", str(place)]) == 0
    return place


@pytest.fixture
def watered(made, monkeypatch):
    monkeypatch.setitem(COSTS, "litres", LITRES)
    return made


def test_new_cost_is_booked_and_summed(watered):
    for run in read_runs([watered]):
        lines = [json.loads(line) for line in (run.folder / "rounds.jsonl").open()]
        clients = [json.loads(line) for line in (run.folder / "clients.jsonl").open()]
        booked = [line["other"]["litres"] for line in lines]
        assert sum(booked) == pytest.approx(sum(line["other"]["litres"] for line in clients))
        stored = json.loads((run.folder / "summary.json").read_text())
        assert stored["litres"] == run.summary["litres"] == sum(booked) > 0


def test_new_cost_is_in_every_table(watered, capsys):
    assert main([*COMPARE, "--resume", "--out", str(watered)]) == 0
    assert "water, µl" in capsys.readouterr().out
    told = json.loads((watered / "compare.json").read_text())
    litres = [run.summary["litres"] for run in read_runs([watered / "fedavg"])]
    assert told["fedavg"]["litres"]["mean"] == pytest.approx(sum(litres) / 2)
    assert main(["reach", str(watered), "--target", "0.01"]) == 0
    assert "water µl" in capsys.readouterr().out
    assert main(["whatif", str(watered / "fedavg"), "--patience", "1"]) == 0
    assert "µl saved" in capsys.readouterr().out


def test_new_cost_is_on_the_report_page(watered):
    runs = read_runs([watered])
    page = render_report(runs)
    assert '<th scope="col" tabindex="0">Water µl</th>' in page
    assert '<input type="radio" name="axis" value="litres"> water</label>' in page
    assert '<input type="radio" name="cost" value="litres"> water</label>' in page
    payload = build_report_payload(tables.group_runs(runs))
    drunk = sum(line["other"]["litres"] for line in runs[0].costs)
    assert payload["axes"]["litres"] == "water"
    assert payload["runs"][0]["litres"][-1] == pytest.approx(drunk, rel=1e-4)
    costs = payload["runs"][0]["costs"]
    assert sum(costs["litres"]) + sum(costs["litres_wasted"]) == pytest.approx(drunk, rel=1e-6)


def test_new_cost_can_be_limited(watered):
    run = read_runs([watered / "fedavg" / "seed-0"])[0]
    first, second = (LITRES.of_round(h) for h in run.rounds[:2])
    rule = CostLimit("litres", first + second / 2)
    assert not rule(run.rounds[:1])
    assert rule(run.rounds[:2]).startswith("budget of ")
    estimates = [ClientCost(other={"litres": second})]
    assert rule.check_next_round(run.rounds[:1], estimates).startswith("next round would pass")
    assert tables.build_summary_table(tables.group_runs([run]))[0].count("Water µl") == 1
    assert find_cost_to_target(run.rounds, 0.0)["litres"] == first
    assert list_round_metrics(run.rounds[0])["litres"] == first


def test_cost_that_nobody_spends_has_no_column():
    assert [cost.name for cost in list_spent_costs(lambda cost: 0.0)] == [
        "rounds",
        "joules",
        "bytes",
        "seconds",
    ]


def test_lines_without_further_costs_are_as_they_were():
    record = RoundRecord(1, joules=2.0, bytes_up=3)
    assert "other" not in to_round_line(record)
    assert parse_record(to_round_line(record)) == record
    watered = replace(record, other={"litres": 0.5})
    assert parse_record(json.loads(json.dumps(to_round_line(watered)))) == watered
    clients, _ = book_costs(
        1, DueTasks((Task("a", 0, 1, 0),)), [Reply("a", 1, spent=ClientCost(3, 4))], {}
    )
    line = to_client_line(clients[0])
    assert "other" not in line
    assert COSTS["bytes"].of_line(line) == COSTS["bytes"].of_client(clients[0].spent) == 7


def test_rounds_add_up_by_hand():
    # the second round waits until second 10; joules 1 + 2, bytes (3 + 4) + 5
    history = (
        RoundRecord(1, joules=1.0, bytes_up=3, bytes_down=4, seconds=6.0),
        RoundRecord(1, "abandoned", joules=2.0, bytes_up=5, began=10.0, seconds=1.0),
    )
    spent = {name: cost.of_run(history) for name, cost in COSTS.items()}
    assert spent == {
        "rounds": 1,
        "joules": 3.0,
        "bytes": 12,
        "seconds": 11.0,
        "grams": 0.0,
        "network_joules": 0.0,
    }
    assert {name: cost.accumulate(history)[-1] for name, cost in COSTS.items()} == spent
    assert COSTS["seconds"].accumulate(history) == [6.0, 11.0]


def test_every_budget_is_a_cost():
    every = CostBudget(rounds=1, bytes=1.0, joules=1.0, seconds=1.0, grams=1.0)
    assert set(every.limits) == set(COSTS) - {"network_joules"}  # a CostLimit may


@pytest.mark.parametrize(
    "other", [None, {"litres": -1.0}, {"litres": float("nan")}, {"litres": "much"}, {1: 1.0}]
)
def test_senseless_amounts_are_not_booked(other):
    assert is_plausible_cost(ClientCost(other={"litres": 1.0}))
    assert not is_plausible_cost(ClientCost(other=other))
