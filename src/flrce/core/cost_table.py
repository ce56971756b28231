"""The costs of a run: one row of COSTS for each, with its name, its units and where it is booked.

Summaries, tables, the report page, budgets, the arena and the command line read this table. To add
a cost, book it as `ClientCost.other[name]` where a client's part of a round is priced, and add its
row here. Joules are booked a second time by what they rest on, a meter, a model of figures that
were measured, or an assumption, as `ClientCost.other` under BASIS_FIELDS: these add up to them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from flrce.core.record import FLAT_FIELDS, RoundRecord, list_end_times, replay_clock

if TYPE_CHECKING:  # which imports torch
    from flrce.core.types import ClientCost

MEASURED_FIELD = "joules_measured"  # counted by a meter on the device
MODELLED_FIELD = "joules_modelled"  # by a profile, from figures that were measured or published
#: by a profile, where a figure that it takes is an assumption -> what the joules are spent on
ASSUMED_FIELDS = {
    "joules_assumed_batches": "batch overhead",
    "joules_assumed_work": "computation",
    "joules_assumed_radio": "radio",
    "joules_assumed_waiting": "waiting",
}
BASIS_FIELDS = (MEASURED_FIELD, MODELLED_FIELD, *ASSUMED_FIELDS)
NETWORK_FIELD = "network_joules"  # of networks between devices and server, apart
MIN_NAMED_SHARE = 0.01  # of the joules: parts below it are not named
if TYPE_CHECKING:  # which imports torch, and the command line reads this table at its start
    from flrce.core.types import ClientCost

COST_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
RESERVED_NAMES = frozenset(FLAT_FIELDS) | {"bytes", "rounds", "flops"}
History = Sequence[RoundRecord]
Unit = tuple[float, str]  # how many base units it is, and its name


def add_amounts(other: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Sums by name; names with nothing are left out."""
    names = dict.fromkeys((*other, *more))
    sums = {name: other.get(name, 0.0) + more.get(name, 0.0) for name in names}
    return {name: amount for name, amount in sums.items() if amount}


def replace_basis(other: Mapping[str, float], basis: Mapping[str, float]) -> dict[str, float]:
    """Further costs with another basis of the joules."""
    kept = {name: amount for name, amount in other.items() if name not in BASIS_FIELDS}
    return add_amounts(kept, basis)


def reconcile_basis(spent: "ClientCost", before: "ClientCost") -> "ClientCost":
    """The cost with a basis that adds up to its joules, which something beside the device's profile
    changed: what is more was modelled, what is less is taken from every part. A cost without a
    basis has that of `before`.
    """
    own = _select_basis(spent.other)
    basis = own or _select_basis(before.other)
    booked = sum(basis.values())
    if not booked or (own and abs(booked - spent.joules) <= 1e-9 * booked):
        return spent
    if spent.joules < booked:
        basis = {name: spent.joules / booked * amount for name, amount in basis.items()}
    else:
        basis = add_amounts(basis, {MODELLED_FIELD: spent.joules - booked})
    return replace(spent, other=replace_basis(spent.other, basis))


def _select_basis(other: Mapping[str, float]) -> dict[str, float]:
    return {name: other[name] for name in BASIS_FIELDS if name in other}


def assumed_share(summary: Mapping[str, Any]) -> float | None:
    """The share of a run's joules that is assumed; None where it was not booked."""
    parts = {name: summary.get(name) or 0.0 for name in BASIS_FIELDS}
    joules = summary.get("joules") or 0.0
    # a run that an earlier version began has rounds without a basis
    if not joules or abs(sum(parts.values()) / joules - 1) > 1e-6:
        return None
    return float(sum(parts[name] for name in ASSUMED_FIELDS) / joules)


