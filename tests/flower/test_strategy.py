"""Strategies over the in-process grid: early stop, identity, failures, resume, and agreement with
the simulator.
"""

import json
import pickle
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.app import Array, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, Strategy

from flower_helpers import plain_app, start
from flrce.config.experiment import Experiment
from flrce.core.payloads import fingerprint_model
from flrce.core.types import LocalWork, Task
from flrce.errors import BadInput, UnfinishedRun
from flrce.flower import FLrce, RecipeStrategy, client, compressing, introduce, server
from flrce.flower.arrays import ArrayTemplate, count_record_bytes
from flrce.flower.engine import FlowerEngine
from flrce.flower.grid import LocalGrid
from flrce.flower.nodes import NodeRegistry, natural_sort_key
from flrce.flower.options import FlowerOptions
from flrce.methods.catalogue import recipes
from flrce.methods.catalogue.lora import LORA_RECIPES
from flrce.methods.selection.relationship import RelationshipSelector
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.simulation import runs
from training import mark_slow_crossings

NAMES = {"wait_for_nodes": 5.0}


@pytest.fixture(autouse=True)
def one_thread():
    """As the simulator's workers: bits depend on how a product is split."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe(P=3, **changes):
    return replace(recipes.fedavg(P), **changes)


def by_name(result):
    return {name: array.numpy() for name, array in result.arrays.items()}


def bits(result):
    return {name: array.data for name, array in result.arrays.items()}


# --- the drop-in strategy with clients that know nothing of us ----------------------------------


def test_plain_clients_are_averaged_as_fedavg_does():
    """All four clients every round: Flower's FedAvg is the oracle, up to the order of summation."""
    ours = RecipeStrategy(recipe(4), **NAMES).start(
        LocalGrid(plain_app(), 4), start(), num_rounds=3
    )
    theirs = FedAvg(min_available_nodes=4).start(LocalGrid(plain_app(), 4), start(), num_rounds=3)
    assert isinstance(ours, type(theirs))
    for name in ("layer.weight", "layer.bias"):
        np.testing.assert_allclose(by_name(ours)[name], by_name(theirs)[name], rtol=1e-6, atol=1e-7)
    assert (
        by_name(ours)["norm.num_batches_tracked"].dtype == np.int64
    )  # theirs comes back as float64
    assert list(ours.arrays) == list(start())
    for t in (1, 2, 3):
        assert ours.train_metrics_clientapp[t]["train_loss"] == pytest.approx(1 / t)
        for key in ("eval_loss", "eval_acc"):
            mine, other = (
                ours.evaluate_metrics_clientapp[t][key],
                theirs.evaluate_metrics_clientapp[t][key],
            )
            assert mine == pytest.approx(other, rel=1e-5)


def test_migration_is_two_lines():
    """The diff of docs/flower.md: import and class; every other line of the quick start stays."""
    quick_start = """
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    arrays = start()
    strategy = FedAvg(fraction_train=0.5, min_available_nodes=4)
    result = strategy.start(
        grid=grid, initial_arrays=arrays, train_config=ConfigRecord({"lr": 0.1}), num_rounds=2,
        evaluate_fn=lambda t, arrays: MetricRecord({"accuracy": 0.1 * t}),
    )
    results.append(result)
"""
    moved = quick_start.replace(
        "from flwr.serverapp.strategy import FedAvg", "from flrce.flower import FLrce"
    ).replace("FedAvg(", "FLrce(")
    assert (
        sum(a != b for a, b in zip(quick_start.splitlines(), moved.splitlines(), strict=True)) == 2
    )
    results = []
    for source in (quick_start, moved):
        names = {"start": start, "MetricRecord": MetricRecord, "results": results}
        exec(source, names)
        grid = LocalGrid(plain_app(), 4)
        names["app"](grid, grid.contexts[1000])
    fedavg, ours = results
    assert set(ours.train_metrics_clientapp) == set(fedavg.train_metrics_clientapp) == {1, 2}
    assert (
        set(ours.evaluate_metrics_serverapp) == set(fedavg.evaluate_metrics_serverapp) == {0, 1, 2}
    )
    assert ours.train_metrics_clientapp[1]["replied"] == 2  # half of four


