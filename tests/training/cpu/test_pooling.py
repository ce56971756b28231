"""The vectorised pool is torch's, bit for bit, and a quickened network trains to the same bits."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from flrce.models.flat import bind_to_vector, pack_model
from flrce.models.nets import build_network
from flrce.training.pooling_layers import FastMaxPool2x2, use_fast_pools
from flrce.training.trainer import TorchTrainer
from training import train


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(0, 2**31),
)
def test_values_and_gradients_are_torchs(n, channels, height, width, seed):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(
        -1, 2, (n, channels, 2 * height, 2 * width), generator=rng
    ).float()  # few values, so many ties
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    a, b = FastMaxPool2x2(2)(mine), F.max_pool2d(theirs, 2)
    g = torch.randn(a.shape, generator=rng)
    a.backward(g)
    b.backward(g)
    assert torch.equal(a, b)
    assert torch.equal(mine.grad, theirs.grad)
    with torch.inference_mode():
        assert torch.equal(FastMaxPool2x2(2)(x), b)


def test_the_first_of_equals_gets_the_gradient():
    # rows 5 7 | 7 1: of the two sevens the upper right one comes first
    x = torch.tensor([[[[5.0, 7.0], [7.0, 1.0]]]], requires_grad=True)
    FastMaxPool2x2(2)(x).backward(torch.full((1, 1, 1, 1), 3.0))
    assert x.grad.tolist() == [[[[0.0, 3.0], [0.0, 0.0]]]]


@pytest.mark.parametrize(("height", "width"), [(5, 4), (4, 5), (5, 7)])
def test_odd_sizes(height, width):
    x = torch.randn(2, 3, height, width, requires_grad=True)
    assert torch.equal(FastMaxPool2x2(2)(x), F.max_pool2d(x, 2))


def test_only_plain_pools_are_replaced():
    pools = [
        nn.MaxPool2d(2),
        nn.MaxPool2d((2, 2), (2, 2)),
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, 1),
        nn.MaxPool2d(2, 2, 1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
        nn.AvgPool2d(2),
    ]
    net = use_fast_pools(nn.Sequential(*pools))
    assert [type(layer) is FastMaxPool2x2 for layer in net] == [True, True, *[False] * 6]


class Seen(nn.ReLU):
    """Notes how many values it was given."""

    def forward(self, x):
        self.seen = x.numel()
        return super().forward(x)


def test_a_relu_waits_for_its_pool_in_sequences_only(monkeypatch):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.pool = Seen(), nn.MaxPool2d(2)

        def forward(self, x):
            return self.pool(self.relu(x) - 1)

    monkeypatch.setattr(nn, "ReLU", Seen)  # the class that waits
    plain = nn.Sequential(Seen(), nn.MaxPool2d(2), Seen(), Own())
    net, x = use_fast_pools(copy.deepcopy(plain)), torch.randn(1, 1, 8, 8)
    assert torch.equal(net(x), plain(x))
    assert [net[0].seen, net[2].seen, net[3].relu.seen] == [16, 16, 16]
    assert [plain[0].seen, plain[2].seen, plain[3].relu.seen] == [64, 16, 16]


class Looks(nn.Module):
    """A network that takes its sequence's layers one by one, or some of them together."""

    def __init__(self, how):
        super().__init__()
        self.how, self.layers = (
            how,
            nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        )

    def forward(self, x):
        if self.how == "slices":
            early = self.layers[:2](x)
            return early.mean((2, 3)) + self.layers[2:](early).mean((2, 3))
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x.mean((2, 3)))
        return seen[1] + seen[2]


class Before(nn.Sequential):
    """A ReLU that changes what its sequence is given, which others read."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2)))

    def forward(self, x):
        x = x * 1
        return self[0](x).mean((2, 3)) + x.mean((2, 3))


def hooked(place, change):
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    net[place].register_forward_hook(lambda layer, given, out: change(out))
    return net


@pytest.mark.parametrize(
    "net",
    [
        Looks("one by one"),
        Looks("slices"),
        Before(),
        hooked(2, lambda out: 2 * out),
        hooked(1, lambda out: out - 1),
        nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ),
    ],
    ids=["one by one", "slices", "in place", "hooked pool", "hooked relu", "plain"],
)
def test_whoever_looks_at_single_layers_sees_what_they_make(net):
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(use_fast_pools(copy.deepcopy(net))(x), net(x))


@pytest.mark.parametrize(("name", "shape"), [("cnn-cifar", (3, 32, 32)), ("cnn-digits", (1, 8, 8))])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_client_ends_at_the_same_bits(name, shape, first):
    """Training on uint8 samples with flat regions, whose convolutions tie, against torch's own
    layers.
    """
    net, rng = build_network(name, shape, 10, 0), torch.Generator().manual_seed(1)
    x = torch.randint(0, 2, (20, *shape), dtype=torch.uint8, generator=rng) * 255
    x[:, :, : shape[1] // 2] = 0
    y, order, sizes = torch.arange(20) % 10, np.arange(40) % 20, np.array([16, 16, 8])
    quick, plain = TorchTrainer(net, shape), TorchTrainer(net, shape)
    plain.net = rebound(plain, net)
    found, expected = (
        train(b, pack_model(net), x, y, 1 / 255, -0.5, order, sizes, lr=0.1, first=first)
        for b in (quick, plain)
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    one, other = (b.evaluate(found[0], x, y, 1 / 255, -0.5) for b in (quick, plain))
    assert all(torch.equal(one[name], other[name]) for name in ("accuracy", "loss"))


def rebound(bench, net):
    """The network as it was given, in the bench's memory."""
    return bind_to_vector(copy.deepcopy(net), bench.w)
