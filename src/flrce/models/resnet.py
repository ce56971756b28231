"""Residual networks for small images (He et al. 2016, section 4.2), with GroupNorm or BatchNorm.

BatchNorm's statistics differ from client to client, which hurts where labels are skewed (Hsieh et
al. 2020); GroupNorm has none, so it is the default.
"""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

NORM_GROUPS = 8  # divides every width below
NormKind = Literal["group", "batch"]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, before: int, after: int, stride: int, norm: NormKind) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = _make_norm(after, norm)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = _make_norm(after, norm)
        self.shortcut = nn.Sequential()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), _make_norm(after, norm)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """A 3x3 stem, `blocks` blocks of each width (each halves the image), the mean, a linear layer.

    Three widths 16, 32, 64 and 1 or 3 blocks make ResNet-8 and -20; four from 64 on and 2 blocks
    make ResNet-18.
    """

    def __init__(
        self,
        channels: int,
        outputs: int,
        widths: tuple[int, ...] = (16, 32, 64),
        blocks: int = 1,
        norm: NormKind = "group",
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = _make_norm(widths[0], norm)
        stages: list[ResidualBlock] = []
        before = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                stages.append(ResidualBlock(before, width, stride, norm))
                before = width
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(before, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        scores: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return scores


def _make_norm(width: int, norm: NormKind) -> nn.Module:
    return nn.GroupNorm(NORM_GROUPS, width) if norm == "group" else nn.BatchNorm2d(width)
