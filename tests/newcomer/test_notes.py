"""What a run tells beyond its figures, and what a Result shows at a Python prompt."""

from dataclasses import replace

import numpy as np
import pytest

import flrce
from flrce.cli.cli import main
from flrce.core.types import RoundRecord
from flrce.data.sources import Source
from flrce.methods.catalogue import recipes
from flrce.methods.stopping.budget import AnyOf, CostBudget, Patience
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.stopping.no_headway import NoHeadway
from flrce.simulation import runs
from flrce.storage.run_notes import (
    compute_sweep_rounds,
    ended_diverged,
    explain_divergence,
    explain_lagging_average,
    explain_no_learning,
    explain_unknown_metric,
    explain_unreachable_rule,
    list_run_notes,
)

SMALL = {"rounds": 3, "clients": 8, "per_round": 4, "engine": {"workers": 1}}


def blobs(positives: float, n: int = 600) -> Source:
    """Two classes, of which the rarer is `positives` of all, and features that say nothing of
    them.
    """
    rng = np.random.default_rng(0)
    return Source(
        "blobs",
        rng.normal(size=(n, 5)).astype(np.float32),
        (rng.random(n) < positives).astype(np.int64),
        ("no", "yes"),
    )


def test_divergence_is_named_in_words():
    asked = flrce.Experiment(**SMALL, train={"lr": 1e5})
    with pytest.raises(
        flrce.Diverged, match=r"clients diverged in round 1: lower train.lr"
    ) as caught:
        flrce.run(asked)
    result = flrce.run(asked, allow_divergence=True)
    assert result.notes[0] == result.diverged == str(caught.value) == caught.value.result.diverged
    assert result.notes[0].endswith("or scale features and values (data.standardise = true)")
    assert explain_divergence(
        [RoundRecord(1, accuracy=0.1, loss=2.0), RoundRecord(2, accuracy=0.1)]
    ).startswith("the loss went to infinity in round 2")
    assert "4.0e+09 in round 2" in explain_divergence(
        [RoundRecord(1, accuracy=0.1, loss=2.0), RoundRecord(2, accuracy=0.1, loss=4e9)]
    )
    assert (
        explain_divergence(
            [RoundRecord(1, accuracy=0.1, loss=2.0, rejected={"a": "no reply"}, chosen=("a", "b"))]
        )
        == ""
    )


def test_only_the_end_of_a_run_decides_whether_it_diverged(tmp_path, capsys):
    first, lost = RoundRecord(1, accuracy=0.1, loss=2.0), RoundRecord(2, accuracy=0.1)
    assert "infinity in round 2" in ended_diverged([first, lost])
    assert (
        ended_diverged([first, lost, RoundRecord(3, accuracy=0.5, loss=1.0)])
        == ended_diverged(())
        == ""
    )
    assert "infinity in round 2" in ended_diverged(
        [first, RoundRecord(2, metric="mae", bytes_evaluation=8)]
    )
    attacked = RoundRecord(
        2, accuracy=0.9, loss=0.1, chosen=("a", "b"), rejected={"a": "1 of 9 values are not finite"}
    )
    assert ended_diverged([first, attacked]) == ""
    alone = RoundRecord(
        2,
        "abandoned",
        chosen=("a", "b"),
        rejected={"a": "no reply", "b": "no reply"},
        stop="abandoned",
    )
    assert ended_diverged([first, alone]) == ""
    words = ["run", "--set=rounds=2", "--set=clients=8", "--set=per_round=4", "--set=train.lr=1e5"]
    for more in ("--no-save",), ("--seeds=0,1", f"--out={tmp_path / 'a'}"):
        assert main([*words, *more]) == 130
        assert "diverged: " in capsys.readouterr().err


def test_a_result_speaks_of_its_own_metric():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3)).astype(np.float32)
    asked = flrce.Experiment(**SMALL, data={"partition": "iid"}, model={"name": "linear"})
    result = flrce.run(asked, data=(x, x.sum(1)))
    assert repr(result).startswith(f"Result(mae {result.summary['value']:.4g}")
    pytest.importorskip("matplotlib").use("Agg")
    axes = result.plot()
    assert axes.get_ylabel() == "MAE"
    assert axes.lines[0].get_ydata()[-1] == result.summary["value_last"]


