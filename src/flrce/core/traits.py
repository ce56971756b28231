"""What a piece may be able to do besides answering its question: it has a trait by having its
method or property.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

from numpy.random import Generator
from torch import Tensor

from flrce.core.types import ClientCost, RoundEvent, RoundRecord, Task

ProtocolMeta: Any = type(Protocol)
TRAIT_CACHE: dict[tuple[type, type], bool] = {}  # (trait, class) -> whether it has it


class CachedProtocolMeta(ProtocolMeta):  # type: ignore[misc]
    """Remembers which classes have a trait: a round asks some fifty times, and to look takes longer
    than what follows.

    Only of frozen dataclasses, as pieces are: all objects of one have the same fields. No field is
    annotated here, for typing would take it for one that each trait asks for.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        key = (cls, type(instance))
        found = TRAIT_CACHE.get(key)
        if found is None:
            found = bool(super().__instancecheck__(instance))
            params = getattr(type(instance), "__dataclass_params__", None)
            if params is not None and params.frozen:
                TRAIT_CACHE[key] = found
        return found


@runtime_checkable
class LinkProvider(Protocol, metaclass=CachedProtocolMeta):
    """A trainer that puts links of its own before the update's: a proximal term, a control
    variate.
    """

    @property
    def links(self) -> Sequence[Any]: ...


def has_links(piece: Any) -> bool:
    """Whether a piece, or one that it is made of, has links for clients' updates; only a trainer's
    are used.
    """
    links = piece.links if isinstance(piece, LinkProvider) else ()
    if isinstance(links, list | tuple) and any(_is_link(link) for link in links):
        return True
    inner = [getattr(piece, f.name, None) for f in fields(piece)] if is_dataclass(piece) else []
    parts = [
        part for value in inner for part in (value if isinstance(value, list | tuple) else (value,))
    ]
    return any(has_links(part) for part in parts if is_dataclass(part))


def _is_link(link: Any) -> bool:
    return any(callable(getattr(link, method, None)) for method in ("step", "probe", "loss_term"))


@runtime_checkable
class StatefulPiece(Protocol, metaclass=CachedProtocolMeta):
    """A piece with a memory; M clients, d trained floats, D that travel."""

    def initial_state(self, M: int, d: int, D: int) -> Any: ...


@runtime_checkable
class RoundObserver(Protocol, metaclass=CachedProtocolMeta):
    """A piece that learns from a committed round."""

    def observe(self, memory: Any, event: RoundEvent) -> Any: ...


@runtime_checkable
class RecipeChecker(Protocol, metaclass=CachedProtocolMeta):
    """A piece that does not go with every recipe: why, or ""."""

    def check_recipe(self, recipe: Any) -> str: ...


@runtime_checkable
class PartialPiece(Protocol, metaclass=CachedProtocolMeta):
    """A piece that may let a reply cover only some coordinates."""

    @property
    def partial(self) -> bool: ...


@runtime_checkable
class CoordinateChanger(Protocol, metaclass=CachedProtocolMeta):
    """A piece that may give a client other coordinates in every round."""

    @property
    def changes_coordinates(self) -> bool: ...


@runtime_checkable
class LayerChainPiece(Protocol, metaclass=CachedProtocolMeta):
    """A piece that may need a network that is a plain chain of layers."""

    @property
    def needs_layer_chain(self) -> bool: ...


@runtime_checkable
class CoverageCompressor(Protocol, metaclass=CachedProtocolMeta):
    """A compressor that says which coordinates count in the mean."""

    def coverage_mask(self, layout: Sequence[tuple[str, int]], rng: Generator) -> Tensor: ...


@runtime_checkable
class SizedCompressor(Protocol, metaclass=CachedProtocolMeta):
    """A compressor that knows what its payload will weigh before there is one: exactly, the most
    where that is near, or None where it cannot know.

    `rng` starts as in `encode`: draws that decide how much travels can be made here too.
    """

    def estimate_bytes(self, layout: Sequence[tuple[str, int]], rng: Generator) -> int | None: ...


@runtime_checkable
class RatedPiece(Protocol, metaclass=CachedProtocolMeta):
    """A piece with a rate that others go by: a plain mean's, or a compressor's, which a trainer may
    set by client.
    """

    @property
    def rate(self) -> float: ...


@runtime_checkable
class ScalingCompressor(Protocol, metaclass=CachedProtocolMeta):
    """A compressor that may multiply what it sends, so that its mean over draws is right and one
    draw is not.
    """

    @property
    def scaled(self) -> bool: ...


@runtime_checkable
class SymbolCompressor(Protocol, metaclass=CachedProtocolMeta):
    """A compressor some of whose buffers are packed symbols: how many bits each has, by the
    buffer's name.
    """

    @property
    def symbol_bits(self) -> Mapping[str, int]: ...


@runtime_checkable
class ClientStateCompressor(Protocol, metaclass=CachedProtocolMeta):
    """A compressor that may keep something with the client from round to round."""

    @property
    def keeps_state(self) -> bool: ...


