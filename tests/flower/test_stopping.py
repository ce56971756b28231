"""Our stops as Flower's `should_stop`: for any strategy, and what our own start makes of one."""

import json

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from dataclasses import replace

from flwr.app import Array, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import FedAdam, FedAvg, Result

from flower_helpers import TARGET, plain_app, start
from flrce.errors import BadInput
from flrce.flower import FLrce, Guarded, RecipeStrategy, should_stop
from flrce.flower.grid import LocalGrid
from flrce.methods.catalogue import recipes
from flrce.methods.server.averages import EMA
from flrce.methods.stopping.budget import AnyOf, CostBudget, Patience
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.stopping.no_headway import NoHeadway
from flrce.methods.stopping.target import TargetMetric

NAMES = {"wait_for_nodes": 5.0}
STANDSTILL = NoHeadway(n=4, first=3, after=5)


def started(strategy, grid, arrays, num_rounds, should_stop=None, evaluate_fn=None):
    """Stands in for Strategy.start from Flower 1.43 on: its loop, which asks should_stop after each
    round.
    """
    result = Result()
    for t in range(1, num_rounds + 1):
        replies = grid.send_and_receive(strategy.configure_train(t, arrays, ConfigRecord({}), grid))
        made, metrics = strategy.aggregate_train(t, replies)
        if made is not None:
            result.arrays = arrays = made
        if metrics is not None:
            result.train_metrics_clientapp[t] = metrics
        replies = grid.send_and_receive(
            strategy.configure_evaluate(t, arrays, ConfigRecord({}), grid)
        )
        metrics = strategy.aggregate_evaluate(t, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[t] = metrics
        if evaluate_fn is not None:
            result.evaluate_metrics_serverapp[t] = evaluate_fn(t, arrays)
        if should_stop is not None and should_stop(t, result):
            break
    return result


def wander(content, partition, t):
    """On towards the target for some rounds, then to and fro."""
    if t > 4:
        sign = np.float32((-1) ** t)
        content["arrays"]["layer.weight"] = Array(TARGET + sign * np.float32(0.1))
        content["arrays"]["layer.bias"] = Array(np.full(3, 0.5, np.float32))


def test_a_standstill_stops_any_strategy_in_the_round_in_which_it_stops_ours():
    ours = RecipeStrategy(replace(recipes.fedavg(3), average=EMA(), stop=STANDSTILL), **NAMES)
    result = ours.start(LocalGrid(plain_app(wander), 3), start(), 40)
    ended = result.history[-1].t
    assert 5 < ended < 40
    for strategy in (
        FedAvg(min_available_nodes=3, min_train_nodes=3),
        FedAvg(fraction_evaluate=0.0),
    ):
        rule = should_stop(STANDSTILL)
        found = started(strategy, LocalGrid(plain_app(wander), 3), start(), 40, rule)
        assert max(found.train_metrics_clientapp) == ended
        assert rule.reason == result.stopped
        theirs = [record.headway for record in rule.history]
        mine = [record.headway for record in result.history]
        assert theirs == [value and pytest.approx(value, abs=1e-4) for value in mine]


def test_patience_by_any_metric_of_clients_or_server():
    frozen = lambda content, partition, t: content["arrays"].update(floats())  # noqa: E731
    for rule, judge in (
        (should_stop(Patience(3)), None),
        (should_stop(Patience(3), metric="r2"), lambda t, arrays: MetricRecord({"r2": 0.25})),
    ):
        found = started(
            FedAdam(min_available_nodes=3),
            LocalGrid(plain_app(frozen), 3),
            floats(),
            40,
            rule,
            judge,
        )
        assert len(found.evaluate_metrics_clientapp) == 4
        assert "no gain" in rule.reason


def floats():
    arrays = start()
    arrays.pop("norm.num_batches_tracked")  # FedAdam cannot average a counter
    return arrays


def test_rounds_seconds_and_any_of_several():
    for rule in (
        CostBudget(rounds=2),
        CostBudget(seconds=1e-9),
        AnyOf((Patience(9), CostBudget(rounds=2))),
    ):
        found = started(
            FedAvg(fraction_evaluate=0.0), LocalGrid(plain_app(), 3), start(), 9, should_stop(rule)
        )
        assert len(found.train_metrics_clientapp) == (
            1 if isinstance(rule, CostBudget) and rule.seconds else 2
        )


@pytest.mark.parametrize(
    "rule",
    [
        UpdateConflicts(2.0),
        CostBudget(bytes=1e9),
        CostBudget(joules=1.0),
        AnyOf((Patience(3), UpdateConflicts(2.0))),
    ],
)
def test_what_a_result_does_not_show_is_refused_with_the_remedy(rule):
    with pytest.raises(BadInput, match="Guarded"):
        should_stop(rule)


# --- our own start honours it -------------------------------------------------------------------


STRATEGIES = {
    "flrce": lambda **more: FLrce(**more, **NAMES),
    "recipe": lambda **more: RecipeStrategy("fedavg", **more, **NAMES),
    "guarded": lambda **more: Guarded(FedAvg(min_available_nodes=3), **more, **NAMES),
}


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_our_start_asks_after_every_round(name, tmp_path):
    asked = []

    def enough(server_round, result):
        asked.append(
            (
                server_round,
                result.arrays["layer.bias"].numpy().tolist(),
                sorted(result.train_metrics_clientapp),
            )
        )
        return server_round == 3

    grid = LocalGrid(plain_app(), 3)
    result = STRATEGIES[name](state=tmp_path).start(grid, start(), 9, should_stop=enough)
    assert [t for t, _, _ in asked] == [1, 2, 3]
    assert asked[-1][1] == result.arrays["layer.bias"].numpy().tolist()
    assert asked[-1][2] == [1, 2, 3]
    assert result.stopped == result.history[-1].stop == "should_stop said so"
    assert [m["stopped"] for m in result.train_metrics_clientapp.values()] == [0, 0, 1]
    assert json.loads((tmp_path / "summary.json").read_text())["stopped"] == result.stopped
    sent = grid.sent
    again = STRATEGIES[name](state=tmp_path).start(
        grid, start(), 9, should_stop=enough
    )  # it was over
    assert again.history[-1].t == 3
    assert grid.sent <= sent + 3


def test_a_stop_of_ours_as_a_callback_of_a_guarded_strategy():
    result = Guarded(FedAvg(min_available_nodes=3), **NAMES).start(
        LocalGrid(plain_app(wander), 3), start(), 40, should_stop=should_stop(STANDSTILL)
    )
    assert 5 < result.history[-1].t < 40


@pytest.mark.parametrize("percent", [1.0, 100.0])
def test_a_price_and_a_target_end_any_strategy(percent):
    """0.8 - 0.7 / t, as a share or in percent: twice the rounds bring less than 2 points from round
    18 on.
    """

    def judged(t, arrays):
        return MetricRecord({"accuracy": percent * (0.8 - 0.7 / t)})

    grid = LocalGrid(plain_app(), 3)
    try:
        priced, aimed = should_stop(MarginalGain()), should_stop(TargetMetric(0.7))
        started(FedAvg(fraction_evaluate=0.0), grid, start(), 60, priced, judged)
        started(FedAvg(fraction_evaluate=0.0), grid, start(), 60, aimed, judged)
    finally:
        grid.close()
    assert 24 <= priced.history[-1].t <= 55
    assert priced.reason.startswith("Predicted gain from doubling the rounds: ")
    assert 7 <= aimed.history[-1].t <= 30
    assert "the target of 70.0 % is reached" in aimed.reason


def test_evaluators_that_alternate_between_0_and_1_do_not_switch_the_stop_off():
    """Three of ten: the mean of a round swings by 0.3, the level of a block does not."""

    def judged(t, arrays):
        return MetricRecord({"accuracy": 0.7 * (0.8 - 0.7 / t) + 0.3 * (t % 2)})

    grid = LocalGrid(plain_app(), 3)
    try:
        rule = should_stop(MarginalGain())
        started(FedAvg(fraction_evaluate=0.0), grid, start(), 100, rule, judged)
    finally:
        grid.close()
    assert 24 <= rule.history[-1].t <= 90


def test_a_price_in_joules_is_not_for_should_stop():
    with pytest.raises(BadInput, match="does not see joules"):
        should_stop(MarginalGain(joules=10.0))
