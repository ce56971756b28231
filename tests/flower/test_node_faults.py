"""What single nodes do to a Flower run: bad evaluations, hanging ones, damaged introductions,
nobody who trains.
"""

import logging
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower

from flower_helpers import plain_app, start
from flrce.cli.cli import main
from flrce.config.experiment import Experiment
from flrce.core.pieces import NoCompression
from flrce.core.types import Payload, Reply, Task
from flrce.errors import BadInput, UnfinishedRun
from flrce.flower import FLrce, Guarded, RecipeStrategy, compressing, engine, introduce, server
from flrce.flower.arrays import ArrayTemplate
from flrce.flower.device_records import MeasuredCosts
from flrce.flower.grid import LocalGrid
from flrce.flower.wire import read_reply, write_reply
from flrce.methods.catalogue import recipes
from flrce.methods.compression.sparsify import TopK
from flrce.methods.selection.power_of_choice import PowerOfChoice
from flrce.simulation import runs
from flrce.training.client import ClientRunner

NAMES = {"wait_for_nodes": 5.0}
FEW = {
    "recipe": {"name": "fedavg"},
    "rounds": 2,
    "clients": 4,
    "per_round": 2,
    "train": {"epochs": 1},
    "engine": {"kernel": "torch", "workers": 1},
}


def on_flower(**more):
    return Experiment.from_tables(FEW | {"engine": FEW["engine"] | {"name": "flower"}} | more)


def mean_by_samples(replies, key):
    """As an evaluate_metrics_aggr_fn of a user: it knows nothing of NaN."""
    found = [next(iter(reply.metric_records.values())) for reply in replies]
    total = sum(f[key] for f in found)
    return MetricRecord({"eval_acc": sum(f["eval_acc"] * f[key] for f in found) / total})


STRATEGIES = {
    "flrce": lambda **more: FLrce(**more, **NAMES),
    "recipe": lambda **more: RecipeStrategy("fedavg", **more, **NAMES),
    "summing": lambda **more: FLrce(evaluate_metrics_aggr_fn=mean_by_samples, **more, **NAMES),
    "guarded": lambda **more: Guarded(flower.FedAvg(min_available_nodes=3), **more, **NAMES),
}


# --- evaluations --------------------------------------------------------------------------------

BAD = {
    "NaN": lambda metrics: metrics | {"eval_acc": math.nan},
    "all NaN": lambda metrics: metrics | {"eval_acc": math.nan, "eval_loss": math.nan},
    "infinite": lambda metrics: metrics | {"eval_acc": math.inf},
    "missing": lambda metrics: {key: value for key, value in metrics.items() if key != "eval_acc"},
    "no weight": lambda metrics: {
        key: value for key, value in metrics.items() if key != "num-examples"
    },
    "weight NaN": lambda metrics: metrics | {"num-examples": math.nan},
    "list": lambda metrics: metrics | {"eval_acc": [0.5, 0.5]},
    "empty": lambda metrics: {},
}


@pytest.mark.parametrize("case", sorted(BAD))
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_one_bad_evaluation_is_left_out_alone(name, case, caplog):
    caplog.set_level(logging.INFO, "flwr")

    def misjudge(metrics):  # of the first of three
        return BAD[case](metrics) if metrics["num-examples"] == 10 else metrics

    def evaluations(**options):
        result = STRATEGIES[name]().start(LocalGrid(plain_app(**options), 3), start(), 1)
        return result, result.evaluate_metrics_clientapp[1]["eval_acc"]

    result, accuracy = evaluations(misjudge=misjudge)
    _, expected = evaluations(
        misjudge=lambda m: m | ({"num-examples": 0} if m["num-examples"] == 10 else {})
    )
    assert accuracy == pytest.approx(expected, abs=1e-9)
    assert result.history[0].accuracy == pytest.approx(accuracy, abs=0.01)
    if case not in ("missing", "list", "empty"):
        assert "node 1000: " in caplog.text


def test_a_metric_that_one_client_cannot_tell_stays():
    """An area under a curve needs both classes: whoever has one leaves it out, or says NaN."""

    def misjudge(metrics):
        area = {10: {}, 11: {"auc": math.nan}}.get(metrics["num-examples"], {"auc": 0.75})
        return metrics | area

    result = FLrce(**NAMES).start(LocalGrid(plain_app(misjudge=misjudge), 4), start(), 1)
    assert result.evaluate_metrics_clientapp[1]["auc"] == 0.75


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_node_that_hangs_in_its_evaluation_costs_one_timeout(name, caplog):
    caplog.set_level(logging.INFO, "flwr")
    release, asked = threading.Event(), []

    def hang(metrics):
        if metrics["num-examples"] == 10:
            asked.append(time.monotonic())
            release.wait(30)
        return metrics

    begun = time.monotonic()
    grid = LocalGrid(plain_app(misjudge=hang), 3, threads=4)
    try:
        result = STRATEGIES[name]().start(grid, start(), 5, timeout=2.0)
    finally:
        release.set()
    assert time.monotonic() - begun < 9.5  # five timeouts take 10
    assert len(asked) == 1
    assert len(result.evaluate_metrics_clientapp) == 5
    assert (
        caplog.text.count(
            "node 1000: no evaluation within 2 s, 1 in a row; it is not asked again until"
        )
        == 1
    )


