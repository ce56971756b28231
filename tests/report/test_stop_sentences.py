"""Sentences about stops: true beside the figures, and in the unit of the metric."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flrce import Experiment
from flrce.core.types import RoundRecord
from flrce.methods.stopping.gains import MeasuredGain
from flrce.methods.stopping.marginal_gain import (
    GainEstimate,
    MarginalGain,
    format_stop_reason,
    metric_scale,
)
from flrce.methods.stopping.wording import MetricScale, describe_change
from flrce.report.selection import describe_reach_of_runs
from flrce.report.why import explain_round, explain_run_end
from flrce.simulation import runs
from flrce.storage import read

CASES = [("mae", True, (2.0, 1.0)), ("accuracy", False, (0.947, 0.989))]
MAE, R2 = MetricScale("mae", True, 0.05), MetricScale("r2", False, 0.01)


def estimate(
    gain: float, error: float, alive: bool = True, by: str = "evaluations", price: float = 2.0
) -> GainEstimate:
    measured = MeasuredGain(gain, error, 12)
    return GainEstimate(40, measured, 0.6 * gain + error / 2, price, by, alive, True)


def test_a_rise_is_never_denied() -> None:
    """+1.11 +- 0.15 in a run that is not known to have learnt anything."""
    text = format_stop_reason(estimate(1.11, 0.15, alive=False))
    assert text.startswith("Predicted gain from doubling the rounds: 0.7 points (")
    assert text.endswith("); your price is 2")
    for alive in (True, False):
        for by in ("evaluations", "reports"):
            for gain in (-1.0, 0.0, 0.2, 1.5, 2.5):
                text = format_stop_reason(estimate(gain, 0.1, alive, by))
                assert "at most" not in text
                assert ("has not improved measurably" in text) == (not alive and gain <= 0.1)


@pytest.mark.parametrize("gain", [-3.0, -2.0, -0.4, 0.0, 0.4, 1.9, 2.1, 2.45])
@pytest.mark.parametrize("error", [0.0, 0.3, 1.0, 1.29])
def test_a_change_is_measured_where_its_range_leaves_out_zero(gain: float, error: float) -> None:
    """2.45 with an error of 1.29 was "+2.45 +- 1.29", and yet "did not change measurably"."""
    text = describe_change((), MeasuredGain(gain, error, 12), "reports", MetricScale())
    amount = re.search(r"(\d+\.\d+) ± (\d+\.\d+) points", text)
    assert amount is not None
    covers_zero = float(amount[1]) <= float(amount[2])
    assert ("did not change measurably" in text) == covers_zero


def test_a_run_that_has_learnt_nothing_is_called_that_with_a_cause() -> None:
    for by, source in (("evaluations", "evaluations"), ("reports", "clients' reports")):
        text = format_stop_reason(estimate(0.0, 0.1, False, by))
        assert text.startswith(
            f"the model has not improved measurably in 40 rounds, by {source}: it learnt in its first"
        )


def test_metrics_that_are_no_shares_have_no_points() -> None:
    assert format_stop_reason(estimate(1.0, 0.1), MAE).startswith(
        "Predicted MAE reduction from doubling the rounds: 0.03 ("
    )
    assert format_stop_reason(estimate(1.0, 0.1), MAE).endswith("your price is 0.1")
    assert format_stop_reason(estimate(1.0, 0.1), R2).startswith(
        "Predicted R² gain from doubling the rounds: 0.006 ("
    )
    assert "points" not in format_stop_reason(estimate(1.0, 0.1), MAE) + format_stop_reason(
        estimate(1.0, 0.1), R2
    )


def test_a_prediction_below_its_price_reads_so() -> None:
    near = estimate(3.28, 0.0)  # three fifths are 1.968
    assert "1.97 points (" in format_stop_reason(near)
    low, high = near.predicted_range
    assert low < near.predicted_gain < high


@pytest.mark.parametrize(
    ("metric", "lower", "values"), [("mae", True, (2.0, 1.0)), ("accuracy", False, (0.947, 0.989))]
)
def test_why_tells_the_whole_run_beside_its_last_doubling(
    metric: str, lower: bool, values: tuple[float, float]
) -> None:
    history = tuple(
        RoundRecord(t, metric=metric, lower=lower, joules=1.0, **_value(metric, values[t > 1]))
        for t in range(1, 41)
    )
    text = MarginalGain().explain(history)
    assert (
        "was 94.7 % in round 1 and 98.9 % in round 40"
        if metric == "accuracy"
        else "was 2 in round 1 and 1 in"
    ) in text
    assert "did not change measurably" in text
    assert "would cost another 40 J" in text
    assert ("points" in text) == (metric == "accuracy")
    assert metric_scale(history).unit == (0.02 if lower else 0.01)


def _value(metric: str, value: float) -> dict[str, object]:
    return {"accuracy": value} if metric == "accuracy" else {"metrics": {metric: value}}


def test_runs_say_how_few_clients_could_be_reached_and_who_never_trained() -> None:
    def make_run(*rounds: tuple[int, str]) -> read.RecordedRun:
        made = [
            RoundRecord(t, replied=tuple(who), why={"reachable": n, "unreachable": {"away": 5 - n}})
            for t, (n, who) in enumerate(rounds, 1)
        ]
        setting = {"rounds": len(made), "recipe": {"name": "fedavg"}}
        clients = {"clients": list("abcde")}
        return read.RecordedRun(Path("made"), setting, tuple(made), (), clients, (), {})

    one, other = make_run((3, "ab"), (2, "ac")), make_run((4, "a"))
    # never trained: d and e; b, c, d and e
    assert describe_reach_of_runs([one]) == (
        "at fewest 2 of 5 clients could be reached (not asked: 3 away); 2 of 5 never trained"
    )
    assert describe_reach_of_runs([one, other]).endswith("; 2 to 4 of 5 never trained")
    everybody = replace(one, rounds=(RoundRecord(1, replied=("a",)),))
    assert describe_reach_of_runs([everybody]) == ""


def test_why_says_how_many_clients_could_be_reached(tmp_path) -> None:  # type: ignore[no-untyped-def]
    shape = {
        "rounds": 3,
        "clients": 20,
        "per_round": 5,
        "engine": {"workers": 1},
        "recipe": {"name": "fedavg"},
    }
    few = Experiment(**shape, fleet={"availability": {"piece": "by-chance", "share": 0.15}})
    runs.run(few, tmp_path / "few", allow_divergence=True)
    run = read.read_single_run(tmp_path / "few")
    h = next(h for h in run.rounds if h.chosen)
    reachable = h.why["reachable"]
    text = explain_round(run, h.t).sentences[0]
    assert (
        f"all {reachable} clients that could be reached, of 20" in text
        or f"from the {reachable} of 20 that could be reached" in text
    )
    assert "equally likely" not in text
    assert any("clients never trained." in each for each in explain_run_end(run).sentences)
    more = replace(h, why={"reachable": 9, "busy": 4})
    assert (
        "5 clients at random from the 9 of 20 that could be reached (not asked: 4"
        " still at work on an earlier task)"
        in (
            explain_round(
                replace(run, rounds=(replace(more, chosen=tuple("12345")),)), h.t
            ).sentences[0]
        )
    )
    runs.run(Experiment(**shape), tmp_path / "all")
    assert (
        "5 of 20 clients at random, all equally likely"
        in explain_round(read.read_single_run(tmp_path / "all"), 1).sentences[0]
    )