@pytest.mark.parametrize(("positives", "lr"), [(0.02, 0.1), (0.35, 0.1), (0.35, 1e-6), (0.65, 0.1)])
def test_a_majority_class_is_named(positives, lr):
    """A constant classifier, whichever class it names, and one that is below the more frequent
    class.
    """
    asked = flrce.Experiment(**SMALL, data={"partition": "iid"}, train={"lr": lr})
    result = flrce.run(asked, data=blobs(positives))
    usual = "no" if positives < 0.5 else "yes"
    assert (
        f"no better than a constant prediction: always predicting class '{usual}' gives"
        in result.notes[0]
    )


@pytest.mark.parametrize("metrics", [["mae"], ["r2"], ["mse", "r2"]])
def test_a_model_of_values_that_is_worse_than_their_mean_is_named(metrics, tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    usual = {
        **SMALL,
        "data": {"partition": "iid"},
        "model": {"name": "linear"},
        "objective": {"metrics": metrics},
    }
    usual["objective"]["name"] = "regression"
    idle = flrce.run(
        flrce.Experiment(**usual, train={"lr": 1e-6}), tmp_path / "a", data=(x, x.sum(1) + 9)
    )
    assert "always predicting the mean of the training values gives" in idle.notes[0]
    assert main(["why", str(tmp_path / "a")]) == 0
    told = capsys.readouterr().out
    assert f"Note: {idle.notes[0]}" in told
    assert "For comparison: always predicting the mean of the training values gives" in told
    assert main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "r.html")]) == 0
    assert "always predicting the mean of the training values" in (tmp_path / "r.html").read_text()
    able = flrce.run(flrce.Experiment(**usual), data=(x, x.sum(1) + 9))
    assert not any("constant prediction" in note or "below 0" in note for note in able.notes)


def test_chance_and_a_majority_are_named_where_no_baseline_was_recorded():
    def note(accuracy, labels, classes=("no", "yes"), **more):
        seen = [RoundRecord(1, accuracy=accuracy, accuracy_weighted=accuracy, **more)]
        return explain_no_learning(seen, {"labels": [labels], "classes": classes})

    assert "10.0 % of all samples right is chance for 10 classes" in note(0.1, [5] * 10, range(10))
    assert note(0.9, [5] * 10, range(10)) == ""
    assert "no better than always predicting class 'no' (65.0 %)" in note(0.6, [65, 35])
    assert note(0.7, [65, 35]) == ""
    assert (
        explain_no_learning(
            [RoundRecord(1, accuracy=0.1, accuracy_weighted=0.1)],
            {"kind": "numbers", "classes": []},
        )
        == ""
    )
    assert "R² -1.96 is below 0" in explain_no_learning(
        [RoundRecord(1, metric="mae", metrics={"mae": 1.0, "r2": -1.96})], {}
    )


def test_a_rule_that_cannot_act_is_named():
    assert (
        explain_unreachable_rule(NoHeadway(), 69)
        == "the stop rule NoHeadway needs 70 rounds, so it cannot end a run of 69"
    )
    assert explain_unreachable_rule(NoHeadway(), 70) == ""
    assert "Patience" in explain_unreachable_rule(
        AnyOf((CostBudget(rounds=3), Patience(10))), 20, eval_every=2
    )
    assert explain_unreachable_rule(UpdateConflicts(5.0), 1) == ""
    for rule in (
        NoHeadway(after=3, n=4, first=3, level=1.0, share=1.0),
        Patience(3),
        UpdateConflicts(2.0, r=2, n=3),
    ):
        history, at = [], 0
        while not at:
            t = len(history) + 1
            history.append(
                RoundRecord(
                    t, exploit=True, conflicts=9.0, accuracy=0.5, headway=-1.0 if t > 2 else None
                )
            )
            at = t if rule(history) else 0
        assert at == rule.earliest_round(), rule


