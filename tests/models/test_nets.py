"""Networks by name: shapes, sizes by hand, what they refuse, and that each learns what it is
for.
"""

import numpy as np
import pytest
import torch
from torch import nn

from flrce import Experiment, run
from flrce.data.sources import Source
from flrce.errors import BadInput
from flrce.models.flat import make_layout
from flrce.models.nets import (
    NETWORK_KINDS,
    NETWORK_NAMES,
    NetworkRequirements,
    build_network,
    choose_network,
)

IMAGE, SERIES, TABLE, TEXT = (3, 16, 16), (6, 40), (7,), (12,)
SHAPES = {"images": IMAGE, "series": SERIES, "numbers": TABLE, "tokens": TEXT}


def sample(takes, N=4):
    shape = (N, *SHAPES[takes])
    return torch.randint(0, 20, shape) if takes == "tokens" else torch.randn(shape)


def made(name, outputs=5, **more):
    takes = NETWORK_KINDS[name].takes
    return build_network(
        name, SHAPES[takes], outputs, 0, vocabulary=20 if takes == "tokens" else 0, **more
    )


ALONE = [name for name in NETWORK_KINDS if name != "llama"]  # which needs packages


@pytest.mark.parametrize("name", ALONE)
def test_each_gives_as_many_numbers_as_asked_for(name):
    assert made(name)(sample(NETWORK_KINDS[name].takes)).shape == (4, 5)


@pytest.mark.parametrize("name", [name for name in ALONE if NETWORK_KINDS[name].takes == "tokens"])
def test_an_answer_after_every_token(name):
    net, ids = made(name, every=True), sample("tokens")
    scores = net(ids)
    assert scores.shape == (4, 12, 5)
    later = ids.clone()
    later[:, 7:] = 0
    torch.testing.assert_close(net(later)[:, :7], scores[:, :7])  # nobody sees what comes after


@pytest.mark.parametrize("name", ALONE)
def test_the_seed_alone_decides(name):
    one, _, two = made(name), torch.rand(9), made(name)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        # stem 3*16*9 = 432; blocks 2*16*16*9, 16*32*9 + 32*32*9 + 16*32, 32*64*9 + 64*64*9 + 32*64;
        # norms 2 * (16*3 + 32*3 + 64*3); head 65*10
        ("resnet-8", 432 + 4608 + 14336 + 57344 + 672 + 650),
        ("resnet-8-bn", 432 + 4608 + 14336 + 57344 + 672 + 650),
        # two more blocks of each width: 2 * 2 * 9 (16*16 + 32*32 + 64*64) and their norms 2 * 4 *
        # (16 + 32 + 64)
        ("resnet-20", 78042 + 193536 + 896),
        ("resnet-18", 11_173_962),  # as in the PyTorch zoo's ResNet-18 for CIFAR
    ],
)
def test_residual_networks_have_the_right_size(name, weights):
    assert make_layout(build_network(name, (3, 32, 32), 10, 0)).trainable == weights


def test_leafs_network_has_the_right_size():
    # embedding 80*8; layer 1: 4*256*(8 + 256 + 2); layer 2: 4*256*(512 + 2); head 257*80
    assert (
        make_layout(build_network("lstm", (80,), 80, 0, vocabulary=80)).size
        == 640 + 272_384 + 526_336 + 20_560
    )


def test_batch_norm_travels_and_group_norm_has_nothing_to_send():
    plain, batch = (
        make_layout(build_network(name, IMAGE, 5, 0)) for name in ("resnet-8", "resnet-8-bn")
    )
    assert plain.size == plain.trainable
    assert batch.size == batch.trainable + 2 * (16 * 3 + 32 * 3 + 64 * 3)


def test_the_net_for_each_kind():
    assert choose_network(NetworkRequirements((80,), 90, vocabulary=90)) == "lstm"
    assert choose_network(NetworkRequirements(SERIES, 5)) == "cnn-1d"
    assert choose_network(NetworkRequirements(TABLE, 1)) == "mlp"
    assert choose_network(NetworkRequirements((3, 32, 32), 10)) == "cnn-cifar"
    assert set(NETWORK_KINDS) < set(NETWORK_NAMES)


def test_options_reach_the_network():
    net = made("gpt", options={"layers": 3, "width": 32, "heads": 2})
    assert len(net.layers) == 3
    assert net.head.in_features == 32


