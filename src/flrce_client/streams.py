"""Counter-based randomness: both sides draw alike from (seed, purpose, round, client)."""

from hashlib import blake2b

from numpy.random import Generator, Philox


def make_stream(seed: int, purpose: str, t: int = 0, client: str = "") -> Generator:
    """An independent generator for one decision; the same arguments give the same draws on every
    machine.
    """
    key = blake2b(f"{seed}|{purpose}|{t}|{client}".encode(), digest_size=16).digest()
    return Generator(Philox(key=int.from_bytes(key, "little")))


def make_encoding_stream(seed: int, t: int, client: str) -> Generator:
    """The randomness of an upload."""
    return make_stream(seed, "encode", t, client)


def make_download_stream(seed: int, t: int, client: str = "") -> Generator:
    """The randomness of a download, alike on both sides; without a client: of one for all."""
    return make_stream(seed, "downlink", t, client)