def test_the_price_cannot_be_asked_for_in_a_short_run(caplog):
    default, plain = recipes.frugal(P=4), replace(recipes.frugal(P=4), holdouts=False)
    assert compute_sweep_rounds(default, 100) == 25
    at = default.stop.earliest_round(1, 25)
    assert at >= 50  # two sweeps at least
    assert f"needs {at} rounds, so it cannot end a run of 49" in explain_unreachable_rule(
        default.stop, 49, 1, 25
    )
    assert explain_unreachable_rule(default.stop, at, 1, 25) == ""
    assert compute_sweep_rounds(plain, 100) is None
    assert "needs 24 rounds" in explain_unreachable_rule(plain.stop, 21, 2, None)
    runs._warn_once.cache_clear()  # a line is said once in a process, and other tests run as short
    short = flrce.Experiment(rounds=2, clients=40, per_round=4, engine={"workers": 1})
    assert (
        flrce.run(short).notes[-1]
        == "the stop rule MarginalGain needs 24 rounds, so it cannot end a run of 2"
    )
    assert caplog.text.count("needs 24 rounds") == 1  # at the start


@pytest.mark.parametrize(
    ("M", "every"), [(8, 1), (40, 1), (40, 4), (8, 1000), (100, 1000), (0, 1), (0, 2)]
)
def test_the_price_is_asked_for_no_sooner(M, every):
    """A record that rises in its first rounds only: the soonest stop that clients in turn, or
    evaluations, can give.
    """
    P, history = 4, []
    sweep = M / P if M else None
    for t in range(1, 400):
        turn = [str((P * (t - 1) + i) % M) for i in range(P)] if M else []
        value = 0.0 if t <= max(sweep or every, 1) else 0.9
        judged = value if t % every == 0 else None
        history.append(
            RoundRecord(
                t,
                replied=turn,
                chosen=turn,
                holdouts=(value,) * len(turn),
                held=(9,) * len(turn),
                accuracy=judged,
                clients=M,
            )
        )
        if MarginalGain()(history):
            break
    assert history[-1].t >= MarginalGain().earliest_round(every, sweep)
    assert history[-1].t <= 3 * MarginalGain().earliest_round(every, sweep)


def test_rounds_that_were_all_abandoned_are_headed_by_their_metric():
    x = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32)
    asked = flrce.Experiment(
        **SMALL, data={"partition": "iid"}, model={"name": "linear"}, train={"lr": 1e5}
    )
    result = flrce.run(asked, data=(x, x.sum(1) * 1e9), allow_divergence=True)
    assert (result.summary["metric"], result.summary["better"], result.summary["value"]) == (
        "mae",
        "lower",
        None,
    )
    assert "malformed: loss" in result.summary["stopped"]
    assert all(
        len(word) < 12 for word in result.summary["stopped"].replace(",", " ").split()
    )  # no 17 digits


def test_a_lagging_average_is_named():
    assert "final model scored 64.3 %, the last one 87.6 %" in explain_lagging_average(
        [RoundRecord(5, accuracy=0.876, averaged=0.643)]
    )
    assert explain_lagging_average([RoundRecord(5, accuracy=0.876, averaged=0.87)]) == ""


def test_a_lagging_average_is_named_by_any_metric_and_its_direction():
    def errs(last, averaged):
        return explain_lagging_average(
            [RoundRecord(5, metric="mae", lower=True, metrics={"mae": last}, averaged=averaged)]
        )

    assert "final model scored 2.1, the last one 1.453 (mae)" in errs(1.453, 2.1)
    assert errs(1.453, 1.47) == errs(2.1, 1.453) == ""  # 1.2 % more, and less: lower is better


def test_a_metric_that_nobody_has_is_told_of():
    blind, held = [RoundRecord(1, metric="auc"), RoundRecord(2, metric="auc")], {"held": [3, 0]}
    assert explain_unknown_metric(blind, held, 1).startswith(
        "auc is not defined on any client's hold-out"
    )
    assert explain_unknown_metric(blind, {"held": [0, 0]}, 1) == ""  # nobody holds anything back
    assert explain_unknown_metric(blind, held, 3) == ""  # no round was to be judged
    assert (
        explain_unknown_metric(
            [*blind, RoundRecord(3, metric="auc", metrics={"auc": 0.5})], held, 1
        )
        == ""
    )
    assert list_run_notes((), {}, CostBudget(), 5) == ()


