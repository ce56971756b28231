"""A stop with a price: slopes by hand, properties of the trend, what ends a run and what does not,
liars, resumes.
"""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flrce.config.experiment import Experiment
from flrce.core.types import RoundRecord
from flrce.errors import BadInput
from flrce.methods.stopping.marginal_gain import (
    PUT_OFF,
    MarginalGain,
    collect_reports,
    estimate_gain,
    is_check_due,
    metric_point_size,
)
from flrce.methods.stopping.target import TargetMetric
from flrce.methods.stopping.trend import (
    MAX_HOLDOUT_RATIO,
    MetricReports,
    collect_client_reports,
    fit_trend,
    weigh_holdouts,
)
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


def said(t, k, value):
    return MetricReports(t, k, value, np.ones(len(t)))


def ends(rule, history):
    return next((t for t in range(1, len(history) + 1) if rule(history[:t])), None)


def test_a_slope_worked_by_hand():
    """Two clients, rounds 1, 2, 4, ... 32; each gains 0.03 a doubling from a level of its own:
    slope 0.03, error 0.
    """
    t = np.repeat([1, 2, 4, 8, 16, 32], 2)
    k = np.tile([0, 1], 6)
    value = 0.03 * np.log2(t) + np.where(k == 0, 0.2, 0.7)
    seen = fit_trend(said(t, k, value), 0)
    assert seen.slope == pytest.approx(0.03)
    assert seen.error == pytest.approx(0.0, abs=1e-12)
    assert seen.rounds == 6


def test_clients_that_spoke_once_or_rounds_that_are_few_say_nothing():
    t = np.arange(1, 21)
    assert fit_trend(said(t, t, t / 100), 0) is None
    assert fit_trend(said(t, t % 2, t / 100), 15) is None
    assert fit_trend(said(t[:0], t[:0], t[:0] / 1), 0) is None


@given(st.floats(-5, 5), st.floats(0.01, 100), st.integers(0, 99))
def test_shifting_and_stretching_figures_does_the_same_to_the_slope(shift, times, seed):
    rng = np.random.default_rng(seed)
    t, k = np.repeat(np.arange(1, 31), 4), rng.integers(0, 12, 120)
    value = rng.normal(size=120)
    one, two = fit_trend(said(t, k, value), 5), fit_trend(said(t, k, times * value + shift), 5)
    assert two.slope == pytest.approx(times * one.slope, rel=1e-6, abs=1e-9)
    assert two.error == pytest.approx(times * one.error, rel=1e-6, abs=1e-9)


@given(st.integers(0, 99))
def test_names_do_not_matter(seed):
    rng = np.random.default_rng(seed)
    t, k, value = np.repeat(np.arange(1, 31), 4), rng.integers(0, 12, 120), rng.normal(size=120)
    other = rng.permutation(12)[k]
    one, two = fit_trend(said(t, k, value), 5), fit_trend(said(t, other, value), 5)
    assert (one.slope, one.error) == pytest.approx((two.slope, two.error))


