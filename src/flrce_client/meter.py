"""Meters of a device's energy: one of the user's own, or what Linux shows in /sys.

A meter is a function without arguments that returns the joules counted so far. A sensor that
measures power becomes one by `PowerSampler`.
"""

import importlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from flrce_client.power_supply import read_number, read_text

JoulesReader = Callable[[], float]
METER_VARIABLE = "FLRCE_METER"  # "module:function", or a file that holds the joules so far
MAX_FIGURE_CHARACTERS = 100
SYSTEM_FOLDER = Path("/sys")
_own: list[JoulesReader] = []


class PowerSampler:
    """The joules so far of a sensor that measures watts, asked every so many seconds."""

    def __init__(self, read_watts: Callable[[], float], every: float = 0.1) -> None:
        self.read_watts, self.every = read_watts, every
        self.joules, self.watts, self.at = 0.0, read_watts(), time.monotonic()
        self.lock = threading.Lock()
        threading.Thread(target=self._sample, name="power", daemon=True).start()

    def __call__(self) -> float:
        with self.lock:
            self._advance()
            return self.joules

    def _advance(self) -> None:
        """Adds the time since the last reading, at the mean of the two powers."""
        watts, now = self.read_watts(), time.monotonic()
        self.joules += (self.watts + watts) / 2 * (now - self.at)
        self.watts, self.at = watts, now

    def _sample(self) -> None:
        while True:
            time.sleep(self.every)
            with self.lock:
                self._advance()


def use_meter(read_joules: JoulesReader | None) -> None:
    """Measure clients' work on this machine by a meter; None: by the machine's own counters."""
    _own[:] = [] if read_joules is None else [read_joules]


def get_own_meter() -> JoulesReader | None:
    """The meter that was set, or that FLRCE_METER names; None: neither."""
    if not _own and os.environ.get(METER_VARIABLE):
        use_meter(open_meter(os.environ[METER_VARIABLE]))
    return _own[0] if _own else None


def open_meter(named: str) -> JoulesReader:
    """A meter by "module:function", or by the path of a file that holds the joules so far."""
    module, colon, function = named.partition(":")
    if colon and module.replace(".", "").replace("_", "").isalnum():
        reader: JoulesReader = getattr(importlib.import_module(module), function)
        return reader
    path = Path(named)
    _read_figure(path)  # a file that holds something else is an error at once
    return lambda: _read_figure(path)


def _read_figure(path: Path) -> float:
    """The number in a small regular file; a device or a pipe may have no end."""
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    with path.open() as file:
        return float(file.read(MAX_FIGURE_CHARACTERS))


def find_power_sensor(root: Path = SYSTEM_FOLDER) -> tuple[str, Callable[[], float]] | None:
    """(name, a function that reads watts) of a sensor on the board, or of a battery that is
    discharging.

    Written after the kernel's documentation and tried on files only: untested on hardware.
    """
    rails = sorted(root.glob("bus/i2c/drivers/ina3221x/*/iio:device*/in_power0_input"))
    if rails and read_number(rails[0]) is not None:  # Jetson before L4T 35: the whole board, mW
        return "board", partial(_read_watts, rails[:1], 1e-3)
    for sensor in sorted(root.glob("class/hwmon/hwmon*")):
        files = [sensor / "in1_input", sensor / "curr1_input"]  # mV, mA
        if read_text(sensor / "name") == "ina3221" and read_number(files[0]) is not None:
            return "board", partial(_read_watts, files, 1e-6)
    for supply in sorted(root.glob("class/power_supply/*")):
        if read_text(supply / "status").lower() != "discharging":
            continue
        if read_number(supply / "power_now") is not None:  # uW
            return "battery", partial(_read_watts, [supply / "power_now"], 1e-6)
        files = [supply / "voltage_now", supply / "current_now"]  # uV, uA
        if read_number(files[1]) is not None:
            return "battery", partial(_read_watts, files, 1e-12)
    return None


def _read_watts(files: Sequence[Path], scale: float) -> float:
    """The product of the numbers in these files; a discharging current may be below 0."""
    return abs(math.prod(read_number(file) or 0.0 for file in files)) * scale