@pytest.mark.parametrize("rounds", [3, 5, 10])
def test_the_default_does_not_lag_in_short_runs(rounds):
    """The averaged model is eased in: it never costs a point of what the last one has."""
    result = flrce.run(
        flrce.Experiment(rounds=rounds, clients=30, per_round=6, engine={"workers": 1})
    )
    assert result.summary["accuracy"] >= result.summary["accuracy_last"] - 0.01
    assert not any("averaged" in note for note in result.notes)


def test_both_models_are_kept(tmp_path):
    from safetensors.torch import load_file

    result = flrce.run(flrce.Experiment(**SMALL), tmp_path / "a")
    handed, last = (load_file(tmp_path / "a" / f"{name}.safetensors") for name in ("model", "last"))
    assert all((handed[key] == tensor).all() for key, tensor in result.model.items())
    assert any((handed[key] != last[key]).any() for key in handed)
    flrce.run(flrce.Experiment(**SMALL, recipe={"name": "fedavg"}), tmp_path / "b")
    assert not (tmp_path / "b" / "last.safetensors").exists()


def test_a_result_at_the_prompt(tmp_path):
    result = flrce.run(flrce.Experiment(**SMALL), tmp_path / "a")
    first, *rest = repr(result).splitlines()
    assert first.startswith("Result(accuracy ")
    assert len(first) < 180
    assert f"{tmp_path / 'a'})" in first
    assert rest == [f"note: {note}" for note in result.notes]
    frame = pytest.importorskip("pandas") and result.to_pandas()
    assert list(frame.index) == [1, 2, 3]
    assert frame["accuracy"].iloc[-1] == result.summary["accuracy_last"]


def test_a_result_is_plotted():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    averaged = {"name": "fedavg", "average": "ema"}
    axes = flrce.run(flrce.Experiment(**SMALL, recipe=averaged, stop={"rounds": 2})).plot()
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["last model", "averaged model (final)", "stopped"]


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"rounds": 0}, "experiment: rounds = 0: should be greater than or equal to 1"),
        ({"round": 5}, "experiment: round is no known key; did you mean 'rounds'?"),
        ({"recipe": {"name": "fedavgg"}}, "did you mean 'fedavg'?"),
        ({"train": {"lr": "fast"}}, "train.lr = 'fast'"),
        ({"per_round": 300}, "per_round must be at most clients"),
    ],
)
def test_python_gets_the_same_one_line_errors(wrong, line):
    with pytest.raises(flrce.BadInput) as caught:
        flrce.Experiment(**wrong)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_network_that_auto_chose_is_named_for_data_of_ones_own(tmp_path, capsys):
    pixels = np.random.default_rng(0).integers(0, 255, (60, 16, 16, 3)).astype(np.uint8)
    np.savez(tmp_path / "tiles.npz", x=pixels, y=np.arange(60) % 3)
    sets = [f"data.path={tmp_path / 'tiles.npz'}", "clients=3", "per_round=2", "rounds=1"]
    options = [part for pair in sets for part in ("--set", pair)]
    assert main(["run", *options, "--out", str(tmp_path / "run")]) == 0
    assert "note: model.name = 'auto' is" in (told := capsys.readouterr().err)
    assert "MB per round of 2 clients" in told


def test_a_run_that_diverged_is_listed_as_such(tmp_path, capsys, caplog):
    x = np.random.default_rng(0).normal(size=(80, 3)).astype(np.float32)
    np.savez(tmp_path / "far.npz", x=x * 1e4, y=x[:, 0] * 1e6)
    sets = [f"data.path={tmp_path / 'far.npz'}", "clients=3", "per_round=3", "rounds=3"]
    options = [part for pair in sets for part in ("--set", pair)]
    assert main(["run", *options, "--out", str(tmp_path / "run")]) == 130
    assert "values to learn reach" in capsys.readouterr().err
    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "diverged" in shown
    assert "--resume" not in shown
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "far.npz")]) == 0
    assert "committed no round: its network is not trained" in caplog.text
