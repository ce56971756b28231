"""What a network may say of itself where its layers do not: attributes that any module may have."""

from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class LargeOutputNetwork(Protocol):
    """A network with large outputs: how many samples of a shape go into one pass."""

    def max_samples_per_pass(self, shape: tuple[int, ...]) -> int: ...


@runtime_checkable
class ProvisionedNetwork(Protocol):
    """A network whose frozen part each device is given once, as a file of so many bytes."""

    @property
    def provision(self) -> int: ...


@runtime_checkable
class ChainDeclaringNetwork(Protocol):
    """A network that says whether it is a plain chain of layers, so that it is not traced."""

    @property
    def chained(self) -> bool: ...


def limit_samples_per_pass(net: nn.Module, shape: tuple[int, ...], most: int, room: int = 1) -> int:
    """Samples of this shape per pass: `most`, or `room` times what the network can take."""
    if isinstance(net, LargeOutputNetwork):
        return min(most, room * int(net.max_samples_per_pass(shape)))
    return most


def get_provision_bytes(net: nn.Module) -> int:
    """Bytes of the file that each device is given once; 0 where there is none."""
    return int(net.provision) if isinstance(net, ProvisionedNetwork) else 0
