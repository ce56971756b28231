"""Which coordinates: sub-models cut from a chain of layers, and blocks that are frozen."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flrce.config.experiment import Experiment
from flrce.core.pieces import NoCompression
from flrce.core.types import ClientCost, LocalWork, Portion, Task, Updates
from flrce.devices.costs import training_flops
from flrce.errors import BadInput
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.submodel.units import PrefixUnits, RandomUnits
from flrce.models import slicing
from flrce.models.flat import make_layout, pack_model, unpack_model
from flrce.models.graph import build_layer_chain
from flrce.models.nets import build_network
from flrce.models.part import copy_for_training
from flrce.simulation import runs
from flrce.training.batches import Samples
from flrce.training.client import ClientRunner

#: data set -> (network, shape, classes)
NETS = {
    "cifar10": ("cnn-cifar", (3, 32, 32), 10),
    "cifar100": ("cnn-cifar", (3, 32, 32), 100),
    "emnist": ("cnn-emnist", (1, 28, 28), 62),
    "speech": ("cnn-speech", (1, 32, 32), 35),
}


def workshop(net, shape, n=12, classes=2):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 255, (n, *shape)).astype(np.uint8))
    y = torch.from_numpy(rng.integers(0, classes, n))
    return ClientRunner(net, shape, Samples(x, y, 1 / 255))


def shop(name):
    kind, shape, classes = NETS[name]
    return workshop(build_network(kind, shape, classes, 0), shape, classes=classes)


def task(client="a", t=1, batch=4, **part):
    return Task(
        client,
        0,
        t,
        seed=0,
        work=LocalWork(epochs=1, batch=batch),
        part=Portion(**part),
        compressor=NoCompression(),
    )


@pytest.mark.parametrize(
    ("name", "wire", "ratio"),
    [
        ("cifar10", 76_050, 0.558),
        ("cifar100", 81_810, 0.561),
        ("emnist", 47_942, 0.596),
        ("speech", 17_684, 0.575),
    ],
)
def test_three_quarters_of_the_units(name, wire, ratio):
    s, shape = shop(name), NETS[name][1]
    for ordered in (False, True):
        part = s.get_part(task(rate=0.75, ordered=ordered))
        assert (
            len(part.held)
            == make_layout(part.net).size
            == sum(size for _, size in part.names)
            == wire
        )
        assert len(part.held.unique()) == wire
        flops = training_flops(copy_for_training(part, shape), shape) / training_flops(
            copy_for_training(s.all, shape), shape
        )
        assert round(flops, 3) == ratio


@st.composite
def nets(draw):
    """A random chain for (2, 6, 6) samples."""
    layers, channels = [], 2
    for _ in range(draw(st.integers(0, 2))):
        out = draw(st.integers(1, 5))
        layers.append(nn.Conv2d(channels, out, 3, padding=1, bias=draw(st.booleans())))
        channels = out
        layers += [nn.BatchNorm2d(out)] * draw(st.booleans()) + [
            draw(st.sampled_from([nn.ReLU(), nn.Tanh()]))
        ]
    if draw(st.booleans()):
        layers.append(nn.MaxPool2d(2))
        inside = channels * 9
    else:
        inside = channels * 36
    layers.append(nn.Flatten())
    for _ in range(draw(st.integers(0, 2))):
        out = draw(st.integers(1, 6))
        layers += [nn.Linear(inside, out, bias=draw(st.booleans()))] + [nn.BatchNorm1d(out)] * draw(
            st.booleans()
        )
        layers += [nn.ReLU()]
        inside = out
    return nn.Sequential(*layers, nn.Linear(inside, 3))


@settings(max_examples=25)
@given(nets(), st.floats(0.05, 0.99), st.integers(0, 99))
def test_a_sub_model_is_the_whole_with_its_other_units_silenced(net, rate, t):
    shape = (2, 6, 6)
    s = workshop(net, shape)
    w = torch.randn(
        s.layout.size, generator=torch.Generator().manual_seed(t)
    ).abs()  # variances are positive
    part = s.get_part(task(t=t, rate=rate))
    silenced = torch.zeros_like(w)
    for slot in s.layout.slots:
        if slot.name.endswith("running_var"):
            silenced[slot.span] = 1.0
    silenced[part.held] = w[part.held]
    x = torch.randn(5, *shape)
    small, full = unpack_model(part.net, w[part.held]), unpack_model(net, silenced)
    torch.testing.assert_close(small.eval()(x), full.eval()(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(small.train()(x), full.train()(x), rtol=1e-3, atol=1e-3)


@settings(max_examples=25)
@given(nets(), st.floats(0.05, 1))
def test_each_hidden_layer_keeps_its_share_and_the_logits_all(net, rate):
    blocks = build_layer_chain(net, (2, 6, 6))
    small = slicing.slice_network(net, make_layout(net), blocks, rate)
    for layer, less in zip(blocks.weight_layers[:-1], small.blocks.weight_layers[:-1], strict=True):
        assert less.out[0] == max(1, int(round(rate * layer.out[0], 6)))
    assert small.blocks.layers[-1].out == blocks.layers[-1].out
    assert small.blocks.layers[0].inside == blocks.layers[0].inside
    assert small.blocks == build_layer_chain(small.net, (2, 6, 6))  # as traced


def test_prefixes_nest_and_random_units_are_drawn_anew():
    s = shop("emnist")
    half, quarter = (set(s.get_part(task(rate=r, ordered=True)).held.tolist()) for r in (0.5, 0.25))
    assert quarter < half
    held = {
        (c, t): tuple(s.get_part(task(c, t, rate=0.5)).held.tolist()) for c in "ab" for t in (1, 2)
    }
    assert len(set(held.values())) == 4
    again = shop("emnist").get_part(task("b", 2, rate=0.5))
    assert tuple(again.held.tolist()) == held["b", 2]
    assert again.key == s.get_part(task("a", 1, rate=0.5)).key


class Fixed(nn.Module):
    """A chain whose forward has the flattened size written into it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8 * 16, 10)
        self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).view(-1, 8 * 16))


