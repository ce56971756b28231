"""Earlier runs of a task in the stop rule: read once, stored with the run, never its own outputs."""

import math
import tomllib

import pytest

from flrce import Experiment
from flrce.core.types import RoundRecord
from flrce.errors import BadInput
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.stopping.memory import (
    blend_gains,
    compute_gain_curve,
    describe_recorded_tasks,
    hash_summary,
    load_recorded_tasks,
    look_up_earlier_gain,
    summarize_curves,
)
from flrce.simulation import runs

SHAPE = {"rounds": 70, "clients": 12, "per_round": 4, "engine": {"workers": 1}}


def asked(stop, seed=0, rounds=70):
    recipe = {"name": "fedavg", "holdouts": True, **({"stop": stop} if stop else {})}
    return Experiment.from_tables({**SHAPE, "rounds": rounds, "seed": seed, "recipe": recipe})


def test_a_summary_worked_by_hand():
    """Gains of 4 and 2 points at round 16: mean 3, spread sqrt 2; a run alone has the usual one."""
    summary = summarize_curves([{16: 4.0, 32: 1.0}, {16: 2.0}])
    assert summary == (16.0, 3.0, 1.4142, 2.0, 32.0, 1.0, 1.5, 1.0)
    assert look_up_earlier_gain(summary, 18).mean == 3.0
    assert look_up_earlier_gain(summary, 70) is None
    assert hash_summary(summary) != hash_summary(summary[:4])
    near = look_up_earlier_gain(summary, 16)
    theirs = 1.4142 * math.sqrt(1.5)
    expected = (0.5 / 1.0 + 3.0 / theirs**2) / (1.0 + 1 / theirs**2)
    assert blend_gains(0.5, 1.0, near) == pytest.approx(expected)


def test_recorded_tasks_ship_with_the_package():
    tasks = load_recorded_tasks()
    assert len(tasks) > 80
    assert all(0 <= task.too_early <= task.runs for task in tasks)
    similar = [task for task in tasks if 5 <= task.sweep <= 20]
    assert describe_recorded_tasks(10.0).startswith(f"of {len(similar)} recorded tasks")


def test_a_curve_is_what_doubling_gained():
    history = [RoundRecord(t, accuracy=0.05 * math.log2(t)) for t in range(1, 201)]
    curve = compute_gain_curve(history)
    assert curve[64] == pytest.approx(5.0, abs=0.7)
    assert max(curve) <= 100


def test_memory_is_read_once_stored_and_kept_on_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        runs.run(asked(None, seed), tmp_path / "runs" / f"old-{seed}")
    stop = {"piece": "marginal-gain", "points": 15.0, "like": "runs/*"}
    result = runs.run(asked(stop), tmp_path / "runs" / "new")
    stored = tomllib.loads((tmp_path / "runs" / "new" / "experiment.toml").read_text())
    kept = stored["recipe"]["stop"]
    assert kept["earlier_runs"] == 2
    assert kept["earlier_hash"] == hash_summary(kept["earlier"])
    assert "of 2 earlier runs of the task" in result.summary["stopped"]
    again = runs.run(asked(stop), tmp_path / "runs" / "new", resume=True)  # not three runs now
    assert again.summary["stopped"] == result.summary["stopped"]
    replayed = MarginalGain(points=15.0, earlier=tuple(kept["earlier"]), earlier_runs=2)
    history = result.history
    tau = next(i for i in range(1, len(history) + 1) if replayed(history[:i]))
    assert tau == len(history)


def test_a_pattern_without_runs_is_refused(tmp_path):
    stop = {"piece": "marginal-gain", "like": str(tmp_path / "nothing*")}
    with pytest.raises(BadInput, match=r"recipe.stop.like = .* names no finished run"):
        runs.run(asked(stop, rounds=2), tmp_path / "out")
