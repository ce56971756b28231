"""More networks as users write them, in plain torch: none of their kinds is in networks.py."""

import math

import torch
from networks import LENGTH, TOKENS, Case
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

CHANNELS, TIMES = 9, 64  # of an inertial series
KINDS, NUMBERS = (
    (12, 7, 31, 4),
    10,
)  # values of each category of a table, and its columns of numbers


class Inverted(nn.Module):
    """MobileNetV2's block: wide, by depthwise convolution, narrow again, and the input beside
    it.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        inner, self.adds = 4 * before, stride == 1 and before == width
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(inplace=True),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.adds else y


def mobile(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU6(inplace=True),
        Inverted(width, width, 1),
        Inverted(width, 2 * width, 2),
        Inverted(2 * width, 2 * width, 1),
        Inverted(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


class ViT(nn.Module):
    """Patches behind a learnt class token, with learnt positions; torch's own encoder with its
    usual dropout.
    """

    def __init__(self, width: int = 96, layers: int = 4, heads: int = 4, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (32 // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.1,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)  # (B, patches, width)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        x = self.encoder(x)
        return self.head(self.norm(x[:, 0]))


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, LayerNorm over channels, a wide middle, a learnt scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(1e-2 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))  # (B, H, W, width)
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


def convnext(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 2, 2),
        ConvNeXtBlock(width),
        ConvNeXtBlock(width),
        nn.Conv2d(width, 2 * width, 2, 2),
        ConvNeXtBlock(2 * width),
        ConvNeXtBlock(2 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


class SqueezeExcite(nn.Module):
    """Two convolutions, their channels weighed by what the whole picture holds."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.one = (
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.second, self.two = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, width // 4, 1),
            nn.SiLU(),
            nn.Conv2d(width // 4, width, 1),
            nn.Sigmoid(),
        )
        self.short = (
            nn.Conv2d(before, width, 1, stride) if stride > 1 or before != width else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.second(F.silu(self.one(self.first(x)))))
        return F.silu(y * self.weigh(y) + self.short(x))


