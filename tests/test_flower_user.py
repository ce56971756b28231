"""What somebody meets who moves a Flower app to ours by two lines: one evaluation, FedAvg's arguments, any dtype."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg, Strategy

from flower_helpers import TARGET, plain_app, start
from flrce.flower import FLrce, Guarded, RecipeStrategy
from flrce.flower.grid import LocalGrid
from flrce.recipes import flrce

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


# --- one model in messages, log, metrics and result ---


STRATEGIES = {
    "flrce": lambda: FLrce(**NAMES),
    "plain average": lambda: RecipeStrategy(flrce(P=4), **NAMES),
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
    """No metric called accuracy: the figures in the result are still those of the model that is handed back."""
    grid = Counted(plain_app(misjudge=lambda m: {"r2" if key == "eval_acc" else key: m[key] for key in m}), 4)
    result = FLrce(**NAMES).start(grid, start(), 4, evaluate_fn=lambda t, arrays: MetricRecord({"r2": gap(arrays)}))
    assert grid.kinds.count("evaluate") == 4 * 4
    assert result.evaluate_metrics_serverapp[4]["r2"] == pytest.approx(gap(result.arrays), abs=1e-7)
    assert result.evaluate_metrics_clientapp[4]["r2"] == pytest.approx(1 - gap(result.arrays), abs=1e-6)


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 8])
def test_the_switch_is_not_worse_in_short_runs(rounds):
    """All clients in every round: the same training, so what is handed back decides. A plain average is far behind."""
    theirs = gap(FedAvg(min_available_nodes=4).start(LocalGrid(plain_app(), 4), start(), rounds).arrays)
    ours = gap(FLrce(**NAMES).start(LocalGrid(plain_app(), 4), start(), rounds).arrays)
    lagging = gap(RecipeStrategy(flrce(P=4), **NAMES).start(LocalGrid(plain_app(), 4), start(), rounds).arrays)
    assert ours <= theirs + 0.01
    assert rounds == 1 or lagging > theirs + 0.02


def test_what_is_handed_back_is_said(caplog):
    with caplog.at_level("INFO", logger="flwr"):
        FLrce(**NAMES).start(LocalGrid(plain_app(), 4), start(), 1)
        FLrce(preset="paper", **NAMES).start(LocalGrid(plain_app(), 4), start(), 1)
    assert "handed back: an average of the rounds' models (EMA, decay 0.9, ease 4)" in caplog.text
    assert "handed back: the last model" in caplog.text
