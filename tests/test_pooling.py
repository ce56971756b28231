"""The vectorised pool is torch's, bit for bit, and a quickened network trains to the same bits."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from flrce.local.pooling import Halve, quicken
from flrce.local.trainer import Trainer
from flrce.models.flat import bind, pack
from flrce.models.nets import build
from training import train


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**31))
def test_values_and_gradients_are_torchs(n, channels, height, width, seed):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, (n, channels, 2 * height, 2 * width), generator=rng).float()  # few values, so many ties
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    a, b = Halve(2)(mine), F.max_pool2d(theirs, 2)
    g = torch.randn(a.shape, generator=rng)
    a.backward(g)
    b.backward(g)
    assert torch.equal(a, b)
    assert torch.equal(mine.grad, theirs.grad)
    with torch.inference_mode():
        assert torch.equal(Halve(2)(x), b)


def test_the_first_of_equals_gets_the_gradient():
    # rows 5 7 | 7 1: of the two sevens the upper right one comes first
    x = torch.tensor([[[[5.0, 7.0], [7.0, 1.0]]]], requires_grad=True)
    Halve(2)(x).backward(torch.full((1, 1, 1, 1), 3.0))
    assert x.grad.tolist() == [[[[0.0, 3.0], [0.0, 0.0]]]]


@pytest.mark.parametrize(("height", "width"), [(5, 4), (4, 5), (5, 7)])
def test_odd_sizes(height, width):
    x = torch.randn(2, 3, height, width, requires_grad=True)
    assert torch.equal(Halve(2)(x), F.max_pool2d(x, 2))


def test_only_plain_pools_are_replaced():
    pools = [nn.MaxPool2d(2), nn.MaxPool2d((2, 2), (2, 2)), nn.MaxPool2d(3), nn.MaxPool2d(2, 1), nn.MaxPool2d(2, 2, 1),
             nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, return_indices=True), nn.AvgPool2d(2)]  # fmt: skip
    net = quicken(nn.Sequential(*pools))
    assert [type(layer) is Halve for layer in net] == [True, True, *[False] * 6]


def test_a_relu_steps_behind_its_pool_in_sequences_only():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)

        def forward(self, x):
            return self.pool(self.relu(x) - 1)

    net = quicken(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.ReLU(), Own()))
    assert [type(layer) for layer in net] == [Halve, nn.ReLU, nn.ReLU, Own]
    assert type(net[3].relu) is nn.ReLU
    assert type(net[3].pool) is Halve
    x = torch.randn(1, 1, 8, 8)
    plain = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.ReLU(), Own())
    assert torch.equal(net(x), plain(x))


@pytest.mark.parametrize(("name", "shape"), [("cnn-cifar", (3, 32, 32)), ("cnn-digits", (1, 8, 8))])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_client_ends_at_the_same_bits(name, shape, first):
    """Training on uint8 samples with flat regions, whose convolutions tie, against torch's own layers."""
    net, rng = build(name, shape, 10, 0), torch.Generator().manual_seed(1)
    x = torch.randint(0, 2, (20, *shape), dtype=torch.uint8, generator=rng) * 255
    x[:, :, : shape[1] // 2] = 0
    y, order, sizes = torch.arange(20) % 10, np.arange(40) % 20, np.array([16, 16, 8])
    quick, plain = Trainer(net, shape), Trainer(net, shape)
    plain.net = rebound(plain, net)
    found, expected = (
        train(b, pack(net), x, y, 1 / 255, -0.5, order, sizes, lr=0.1, first=first) for b in (quick, plain)
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    one, other = (b.evaluate(found[0], x, y, 1 / 255, -0.5) for b in (quick, plain))
    assert all(torch.equal(one[name], other[name]) for name in ("accuracy", "loss"))


def rebound(bench, net):
    """The network as it was given, in the bench's memory."""
    return bind(copy.deepcopy(net), bench.w, bench.g)
