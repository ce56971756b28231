"""What somebody meets who moves a Flower app to ours by two lines: one evaluation, FedAvg's
arguments, any dtype.
"""

import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.app import Array, MetricRecord
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp.strategy import FedAvg, Strategy

from flower_helpers import TARGET, plain_app, start
from flrce.errors import BadInput, UnfinishedRun
from flrce.flower import FLrce, Guarded, RecipeStrategy, introduce
from flrce.flower.grid import LocalGrid
from flrce.methods.catalogue.recipes import fedprox, flrce
from flrce.methods.server.averages import EMA

NAMES = {"wait_for_nodes": 5.0}


def gap(arrays):
    return float(np.abs(arrays["layer.weight"].numpy() - TARGET).mean())


class Counted(LocalGrid):
    """Counts messages by kind."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kinds = []

    def push_messages(self, messages):
        messages = list(messages)
        self.kinds += [message.metadata.message_type for message in messages]
        return super().push_messages(messages)


# --- one model in messages, log, metrics and result ---------------------------------------------


STRATEGIES = {
    "flrce": lambda: FLrce(**NAMES),
    "plain average": lambda: RecipeStrategy(replace(flrce(P=4), average=EMA()), **NAMES),
    "paper": lambda: FLrce(preset="paper", **NAMES),
    "guarded": lambda: Guarded(FedAvg(min_available_nodes=4), **NAMES),
}


@pytest.mark.parametrize("loop", ["ours", "Flower's"])
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_each_round_is_evaluated_once_and_what_is_evaluated_is_handed_back(name, loop):
    if name == "guarded" and loop != "ours":
        pytest.skip("a guarded strategy has its own halves")
    asked = []

    def judge(t, arrays):
        asked.append((t, gap(arrays)))
        return MetricRecord({"gap": gap(arrays)})

    grid = Counted(plain_app(), 4)
    run = (lambda s, *a, **k: s.start(*a, **k)) if loop == "ours" else Strategy.start
    result = run(STRATEGIES[name](), grid, start(), num_rounds=5, evaluate_fn=judge)
    assert [t for t, _ in asked] == [0, 1, 2, 3, 4, 5]
    assert grid.kinds.count("evaluate") == 5 * 4
    assert grid.kinds.count("train") == 5 * 4
    handed = gap(result.arrays)
    assert asked[-1][1] == pytest.approx(handed, abs=1e-7)
    assert result.evaluate_metrics_serverapp[5]["gap"] == pytest.approx(handed, abs=1e-7)
    assert result.evaluate_metrics_clientapp[5]["eval_acc"] == pytest.approx(1 - handed, abs=1e-6)
    if loop == "ours":
        assert result.history[-1].accuracy == pytest.approx(1 - handed, abs=1e-6)
        assert result.history[-1].bytes_evaluation == 4 * 72


def test_the_models_metric_may_have_any_name():
    """No metric called accuracy: the figures in the result are still those of the model that is
    handed back.
    """
    grid = Counted(
        plain_app(misjudge=lambda m: {"r2" if key == "eval_acc" else key: m[key] for key in m}), 4
    )
    result = FLrce(**NAMES).start(
        grid, start(), 4, evaluate_fn=lambda t, arrays: MetricRecord({"r2": gap(arrays)})
    )
    assert grid.kinds.count("evaluate") == 4 * 4
    assert result.evaluate_metrics_serverapp[4]["r2"] == pytest.approx(gap(result.arrays), abs=1e-7)
    assert result.evaluate_metrics_clientapp[4]["r2"] == pytest.approx(
        1 - gap(result.arrays), abs=1e-6
    )


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 8])
def test_the_switch_is_not_worse_in_short_runs(rounds):
    """All clients in every round: the same training, so what is handed back decides. A plain
    average is far behind.
    """
    theirs = gap(
        FedAvg(min_available_nodes=4).start(LocalGrid(plain_app(), 4), start(), rounds).arrays
    )
    ours = gap(FLrce(**NAMES).start(LocalGrid(plain_app(), 4), start(), rounds).arrays)
    lagging = gap(
        RecipeStrategy(replace(flrce(P=4), average=EMA()), **NAMES)
        .start(LocalGrid(plain_app(), 4), start(), rounds)
        .arrays
    )
    assert ours <= theirs + 0.01
    assert rounds == 1 or lagging > theirs + 0.02


def test_what_is_handed_back_is_said(caplog):
    with caplog.at_level("INFO", logger="flwr"):
        FLrce(**NAMES).start(LocalGrid(plain_app(), 4), start(), 1)
        FLrce(preset="paper", **NAMES).start(LocalGrid(plain_app(), 4), start(), 1)
    assert (
        "final model: an average of the rounds' models (EMA, decay 0.9, ease 4, level 0.15)"
        in caplog.text
    )
    assert "final model: the last model" in caplog.text


# --- numbers of nodes, as FedAvg has them -------------------------------------------------------


def test_the_number_that_trains_follows_the_number_connected():
    """Half of four, then half of eight: nodes that come later count, as in FedAvg."""

    def more(content, partition, t):
        while t == 2 and len(grid.contexts) < 8:
            grid.add_node({"partition-id": len(grid.contexts)})

    grid = LocalGrid(plain_app(more), 4, threads=1)
    result = FLrce(fraction_train=0.5, **NAMES).start(grid, start(), 4)
    assert [len(record.chosen) for record in result.history] == [2, 2, 4, 4]


def test_fewer_nodes_than_may_train_do_not():
    grid = Counted(plain_app(), 2)
    with pytest.raises(UnfinishedRun, match="abandoned 3 times in a row"):
        FLrce(min_train_nodes=3, wait_for_nodes=0.2).start(grid, start(), 5)
    assert "train" not in grid.kinds


def test_a_recipe_for_ten_trains_with_the_four_there_are():
    begun = time.monotonic()
    result = RecipeStrategy("fedavg", wait_for_nodes=60.0).start(
        LocalGrid(plain_app(), 4), start(), 2
    )
    assert time.monotonic() - begun < 30
    assert [len(record.replied) for record in result.history] == [4, 4]
    half = RecipeStrategy("fedavg", fraction_train=0.5, **NAMES).start(
        LocalGrid(plain_app(), 4), start(), 1
    )
    assert len(half.history[0].replied) == 2


def test_without_training_the_model_is_evaluated():
    """fraction_train = 0.0, as in FedAvg."""
    grid = Counted(plain_app(), 3)
    ours = FLrce(fraction_train=0.0, **NAMES).start(grid, start(), 2)
    theirs = FedAvg(fraction_train=0.0, min_available_nodes=3).start(
        LocalGrid(plain_app(), 3), start(), 2
    )
    assert grid.kinds.count("train") == 0
    for t in (1, 2):
        expected = theirs.evaluate_metrics_clientapp[t]["eval_acc"]
        assert ours.evaluate_metrics_clientapp[t]["eval_acc"] == pytest.approx(expected)
    assert {name: array.data for name, array in ours.arrays.items()} == {
        n: a.data for n, a in start().items()
    }


def test_a_proximal_term_reaches_plain_clients_by_flowers_name():
    seen = []

    def look(message, context):
        if message.metadata.message_type == "train":
            seen.append(dict(message.content["config"]))
        return app(message, context)

    app = plain_app()
    RecipeStrategy(fedprox(mu=0.3, P=2), **NAMES).start(LocalGrid(look, 2), start(), 1)
    assert [config["proximal-mu"] for config in seen] == [0.3, 0.3]
    seen.clear()
    RecipeStrategy("fedavg", **NAMES).start(LocalGrid(look, 2), start(), 1)
    assert all("proximal-mu" not in config for config in seen)


# --- FedAvg's other arguments -------------------------------------------------------------------


def extra(content, partition, t):
    content["metrics"]["weight"] = 1 + 2 * (partition == 0)
    content["metrics"]["per-class"] = [float(partition), 1.0]


def test_arguments_by_position_and_another_weight():
    """FedAvg is the oracle: positions, weighted_by_key, and metrics that are lists."""
    positional = (1.0, 1.0, 3, 3, 3, "weight")
    judged = {"misjudge": lambda m: {**m, "weight": 2, "confusion": [m["eval_loss"], 1.0]}}
    grids = [LocalGrid(plain_app(extra, **judged), 3) for _ in range(3)]
    theirs = FedAvg(*positional).start(grids[0], start(), 2)
    for strategy, grid in (
        (RecipeStrategy("fedavg", *positional, **NAMES), grids[1]),
        (FLrce(*positional), grids[2]),
    ):
        ours = strategy.start(grid, start(), 2)
        np.testing.assert_allclose(
            ours.arrays["layer.weight"].numpy(), theirs.arrays["layer.weight"].numpy(), atol=0.01
        )
        for mine, other in (
            (ours.train_metrics_clientapp[1], theirs.train_metrics_clientapp[1]),
            (ours.evaluate_metrics_clientapp[1], theirs.evaluate_metrics_clientapp[1]),
        ):
            for key in set(other) - {"num-examples"}:
                assert mine[key] == pytest.approx(other[key], rel=1e-3), key


def test_the_users_own_sums_of_metrics():
    def best(contents, key):
        assert key == "num-examples"
        found = [next(iter(content.metric_records.values())) for content in contents]
        return MetricRecord(
            {"best": max(f.get("eval_acc", f.get("train_loss")) for f in found), "of": len(found)}
        )

    arguments = {"train_metrics_aggr_fn": best, "evaluate_metrics_aggr_fn": best}
    ours = FLrce(**arguments, **NAMES).start(LocalGrid(plain_app(), 3), start(), 2)
    theirs = FedAvg(**arguments, min_available_nodes=3).start(LocalGrid(plain_app(), 3), start(), 2)
    assert (
        ours.train_metrics_clientapp[2]["best"] == theirs.train_metrics_clientapp[2]["best"] == 0.5
    )
    assert ours.evaluate_metrics_clientapp[2]["of"] == 3
    assert ours.evaluate_metrics_clientapp[2]["best"] == pytest.approx(
        theirs.evaluate_metrics_clientapp[2]["best"], rel=1e-3
    )


def test_a_config_by_round():
    seen = []

    def look(message, context):
        if "config" in message.content:
            kind, config = message.metadata.message_type, message.content["config"]
            seen.append((kind, config.get("server-round"), config.get("lr"), config.get("steps")))
        return app(message, context)

    app = plain_app()
    strategy = RecipeStrategy("fedavg", ask_names=False, **NAMES)
    strategy.start(
        LocalGrid(look, 2),
        start(),
        2,
        train_config=lambda t: {"lr": 1 / t},
        evaluate_config=lambda t: {"steps": t},
    )
    assert sorted(set(seen), key=str) == sorted(
        [
            ("train", 1, 1.0, None),
            ("train", 2, 0.5, None),
            ("evaluate", 1, None, 1),
            ("evaluate", 2, None, 2),
        ],
        key=str,
    )


# --- subclasses ---------------------------------------------------------------------------------


class Decaying(FLrce):
    """As Flower's advanced example does it: another rate in each round, replies looked at, metrics
    added.
    """

    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] = 0.5**server_round
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        metrics["seen"] = len(replies)
        return arrays, metrics

    def configure_evaluate(self, server_round, arrays, config, grid):
        config["judge"] = server_round
        return list(super().configure_evaluate(server_round, arrays, config, grid))[:2]

    def aggregate_evaluate(self, server_round, replies):
        metrics = super().aggregate_evaluate(server_round, replies)
        metrics["judges"] = len(list(replies))
        return metrics


@pytest.mark.parametrize("loop", ["ours", "Flower's"])
def test_a_subclass_that_changes_a_round_is_asked(loop, tmp_path):
    seen = []

    def look(message, context):
        if "config" in message.content:
            seen.append((message.metadata.message_type, dict(message.content["config"])))
        return app(message, context)

    app = plain_app()
    grid = LocalGrid(look, 3)
    if loop == "ours":
        result = Decaying(state=tmp_path / "run", **NAMES).start(grid, start(), 3)
        assert [len(record.replied) for record in result.history] == [3, 3, 3]
        assert [config["judge"] for kind, config in seen if kind == "evaluate"] == [
            1,
            1,
            2,
            2,
            3,
            3,
        ]
        assert [m["judges"] for m in result.evaluate_metrics_clientapp.values()] == [2, 2, 2]
    else:
        result = Strategy.start(Decaying(**NAMES), grid, start(), 3)
    rates = {(config["server-round"], config["lr"]) for kind, config in seen if kind == "train"}
    assert rates == {(1, 0.5), (2, 0.25), (3, 0.125)}
    assert [m["seen"] for m in result.train_metrics_clientapp.values()] == [3, 3, 3]
    straight = FLrce(**NAMES).start(LocalGrid(plain_app(), 3), start(), 3)
    for name, array in straight.arrays.items():
        assert array.data == result.arrays[name].data


def test_a_subclass_may_leave_a_client_out():
    class Fewer(FLrce):
        def configure_train(self, server_round, arrays, config, grid):
            messages = list(super().configure_train(server_round, arrays, config, grid))
            return [message for message in messages if message.metadata.dst_node_id != 1001]

    result = Fewer(**NAMES).start(LocalGrid(plain_app(), 3), start(), 2)
    assert [record.replied for record in result.history] == [("node-1000", "node-1002")] * 2
    assert not result.history[0].rejected


class Silent(FLrce):
    def configure_train(self, server_round, arrays, config, grid):
        return []


class Deaf(FLrce):
    def aggregate_train(self, server_round, replies):
        return None, None


class Own(FLrce):
    def aggregate_train(self, server_round, replies):
        super().aggregate_train(server_round, replies)
        return start(), None


class Wrapped(Guarded):
    configure_train = Silent.configure_train


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Silent(**NAMES), "must call super"),
        (lambda: Deaf(**NAMES), "must call super"),
        (lambda: Own(**NAMES), "use an Aggregator"),
        (lambda: Wrapped(FedAvg(), **NAMES), "in the strategy that is guarded"),
    ],
)
def test_what_a_subclass_cannot_do_is_refused_in_one_line(make, reason):
    with pytest.raises(BadInput, match=reason) as found:
        make().start(LocalGrid(plain_app(), 3), start(), 2)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_accuracies_in_percent(name):
    """Flower's users report .93 or 93: the metrics stay as reported, records are shares, and a liar
    is out.
    """

    def spoil(content, partition, t):
        content["metrics"]["accuracy"] = 1e6 if partition == 3 else 50.0

    def percent(metrics):
        return {**metrics, "eval_acc": 100 * metrics["eval_acc"]}

    result = STRATEGIES[name]().start(LocalGrid(plain_app(spoil, misjudge=percent), 4), start(), 2)
    assert [set(record.rejected) for record in result.history] == [{"node-1003"}] * 2
    assert result.train_metrics_clientapp[1]["accuracy"] == pytest.approx(50.0)
    found = result.evaluate_metrics_clientapp[2]["eval_acc"]
    assert found == pytest.approx(100 * (1 - gap(result.arrays)), rel=1e-5)
    assert result.history[-1].accuracy == pytest.approx(found / 100)


# --- what else a user does ----------------------------------------------------------------------


class Costly(FLrce):
    """A subclass with attributes of its own, under names that come to mind."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.costs, self.partition, self.extra, self.minimum = [1.0], "cats", 3, None
        self.experiment, self.watch, self.judges = "first", True, ["me"]

    def aggregate_evaluate(self, server_round, replies):
        metrics = super().aggregate_evaluate(server_round, replies)
        metrics["paid"] = sum(self.costs)
        return metrics


