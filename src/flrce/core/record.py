"""What is written down of a round: all that a stop rule may look at, and what reports read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: metrics between 0 and 1 that people read in percent
SHARES = frozenset({"accuracy", "top-5", "macro-f1", "auc", "label-f1", "subset-accuracy"})
NAMES = {
    "auc": "AUC",
    "mae": "MAE",
    "mse": "MSE",
    "r2": "R²",
    "macro-f1": "Macro F1",
    "label-f1": "Label F1",
}


def metric_name(metric: str) -> str:
    """A metric's name at the start of a sentence."""
    return NAMES.get(metric, metric[:1].upper() + metric[1:])


def format_metric(metric: str, value: float | None) -> str:
    """A value in words: "93.1 %", "0.4127"; "--" where there is none."""
    if value is None:
        return "--"
    return f"{100 * value:.1f} %" if metric in SHARES else f"{value:.4g}"


def format_figures(figures: Mapping[str, float]) -> str:
    """Figures within a line.

    >>> format_figures({"epsilon": 1.23456, "clusters": 3.0})
    'epsilon 1.235, clusters 3'
    """
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


@dataclass(frozen=True)
class RoundRecord:
    """One round in the ledger: small, and all that a stop rule may look at."""

    t: int
    outcome: str = "committed"  # or "abandoned"
    exploit: bool = False
    chosen: tuple[str, ...] = ()
    replied: tuple[str, ...] = ()
    # of those who replied: the primary metric of w before the round, on its hold-out
    holdouts: tuple[float | None, ...] = ()
    held: tuple[int, ...] = ()  # and on how many samples; 0 where it said nothing
    clients: int = 0  # M: rows in the roster
    rejected: Mapping[str, str] = field(default_factory=dict)  # client -> reason
    # client that counted -> what is odd about its update
    flagged: Mapping[str, str] = field(default_factory=dict)
    # client that counted less -> share of its weight left
    doubted: Mapping[str, float] = field(default_factory=dict)
    # client that counted -> rounds its reply is old, if any
    ages: Mapping[str, int] = field(default_factory=dict)
    conflicts: float = 0.0  # mean number of conflicting peers (Algorithm 3)
    votes: float = 0.0  # the same among clients that are not flagged, scaled to all
    consensus: float = 1.0  # |sum p u| / sum p |u|
    # cosine of the round's step and the way of the rounds before (averages.py)
    headway: float | None = None
    way: float | None = None  # |w - w_0|, where the stop asks for it (distance_growth.py)
    accuracy: float | None = None  # where that is the primary metric
    accuracy_weighted: float | None = None
    loss: float | None = None
    averaged: float | None = (
        None  # primary metric of the server average, where it is not the last model
    )
    metric: str = "accuracy"  # the primary metric's name
    lower: bool = False  # whether less of it is better
    # of the last model: mean over clients
    metrics: Mapping[str, float] = field(default_factory=dict)
    pooled: Mapping[str, float] = field(default_factory=dict)  # of the last model: over all samples
    # of the server average: mean over clients
    metrics_averaged: Mapping[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_framing: int = 0
    bytes_evaluation: int = 0  # what sending the model to every hold-out would cost; apart
    bytes_wasted: int = 0  # up and down, of replies that did not count
    joules: float = 0.0
    joules_wasted: float = 0.0
    joules_low: float = 0.0  # what they may be by the errors that the devices' profiles state
    joules_high: float = 0.0
    grams: float = 0.0  # of CO2, where the fleet's electricity is known
    grams_wasted: float = 0.0
    # seconds of the run's clock; the last round's end, or later where this one had to wait
    began: float = 0.0
    seconds: float = 0.0  # how long it took
    measured: bool = False
    other: Mapping[str, float] = field(default_factory=dict)  # further costs, by name in COSTS
    figures: Mapping[str, float] = field(default_factory=dict)  # what pieces report, by name
    shadow: tuple[float, ...] = ()  # thresholds psi that would have stopped the run by now
    why: Mapping[str, Any] = field(default_factory=dict)
    stop: str = ""  # the reason, in the round that ends the run

    @property
    def last_model_metric(self) -> float | None:
        """The last model by the primary metric; None where it was not judged in this round."""
        return self.accuracy if self.metric == "accuracy" else self.metrics.get(self.metric)

    @property
    def final_model_metric(self) -> float | None:
        """The same of the final model: the server average where there is
        one.
        """
        return self.last_model_metric if self.averaged is None else self.averaged
