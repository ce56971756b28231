"""What is written down of a round: all that a stop rule may look at, and what reports read.

A record has three groups: costs, evaluation and diagnostics. The ledger, and everybody who reads
`result.history`, also knows their fields by flat names: `record.joules` is `record.costs.joules`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any


def format_figures(figures: Mapping[str, float]) -> str:
    """Figures within a line.

    >>> format_figures({"epsilon": 1.23456, "clusters": 3.0})
    'epsilon 1.235, clusters 3'
    """
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


@dataclass(frozen=True)
class RoundCosts:
    """What a round cost, summed over its clients."""

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
    seconds: float = 0.0  # how long it took
    measured: bool = False
    other: Mapping[str, float] = field(default_factory=dict)  # further costs, by name in COSTS


@dataclass(frozen=True)
class RoundEvaluation:
    """How good the models are."""

    # of those who replied: the primary metric of w before the round, on its hold-out
    holdouts: tuple[float | None, ...] = ()
    held: tuple[int, ...] = ()  # and on how many samples; 0 where it said nothing
    accuracy: float | None = None  # where that is the primary metric
    accuracy_weighted: float | None = None
    loss: float | None = None
    averaged: float | None = None  # of the server average, where it is not the last model
    metric: str = "accuracy"  # the primary metric's name
    lower: bool = False  # whether less of it is better
    # of the last model: mean over clients
    metrics: Mapping[str, float] = field(default_factory=dict)
    pooled: Mapping[str, float] = field(default_factory=dict)  # of the last model: over all samples
    # of the server average: mean over clients
    metrics_averaged: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundDiagnostics:
    """What the updates show besides the model."""

    # client that counted -> what is odd about its update
    flagged: Mapping[str, str] = field(default_factory=dict)
    # client that counted less -> share of its weight left
    doubted: Mapping[str, float] = field(default_factory=dict)
    conflicts: float = 0.0  # mean number of conflicting peers (Algorithm 3)
    votes: float = 0.0  # the same among clients that are not flagged, scaled to all
    consensus: float = 1.0  # |sum p u| / sum p |u|
    # cosine of the round's step and the way of the rounds before (averages.py)
    headway: float | None = None
    shadow: tuple[float, ...] = ()  # thresholds psi that would have stopped the run by now


GROUPS: Mapping[str, type] = {
    "costs": RoundCosts,
    "evaluation": RoundEvaluation,
    "diagnostics": RoundDiagnostics,
}
GROUP_OF_FIELD = {f.name: group for group, kind in GROUPS.items() for f in fields(kind)}


@dataclass(frozen=True, init=False)
class RoundRecord:
    """One round in the ledger: small, and all that a stop rule may look at."""

    t: int
    outcome: str = "committed"  # or "abandoned"
    exploit: bool = False
    chosen: tuple[str, ...] = ()
    replied: tuple[str, ...] = ()
    clients: int = 0  # M: rows in the roster
    rejected: Mapping[str, str] = field(default_factory=dict)  # client -> reason
    # client that counted -> rounds its reply is old, if any
    ages: Mapping[str, int] = field(default_factory=dict)
    # seconds of the run's clock; the last round's end, or later where this one had to wait
    began: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)  # what pieces report, by name
    why: Mapping[str, Any] = field(default_factory=dict)
    stop: str = ""  # the reason, in the round that ends the run
    costs: RoundCosts = RoundCosts()
    evaluation: RoundEvaluation = RoundEvaluation()
    diagnostics: RoundDiagnostics = RoundDiagnostics()

    def __init__(
        self, t: int, outcome: str = "committed", exploit: bool = False, **values: Any
    ) -> None:
        """By field, or by the flat name of a group's field: RoundRecord(3, joules=2.0)."""
        own = {"t": t, "outcome": outcome, "exploit": exploit}
        grouped: dict[str, Any] = {group: {} for group in GROUPS}
        for name, value in values.items():
            (grouped[GROUP_OF_FIELD[name]] if name in GROUP_OF_FIELD else own)[name] = value
        for f in fields(self):
            content: Any = own.pop(f.name) if f.name in own else get_default(f)
            inner = grouped.get(f.name)
            object.__setattr__(self, f.name, replace(content, **inner) if inner else content)
        if own:
            raise TypeError(f"RoundRecord has no field {min(own)!r}")

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The flat names of the groups' fields."""

    @property
    def last_model_metric(self) -> float | None:
        """The last model by the primary metric; None where it was not judged in this round."""
        seen = self.evaluation
        return seen.accuracy if seen.metric == "accuracy" else seen.metrics.get(seen.metric)

    @property
    def final_model_metric(self) -> float | None:
        """The same of the final model: the server average where there is one."""
        averaged = self.evaluation.averaged
        return self.last_model_metric if averaged is None else averaged


for _name, _group in GROUP_OF_FIELD.items():
    setattr(RoundRecord, _name, property(attrgetter(f"{_group}.{_name}")))


def get_default(f: Field[Any]) -> Any:
    """The default of a dataclass's field."""
    return f.default_factory() if f.default_factory is not MISSING else f.default


_FIELDS = {f.name: f for kind in (RoundRecord, *GROUPS.values()) for f in fields(kind)}
#: the ledger's columns in their order, with a default each; `t` has none
FLAT_FIELDS: dict[str, Field[Any]] = {
    name: _FIELDS[name]
    for name in (
        *("t", "outcome", "exploit", "chosen", "replied", "holdouts", "held", "clients"),
        *("rejected", "flagged", "doubted", "ages", "conflicts", "votes", "consensus", "headway"),
        *("accuracy", "accuracy_weighted", "loss", "averaged", "metric", "lower"),
        *("metrics", "pooled", "metrics_averaged", "bytes_up", "bytes_down", "bytes_framing"),
        *("bytes_evaluation", "bytes_wasted", "joules", "joules_wasted", "joules_low"),
        *("joules_high", "grams", "grams_wasted", "began", "seconds", "measured", "other"),
        *("figures", "shadow", "why", "stop"),
    )
}


def flatten_record(record: RoundRecord) -> dict[str, Any]:
    """The record as the ledger has it: one table of plain values."""
    return {name: getattr(record, name) for name in FLAT_FIELDS}


def read_clock(history: Sequence[RoundRecord]) -> float:
    """Seconds since the run began: the end of its last round."""
    return history[-1].began + history[-1].costs.seconds if history else 0.0


def replay_clock(history: Sequence[RoundRecord]) -> float:
    """The same of records that may come from before rounds knew when they began."""
    now = 0.0
    for record in history:
        now = max(record.began, now) + record.costs.seconds
    return now


def list_end_times(history: Sequence[RoundRecord]) -> list[float]:
    """(rounds,) when each round ended: waiting before a round is time too."""
    ends, total = [], 0.0
    for record in history:
        total += record.costs.seconds
        ends.append(max(total, record.began + record.costs.seconds))
    return ends


def fill_start_times(history: Iterable[RoundRecord]) -> tuple[RoundRecord, ...]:
    """Records with the second at which each began; those that know it keep it."""
    records: list[RoundRecord] = []
    for record in history:
        began = max(record.began, read_clock(records))
        records.append(record if began == record.began else replace(record, began=began))
    return tuple(records)
