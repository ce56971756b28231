"""A stop with a price: slopes by hand, properties of the trend, what ends a run and what does not,
liars, resumes.
"""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flrce.config.experiment import Experiment
from flrce.core.types import RoundRecord
from flrce.errors import BadInput
from flrce.methods.stopping.gains import _trim
from flrce.methods.stopping.marginal_gain import (
    MAX_DELAY_FACTOR,
    MarginalGain,
    collect_reports,
    estimate_gain,
    is_check_due,
    metric_point_size,
)
from flrce.methods.stopping.target import TargetMetric
from flrce.methods.stopping.trend import collect_client_reports
from flrce.simulation import runs


def fleet(curve, T, M=50, P=10, noise=0.02, seed=0, spoil=None, lower=False):
    """Records of clients in turn that find `curve(t)`, each off by something of its own."""
    rng = np.random.default_rng(seed)
    own, found = rng.normal(0, 0.1, M), []
    for t in range(1, T + 1):
        order = np.random.default_rng([seed, (t - 1) // (M // P)]).permutation(M)
        chosen = order[(t - 1) % (M // P) * P :][:P]
        values = curve(t) + own[chosen] + rng.normal(0, noise, P)
        if spoil:
            values = [spoil(k, t, value) for k, value in zip(chosen, values, strict=True)]
        names = tuple(map(str, chosen))
        held = tuple(float(np.clip(value, 0, 1)) if not lower else float(value) for value in values)
        found.append(
            RoundRecord(
                t,
                replied=names,
                chosen=names,
                holdouts=held,
                held=(20,) * P,
                clients=M,
                lower=lower,
                joules=10.0,
                metric="loss" if lower else "accuracy",
            )
        )
    return found


def power(t, top=0.8, b=1.0, first=0.7):
    """Rises to `top`; twice the rounds bring first * t^-b * (1 - 2^-b)."""
    return top - first * t**-b


def ends(rule, history):
    return next((t for t in range(1, len(history) + 1) if rule(history[:t])), None)


@pytest.mark.parametrize("b", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("scale", [1, 4])
def test_a_power_law_ends_soon_after_twice_the_rounds_bring_two_points(b, scale):
    """G(t) = c t^-b (1 - 2^-b) = 0.02 gives t*; slower by `scale`, the stop is later by about
    that. With b = 0.5 the next doubling brings 0.71 of the last one, and the rule counts 0.6.
    """
    c = 0.7 * scale**b
    star = (c * (1 - 2**-b) / 0.02) ** (1 / b)
    tau = ends(
        MarginalGain(),
        fleet(
            lambda t: power(t, b=b, first=c) if t > 2 * scale else 0.1,
            int(4 * star) + 80,
            noise=0.005,
        ),
    )
    assert max(0.7 * star, 34) <= tau <= max(2.5 * star, 55)


def test_a_model_that_goes_on_rising_goes_on():
    assert ends(MarginalGain(), fleet(lambda t: 0.06 * math.log2(t), 400)) is None


def test_a_higher_price_never_ends_a_run_later():
    history = fleet(power, 200)
    taus = [ends(MarginalGain(points=points), history) for points in (4.0, 2.0, 1.0, 0.5)]
    assert taus == sorted(taus)


def test_a_price_in_joules_is_what_the_run_has_cost_so_far():
    """10 J a round: after 30 rounds twice the rounds cost 300 J, at 100 J a point worth them from 3
    points on.
    """
    history = fleet(power, 30)
    assert MarginalGain(joules=100.0).compute_required_gain(history) == pytest.approx(3.0)
    assert MarginalGain(joules=100.0, seconds=1.0).compute_required_gain(
        [replace(h, seconds=0.5) for h in history]
    ) == pytest.approx(15.0)


def test_the_dead_are_given_ten_sweeps_and_then_named():
    """M / P = 5: fifty rounds."""
    flat = fleet(lambda t: 0.1, 200)
    tau = ends(MarginalGain(), flat)
    assert 50 <= tau <= 60
    reason = MarginalGain()(flat[:tau])
    assert reason.startswith(
        f"the model has not improved measurably in {tau} rounds, by clients' reports"
    )
    assert "learning rate" in reason


def test_a_late_start_is_waited_for():
    """At chance for 30 rounds, then up: not ended before it has levelled off."""
    tau = ends(MarginalGain(), fleet(lambda t: 0.1 if t < 30 else power(t - 29), 400))
    assert tau > 60


def spoil_reports(history, liars, lie):
    """The same record in which the named clients report `lie(t)`."""
    return [
        replace(
            h,
            holdouts=tuple(
                lie(h.t) if k in liars else value
                for k, value in zip(h.replied, h.holdouts, strict=True)
            ),
        )
        for h in history
    ]


LIES = {
    "alternating": lambda t: float(t % 2),
    "alternating sweeps": lambda t: float(t // 5 % 2),
    "rising": lambda t: min(t / 150, 1.0),
    "falling": lambda t: max(1 - t / 150, 0.0),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_three_in_ten_that_lie_move_the_stop_by_a_stated_factor(lie):
    """Liars can put the round off in which the trimmed mean says enough, to 1.5 times the honest
    one; the run ends by MAX_DELAY_FACTOR times that, and not before half the honest round.
    """
    for seed in range(3):
        honest = fleet(power, 300, seed=seed)
        liars = [str(k) for k in range(15)]  # of 50
        tau = ends(MarginalGain(), honest)
        moved = ends(MarginalGain(), spoil_reports(honest, liars, LIES[lie]))
        assert moved is not None
        assert tau / 2 <= moved <= 1.5 * MAX_DELAY_FACTOR * tau


FIFTY = fleet(power, 160)
level = st.floats(0, 1)
STRATEGIES = st.one_of(
    st.builds(lambda x: lambda t: x, level),
    st.builds(lambda when, x, y: lambda t: x if t < when else y, st.integers(1, 90), level, level),
    st.builds(lambda x, rate: lambda t: min(x + rate * t, 1.0), level, st.floats(0.001, 0.02)),
    st.builds(lambda x, rate: lambda t: max(x - rate * t, 0.0), level, st.floats(0.001, 0.02)),
    st.builds(
        lambda x, rate: lambda t: min(x + rate * math.log2(t), 1.0), level, st.floats(0, 0.2)
    ),
    st.builds(lambda n, x, y: lambda t: x if t // n % 2 else y, st.integers(1, 20), level, level),
    st.builds(
        lambda seed: lambda t: float(np.random.default_rng([seed, t]).random()), st.integers(0)
    ),
)


@pytest.mark.parametrize(("liars", "factor"), [(5, 1.5), (10, 1.8)])
@settings(max_examples=25, derandomize=True, deadline=None)
@given(lie=STRATEGIES)
def test_a_minority_moves_the_stop_by_a_small_factor(liars, factor, lie):
    """A tenth or a fifth of 50 clients, whatever they report; one sweep is allowed besides."""
    sweep, bad = 5, [str(k) for k in range(liars)]
    tau = ends(MarginalGain(), FIFTY)
    moved = ends(MarginalGain(), spoil_reports(FIFTY, bad, lie))
    assert moved is not None
    assert tau / factor - sweep <= moved <= factor * tau + sweep


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    honest=st.lists(st.floats(-1, 1), min_size=14, max_size=30),
    lies=st.lists(st.floats(-1e9, 1e9), max_size=6),
)
def test_liars_cannot_take_the_trimmed_mean_beyond_honest_clients(honest, lies):
    """At most 30 % of the clients, at any value: 6 of 20."""
    gain = _trim(np.array(honest + lies[: int(0.3 * (len(honest) + len(lies)))]))
    assert min(honest) - 1e-9 <= gain.gain <= max(honest) + 1e-9
    assert gain.error <= 2.5 * (max(honest) - min(honest)) + 1e-9


def test_the_trimmed_mean_by_hand():
    """Of ten pairs three at either end are left out; the error is that of the winsorised ones."""
    gain = _trim(np.array([100.0, -50.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, -70.0, 90.0]))
    assert gain.gain == pytest.approx(2.5)  # of 1, 2, 3 and 4
    winsorised = [1.0] * 4 + [2.0, 3.0] + [4.0] * 4
    assert gain.error == pytest.approx(np.std(winsorised, ddof=1) / (0.4 * math.sqrt(10)))


def test_a_first_value_that_is_a_lie_is_no_unit():
    """MAE of 4 and a client that tells 1e12 in the first round: a point is a hundredth of 4."""
    history = [RoundRecord(1, lower=True, holdouts=(4.0, 4.2, 1e12), metric="mae")]
    assert metric_point_size(history) == pytest.approx(0.042)


def test_evaluators_that_alternate_do_not_switch_the_stop_off():
    """3 of 10 evaluators say 0 and 1 by turns, so that the mean swings by 0.3."""
    honest = [RoundRecord(t, accuracy=power(t)) for t in range(1, 301)]
    spoilt = [replace(h, accuracy=0.7 * h.accuracy + 0.3 * (h.t % 2)) for h in honest]
    tau, moved = (ends(MarginalGain(evidence="evaluations"), each) for each in (honest, spoilt))
    assert moved is not None
    assert tau / 2 <= moved <= 2 * tau


@pytest.mark.parametrize("seed", range(3))
def test_the_verdict_is_the_same_for_any_eval_every(seed):
    """An average that remembers ten rounds: evaluated every round, every second, every fifth."""
    rng = np.random.default_rng(seed)
    value, series = 0.0, []
    for _ in range(400):
        value = 0.9 * value + rng.normal(0, 0.004)  # serially correlated noise
        series.append(value)
    stops = []
    for every in (1, 2, 5):
        history = [
            RoundRecord(
                t,
                accuracy=power(t, first=2.0) + series[t - 1] if t % every == 0 else None,
                clients=20,
                replied=("a", "b"),
            )
            for t in range(1, 401)
        ]
        stops.append(ends(MarginalGain(evidence="evaluations"), history))
    assert max(stops) <= 1.25 * min(stops)


def test_reports_are_read_first_and_both_must_agree():
    """Evaluations that go on rising: reports alone end the run, both do not."""
    history = [replace(h, accuracy=0.06 * math.log2(h.t)) for h in fleet(power, 300)]
    assert MarginalGain().assess_history(history).by == "reports"
    tau = ends(MarginalGain(), history)
    assert tau is not None
    assert ends(MarginalGain(evidence="both"), history) is None
    assert ends(MarginalGain(evidence="evaluations"), history) is None
    assert MarginalGain(evidence="both").assess_history(history[:tau]).by == "evaluations"
    assert [MarginalGain(evidence=e).reads_evaluations for e in ("reports", "both")] == [
        False,
        True,
    ]


def test_perplexity_is_compared_as_ratios():
    """A constant share per doubling: 5 % at any level is the same gain; a point is 1 %."""
    for level in (2.0, 200.0):
        history = [
            RoundRecord(
                t, metric="perplexity", lower=True, metrics={"perplexity": level * t**-0.07}
            )
            for t in range(1, 101)
        ]
        seen = MarginalGain().assess_history(history)
        assert seen.measured.gain == pytest.approx(100 * 0.07 * math.log(2), rel=0.1)
        assert "perplexity" in MarginalGain().explain(history).lower()


def test_the_flagged_have_no_say():
    history = fleet(power, 60)
    before = collect_client_reports(history)
    flagged = [replace(h, flagged={"7": "far"} if h.t < 40 else {}) for h in history]
    after = collect_client_reports(flagged)
    assert len(after.t) == len(before.t) - sum("7" in h.replied for h in history[1:])


def test_where_less_is_better_a_point_is_a_hundredth_of_the_first_figure():
    history = fleet(lambda t: 4.0 + 6.0 / t, 200, lower=True, noise=0.02)
    assert metric_point_size(history) == pytest.approx(0.1, rel=0.05)
    tau = ends(MarginalGain(), history)
    assert 30 <= tau <= 60  # G(t) = 3 / t of 10: below 2 points from round 15 on


def test_without_figures_of_clients_evaluations_count():
    history = [RoundRecord(t, accuracy=power(t)) for t in range(1, 200)]
    assert 30 <= ends(MarginalGain(), history) <= 60


def test_looks_thin_out():
    looks = [t for t in range(1, 1000) if is_check_due(t)]
    assert looks[:5] == [1, 2, 3, 4, 5]
    assert all(b <= 1.05 * a + 1 for a, b in pairwise(looks))


def test_a_look_is_the_same_whatever_comes_after_it():
    history = fleet(power, 120)
    found = collect_reports(history)
    for t in (30, 60, 90):
        assert estimate_gain(found.truncate_after(t), t, 2.0) == MarginalGain().assess_history(
            history[:t]
        )


def test_abandoned_rounds_do_not_count():
    history = fleet(power, 200)
    odd = [x for h in history for x in (h, RoundRecord(h.t, "abandoned"))]
    assert ends(MarginalGain(), history) * 2 - 1 == ends(MarginalGain(), odd)


def test_a_target_is_reached_when_its_bound_is():
    """Rises past 0.6 at round 50, by 0.01 a round: not before, and soon after."""
    rising = fleet(lambda t: 0.1 + 0.01 * t, 90, noise=0.01)
    tau = ends(TargetMetric(0.6), rising)
    assert 50 < tau < 75
    assert "the target of 60.0 % is reached" in TargetMetric(0.6)(rising[:tau])
    assert ends(TargetMetric(0.6, confidence=0.999), rising) >= tau
    assert ends(TargetMetric(1.5), rising) is None


def test_a_target_just_above_a_flat_curve_is_seldom_taken_for_reached():
    wrong = [
        ends(TargetMetric(0.51), fleet(lambda t: 0.5, 100, seed=seed)) is not None
        for seed in range(15)
    ]
    assert sum(wrong) <= 2  # 5 % of 15 is 0.75


def test_a_target_below_for_metrics_where_less_is_better():
    tau = ends(TargetMetric(2.0), fleet(lambda t: 6.0 / t + 1.0, 60, lower=True))
    assert 6 < tau < 25


def test_by_name_in_an_experiment_and_resumed_to_the_same_bytes(tmp_path):
    from training import assert_resumes

    stop = {"piece": "worth", "points": 6.0}
    experiment = Experiment.from_tables(
        {
            "rounds": 90,
            "clients": 12,
            "per_round": 4,
            "recipe": {"name": "fedavg", "holdouts": True, "stop": stop},
        }
    )
    straight = assert_resumes(experiment, tmp_path, after=7)
    assert "Predicted gain from doubling the rounds: " in straight.summary["stopped"]
    assert 7 < straight.summary["rounds"] < 90


@pytest.mark.parametrize("bad", [{"points": 0.0}, {"joules": -1.0}, {"rounds": 3}])
def test_prices_are_above_zero(bad):
    with pytest.raises(BadInput, match=r"recipe.stop = 'worth'"):
        runs.run(
            Experiment.from_tables(
                {"recipe": {"name": "fedavg", "stop": {"piece": "worth", **bad}}}
            )
        )
