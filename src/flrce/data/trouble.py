"""Fleets with trouble: wrong labels, noise, rare classes, drift, slow devices, free-riders.

Each kind of trouble is a piece, named in `data.trouble`. Its `apply_to_fleet` changes who holds
what, or says what its clients do later on. All is drawn from (seed, kind, client), so a resumed run
and any engine meet the same trouble. Hold-outs stay clean, so that accuracy is about what is true.
`FleetTrouble.who` is the ground truth, kept in `partition.json`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le
from numpy.random import Generator
from numpy.typing import NDArray

from flrce.core.bounds import NonEmptyText, PositiveFloat, PositiveInt, PositiveProportion
from flrce.data.sources import Source
from flrce.errors import BadInput
from flrce.rng import make_stream

IndexArray = NDArray[np.int64]
Rows = Sequence[int]  # of the clients with a kind of trouble


@dataclass(frozen=True, eq=False)
class FleetTrouble:
    """What is wrong in a fleet, and with which clients."""

    who: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # kind -> clients
    drifting: Mapping[str, "Drift"] = field(default_factory=dict)
    riding: Mapping[str, "FreeRiders"] = field(default_factory=dict)
    slow: Mapping[str, str] = field(default_factory=dict)  # client -> profile of its device


@dataclass(frozen=True, eq=False)
class PartitionedData:
    """Samples shared out among clients, before and after a kind of trouble."""

    source: Source
    clients: tuple[str, ...]
    train: tuple[IndexArray, ...]
    held: tuple[IndexArray, ...]
    trouble: FleetTrouble = FleetTrouble()


@dataclass(frozen=True)
class WrongLabels:
    """A share `wrong` of a client's training labels are another class: any, or the next one.

    Of text, symbols are drawn anew or are the vocabulary's next; values and sets of labels become
    another sample's.
    """

    share: PositiveProportion = 0.2
    wrong: PositiveProportion = 0.4
    how: Literal["symmetric", "pairwise"] = "symmetric"

    def apply_to_fleet(self, fleet: PartitionedData, rows: Rows, seed: int) -> PartitionedData:
        source = fleet.source
        if source.kind in ("values", "labels") and self.how == "pairwise":
            raise BadInput(
                f"data.trouble wrong-labels: {source.kind} have no next one; set how = 'symmetric'"
            )
        y = np.array(source.y)
        for k in rows:
            rng = make_stream(seed, "wrong labels", 0, fleet.clients[k])
            own = rng.permutation(fleet.train[k])[: round(self.wrong * len(fleet.train[k]))]
            y[own] = self._draw_wrong_labels(source, own, rng)
        return replace(fleet, source=replace(source, y=y))

    def _draw_wrong_labels(self, source: Source, own: IndexArray, rng: Generator) -> NDArray[Any]:
        """What stands in the place of these samples' labels."""
        if source.kind in ("values", "labels"):
            return np.asarray(source.y[rng.integers(0, len(source.y), len(own))])
        right, classes = source.y[own], source.outputs
        if classes < 2:
            raise BadInput(f"data.trouble wrong-labels: {source.name} has a single class; drop it")
        by = rng.integers(1, classes, right.shape) if self.how == "symmetric" else 1
        # below 0: positions that do not count
        return np.where(right >= 0, (right + by) % classes, right)


@dataclass(frozen=True)
class NoisyInputs:
    """Noise on training inputs, `level` standard deviations; of token ids `level` are redrawn."""

    share: PositiveProportion = 0.2
    level: Annotated[float, Ge(0), Le(1000)] = 1.0

    def apply_to_fleet(self, fleet: PartitionedData, rows: Rows, seed: int) -> PartitionedData:
        x = np.array(fleet.source.x)
        spread = 0.0 if fleet.source.has_token_ids else float(np.std(x[:10_000]))
        for k in rows:
            rng, own = make_stream(seed, "noisy inputs", 0, fleet.clients[k]), fleet.train[k]
            if fleet.source.has_token_ids:
                drawn = rng.integers(0, fleet.source.vocabulary, x[own].shape)
                x[own] = np.where(rng.random(x[own].shape) < self.level, drawn, x[own])
            else:
                noisy = x[own] + self.level * spread * rng.normal(size=x[own].shape)
                x[own] = np.clip(np.rint(noisy), 0, 255) if x.dtype == np.uint8 else noisy
        return replace(fleet, source=replace(fleet.source, x=x))


