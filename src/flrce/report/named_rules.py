"""Stop rules that a command line names: pieces, classes of the user, limits of figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flrce.config.compose import build_piece
from flrce.core.bounds import format_value
from flrce.core.cost_table import COSTS
from flrce.core.files import parse_toml
from flrce.core.roles import StopRule
from flrce.core.types import RoundRecord
from flrce.errors import BadInput, suggest_name
from flrce.methods.stopping.budget import CostBudget, CostLimit


@dataclass(frozen=True)
class FigureLimit(StopRule):
    """Stop in the round in which a figure of a piece reaches a limit; before that round where the
    piece also reports `<figure>_next`, what it would be after one more.
    """

    figure: str
    limit: float

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        figures = history[-1].figures if history else {}
        value, after = figures.get(self.figure), figures.get(f"{self.figure}_next")
        if value is not None and value >= self.limit:
            return f"{self.figure} reached {self.limit:g} ({value:.6g})"
        if after is not None and after > self.limit:
            return f"{self.figure} would pass {self.limit:g} in the next round ({after:.6g})"
        return ""


def build_named_pieces(role: str, names: Sequence[str]) -> dict[str, Any]:
    """Each name as a piece: "patience", "mine:Enough", or { piece = "mine:Enough", ... }."""
    return {name: build_piece(role, _parse_name(role, name), "whatif") for name in names}


def _parse_name(role: str, name: str) -> Any:
    if not name.lstrip().startswith("{"):
        return name.strip()
    try:
        return parse_toml(f"{role} = {name}")[role]
    except ValueError as why:
        raise BadInput(
            f"--{role} {format_value(name)}: {why}; give a name, or a table such as"
            " '{ piece = \"mine:Enough\", rounds = 5 }'"
        ) from None


def build_limits(text: str | None, figures: Sequence[str]) -> dict[str, StopRule]:
    """NAME=VALUE,... as rules: a cost, or a figure that pieces of the run reported."""
    rules: dict[str, StopRule] = {}
    for part in text.split(",") if text else ():
        name, _, value = (piece.strip() for piece in part.partition("="))
        rules[f"{value} {name}"] = _build_limit(name, _parse_limit(part, value), figures)
    return rules


def _parse_limit(part: str, value: str) -> float:
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise BadInput(
            f"--budget {part!r}: give NAME=VALUE with a number above 0, such as joules=50"
        )
    return limit


def _build_limit(name: str, limit: float, figures: Sequence[str]) -> StopRule:
    if name == "rounds":
        return CostBudget(rounds=max(int(limit), 1))
    if name in COSTS:
        return CostLimit(name, limit)
    if name in figures:
        return FigureLimit(name, limit)
    raise BadInput(f"--budget {name}: {suggest_name(name, (*COSTS, *figures))}")


def list_recorded_figures(rounds: Sequence[RoundRecord]) -> list[str]:
    """Names of the figures that pieces reported."""
    tables: list[Mapping[str, float]] = [record.figures for record in rounds]
    return list(dict.fromkeys(name for table in tables for name in table))
