"""Batches made different each time they are seen: a transform takes x (n, ...) and a generator of
the task's own.

The generator follows from (seed, round, client), so that neither workers nor engines show. A user's
own transform is any callable of these two.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F

PositiveInt = Annotated[int, Field(ge=1)]
Proportion = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class RandomFlip:
    """Mirrors a share of the samples left to right (their last dimension)."""

    share: Proportion = 0.5

    def __call__(self, x: Tensor, rng: Generator) -> Tensor:
        chosen = _draw_uniform(len(x), x, rng) < self.share
        return torch.where(_expand_dims(chosen, x), x.flip(-1), x)


@dataclass(frozen=True)
class RandomCrop:
    """Pads images (n, C, H, W) with zeros and cuts out a window of the same size at random."""

    pad: PositiveInt = 4

    def __call__(self, x: Tensor, rng: Generator) -> Tensor:
        n, C, H, W = x.shape
        padded = F.pad(x, (self.pad,) * 4)
        shift = torch.randint(2 * self.pad + 1, (2, n, 1), generator=rng).to(x.device)
        rows = shift[0] + torch.arange(H, device=x.device)  # (n, H)
        columns = shift[1] + torch.arange(W, device=x.device)  # (n, W)
        at = torch.arange(n, device=x.device)[:, None, None, None]
        return padded[
            at,
            torch.arange(C, device=x.device)[None, :, None, None],
            rows[:, None, :, None],
            columns[:, None, None, :],
        ]


@dataclass(frozen=True)
class Cutout:
    """Sets a square of each image (n, C, H, W) to zero (DeVries & Taylor 2017)."""

    size: PositiveInt = 8

    def __call__(self, x: Tensor, rng: Generator) -> Tensor:
        n, _, H, W = x.shape
        top = torch.randint(H, (n, 1), generator=rng).to(x.device) - self.size // 2
        left = torch.randint(W, (n, 1), generator=rng).to(x.device) - self.size // 2
        y, z = torch.arange(H, device=x.device), torch.arange(W, device=x.device)
        rows = (y >= top) & (y < top + self.size)  # (n, H)
        columns = (z >= left) & (z < left + self.size)  # (n, W)
        return x.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


@dataclass(frozen=True)
class GaussianNoise:
    """Adds normal noise of this standard deviation."""

    deviation: PositiveFloat = 0.1

    def __call__(self, x: Tensor, rng: Generator) -> Tensor:
        return x + self.deviation * torch.randn(x.shape, generator=rng).to(x.device)


TRANSFORMS: dict[str, Any] = {
    "flip": RandomFlip,
    "crop": RandomCrop,
    "cutout": Cutout,
    "noise": GaussianNoise,
}


def _draw_uniform(n: int, x: Tensor, rng: Generator) -> Tensor:
    return torch.rand(n, generator=rng).to(x.device)


def _expand_dims(chosen: Tensor, x: Tensor) -> Tensor:
    return chosen.reshape(-1, *(1,) * (x.dim() - 1))
