"""The variant of training client batches on this device: timed once for each kind of workload, and
remembered.

Choices are kept in $FLRCE_CACHE/ways.json for the next process, and in ways.json of each run
directory, so that a run and its resumption use the same kernels and give the same bits.
"""

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flrce.core.c_compiler import get_cache_folder
from flrce.training.gpu.variants import Variant, parse_variant

VARIANTS_FILE = "ways.json"
MAX_CACHE_ENTRIES = 10_000  # a file with more entries starts anew
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
    """The variants chosen so far; those of a resumed run go before those of the file."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or get_cache_folder().parent / VARIANTS_FILE
        self.chosen: dict[str, Variant] = {}
        self.stored: dict[str, Variant] | None = None  # of the file, once it has been read

    def adopt_variants(self, variants: Mapping[str, Any]) -> None:
        """Use the variants that a run used before it was interrupted."""
        for key, name in variants.items():
            variant = parse_variant(name)
            if variant is not None:
                self.chosen.setdefault(str(key), variant)

    def find_variant(self, key: str) -> Variant | None:
        if self.stored is None:
            self.stored = _read_variants(self.file)
        if key not in self.chosen and key in self.stored:
            self.chosen[key] = self.stored[key]
        return self.chosen.get(key)

    def remember_variant(self, key: str, variant: Variant) -> Variant:
        """Remember a choice; of two processes that choose at once, both use the first choice."""
        known = _read_variants(self.file)
        variant = known.setdefault(key, variant)
        self.chosen[key] = variant
        self._write({key: variant} if len(known) > MAX_CACHE_ENTRIES else known)
        return variant

    def forget_variant(self, key: str) -> None:
        """Forget a choice that its network no longer supports."""
        self.chosen.pop(key, None)
        self._write({k: v for k, v in _read_variants(self.file).items() if k != key})
        self.stored = None

    def _write(self, variants: Mapping[str, Variant]) -> None:
        with suppress(OSError):  # without a file the variants are timed again next time
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.file.parent, prefix="ways-")
            with os.fdopen(handle, "w") as out:
                json.dump(dict(variants), out, indent=0)
            os.replace(temporary, self.file)


def load_variants(folder: Path) -> dict[str, str]:
    """The variants that the run in a folder used."""
    return {key: variant.value for key, variant in _read_variants(folder / VARIANTS_FILE).items()}


def save_variants(folder: Path, variants: Mapping[str, str]) -> None:
    """Keep them with a run, before the first round that used them is committed."""
    if variants and load_variants(folder) != dict(variants):
        temporary = folder / f"{VARIANTS_FILE}.new"
        temporary.unlink(missing_ok=True)  # whatever was left there, a link perhaps
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "w") as out:
            json.dump(dict(variants), out, indent=0)
        os.replace(temporary, folder / VARIANTS_FILE)


def _read_variants(file: Path) -> dict[str, Variant]:
    """Keys and variants of a file; names of removed variants are left out."""
    try:
        table = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    pairs = table.items() if isinstance(table, dict) else ()
    known = {key: parse_variant(name) for key, name in pairs}
    return {key: variant for key, variant in known.items() if variant is not None}


def find_fastest(
    timings: Mapping[Variant, Callable[[], float]],
) -> tuple[Variant, dict[Variant, float]]:
    """The variant whose call returns the fewest seconds, and the seconds of each. One that fails
    (memory, an operation that cannot be recorded) is out; if all fail, the plain loop is chosen.
    """
    seconds: dict[Variant, float] = {}
    for variant, measure in timings.items():
        try:
            seconds[variant] = measure()
        except Exception as why:  # torch, Triton and networks of the user's raise many kinds
            log.debug("%s: %s", variant, why)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return min(seconds, key=lambda v: seconds[v], default=Variant.LOOP), seconds


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


def describe_choice(
    variant: Variant, seconds: Mapping[Variant, float], lanes: int, net: nn.Module
) -> str:
    """One line about a choice."""
    name = type(net).__name__
    if variant is Variant.LOOP:
        return f"{name}: no variant of client batches works; clients train one after another"
    times = ", ".join(f"{v} {1e3 * s:.1f}" for v, s in seconds.items())
    return f"{name}, {lanes} clients at once: variant {variant} (ms for a few steps: {times})"