def test_a_node_that_answers_late_is_asked_again_but_not_for_ever(caplog):
    """One that always takes longer than the timeout is given up after three evaluations."""
    caplog.set_level(logging.INFO, "flwr")
    asked, answered = [], threading.Event()
    answered.set()

    def slow(metrics):
        if metrics["num-examples"] == 10:
            asked.append(1)
            answered.clear()
            time.sleep(1.3)
            answered.set()
        return metrics

    def judge(t, arrays):  # so that the late answer is there before the next evaluation
        answered.wait(30)
        time.sleep(0.2)

    strategy = FLrce(**NAMES, preset="paper", psi=1)
    strategy.start(
        LocalGrid(plain_app(misjudge=slow), 2, threads=4),
        start(),
        12,
        timeout=1.0,
        evaluate_fn=judge,
    )
    assert len(asked) == 3
    assert "3 in a row; it is not asked again in this run" in caplog.text


def test_a_node_that_hangs_when_asked_for_its_loss_costs_one_timeout():
    release, asked = threading.Event(), []
    app = introduce(plain_app(), compresses=False, parts=True)

    @app.query("flrce_loss")
    def loss(message, context):
        if context.node_config["partition-id"] == 1:
            asked.append(1)
            release.wait(30)
        return Message(
            RecordDict({"metrics": MetricRecord({"num-examples": 9, "loss": 1.0})}),
            reply_to=message,
        )

    begun, choice = (
        time.monotonic(),
        replace(recipes.fedavg(2), selector=PowerOfChoice(candidates=4)),
    )
    strategy = RecipeStrategy(choice, fraction_evaluate=0.0, min_available_nodes=4, **NAMES)
    try:
        result = strategy.start(LocalGrid(app, 4, threads=4), start(), 5, timeout=2.0)
    finally:
        release.set()
    assert len(asked) == 1
    assert time.monotonic() - begun < 9.5  # five timeouts take 10
    assert [record.outcome for record in result.history] == ["committed"] * 5


def test_log_and_result_name_the_same_figure(caplog):
    """Accuracy alone is over all samples, as in Flower; the mean over clients is called that."""
    caplog.set_level(logging.INFO, "flwr")

    def misjudge(metrics):
        few = metrics["num-examples"] == 10
        return {"accuracy": 0.0 if few else 0.9, "num-examples": 1 if few else 99}

    result = FLrce(**NAMES).start(LocalGrid(plain_app(misjudge=misjudge), 2), start(), 1)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(0.891)
    assert result.history[0].accuracy == 0.45
    assert result.history[0].accuracy_weighted == pytest.approx(0.891)
    lines = [line for line in caplog.text.splitlines() if "accuracy" in line]
    assert len(lines) == 2  # the round, the run
    for line in lines:
        assert "accuracy 0.8910 over all samples (0.4500 is the mean over clients)" in line


# --- nobody trains ------------------------------------------------------------------------------


def fails(content, partition, t):
    raise RuntimeError("no data")


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("rounds", [1, 5])
def test_a_run_without_a_trained_model_fails(name, rounds, tmp_path):
    with pytest.raises(
        UnfinishedRun, match=r"the model is still the initial one: abandoned 3 times.*no data"
    ):
        STRATEGIES[name](state=tmp_path).start(LocalGrid(plain_app(fails), 3), start(), rounds)
    result = STRATEGIES[name](state=tmp_path).start(
        LocalGrid(plain_app(), 3), start(), rounds
    )  # they are back
    assert sum(record.outcome == "committed" for record in result.history) == rounds


def test_a_subclass_and_flowers_own_loop_fail_too(tmp_path):
    class Own(FLrce):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, replies)

    with pytest.raises(UnfinishedRun, match="still the initial one"):
        Own(state=tmp_path, **NAMES).start(LocalGrid(plain_app(fails), 3), start(), 2)
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 3
    with pytest.raises(UnfinishedRun, match="still the initial one"):
        flower.Strategy.start(FLrce(**NAMES), LocalGrid(plain_app(fails), 3), start(), 5)
    few = flower.Strategy.start(
        FLrce(**NAMES), LocalGrid(plain_app(fails), 3), start(), 2
    )  # too short to give up
    assert not few.arrays


