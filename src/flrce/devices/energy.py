"""Measured energy through zeus: NVML (NVIDIA), AMD SMI, RAPL (Intel, AMD), Jetson and Apple.

zeus (extra `energy`) knows each counter's quirks: RAPL registers that wrap, GPUs without an energy
counter, Jetson rails of which only the total may be used. A meter of the user's own goes before it;
without zeus, RAPL, a Jetson's sensor and a discharging battery are read from /sys. Where a machine
has none of them, energy is None and `EnergyMeter.why` says so in one line; nothing is guessed from
a TDP.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any, TypeVar

from flrce.errors import format_install_command
from flrce_client.costs import read_energy_counters, subtract_counters
from flrce_client.meter import JoulesReader, PowerSampler, find_power_sensor, get_own_meter

T = TypeVar("T")
_meter_lock = threading.Lock()
NO_COUNTER_MESSAGE = (
    "energy is not measured: no counter here can be read (NVML, AMD SMI, Jetson; RAPL, which may"
    " need root)"
)


@dataclass(frozen=True)
class EnergyReading:
    """What one piece of work took: `joules` by counter, empty where there is none."""

    seconds: float
    counters: tuple[tuple[str, float], ...] = ()

    @property
    def joules(self) -> float | None:
        """All counters together; None: nothing was measured."""
        return sum(value for _, value in self.counters) if self.counters else None

    @property
    def watts(self) -> float | None:
        """Mean power."""
        return self.joules / self.seconds if self.joules is not None and self.seconds > 0 else None


class EnergyMeter:
    """The machine's energy counters, or a meter that returns joules; `why`: what is missing."""

    def __init__(self, read_joules: JoulesReader | None = None) -> None:
        self.own = read_joules or get_own_meter()
        self.seen: tuple[str, ...] = ("meter",) if self.own else ()
        self.monitor: Any = None
        self.why = ""
        if not self.own:
            self._open_machine_meter()

    def _open_machine_meter(self) -> None:
        """zeus's counters, or else what can be read without it."""
        self.monitor, self.why = _open_zeus_monitor()
        if self.monitor:
            self.seen = tuple(name for name, _ in self.measure(lambda: None)[1].counters)
            self.why = "" if self.seen else NO_COUNTER_MESSAGE
        if self.seen:
            return
        sensor = find_power_sensor()
        if read_energy_counters():
            self.own, self.seen = make_counter_reader(), ("cpu",)
        elif sensor:
            self.own, self.seen = PowerSampler(sensor[1]), (sensor[0],)
        if self.own:
            self.monitor, self.why = None, ""

    def measure(self, work: Callable[[], T]) -> tuple[T, EnergyReading]:
        """Do the work; its result and what it took. Counters count the whole machine."""
        torch = sys.modules.get("torch")
        wait = torch is not None and torch.cuda.is_available()  # for kernels under way
        if self.monitor:
            self.monitor.begin_window("work", sync_execution=wait)
        start = self.own() if self.own else 0.0
        began, window = perf_counter(), None
        try:
            result = work()
        except BaseException:
            if self.monitor:
                self.monitor.end_window("work", sync_execution=False, cancel=True)
            raise
        if self.own:
            joules = max(self.own() - start, 0.0)
            return result, EnergyReading(perf_counter() - began, ((self.seen[0], joules),))
        if self.monitor:
            window = self.monitor.end_window("work", sync_execution=wait)
        counters = extract_counters(window) if window else ()
        return result, EnergyReading(perf_counter() - began, counters)


@cache
def _get_meter() -> EnergyMeter:
    return EnergyMeter()


def measure_cost(work: Callable[[], T]) -> tuple[T, EnergyReading]:
    """The work's result and cost; joules only where no other client works on this machine at the
    same time.
    """
    if not _meter_lock.acquire(blocking=False):
        began = perf_counter()
        return work(), EnergyReading(perf_counter() - began)
    try:
        return _get_meter().measure(work)
    finally:
        _meter_lock.release()


def make_counter_reader() -> JoulesReader:
    """The processor's joules since now; its registers wrap, so that it is asked now and then."""
    last, joules = read_energy_counters(), 0.0

    def read_joules() -> float:
        nonlocal last, joules
        now = read_energy_counters()
        joules += subtract_counters(last, now) or 0.0
        last = now
        return joules

    return read_joules


def extract_counters(window: Any) -> tuple[tuple[str, float], ...]:
    """A zeus measurement as (counter, joules). A Jetson's total includes its rails."""
    counters = [(f"gpu {i}", float(joules)) for i, joules in (window.gpu_energy or {}).items()]
    counters += [(f"cpu {i}", float(joules)) for i, joules in (window.cpu_energy or {}).items()]
    counters += [(f"dram {i}", float(joules)) for i, joules in (window.dram_energy or {}).items()]
    soc = window.soc_energy
    total = getattr(soc, "total_energy_mj", None)
    if total is not None:
        return (("board", total / 1e3),)
    parts = ("cpu_total_mj", "gpu_mj", "gpu_sram_mj", "dram_mj", "ane_mj")
    values = [(name.removesuffix("_mj"), getattr(soc, name, None)) for name in parts]
    return (*counters, *((name, value / 1e3) for name, value in values if value is not None))


def _open_zeus_monitor() -> tuple[Any, str]:
    """(zeus's monitor, ""), or (None, why there is none)."""
    try:
        from zeus.monitor import ZeusMonitor
    except ImportError:
        remedy = format_install_command("energy")
        return None, f"energy is not measured: zeus is not installed; {remedy}"
    try:
        return ZeusMonitor(), ""
    except Exception as why:  # zeus raises a kind for each driver
        return None, f"energy is not measured: {' '.join(str(why).split())[:200]}"
