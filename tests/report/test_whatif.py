"""What a replay says is what a real run under that rule does."""

import json
import time
from dataclasses import asdict

import pytest

from flrce import Experiment
from flrce.cli.cli import main
from flrce.core.types import RoundRecord
from flrce.methods.catalogue import recipes
from flrce.methods.stopping.budget import CostBudget
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.stopping.no_headway import NoHeadway
from flrce.report.cost_per_point import PointPrice, compute_point_prices, thin_prices
from flrce.report.whatif import (
    REPLAY_CAVEAT,
    build_stop_rules,
    build_threshold_rules,
    list_caveats,
    replay_rule,
)
from flrce.simulation import runs
from flrce.storage import read
from report_helpers import compared, experiment


@pytest.fixture(scope="module")
def recorded():
    return read.read_single_run(compared() / "flrce-no-stop" / "seed-0")


def same(outcome, result, billed=False):
    """The replayed end and the real one; `billed`: whether that paid for evaluations."""
    done = [h for h in result.history if h.outcome == "committed"]
    assert outcome.stop == len(done)
    assert outcome.accuracy == done[-1].accuracy
    assert outcome.why == result.history[-1].stop
    read = sum(h.bytes_evaluation for h in done) if billed else 0  # the record has no bill for it
    sent = result.summary["bytes_up"] + result.summary["bytes_down"]
    assert outcome.spent["bytes"] == sent - read
    if not billed:
        assert outcome.spent["joules"] == pytest.approx(
            sum(h.joules for h in result.history), rel=1e-12
        )


@pytest.mark.parametrize("psi", [1.0, 1.5, 2.0])
def test_psi_is_what_a_real_run_does(recorded, psi):
    result = runs.run(experiment("flrce", recipe={"psi": psi}))
    assert result.summary["stopped"], "the comparison needs a run that stops"
    same(replay_rule(recorded, "", UpdateConflicts(psi)), result)


def test_a_hardened_rule_keeps_its_other_settings(tmp_path):
    hardened = {"stop": {"piece": "conflicts", "psi": 4.0, "r": 2, "n": 3, "after": 2}}
    runs.run(experiment("flrce", recipe=hardened), tmp_path / "run")
    run = read.read_single_run(tmp_path / "run")
    assert build_stop_rules(run, psi=[1.0])["psi 1"] == UpdateConflicts(1.0, r=2, n=3, after=2)
    other = {"stop": {**hardened["stop"], "psi": 1.0}}
    result = runs.run(experiment("flrce", recipe=other))
    assert result.summary["stopped"], "the comparison needs a run that stops"
    same(replay_rule(run, "", build_stop_rules(run, psi=[1.0])["psi 1"]), result)


def test_a_run_without_a_stop_replays_its_presets_rule(tmp_path):
    """The hardened rule wants several rounds that agree, late enough, among clients that are
    trusted.
    """
    selector = {"piece": "relationship", "decay": 0.9, "floor": 0.2}
    shape = {"rounds": 40, "clients": 12, "per_round": 5, "engine": {"workers": 1}}
    free = {
        "name": "flrce-no-stop",
        "preset": "hardened",
        "selector": selector,
        "holdouts": False,
        "average": "last",
    }
    runs.run(Experiment(**shape, recipe=free), tmp_path / "run")
    run = read.read_single_run(tmp_path / "run")
    rule = build_stop_rules(run, psi=[1.0])["psi 1"]
    assert rule == recipes.flrce(1.0, "hardened", P=5).stop
    assert rule != UpdateConflicts(1.0)
    result = runs.run(Experiment(**shape, recipe={**free, "name": "flrce", "psi": 1.0}))
    assert result.summary["stopped"], "the comparison needs a run that stops"
    same(replay_rule(run, "", rule), result)


def test_a_budget_counts_the_questions_that_were_asked(tmp_path):
    """Power-of-Choice: candidates that do not train download the model all the same."""
    free = runs.run(experiment("power-of-choice", rounds=8), tmp_path / "run")
    run = read.read_single_run(tmp_path / "run")
    a_round = free.history[0].bytes_up + free.history[0].bytes_down
    limit = 3.5 * a_round
    same(
        replay_rule(run, "", CostBudget(bytes=limit)),
        runs.run(experiment("power-of-choice", rounds=8, stop={"bytes": limit})),
    )
    notes = list_caveats(run, [replay_rule(run, "9 joules", CostBudget(joules=9.0))])
    assert any("losses were asked for" in note for note in notes)


@pytest.mark.parametrize(
    "budget", [{"joules": 12.0}, {"bytes": 5e5}, {"seconds": 0.9}, {"rounds": 4}]
)
def test_budgets_are_what_a_real_run_does(recorded, budget):
    result = runs.run(experiment("flrce-no-stop", stop=budget))
    outcome = replay_rule(recorded, "", CostBudget(**budget))
    assert 0 < outcome.stop < 16
    same(outcome, result)