def describe_basis(summary: Mapping[str, Any]) -> str:
    """Where a run's joules come from, the largest assumption first; "" where it is unknown.

    >>> describe_basis({"joules": 10.0, "joules_modelled": 1.8, "joules_assumed_batches": 8.2})
    '82 % assumed batch overhead, 18 % modelled'
    """
    if assumed_share(summary) is None:
        return ""
    names = {name: f"assumed {part}" for name, part in ASSUMED_FIELDS.items()}
    names |= {MODELLED_FIELD: "modelled", MEASURED_FIELD: "measured"}
    shares = {name: (summary.get(name) or 0.0) / summary["joules"] for name in names}
    order = sorted(names, key=lambda name: (name not in ASSUMED_FIELDS, -shares[name]))
    shown = [name for name in order if shares[name] >= MIN_NAMED_SHARE]
    return ", ".join(f"{100 * shares[name]:.0f} % {names[name]}" for name in shown)


def format_joules(summary: Mapping[str, Any]) -> str:
    """A run's joules with their interval, and whether they are measured or modelled."""
    joules, high = summary["joules"], summary.get("joules_high") or 0.0
    doubt = f" ({summary['joules_low']:.4g} to {high:.4g})" if high > joules else ""
    return f"{joules:.4g} J{doubt} {summary['energy']}"


def describe_joules(summary: Mapping[str, Any]) -> str:
    """The same with what they rest on, in one line."""
    basis = describe_basis(summary)
    plain = basis in ("", f"100 % {summary['energy']}")
    return format_joules(summary) + ("" if plain else f", of which {basis}")


def read_amount(booked: Any, field: str) -> float:
    """A field of a round's or a client's costs; 0 where nobody booked it."""
    amount: float | None = getattr(booked, field, None)
    return booked.other.get(field, 0.0) if amount is None else amount


@dataclass(frozen=True)
class Cost:
    """One cost of a run."""

    name: str  # in summaries, budgets, options and JSON
    heading: str  # of a column
    units: tuple[Unit, ...] = ((1.0, ""),)  # the largest first
    digits: int = 2  # after the point
    fields: tuple[str, ...] = ()  # of a round and of a client, whose sum it is; (): its name
    details: tuple[str, ...] = ()  # further fields of a round that a summary adds up
    optional: bool = False  # left out of tables where nobody spent any
    by_client: bool = True  # booked on each client's line
    # what one round adds; from the start to the end of each round; of a whole run; of a round whose
    # clients are estimated at so much
    count_round: Callable[[RoundRecord], float] | None = None
    count_ends: Callable[[History], list[float]] | None = None
    count_run: Callable[[History], float] | None = None
    count_estimates: "Callable[[Sequence[ClientCost]], float] | None" = None

    @property
    def label(self) -> str:
        """The heading within a sentence or a row of small headings."""
        return self.heading if self.heading.isupper() else self.heading.lower()

    @property
    def booked_fields(self) -> tuple[str, ...]:
        return self.fields or (self.name,)

    def of_round(self, record: RoundRecord) -> float:
        """What a round adds."""
        if self.count_round:
            return self.count_round(record)
        return sum(read_amount(record, field) for field in self.booked_fields)

    def of_client(self, spent: "ClientCost") -> float:
        """What one client's part of a round adds."""
        return sum(read_amount(spent, field) for field in self.booked_fields)

    def of_line(self, line: Mapping[str, Any]) -> float:
        """The same of a client's line in the ledger."""
        other = line.get("other") or {}
        amounts: list[float] = [line.get(f) or other.get(f, 0.0) for f in self.booked_fields]
        return sum(amounts)

    def of_run(self, history: History) -> float:
        """What all these rounds add up to."""
        if self.count_run:
            return self.count_run(history)
        return sum(self.of_round(record) for record in history)

    def of_estimates(self, estimates: "Sequence[ClientCost]") -> float:
        """What a round is expected to add, by the estimates of its clients."""
        if self.count_estimates:
            return self.count_estimates(estimates)
        return sum(self.of_client(spent) for spent in estimates)

    def accumulate(self, history: History) -> list[float]:
        """(rounds,) what was spent by the end of each round."""
        if self.count_ends:
            return self.count_ends(history)
        return list(accumulate(self.of_round(record) for record in history))

    def of_summary(self, summary: Mapping[str, Any]) -> float:
        """The same as `of_run`, of a summary; 0 where an earlier version did not book it."""
        return sum(summary.get(field) or 0 for field in self.booked_fields)

    def summarize(self, history: History) -> dict[str, float]:
        """Its entries of a run's summary."""
        if self.count_run:
            return {self.name: self.count_run(history)}
        names = (*self.booked_fields, *self.details)
        return {name: sum(read_amount(record, name) for record in history) for name in names}

    def choose_unit(self, largest: float) -> Unit:
        """The unit in which an amount of that size reads best."""
        return next((unit for unit in self.units if largest >= unit[0]), self.units[-1])

    def format_amount(self, amount: float, digits: str = ".4g") -> str:
        """An amount with its unit.

        >>> COSTS["bytes"].format_amount(2.5e6)
        '2.5 MB'
        """
        per, unit = self.choose_unit(amount)
        return f"{amount / per:{digits}} {unit or self.label}"


