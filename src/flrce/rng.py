"""Counter-based randomness: a pure function of (seed, purpose, round, client). There is no state to
save.
"""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from flrce_client.streams import make_stream as make_stream

# SplitMix64 (Steele et al. 2014)
GOLDEN, FIRST, SECOND = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class RoundStreams:
    """The generators from which pieces draw in one round; nothing has to be saved."""

    seed: int = 0
    t: int = 0
    attempt: int = 0  # abandoned tries at the round so far: each try draws anew

    def make_rng(self, purpose: str, client: str = "") -> Generator:
        """A generator that follows from seed, purpose, round and client alone."""
        tries = f"/{self.attempt}" if self.attempt else ""
        # the prefix keeps a piece's draws apart from those of flrce, such as "select"
        return make_stream(self.seed, f"piece/{purpose}{tries}", self.t, client)


FIRST_STREAMS = RoundStreams()  # of objects that were made outside a round


def draw_weighted(rng: Generator, weights: ArrayLike, count: int) -> list[int]:
    """`count` different positions, drawn in proportion to their weights; those of weight 0 only if
    no other is left.
    """
    p = np.asarray(weights, np.float64)
    first = min(count, int(np.count_nonzero(p)))
    picked = rng.choice(len(p), first, replace=False, p=p / p.sum()).tolist() if first else []
    rest = np.flatnonzero(p == 0)
    return [int(i) for i in [*picked, *rng.permutation(rest)[: count - first]]]


def hash_names(names: tuple[str, ...]) -> NDArray[np.uint64]:
    """A number for each name, the same on every machine."""
    digests = b"".join(blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def draw_uniforms(
    seed: int, purpose: str, ids: NDArray[np.uint64], t: ArrayLike = 0
) -> NDArray[np.float64]:
    """A number of [0, 1) for each id at once: `make_stream` for millions. t: one for all, or one
    for each.
    """
    key = int.from_bytes(blake2b(f"{seed}|{purpose}".encode(), digest_size=8).digest(), "little")
    steps = np.asarray(t).astype(np.int64).astype(np.uint64)
    mixed = _splitmix64(_splitmix64(ids ^ np.uint64(key)) + steps * np.uint64(GOLDEN))
    return (mixed >> np.uint64(11)).astype(np.float64) / 2**53


def _splitmix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output of each state; products wrap around."""
    z = z + np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    found: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return found