def squeeze(width: int = 16) -> nn.Module:
    return nn.Sequential(
        SqueezeExcite(3, width, 1),
        SqueezeExcite(width, 2 * width, 2),
        SqueezeExcite(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


class DenseBlock(nn.Module):
    """Each layer sees all that came before it."""

    def __init__(self, before: int, growth: int, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(before + i * growth) for i in range(layers))
        self.layers = nn.ModuleList(
            nn.Conv2d(before + i * growth, growth, 3, padding=1, bias=False) for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(F.relu(norm(x)))], 1)
        return x


def dense(growth: int = 12) -> nn.Module:
    first, second = 2 * growth + 4 * growth, 3 * growth + 4 * growth
    return nn.Sequential(
        nn.Conv2d(3, 2 * growth, 3, 2, 1),
        DenseBlock(2 * growth, growth, 4),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.Conv2d(first, 3 * growth, 1),
        nn.AvgPool2d(2),
        DenseBlock(3 * growth, growth, 4),
        nn.BatchNorm2d(second),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(second, 10),
    )


class WideBlock(nn.Module):
    """Norms and ReLUs before the convolutions, dropout between them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = (
            nn.BatchNorm2d(before),
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
        )
        self.norm2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.dropout = nn.Dropout(0.3)
        self.short = nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x), inplace=True)
        z = self.conv2(self.dropout(F.relu(self.norm2(self.conv1(y)), inplace=True)))
        return z + self.short(y)


def wide(width: int = 32) -> nn.Module:
    """WideResNet-10-2."""
    return nn.Sequential(
        nn.Conv2d(3, width // 2, 3, 1, 1, bias=False),
        WideBlock(width // 2, width, 1),
        WideBlock(width, 2 * width, 2),
        WideBlock(2 * width, 4 * width, 2),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def inertial(width: int = 64) -> nn.Module:
    """Convolutions in one dimension that see further and further."""
    layers: list[nn.Module] = []
    before = CHANNELS
    for dilation in (1, 2, 4, 8):
        same = nn.Conv1d(before, width, 5, padding="same", dilation=dilation)
        layers += [same, nn.BatchNorm1d(width), nn.LeakyReLU(0.1)]
        before = width
    return nn.Sequential(
        *layers, nn.MaxPool1d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(width * TIMES // 4, 10)
    )


class GRUSeries(nn.Module):
    """A GRU over numbers, judged by its last state."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.cells = nn.GRU(CHANNELS, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.cells(x.transpose(1, 2))
        return self.head(last[-1])


class BiLSTM(nn.Module):
    """Both ways through the text, dropout between its layers, the mean over all positions."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 32, padding_idx=0)
        self.cells = nn.LSTM(
            32, width, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2
        )
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(2 * width, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.cells(self.words(ids))
        real = (ids != 0).unsqueeze(-1).to(states.dtype)
        return self.head(self.dropout((states * real).sum(1) / real.sum(1).clamp(min=1)))


def bag(width: int = 64) -> nn.Module:
    """A text by the mean of its words."""
    return nn.Sequential(
        nn.EmbeddingBag(TOKENS, width, mode="mean"),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, TOKENS),
    )


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.one(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.two(x))


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self, width: int = 96, blocks: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(*(MixerBlock(64, width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


def autoencoder(width: int = 16) -> nn.Module:
    """A picture to 64 numbers and back; what it is compared with are values."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128 * width, 64),
        nn.ReLU(),
        nn.Linear(64, 128 * width),
        nn.ReLU(),
        nn.Unflatten(1, (2 * width, 8, 8)),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 3, 3, 2, 1, output_padding=1),
        nn.Flatten(),
    )


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, fewer heads for keys and values, SwiGLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        angles = torch.outer(
            torch.arange(LENGTH), 10000.0 ** -(torch.arange(0, self.size, 2) / self.size)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)  # (L, size / 2)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        L = x.shape[-2]
        cos, sin = self.cos[:L], self.sin[:L]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        B, L, _ = x.shape
        y = self.norm1(x)
        q, k, v = (
            layer(y).view(B, L, -1, self.size).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        k, v = (each.repeat_interleave(2, 1) for each in (self.turned(k), v))
        seen = F.scaled_dot_product_attention(self.turned(q), k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).reshape(B, L, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def llama(width: int = 96, layers: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(TOKENS, width),
        *(LlamaBlock(width, 4) for _ in range(layers)),
        nn.RMSNorm(width),
        nn.Linear(width, TOKENS, bias=False),
    )


class TiedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        L, y = x.shape[1], self.norm1(x)
        later = torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class TiedGPT(nn.Module):
    """Scores by the embedding's own matrix, positions as a parameter of the network itself."""

    def __init__(self, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(TiedBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def instance(width: int = 24) -> nn.Module:
    """Each picture by its own statistics, slopes that are learnt."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1),
        nn.InstanceNorm2d(width, affine=True),
        nn.PReLU(width),
        nn.Conv2d(width, 2 * width, 3, 2, 1),
        nn.InstanceNorm2d(2 * width, affine=True),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 2 * width, 3, 2, 1),
        nn.InstanceNorm2d(2 * width),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(128 * width, 64),
        nn.PReLU(),
        nn.Linear(64, 10),
    )


class Twice(nn.Module):
    """One convolution used three times in a row."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.again = nn.Conv2d(3, width, 3, 2, 1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(4, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + F.relu(self.norm(self.again(x)))
        return self.head(x.mean((2, 3)))


def strided(width: int = 24) -> nn.Module:
    """5x5 convolutions with strides, no pool but the last."""
    return nn.Sequential(
        nn.Conv2d(3, width, 5, 2, 2),
        nn.ELU(),
        nn.Conv2d(width, 2 * width, 5, 2, 2),
        nn.Hardswish(),
        nn.Conv2d(2 * width, 2 * width, 5, 2, 2),
        nn.Softplus(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


class Tabular(nn.Module):
    """One row: the first columns are categories, the others numbers."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        sizes = [min(16, (n + 1) // 2) for n in KINDS]
        self.kinds = nn.ModuleList(
            nn.Embedding(n, size) for n, size in zip(KINDS, sizes, strict=True)
        )
        self.numbers = nn.BatchNorm1d(NUMBERS)
        self.body = nn.Sequential(
            nn.Linear(sum(sizes) + NUMBERS, width),
            nn.ReLU(),
            nn.BatchNorm1d(width),
            nn.Dropout(0.1),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        kinds = [layer(x[:, i].long()) for i, layer in enumerate(self.kinds)]
        return self.body(torch.cat([*kinds, self.numbers(x[:, len(KINDS) :])], 1))


def table(N: int, rng: Generator) -> Tensor:
    """(N, columns) of categories as numbers, then numbers."""
    kinds = [torch.randint(0, n, (N, 1), generator=rng).float() for n in KINDS]
    return torch.cat([*kinds, torch.randn(N, NUMBERS, generator=rng)], 1)


class TemporalBlock(nn.Module):
    """Causal convolutions whose weights are a length and a direction."""

    def __init__(self, before: int, width: int, dilation: int) -> None:
        super().__init__()
        self.left = 2 * dilation
        self.one = weight_norm(nn.Conv1d(before, width, 3, dilation=dilation))
        self.two = weight_norm(nn.Conv1d(width, width, 3, dilation=dilation))
        self.dropout, self.short = nn.Dropout(0.1), nn.Conv1d(before, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(F.relu(self.one(F.pad(x, (self.left, 0)))))
        y = self.dropout(F.relu(self.two(F.pad(y, (self.left, 0)))))
        return F.relu(y + self.short(x))


class TCN(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        sizes = (CHANNELS, width, width, width)
        self.blocks = nn.Sequential(*(TemporalBlock(sizes[i], width, 2**i) for i in range(3)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)[:, :, -1])


SERIES = (CHANNELS, TIMES)
OTHERS = (
    Case("ViT, class token, dropout", ViT, 32),
    Case("GPT, tied, dropout", TiedGPT, 16, None, every=True),
    Case("ConvNeXt-like, layer scale", convnext, 32),
    Case("MobileNet-like, depthwise", mobile, 32),
    Case("TCN, weight norm", TCN, 32, SERIES),
    Case("LSTM both ways, dropout", BiLSTM, 16, None),
    Case("Llama-like, rotary, RMSNorm", llama, 16, None, every=True),
    Case("autoencoder, transposed", autoencoder, 32, values=math.prod((3, 32, 32))),
    Case("InstanceNorm, PReLU", instance, 32),
    Case("bag of words", bag, 32, None),
    Case("squeeze and excite, BatchNorm", squeeze, 32),
    Case("DenseNet-like, BatchNorm", dense, 32),
    Case("WideResNet-10-2, dropout", wide, 32),
    Case("dilated CNN for series", inertial, 32, SERIES),
    Case("GRU 2 x 128 for series", GRUSeries, 32, SERIES),
    Case("MLP-Mixer", Mixer, 32),
    Case("one layer three times", Twice, 32),
    Case("strided 5x5, adaptive pool", strided, 32),
    Case("table of categories and numbers", Tabular, 64, draw=table),
)
