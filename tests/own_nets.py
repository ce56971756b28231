"""Networks that tests name as a user would: "own_nets:Smooth"."""

from math import prod

from torch import nn


class Smooth(nn.Sequential):
    """A chain without kinks: no ReLU or pool whose choice a last bit could turn."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        channels, *plane = shape
        super().__init__(
            nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Tanh(),
            nn.Flatten(), nn.Linear(6 * prod(plane), 16), nn.Tanh(), nn.Linear(16, classes),
        )  # fmt: skip