@dataclass(frozen=True)
class RareClasses:
    """`classes` drawn classes are held by these clients alone: they get the others' samples of them
    in exchange for some of their own. What they have no room for is left out of the run; everyone
    keeps two samples to train on.
    """

    share: PositiveProportion = 0.05
    classes: PositiveInt = 2

    def apply_to_fleet(self, fleet: PartitionedData, rows: Rows, seed: int) -> PartitionedData:
        total = _require_classes(fleet.source, "rare-classes")
        if self.classes >= total:
            raise BadInput(
                f"data.trouble rare-classes: {self.classes} of {total} classes cannot be rare;"
                " lower classes"
            )
        rng = make_stream(seed, "rare classes")
        rare = np.isin(fleet.source.y, rng.permutation(total)[: self.classes])
        return replace(
            fleet,
            train=_gather_rare_samples(fleet.train, rare, set(rows), rng, least=2),
            held=_gather_rare_samples(fleet.held, rare, set(rows), rng, least=0),
        )


@dataclass(frozen=True)
class Drift:
    """Data that change: in round t a client trains on a `window` of its samples in the order of
    their labels, which goes round in `period` rounds. Its hold-out stays whole.
    """

    share: PositiveProportion = 1.0
    window: PositiveProportion = 0.5
    period: PositiveInt = 20

    def apply_to_fleet(self, fleet: PartitionedData, rows: Rows, seed: int) -> PartitionedData:
        drifting = {fleet.clients[k]: self for k in rows}
        return _update_trouble(fleet, drifting={**fleet.trouble.drifting, **drifting})

    def select_window(self, own: IndexArray, y: NDArray[Any], t: int) -> IndexArray:
        """Those of a client's samples that it has in round t: the same number in each."""
        if len(own) <= 2:
            return own
        size = max(2, round(self.window * len(own)))
        keys = np.asarray(y[own], np.float64).reshape(len(own), -1)[:, 0]
        order = own[np.argsort(keys, kind="stable")]
        start = len(own) * ((t - 1) % self.period) // self.period
        return np.sort(order[(start + np.arange(size)) % len(own)])


@dataclass(frozen=True)
class SlowLabels:
    """Two tiers of devices: the clients with most upper-half classes have a slow `profile`.

    Whoever prefers fast clients then prefers some labels.
    """

    share: PositiveProportion = 0.3
    profile: NonEmptyText = "raspberry-pi-4"

    def apply_to_fleet(self, fleet: PartitionedData, rows: Rows, seed: int) -> PartitionedData:
        half = _require_classes(fleet.source, "slow-labels") / 2
        upper = [
            float(np.mean(fleet.source.y[own] >= half)) if len(own) else 0.0 for own in fleet.train
        ]
        order = np.argsort(-np.array(upper), kind="stable")[: len(rows)]
        slow = dict.fromkeys((fleet.clients[k] for k in order), self.profile)
        return _update_trouble(fleet, slow={**fleet.trouble.slow, **slow})


@dataclass(frozen=True)
class ServerSample:
    """Help, not trouble: the first client is the server's, with `samples` drawn from all others.

    They are copies: nobody has fewer. Its hold-out is empty, so that accuracy is about the others.
    """

    samples: PositiveInt = 100
    share: PositiveProportion = 1e-9  # one client, whoever was drawn

    def apply_to_fleet(self, fleet: PartitionedData, rows: Rows, seed: int) -> PartitionedData:
        everyone = np.concatenate(fleet.train)
        drawn = np.sort(
            make_stream(seed, "server sample").permutation(everyone)[: max(2, self.samples)]
        )
        empty = np.empty(0, np.int64)
        return replace(fleet, train=(drawn, *fleet.train[1:]), held=(empty, *fleet.held[1:]))


@dataclass(frozen=True)
class FreeRiders:
    """Clients that do not train (their costs are booked as if they did) and send

    - "zero": nothing at all;
    - "noise": a random direction, `level` times as long as the model's way since they were last
      asked;
    - "stale": that way itself, which is what others did (Lin et al. 2019, delta weights), `level`
      times.
    """

    share: PositiveProportion = 0.2
    sends: Literal["zero", "noise", "stale"] = "stale"
    level: PositiveFloat = 1.0

    def apply_to_fleet(self, fleet: PartitionedData, rows: Rows, seed: int) -> PartitionedData:
        riding = {fleet.clients[k]: self for k in rows}
        return _update_trouble(fleet, riding={**fleet.trouble.riding, **riding})


