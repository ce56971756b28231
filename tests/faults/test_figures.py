"""Rows 29 and 30: figures that clients report about themselves: metrics, losses, costs, samples."""

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clients import SIZES, Fleet

from flrce.core.checked_replies import book_costs
from flrce.core.gate import MAX_SAMPLE_RATIO, validate_replies
from flrce.core.loop import make_initial_state, rounds
from flrce.core.payloads import (
    MAX_REPORTED_VALUE,
    ReplyContext,
    is_finite_number,
    is_plausible_cost,
)
from flrce.core.pending import DueTasks
from flrce.core.types import ClientCost, ClientRecord, PendingTask, RoundRecord, Updates
from flrce.errors import format_one_line
from flrce.methods.aggregation.mean import WeightedMean, compute_reply_weights
from flrce.methods.catalogue import recipes
from flrce.storage.ledger_lines import parse_record
from flrce.storage.summary import summarize_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))  # flower_helpers

D, HUGE, GIANT = sum(size for _, size in SIZES), (1e308, -1.7e308, math.inf, math.nan), 10**5000
row29 = pytest.mark.row(
    29, "metrics, losses, costs of 1e308, giant integers", "SKIP or bounded; ledger readable"
)
row30 = pytest.mark.row(30, "false num_examples", "bounded weight")


def run(change, recipe="oort", T=4):
    fleet = Fleet(change=change)
    method = replace(recipes.CATALOGUE[recipe](P=6), minimum=1)
    return list(rounds(method, fleet, make_initial_state(method, fleet, torch.zeros(D)), T, 7))


@row29
@pytest.mark.parametrize(
    "field", ["loss", "loss_square", "n", "t", "joules", "compute_seconds", "bytes_up", "flops"]
)
@pytest.mark.parametrize(
    "value", [*HUGE, GIANT, -GIANT, MAX_REPORTED_VALUE * 10], ids=format_one_line
)
def test_no_figure_overflows_or_stalls_a_run(field, value):
    """Two clients of the round at once, so that sums would overflow; the round commits, and its
    line is read back.
    """

    def change(reply, task):
        if task.t != 2 or task.client not in ("c0", "c1", "c2", "c3"):
            return reply
        if field in ("loss", "loss_square", "n", "t"):
            return replace(reply, **{field: value})
        return replace(reply, spent=replace(reply.spent, **{field: value, "measured": True}))

    done = run(change)
    assert [r.record.outcome for r in done] == ["committed"] * 4
    for r in done:
        assert all(
            math.isfinite(v) and v >= 0
            for v in (r.record.joules, r.record.seconds, r.record.bytes_up)
        )
        assert torch.isfinite(r.state.w).all()
        assert all(len(why) < 400 and why.isprintable() for why in r.record.rejected.values())
        for line in r.clients:
            assert isinstance(line, ClientRecord)
            json.dumps([line.n, line.loss], allow_nan=False)


@row29
def test_joules_are_bounded_by_the_time_they_took():
    assert is_plausible_cost(ClientCost(compute_seconds=2.0, joules=200.0, measured=True))
    assert not is_plausible_cost(ClientCost(compute_seconds=2.0, joules=1e6, measured=True))
    assert is_plausible_cost(
        ClientCost(compute_seconds=2.0, joules=1e6)
    )  # the server's own model, no claim


@row29
def test_giant_integers_and_escapes_in_reasons():
    assert format_one_line(GIANT) == f"an integer of {GIANT.bit_length()} bits"
    assert format_one_line("\x1b[2Jgone\nforged line\u202e") == "?[2Jgone forged line?"
    assert len(format_one_line("x" * 10**6)) == 300
    assert not is_finite_number(GIANT)
    assert is_finite_number(2**62)

    def change(reply, task):
        return replace(reply, error="\x1b]0;owned\x07 no\n") if task.t == 2 else reply

    done = run(change, "fedavg")
    assert set(done[1].record.rejected.values()) == {"?]0;owned? no"}


@row29
def test_a_ledger_with_null_costs_opens():
    """As an earlier version wrote one where two clients claimed 1.7e308 joules each."""
    line = {"t": 1, "joules": None, "seconds": None, "bytes_up": 7, "accuracy": None, "votes": None}
    found = parse_record(line)
    assert (found.joules, found.seconds, found.bytes_up, found.accuracy, found.votes) == (
        0.0,
        0.0,
        7,
        None,
        0.0,
    )
    assert summarize_run((found, RoundRecord(2, joules=3.0)), 1, 1)["joules"] == 3.0


@row29
@pytest.mark.parametrize("joules", [5e-324, 1e-310, 0.0])
def test_next_to_no_joules_end_no_run(joules):
    """The least number above 0, by clients that claim it: over a thousand it is 0, and the summary
    divided by it.
    """
    done = summarize_run((RoundRecord(1, accuracy=0.5, joules=joules),), 1, 1)
    assert (done["computation_efficiency"], done["communication_efficiency"]) == (None, None)
    assert (
        summarize_run((RoundRecord(1, accuracy=0.5, joules=2e3),), 1, 1)["computation_efficiency"]
        == 0.25
    )