def test_the_error_is_what_slopes_really_vary_by():
    """200 flat fleets: the slopes' own spread, and the mean of what each says of its error, agree
    within a quarter.
    """
    found = [
        fit_trend(collect_client_reports(fleet(lambda t: 0.5, 30, seed=seed)), 0)
        for seed in range(200)
    ]
    spread = np.std([seen.slope for seen in found])
    assert np.mean([seen.error for seen in found]) == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize("b", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("scale", [1, 4])
def test_a_power_law_ends_soon_after_twice_the_rounds_bring_two_points(b, scale):
    """G(t) = c t^-b (1 - 2^-b) = 0.02 gives t*; slower by `scale`, the stop is later by about
    that.
    """
    c = 0.7 * scale**b
    star = (c * (1 - 2**-b) / 0.02) ** (1 / b)
    tau = ends(
        MarginalGain(),
        fleet(
            lambda t: power(t, b=b, first=c) if t > 2 * scale else 0.1,
            int(4 * star) + 40,
            noise=0.005,
        ),
    )
    assert 0.85 * star <= tau <= max(1.7 * star, star + 25)


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
    tau = ends(MarginalGain(), fleet(lambda t: 0.1, 200))
    assert 50 <= tau <= 60
    assert MarginalGain()(fleet(lambda t: 0.1, 200)[:tau]).startswith("no improvement over ")


def test_a_late_start_is_waited_for():
    """At chance for 30 rounds, then up: not ended before it has levelled off."""
    tau = ends(MarginalGain(), fleet(lambda t: 0.1 if t < 30 else power(t - 29), 400))
    assert tau > 60


LIES = {"up": lambda t: min(t / 60, 1.0), "down": lambda t: max(1 - t / 60, 0.0)}


def lied(share, lie, seed, M=50):
    """A fleet of which the first clients tell a story of their own."""
    return fleet(
        power, 300, seed=seed, spoil=lambda k, t, value: LIES[lie](t) if k < share * M else value
    )


@pytest.mark.parametrize("share", [0.02, 0.1])
@pytest.mark.parametrize("lie", list(LIES))
def test_where_models_are_evaluated_liars_end_nothing_and_delay_so_much(share, lie):
    """Evaluations decide and clients may only contradict: one of 50 moves nothing, a tenth can put
    the stop off.
    """
    for seed in range(3):
        honest, spoilt = fleet(power, 300, seed=seed), lied(share, lie, seed)
        both, bad = (
            [replace(h, accuracy=power(h.t)) for h in history] for history in (honest, spoilt)
        )
        alone = [RoundRecord(h.t, accuracy=power(h.t)) for h in honest]
        assert (
            ends(MarginalGain(), alone)
            <= ends(MarginalGain(), bad)
            <= (1.1 if share < 0.1 else 4) * ends(MarginalGain(), both)
        )


@pytest.mark.parametrize(
    ("share", "lie", "low", "high"),
    [(0.02, "up", 1, 1.6), (0.02, "down", 0.7, 1.1), (0.1, "up", 1, 3.6), (0.1, "down", 0.5, 1)],
)
def test_where_clients_alone_decide_liars_move_the_stop_by_a_bounded_factor(share, lie, low, high):
    """They are believed up to CUT times what is usual; docs/concepts.md states these factors."""
    honest = [ends(MarginalGain(), fleet(power, 300, seed=seed)) for seed in range(6)]
    moved = [ends(MarginalGain(), lied(share, lie, seed)) for seed in range(6)]
    assert low <= math.exp(np.mean(np.log(moved) - np.log(honest))) <= high


def test_a_claimed_hold_out_counts_up_to_twice_the_median():
    """Weights n / (n + median): 1/2 at the median, 2/3 at twice that, and no more for ten
    million.
    """
    weights = weigh_holdouts(np.array([10.0, 20, 20, 20, 40, 1e7]))
    assert weights == pytest.approx([1 / 3, 1 / 2, 1 / 2, 1 / 2, 2 / 3, 2 / 3])
    t, k = np.repeat(np.arange(1, 31), 4), np.tile(np.arange(8), 15)
    value = np.random.default_rng(0).normal(size=120)
    claims = [np.where(k < 2, n, 20.0) for n in (20 * MAX_HOLDOUT_RATIO, 1e7)]
    one, two = (fit_trend(MetricReports(t, k, value, n), 0) for n in claims)
    assert one == two


@given(st.integers(0, 10_000), st.floats(0, 0.4), st.sampled_from([1.0, 1e7]), st.floats(-1e3, 1e3))
def test_liars_cannot_take_the_slope_out_of_the_honest_range(seed, share, n, steep):
    """Whatever a share of the clients says, and claims to hold, the slope is between two honest
    clients' slopes.
    """
    rng = np.random.default_rng(seed)
    M, T = 20, 12
    t, k = np.repeat(np.arange(1, T + 1), M), np.tile(np.arange(M), T)
    bad = rng.permutation(M)[: int(share * M)]
    lying = np.isin(k, bad)
    value = np.where(lying, steep * np.log2(t) + rng.normal(0, 10, len(t)), rng.normal(size=len(t)))
    found = MetricReports(t, k, value, np.where(lying, n, 1.0))
    slopes = [
        np.polyfit(np.log2(np.arange(1, T + 1)), value[k == j], 1)[0]
        for j in range(M)
        if j not in bad
    ]
    assert min(slopes) - 1e-9 <= fit_trend(found, 0, liars=0.4).slope <= max(slopes) + 1e-9


def test_liars_cannot_take_the_error_beyond_the_honest_one():
    """Eight of twenty that say 0 and 1 by turns: the error stays of the size of the honest
    fleet's.
    """
    t, k = np.repeat(np.arange(1, 41), 20), np.tile(np.arange(20), 40)
    value = np.random.default_rng(1).normal(0, 0.02, len(t))
    spoilt = np.where(k < 8, t // 5 % 2, value)
    honest, bounded, taken = (
        fit_trend(said(t, k, value), 0),
        fit_trend(said(t, k, spoilt), 0, 0.4),
        fit_trend(said(t, k, spoilt), 0),
    )
    assert bounded.error < 3 * honest.error < taken.error


RISES = {  # of 10^7 samples each
    "0.01 t": lambda t: min(0.01 * t, 1.0),
    "0.13 log2 t": lambda t: min(0.13 * math.log2(t + 1), 1.0),
}


@pytest.mark.parametrize("lie", list(RISES))
@pytest.mark.parametrize("share", [0.1, 0.2])
def test_a_fifth_that_tells_a_rise_of_many_samples_does_not_keep_a_run_going(share, lie):
    """Evaluated: at most twice the honest rounds. Clients alone: PUT_OFF times the round in which
    bounded figures say enough, which liars put off to twice the honest one.
    """
    for seed in range(3):
        honest = fleet(power, 300, seed=seed)
        bad = [str(k) for k in range(int(share * 50))]
        spoilt = [
            replace(
                h,
                holdouts=tuple(
                    RISES[lie](h.t) if k in bad else v
                    for k, v in zip(h.replied, h.holdouts, strict=True)
                ),
                held=tuple(10**7 if k in bad else 20 for k in h.replied),
            )
            for h in honest
        ]
        both, judged_too = (
            [replace(h, accuracy=power(h.t)) for h in history] for history in (honest, spoilt)
        )
        assert ends(MarginalGain(), judged_too) <= 2 * ends(MarginalGain(), both)
        assert ends(MarginalGain(), spoilt) <= 2 * PUT_OFF * ends(MarginalGain(), honest)


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
    assert 10 <= tau <= 45  # G(t) = 3 / t of 10: below 2 points from round 15 on


def test_without_figures_of_clients_evaluations_count():
    history = [RoundRecord(t, accuracy=power(t)) for t in range(1, 200)]
    assert 10 <= ends(MarginalGain(), history) <= 40


def test_a_run_that_evaluates_waits_for_its_evaluations():
    """Six in a stretch; where they are too rare for that, clients decide after ten sweeps (50
    rounds).
    """
    history = fleet(lambda t: power(t, b=2), 120)
    assert ends(MarginalGain(), history) < 50
    often = [replace(h, accuracy=power(h.t) if h.t % 4 == 0 else None) for h in history]
    assert MarginalGain().assess_history(often[:23]) is None
    assert MarginalGain().assess_history(often[:47]).by == "evaluations"
    rarely = [replace(h, accuracy=power(h.t) if h.t % 20 == 0 else None) for h in history]
    assert 50 <= ends(MarginalGain(), rarely) < 70
    assert MarginalGain().assess_history(rarely[:55]).by == "clients"


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
            "rounds": 60,
            "clients": 12,
            "per_round": 4,
            "recipe": {"name": "fedavg", "holdouts": True, "stop": stop},
        }
    )
    straight = assert_resumes(experiment, tmp_path, after=7)
    assert "predicted gain from doubling the rounds: " in straight.summary["stopped"]
    assert 7 < straight.summary["rounds"] < 60


@pytest.mark.parametrize("bad", [{"points": 0.0}, {"joules": -1.0}, {"rounds": 3}])
def test_prices_are_above_zero(bad):
    with pytest.raises(BadInput, match=r"recipe.stop = 'worth'"):
        runs.run(
            Experiment.from_tables(
                {"recipe": {"name": "fedavg", "stop": {"piece": "worth", **bad}}}
            )
        )