def count_committed(history: History) -> int:
    return sum(record.outcome == "committed" for record in history)


def sum_joules(estimates: "Sequence[ClientCost]") -> float:
    """With what clients draw while they wait for the slowest."""
    slowest = find_slowest(estimates)
    return sum(s.joules + s.idle_watts * (slowest - s.seconds) for s in estimates)


def find_slowest(estimates: "Sequence[ClientCost]") -> float:
    return max((spent.seconds for spent in estimates), default=0.0)


COSTS: dict[str, Cost] = {
    cost.name: cost
    for cost in (
        Cost(
            "rounds",
            "Rounds",
            digits=0,
            by_client=False,
            count_round=lambda record: int(record.outcome == "committed"),
            count_run=count_committed,
            count_estimates=lambda estimates: 1,
        ),
        Cost(
            "joules",
            "Energy",
            ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J")),
            digits=1,
            details=("joules_wasted", "joules_low", "joules_high", *BASIS_FIELDS),
            count_estimates=sum_joules,
        ),
        Cost(
            "bytes",
            "Traffic",
            ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")),
            fields=("bytes_up", "bytes_down"),
            details=("bytes_wasted", "bytes_framing", "bytes_evaluation"),
        ),
        Cost(
            "seconds",
            "Time",
            ((3600.0, "h"), (60.0, "min"), (1.0, "s")),
            by_client=False,  # clients work side by side
            count_ends=list_end_times,
            count_run=replay_clock,
            count_estimates=find_slowest,
        ),
        Cost(
            "grams",
            "CO2",
            ((1e3, "kg"), (1.0, "g"), (1e-3, "mg")),
            details=("grams_wasted",),
            optional=True,
        ),
        Cost(
            NETWORK_FIELD,
            "Network energy",
            ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J")),
            digits=1,
            optional=True,
        ),
    )
}


def add_cost_row(name: str) -> bool:
    """A plain row for an amount of `ClientCost.other` that has none; False where a field of records
    has the name, or it is malformed. Names that end in "_joules" are shown in joules.
    """
    if name in BASIS_FIELDS:  # parts of the joules, which have a row
        return True
    if name in RESERVED_NAMES or not COST_NAME.fullmatch(name):
        return False
    units = COSTS["joules"].units if name.endswith("_joules") else ((1.0, ""),)
    COSTS.setdefault(name, Cost(name, name.replace("_", " ").capitalize(), units, optional=True))
    return True


def list_spent_costs(totals: Callable[[Cost], float | None]) -> list[Cost]:
    """The costs worth a column: an optional one only where somebody spent any."""
    return [cost for cost in COSTS.values() if not cost.optional or totals(cost)]


def is_energy_known(history: History) -> bool:
    """Whether anybody measured or modelled the joules of these rounds. Training is never free, so
    a run of 0 J is one whose energy nobody knows.
    """
    return any(record.costs.joules or record.costs.measured for record in history)


def list_booked_amounts(record: RoundRecord) -> dict[str, float]:
    """Field -> amount of everything that a round booked, costs and their details."""
    costs = [cost for cost in COSTS.values() if cost.name != "rounds"]
    names = [name for cost in costs for name in (*cost.booked_fields, *cost.details)]
    return {name: read_amount(record, name) for name in names}
