"""What a stop rule compared at each evaluation, and what a point would have cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flrce.core.cost_table import COSTS
from flrce.core.metric_format import format_metric_name
from flrce.core.roles import StopCourse
from flrce.methods.stopping.marginal_gain import MarginalGain, metric_scale
from flrce.storage.read import RecordedRun

GAIN = "gain"  # the course of a rule that compares a predicted gain with a price


def list_courses(run: RecordedRun) -> list[StopCourse]:
    """What every rule of the run compared over its rounds."""
    courses = (rule.trace(run.committed_rounds) for rule in run.stop_rules)
    return [course for course in courses if course is not None and course.rounds]


def find_course(run: RecordedRun, name: str) -> StopCourse | None:
    return next((course for course in list_courses(run) if course.name == name), None)


def sum_cost_until(run: RecordedRun, t: int) -> tuple[float, float]:
    """Joules and bytes of the rounds up to t: what as many again cost."""
    until = [h for h in run.rounds if h.t <= t]
    return COSTS["joules"].of_run(until), float(COSTS["bytes"].of_run(until))


@dataclass(frozen=True)
class PointPrice:
    """Estimated cost of a point: as many rounds again, over the upper end of their gain."""

    t: int
    gain: float  # points
    joules: float | None  # a point; None: no gain is predicted
    bytes: float | None
    most: float  # joules a point, above which the rule's price is not met

    def describe(self) -> str:
        return "no predicted gain" if self.joules is None else f"{self.joules:,.3g} J"


def compute_point_prices(run: RecordedRun) -> list[PointPrice]:
    """By look, with the run's own rule or the usual price."""
    course = find_course(run, GAIN) or MarginalGain().trace(run.committed_rounds)
    scale, prices = metric_scale(run.committed_rounds), []
    per_unit = 1 / scale.to_unit(1.0)
    columns = (course.rounds, course.values, course.limits) if course else ((), (), ())
    for t, value, limit in zip(*columns, strict=True):
        joules, nbytes = sum_cost_until(run, t)
        gain, price = value * per_unit, limit * per_unit
        point, load = (joules / gain, nbytes / gain) if gain > 0 else (None, None)
        prices.append(PointPrice(t, gain, point, load, joules / price))
    return prices


def thin_prices(found: Sequence[PointPrice]) -> list[PointPrice]:
    """The last look of every half doubling of rounds."""
    last = {math.floor(2 * math.log2(price.t)): price for price in found}
    return list(last.values())


def build_price_chart(run: RecordedRun) -> dict[str, Any]:
    """For the report's chart of what a point costs, and may cost where the run had a price."""
    prices, scale = compute_point_prices(run), metric_scale(run.committed_rounds)
    priced = find_course(run, GAIN) is not None
    per = f"per {scale.format_amount(1.0)} of {format_metric_name(scale.metric)}"
    return {
        "looks": [p.t for p in prices],
        "per": "a point" if scale.in_points else per,
        "gain": [_round_digits(p.gain) for p in prices],
        "joules": [_round_digits(p.joules) for p in prices],
        "bytes": [_round_digits(p.bytes) for p in prices],
        "most": [_round_digits(p.most) if priced else None for p in prices],
    }


def _round_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def build_course_chart(run: RecordedRun) -> dict[str, Any]:
    """For the report's chart of what the stop rule compares: by look, its value and its limit.

    Headway has a chart of its own.
    """
    courses = [course for course in list_courses(run) if course.name != "headway"]
    course = courses[0] if courses else StopCourse("", "", "", "", (), (), ())
    return {
        "looks": list(course.rounds),
        "value": [_round_digits(value) for value in course.values],
        "limit": [_round_digits(limit) for limit in course.limits],
        "name": course.name,
        "title": course.title,
        "limit_name": course.limit_name,
        "unit": course.unit,
    }
