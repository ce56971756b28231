"""Networks that tests name as a user would: "own_nets:Smooth"."""

from math import prod

from torch import Tensor, nn


class Smooth(nn.Sequential):
    """A chain without kinks: no ReLU or pool whose choice a last bit could turn."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        channels, *plane = shape
        super().__init__(
            nn.Conv2d(channels, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(6 * prod(plane), 16),
            nn.Tanh(),
            nn.Linear(16, classes),
        )


class Layered(nn.Sequential):
    """The digits' network under names that a pattern can take apart."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 16),
            nn.ReLU(),
            nn.Linear(16, classes),
        )


class Dropped(nn.Sequential):
    """A network with a random layer."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(prod(shape), 16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, classes),
        )


class Asking(Smooth):
    """A network that asks its device for a number, which cannot be done while a step is
    recorded.
    """

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out * (1.0 + 0.0 * float(x.detach().abs().max()))


class Functional(nn.Module):
    """A network that draws at random without a layer that says so."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(prod(shape), 16), nn.Linear(16, classes)

    def forward(self, x):
        return self.out(nn.functional.dropout(self.inner(x.flatten(1)).relu(), 0.3, self.training))


class Bare(nn.Sequential):
    """A small network without normalisation: all of w is trained."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(prod(shape), 8), nn.Tanh(), nn.Linear(8, classes))