def test_patience_is_what_a_real_run_does(recorded):
    result = runs.run(
        experiment("flrce-no-stop", recipe={"stop": {"piece": "patience", "rounds": 2}})
    )
    assert result.summary["stopped"], "the comparison needs a run that stops"
    (rule,) = build_stop_rules(recorded, patience=[2]).values()
    same(replay_rule(recorded, "", rule), result, billed=True)


def test_the_server_average_is_told_apart():
    run = read.read_single_run(compared() / "fedavg" / "seed-0")
    outcome = replay_rule(run, "", CostBudget(rounds=5))
    assert outcome.accuracy == run.committed_rounds[4].accuracy
    assert outcome.averaged == run.committed_rounds[4].averaged
    assert outcome.averaged != outcome.accuracy


def test_saved_and_spent_make_up_the_run(recorded):
    for name, rule in {
        **build_threshold_rules(recorded),
        **build_stop_rules(recorded, psi=[1.0], joules=[12.0], patience=[2]),
    }.items():
        outcome = replay_rule(recorded, name, rule)
        assert outcome.spent["joules"] + outcome.saved["joules"] == pytest.approx(
            recorded.summary["joules"]
        )
        assert (
            outcome.spent["bytes"] + outcome.saved["bytes"]
            == recorded.summary["bytes_up"] + recorded.summary["bytes_down"]
        )
        assert (outcome.stop is None) == (not outcome.why)
        assert (outcome.stop is None) <= (outcome.saved["joules"] == 0)


def test_the_grid_agrees_with_the_shadow_stops_of_the_run(recorded):
    shadow = recorded.summary["shadow_stops"]
    replayed = {
        name.removeprefix("psi "): replay_rule(recorded, name, rule).stop
        for name, rule in build_threshold_rules(recorded).items()
    }
    assert {psi: t for psi, t in replayed.items() if t is not None} == shadow
    assert shadow


def test_an_abandoned_round_is_no_time_to_stop():
    made = read.read_single_run(compared() / "flrce-no-stop" / "seed-0")
    tried = RoundRecord(1, "abandoned", exploit=True, conflicts=9.0)
    run = read.RecordedRun(made.folder, made.experiment, (tried, *made.rounds), (), {}, (), {})
    assert (
        replay_rule(run, "", UpdateConflicts(1.5)).stop
        == replay_rule(made, "", UpdateConflicts(1.5)).stop
    )


def test_caveats_say_what_cannot_be_replayed(recorded):
    notes = list_caveats(recorded, [replay_rule(recorded, "psi 4", UpdateConflicts(4.0))])
    assert notes == [REPLAY_CAVEAT]
    stopped = next(run for run in read.read_runs([compared() / "flrce"]) if run.rounds[-1].stop)
    notes = list_caveats(stopped, [replay_rule(stopped, "psi 4", UpdateConflicts(4.0))])
    assert f"ended after round {len(stopped.committed_rounds)}" in notes[1]


@pytest.mark.parametrize(("compressor", "guessed"), [("nonzero", True), ("topk", False)])
def test_replies_whose_bytes_are_not_known_before_make_budgets_a_guess(
    tmp_path, compressor, guessed
):
    runs.run(experiment("fedavg", rounds=2, recipe={"compressor": compressor}), tmp_path / "run")
    run = read.read_single_run(tmp_path / "run")
    notes = list_caveats(run, [replay_rule(run, "9 joules", CostBudget(joules=9.0))])
    assert any("compressed" in note for note in notes) is guessed
    assert list_caveats(run, [replay_rule(run, "patience 2", UpdateConflicts(4.0))]) == [
        REPLAY_CAVEAT
    ]


def test_spares_make_budgets_a_guess(tmp_path):
    runs.run(experiment("oort", rounds=2, clients=14, per_round=10), tmp_path / "run")
    run = read.read_single_run(tmp_path / "run")
    (note,) = list_caveats(run, [replay_rule(run, "9 seconds", CostBudget(seconds=9.0))])[1:]
    assert "spares were asked along" in note


def test_replay_takes_less_than_a_second(recorded):
    start = time.process_time()  # of this process: another's load does not count
    for name, rule in build_stop_rules(
        recorded, psi=[1, 2, 3, 4], patience=[5, 10], joules=[5, 10, 15], bytes=[1e5, 1e6]
    ).items():
        replay_rule(recorded, name, rule)
    assert time.process_time() - start < 1


