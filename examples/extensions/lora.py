"""LoRA (Hu et al. 2021) on a transformer: clients train adapters and a head, the base is fixed.

    rounds = 8
    clients = 4
    per_round = 4
    recipe.name = "fedavg"
    data.partition = "natural"
    model = { name = "lora:Adapted", options = { rank = 4 } }
    [train]
    optimizer = "adam"
    lr = 0.01
    epochs = 3

From Python: `flrce.run(flrce.Experiment.load("experiment.toml"), data=data())`; a pretrained
network of your own is `model=adapt(net, 4)`. A parameter with `requires_grad = False` is fixed: no
byte of it travels or is booked.
"""

import torch
from token_lm import L, data
from torch import nn
from torch.nn import functional as F

from flrce.models.gpt import GPT

__all__ = ["Adapted", "adapt", "data"]


class LoRA(nn.Module):
    """A linear layer that is fixed, plus up(down(x)), which is zero at first."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def adapt(net: nn.Module, rank: int) -> nn.Module:
    """Fix every parameter except the head's; add an adapter to every other linear layer."""
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child is not net.head:
                setattr(parent, name, LoRA(child, rank))
    return net


class Adapted(nn.Module):
    def __init__(self, vocabulary: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.net = adapt(GPT(vocabulary, outputs, L, every=True, layers=1, width=32), rank)

    def forward(self, ids):
        return self.net(ids)