@runtime_checkable
class UpdateComparer(Protocol, metaclass=CachedProtocolMeta):
    """A selector that says whether it looks at single updates; one that observes and does not say
    so does.
    """

    @property
    def compares_updates(self) -> bool: ...


@runtime_checkable
class RootClientSelector(Protocol, metaclass=CachedProtocolMeta):
    """A selector that asks the client in row `root` in every round."""

    @property
    def root(self) -> int: ...


@runtime_checkable
class RelationshipMap(Protocol, metaclass=CachedProtocolMeta):
    """A selector's memory that holds a map of clients, which run directories keep. Without H
    nothing is mapped.
    """

    @property
    def Omega(self) -> Tensor | None: ...  # (M, M); None: a sketch, or too many clients
    @property
    def H(self) -> Tensor | None: ...  # (M,)
    @property
    def R(self) -> Tensor: ...  # (M,)


@runtime_checkable
class BlockFreezer(Protocol, metaclass=CachedProtocolMeta):
    """A trainer that freezes the network's blocks before the `first`."""

    @property
    def first(self) -> int: ...


@runtime_checkable
class LabelReporter(Protocol, metaclass=CachedProtocolMeta):
    """A trainer whose clients tell their shares of so many labels."""

    @property
    def classes(self) -> int: ...


@runtime_checkable
class DownweightingAggregator(Protocol, metaclass=CachedProtocolMeta):
    """An aggregator that takes weight from some replies: the share that each of the round observed
    last has left.
    """

    def downweights(self, memory: Any) -> Sequence[float]: ...


@runtime_checkable
class HeadwayAverage(Protocol, metaclass=CachedProtocolMeta):
    """An average that knows which way the rounds went: the headway of the round that it observed
    last.
    """

    def get_headway(self, memory: Any) -> float | None: ...


@runtime_checkable
class DistanceStop(Protocol, metaclass=CachedProtocolMeta):
    """A stop that knows how far the model has come."""

    def distance_from_start(self, memory: Any) -> float: ...


@runtime_checkable
class CompositePiece(Protocol, metaclass=CachedProtocolMeta):
    """A piece made of others, of which one may remember something."""

    @property
    def rules(self) -> Sequence[Any]: ...


def find_stateful_piece(piece: Any) -> Any:
    """Who has a piece's memory: itself, or of a piece made of several the first that remembers,
    however deep.
    """
    inside = (
        [find_stateful_piece(rule) for rule in piece.rules]
        if isinstance(piece, CompositePiece)
        else []
    )
    return next((rule for rule in inside if isinstance(rule, StatefulPiece)), piece)


@runtime_checkable
class CostAwareStop(Protocol, metaclass=CachedProtocolMeta):
    """A stop that looks at what the next round would cost, before it is begun."""

    def check_next_round(
        self, history: Sequence[RoundRecord], estimates: Sequence[ClientCost]
    ) -> str: ...


@runtime_checkable
class BlockwiseAggregator(Protocol, metaclass=CachedProtocolMeta):
    """An aggregator that goes through coordinates block by block, and makes no copy of a round's
    updates.
    """

    @property
    def blockwise(self) -> bool: ...


@runtime_checkable
class DeviceAgnosticPiece(Protocol, metaclass=CachedProtocolMeta):
    """A piece that takes a round's updates wherever they lie, on the host or on a device, or does
    not look at them.

    U and `updates.sent` are on one device then, all else is on the host; `device_transfer.to_host`
    brings back what is small.
    """

    @property
    def device_agnostic(self) -> bool: ...


def is_device_agnostic(piece: Any) -> bool:
    """Whether a piece takes updates wherever they lie."""
    return isinstance(piece, DeviceAgnosticPiece) and piece.device_agnostic


@runtime_checkable
class SketchablePiece(Protocol, metaclass=CachedProtocolMeta):
    """A selector whose map can be kept smaller."""

    @property
    def piece(self) -> str: ...

    def with_sketch_size(self, size: int) -> Any: ...


@runtime_checkable
class DeadlinePace(Protocol, metaclass=CachedProtocolMeta):
    """A pace that tells clients something too: a deadline."""

    def with_deadline(self, task: Task) -> Task: ...


@runtime_checkable
class AsynchronousPace(Protocol, metaclass=CachedProtocolMeta):
    """A pace under which tasks outlive a round: it ends with `size` replies; those over `oldest`
    rounds are dropped.

    Its `initial_state` returns an `AsyncState`.
    """

    @property
    def size(self) -> int: ...
    @property
    def oldest(self) -> int: ...


@runtime_checkable
class DeferringPace(Protocol, metaclass=CachedProtocolMeta):
    """A pace that may put a round off, given the carbon intensity of the `look` hours to come."""

    @property
    def look(self) -> int: ...
    def choose_start_time(self, now: float, forecast: Sequence[float]) -> float: ...
