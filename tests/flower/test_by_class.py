"""Figures by class over Flower: asked for, counted, checked, kept and shown; and never sent where
nobody asked.
"""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg

from flrce.core.types import PrimaryMetric
from flrce.errors import BadInput
from flrce.flower import FLrce, Guarded, Local, LocalGrid, client_app
from flrce.flower.metrics import BY_CLASS_RECORD, HELD, MAX_CLASSES, SUMS, explain_invalid_totals
from flrce.report import page, tables
from flrce.storage import read
from flrce.training.objectives import Classification

HELDS = ([0, 0, 1], [0, 2])  # labels that each client holds back
QUICK = {"wait_for_nodes": 5.0, "lr": 1e-9, "epochs": 1}


def first_class() -> torch.nn.Linear:
    """Gives everything to class 0."""
    net = torch.nn.Linear(2, 3)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor([9.0, 0.0, 0.0]))
    return net


def load(context, objective=Classification()):
    held = HELDS[int(context.node_config["partition-id"])]
    y = torch.tensor([0, 1, *held])
    return Local(
        first_class(),
        torch.ones(len(y), 2),
        y,
        np.arange(2),
        np.arange(2, len(y)),
        objective=objective,
    )


class Spied(LocalGrid):
    """Keeps the answers to evaluations, after `spoil` has changed them."""

    def __init__(self, *args, spoil=lambda reply: None):
        super().__init__(*args)
        self.spoil, self.seen = spoil, []

    def _handle_message(self, message):
        reply = super()._handle_message(message)
        if message.metadata.message_type == "evaluate":
            self.spoil(reply)
            self.seen.append((message, reply))
        return reply


def ran(strategy, tmp_path, **spied):
    grid = Spied(client_app(load), 2, **spied)
    result = strategy.start(grid, ArrayRecord(first_class().state_dict()), 2)
    grid.close()
    return grid, result, json.loads((tmp_path / "final.json").read_text())


@pytest.mark.parametrize("guarded", [False, True])
def test_by_class_worked_by_hand(tmp_path, guarded):
    settings = {"state": tmp_path, "by_class": True}
    quick = {"wait_for_nodes": 5.0}
    strategy = Guarded(FedAvg(), **settings, **quick) if guarded else FLrce(**settings, **QUICK)
    _, _, final = ran(strategy, tmp_path)
    # class 0: 2 of 2 and 1 of 1 right; of classes 1 and 2 nobody's
    assert final == {
        "metric": "accuracy",
        "clients": pytest.approx([2 / 3, 1 / 2]),
        "classes": [1.0, 0.0, 0.0],
        "held": [3, 1, 1],
    }


def test_nobody_tells_label_counts_unless_asked(tmp_path):
    grid, _, final = ran(FLrce(state=tmp_path, **QUICK), tmp_path)
    assert set(final) == {"metric", "clients"}
    assert len(grid.seen) == 4
    for message, reply in grid.seen:
        assert "flrce.by-class" not in message.content["config"]
        assert set(reply.content) == {"metrics"}


def test_who_is_not_asked_for_classes_has_the_same_metrics(tmp_path):
    _, plain, _ = ran(FLrce(state=tmp_path / "a", **QUICK), tmp_path / "a")
    _, told, _ = ran(FLrce(state=tmp_path / "b", by_class=True, **QUICK), tmp_path / "b")
    assert plain.evaluate_metrics_clientapp == told.evaluate_metrics_clientapp


def test_the_report_shows_classes_by_name_or_number(tmp_path):
    for name, by_class in {"a": ("cat", "dog", "owl"), "b": True}.items():
        ran(FLrce(state=tmp_path / name, by_class=by_class, **QUICK), tmp_path / name)
    shown = [
        page.build_report_payload(tables.group_runs([read.read_single_run(tmp_path / name)]))[
            "runs"
        ][0]
        for name in ("a", "b")
    ]
    assert [run["classes"] for run in shown] == [["cat", "dog", "owl"], ["0", "1", "2"]]
    assert [run["byClass"] for run in shown] == [[1.0, 0.0, 0.0]] * 2


LIES = {
    "more right than there are": {SUMS: [3.0, 0.0], HELD: [2, 1]},
    "more samples than judged with": {SUMS: [2.0, 0.0], HELD: [2, 7]},
    "fewer than none": {SUMS: [-1.0, 0.0], HELD: [2, 1]},
    "two lengths": {SUMS: [2.0], HELD: [2, 1]},
    "one list": {HELD: [2, 1]},
    "no list": {SUMS: 2.0, HELD: 3},
    "text": {SUMS: ["a", "b"], HELD: [2, 1]},
    "shares of samples": {SUMS: [1.0, 0.0], HELD: [1.5, 1.5]},
    "negative samples": {SUMS: [0.0, 0.0], HELD: [-4, 1]},
    "not a number": {SUMS: [float("nan"), 0.0], HELD: [2, 1]},
    "right without samples": {SUMS: [1.0, 0.0], HELD: [0, 1]},
    "too many classes": {SUMS: [0.0] * (MAX_CLASSES + 1), HELD: [0] * (MAX_CLASSES + 1)},
}


@pytest.mark.parametrize("lie", LIES)
def test_figures_that_cannot_be_do_not_count(lie):
    assert explain_invalid_totals(ConfigRecord(LIES[lie]), 3, PrimaryMetric())
    assert not explain_invalid_totals(
        ConfigRecord({SUMS: [2.0, 0.0], HELD: [2, 1]}), 3, PrimaryMetric()
    )


def test_a_liar_s_classes_are_left_out_and_its_accuracy_counts(tmp_path, caplog):
    def spoil(reply: Message):
        if reply.metadata.src_node_id == 1000:
            reply.content[BY_CLASS_RECORD] = ConfigRecord({SUMS: [9.0], HELD: [3]})

    _, _, final = ran(FLrce(state=tmp_path, by_class=True, **QUICK), tmp_path, spoil=spoil)
    assert final["clients"] == pytest.approx([2 / 3, 1 / 2])
    assert (final["classes"], final["held"]) == ([1.0, None, 0.0], [1, 0, 1])
    assert (
        "node 1000: a sum of 9.0 over 3 samples of a class; its figures by class do not count"
        in caplog.text
    )


def test_other_clients_and_other_targets_tell_nothing(tmp_path):
    """A metric that is no mean of samples cannot be summed by class."""
    app = client_app(lambda context: load(context, Classification(metrics=("macro-f1",))))
    strategy = FLrce(state=tmp_path, by_class=True, **QUICK)
    grid = Spied(app, 2)
    strategy.start(grid, ArrayRecord(first_class().state_dict()), 1)
    grid.close()
    assert all(set(reply.content) == {"metrics"} for _, reply in grid.seen)


@pytest.mark.parametrize("odd", ["cat", (), 3, None])
def test_what_by_class_may_be(odd):
    with pytest.raises(BadInput, match="by_class"):
        FLrce(by_class=odd)
