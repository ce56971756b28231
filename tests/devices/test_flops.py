"""FLOPs of recurrent, attending and embedding layers, counted by hand."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flrce.devices.costs import inference_flops, training_flops
from flrce.devices.flops import TrafficCounter, count_launches, unroll_lstms
from flrce.models.nets import build_network

V, E, H, L = 10, 8, 16, 5  # symbols, embedding, width, steps


class Read(nn.Module):
    def __init__(self, cell, **more):
        super().__init__()
        self.table, self.cells = nn.Embedding(V, E), cell(E, H, batch_first=True, **more)

    def forward(self, ids):
        return self.cells(self.table(ids))[0]


@pytest.mark.parametrize(("cell", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_a_recurrent_layer(cell, gates):
    """A step multiplies E + H numbers with gates * H columns: 2 (8 + 16) 16 = 768 per gate,
    forward.

    Backward costs it twice more, for the inputs and for the weights, but there is nothing before
    the first step's state to send a gradient to: 2 * 16 * 16 = 512 a gate less. Each of E numbers
    of a symbol adds once to the table.
    """
    forward = gates * 768 * L
    assert inference_flops(Read(cell), (L,), tokens=True) == forward
    assert training_flops(Read(cell), (L,), tokens=True) == 3 * forward - gates * 512 + E * L


def test_leafs_network_is_counted():
    # layer 1: 2 (8 + 256) 1024, layer 2: 2 (256 + 256) 1024 a step, 80 steps; 2 * 256 * 90 for the
    # scores
    forward = 80 * (2 * 264 * 1024 + 2 * 512 * 1024) + 2 * 256 * 90
    assert (
        inference_flops(build_network("lstm", (80,), 90, 0, vocabulary=90), (80,), tokens=True)
        == forward
    )


@pytest.mark.parametrize(
    "more", [{}, {"num_layers": 2, "bidirectional": True}, {"proj_size": 4}, {"bias": False}]
)
def test_the_plain_lstm_is_the_lstm(more):
    torch.manual_seed(0)
    net = Read(nn.LSTM, **more)
    ids = torch.randint(0, V, (3, L))
    torch.testing.assert_close(unroll_lstms(net)(ids), net(ids))
    time_first = nn.LSTM(E, H, **more)
    x = torch.randn(L, 3, E)
    for got, wanted in zip(unroll_lstms(time_first)(x)[1], time_first(x)[1], strict=True):
        torch.testing.assert_close(got, wanted)


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x):
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_attention():
    # forward: 2 * 5 * 8 * 24 for q, k, v; two products of 2 * 5 * 5 * 8
    linear, product = 2 * L * E * 3 * E, 2 * L * L * E
    assert inference_flops(Attend(), (L, E)) == linear + 2 * product
    # backward: the weights' gradient; in attention the scores once more, and four products
    assert training_flops(Attend(), (L, E)) == 2 * linear + 2 * product + 5 * product


def test_torchs_own_encoder_is_counted_when_judging():
    layer = nn.TransformerEncoderLayer(E, 2, 2 * H, batch_first=True)
    # q, k, v, and mixing: 8 * 32 products a step; scores and values: 2 * 5 * 8; the perceptron: 2 *
    # 8 * 32
    assert inference_flops(layer, (L, E)) == 2 * L * (E * 4 * E + 2 * L * E + 2 * E * 2 * H)


def test_what_cannot_be_counted_is_told(caplog):
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x + self.by

    with caplog.at_level(logging.WARNING, "flrce"):
        assert training_flops(Shift(), (4,)) == 0
    assert "FLOPs of Shift are unknown" in caplog.text


@pytest.mark.parametrize("steps", [10, 25])
def test_operations_of_a_recurrent_layer_grow_with_its_sequence(steps):
    def count(length):
        with TrafficCounter() as counter:
            nn.LSTM(4, 6)(torch.randn(length, 3, 4))[0].sum().backward()
        return counter.operations

    # forward and back: at least two operations a step, more where torch has no call for all of them
    assert count(2 * steps) - count(steps) >= 2 * steps
    assert count(3 * steps) - count(2 * steps) == count(2 * steps) - count(steps)
    x = torch.zeros(3, steps, 4)
    batch_first = [x, [], 4, None, x, x, 2, 6, 0, 2, True]
    assert count_launches("_cudnn_rnn", batch_first) == steps
    assert count_launches("_cudnn_rnn", [*batch_first[:-1], False]) == 3
    assert count_launches("mm", [x]) == 1
