"""FedPara (Hyeon-Woo, Ye-Bin & Oh 2022): weights as the Hadamard product of two low-rank ones.

A linear layer's W (m, n) is (X1 Y1^T) * (X2 Y2^T), X (m, R) and Y (n, R): its rank may be R^2, with
2 R (m + n) floats. A convolution's W (O, I, k) is the product of two sum_rs T[r, s] X[., r] Y[., s]
(the paper's proposition 3), X (O, R), Y (I, R), T (R, R, k): 2 R (O + I + R k) floats. The factors
train and travel in the place of W.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.errors import BadInput

#: inputs of a layer: with fewer, R^2 would be far below the rank that its kernels can have together
MIN_INPUTS = 4
CONVOLUTIONS: dict[type[nn.Module], Any] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d}


class HadamardLinear(nn.Module):
    """A linear layer whose weight (out, in) is made of factors of rank R."""

    X1: Tensor
    Y1: Tensor
    X2: Tensor
    Y2: Tensor

    def __init__(self, base: nn.Linear, rank: int, draw: torch.Generator) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = base.in_features, base.out_features, rank
        # each entry of X Y^T is a sum of R products of two factors
        deviation = (float(base.weight.detach().std()) ** 0.5 / rank**0.5) ** (1 / 2)
        for i in (1, 2):
            self.register_parameter(f"X{i}", _draw((base.out_features, rank), deviation, draw))
            self.register_parameter(f"Y{i}", _draw((base.in_features, rank), deviation, draw))
        self.bias = base.bias

    @property
    def weight(self) -> Tensor:
        found: Tensor = (self.X1 @ self.Y1.T) * (self.X2 @ self.Y2.T)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, rank={self.rank}"


class HadamardConvolution(nn.Module):
    """A convolution whose kernel (O, I, ...) is made of factors of rank R."""

    T1: Tensor
    X1: Tensor
    Y1: Tensor
    T2: Tensor
    X2: Tensor
    Y2: Tensor

    def __init__(self, base: nn.Conv1d | nn.Conv2d, rank: int, draw: torch.Generator) -> None:
        super().__init__()
        self.shape, self.rank = tuple(base.weight.shape), rank
        self.convolve = CONVOLUTIONS[type(base)]
        self.settings = {
            "stride": base.stride, "padding": base.padding, "dilation": base.dilation,
        }  # fmt: skip
        # each entry is a sum of R^2 products of three factors
        deviation = (float(base.weight.detach().std()) ** 0.5 / rank) ** (1 / 3)
        kernel = math.prod(self.shape[2:])
        for i in (1, 2):
            self.register_parameter(f"T{i}", _draw((rank, rank, kernel), deviation, draw))
            self.register_parameter(f"X{i}", _draw((self.shape[0], rank), deviation, draw))
            self.register_parameter(f"Y{i}", _draw((self.shape[1], rank), deviation, draw))
        self.bias = base.bias

    @property
    def weight(self) -> Tensor:
        first = torch.einsum("rsk,or,is->oik", self.T1, self.X1, self.Y1)
        return (first * torch.einsum("rsk,or,is->oik", self.T2, self.X2, self.Y2)).view(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.convolve(x, self.weight, self.bias, **self.settings)
        return found

    def extra_repr(self) -> str:
        return f"{self.shape[1]}, {self.shape[0]}, kernel={self.shape[2:]}, rank={self.rank}"


def factorize_network(net: nn.Module, gamma: float, seed: int = 0) -> nn.Module:
    """A copy of the net with low-rank Hadamard products where these have fewer floats.

    The rank is ceil((1 - gamma) r_min + gamma r_max): r_min is the least whose products can have
    full rank, r_max the largest with fewer floats than W. The factors are drawn so that W has the
    standard deviation that it had. Frozen and tied weights, layers with fewer than four inputs,
    grouped convolutions, recurrent layers and embeddings stay as they are.
    """
    if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 <= gamma <= 1:
        raise BadInput(f"model.lowrank = {gamma!r}: must be a number from 0 to 1")
    net, draw = copy.deepcopy(net), torch.Generator().manual_seed(seed)
    tied = _find_tied_weights(net)
    for path, layer in list(net.named_modules()):
        rank = choose_rank(layer, gamma)
        if not rank or id(layer.weight) in tied:
            continue
        low = _factorize_layer(layer, rank, draw)
        if not path:
            return low
        parent, _, name = path.rpartition(".")
        setattr(net.get_submodule(parent), name, low)
    if not has_low_rank_layers(net):
        raise BadInput(
            f"model.lowrank = {gamma}: {type(net).__name__} has no linear layer or convolution that"
            " would become smaller; leave it out"
        )
    return net


def _factorize_layer(layer: Any, rank: int, draw: torch.Generator) -> nn.Module:
    made = HadamardLinear if type(layer) is nn.Linear else HadamardConvolution
    return made(layer, rank, draw).train(layer.training)


def has_low_rank_layers(net: nn.Module) -> bool:
    """Whether a network has layers of low-rank Hadamard products."""
    return any(isinstance(layer, HadamardLinear | HadamardConvolution) for layer in net.modules())


def choose_rank(layer: nn.Module, gamma: float) -> int:
    """The rank of a layer's factors; 0: it stays as it is."""
    plain = type(layer) is nn.Linear or type(layer) in CONVOLUTIONS
    if not plain or not layer.weight.requires_grad:
        return 0
    if type(layer) in CONVOLUTIONS and (layer.groups != 1 or layer.padding_mode != "zeros"):
        return 0
    out, inside, *kernel = layer.weight.shape  # type: ignore[misc]
    if inside < MIN_INPUTS:
        return 0
    k = math.prod(kernel) if kernel else 0
    least = math.isqrt(min(out, inside) - 1) + 1  # the square root, rounded up
    most = _find_largest_rank(out, inside, k)
    return math.ceil((1 - gamma) * least + gamma * most) if most >= least else 0


def _find_largest_rank(out: int, inside: int, k: int) -> int:
    """The largest R with 2 R (out + inside + R k) < out inside max(k, 1)."""
    rank, size = 0, out * inside * max(k, 1)
    while 2 * (rank + 1) * (out + inside + (rank + 1) * k) < size:
        rank += 1
    return rank


def _draw(shape: tuple[int, ...], deviation: float, draw: torch.Generator) -> nn.Parameter:
    return nn.Parameter(deviation * torch.randn(shape, generator=draw))


def _find_tied_weights(net: nn.Module) -> set[int]:
    """Parameters that more than one name leads to."""
    seen: dict[int, int] = {}
    for _, p in net.named_parameters(remove_duplicate=False):
        seen[id(p)] = seen.get(id(p), 0) + 1
    return {key for key, count in seen.items() if count > 1}
