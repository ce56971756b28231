"""GRU layers by compiled steps against torch in float64, wherever they stand."""

import copy
import os
import platform

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from flrce.core import c_compiler
from flrce.core.c_compiler import KernelUnavailable, Processor
from flrce.training.cpu import gru
from flrce.training.cpu.gru import CompiledGRU, compile_gru_layers
from training import like_torchs


@pytest.fixture(autouse=True)
def _cells(tmp_path_factory, monkeypatch):
    """Builds of their own, made quickly; skipped where there is no compiler."""
    monkeypatch.setattr(c_compiler, "COMPILER_FLAGS", ("-O1", *c_compiler.COMPILER_FLAGS[1:]))
    monkeypatch.setenv(
        "FLRCE_CACHE", os.environ.get("FLRCE_CACHE") or str(tmp_path_factory.getbasetemp())
    )
    gru.load_library.cache_clear()
    try:
        gru.load_library(3)
    except KernelUnavailable as why:
        pytest.skip(str(why))
    yield
    gru.load_library.cache_clear()


def found(gru: nn.GRU, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """States, last states and the gradients of a random sum of both, in float64."""
    rng = torch.Generator().manual_seed(seed)
    x = x.clone().requires_grad_()
    out, last = gru(x)
    a = torch.randn(out.shape, generator=rng, dtype=torch.float64).to(x.dtype)
    b = torch.randn(last.shape, generator=rng, dtype=torch.float64).to(x.dtype)
    grads = torch.autograd.grad((out * a).sum() + (last * b).sum(), [x, *gru.parameters()])
    return [t.detach().double() for t in (out, last, *grads)]


def assert_like_torch(gru: nn.GRU, x: torch.Tensor, seed: int = 0) -> None:
    fast = compile_gru_layers(copy.deepcopy(gru))
    assert type(fast) is CompiledGRU
    got, want = found(fast, x, seed), found(copy.deepcopy(gru).double(), x.double(), seed)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= 2e-5 * b.norm() + 1e-6
    assert all(torch.equal(a, b) for a, b in zip(found(fast, x, seed), got, strict=True))


@settings(
    max_examples=8,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    st.integers(1, 21),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.floats(0.1, 3.0),
)
def test_random_layers_are_torchs(units, inputs, layers, n, steps, first, bias, scale):
    gru = nn.GRU(inputs, units, layers, bias=bias, batch_first=first)
    x = scale * torch.randn((n, steps, inputs) if first else (steps, n, inputs))
    assert_like_torch(gru, x, n)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 flags")
@pytest.mark.parametrize(
    ("flags", "machine"), [("-mno-avx512f", Processor(8, 16)), ("-mno-avx", Processor(4, 16))]
)
def test_narrower_vectors_give_the_same(monkeypatch, flags, machine):
    known = c_compiler.detect_target
    monkeypatch.setattr(
        c_compiler, "detect_target", lambda *a: (("-march=native", flags), known(*a)[1], machine)
    )
    assert_like_torch(nn.GRU(3, 10, batch_first=True), torch.randn(19, 5, 3))


def test_one_step_by_hand():
    # one unit, all 0 but n's bias: z = sigmoid(0) = 1/2, n = tanh(0.5), h = n + z (0 - n) = n / 2
    gru = compile_gru_layers(nn.GRU(1, 1))
    with torch.no_grad():
        for p in gru.parameters():
            p.zero_()
        gru.bias_ih_l0[2] = 0.5
    out, last = gru(torch.ones(1, 1, 1))
    assert out.item() == last.item() == pytest.approx(np.tanh(0.5) / 2)


def test_other_calls_are_torchs():
    gru = nn.GRU(3, 4, 2, dropout=0.5, batch_first=True).eval()
    fast, x, h = compile_gru_layers(copy.deepcopy(gru)), torch.randn(5, 6, 3), torch.randn(2, 5, 4)
    assert torch.equal(fast(x, h)[0], gru(x, h)[0])
    assert torch.equal(fast.double()(x.double())[0], gru.double()(x.double())[0])
    gru, fast = gru.float(), fast.float()
    packed = nn.utils.rnn.pack_padded_sequence(x, [6, 5, 3, 2, 1], batch_first=True)
    assert torch.equal(fast(packed)[0].data, gru(packed)[0].data)
    assert torch.equal(fast(x[0])[0], gru(x[0])[0])  # one sample without a batch
    torch.manual_seed(1)
    dropped = fast.train()(x)[0]
    torch.manual_seed(1)
    assert torch.equal(dropped, gru.train()(x)[0])
    with pytest.raises(RuntimeError, match="input"):
        fast(torch.randn(5, 6, 2))


def test_what_has_no_steps_stays_as_it_is():
    net = nn.ModuleList([nn.GRU(2, 3, bidirectional=True), nn.LSTM(2, 3), nn.GRU(2, 3)])
    assert [type(layer) for layer in compile_gru_layers(net)] == [nn.GRU, nn.LSTM, CompiledGRU]
    assert [name for name, _ in net[2].named_parameters()] == [
        "weight_ih_l0",
        "weight_hh_l0",
        "bias_ih_l0",
        "bias_hh_l0",
    ]


def test_a_network_learns_with_any_loss_around_it():
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {"look": nn.Embedding(6, 4), "gru": nn.GRU(4, 9, batch_first=True), "say": nn.Linear(9, 6)}
    )
    ids = (
        torch.arange(8)[None, :].add(torch.arange(12)[:, None]) % 6
    )  # each id is the last plus one
    compile_gru_layers(net)
    steps = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(40):
        scores = net["say"](net["gru"](net["look"](ids[:, :-1]))[0])
        loss = F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())
        steps.zero_grad()
        loss.backward()
        steps.step()
    assert loss < 0.05


@pytest.mark.parametrize("update", [{}, {"momentum": 0.9}])
def test_a_run_with_a_gru_is_like_torchs(update, tmp_path, caplog):
    caplog.set_level("INFO", "flrce")
    like_torchs({"name": "gru", "options": {"width": 12, "layers": 1}}, update, tmp_path)
    assert "GRU layers by compiled steps" in caplog.text
