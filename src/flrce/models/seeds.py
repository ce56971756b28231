"""A model as its steps along K random directions (FedKSeed, Qin et al. 2024).

Directions follow from seeds that everybody can draw, so K numbers are the whole model: they travel,
are compared, averaged and remembered; what they stand for is worked out where it is needed.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from flrce.core.host import require_memory
from flrce.core.tensor_bytes import count_bytes
from flrce.errors import BadInput
from flrce.models.abilities import get_provision_bytes, limit_samples_per_pass
from flrce.models.adapters import prepare_network
from flrce.models.flat import FrozenParameter
from flrce.rng import make_stream

DIRECTIONS_PER_CHUNK = 64  # directions turned into floats at a time


class SeedSpaceNetwork(nn.Module):
    """The net at theta_0 + sum_s steps_s z_s, z_s (d,) of -1 and 1. Only `steps` (K,) train.

    theta are the net's parameters that train; they are fixed at theta_0 here. Nets of transformers
    and peft will do.
    """

    chained = False

    def __init__(self, net: nn.Module, K: int, seed: int = 0) -> None:
        super().__init__()
        net = prepare_network(net)
        moving = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        if K < 1 or not moving:
            raise BadInput(
                f"seeds = {K}: a seed space has 1 direction or more, of a network with something to"
                " train"
            )
        self.net, self.names = net.requires_grad_(False), tuple(name for name, _ in moving)
        d = sum(p.numel() for _, p in moving)
        # one byte a sign, and twice that while they are made
        what = f"a seed space of {K} directions of {d} numbers"
        require_memory(3 * K * d, what, "set fewer seeds, a lower rank or fewer targets")
        bits = np.frombuffer(make_stream(seed, "directions").bytes(-(-K * d // 8)), np.uint8)
        signs = np.unpackbits(bits)[: K * d]
        self.signs = FrozenParameter(torch.from_numpy(signs.astype(np.int8) * 2 - 1).reshape(K, d))
        self.steps = nn.Parameter(torch.zeros(K))

    def forward(self, x: Tensor) -> Any:
        return functional_call(self.net, self.compute_parameters(), (x,))

    def compute_parameters(self) -> dict[str, Tensor]:
        """What the steps make of the net's parameters, by name."""
        away = torch.zeros(self.signs.shape[1], device=self.steps.device)  # (d,)
        chunks = (x.split(DIRECTIONS_PER_CHUNK) for x in (self.steps, self.signs))
        for some, signs in zip(*chunks, strict=True):
            away = away + some @ signs.to(some.dtype)
        own, at, moved = dict(self.net.named_parameters()), 0, {}
        for name in self.names:
            p = own[name]
            moved[name] = p + away[at : at + p.numel()].reshape(p.shape)
            at += p.numel()
        return moved

    @property
    def provision(self) -> int:
        """Of the net alone: directions are drawn where they are needed."""
        return get_provision_bytes(self.net) or count_bytes(self.net.parameters())

    def max_samples_per_pass(self, shape: tuple[int, ...]) -> int:
        return limit_samples_per_pass(self.net, shape, most=1 << 20)