def test_sizes_written_into_forward_do_not_matter():
    s = workshop(Fixed(), (1, 8, 8), classes=10)
    reply = s.train(pack_model(s.net), task(rate=0.5), np.arange(8), {})
    assert reply.payload.nbytes == 4 * (10 * 4 * 16 + 10 + 4 * 9 + 4)
    assert [name for name, _ in s.get_part(task(rate=0.5)).names] == [
        "conv.weight",
        "conv.bias",
        "head.weight",
        "head.bias",
    ]


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.a(x) + self.b(x)


class Grouped(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 10)
        )


@pytest.mark.parametrize(
    ("recipe", "net", "word"),
    [
        ({"name": "dropout"}, Branch(), "RandomUnits.*branches"),
        ({"name": "heterofl"}, Branch(), "PrefixUnits"),
        ({"name": "flrce-freeze"}, Branch(), "FrozenBlocksTraining"),
        ({"name": "dropout"}, Grouped(), "groups"),
        ({"name": "flrce-freeze", "first": 3}, None, "block 3: must lie in 0..2"),
    ],
)
def test_networks_that_cannot_be_cut_are_refused_before_the_first_round(recipe, net, word):
    with pytest.raises(BadInput, match=word):
        runs.build_simulation(Experiment(clients=10, per_round=2, recipe=recipe), model=net)


def test_whole_models_need_no_chain():
    quick = {"rounds": 1, "clients": 10, "per_round": 2}
    for recipe in ({"name": "dropout", "rate": 1.0}, {"name": "timelyfl"}):
        done = list(runs.rounds(Experiment(**quick, recipe=recipe), model=Branch()))
        assert done[-1].record.outcome == "committed"


