"""Samples shared out among clients, each with a hold-out of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.data.partition import NATURAL_SCHEMES, name_group, partition_samples
from flrce.data.sources import Source
from flrce.data.trouble import FleetTrouble, PartitionedData, apply_trouble
from flrce.errors import BadInput
from flrce.rng import make_stream

IndexArray = NDArray[np.int64]
NO_TROUBLE = FleetTrouble()


@lru_cache(maxsize=2)
def to_tensors(source: Source) -> tuple[Tensor, Tensor]:
    """x and y in memory, once for all federations of a source (which may be a read-only map)."""
    return torch.from_numpy(np.array(source.x)), torch.from_numpy(np.array(source.y))


@dataclass(frozen=True, eq=False)
class Federation:
    """One pool of samples; clients hold indices into it, so nothing is copied."""

    source: Source
    clients: tuple[str, ...]
    train: tuple[IndexArray, ...]
    held: tuple[IndexArray, ...]
    trouble: FleetTrouble = NO_TROUBLE

    def get_client_samples(self, client: str, t: int) -> IndexArray:
        """What a client trains on in round t: the same in every round unless its data drift."""
        own, drift = self.train[self.client_indices[client]], self.trouble.drifting.get(client)
        return own if drift is None else drift.select_window(own, self.source.y, t)

    @property
    def x(self) -> Tensor:
        return to_tensors(self.source)[0]

    @property
    def y(self) -> Tensor:
        return to_tensors(self.source)[1]

    @cached_property
    def client_indices(self) -> dict[str, int]:
        return {client: k for k, client in enumerate(self.clients)}

    @cached_property
    def n(self) -> IndexArray:
        """(M,) training samples."""
        if self.trouble.drifting:
            return np.array([len(self.get_client_samples(client, 1)) for client in self.clients])
        return np.array([len(part) for part in self.train])

    @cached_property
    def holdout_index(self) -> tuple[IndexArray, IndexArray]:
        """All hold-outs in one pass: sample indices, and the row of the client each belongs to."""
        rows = np.repeat(np.arange(len(self.clients)), [len(part) for part in self.held])
        return np.concatenate([*self.held, np.empty(0, np.int64)]).astype(np.int64), rows

    def describe(self) -> dict[str, Any]:
        """Sizes per client and, of classes, label histograms, for the run directory."""
        source, labels = self.source, len(self.source.classes)
        described: dict[str, Any] = {
            "data": source.name,
            "digest": _hash_samples(source),
            "classes": list(source.classes),
            "clients": list(self.clients),
            "train": [len(part) for part in self.train],
            "held": [len(part) for part in self.held],
        }
        if source.kind == "classes":
            counts = [np.bincount(source.y[part], minlength=labels) for part in self.train]
            described["labels"] = [row.tolist() for row in counts]
        else:
            described["kind"] = source.kind
        if self.trouble.who:
            described["trouble"] = {kind: list(who) for kind, who in self.trouble.who.items()}
        return described


def federate(
    source: Source,
    scheme: str,
    M: int,
    seed: int,
    alpha: float = 0.1,
    holdout: float = 0.3,
    minimum: int = 5,
    trouble: Sequence[Any] = (),
) -> Federation:
    """Share the samples out, then hold some of each client's back; at least two stay to train on.

    A source with a test split of its own keeps it, and `holdout` does not count. `trouble` is what
    is then made wrong.
    """
    if trouble:
        return _federate_with_trouble(
            source, scheme, M, seed, alpha, holdout, minimum, tuple(trouble)
        )
    parts = partition_samples(source, scheme, M, alpha, minimum, make_stream(seed, "partition"))
    names = [str(k) for k in range(M)]
    if scheme in NATURAL_SCHEMES:
        assert source.group is not None
        names = [name_group(source, int(source.group[part[0]])) for part in parts]
    if source.held is None:
        cuts = [min(round(holdout * len(part)), max(len(part) - 2, 0)) for part in parts]
        train = tuple(np.sort(part[cut:]) for part, cut in zip(parts, cuts, strict=True))
        held = tuple(np.sort(part[:cut]) for part, cut in zip(parts, cuts, strict=True))
    else:
        train = tuple(np.sort(part[~source.held[part]]) for part in parts)
        held = tuple(np.sort(part[source.held[part]]) for part in parts)
        _require_training_samples(source, names, train)
    return Federation(source, tuple(names), train, held)


@lru_cache(maxsize=2)
def _federate_with_trouble(source: Source, *how: Any) -> Federation:
    """Cached, so that runs which share a troubled fleet share its samples in memory too."""
    *settings, trouble = how
    clean = federate(source, *settings)
    data = PartitionedData(source, clean.clients, clean.train, clean.held)
    data = apply_trouble(data, trouble, seed=settings[2])
    return Federation(data.source, data.clients, data.train, data.held, data.trouble)


def _require_training_samples(
    source: Source, names: list[str], train: tuple[IndexArray, ...]
) -> None:
    """Refuses clients whose samples all belong to the test split."""
    for name, part in zip(names, train, strict=True):
        if len(part) < 2:
            raise BadInput(
                f"client {name!a} has {len(part)} training samples beside the test split of"
                f" {source.name}, 2 are needed; raise data.minimum, lower clients or change the"
                " split"
            )


@lru_cache(maxsize=2)
def _hash_samples(source: Source) -> str:
    """A fingerprint of the samples: a run resumes only on the same ones."""
    digest = blake2b(np.ascontiguousarray(source.y).data, digest_size=16)
    for start in range(0, len(source.x), 10_000):  # the source may be a map of a large file
        digest.update(np.ascontiguousarray(source.x[start : start + 10_000]).data)
    if source.held is not None:
        digest.update(np.packbits(source.held).data)
    return digest.hexdigest()