def test_a_subclass_may_have_attributes_of_its_own(tmp_path):
    result = Costly(state=tmp_path, **NAMES).start(LocalGrid(plain_app(), 3), start(), 2)
    assert [record.outcome for record in result.history] == ["committed"] * 2
    assert result.evaluate_metrics_clientapp[2]["paid"] == 1.0


def test_without_a_timeout_replies_are_waited_for():
    result = FLrce(**NAMES).start(LocalGrid(plain_app(), 3), start(), 2, timeout=None)
    assert [len(record.replied) for record in result.history] == [3, 3]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"lr": np.float32(0.1)}, "'lr' is a numpy.float32"),
        ({"lr": None}, "'lr' is a NoneType"),
        ({"sizes": [1, "a"]}, "'sizes' is a list"),
        (lambda t: None, "round 1 is None; use a ConfigRecord or a dict"),
    ],
)
def test_a_config_that_cannot_be_sent_is_named(config, said):
    with pytest.raises(BadInput, match=said):
        FLrce(**NAMES).start(LocalGrid(plain_app(), 3), start(), 2, train_config=config)


@pytest.mark.parametrize(
    "arrays", [[np.zeros(3, np.float32)], {"w": np.zeros(3, np.float32)}, None]
)
def test_arrays_that_are_no_record(arrays):
    with pytest.raises(BadInput, match=r"initial_arrays is a \w+; pass an ArrayRecord"):
        FLrce(**NAMES).start(LocalGrid(plain_app(), 3), arrays, 2)


