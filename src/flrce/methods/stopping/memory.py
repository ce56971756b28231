"""What earlier runs of a task gained from doubling their rounds, as a prior of the stop rule.

The runs are read once, before the first round. Their summary is part of the rule and is stored with
the run, so that the rule stays a pure function of the record and this prior.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from flrce.core.types import RoundRecord
from flrce.methods.stopping.gains import (
    MeasuredGain,
    compute_block_rounds,
    measure_evaluation_gain,
    measure_report_gain,
)

STEPS_PER_DOUBLING = 4  # rounds of the summary: 2^(i / 4)
UNKNOWN_SPREAD_POINTS = 1.5  # of gains between runs of one task, where only one run is known
MIN_SPREAD_POINTS = 0.3  # two runs that agree by chance are not certain
COLUMNS = 4  # of a summary's row: round, mean gain, spread, runs
GainCurve = dict[int, float]  # round t -> points gained from t to 2 t


@dataclass(frozen=True)
class RememberedGain:
    """What earlier runs gained from doubling the rounds at about this round, in points."""

    mean: float
    spread: float
    runs: int


def compute_gain_curve(history: Sequence[RoundRecord]) -> GainCurve:
    """What doubling the rounds gained in a finished run, at rounds 2^(i / 4)."""
    from flrce.methods.stopping.marginal_gain import collect_reports

    done = [h for h in history if h.outcome == "committed"]
    reports, curve = collect_reports(done), {}
    block = compute_block_rounds(reports.clients.sweep)
    for t in _list_rounds(block, done[-1].t if done else 0):
        measured: MeasuredGain | None = measure_report_gain(reports.clients, 2 * t, block)
        if measured is None:
            measured = measure_evaluation_gain(reports.evaluations, 2 * t, block, reports.unit)
        if measured is not None:
            curve[t] = measured.gain / reports.unit
    return curve


def _list_rounds(block: int, T: int) -> list[int]:
    rounds = (round(2 ** (i / STEPS_PER_DOUBLING)) for i in range(80))
    return sorted({t for t in rounds if block <= t <= T // 2})


def summarize_curves(curves: Sequence[GainCurve]) -> tuple[float, ...]:
    """Rows of round, mean gain, spread between runs and number of runs, one after the other."""
    rows: list[float] = []
    for t in sorted({t for curve in curves for t in curve}):
        gains = [curve[t] for curve in curves if t in curve]
        mean = sum(gains) / len(gains)
        spread = UNKNOWN_SPREAD_POINTS
        if len(gains) > 1:
            spread = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1))
        rows += [t, round(mean, 4), round(max(spread, MIN_SPREAD_POINTS), 4), len(gains)]
    return tuple(float(x) for x in rows)


def hash_summary(summary: Sequence[float]) -> str:
    return hashlib.blake2b(repr(tuple(summary)).encode(), digest_size=8).hexdigest()


def look_up_earlier_gain(summary: Sequence[float], t: int) -> RememberedGain | None:
    """The row nearest to round t on a logarithmic scale; None further than half a doubling away."""
    rows = [tuple(summary[i : i + COLUMNS]) for i in range(0, len(summary), COLUMNS)]
    nearest = min(rows, key=lambda row: abs(math.log2(row[0] / t)), default=None)
    if nearest is None or abs(math.log2(nearest[0] / t)) > 0.5:
        return None
    return RememberedGain(nearest[1], nearest[2], int(nearest[3]))


def blend_gains(own: float, width: float, earlier: RememberedGain) -> float:
    """Both predictions, weighed by what they are off by: the own one by `width`, the earlier runs'
    by their spread.
    """
    theirs = earlier.spread * math.sqrt(1 + 1 / earlier.runs)
    weight = 1 / max(width, MIN_SPREAD_POINTS) ** 2
    other = 1 / theirs**2
    return (weight * own + other * earlier.mean) / (weight + other)


@dataclass(frozen=True)
class RecordedTask:
    """A setting of the study behind the rule (research/docs/stop.md)."""

    name: str
    sweep: float
    runs: int
    too_early: int


@cache
def load_recorded_tasks() -> tuple[RecordedTask, ...]:
    """The recorded tasks that ship with the package."""
    text = files("flrce.methods.stopping").joinpath("recorded_tasks.json").read_text("utf-8")
    return tuple(RecordedTask(*row) for row in json.loads(text))


def describe_recorded_tasks(sweep: float) -> str:
    """How often the rule was wrong on recorded tasks whose sweep is within a factor of 2."""
    similar = [task for task in load_recorded_tasks() if 0.5 <= task.sweep / sweep <= 2]
    early = sum(2 * task.too_early > task.runs for task in similar)
    return (
        f"of {len(similar)} recorded tasks with a similar sweep {early} were stopped too early"
        if similar
        else "no recorded task has a similar sweep"
    )
