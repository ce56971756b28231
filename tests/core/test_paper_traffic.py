"""The paper's traffic to the byte: real payloads of one client, times 10 clients and 100 rounds."""

from functools import cache

import numpy as np
import pytest
import torch

from flrce.core.roles import RoundView
from flrce.core.types import LocalWork, Selection, Task
from flrce.devices.costs import training_flops
from flrce.methods.catalogue import recipes
from flrce.methods.compression.sparsify import TopK
from flrce.methods.compression.tensors import TensorDropout
from flrce.models.flat import pack_model
from flrce.models.nets import build_network
from flrce.models.part import copy_for_training
from flrce.rng import make_stream
from flrce.training.batches import Samples
from flrce.training.client import ClientRunner

NETS = {
    "cifar10": ("cnn-cifar", (3, 32, 32), 10),
    "cifar100": ("cnn-cifar", (3, 32, 32), 100),
    "emnist": ("cnn-emnist", (1, 28, 28), 62),
    "speech": ("cnn-speech", (1, 32, 32), 35),
}
SIZES = {  # trained floats, floats on the wire, tensors, training FLOPs of one sample
    "cifar10": (134_902, 134_946, 16, 2_793_456),
    "cifar100": (142_552, 142_596, 16, 2_838_816),
    "emnist": (64_722, 64_802, 14, 5_162_640),
    "speech": (26_285, 26_485, 14, 2_513_700),
}
#: bytes up and down in 100 rounds of 10 clients, by cifar10, cifar100, emnist, speech
TOTALS = {
    "fedavg": (1_079_568_000, 1_140_768_000, 518_416_000, 211_880_000),
    "fedprox": (1_079_568_000, 1_140_768_000, 518_416_000, 211_880_000),
    "fedcom": (880_521_000, 930_437_000, 422_833_000, 172_815_000),
    "fedcom-quantised": (674_922_000, 713_172_000, 324_178_000, 132_593_000),
    "dropout": (608_400_000, 654_480_000, 383_536_000, 141_472_000),
    "flrce": (1_079_568_000, 1_140_768_000, 518_416_000, 211_880_000),
}
cases = pytest.mark.parametrize("at", range(4), ids=list(NETS))


@cache
def shop(name):
    kind, shape, classes = NETS[name]
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 255, (4, *shape)).astype(np.uint8))
    return ClientRunner(
        build_network(kind, shape, classes, 0), shape, Samples(x, torch.arange(4), 1 / 255)
    )


def exchange(name, recipe):
    """(bytes down, the reply's payload) of one client's round under this recipe."""
    s = shop(name)
    w = pack_model(s.net).clone()
    view = RoundView(
        1, 10, (0,), torch.ones(1), None, lambda k: Task("a", 0, 1, 0, LocalWork(1, 4)), None
    )
    memory = recipe.initial_state(1, s.layout.trainable, s.layout.size)
    task = recipe.build_tasks(Selection((0,)), memory, view)[0]
    part = s.get_part(task)
    reply = s.train(w, task, np.arange(4), {})
    assert reply.error == ""
    return 4 * (len(w) if part.held is None else len(part.held)), reply.payload


@cases
def test_sizes_of_the_papers_networks(at):
    name = list(NETS)[at]
    s, shape = shop(name), NETS[name][1]
    flops = training_flops(copy_for_training(s.all, shape), shape)
    assert (s.layout.trainable, s.layout.size, len(s.layout.slots), flops) == SIZES[name]


@cases
@pytest.mark.parametrize("method", TOTALS)
def test_traffic_of_a_hundred_rounds(method, at):
    recipe = (
        recipes.CATALOGUE[method](epochs=1) if method == "fedprox" else recipes.CATALOGUE[method]()
    )
    down, payload = exchange(list(NETS)[at], recipe)
    assert (down + payload.nbytes) * 10 * 100 == TOTALS[method][at]


@cases
def test_sparse_codings(at):
    name = list(NETS)[at]
    d = SIZES[name][1]
    values_only = (863_652_000, 912_612_000, 414_732_000, 169_504_000)[at]
    indices = (1_187_520_000, 1_254_840_000, 570_256_000, 233_068_000)[at]
    u, layout = torch.randn(d), [("w", d)]
    for coding, total in (("bitmap", values_only), ("indices", indices)):
        payload, _ = TopK(0.6, coding).encode(u, layout, make_stream(0, "encode"), {})
        sent = payload.buffers["values"].numel() * 4 if coding == "bitmap" else payload.nbytes
        assert (4 * d + sent) * 1000 == total
    chosen, _ = TopK(0.6).encode(u, layout, make_stream(0, "encode"), {})
    assert set(chosen.buffers) == {
        "bitmap",
        "values",
    }  # the shortest: with indices it would outweigh the dense update


@cases
def test_expected_traffic_of_upload_dropout(at):
    name = list(NETS)[at]
    expected = (904_138_000, 955_393_000, 434_173_000, 177_450_000)[at]
    d, names = SIZES[name][1], shop(name).all.names
    rates = [
        0.1 + rank * (0.6 - 0.1) / 10 for rank in range(10)
    ]  # by rank among ten clients, .325 on average
    u, draws = torch.zeros(d), 25
    sent = np.array(
        [
            [
                TensorDropout(rate)
                .encode(u, names, make_stream(seed, "encode", 1, str(rate)), {})[0]
                .nbytes
                for rate in rates
            ]
            for seed in range(draws)
        ]
    ).sum(1)
    round_ = 10 * 4 * d + sent.mean()
    assert abs(100 * round_ - expected) < 4 * 100 * sent.std() / draws**0.5 + 1_000
    assert round(
        100 * (10 * 4 * d + sum(4 * d * (1 - rate) for rate in rates)), -3
    ) == pytest.approx(expected, abs=1_000)


@cases
def test_traffic_up_to_the_papers_stop(at):
    stops = (63, 47, 44, 52)[at]
    published = (0.680128, 0.536161, 0.228103, 0.110178)[at]
    down, payload = exchange(list(NETS)[at], recipes.flrce())
    assert round((down + payload.nbytes) * 10 * stops / 1e9, 6) == published


@cases
def test_a_correction_costs_a_second_vector_down(at):
    name = list(NETS)[at]
    recipe = recipes.fedcomgate()
    memory = recipe.initial_state(1, SIZES[name][0], SIZES[name][1])["trainer"]
    memory.last[0], memory.means[1] = 1, torch.zeros(SIZES[name][0])
    told = recipe.trainer.assign([Task("a", 0, 2, 0)], memory, None)[0]
    assert sum(4 * x.numel() for x in told.tensors.values()) == 4 * SIZES[name][0] + 4
