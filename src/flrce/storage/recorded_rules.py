"""What a stop rule of the user's own saw, as its run recorded it: readers of a run directory import
no user code.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flrce.core.roles import StopCourse, StopRule
from flrce.core.types import RoundRecord
from flrce.errors import format_one_line

RULES_KEY = "stop_rules"  # of summary.json
MAX_TEXT = 1000  # characters of an explanation
log = logging.getLogger("flrce")
_COURSE = TypeAdapter(StopCourse)


@dataclass(frozen=True)
class RecordedRule(StopRule):
    """A rule as the run recorded it at its end."""

    piece: str
    explanation: str = ""
    course: StopCourse | None = None

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        return ""

    def explain(self, history: Sequence[RoundRecord]) -> str:
        return self.explanation

    def trace(self, history: Sequence[RoundRecord]) -> StopCourse | None:
        return self.course


def record_rules(stop: StopRule, history: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """What the single rules of a stop say at the end of a run; [] where all are of flrce, so that a
    reader can ask them.
    """
    rules = stop.list_rules()
    if all(type(rule).__module__.partition(".")[0] == "flrce" for rule in (stop, *rules)):
        return []
    committed = [record for record in history if record.outcome == "committed"]
    return [_record_rule(rule, committed) for rule in rules]


def _record_rule(rule: StopRule, history: Sequence[RoundRecord]) -> dict[str, Any]:
    recorded: dict[str, Any] = {"piece": rule.piece}
    try:
        if text := rule.explain(history):
            recorded["explanation"] = format_one_line(text, MAX_TEXT)
        if (course := rule.trace(history)) is not None:
            recorded["course"] = asdict(_COURSE.validate_python(asdict(course)))
    except Exception as why:  # code of the user's: the run is over and must not be lost
        log.warning("stop rule %s is not explained: %s", rule.piece, format_one_line(why, 200))
    return recorded


def read_recorded_rules(rows: Any) -> tuple[RecordedRule, ...]:
    """The rules in a summary; those that are malformed are left out."""
    rules = (_read_rule(row) for row in rows) if isinstance(rows, list) else ()
    return tuple(rule for rule in rules if rule is not None)


def _read_rule(row: Any) -> RecordedRule | None:
    try:
        course = None if row.get("course") is None else _COURSE.validate_python(row["course"])
        text = format_one_line(row.get("explanation", ""), MAX_TEXT)
        return RecordedRule(format_one_line(row["piece"], 60), text, course)
    except (AttributeError, KeyError, ValidationError):
        return None
