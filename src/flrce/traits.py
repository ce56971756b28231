"""What a piece may be able to do besides answering its question: it has a trait by having its method or property."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

from numpy.random import Generator
from torch import Tensor

from flrce.types import Event, Record, Spent, Task

Meta: Any = type(Protocol)
ANSWERS: dict[tuple[type, type], bool] = {}  # (trait, class) -> whether it has it


class Known(Meta):  # type: ignore[misc]
    """Remembers which classes have a trait: a round asks some fifty times, and to look takes longer than what follows.

    Only of frozen dataclasses, as pieces are: all objects of one have the same fields. No field is annotated here, for
    typing would take it for one that each trait asks for.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        key = (cls, type(instance))
        found = ANSWERS.get(key)
        if found is None:
            found = bool(super().__instancecheck__(instance))
            params = getattr(type(instance), "__dataclass_params__", None)
            if params is not None and params.frozen:
                ANSWERS[key] = found
        return found


@runtime_checkable
class Linked(Protocol, metaclass=Known):
    """A trainer that puts links of its own before the update's: a proximal term, a control variate."""

    @property
    def links(self) -> Sequence[Any]: ...


def has_links(piece: Any) -> bool:
    """Whether a piece, or one that it is made of, has links for clients' updates; only a trainer's are used."""
    links = piece.links if isinstance(piece, Linked) else ()
    if isinstance(links, list | tuple) and any(_is_link(link) for link in links):
        return True
    inner = [getattr(piece, f.name, None) for f in fields(piece)] if is_dataclass(piece) else []
    parts = [part for value in inner for part in (value if isinstance(value, list | tuple) else (value,))]
    return any(has_links(part) for part in parts if is_dataclass(part))


def _is_link(link: Any) -> bool:
    return any(callable(getattr(link, method, None)) for method in ("step", "probe", "term"))


@runtime_checkable
class Remembers(Protocol, metaclass=Known):
    """A piece with a memory; M clients, d trained floats, D that travel."""

    def init(self, M: int, d: int, D: int) -> Any: ...


@runtime_checkable
class Observes(Protocol, metaclass=Known):
    """A piece that learns from a committed round."""

    def observe(self, memory: Any, event: Event) -> Any: ...


@runtime_checkable
class Objects(Protocol, metaclass=Known):
    """A piece that does not go with every recipe: why, or ""."""

    def objection(self, recipe: Any) -> str: ...


@runtime_checkable
class Partial(Protocol, metaclass=Known):
    """A piece that may let a reply cover only some coordinates."""

    @property
    def partial(self) -> bool: ...


@runtime_checkable
class Changing(Protocol, metaclass=Known):
    """A piece that may give a client other coordinates in every round."""

    @property
    def changing(self) -> bool: ...


@runtime_checkable
class Chained(Protocol, metaclass=Known):
    """A piece that may need a network that is a plain chain of layers."""

    @property
    def chained(self) -> bool: ...


@runtime_checkable
class Covers(Protocol, metaclass=Known):
    """A compressor that says which coordinates count in the mean."""

    def covers(self, layout: Sequence[tuple[str, int]], rng: Generator) -> Tensor: ...


@runtime_checkable
class KnowsBytes(Protocol, metaclass=Known):
    """A compressor that knows what its payload will weigh before there is one: exactly, or None where it cannot know.

    `rng` starts as in `encode`: draws that decide how much travels can be made here too.
    """

    def estimate_bytes(self, layout: Sequence[tuple[str, int]], rng: Generator) -> int | None: ...


@runtime_checkable
class Rated(Protocol, metaclass=Known):
    """A piece with a rate that others go by: a plain mean's, or a compressor's, which a trainer may set by client."""

    @property
    def rate(self) -> float: ...


@runtime_checkable
class Scales(Protocol, metaclass=Known):
    """A compressor that may multiply what it sends, so that its mean over draws is right and one draw is not."""

    @property
    def scaled(self) -> bool: ...