@pytest.mark.parametrize(
    ("name", "shape", "vocabulary", "options", "match"),
    [
        ("gpt", TEXT, 20, {"depth": 3}, "model.options.depth is no option of gpt"),
        ("gpt", TEXT, 20, {"width": 30}, "width = 30 must be a multiple of heads = 4"),
        ("lstm", TABLE, 0, {}, "takes tokens, the data has numbers"),
        ("mlp", TEXT, 20, {}, "takes numbers, the data has tokens"),
        ("resnet-8", SERIES, 0, {}, "takes images, the data has series"),
        ("cnn-cifar", (3, 28, 28), 0, {}, r"wants samples of shape \(3, 32, 32\)"),
        ("logistic", TABLE, 0, {"hidden": 3}, "it has none"),
        ("gpt", TEXT, 20, {"layers": 2.5}, "model.options.layers = 2.5: should be a valid integer"),
        ("mlp", TABLE, 0, {"hidden": 0}, "model.options.hidden = 0: should be greater"),
        ("llama", TEXT, 20, {"rank": 4.5}, "model.options.rank = 4.5: should be a valid integer"),
        ("llama", TEXT, 20, {"rank": "4"}, "model.options.rank = '4': should be a valid integer"),
        ("llama", TEXT, 20, {"rank": 4097}, "model.options.rank = 4097: should be less"),
        ("llama", TEXT, 20, {"alpha": 0}, "model.options.alpha = 0: should be greater than 0"),
        (
            "llama",
            TEXT,
            20,
            {"targets": 3},
            "model.options.targets = 3: should be a valid string or a valid list",
        ),
        (
            "llama",
            TEXT,
            20,
            {"dtype": "float16"},
            "model.options.dtype = 'float16': should be 'float32' or 'bfloat16'",
        ),
        (
            "llama",
            TEXT,
            20,
            {"recompute": "no"},
            "model.options.recompute = 'no': should be a valid boolean",
        ),
        (
            "llama",
            TEXT,
            20,
            {"seeds": 10**11},
            "model.options.seeds = 100000000000: should be less",
        ),
        (
            "llama",
            TEXT,
            20,
            {"path": ""},
            "model.options.path = '': should be text of at least 1 character",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(name, shape, vocabulary, options, match):
    with pytest.raises(BadInput, match=match):
        build_network(name, shape, 5, 0, vocabulary, options=options)


def learnt(pool, name, rounds=12, lr=0.1, **options):
    experiment = Experiment(
        rounds=rounds,
        clients=6,
        per_round=6,
        data={"partition": "iid"},
        recipe={"name": "fedavg"},
        train={"lr": lr, "epochs": 2},
        model={"name": name, "options": options or None},
        engine={"workers": 1},
    )
    return run(experiment, data=pool).summary["accuracy"]


def test_image_nets_learn():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 180)
    x = rng.normal(size=(180, 1, 8, 8)).astype(np.float32)
    x[np.arange(180), 0, 2 * y] += 2.0  # a bright row
    pool = Source("rows", x, y, ("a", "b", "c"))
    for name in ("resnet-8", "resnet-8-bn"):
        assert learnt(pool, name, rounds=6) > 0.8


def test_series_net_learns():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 180)
    t = np.arange(32)
    x = np.sin(t * (1 + y[:, None]) / 3 + rng.uniform(0, 6, (180, 1)))[:, None] + 0.1 * rng.normal(
        size=(180, 2, 32)
    )
    pool = Source("waves", x.astype(np.float32), y, ("slow", "fast", "faster"))
    assert learnt(pool, "auto") > 0.9


@pytest.mark.parametrize(
    ("name", "lr", "options"),
    [
        ("lstm", 1.0, {"width": 32, "layers": 1}),
        ("gru", 0.5, {"width": 32, "layers": 1}),
        ("gpt", 0.3, {"width": 32, "layers": 1}),
    ],
)
def test_token_nets_learn_the_next_symbol(name, lr, options):
    rng = np.random.default_rng(0)
    x = (rng.integers(0, 4, (240, 1)) + np.arange(6)) % 4  # 0 1 2 3 0 1 ...
    pool = Source("cycle", x, (x[:, -1] + 1) % 4, tuple("abcd"), kind="tokens")
    assert learnt(pool, name, rounds=20, lr=lr, **options) > 0.9


def test_a_net_of_ones_own_gets_what_it_asks_for():
    from flrce.config.experiment import build_net

    pool = Source(
        "t", np.zeros((4, 6), np.int64), np.zeros(4, np.int64), tuple("ab"), kind="tokens"
    )
    net = build_net("test_nets:Own", pool.spec, 0, {"width": 3})
    assert net.weight.shape == (2, 3)
    with pytest.raises(BadInput, match="cannot be built"):
        build_net("test_nets:Own", pool.spec, 0, {"depth": 3})


class Own(nn.Embedding):
    def __init__(self, vocabulary, width):
        super().__init__(max(vocabulary, 2), width)


class Few(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        (
            np.zeros((60, 7), np.float32),
            np.arange(60) % 3,
            "Few cannot take float32 samples of shape .7,.",
        ),
        (
            np.zeros((60, 6), np.float32),
            np.arange(60) % 5,
            "Few gives 3 scores where the data has 5 classes",
        ),
        (np.zeros((60, 6), np.int64), np.arange(60) % 3, "Few cannot take token ids of shape .6,."),
    ],
)
def test_a_network_that_does_not_fit_the_data_is_told_before_training(x, y, match):
    pool = Source("made", x, y, tuple(map(str, range(5)))[: y.max() + 1])
    with pytest.raises(BadInput, match=match):
        run(
            Experiment(rounds=1, clients=3, per_round=2, data={"partition": "iid"}),
            data=pool,
            model=Few(),
        )