def test_the_run_ends_with_the_stop_and_nothing_is_sent_after_it():
    calls: list = []
    grid = LocalGrid(plain_app(calls=calls), 4)
    result = RecipeStrategy(recipe(2), budget={"rounds": 3}, fraction_evaluate=0.0, **NAMES).start(
        grid, start(), 50
    )
    assert result.stopped == "budget of 3 rounds"
    assert result.history[-1].stop == result.stopped
    assert max(t for t, _ in calls) == len(result.train_metrics_clientapp) == 3
    assert (
        grid.sent == 2 + 3 * 2
    )  # two of four are asked their names, three rounds of two: not one more
    assert [m["stopped"] for m in result.train_metrics_clientapp.values()] == [0, 0, 1]


def test_flrce_stops_on_conflicts_of_an_exploit_round():
    """Clients that pull apart: with decay 0 every round after the first exploits, so psi is met in
    round 2.
    """

    def apart(content, partition, t):
        sign = np.float32(1 if partition % 2 else -1)
        content["arrays"]["layer.weight"] = Array(np.full((4, 3), sign * t, np.float32))

    strategy = RecipeStrategy(
        recipe(4, selector=RelationshipSelector(decay=0.0), stop=UpdateConflicts(1.0)), **NAMES
    )
    result = strategy.start(LocalGrid(plain_app(apart), 4), start(), num_rounds=30)
    assert result.history[-1].t == 2
    assert result.stopped.startswith("conflicts")
    assert result.train_metrics_clientapp[2]["stopped"] == 1
    assert result.train_metrics_clientapp[1]["stopped"] == 0


def test_a_byte_budget_refuses_a_round_it_cannot_pay_for():
    grid = LocalGrid(plain_app(), 3)
    each = 3 * (72 + 72)  # three clients, 18 floats down and up
    strategy = RecipeStrategy(
        recipe(3), budget={"bytes": 2.5 * each}, fraction_evaluate=0.0, **NAMES
    )
    result = strategy.start(grid, start(), 50)
    assert "next round would pass budget" in result.stopped
    assert sum(r.bytes_up + r.bytes_down for r in result.history) == 2 * each
    assert grid.sent == 2 + 2 * 3


def test_rounds_in_halves_for_flowers_own_loop():
    """Strategy.start of Flower itself drives configure_train and aggregate_train."""
    strategy = RecipeStrategy(recipe(3), **NAMES)
    whole = RecipeStrategy(recipe(3), **NAMES).start(
        LocalGrid(plain_app(), 5), start(), num_rounds=3
    )
    halves = Strategy.start(strategy, LocalGrid(plain_app(), 5), start(), num_rounds=3)
    assert bits(halves) == bits(whole)
    assert halves.evaluate_metrics_clientapp.keys() == {1, 2, 3}


# --- failures -----------------------------------------------------------------------------------


def poison(value):
    def spoil(content, partition, t):
        if partition == 1:
            content["arrays"]["layer.bias"] = Array(np.array([0, value, 0], np.float32))

    return spoil


def shaped(array):
    return lambda content, partition, t: (
        partition == 1 and content["arrays"].__setitem__("layer.bias", Array(array))
    )


def claims(n):
    return lambda content, partition, t: (
        partition == 1 and content["metrics"].__setitem__("num-examples", n)
    )


def raises(content, partition, t):
    if partition == 1:
        raise RuntimeError("battery empty")