@given(st.integers(0, 999))
def test_unchanged_parts_leave_every_bit_of_w(seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(30, generator=g) * (torch.rand(30, generator=g) > 0.2)
    w[::7] = -0.0
    covered = torch.rand(4, 30, generator=g) > 0.5
    same = Updates(
        torch.arange(4), torch.zeros(4, 30), torch.tensor([3.0, 1, 7, 2]).double(), 30, covered
    )
    for aggregator in (
        WeightedMean(),
        WeightedMean(by="equal"),
        WeightedMean(fill=True),
        WeightedMean(0.3),
    ):
        assert torch.equal(aggregator(w, same, None).view(torch.int32), w.view(torch.int32))


def test_coverage_and_fill_by_hand():
    # coordinate 0 held by both (2 and 5, n = 1 and 3), 1 by the second only, 2 by nobody
    U = torch.tensor([[2.0, 0.0, 0.0], [5.0, 8.0, 0.0]])
    covered = torch.tensor([[True, False, False], [True, True, False]])
    updates = Updates(torch.arange(2), U, torch.tensor([1.0, 3.0]).double(), 3, covered)
    w = torch.tensor([1.0, 1.0, 1.0])
    assert WeightedMean()(w, updates, None).tolist() == [1 + 17 / 4, 1 + 8, 1]
    assert WeightedMean(fill=True)(w, updates, None).tolist() == [1 + 17 / 4, 1 + 24 / 4, 1]


@pytest.mark.parametrize("recipe", ["dropout", "heterofl", "flrce-dropout", "flrce-freeze"])
def test_uncovered_coordinates_never_move(recipe):
    experiment = Experiment(
        rounds=2, clients=10, per_round=2, recipe={"name": recipe, **extra(recipe)}
    )
    built = runs.build_simulation(experiment)
    w = pack_model(built.net)
    with runs.closing(built.engine):
        for done in built.iterate_rounds(experiment):
            moved = w.view(torch.int32) != done.state.w.view(torch.int32)
            may = torch.zeros(len(w), dtype=torch.bool)
            for client in done.record.chosen:
                may[
                    built.engine.runner.get_part(asked(recipe, client, done.record.t)).coordinates
                ] = True
            assert 0 < int(may.sum()) < len(w)
            assert not (moved & ~may).any()
            assert (moved & may).sum() > 0.3 * may.sum()
            w = done.state.w


def extra(recipe):
    return (
        {"rates": [0.5]} if recipe == "heterofl" else {"rate": 0.5} if "dropout" in recipe else {}
    )


def asked(recipe, client, t):
    plain = Task(client, 0, t, seed=0)
    if recipe == "flrce-freeze":
        return replace(plain, part=Portion(first=1))
    return replace(plain, part=Portion(0.5, recipe == "heterofl"))


@pytest.mark.parametrize(
    ("name", "fractions"),
    [
        ("cifar10", [(1.0, 1.0), (0.723, 0.999), (0.477, 0.992), (0.381, 0.081), (0.374, 0.006)]),
        ("emnist", [(1.0, 1.0), (0.672, 0.996), (0.375, 0.939)]),
        ("speech", [(1.0, 1.0), (0.662, 0.983), (0.363, 0.596)]),
    ],
)
def test_work_and_bytes_by_first_trained_block(name, fractions):
    s, shape = shop(name), NETS[name][1]
    assert s.blocks == len(fractions)
    full = training_flops(copy_for_training(s.all, shape), shape)
    for first, (flops, sent) in enumerate(fractions):
        part = s.get_part(task(first=first))
        assert round(training_flops(copy_for_training(part, shape), shape) / full, 3) == flops
        assert round(sum(size for _, size in part.names) / s.layout.size, 3) == sent
    with pytest.raises(BadInput, match="block"):
        s.get_part(task(first=len(fractions)))


@settings(max_examples=15)
@given(nets(), st.floats(0.3, 1), st.data())
def test_frozen_blocks_stay_and_are_not_sent(net, rate, data):
    s = workshop(net, (2, 6, 6), classes=3)
    first = data.draw(st.integers(0, s.blocks - 1))
    w = pack_model(net)
    part = s.get_part(task(first=first, rate=rate))
    reply = s.train(w, task(first=first, rate=rate), np.arange(12), {})
    new = s.get_trainer(part).w
    start = w if part.held is None else w[part.held]
    frozen = torch.ones(len(start), dtype=torch.bool)
    frozen[part.sent if part.sent is not None else slice(None)] = False
    assert torch.equal(new[frozen], start[frozen])
    assert reply.payload.nbytes == 4 * int((~frozen).sum())
    assert torch.equal(reply.payload.buffers["u"], (new - start)[~frozen])
    blocks = build_layer_chain(net, (2, 6, 6))
    names = {name.rpartition(".")[0] for name, _ in part.names}
    cut = blocks.layers.index(blocks.weight_layers[first])
    assert names.isdisjoint({layer.name for layer in blocks.layers[:cut] if first})
    assert {layer.name for layer in blocks.weight_layers[first:]} <= names


def test_smaller_is_faster():
    s = workshop(build_network("cnn-emnist", (1, 28, 28), 62, 0), (1, 28, 28), n=128, classes=62)
    w, index, seconds = pack_model(s.net), np.arange(128), {1.0: [], 0.5: [], 0.1: []}
    for _ in range(5):
        for rate, taken in seconds.items():
            start = time.perf_counter()
            s.train(w, task(rate=rate, batch=64), index, {})
            taken.append(time.perf_counter() - start)
    assert min(seconds[1.0]) > min(seconds[0.5]) > min(seconds[0.1])


def view(seconds):
    """A View of which only the estimate matters."""
    from flrce.core.roles import RoundView

    return RoundView(
        1,
        2,
        (0, 1),
        torch.ones(2),
        lambda t: ClientCost(compute_seconds=seconds[t.client] * t.part.rate),
        None,
        None,
    )


def test_rates_by_client_or_by_device():
    tasks = [Task(str(i), i, 1, seed=0) for i in range(200)]
    fixed = PrefixUnits(rates=[1.0, 0.5])
    first, second = (fixed.assign([replace(t, t=r) for t in tasks], view({})) for r in (1, 9))
    assert [t.part.rate for t in first] == [t.part.rate for t in second]
    assert 60 < sum(t.part.rate == 1 for t in first) < 140
    assert all(t.part.ordered for t in first)
    slow = {"0": 1.0, "1": 2.0, "2": 9.0}
    for piece in (RandomUnits, PrefixUnits):
        timed = piece(rates=[0.25, 1.0, 0.5], seconds=1.0).assign(tasks[:3], view(slow))
        assert [t.part.rate for t in timed] == [
            1.0,
            0.5,
            0.25,
        ]  # the last never fits, so the smallest


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomUnits(0),
        lambda: PrefixUnits(1.2),
        lambda: PrefixUnits(rates=[0.5, 2]),
        lambda: RandomUnits(seconds=3.0),
        lambda: RandomUnits("a"),
    ],
)
def test_bad_rates_are_refused(make):
    with pytest.raises(BadInput, match="rate"):
        make()


@pytest.mark.parametrize("aggregator", ["krum", {"piece": "krum", "attackers": 1}])
def test_parts_and_krum_exclude_each_other(aggregator):
    with pytest.raises(BadInput, match="RandomUnits"):
        Experiment.from_tables({"recipe": {"name": "dropout", "aggregator": aggregator}})


def test_networks_are_read_while_other_threads_train():
    """torch.fx would patch nn.Module under the other thread's feet; a plain sequence needs no
    tracing.
    """
    other, failed, done = (
        build_network("cnn-digits", (1, 8, 8), 10, 0).eval(),
        [],
        threading.Event(),
    )

    def train():
        while not done.is_set():
            try:
                other(torch.zeros(2, 1, 8, 8))
            except NameError as why:
                failed.append(why)

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(20):
        shop("cifar10").get_part(task(rate=0.5, first=1))
    done.set()
    thread.join()
    assert not failed