TROUBLE_KINDS: dict[str, Callable[..., Any]] = {
    "wrong-labels": WrongLabels,
    "noisy-inputs": NoisyInputs,
    "rare-classes": RareClasses,
    "drift": Drift,
    "slow-labels": SlowLabels,
    "free-riders": FreeRiders,
    "server-sample": ServerSample,
}


def get_trouble_name(kind: Any) -> str:
    """The name of a kind: as in KINDS, or its class's."""
    return next(
        (name for name, make in TROUBLE_KINDS.items() if make is type(kind)), type(kind).__name__
    )


def apply_trouble(fleet: PartitionedData, kinds: Sequence[Any], seed: int) -> PartitionedData:
    """The fleet with all its trouble. Kinds get different clients as long as there are enough."""
    M = len(fleet.clients)
    order, at = make_stream(seed, "trouble").permutation(M), 0
    if any(isinstance(kind, ServerSample) for kind in kinds):
        order = np.append(order[order != 0], 0)  # the server is the last to have trouble
    who: dict[str, tuple[str, ...]] = {}
    for kind in kinds:
        count = max(1, round(kind.share * M))
        server = isinstance(kind, ServerSample)
        rows = [0] if server else [int(k) for k in np.roll(order, -at)[:count]]
        at = at if server else (at + count) % M
        before = fleet.trouble.slow
        fleet = kind.apply_to_fleet(fleet, rows, seed)
        slow = [client for client in fleet.trouble.slow if client not in before]
        clients = slow if isinstance(kind, SlowLabels) else [fleet.clients[k] for k in sorted(rows)]
        who[get_trouble_name(kind)] = tuple(
            dict.fromkeys((*who.get(get_trouble_name(kind), ()), *clients))
        )
    return _update_trouble(fleet, who=who)


def _update_trouble(fleet: PartitionedData, **changed: Any) -> PartitionedData:
    return replace(fleet, trouble=replace(fleet.trouble, **changed))


def _require_classes(source: Source, what: str) -> int:
    if source.kind != "classes" or len(source.classes) < 2:
        has = "a single class" if source.kind == "classes" else source.kind
        raise BadInput(f"data.trouble {what} is about classes, {source.name} has {has}; drop it")
    return len(source.classes)


def _gather_rare_samples(
    parts: tuple[IndexArray, ...],
    rare: NDArray[np.bool_],
    holders: set[int],
    rng: Generator,
    least: int,
) -> tuple[IndexArray, ...]:
    """Move all rare samples to the holders, who give as many of their other samples in return."""
    keep = {
        k: part if k in holders else _drop_rare_samples(part, rare, least)
        for k, part in enumerate(parts)
    }
    moved = rng.permutation(
        np.concatenate([np.setdiff1d(part, keep[k]) for k, part in enumerate(parts)])
    )
    given = rng.permutation(np.concatenate([keep[k][~rare[keep[k]]] for k in sorted(holders)]))
    given = given[: len(moved)]
    takes = np.array_split(moved[: len(given)], len(holders))
    lost = {k: len(part) - len(keep[k]) for k, part in enumerate(parts)}
    at = 0
    for k, take in zip(sorted(holders), takes, strict=True):
        keep[k] = np.concatenate([keep[k][~np.isin(keep[k], given)], take])
    # what the holders gave goes to those who gave them something
    for k in sorted(set(keep) - holders):
        size = len(given) * lost[k] // max(len(moved), 1)
        keep[k] = np.concatenate([keep[k], given[at : at + size]])
        at += size
    return tuple(np.sort(keep[k]).astype(np.int64) for k in range(len(parts)))


def _drop_rare_samples(part: IndexArray, rare: NDArray[np.bool_], least: int) -> IndexArray:
    """A part without its rare samples, but for as many as `least` needs."""
    common = part[~rare[part]]
    if len(common) >= least:
        return common
    return np.concatenate([common, part[rare[part]][: least - len(common)]])
