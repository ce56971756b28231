"""A run as its folder tells it: settings, rounds, costs, the map, and what follows from them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.compose import compose, local_of
from flrce.errors import BadInput
from flrce.pieces import Recipe
from flrce.stops.conflict import Conflicts
from flrce.store.summary import summarise
from flrce.types import Record, Spent

Matrix = NDArray[np.int8]


@dataclass(frozen=True)
class Relation:
    """What one round changed in the relationship map."""

    t: int
    k: tuple[int, ...]
    H: tuple[float, ...]
    Omega: Matrix | None  # (P, M) int8, value * 127; None for fleets too large to keep it


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory."""

    folder: Path
    experiment: Mapping[str, Any]
    rounds: tuple[Record, ...]
    costs: tuple[Mapping[str, Any], ...]  # lines of clients.jsonl
    partition: Mapping[str, Any]
    relations: tuple[Relation, ...]
    extra: Mapping[str, Any]  # summary.json, where the run got as far as writing one
    sealed: bool = False  # whether its files are known to be as they were written
    final: Mapping[str, Any] = field(default_factory=dict)  # how good its model is for each client and each class

    @property
    def name(self) -> str:
        return str(self.experiment.get("recipe", {}).get("name", "flrce"))

    @property
    def seed(self) -> int:
        return int(self.experiment.get("seed", 0))

    @property
    def P(self) -> int:
        return int(self.experiment.get("per_round", 10))

    @cached_property
    def done(self) -> tuple[Record, ...]:
        """Committed rounds."""
        return tuple(h for h in self.rounds if h.outcome == "committed")

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Final figures from the rounds themselves, so that an unfinished run has them too."""
        sizes = [self.extra.get(key, 0) for key in ("floats_on_the_wire", "parameters", "bytes_base")]
        figures = summarise(self.rounds, *sizes)
        return figures | {key: self.extra[key] for key in ("versions", "hardware") if key in self.extra}

    @cached_property
    def roster(self) -> tuple[str, ...]:
        """Row -> client. Clients that joined later are known from the rounds that chose them."""
        names = dict(enumerate(map(str, self.partition.get("clients", ()))))
        chosen = {h.t: h.chosen for h in self.done}
        for relation in self.relations:
            names |= dict(zip(relation.k, chosen.get(relation.t, ()), strict=False))
        known = set(names.values())
        late = sorted({c for h in self.rounds for c in h.chosen} - known)
        names |= {max(names, default=-1) + 1 + i: client for i, client in enumerate(late)}
        return tuple(names.get(k, f"row {k}") for k in range(max(names, default=-1) + 1))

    @cached_property
    def row(self) -> dict[str, int]:
        return {client: k for k, client in enumerate(self.roster)}

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe as it was run; None where it needs code that is not ours, which reading a folder must not load."""
        table = self.experiment.get("recipe", {})
        if _foreign(table) or _foreign(self.experiment.get("train", {})):
            return None
        try:
            local = {"P": self.P, **local_of(self.experiment.get("train", {}))}
            return compose(table, local, self.experiment.get("stop", {}))
        except (BadInput, TypeError):  # written by a version with another catalogue
            return None

    @cached_property
    def rules(self) -> tuple[Any, ...]:
        """The stop rules that the run was under."""
        return tuple(_rules(self.recipe.stop)) if self.recipe else ()

    @cached_property
    def rule(self) -> Conflicts | None:
        """The conflict rule among them."""
        return next((rule for rule in self.rules if isinstance(rule, Conflicts)), None)

    @property
    def psi(self) -> float | None:
        return None if self.rule is None else float(self.rule.psi)

    def conflicts(self, h: Record) -> float:
        """Conflicting peers as the run's rule counts them."""
        return h.conflicts if self.rule is None else self.rule.count(h)

    @cached_property
    def parts(self) -> tuple[tuple[Mapping[str, Any], ...], ...]:
        """Each record's own lines of clients.jsonl: one per chosen client, in order.

        Replies that nobody waited for and questions for losses follow them; an abandoned round is tried again under the
        same number, so the next record's clients say where its lines begin.
        """
        found, at = [], 0
        for h in self.rounds:
            names = list(h.chosen)
            while at < len(self.costs) and (
                self.costs[at]["t"] < h.t or [line["client"] for line in self.costs[at : at + len(names)]] != names
            ):
                at += 1
            found.append(self.costs[at : at + len(names)])
            at += len(names)
        return tuple(found)

    def spent(self, i: int) -> list[Spent]:
        """What every client's part of record i cost, its wait for the round's end included."""
        names = {f.name for f in fields(Spent)} - {"idle_watts"}
        return [Spent(**{key: line[key] for key in names & set(line)}) for line in self.parts[i]]


def _foreign(value: Any) -> bool:
    """Whether a setting names code as "package.module:Class"."""
    if isinstance(value, str):
        return ":" in value
    if isinstance(value, Mapping):
        return any(map(_foreign, value.values()))
    return isinstance(value, list) and any(map(_foreign, value))


def _rules(stop: Any) -> Iterator[Any]:
    """A stop rule and those inside it."""
    yield stop
    for f in fields(stop):
        inner = getattr(stop, f.name)
        for each in inner if isinstance(inner, tuple) else (inner,):
            if hasattr(each, "__dataclass_fields__"):
                yield from _rules(each)