def test_an_array_that_cannot_be_read_is_named():
    arrays = start()
    arrays["phase"] = Array(np.zeros(2, np.complex64))
    with pytest.raises(BadInput, match="array 'phase': dtype complex64"):
        FLrce(**NAMES).start(LocalGrid(plain_app(), 3), arrays, 2)


class Leaving(LocalGrid):
    """Node 1001 leaves as it is asked to judge the second round's model."""

    def _handle_message(self, message):
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        if kind == "evaluate" and node == 1001 and message.content["config"]["server-round"] == 2:
            self.drop_node(node)
        return super()._handle_message(message)


def test_a_node_that_leaves_while_it_judges():
    result = FLrce(**NAMES).start(Leaving(plain_app(), 4), start(), 3)
    assert [len(record.replied) for record in result.history] == [4, 4, 3]
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert all(record.outcome == "committed" for record in result.history)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fraction_fit": 0.5, "min_fit_clients": 2}, "fraction_fit -> fraction_train, min_fit"),
        ({"initial_parameters": None}, "needs the Message API .*initial_arrays of start"),
        ({"statee": "runs/a"}, "FLrce has no argument 'statee': did you mean 'state'"),
    ],
)
def test_arguments_of_the_older_interface_are_named(given, said):
    with pytest.raises(BadInput, match=said):
        FLrce(**given)


