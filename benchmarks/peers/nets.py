"""The networks that everyone trains, of torch's layers alone: peers' environments have no flrce."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS, LENGTH = 80, 80  # characters there are, and in a sample


def cnn(classes: int) -> nn.Module:
    """The paper's for CIFAR-10."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 120, bias=False),
        nn.ReLU(),
        nn.Linear(120, 84, bias=False),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


class Block(nn.Module):
    """Two 3x3 convolutions with GroupNorm beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.GroupNorm(8, after)
        )
        self.second = nn.Sequential(
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.GroupNorm(8, after)
        )
        self.beside = nn.Sequential()
        if before != after:
            self.beside = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(8, after)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.beside(x))


def resnet(classes: int) -> nn.Module:
    """ResNet-8: 16, 32 and 64 channels."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.GroupNorm(8, 16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


class LSTM(nn.Module):
    """LEAF's for the next character: 8 floats a character, two layers of 256."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.ids, self.cells = nn.Embedding(TOKENS, 8), nn.LSTM(8, 256, 2, batch_first=True)
        self.head = nn.Linear(256, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cells(self.ids(ids))[0][:, -1])


class GPT(nn.Module):
    """Four causal transformer layers of 128 that tell the next character."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.ids, self.places = nn.Embedding(TOKENS, 128), nn.Embedding(LENGTH, 128)
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.ids(ids) + self.places(torch.arange(LENGTH, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=ids.device)
        return self.head(self.layers(x, mask, is_causal=True)[:, -1])


NETS = {"cnn": cnn, "resnet-8": resnet, "lstm": LSTM, "gpt": GPT}


def build(name: str, classes: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETS[name](classes)
