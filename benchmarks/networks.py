"""The networks of "Networks" in research/docs/gpu.md: random samples, an objective and a batch
for each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from flrce.models.gpt import GPT
from flrce.models.resnet import ResNet
from flrce.models.sequences import RecurrentNetwork
from flrce.training.objectives import Classification, NextToken, Objective, Regression

TOKENS, LENGTH = 80, 80  # characters there are, and in a sample


@dataclass(frozen=True)
class Case:
    """One network. `shape` None: token ids, `every`: with a target after each.

    `values`: that many numbers to come near instead of classes. `draw`: N samples of its own, as
    the network sees them.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...] | None = (3, 32, 32)
    every: bool = False
    values: int = 0
    draw: Callable[[int, Generator], Tensor] | None = None

    @property
    def objective(self) -> Objective:
        if self.values:
            return Regression()
        return NextToken() if self.every else Classification()

    def net(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()

    def samples(self, N: int, seed: int) -> tuple[Tensor, Tensor]:
        rng = Generator().manual_seed(seed)
        if self.draw is not None:
            return self.draw(N, rng), torch.randint(0, 10, (N,), generator=rng)
        if self.shape is not None:
            x = torch.randint(0, 256, (N, *self.shape), dtype=torch.uint8, generator=rng)
            if self.values:
                return x, torch.randn(N, self.values, generator=rng)
            return x, torch.randint(0, 10, (N,), generator=rng)
        x = torch.randint(0, TOKENS, (N, LENGTH), generator=rng)
        return x, torch.randint(0, TOKENS, (N, LENGTH) if self.every else (N,), generator=rng)

    @property
    def scaling(self) -> tuple[float, float]:
        pixels = self.shape is not None and self.draw is None
        return (1 / 64, -2.0) if pixels else (1.0, 0.0)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10))


def vgg() -> nn.Module:
    """Six 3x3 convolutions with BatchNorm (64, 128 and 256 channels), two linear layers: 2.2
    million floats.
    """
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 128, 256):
        for _ in range(2):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 10))


class Adapter(nn.Module):
    """A linear layer that is fixed, plus up(down(x)) of a small rank (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base(x)
        return base + F.linear(F.linear(x, self.down), self.up)


def gpt() -> nn.Module:
    return GPT(TOKENS, TOKENS, LENGTH, every=True, layers=4, width=128, heads=4)


def lora(rank: int = 8) -> nn.Module:
    """The GPT with every parameter fixed but the head's, and an adapter beside every other linear
    layer.
    """
    net = gpt().requires_grad_(False)
    net.head.requires_grad_(True)
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child is not net.head:
                setattr(parent, name, Adapter(child, rank))
    return net


CASES = (
    Case("MLP 3072-200-10", mlp, 32),
    Case("VGG-like, BatchNorm, 2.2 M", vgg, 32),
    Case("ResNet-8, GroupNorm", lambda: ResNet(3, 10), 32),
    Case("ResNet-18, GroupNorm, 11 M", lambda: ResNet(3, 10, (64, 128, 256, 512), 2), 32),
    Case("char LSTM 2 x 256", lambda: RecurrentNetwork(TOKENS, TOKENS), 16, None),
    Case("GPT, 4 layers of 128", gpt, 16, None, every=True),
    Case("GPT with LoRA, shared base", lora, 16, None, every=True),
)