@row30
def test_samples_may_not_leap():
    fleet = Fleet()
    tasks = list(initial_tasks(fleet))
    pending = [PendingTask(task, torch.zeros(D)) for task in tasks]
    replies = list(fleet.train(pending, {}))
    known = torch.tensor(
        [float(fleet.count_samples(client)) for client in fleet.clients(1)], dtype=torch.float64
    )
    lies = [
        replace(replies[0], n=MAX_SAMPLE_RATIO * replies[0].n),
        replace(replies[1], n=MAX_SAMPLE_RATIO * replies[1].n + 1),
        *replies[2:],
    ]
    updates, rejected = validate_replies(
        tasks, lies, ReplyContext(fleet.get_task_layout, D, D, samples_before=known)
    )
    assert list(rejected) == [tasks[1].client]
    assert "num_examples grew from" in rejected[tasks[1].client]
    updates, rejected = validate_replies(
        tasks,
        lies,
        ReplyContext(fleet.get_task_layout, D, D, samples_before=torch.zeros(len(tasks))),
    )
    assert not rejected  # never heard of before: the aggregator's cap is what holds
    assert len(updates) == len(tasks)
    assert book_costs(1, DueTasks(tuple(tasks)), lies, rejected)[0][1].n == lies[1].n


def initial_tasks(fleet):
    method = recipes.fedavg(P=4)
    from flrce.core.loop import plan_round

    return plan_round(method, fleet, make_initial_state(method, fleet, torch.zeros(D)), 1).tasks


@row30
def test_no_more_than_cap_times_the_median_is_believed():
    """n = 10, 20, 30, 10^7 with cap 2: the median (the lower of two) is 20, so the liar weighs 40
    of 100.
    """
    n = torch.tensor([10.0, 20.0, 30.0, 1e7], dtype=torch.float64)
    assert compute_reply_weights(n, "samples", 2.0).tolist() == [10, 20, 30, 40]
    assert compute_reply_weights(n, "samples").tolist() == n.tolist()
    assert compute_reply_weights(n, "equal", 2.0).tolist() == [1, 1, 1, 1]
    updates = Updates(torch.arange(4), torch.tensor([[0.0], [0.0], [0.0], [1.0]]), n, 1)
    assert float(WeightedMean(cap=2.0)(torch.zeros(1), updates, None)) == pytest.approx(0.4)


@row29
@pytest.mark.parametrize("value", [1e308, -1.7e308, 5.0, math.inf])
@pytest.mark.parametrize("guarded", [False, True])
def test_flower_metrics_neither_kill_the_server_nor_count(value, guarded):
    """Two clients of four report such an accuracy, of their training and of the model: nobody takes
    any notice.
    """
    pytest.importorskip("flwr")
    from flwr.serverapp.strategy import FedAvg

    from flower_helpers import plain_app, start
    from flrce.flower import Guarded, RecipeStrategy
    from flrce.flower.grid import LocalGrid

    def spoil(content, partition, t):
        if partition < 2:
            content["metrics"]["accuracy"] = value
        else:
            content["metrics"]["accuracy"] = 0.5

    def misjudge(metrics):
        return {**metrics, "eval_acc": value} if metrics["num-examples"] < 12 else metrics

    strategy = (
        Guarded(FedAvg(min_available_nodes=4)) if guarded else RecipeStrategy(recipes.fedavg(P=4))
    )
    result = strategy.start(
        LocalGrid(plain_app(spoil, misjudge=misjudge), 4), start(), num_rounds=3
    )
    assert len(result.history) == 3
    for r in result.history:
        assert sorted(r.rejected) == ["node-1000", "node-1001"]
        assert all("metric 'accuracy' is" in why for why in r.rejected.values())
        assert 0 <= r.accuracy <= 1
        assert 0 <= result.evaluate_metrics_clientapp[r.t]["eval_acc"] <= 1


@row29
def test_flower_joules_are_those_of_a_device():
    """A meter that says 1e20 J for a task of milliseconds is believed as far as 20 kW go, and
    1.7e308 not at all.
    """
    pytest.importorskip("flwr")
    from flower_helpers import plain_app, start
    from flrce.flower import RecipeStrategy
    from flrce.flower.grid import LocalGrid

    def spoil(content, partition, t):
        content["metrics"]["joules"] = {0: 1e20, 1: 1.7e308, 2: 1.7e308}.get(partition, 0.001)

    result = RecipeStrategy(recipes.fedavg(P=4)).start(
        LocalGrid(plain_app(spoil), 4), start(), num_rounds=2
    )
    for r in result.history:
        assert sorted(r.rejected) == ["node-1001", "node-1002"]
        assert 0 < r.joules < 20_000 * 4 * max(r.seconds, 1.0)


@row29
@pytest.mark.parametrize("seed", range(8))
def test_flower_clients_that_send_anything(seed, tmp_path):
    pytest.importorskip("flwr")
    from flower_fuzz import case

    line = case(tmp_path / "run", random.Random(f"flower {seed}"))
    assert line == "ended" or line.startswith(
        "no round was completed"
    )  # Krum wants more replies than are good


@row29
@pytest.mark.parametrize("seed", range(6))
def test_clients_of_an_experiment_on_flower_that_say_anything(seed, tmp_path):
    """Introductions, replies, evaluations and losses; costs modelled or measured."""
    pytest.importorskip("flwr")
    from served_fuzz import case

    assert case(tmp_path / "run", random.Random(f"served {seed}")) == "ended"
