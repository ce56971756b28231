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

from flrce.data.partition import NATURAL, partition
from flrce.data.sources import Source
from flrce.data.trouble import Shared, Troubled, touched
from flrce.errors import BadInput
from flrce.rng import stream

Index = NDArray[np.int64]
FINE = Troubled()


@lru_cache(maxsize=2)
def tensors(source: Source) -> tuple[Tensor, Tensor]:
    """x and y in memory, once for all federations of a source, which itself may be a read-only map of a file."""
    return torch.from_numpy(np.array(source.x)), torch.from_numpy(np.array(source.y))


@dataclass(frozen=True, eq=False)
class Federation:
    """One pool of samples; clients hold indices into it, so nothing is copied."""

    source: Source
    clients: tuple[str, ...]
    train: tuple[Index, ...]
    held: tuple[Index, ...]
    trouble: Troubled = FINE

    def samples(self, client: str, t: int) -> Index:
        """What a client trains on in round t: the same in every round unless its data drift."""
        own, drift = self.train[self.row[client]], self.trouble.drifting.get(client)
        return own if drift is None else drift.samples(own, self.source.y, t)

    @property
    def x(self) -> Tensor:
        return tensors(self.source)[0]

    @property
    def y(self) -> Tensor:
        return tensors(self.source)[1]

    @cached_property
    def row(self) -> dict[str, int]:
        return {client: k for k, client in enumerate(self.clients)}

    @cached_property
    def n(self) -> Index:
        """(M,) training samples."""
        if self.trouble.drifting:
            return np.array([len(self.samples(client, 1)) for client in self.clients])
        return np.array([len(part) for part in self.train])

    @cached_property
    def judges(self) -> tuple[Index, Index]:
        """All hold-outs in one pass: sample indices, and the row of the client each belongs to."""
        rows = np.repeat(np.arange(len(self.clients)), [len(part) for part in self.held])
        return np.concatenate([*self.held, np.empty(0, np.int64)]).astype(np.int64), rows

    def describe(self) -> dict[str, Any]:
        """Sizes per client, and a histogram of the labels where they are classes, for the run directory."""
        source, labels = self.source, len(self.source.classes)
        told: dict[str, Any] = {
            "data": source.name,
            "digest": _digest(source),
            "classes": list(source.classes),
            "clients": list(self.clients),
            "train": [len(part) for part in self.train],
            "held": [len(part) for part in self.held],
        }
        if source.kind == "classes":
            told["labels"] = [np.bincount(source.y[part], minlength=labels).tolist() for part in self.train]
        else:
            told["kind"] = source.kind
        if self.trouble.who:
            told["trouble"] = {kind: list(clients) for kind, clients in self.trouble.who.items()}
        return told


def federate(
    source: Source, scheme: str, M: int, seed: int, alpha: float = 0.1, holdout: float = 0.3, minimum: int = 5,
    trouble: Sequence[Any] = (),
) -> Federation:  # fmt: skip
    """Share the samples out, then hold some of each client's own back for validation; at least two stay to train on.

    A source with a test split of its own keeps it, and `holdout` does not count. `trouble` is what is then made wrong.
    """
    if trouble:
        return _with_trouble(source, scheme, M, seed, alpha, holdout, minimum, tuple(trouble))
    parts = partition(source, scheme, M, alpha, minimum, stream(seed, "partition"))
    names = [str(k) for k in range(M)]
    if scheme in NATURAL:
        assert source.group is not None
        names = [_name(source, int(source.group[part[0]])) for part in parts]
    if source.held is None:
        cuts = [min(round(holdout * len(part)), max(len(part) - 2, 0)) for part in parts]
        train = tuple(np.sort(part[cut:]) for part, cut in zip(parts, cuts, strict=True))
        held = tuple(np.sort(part[:cut]) for part, cut in zip(parts, cuts, strict=True))
    else:
        train, held = _own_split(source.held, parts)
        _enough(source, names, train)
    return Federation(source, tuple(names), train, held)


@lru_cache(maxsize=2)
def _with_trouble(source: Source, *how: Any) -> Federation:
    """Remembered, so that runs which share a troubled fleet share its samples in memory too."""
    *usual, trouble = how
    fine = federate(source, *usual)
    seed = usual[2]
    made = touched(Shared(source, fine.clients, fine.train, fine.held), trouble, seed)
    return Federation(made.source, made.clients, made.train, made.held, made.trouble)


def _own_split(test: NDArray[np.bool_], parts: list[Index]) -> tuple[tuple[Index, ...], tuple[Index, ...]]:
    train = tuple(np.sort(part[~test[part]]) for part in parts)
    held = tuple(np.sort(part[test[part]]) for part in parts)
    return train, held


def _enough(source: Source, names: list[str], train: tuple[Index, ...]) -> None:
    """Refuses clients whose samples all belong to the test split."""
    for name, part in zip(names, train, strict=True):
        if len(part) < 2:
            raise BadInput(
                f"client {name!a} has {len(part)} training samples beside the test split of {source.name}, 2 are "
                "needed; raise data.minimum, lower clients or change the split"
            )


@lru_cache(maxsize=2)
def _digest(source: Source) -> str:
    """A fingerprint of the samples: a run goes on only on the same ones. Once for all runs of a source."""
    found = blake2b(np.ascontiguousarray(source.y).data, digest_size=16)
    for start in range(0, len(source.x), 10_000):  # the source may be a map of a large file
        found.update(np.ascontiguousarray(source.x[start : start + 10_000]).data)
    if source.held is not None:
        found.update(np.packbits(source.held).data)
    return found.hexdigest()


def _name(source: Source, code: int) -> str:
    return source.groups[code] if source.groups else str(code)