BAD = {
    "NaN": (poison(np.nan), "not finite"),
    "Inf": (poison(np.inf), "not finite"),
    "wrong shape": (shaped(np.zeros(4, np.float32)), "shape"),
    "broadcastable": (shaped(np.zeros(1, np.float32)), "shape"),
    "integers": (shaped(np.zeros(3, np.int64)), "dtype"),
    "object": (lambda c, p, t: p == 1 and c["arrays"].pop("layer.bias"), "differ in 1 names"),
    "no samples": (claims(0), "num_examples"),
    "negative": (claims(-59), "num_examples"),
    "absurd": (claims(10**12), "num_examples"),
    "nan": (claims(float("nan")), "num_examples"),
    "raises": (raises, "battery empty"),
    "no metrics": (lambda c, p, t: p == 1 and c.pop("metrics"), "MetricRecords"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_a_bad_client_fails_alone_and_is_named(case):
    spoil, reason = BAD[case]
    result = RecipeStrategy(recipe(3), **NAMES).start(LocalGrid(plain_app(spoil), 3), start(), 2)
    without = RecipeStrategy(recipe(2), **NAMES)
    good = without.start(
        LocalGrid(plain_app(), [{"partition-id": 0}, {"partition-id": 2}]), start(), 2
    )
    assert bits(result) == bits(good)
    for record in result.history:
        assert list(record.rejected) == ["node-1001"]
        assert reason in record.rejected["node-1001"]


def test_too_few_replies_abandon_the_round_and_then_the_run(tmp_path):
    grid = LocalGrid(plain_app(raises_always), 3)
    strategy = RecipeStrategy(recipe(3), minimum_replies=2, state=tmp_path, **NAMES)
    with pytest.raises(
        UnfinishedRun, match=r"no round was completed.*: abandoned 3 times in a row"
    ):
        strategy.start(grid, start(), 10)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["abandoned"] * 3


def raises_always(content, partition, t):
    raise RuntimeError("no")


def test_a_straggler_is_left_behind_and_its_late_reply_refused():
    release, done = threading.Event(), threading.Event()

    def slow(content, partition, t):
        if partition == 1 and t == 1:
            release.wait(20)
            content["arrays"]["layer.bias"] = Array(np.full(3, 99, np.float32))  # must never count
            done.set()
        elif partition == 1 and t == 2:
            release.set()
            done.wait(20)
            time.sleep(0.3)  # its reply to round 1 is there before the one to round 2

    grid = LocalGrid(plain_app(slow), 3, threads=4)
    begun = time.monotonic()
    result = RecipeStrategy(recipe(3), fraction_evaluate=0.0, **NAMES).start(
        grid, start(), 2, timeout=1.0
    )
    assert time.monotonic() - begun < 10
    first, second = result.history
    assert first.rejected == {"node-1001": "no reply within 1 s"}
    assert first.bytes_wasted == 72  # the model was sent to it in vain
    assert not second.rejected
    assert second.bytes_wasted == count_record_bytes(
        start()
    )  # fetched with round 2's replies, booked, and never looked at
    assert second.bytes_up == 3 * 72 + count_record_bytes(start())
    assert np.all(by_name(result)["layer.bias"] < 1)


def test_a_run_waits_for_nodes_but_not_for_ever():
    grid = LocalGrid(plain_app(), 1)
    begun = time.monotonic()
    strategy = RecipeStrategy(recipe(2, minimum=2), wait_for_nodes=0.3)
    with pytest.raises(UnfinishedRun, match="abandoned"):
        strategy.start(grid, start(), 5)
    assert time.monotonic() - begun < 10


def test_over_commitment_takes_the_fastest():
    """Three are asked, two are waited for."""
    from flrce.methods.selection.uniform import UniformSelector

    class Eager(UniformSelector):
        def select(self, memory, view, rng):
            return replace(super().select(memory, view, rng), keep=2)

    release = threading.Event()

    def slow(content, partition, t):
        if partition == 1:
            release.wait(60)

    begun = time.monotonic()
    grid = LocalGrid(plain_app(slow), 3, threads=4)
    result = RecipeStrategy(recipe(3, selector=Eager()), fraction_evaluate=0.0, **NAMES).start(
        grid, start(), 1
    )
    release.set()
    assert time.monotonic() - begun < 30
    assert result.history[0].replied == ("node-1000", "node-1002")


# --- identity -----------------------------------------------------------------------------------


def named_app(**options):
    return introduce(plain_app(**options), compresses=False)


def test_natural_order():
    assert sorted(["10", "9", "b2", "b10", "a"], key=natural_sort_key) == [
        "9",
        "10",
        "a",
        "b2",
        "b10",
    ]


def test_clients_keep_their_names_over_a_restart():
    grid = LocalGrid(named_app(), 3)
    nodes = NodeRegistry(grid)
    assert list(nodes.get_connected_clients()) == ["0", "1", "2"]
    grid.drop_node(1001)
    assert list(nodes.get_connected_clients()) == ["0", "2"]
    back = grid.add_node({"partition-id": 1})
    assert back != 1001
    assert nodes.get_connected_clients()["1"].node == back


def test_a_restarted_node_goes_on_as_the_same_client():
    """Restarted under a new node id between rounds: same selections and same bits as if it had not
    been.
    """

    def restart(content, partition, t):
        if t >= 2 and partition == 1 and 1001 in grid.contexts:
            grid.drop_node(1001)
            grid.add_node({"partition-id": 1}, 5)

    grid = LocalGrid(named_app(spoil=restart), 4)
    disturbed = FLrce(fraction_train=0.75, **NAMES).start(grid, start(), 8)
    calm = FLrce(fraction_train=0.75, **NAMES).start(LocalGrid(named_app(), 4), start(), 8)
    assert 5 in grid.contexts
    assert [r.chosen for r in disturbed.history] == [r.chosen for r in calm.history]
    assert bits(disturbed) == bits(calm)


def test_node_ids_do_not_matter_where_clients_have_names():
    def shuffled(seed):
        grid = LocalGrid(named_app(), [])
        ids = random.Random(seed).sample(range(10, 10**6), 5)
        for partition in random.Random(seed).sample(range(5), 5):
            grid.add_node({"partition-id": partition}, ids[partition])
        return FLrce(fraction_train=0.5, seed=4, **NAMES).start(grid, start(), 5)

    one, other = shuffled(1), shuffled(2)
    assert [r.chosen for r in one.history] == [r.chosen for r in other.history]
    assert bits(one) == bits(other)


def test_a_client_with_an_illegal_name_goes_by_its_node_id():
    app = introduce(plain_app(), who=lambda context: ("../../etc/passwd", 3))
    assert list(NodeRegistry(LocalGrid(app, 1)).get_connected_clients()) == ["node-1000"]


# --- resume -------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the session runs after it but `finally`."""


def test_a_killed_run_goes_on_with_the_same_selections_and_bits(tmp_path):
    def straight(folder, kill_at=0):
        def kill(content, partition, t):
            if t == kill_at:
                raise Killed

        grid = LocalGrid(named_app(spoil=kill), 6)
        strategy = FLrce(fraction_train=0.5, state=folder, seed=3, eval_every=1, **NAMES)
        return strategy.start(grid, start(), 7)

    calm = straight(tmp_path / "calm")
    with pytest.raises(Killed):
        straight(tmp_path / "killed", kill_at=4)
    assert json.loads((tmp_path / "killed" / "summary.json").read_text())["rounds"] == 3
    resumed = straight(tmp_path / "killed")
    assert bits(resumed) == bits(calm)
    assert [r.chosen for r in resumed.history] == [r.chosen for r in calm.history]
    assert resumed.train_metrics_clientapp.keys() == calm.train_metrics_clientapp.keys()
    assert (tmp_path / "killed/model.safetensors").read_bytes() == (
        tmp_path / "calm/model.safetensors"
    ).read_bytes()
    again = straight(tmp_path / "killed")  # finished: nothing is sent
    assert bits(again) == bits(calm)


def test_another_strategy_does_not_go_on_in_the_same_folder(tmp_path):
    RecipeStrategy(recipe(2), state=tmp_path, **NAMES).start(LocalGrid(named_app(), 3), start(), 2)
    with pytest.raises(BadInput, match="differs"):
        RecipeStrategy(recipe(2), state=tmp_path, seed=1, **NAMES).start(
            LocalGrid(named_app(), 3), start(), 2
        )


# --- engines agree ------------------------------------------------------------------------------


STOPPING = {
    "name": "flrce",
    "preset": "default",
    "psi": 1.0,
    "selector": {"piece": "relationship", "decay": 0.8},
}


def experiment(recipe, rounds=2, **tables):
    """Small, and trained by torch on both engines: its fused kernels differ from it in the last
    bits.
    """
    train = {
        "epochs": 2 if recipe["name"] == "fedrep" else 1,
        "batch": 32,
    }  # it wants one for its head
    engine = {"kernel": "torch", "workers": 1}
    return Experiment(
        clients=8, per_round=5, rounds=rounds, train=train, engine=engine, recipe=recipe, **tables
    )


def agree(here, there):
    """Same choices, stop, costs, payload bytes, judgements and bits.

    The simulator judges the last model and the average; over messages only the final model is
    judged.
    """
    for one, other in zip(here.history, there.history, strict=True):
        assert replace(
            one, accuracy=0, accuracy_weighted=0, averaged=0, loss=0, bytes_framing=0
        ) == replace(other, accuracy=0, accuracy_weighted=0, averaged=0, loss=0, bytes_framing=0)
        assert other.averaged is None
        handed = one.accuracy if one.averaged is None else one.averaged
        assert other.accuracy == (handed and pytest.approx(handed, rel=1e-6))
        if one.averaged is None:
            assert other.accuracy_weighted == (
                one.accuracy_weighted and pytest.approx(one.accuracy_weighted, rel=1e-6)
            )
            assert other.loss == (one.loss and pytest.approx(one.loss, rel=1e-6))
    for name, value in here.model.items():
        assert torch.equal(torch.from_numpy(there.arrays[name].numpy()), value), name


@pytest.mark.parametrize(
    "name", mark_slow_crossings(sorted(set(recipes.CATALOGUE) - set(LORA_RECIPES)))
)
def test_engines_agree(name):
    """Every recipe: the simulator, and Flower's messages with the same model of the fleet.

    Messages carry whole models to the clients of `engine.name = "flower"`.
    """
    dense = {"bits_down": 32} if name == "frugal" else {}
    tables = experiment(
        {"name": name} | dense, fleet={"profile": {"jetson-nano": 0.5, "raspberry-pi-4": 0.5}}
    )
    agree(runs.run(tables), server.run_on_local_grid(tables))


def test_engines_stop_in_the_same_round(tmp_path):
    tables = experiment(STOPPING, rounds=30)
    here, there = runs.run(tables), server.run_on_local_grid(tables, tmp_path / "run")
    agree(here, there)
    assert len(here.history) < 30
    assert here.history[-1].stop == there.stopped != ""
    assert json.loads((tmp_path / "run" / "summary.json").read_text()).keys() == here.summary.keys()


def test_transfer_is_measured_from_the_messages():
    """Headers and names come on top of the values, and are booked apart."""
    tables = experiment({"name": "fedcom", "keep": 0.1}, rounds=1)
    record = server.run_on_local_grid(tables, modelled=False).history[0]
    size = sum(array.numpy().nbytes for array in server.build_initial_arrays(tables).values())
    assert record.bytes_down == 5 * size
    assert record.bytes_up == runs.run(tables).history[0].bytes_up < 5 * size / 4
    assert record.bytes_framing > 5 * 128 * len(server.build_initial_arrays(tables))
    assert record.seconds > 0


def test_a_deadline_is_none_before_anybody_was_measured():
    """TimelyFL over measured clients: the first round measures them, later ones are cut by the
    faster half.
    """

    def takes_its_time(content, partition, t):
        time.sleep(0.02 if partition == 0 else 0.3)

    grid = LocalGrid(plain_app(takes_its_time), 4, threads=4)
    result = RecipeStrategy(recipes.timelyfl(P=4), fraction_evaluate=0.0, **NAMES).start(
        grid, start(), 3
    )
    assert [r.outcome for r in result.history] == ["committed"] * 3
    assert len(result.history[0].replied) == 4
    assert all(
        "node-1000" in r.replied for r in result.history
    )  # far below the deadline of the second fastest


def test_a_client_never_measured_is_taken_for_the_middle_one():
    engine = FlowerEngine(
        LocalGrid(plain_app(), 4), ArrayTemplate.from_arrays(start()), FlowerOptions()
    )
    names = engine.clients()
    task = Task(names[3], 3, 1, seed=0, work=LocalWork(5, 4))
    assert engine.estimate(task).seconds == 0  # nobody's pace is known
    engine.measured.pace = {names[0]: (1.0, 0.1), names[1]: (2.0, 0.2), names[2]: (9.0, 0.9)}
    assert engine.estimate(task).compute_seconds == 5 * 2.0
    assert engine.estimate(task).transfer_seconds == 0.2
    assert engine.estimate(replace(task, client=names[0])).compute_seconds == 5 * 1.0


def test_clients_that_cannot_tell_their_loss_all_get_a_turn():
    """Plain clients report 1 / t with round t's reply and know no question: one that never reported
    ranks first.
    """
    strategy = RecipeStrategy(
        recipes.power_of_choice(candidates=4, P=1), fraction_evaluate=0.0, **NAMES
    )
    result = strategy.start(LocalGrid(plain_app(), 4), start(), 12)
    assert {client for record in result.history for client in record.replied} == {
        f"node-{1000 + i}" for i in range(4)
    }


def test_clients_of_unknown_size_are_drawn_as_those_of_known_ones():
    """Of plain clients the server learns n with a first reply: with 2 candidates, the first 2 were
    drawn for ever.
    """
    strategy = RecipeStrategy(
        recipes.power_of_choice(candidates=2, P=1), fraction_evaluate=0.0, **NAMES
    )
    result = strategy.start(LocalGrid(plain_app(), 5), start(), 40)
    assert {client for record in result.history for client in record.replied} == {
        f"node-{1000 + i}" for i in range(5)
    }


# --- the client's side --------------------------------------------------------------------------


def test_our_client_also_serves_flowers_fedavg():
    tables = Experiment(clients=4, per_round=4, rounds=2, train={"epochs": 1})
    grid = LocalGrid(
        server.build_experiment_client(tables), 4, {"epochs": 1, "batch": 32, "lr": 0.1}
    )
    result = FedAvg(min_available_nodes=4).start(
        grid, server.build_initial_arrays(tables), num_rounds=2
    )
    accuracy = [m["accuracy"] for m in result.evaluate_metrics_clientapp.values()]
    assert accuracy[-1] > 0.3


def test_the_mod_compresses_for_a_client_of_any_framework():
    """With Dense the payload is u itself, so the run equals that of clients that return their whole
    model.
    """
    grid = LocalGrid(introduce(plain_app(mods=[compressing])), 3)
    seen: list[RecordDict] = []
    through = grid.app

    def watch(message, context):
        reply = through(message, context)
        if message.metadata.message_type == "train":
            seen.append(reply.content)
        return reply

    grid.app = watch
    encoded = RecipeStrategy(recipe(3), **NAMES).start(grid, start(), 2)
    plain = RecipeStrategy(recipe(3), **NAMES).start(LocalGrid(named_app(), 3), start(), 2)
    assert bits(encoded) == bits(plain)
    assert all(set(content) == {"payload", "metrics", "reply"} for content in seen)
    assert all(content["metrics"]["seconds"] >= 0 for content in seen)


def test_a_reply_to_another_round_is_late():
    app = introduce(plain_app(mods=[compressing]))
    grid = LocalGrid(app, 2)
    through = grid.app

    def old(message, context):
        reply = through(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 1:
            reply.content["reply"] = ConfigRecord({"flrce.client": "1", "flrce.t": 0})
        return reply

    grid.app = old
    result = RecipeStrategy(recipe(2), **NAMES).start(grid, start(), 1)
    assert "late: reply to round 0 in round 1" in result.history[0].rejected["1"]


def test_a_local_grid_is_a_run_of_its_own():
    grid = LocalGrid(plain_app(), 2)
    assert grid.run.run_id == next(iter(grid.contexts.values())).run_id
    grid.set_run(replace(grid.run, run_id=5))
    assert grid.run.run_id == 5


def test_a_reply_to_another_model_is_refused():
    """Both clients say which model they were sent; one names another."""
    grid = LocalGrid(introduce(plain_app(mods=[compressing])), 2)
    through, named = grid.app, []

    def other(message, context):
        reply = through(message, context)
        if message.metadata.message_type == "train":
            named.append(reply.content["reply"]["flrce.base"])
            if context.node_config["partition-id"] == 1:
                reply.content["reply"]["flrce.base"] = "0" * 32
        return reply

    grid.app = other
    result = RecipeStrategy(recipe(2), **NAMES).start(grid, start(), 1)
    assert (
        named == [fingerprint_model(torch.zeros(18))] * 2
    )  # floats of the model; its counter is none
    assert result.history[0].rejected == {"1": f"trained from another model: {'0' * 32!r}"}
    assert result.history[0].replied == ("0",)


def test_what_an_app_holds_can_be_copied_to_another_process():
    """Flower's simulation engine sends the ClientApp to Ray's processes."""
    shops = client.RunnerCache(client.TracingLock(), most=3)
    copied = pickle.loads(pickle.dumps(shops))
    assert copied.most == 3
    assert copied.tracing.working == 0


def test_bad_settings_are_refused_in_one_line():
    with pytest.raises(BadInput, match="fraction_train"):
        FLrce(fraction_train=-0.1)
    with pytest.raises(BadInput, match="did you mean 'fedavg'"):
        RecipeStrategy("fedvag")
    with pytest.raises(BadInput, match="sample_shape"):
        RecipeStrategy("fedavg", model=torch.nn.Linear(2, 2))._build_runner()
    with pytest.raises(BadInput, match="psi must be"):
        FLrce(psi=7, per_round=3, **NAMES).start(LocalGrid(plain_app(), 3), start(), 1)