def test_command_prints_a_table_and_json(capsys):
    folder = str(compared() / "flrce-no-stop")
    assert main(["whatif", folder + "/seed-0", "--psi", "1.5,40%", "--patience", "2"]) == 0
    told = capsys.readouterr().out
    assert all(
        word in told for word in ("psi 1.5", "psi 2 ", "patience 2", "J saved", "needs a new run")
    )
    assert main(["whatif", folder, "--psi", "1.5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [len(run["rules"]) for run in told["runs"]] == [1, 1]
    assert told["runs"][0]["rules"][0]["rule"] == "psi 1.5"
    assert main(["whatif", folder]) == 0  # the paper's grid, over two seeds
    assert "of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--psi", "x"], "give numbers"),
        (["--psi", "9"], "at most P - 1 = 4"),
        (["--patience", "2.5"], "give whole numbers"),
        (["--joules", "-1"], "above 0"),
        (["--bytes", "nan"], "above 0"),
    ],
)
def test_bad_values_are_refused_in_one_line(capsys, arguments, says):
    assert main(["whatif", str(compared() / "flrce-no-stop" / "seed-0"), *arguments]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert len(told.splitlines()) == 1


def test_several_recipes_are_refused(capsys):
    assert main(["whatif", str(compared()), "--psi", "2"]) == 2
    assert "several recipes" in capsys.readouterr().err


def test_a_standstill_is_what_a_real_run_does(tmp_path, capsys):
    """A run without an average has no headway to look at."""
    rule = NoHeadway(0.3, share=0.0, n=3, first=4, after=5)
    shape = {"rounds": 14, "clients": 12, "per_round": 5, "engine": {"workers": 1}}
    runs.run(
        Experiment(**shape, recipe={"name": "flrce-no-stop", "preset": "default"}),
        tmp_path / "free",
    )
    result = runs.run(
        Experiment(
            **shape,
            recipe={
                "name": "flrce",
                "preset": "default",
                "stop": {"piece": "standstill", **asdict(rule)},
            },
        )
    )
    assert result.summary["stopped"], "the comparison needs a run that stops"
    run = read.read_single_run(tmp_path / "free")
    same(replay_rule(run, "", rule), result)
    assert main(["whatif", str(tmp_path / "free"), "--preset", "frugal,headway"]) == 0
    assert main(["whatif", str(tmp_path / "free"), "--preset", "frugl"]) == 2
    assert "did you mean 'frugal'" in capsys.readouterr().err
    assert main(["whatif", str(compared() / "flrce" / "seed-0"), "--preset", "headway"]) == 2
    assert 'set average = "ema"' in capsys.readouterr().err


def test_a_price_is_what_a_real_run_does(tmp_path, capsys):
    """And presets are prices: what is asked of twice the rounds."""
    shape = {"rounds": 70, "clients": 12, "per_round": 4, "engine": {"workers": 1}}
    runs.run(
        Experiment(**shape, recipe={"name": "flrce-no-stop", "preset": "default"}),
        tmp_path / "free",
    )
    result = runs.run(
        Experiment(
            **shape,
            recipe={
                "name": "flrce",
                "preset": "default",
                "stop": {"piece": "worth", "points": 20.0},
            },
        )
    )
    assert result.summary["stopped"], "the comparison needs a run that stops"
    run = read.read_single_run(tmp_path / "free")
    same(replay_rule(run, "", build_stop_rules(run, points=[20.0])["20 points"]), result)
    assert [
        each.points
        for each in build_stop_rules(run, preset=["frugal", "balanced", "accurate"]).values()
    ] == [4.0, 2.0, 1.0]
    assert main(["whatif", str(tmp_path / "free"), "--points", "0"]) == 2
    assert "--points 0: must be above 0" in capsys.readouterr().err


def test_the_price_of_a_point_over_the_run(tmp_path, capsys):
    """As many rounds again cost what the run has cost so far: over the most they would bring, a
    point's price.
    """
    shape = {"rounds": 70, "clients": 12, "per_round": 4, "engine": {"workers": 1}}
    runs.run(
        Experiment(**shape, recipe={"name": "flrce-no-stop", "preset": "default"}),
        tmp_path / "free",
    )
    run = read.read_single_run(tmp_path / "free")
    found = compute_point_prices(run)
    assert len(found) > 5
    for price in found:
        spent = sum(h.joules for h in run.committed_rounds[: price.t])
        look = MarginalGain().assess_history(run.committed_rounds[: price.t])
        assert price.gain == pytest.approx(look.bound)
        assert price.most == pytest.approx(spent / 2)  # two points are asked for
        if price.gain > 0:
            assert price.joules == pytest.approx(spent / price.gain)
        else:
            assert (price.joules, price.describe()) == (None, "no predicted gain")
    assert main(["whatif", str(tmp_path / "free"), "--points", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["runs"][0]["price"]
    assert told == [asdict(price) for price in found]
    assert main(["whatif", str(tmp_path / "free"), "--points", "2"]) == 0
    shown = capsys.readouterr().out
    assert all(
        f"round {price.t}  " in shown and price.describe() in shown for price in thin_prices(found)
    )


def test_a_half_doubling_has_one_price():
    some = [
        PointPrice(t, 1.0, 1.0, 1.0, 1.0) for t in (8, 9, 11, 12, 15, 16, 17)
    ]  # halves end before 11.3, 16, 22.6
    assert [price.t for price in thin_prices(some)] == [11, 15, 17]
