"""Seed the generators that a network's own code may use: torch's, Python's and numpy's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
import torch

RNG_LOCK = RLock()  # each is one for the whole process: whoever seeds them has them to himself


def get_rng_states(device: torch.device) -> tuple[Any, ...]:
    """What changes when anybody draws. Code that runs on a GPU may draw on the host, too."""
    there = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0)
    numpy: Any = np.random.get_state(legacy=False)
    inner_state = numpy["state"]
    inner: Any = repr(inner_state)
    if "key" in inner_state:
        inner = (inner_state["key"].tobytes(), inner_state["pos"])
    host = torch.get_rng_state()
    return there.numpy().tobytes(), host.numpy().tobytes(), random.getstate(), inner


@contextmanager
def use_seed(seed: int, device: torch.device) -> Iterator[None]:
    """All of them drawn from the seed; afterwards each goes on where it was."""
    with preserve_rng_states(device):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield


@contextmanager
def preserve_rng_states(device: torch.device) -> Iterator[None]:
    """Whatever is drawn within, afterwards each goes on where it was."""
    with RNG_LOCK, torch.random.fork_rng([device] if device.type == "cuda" else []):
        before = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
