"""What a network may say of itself where its layers do not: attributes that any module may have."""

from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class LargeOutputNetwork(Protocol):
    """A network with answers so large that few samples can be looked at together: how many, of
    samples of a shape.
    """

    def max_samples_per_pass(self, shape: tuple[int, ...]) -> int: ...


@runtime_checkable
class ProvisionedNetwork(Protocol):
    """A network whose fixed part every device is given once, as a file: its bytes; 0: as many as
    its parameters.
    """

    @property
    def provision(self) -> int: ...


@runtime_checkable
class ChainDeclaringNetwork(Protocol):
    """A network that says whether it is a plain chain of layers: tracing a large one takes long,
    and others' turns.
    """

    @property
    def chained(self) -> bool: ...


def limit_samples_per_pass(net: nn.Module, shape: tuple[int, ...], most: int, room: int = 1) -> int:
    """Samples of this shape to look at together: `most`, or `room` times as many as the network can
    take.
    """
    return (
        min(most, room * int(net.max_samples_per_pass(shape)))
        if isinstance(net, LargeOutputNetwork)
        else most
    )


def get_provision_bytes(net: nn.Module) -> int:
    """Bytes of the file that each device is given once; 0 where there is none."""
    return int(net.provision) if isinstance(net, ProvisionedNetwork) else 0
