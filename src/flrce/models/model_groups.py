"""Several global models in one: k networks of one kind, of which each client uses one."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.models.abilities import limit_samples_per_pass
from flrce.rng import make_stream

GROUP_TENSOR = "group"  # stays with the client: `model.personal`, or a recipe's


class ModelGroups(nn.Module):
    """The networks as `members`, one behind the other in w. `group`, which a client keeps, is the
    number of its own; a client that never trained is in group 0.

    The first member is the given network. The others are copies with new initial values, because
    members that begin alike would stay alike.
    """

    chained = False
    group: Tensor

    def __init__(self, net: nn.Module, k: int, seed: int = 0) -> None:
        super().__init__()
        self.members = nn.ModuleList([net, *(_reset_copy(net, seed, j) for j in range(1, k))])
        self.register_buffer(GROUP_TENSOR, torch.zeros(()))

    def forward(self, x: Any) -> Any:
        return self.members[int(self.group)](x)

    def max_samples_per_pass(self, shape: tuple[int, ...]) -> int:
        return limit_samples_per_pass(self.members[0], shape, most=1 << 20)


def _reset_copy(net: nn.Module, seed: int, j: int) -> nn.Module:
    """A copy with parameters drawn anew, by the layers' own initialisation."""
    copied = copy.deepcopy(net)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(make_stream(seed, "model groups", j).integers(2**63)))
        for layer in copied.modules():
            if callable(getattr(layer, "reset_parameters", None)):
                layer.reset_parameters()  # type: ignore[operator]
    pairs = zip(net.parameters(), copied.parameters(), strict=True)
    if all(torch.equal(one, two) for one, two in pairs):
        raise BadInput(
            f"{type(net).__name__} has no layers with reset_parameters, so that all model groups"
            " would begin alike; pass model=flrce.models.model_groups.ModelGroups with members of"
            " your own"
        )
    return copied


def find_group_columns(sizes: Sequence[tuple[str, int]], k: int) -> list[Tensor]:
    """The coordinates of each member in a vector of tensors with these names and sizes."""
    columns: list[list[Tensor]] = [[] for _ in range(k)]
    at = 0
    for name, size in sizes:
        part = name.split(".", 2)
        if part[0] == "members" and len(part) == 3 and part[1].isdigit() and int(part[1]) < k:
            columns[int(part[1])].append(torch.arange(at, at + size))
        at += size
    if not all(columns):
        raise BadInput(f"the network has no {k} model groups")
    return [torch.cat(parts) for parts in columns]
