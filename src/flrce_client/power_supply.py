"""What this device's own battery holds, as Linux and Android tell it in /sys/class/power_supply."""

from pathlib import Path

POWER_SUPPLY_FOLDER = Path("/sys/class/power_supply")


def read_battery_level(root: Path = POWER_SUPPLY_FOLDER) -> float | None:
    """From 0 to 1 over all system batteries, larger ones for more; None: there is none, or it
    cannot be read.
    """
    batteries: list[tuple[float, float]] = []  # share, size
    try:
        supplies = sorted(root.iterdir())
    except OSError:
        return None
    for supply in supplies:
        if (
            read_text(supply / "type").lower() != "battery"
            or read_text(supply / "scope").lower() == "device"
        ):
            continue  # mains, or the battery of a mouse
        share = read_number(supply / "capacity")
        size = read_number(supply / "energy_full") or read_number(supply / "charge_full") or 1.0
        if share is not None and 0 <= share <= 100:
            batteries.append((share / 100, size))
    total = sum(size for _, size in batteries)
    return sum(share * size for share, size in batteries) / total if total else None


def get_battery_metric(root: Path = POWER_SUPPLY_FOLDER) -> dict[str, float]:
    """The battery as a metric of a reply; nothing where nobody can tell."""
    level = read_battery_level(root)
    return {} if level is None else {"battery": level}


def read_text(path: Path) -> str:
    """A file's text; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> float | None:
    """The number in a file; None where there is none."""
    try:
        return float(read_text(path))
    except ValueError:
        return None
