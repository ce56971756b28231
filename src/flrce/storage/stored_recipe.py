"""RecordedRun: the settings, rounds, costs and relationship map of a run directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.config.compose import build_local_settings, compose_recipe
from flrce.config.recipe_names import complete_stored_table
from flrce.core.pieces import Recipe
from flrce.core.roles import ROLES, StopRule
from flrce.core.types import RoundRecord
from flrce.errors import BadInput
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.storage.recorded_rules import RULES_KEY, read_recorded_rules
from flrce.storage.summary import summarize_run

Int8Matrix = NDArray[np.int8]


@dataclass(frozen=True)
class RelationChange:
    """What one round changed in the relationship map."""

    t: int
    k: tuple[int, ...]
    H: tuple[float, ...]
    Omega: Int8Matrix | None  # (P, M) int8, value * 127; None for large fleets


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """One run directory."""

    folder: Path
    experiment: Mapping[str, Any]
    rounds: tuple[RoundRecord, ...]
    costs: tuple[Mapping[str, Any], ...]  # lines of clients.jsonl
    partition: Mapping[str, Any]
    relations: tuple[RelationChange, ...]
    extra: Mapping[str, Any]  # summary.json, if the run has one
    sealed: bool = False  # whether hashes of all files were checked
    # metrics of the final model by client and class
    final: Mapping[str, Any] = field(default_factory=dict)

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
    def committed_rounds(self) -> tuple[RoundRecord, ...]:
        return tuple(h for h in self.rounds if h.outcome == "committed")

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary, computed from the rounds, so that unfinished runs have one too."""
        keys = ("floats_on_the_wire", "parameters", "bytes_base")
        figures = summarize_run(self.rounds, *(self.extra.get(key, 0) for key in keys))
        machine = ("versions", "hardware")
        return figures | {key: self.extra[key] for key in machine if key in self.extra}

    @cached_property
    def roster(self) -> tuple[str, ...]:
        """Names of the clients by row. Clients that joined later are known from their rounds."""
        names = dict(enumerate(map(str, self.partition.get("clients", ()))))
        chosen = {h.t: h.chosen for h in self.committed_rounds}
        for relation in self.relations:
            names |= dict(zip(relation.k, chosen.get(relation.t, ()), strict=False))
        late = sorted({c for h in self.rounds for c in h.chosen} - set(names.values()))
        names |= {max(names, default=-1) + 1 + i: client for i, client in enumerate(late)}
        return tuple(names.get(k, f"row {k}") for k in range(max(names, default=-1) + 1))

    @cached_property
    def client_indices(self) -> dict[str, int]:
        return {client: k for k, client in enumerate(self.roster)}

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe of the run; None if it needs user code, which a reader must not import."""
        table = complete_stored_table(self.experiment.get("recipe", {}))
        return self._compose_recipe(table, self.experiment.get("train", {}))

    @cached_property
    def stop(self) -> StopRule | None:
        """The stop rule of the recipe; None if it needs user code. Other pieces may need some."""
        if self.recipe is not None:
            return self.recipe.stop
        table = complete_stored_table(self.experiment.get("recipe", {}))
        dropped = {*ROLES, "minimum"} - {"stop"}
        kept = {key: value for key, value in table.items() if key not in dropped}
        composed = self._compose_recipe(kept, {})
        return None if composed is None else composed.stop

    @cached_property
    def stop_rules(self) -> tuple[StopRule, ...]:
        """The single stop rules of the recipe; those of a user's own as the run recorded them."""
        if self.stop is not None:
            return self.stop.list_rules()
        return read_recorded_rules(self.extra.get(RULES_KEY))

    def _compose_recipe(self, table: Mapping[str, Any], train: Mapping[str, Any]) -> Recipe | None:
        """The recipe of these tables; None if they name user code."""
        if _names_user_code(table) or _names_user_code(train):
            return None
        try:
            local = {"P": self.P, "rounds": self.experiment.get("rounds")}
            local |= build_local_settings(train)
            return compose_recipe(table, local, self.experiment.get("stop", {}))
        except (BadInput, TypeError):  # of a version with another catalogue
            return None

    @cached_property
    def conflict_rule(self) -> UpdateConflicts | None:
        """The paper's stop rule among them."""
        return next((rule for rule in self.stop_rules if isinstance(rule, UpdateConflicts)), None)

    @property
    def psi(self) -> float | None:
        return None if self.conflict_rule is None else float(self.conflict_rule.psi)

    def count_conflicts(self, h: RoundRecord) -> float:
        """Conflicting clients in a round, as the run's stop rule counts them."""
        if self.conflict_rule is None:
            return h.diagnostics.conflicts
        return self.conflict_rule.get_conflicts(h)

    @cached_property
    def client_lines(self) -> tuple[tuple[Mapping[str, Any], ...], ...]:
        """For each record, the lines of clients.jsonl of its selected clients, in order.

        Lines of late replies and loss inquiries follow them. An abandoned round is repeated under
        the same number, so the names of a record's clients show where its lines begin.
        """
        lines, at = [], 0
        for h in self.rounds:
            names = list(h.chosen)
            while at < len(self.costs) and (
                self.costs[at]["t"] < h.t
                or [line["client"] for line in self.costs[at : at + len(names)]] != names
            ):
                at += 1
            lines.append(self.costs[at : at + len(names)])
            at += len(names)
        return tuple(lines)


def _names_user_code(value: Any) -> bool:
    """Whether a setting names code as "package.module:Class"."""
    if isinstance(value, str):
        return ":" in value
    if isinstance(value, Mapping):
        return any(map(_names_user_code, value.values()))
    return isinstance(value, list) and any(map(_names_user_code, value))