def test_a_guarded_strategy_that_never_makes_a_model_fails(tmp_path):
    class Broken(flower.FedAvg):
        def aggregate_train(self, server_round, replies):
            raise ValueError("too few")

    for _ in range(2):  # and again when it is resumed
        with pytest.raises(UnfinishedRun, match="no round changed the model"):
            Guarded(Broken(), state=tmp_path, **NAMES).start(LocalGrid(plain_app(), 3), start(), 2)


def test_no_rounds_and_nobody_to_train_are_no_failure():
    assert FLrce(**NAMES).start(LocalGrid(plain_app(), 3), start(), 0).arrays
    assert FLrce(fraction_train=0.0, **NAMES).start(LocalGrid(plain_app(), 3), start(), 2).arrays


def test_the_command_line_and_python_fail_where_nobody_trains(tmp_path, monkeypatch, capsys):
    def broken(self, *args, **kwargs):
        raise RuntimeError("no data")

    monkeypatch.setattr(ClientRunner, "train", broken)
    small = ("rounds=2", "clients=4", "per_round=2", "engine.name=flower", "engine.kernel=torch")
    sets = [word for setting in small for word in ("--set", setting)]
    assert main(["run", *sets, "--out", str(tmp_path / "a")]) == 130
    error = capsys.readouterr().err
    assert "the model is still the initial one" in error
    assert "Traceback" not in error
    with pytest.raises(UnfinishedRun, match="still the initial one"):
        runs.run(on_flower())


# --- introductions ------------------------------------------------------------------------------

HELLOS = {
    "no name": lambda told: told.pop("flrce.client"),
    "empty": lambda told: told.clear(),
    "number": lambda told: told.update({"flrce.client": 3}),
    "bytes": lambda told: told.update({"flrce.client": b"\xff"}),
    "unknown": lambda told: told.update({"flrce.client": "client-99"}),
    "another's": lambda told: told.update({"flrce.client": "node-1000"}),
    "path": lambda told: told.update({"flrce.client": "../../etc"}),
    "n NaN": lambda told: told.update({"flrce.n": math.nan}),
    "n huge": lambda told: told.update({"flrce.n": 2**62}),
    "n text": lambda told: told.update({"flrce.n": "many"}),
    "n below 0": lambda told: told.update({"flrce.n": -5}),
    "no n": lambda told: told.pop("flrce.n"),
    "skills": lambda told: told.update({"flrce.simulation.build": "yes", "flrce.compresses": 7}),
    "duplicate": lambda told: told.update({"flrce.client": "0"}),
    "raises": None,
}


def hostile_app(app, spoil, partition=1):
    def answer(message, context):
        hello = message.metadata.message_type == "query.flrce"
        if hello and context.node_config["partition-id"] == partition and spoil is None:
            raise RuntimeError("no hello")
        reply = app(message, context)
        if hello and context.node_config["partition-id"] == partition:
            told = dict(reply.content["hello"])
            spoil(told)
            reply.content["hello"] = ConfigRecord(told)
        return reply

    return answer


@pytest.mark.parametrize("modelled", [True, False])
@pytest.mark.parametrize("case", sorted(HELLOS))
def test_a_damaged_introduction_ends_no_server(case, modelled, monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "NODE_WAIT_SECONDS", 0.3)
    experiment = on_flower()
    app = hostile_app(server.build_experiment_client(experiment), HELLOS[case])
    begun = time.monotonic()
    result = server.serve(
        LocalGrid(app, 4),
        experiment,
        tmp_path,
        modelled=modelled,
        min_available_nodes=4,
        wait_for_nodes=30.0,
    )
    assert time.monotonic() - begun < 25  # nobody waits for the one that stays out
    assert [record.outcome for record in result.history] == ["committed"] * 2
    names = {name for record in result.history for name in (*record.chosen, *record.replied)}
    assert names <= {"0", "1", "2", "3"} or not modelled


def test_a_node_that_never_introduces_itself_is_not_waited_for_in_every_round(monkeypatch):
    monkeypatch.setattr(engine, "NODE_WAIT_SECONDS", 0.3)
    monkeypatch.setattr("flrce.flower.nodes.NEWCOMER_WAIT_SECONDS", 0.2)
    release, experiment = threading.Event(), on_flower()
    app = hostile_app(server.build_experiment_client(experiment), lambda told: release.wait(30))
    begun = time.monotonic()
    try:
        result = server.serve(
            LocalGrid(app, 4, threads=4), experiment, modelled=True, min_available_nodes=4
        )
    finally:
        release.set()
    assert time.monotonic() - begun < 25
    assert len(result.history) == 2


