"""Which way to train lanes on this device: measured once for each kind of work, and remembered.

What was chosen is kept in $FLRCE_CACHE/ways.json for the next process, and with each run (ways.json
in its folder), so that a run and its resume go the same way: other kernels, other last bits.
"""

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flrce.core.c_compiler import get_cache_folder
from flrce.errors import BadInput
from flrce.training.gpu.variants import Variant

VARIANTS_FILE = "ways.json"
PLAIN_LOOP = "loop"  # torch's trainer, one client after another
MAX_CACHE_ENTRIES = 10_000  # entries of the file; beyond, it starts anew
log = logging.getLogger("flrce")


@dataclass(frozen=True)
class Workload:
    """What a choice depends on, beside the device and torch's version."""

    network: str
    lanes: int
    batch: int
    precision: str
    update: str

    def to_cache_key(self, device: str) -> str:
        where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        text = "|".join(map(str, (where, torch.__version__, *vars(self).values())))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def hash_network_structure(net: nn.Module) -> str:
    """A name for all networks of this structure."""
    tensors = [(name, tuple(p.shape), p.requires_grad) for name, p in net.named_parameters()]
    return hashlib.sha256(f"{net!r} {tensors}".encode()).hexdigest()[:16]


class VariantCache:
    """The ways chosen so far: those a resumed run brings go before those of the file."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or get_cache_folder().parent / VARIANTS_FILE
        self.fixed: dict[str, str] = {}

    def adopt_variants(self, chosen: Mapping[str, Any]) -> None:
        """What a run went by before it was interrupted."""
        for key, way in chosen.items():
            if isinstance(way, str) and (way == PLAIN_LOOP or _is_variant_name(way)):
                self.fixed.setdefault(str(key), way)

    def find_variant(self, key: str) -> str | None:
        if key not in self.fixed:
            found = self._read().get(key)
            if found is None:
                return None
            self.fixed[key] = found
        return self.fixed[key]

    def remember_variant(self, key: str, way: str) -> str:
        """Remember a choice; of two processes that chose at once, both go by the first."""
        known = self._read()
        way = known.setdefault(key, way)
        self.fixed[key] = way
        self._write({key: way} if len(known) > MAX_CACHE_ENTRIES else known)
        return way

    def forget_variant(self, key: str) -> None:
        """Forget a choice that cannot be gone any more."""
        self.fixed.pop(key, None)
        self._write({k: way for k, way in self._read().items() if k != key})

    def _write(self, known: Mapping[str, str]) -> None:
        with suppress(OSError):  # without a cache it is measured again next time
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.file.parent, prefix="ways-")
            with os.fdopen(handle, "w") as out:
                json.dump(dict(known), out, indent=0)
            os.replace(temporary, self.file)

    def _read(self) -> dict[str, str]:
        return _read_variants(self.file)


def load_variants(folder: Path) -> dict[str, str]:
    """The ways that the run in a folder went before."""
    return _read_variants(folder / VARIANTS_FILE)


def save_variants(folder: Path, ways: Mapping[str, str]) -> None:
    """Keep them with a run, before the round that went them is committed."""
    if ways and load_variants(folder) != dict(ways):
        temporary = folder / f"{VARIANTS_FILE}.new"
        temporary.unlink(missing_ok=True)  # whatever was left there, a link perhaps
        handle = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )  # its owner's alone
        with os.fdopen(handle, "w") as out:
            json.dump(dict(ways), out, indent=0)
        os.replace(temporary, folder / VARIANTS_FILE)


def _read_variants(file: Path) -> dict[str, str]:
    """Keys and ways of a file; nothing where there is none such."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {
        k: v for k, v in pairs if isinstance(v, str) and (v == PLAIN_LOOP or _is_variant_name(v))
    }


def _is_variant_name(way: str) -> bool:
    try:
        Variant.from_text(way)
    except BadInput:
        return False
    return True


def find_fastest(tries: Sequence[tuple[str, Callable[[], float]]]) -> tuple[str, dict[str, float]]:
    """The name whose call says the fewest seconds; what fails (memory, an operation that cannot be
    recorded) is out.
    """
    found: dict[str, float] = {}
    for name, seconds in tries:
        try:
            found[name] = seconds()
        except Exception as why:  # torch, Triton and networks of the user's raise many kinds
            log.debug("%s: %s", name, why)
            found[name] = math.inf
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    best = min(found, key=lambda name: found[name])
    if found[best] == math.inf:
        return PLAIN_LOOP, found
    return best, found


def measure_seconds(call: Callable[[], object], device: str, repeats: int = 2) -> float:
    """The fewest seconds of a few calls, the device's queue empty before and after."""
    best = math.inf
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def describe_choice(best: str, found: Mapping[str, float], lanes: int, network: str) -> str:
    """One line about a choice."""
    usual = found.get(PLAIN_LOOP, math.inf)
    others = ", ".join(
        f"{name} {1e3 * s:.1f}"
        for name, s in sorted(found.items(), key=lambda x: x[1])
        if s < math.inf
    )
    gain = (
        f", {usual / found[best]:.1f} times a plain loop"
        if best != PLAIN_LOOP and usual < math.inf
        else ""
    )
    return (
        f"{network}, {lanes} clients at once: trained by {best}{gain} (ms for the same few steps:"
        f" {others})"
    )
