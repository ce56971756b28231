"""The run's clock, in seconds: when its rounds began and ended."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from flrce.core.record import RoundRecord


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
    found: list[RoundRecord] = []
    for record in history:
        began = max(record.began, read_clock(found))
        found.append(record if began == record.began else replace(record, began=began))
    return tuple(found)