# --- bytes, metrics, settings -------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "width"), [("float16", 2), ("float32", 4), ("float64", 8)])
def test_asking_for_a_loss_is_booked_by_the_models_element_size(dtype, width):
    """Three are asked for their loss, one of them trains: the model goes to each once."""

    def train(message, context):
        metrics = MetricRecord({"num-examples": 9, "train_loss": 1.0})
        return Message(
            RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message
        )

    app = ClientApp()
    app.train()(train)
    arrays = ArrayRecord({"a": Array(np.zeros((5, 3), dtype))})
    choice = replace(recipes.fedavg(1), selector=PowerOfChoice(candidates=3))
    strategy = RecipeStrategy(choice, fraction_evaluate=0.0, min_available_nodes=3, **NAMES)
    (record,) = strategy.start(LocalGrid(app, 3), arrays, 1).history
    assert record.bytes_down == 3 * 15 * width
    assert record.bytes_up == 15 * width


def test_tensors_and_extras_are_booked_by_their_own_types():
    template = ArrayTemplate.from_arrays(start())
    task = Task(
        "a",
        0,
        1,
        0,
        tensors={"x": torch.zeros(10, dtype=torch.float64)},
        compressor=NoCompression(),
    )
    assert MeasuredCosts(template).count_downlink_bytes(task) == template.nbytes + 80
    extras = {"c": torch.zeros(6, dtype=torch.float64), "d": torch.zeros(3, dtype=torch.int8)}
    u = torch.zeros(template.layout.size)
    content = write_reply(Reply("a", 1, Payload({"u": u}), n=3, extras=extras), 1.0, None)
    assert read_reply(content, task, template, u, 2**20).spent.bytes_up == 4 * len(u) + 48 + 3


OWN_METRICS = '''
from dataclasses import dataclass

from flrce.training.metrics import Metric


@dataclass(frozen=True)
class Sure:
    """The share of samples of which the network is sure."""

    name: str = "sure"
    better: str = "higher"
    low: float = 0.0
    high: float = 1.0
    mean: bool = True

    def of(self, out, y):
        return (out.softmax(-1).amax(-1) > 0.5).float()

    def value(self, numbers):
        return float(numbers.mean())


SURE = Sure()
PLAIN = Metric("plain", lambda out, y: out.softmax(-1).amax(-1))  # its value is the mean, unsaid
'''


def test_metrics_of_ones_own_are_pooled_as_in_the_simulator(tmp_path, monkeypatch):
    (tmp_path / "own_pooled.py").write_text(OWN_METRICS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    metrics = ["accuracy", "macro-f1", "own_pooled:SURE", "own_pooled:PLAIN"]
    objective = {"name": "classification", "metrics": metrics}
    there, here = (
        runs.run(on_flower(objective=objective)),
        runs.run(Experiment.from_tables(FEW | {"objective": objective})),
    )
    for over, simulated in zip(there.history, here.history, strict=True):
        assert set(over.pooled) == {"accuracy", "sure", "plain"}  # macro-f1 is no mean
        assert dict(over.pooled) == pytest.approx(
            {name: simulated.pooled[name] for name in over.pooled}, abs=1e-6
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"psi": "many"},
        {"psi": "0%"},
        {"psi": -1},
        {"psi": 9, "per_round": 5},
        {"preset": "none"},
        {"lr": -1.0},
        {"epochs": 0},
        {"batch": 0},
        {"per_round": 0},
        {"per_round": 2.5},
        {"eval_every": 0},
        {"minimum_replies": 0},
        {"min_train_nodes": -1},
        {"wait_for_nodes": math.nan},
        {"budget": {"bytes": -1}},
        {"budget": {"byte": 9}},
        {"stop": 5},
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_nodes_are_waited_for(settings):
    begun = time.monotonic()
    with pytest.raises(BadInput):
        FLrce(**{"wait_for_nodes": 60.0, **settings}).start(LocalGrid(plain_app(), 0), start(), 1)
    assert time.monotonic() - begun < 30


def test_sub_models_without_a_network_are_refused_before_nodes_are_waited_for():
    begun = time.monotonic()
    with pytest.raises(BadInput, match="sub-models"):
        RecipeStrategy("dropout").start(LocalGrid(plain_app(), 0), start(), 1)
    assert time.monotonic() - begun < 60  # it would wait for 300 s


@pytest.mark.parametrize("compressed", [False, True])
def test_a_reply_without_its_number_of_samples_says_so(compressed):
    def spoil(content, partition, t):
        if partition == 1:
            del content["metrics"]["num-examples"]

    app = introduce(plain_app(spoil, mods=[compressing] if compressed else []))
    recipe = replace(recipes.fedavg(3), compressor=TopK(0.5)) if compressed else recipes.fedavg(3)
    result = RecipeStrategy(recipe, **NAMES).start(LocalGrid(app, 3), start(), 1)
    (reason,) = result.history[0].rejected.values()
    assert (
        reason == "malformed: no metric 'num-examples', which says how many samples it trained on"
    )
