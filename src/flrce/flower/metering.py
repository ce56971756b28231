"""What a client's work on this machine took; this needs no torch."""

import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from flrce.devices.energy import EnergyMeter, EnergyReading

T = TypeVar("T")
_meter_lock = threading.Lock()


@lru_cache(maxsize=1)
def _get_meter() -> EnergyMeter:
    return EnergyMeter()


def measure_cost(work: Callable[[], T]) -> tuple[T, EnergyReading]:
    """The work's result and cost; joules only where no other client works on this machine at the
    same time.
    """
    if not _meter_lock.acquire(blocking=False):
        start = time.monotonic()
        return work(), EnergyReading(time.monotonic() - start)
    try:
        return _get_meter().measure(work)
    finally:
        _meter_lock.release()
