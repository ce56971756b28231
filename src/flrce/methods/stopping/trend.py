"""The metric in a record: clients' reports on the models they were sent, and evaluations of the
final model.

A report is the client's own word: a client whose updates were out of line twice is heard no more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flrce.core.types import RoundRecord

MAX_FLAGS_PER_CLIENT = 2  # flags that silence a client: an update out of line (core/evaluation.py)
LOG_METRICS = frozenset({"perplexity"})  # compared as ratios: a point is one percent
SMALLEST_VALUE = 1e-12  # of which a logarithm is taken
MIN_TREND_ROUNDS = 6  # rounds in a stretch: fewer have no error to speak of
FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.int64]


@dataclass(frozen=True)
class MetricReports:
    """Figures of the record in the order of rounds: who said when how good the model was; more is
    better.
    """

    t: IndexArray  # (m,) rounds, counted from 1
    k: IndexArray  # (m,) who said it
    value: FloatArray  # (m,)
    n: FloatArray  # (m,) samples that it was found on
    sweep: float = 1.0  # rounds in which everybody could have had a turn: M / P

    def truncate_after(self, t: int) -> "MetricReports":
        """The same as it was after round t."""
        m = int(np.searchsorted(self.t, t, side="right"))
        return MetricReports(self.t[:m], self.k[:m], self.value[:m], self.n[:m], self.sweep)


def collect_client_reports(
    history: Sequence[RoundRecord], log_scale: bool = False
) -> MetricReports:
    """What clients said of the models they were sent.

    Whether a figure counts is decided by the record up to its round: a client whose updates were
    out of line twice is heard no more.
    """
    done = [h for h in history if h.outcome == "committed"]
    rows: dict[str, int] = {}
    strikes: dict[str, int] = {}
    reports: list[tuple[int, int, float, int]] = []
    for h in done:
        for client in h.diagnostics.flagged:
            strikes[client] = strikes.get(client, 0) + 1
        counts = h.evaluation.held or (1,) * len(h.evaluation.holdouts)
        names = (
            h.replied if len(h.replied) == len(h.evaluation.holdouts) else ("",)
        )  # one figure of all: sums only
        for client, value, n in zip(names, h.evaluation.holdouts, counts, strict=False):
            if value is not None and strikes.get(client, 0) < MAX_FLAGS_PER_CLIENT:
                progress = to_progress(h, value, log_scale)
                reports.append((h.t, rows.setdefault(client, len(rows)), progress, max(n, 1)))
    return _make_reports(reports, compute_sweep(done, len(rows)))


def compute_sweep(done: Sequence[RoundRecord], heard: int = 0) -> float:
    """Rounds in which everybody could have had a turn: M / P, and 1 where M is not known."""
    M = max((h.clients for h in done), default=0) or heard
    P = sum(len(h.replied) for h in done) / max(len(done), 1)
    return max(M / max(P, 1.0), 1.0)


def collect_evaluations(history: Sequence[RoundRecord], log_scale: bool = False) -> MetricReports:
    """Evaluations of the final model: one judge, in the rounds that had one."""
    done = [h for h in history if h.outcome == "committed"]
    return _make_reports(
        [
            (h.t, 0, to_progress(h, h.final_model_metric, log_scale), 1)
            for h in done
            if h.final_model_metric is not None
        ],
        compute_sweep(done),
    )


def to_progress(h: RoundRecord, value: float, log_scale: bool = False) -> float:
    """A value of the metric as one that rises: negated where less is better, and its logarithm
    where that is the scale to compare on.
    """
    value = math.log(max(value, SMALLEST_VALUE)) if log_scale else value
    return -value if h.evaluation.lower else value


def _make_reports(found: Sequence[tuple[int, int, float, int]], sweep: float) -> MetricReports:
    t, k, value, n = zip(*found, strict=True) if found else ((), (), (), ())
    return MetricReports(
        np.array(t, np.int64),
        np.array(k, np.int64),
        np.array(value, float),
        np.array(n, float),
        sweep,
    )
