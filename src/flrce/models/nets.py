"""The paper's four CNNs (its refs. randdrop, hermes), one for digits, and a plain MLP."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn


def _cifar(classes: int, tanh: bool = False) -> nn.Sequential:
    """conv 3-6-16 (3x3, pad 1), each BatchNorm-ReLU-pool; fc 1024-120-84 without bias; fc-classes.

    `tanh`: the released code's network for CIFAR100 (`cifar100/models.py` at commit bae0216), which has a tanh behind
    the ReLU of each hidden linear layer. It bounds what reaches the last layer; the paper's text has no word of it.
    """
    first, second = ([nn.Tanh()], [nn.Tanh()]) if tanh else ([], [])  # one module each: a chain shares none
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 120, bias=False), nn.ReLU(), *first,
        nn.Linear(120, 84, bias=False), nn.ReLU(), *second,
        nn.Linear(84, classes),
    )  # fmt: skip


def _emnist(classes: int) -> nn.Sequential:
    """conv 1-20-20 (3x3, pad 1), each BatchNorm-ReLU-pool; fc 980-classes."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3, padding=1), nn.BatchNorm2d(20), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 20, 3, padding=1), nn.BatchNorm2d(20), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(980, classes),
    )  # fmt: skip


def _speech(classes: int) -> nn.Sequential:
    """conv 1-50-50 (2x2, stride 2, pad 2) on 32x32 features, each BatchNorm-ReLU-pool; fc 450-classes."""
    return nn.Sequential(
        nn.Conv2d(1, 50, 2, stride=2, padding=2), nn.BatchNorm2d(50), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(50, 50, 2, stride=2, padding=2), nn.BatchNorm2d(50), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(450, classes),
    )  # fmt: skip


def _digits(classes: int) -> nn.Sequential:
    """A small relative of the EMNIST net for 8x8 images."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, classes),
    )  # fmt: skip


def _mlp(shape: tuple[int, ...], classes: int, hidden: int = 64) -> nn.Sequential:
    width = int(torch.Size(shape).numel())
    return nn.Sequential(nn.Flatten(), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


#: name -> (input shape it wants, or None for any; builder from number of classes)
CNNS: dict[str, tuple[tuple[int, ...], Callable[[int], nn.Sequential]]] = {
    "cnn-cifar": ((3, 32, 32), _cifar),
    "cnn-emnist": ((1, 28, 28), _emnist),
    "cnn-speech": ((1, 32, 32), _speech),
    "cnn-digits": ((1, 8, 8), _digits),
    "cnn-cifar-tanh": ((3, 32, 32), partial(_cifar, tanh=True)),
}
NAMES = ("auto", *CNNS, "mlp")


def choose(shape: tuple[int, ...], kind: str = "classes", vocabulary: int = 0) -> str:
    """The net for inputs of this shape: the paper's where it has one (without tanh), else the MLP."""
    return next((name for name, (wanted, _) in CNNS.items() if wanted == shape), "mlp")


def build(
    name: str, shape: tuple[int, ...], outputs: int, seed: int, kind: str = "classes", vocabulary: int = 0
) -> nn.Module:
    """A freshly initialised net; the same seed gives the same weights, whatever was drawn before."""
    if name == "auto":
        name = choose(shape, kind, vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _mlp(shape, outputs) if name == "mlp" else CNNS[name][1](outputs)
