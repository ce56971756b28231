"""What this machine has to offer."""

import os
from pathlib import Path


def available() -> int | None:
    """Bytes that can still be had: what the system has left, or what its control group allows; None: unknown."""
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        found.append(max(int(text) - int(used.read_text()), 0))
    return min(found, default=None)