class Older(NumPyClient):
    def fit(self, parameters, config):
        return parameters, 10, {}


def test_clients_of_the_older_interface_are_told_how_to_move():
    app = ClientApp(client_fn=lambda context: Older().to_client())
    with pytest.raises(UnfinishedRun, match=r"older interface \(NumPyClient or client_fn\)"):
        FLrce(per_round=2).start(LocalGrid(app, 3), start(), 2)


@pytest.mark.parametrize("app", [Older(), ClientApp(client_fn=lambda context: None)])
def test_an_older_client_cannot_be_introduced(app):
    with pytest.raises(
        (TypeError, ValueError), match=r"older interface \(NumPyClient or client_fn\)"
    ):
        introduce(app)


def test_an_older_strategy_cannot_be_guarded():
    with pytest.raises(BadInput, match=r"use a strategy of flwr\.serverapp\.strategy; see docs"):
        Guarded(LegacyFedAvg())


@pytest.mark.parametrize(
    ("psi", "said"),
    [
        (0, "above 0 and at most 100 % of P, got 0"),
        (float("nan"), "above 0 and at most 100 % of P, got nan"),
        ("150%", "above 0 and at most 100 % of P, got '150%'"),
        ([1], r"a number or a percentage of P such as '50%', got \[1\]"),
    ],
)
def test_a_bad_psi_is_refused_before_there_are_nodes(psi, said):
    """Nobody knows yet how many clients will train in a round."""
    with pytest.raises(BadInput, match=f"psi must be {said}"):
        FLrce(psi=psi)


def test_unknown_energy_and_evaluations_are_in_the_summary(caplog):
    """72 bytes of floats go to each of 3 judges in 2 rounds; clients here measure no joules."""
    silent = plain_app(misjudge=lambda metrics: {"num-examples": metrics["num-examples"]})
    with caplog.at_level("INFO", logger="flwr"):
        result = FLrce(**NAMES).start(LocalGrid(silent, 3), start(), 2)
    assert [h.bytes_evaluation for h in result.history] == [3 * 72] * 2
    assert "0.000 MB for evaluations; energy unknown" in caplog.text
    assert not any(name.startswith("joules") for name in result.train_metrics_clientapp[2])
    assert result.train_metrics_clientapp[2]["bytes_evaluation"] == 3 * 72
    modelled = FLrce(**NAMES, device="raspberry-pi-4")
    known = modelled.start(LocalGrid(silent, 3), start(), 2)
    assert known.train_metrics_clientapp[2]["joules"] > 0
    assert caplog.text.count("energy unknown") == 1
