"""Networks and flat vectors: sizes to the float, and round trips."""

import pytest
import torch
from torch import nn

from flrce.errors import BadInput
from flrce.models.flat import bind_to_vector, make_layout, pack_model, unpack_model
from flrce.models.graph import build_layer_chain
from flrce.models.nets import PAPER_CNNS, NetworkRequirements, build_network, choose_network

#: trainable, on the wire, float tensors, training FLOPs of a sample: computed from the authors'
#: models
SIZES = {
    ("cnn-cifar", 10): (134_902, 134_946, 16, 2_793_456),
    ("cnn-cifar", 100): (142_552, 142_596, 16, 2_838_816),
    ("cnn-cifar-tanh", 100): (142_552, 142_596, 16, 2_838_816),
    ("cnn-emnist", 62): (64_722, 64_802, 14, 5_162_640),
    ("cnn-speech", 35): (26_285, 26_485, 14, 2_513_700),
}


@pytest.mark.parametrize(("net", "sizes"), SIZES.items(), ids=str)
def test_the_paper_s_networks_have_the_paper_s_sizes(net, sizes):
    from flrce.devices.costs import training_flops

    name, classes = net
    shape = PAPER_CNNS[name][0]
    module = build_network(name, shape, classes, 0)
    where = make_layout(module)
    assert (where.trainable, where.size, len(where.slots)) == sizes[:3]
    assert training_flops(module, shape) == sizes[3]


def test_the_released_tanh_stands_behind_the_relu_of_both_hidden_linear_layers():
    plain, bounded = (
        build_network(name, (3, 32, 32), 100, 5).eval() for name in ("cnn-cifar", "cnn-cifar-tanh")
    )
    assert torch.equal(
        pack_model(plain), pack_model(bounded)
    )  # the same weights, so only the tanh differs
    x = torch.randn(4, 3, 32, 32)
    features, (one, _, two, _, head) = plain[:9], plain[9:]
    expected = head(two(one(features(x)).relu().tanh()).relu().tanh())
    assert torch.equal(bounded(x), expected)
    assert not torch.equal(plain(x), expected)
    assert (
        choose_network(NetworkRequirements((3, 32, 32), 10)) == "cnn-cifar"
    )  # what `auto` built before, it builds still


def test_the_same_seed_builds_the_same_weights():
    torch.manual_seed(7)
    one = pack_model(build_network("cnn-digits", (1, 8, 8), 10, 3))
    torch.manual_seed(8)
    assert torch.equal(one, pack_model(build_network("cnn-digits", (1, 8, 8), 10, 3)))
    assert not torch.equal(one, pack_model(build_network("cnn-digits", (1, 8, 8), 10, 4)))


@pytest.mark.parametrize("name", [*PAPER_CNNS, "mlp"])
def test_pack_and_unpack(name):
    shape = PAPER_CNNS[name][0] if name in PAPER_CNNS else (5,)
    one, two = build_network(name, shape, 7, 0), build_network(name, shape, 7, 1)
    unpack_model(two, pack_model(one))
    x = torch.rand(4, *shape)
    assert torch.equal(one.eval()(x), two.eval()(x))


def test_trainable_floats_come_first():
    where = make_layout(build_network("cnn-digits", (1, 8, 8), 10, 0))
    assert [s.trainable for s in where.slots] == sorted(
        (s.trainable for s in where.slots), reverse=True
    )
    assert not any("num_batches" in s.name for s in where.slots)


def test_a_bound_module_lives_in_its_vector():
    net = build_network("cnn-digits", (1, 8, 8), 10, 0)
    w = pack_model(net)
    bind_to_vector(net, w)
    w.zero_()
    assert all(float(p.detach().abs().sum()) == 0 for p in net.parameters())


class Functional(nn.Module):
    """A user's own net, written with functions."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(36, 3)

    def forward(self, x):
        return self.head(torch.flatten(nn.functional.max_pool2d(torch.relu(self.conv(x)), 2), 1))


def test_a_functional_module_is_a_chain():
    found = build_layer_chain(Functional(), (1, 8, 8))
    assert [layer.kind for layer in found.layers] == [
        "conv",
        "relu",
        "maxpool",
        "flatten",
        "linear",
    ]
    assert [layer.out for layer in found.layers] == [(4, 6, 6), (4, 6, 6), (4, 3, 3), (36,), (3,)]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(x) + self.a(x)


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (Residual(), "branches|calls"),
        (nn.Sequential(nn.Linear(4, 4), nn.GELU()), "GELU"),
        (nn.Sequential(nn.Flatten(0), nn.Linear(4, 4)), "flattens"),
    ],
)
def test_what_is_no_chain_is_refused_with_the_reason(module, match):
    with pytest.raises(BadInput, match=match):
        build_layer_chain(module, (4,))
