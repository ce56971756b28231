"""How much memory a run will want, known before any of it is taken."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flrce.errors import BadInput
from flrce.pieces import Recipe

ROUND = 8  # copies of a round's updates that are alive at once: payloads, rows, float64 sums, the rows' file


def tables(recipe: Recipe, M: int, d: int, D: int) -> dict[str, int]:
    """Bytes of every table the pieces will keep, by "role.field"; only shapes are computed."""
    try:
        with torch.device("meta"):
            memory = recipe.init(M, d, D)
    except RuntimeError:  # a piece that computes while it makes its tables: no estimate
        return {}
    return {f"{role}.{f.name}": _bytes(getattr(kept, f.name)) for role, kept in memory.items() for f in fields(kept)}


def needed(recipe: Recipe, M: int, d: int, D: int) -> int:
    """Bytes a server needs for M clients and a model of D floats, d of them trained."""
    return sum(tables(recipe, M, d, D).values()) + 4 * D * (ROUND * min(recipe.P, M) + 4)


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


def preflight(recipe: Recipe, M: int, d: int, D: int) -> None:
    """BadInput naming the figures if the tables cannot fit; a run is never killed for memory later."""
    want, have = needed(recipe, M, d, D), available()
    if have is None or want <= have:
        return
    parts = sorted(tables(recipe, M, d, D).items(), key=lambda item: -item[1])[:2]
    largest = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in parts if size)
    raise BadInput(
        f"{M} clients and {d} trained floats need {want / 1e9:.1f} GB ({largest or 'updates'}), "
        f"but {have / 1e9:.1f} GB are available; lower clients, take a smaller model, or a recipe without a "
        "relationship map such as fedavg"
    )


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value.values())) if isinstance(value, dict) else 0
