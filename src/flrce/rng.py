"""Counter-based randomness: a pure function of (seed, purpose, round, client). There is no state to save."""

from hashlib import blake2b

from numpy.random import Generator, Philox


def stream(seed: int, purpose: str, t: int = 0, client: str = "") -> Generator:
    """An independent generator for one decision; the same arguments give the same draws on every machine."""
    key = blake2b(f"{seed}|{purpose}|{t}|{client}".encode(), digest_size=16).digest()
    return Generator(Philox(key=int.from_bytes(key, "little")))
