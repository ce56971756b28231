"""Chosen clients judge the model on what they hold back: free of traffic, on every engine, and
never in the way.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flrce.config.experiment import Experiment
from flrce.core.checked_replies import add_client_evaluations, validate_client_metrics
from flrce.core.pieces import NoCompression
from flrce.core.types import ClientEvaluation, Payload, PrimaryMetric, Reply, RoundRecord, Task
from flrce.errors import BadInput
from flrce.simulation import runs
from training import assert_resumes

BASE = {
    "rounds": 3,
    "clients": 12,
    "per_round": 4,
    "train": {"epochs": 1, "batch": 32},
    "engine": {"kernel": "torch", "workers": 1},
}


def asked(holdouts=True, **more):
    recipe = {"name": "fedavg", "holdouts": holdouts, **more.pop("recipe", {})}
    return Experiment.from_tables(BASE | {"recipe": recipe} | more)


class Scale:
    primary_metric = PrimaryMetric()


def test_each_figure_is_the_client_s_own_judgement_of_the_model_it_was_sent():
    """Round t + 1 judges what round t made: the same as an evaluation of those samples after round
    t.
    """
    experiment = asked()
    built = runs.build_simulation(experiment)
    state, made = built.initial_state(), []
    for done in built.iterate_rounds(experiment, state):
        before = made[-1] if made else built.initial_state().w
        for client, value, n in zip(
            done.record.replied, done.record.holdouts, done.record.held, strict=True
        ):
            held = built.federation.held[built.federation.client_indices[client]]
            right = built.engine.runner.evaluate(before, held)["accuracy"].double().numpy()
            assert n == len(held)
            assert value == pytest.approx(right.mean(), abs=1e-5)
        made.append(done.state.w.clone())
    built.engine.close()
    assert len(made) == 3


def test_models_have_the_same_bits_with_and_without_and_only_the_books_differ():
    on, off = runs.run(asked()), runs.run(asked(holdouts=False))
    assert all(torch.equal(on.model[name], off.model[name]) for name in off.model)
    for with_it, without in zip(on.history, off.history, strict=True):
        assert without.holdouts == ()
        assert without.held == ()
        assert with_it.bytes_framing == without.bytes_framing + 8 * len(with_it.replied)
        assert (with_it.bytes_up, with_it.bytes_down) == (without.bytes_up, without.bytes_down)
        assert with_it.joules > without.joules
        assert with_it.seconds > without.seconds


def test_what_it_costs_is_a_forward_pass_of_the_hold_out():
    built = runs.build_simulation(asked(model={"name": "logistic"}))
    task = Task("3", 3, 1, 0, compressor=NoCompression())
    plain, judging = built.engine.estimate(task), built.engine.estimate(replace(task, judge=True))
    held = len(built.federation.held[3])
    built.engine.close()
    assert (
        judging.flops - plain.flops == held * 2 * 64 * 10
    )  # 8 x 8 pixels, ten classes, a product and a sum each
    assert judging.batches - plain.batches == 1


def test_the_stack_says_the_same_as_the_cpu_engine():
    experiments = [asked(seed=seed) for seed in (0, 1)]
    together = runs.run_together([(e, None) for e in experiments], device="cpu")
    for experiment, found in zip(experiments, together, strict=True):
        expected = runs.run(experiment)
        assert found.history[0].holdouts == expected.history[0].holdouts
        assert [h.held for h in found.history] == [h.held for h in expected.history]


def test_flower_clients_say_the_same():
    pytest.importorskip("flwr", reason="needs flrce[flower]")
    experiment = asked()
    there = runs.run(
        Experiment.from_tables(
            experiment.model_dump(exclude_none=True) | {"engine": {"name": "flower"}}
        )
    )
    here = runs.run(experiment)
    for a, b in zip(there.history, here.history, strict=True):
        assert dict(zip(a.replied, a.held, strict=True)) == dict(
            zip(b.replied, b.held, strict=True)
        )
        one, two = (
            dict(zip(a.replied, a.holdouts, strict=True)),
            dict(zip(b.replied, b.holdouts, strict=True)),
        )
        assert one == pytest.approx(two, abs=0.05)


def test_plain_flower_clients_that_report_a_metric_are_heard():
    pytest.importorskip("flwr", reason="needs flrce[flower]")
    from flower_helpers import plain_app, start
    from flrce.flower import RecipeStrategy
    from flrce.flower.grid import LocalGrid
    from flrce.methods.catalogue.recipes import fedavg

    def tells(content, partition, t):
        content["metrics"]["val_acc"] = 10.0 * (partition + 1)  # in percent

    grid = LocalGrid(plain_app(tells), 4)
    try:
        strategy = RecipeStrategy(replace(fedavg(4), holdouts=True))
        found = strategy.start(grid, start(), num_rounds=2, timeout=30)
    finally:
        grid.close()
    last = found.history[-1]
    assert sorted(last.holdouts) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert sorted(last.held) == [10, 11, 12, 13]


def test_another_metric_is_told_by_its_name_and_its_way():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 3)).astype("float32")
    data = (x, (x @ np.ones((3, 1))).astype("float32"))
    experiment = asked(model={"name": "linear"}, data={"partition": "iid"}, train={"lr": 0.01})
    last = runs.run(experiment, data=data).history[-1]
    assert (last.metric, last.lower) == ("mae", True)
    assert all(value >= 0 for value in last.holdouts)


def test_sub_models_and_clients_that_hold_nothing_back_say_nothing():
    part = runs.run(asked(recipe={"name": "dropout"}))
    none = runs.run(asked(data={"holdout": 0.0}))
    assert all(h.holdouts == () for h in (*part.history, *none.history))


def test_a_run_that_is_cut_off_resumes_to_the_same_bytes(tmp_path):
    assert_resumes(asked(), tmp_path)


def test_tasks_under_way_still_judge_after_a_resume(tmp_path):
    assert_resumes(asked(recipe={"pace": {"piece": "buffered", "size": 2}}), tmp_path)


def reply(judged, **more):
    return Reply("a", 1, Payload({"u": torch.zeros(2)}), n=3, judged=judged, **more)


@pytest.mark.parametrize(
    "odd",
    [
        ClientEvaluation(1.5, 3),
        ClientEvaluation(-0.1, 3),
        ClientEvaluation(math.nan, 3),
        ClientEvaluation(0.5, 0),
        ClientEvaluation(0.5, 10**8),
        ClientEvaluation("x", 3),
        ClientEvaluation(0.5, 2.0),
        ClientEvaluation(True, None),
        (0.5, 3),
    ],
)
def test_a_figure_that_cannot_be_is_the_client_s_failure(odd):
    (found,) = validate_client_metrics([reply(odd)], Scale(), {"a"})
    assert found.payload is None
    assert found.error.startswith("malformed: ")


def test_nobody_is_held_to_a_figure_that_was_not_asked_for():
    (found,) = validate_client_metrics([reply(ClientEvaluation(1.5, 3))], Scale(), set())
    assert found.payload is not None
    assert found.judged is None


def test_only_those_who_counted_are_heard_and_in_their_order():
    replies = [
        Reply(c, 1, judged=ClientEvaluation(v, 5))
        for c, v in (("a", 0.1), ("b", 0.2), ("c", 1 / 3))
    ]
    record = add_client_evaluations(RoundRecord(1, replied=("c", "d", "a")), replies, Scale())
    assert record.holdouts == (0.333333, None, 0.1)
    assert record.held == (5, 0, 5)


def test_the_switch_is_true_or_false():
    with pytest.raises(BadInput, match=r"recipe.holdouts = 'yes': must be true or false"):
        asked(holdouts="yes")
