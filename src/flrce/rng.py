"""Counter-based randomness: a pure function of (seed, purpose, round, client). There is no state to save."""

from hashlib import blake2b

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import ArrayLike


def stream(seed: int, purpose: str, t: int = 0, client: str = "") -> Generator:
    """An independent generator for one decision; the same arguments give the same draws on every machine."""
    key = blake2b(f"{seed}|{purpose}|{t}|{client}".encode(), digest_size=16).digest()
    return Generator(Philox(key=int.from_bytes(key, "little")))


def draw(rng: Generator, weights: ArrayLike, count: int) -> list[int]:
    """`count` different positions, drawn in proportion to their weights; those of weight 0 only if no other is left."""
    p = np.asarray(weights, np.float64)
    first = min(count, int(np.count_nonzero(p)))
    picked = rng.choice(len(p), first, replace=False, p=p / p.sum()).tolist() if first else []
    rest = np.flatnonzero(p == 0)
    return [int(i) for i in [*picked, *rng.permutation(rest)[: count - first]]]
