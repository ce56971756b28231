"""The part of a model that a client holds and sends back: all of it, some units of each layer, or its last blocks."""

from dataclasses import dataclass

from torch import Tensor, nn

from flrce.models.flat import Layout

Names = tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class Part:
    """`held`: coordinates of w a client receives and trains in `net`; `sent`: positions in those it sends back."""

    net: nn.Module
    key: tuple[float | int, ...]  # parts of one key share shapes
    names: Names  # what is sent: tensors and their sizes, in order
    held: Tensor | None = None  # None: all
    sent: Tensor | None = None  # None: all

    @property
    def coordinates(self) -> Tensor | None:
        """Coordinates of w that the reply covers; None: all."""
        if self.sent is None:
            return self.held
        return self.sent if self.held is None else self.held[self.sent]


def whole(net: nn.Module, layout: Layout) -> Part:
    """The whole model."""
    return Part(net, (1.0, 0), tuple((s.name, s.size) for s in layout.slots))
