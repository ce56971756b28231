"""What a piece of work took: seconds by the clock, joules by a meter of one's own or by the
processor's counters (RAPL).
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flrce_client.meter import get_own_meter

T = TypeVar("T")
POWERCAP_FOLDER = Path("/sys/class/powercap")
MICROJOULES = 1e-6
_meter_lock = threading.Lock()


@dataclass(frozen=True)
class WorkCost:
    """Seconds, and joules where the machine counts them."""

    seconds: float
    joules: float | None = None


def read_energy_counters(root: Path = POWERCAP_FOLDER) -> dict[str, tuple[int, int]]:
    """Processor package -> (microjoules so far, where the counter wraps); {} where none can be
    read, as on most boards, and without the right to.
    """
    counters = {}
    try:
        zones = sorted(root.glob("intel-rapl:*"))  # AMD's too
    except OSError:
        return {}
    for zone in zones:
        if zone.name.count(":") != 1:
            continue  # a part of a package, which counts it already
        try:
            energy, wrap = (
                int((zone / name).read_text()) for name in ("energy_uj", "max_energy_range_uj")
            )
        except (OSError, ValueError):
            continue
        counters[zone.name] = (energy, wrap)
    return counters


def subtract_counters(
    before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]
) -> float | None:
    """Joules between two readings; None where there are none. A counter that wrapped once is
    right.
    """
    if not before or before.keys() != after.keys():
        return None
    spent = [(after[name][0] - start) % max(wrap, 1) for name, (start, wrap) in before.items()]
    return sum(spent) * MICROJOULES


def measure_work(work: Callable[[], T], root: Path = POWERCAP_FOLDER) -> tuple[T, WorkCost]:
    """The work's result and cost; joules only where no other client works on this machine at the
    same time.
    """
    alone = _meter_lock.acquire(blocking=False)
    try:
        own = get_own_meter() if alone else None
        before = read_energy_counters(root) if alone and own is None else {}
        start = own() if own else 0.0
        began = time.monotonic()
        result = work()
        seconds = time.monotonic() - began
        joules = subtract_counters(before, read_energy_counters(root)) if before else None
        return result, WorkCost(seconds, max(own() - start, 0.0) if own else joules)
    finally:
        if alone:
            _meter_lock.release()