@runtime_checkable
class Compares(Protocol, metaclass=Known):
    """A selector that says whether it looks at single updates; one that observes and does not say so does."""

    @property
    def compares(self) -> bool: ...


@runtime_checkable
class Rooted(Protocol, metaclass=Known):
    """A selector that asks the client in row `root` in every round."""

    @property
    def root(self) -> int: ...


@runtime_checkable
class Maps(Protocol, metaclass=Known):
    """A selector's memory that holds a map of clients, which run directories keep. Without H nothing is mapped."""

    @property
    def Omega(self) -> Tensor | None: ...  # (M, M); None: a sketch, or too many clients
    @property
    def H(self) -> Tensor | None: ...  # (M,)
    @property
    def R(self) -> Tensor: ...  # (M,)


@runtime_checkable
class Freezes(Protocol, metaclass=Known):
    """A trainer that freezes the network's blocks before the `first`."""

    @property
    def first(self) -> int: ...


@runtime_checkable
class TellsLabels(Protocol, metaclass=Known):
    """A trainer whose clients tell their shares of so many labels."""

    @property
    def classes(self) -> int: ...


@runtime_checkable
class Doubts(Protocol, metaclass=Known):
    """An aggregator that takes weight from some replies: the share that each of the round observed last has left."""

    def left(self, memory: Any) -> Sequence[float]: ...


@runtime_checkable
class MeasuresHeadway(Protocol, metaclass=Known):
    """An average that knows which way the rounds went: the headway of the round that it observed last."""

    def headway(self, memory: Any) -> float | None: ...


@runtime_checkable
class MeasuresWay(Protocol, metaclass=Known):
    """A stop that knows how far the model has come."""

    def way(self, memory: Any) -> float: ...


@runtime_checkable
class Several(Protocol, metaclass=Known):
    """A piece made of others, of which one may remember something."""

    @property
    def rules(self) -> Sequence[Any]: ...


def holder(piece: Any) -> Any:
    """Who has a piece's memory: itself, or of a piece made of several the first that remembers, however deep."""
    inside = [holder(rule) for rule in piece.rules] if isinstance(piece, Several) else []
    return next((rule for rule in inside if isinstance(rule, Remembers)), piece)


@runtime_checkable
class Refuses(Protocol, metaclass=Known):
    """A stop that looks at what the next round would cost, before it is begun."""

    def before(self, history: Sequence[Record], estimates: Sequence[Spent]) -> str: ...


@runtime_checkable
class Blockwise(Protocol, metaclass=Known):
    """An aggregator that goes through coordinates block by block, and makes no copy of a round's updates."""

    @property
    def blockwise(self) -> bool: ...


@runtime_checkable
class Anywhere(Protocol, metaclass=Known):
    """A piece that takes a round's updates wherever they lie, on the host or on a device, or does not look at them.

    U and `updates.sent` are on one device then, all else is on the host; `crossing.home` brings back what is small.
    """

    @property
    def anywhere(self) -> bool: ...


def takes(piece: Any) -> bool:
    """Whether a piece takes updates wherever they lie."""
    return isinstance(piece, Anywhere) and piece.anywhere


@runtime_checkable
class Sketched(Protocol, metaclass=Known):
    """A selector whose map can be kept smaller."""

    @property
    def piece(self) -> str: ...

    def sketched(self, size: int) -> Any: ...


@runtime_checkable
class Tells(Protocol, metaclass=Known):
    """A pace that tells clients something too: a deadline."""

    def told(self, task: Task) -> Task: ...


@runtime_checkable
class Buffers(Protocol, metaclass=Known):
    """A pace under which tasks outlive a round: it ends with `size` replies; those over `oldest` rounds are dropped.

    Its `init` returns a `round.pace.Sky`.
    """

    @property
    def size(self) -> int: ...
    @property
    def oldest(self) -> int: ...


@runtime_checkable
class Begins(Protocol, metaclass=Known):
    """A pace that may put a round off, given the carbon intensity of the `look` hours to come."""

    @property
    def look(self) -> int: ...
    def begins(self, now: float, forecast: Sequence[float]) -> float: ...
