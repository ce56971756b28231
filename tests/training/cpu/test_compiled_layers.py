"""Linear layers, GELU and attention by compiled code against torch in float64, in any network."""

import copy
import os
import platform

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flrce.core import c_compiler
from flrce.core.c_compiler import KernelUnavailable, Processor
from flrce.core.types import LocalWork, Task
from flrce.models.gpt import GPT
from flrce.simulation.workers import start_workers
from flrce.training.batches import Samples
from flrce.training.client import ClientRunner
from flrce.training.cpu import compiled_calls, layers
from flrce.training.cpu.compiled_calls import (
    CompiledCalls,
    count_attention_bytes,
    find_widest_layer,
    is_worth_compiling,
)
from flrce.training.objectives import NextToken
from training import like_torchs

FEW = settings(
    max_examples=12,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def _layers(tmp_path_factory, monkeypatch):
    """Builds of their own, made quickly; small calls count, whoever made the processor."""
    monkeypatch.setattr(c_compiler, "COMPILER_FLAGS", ("-O1", *c_compiler.COMPILER_FLAGS[1:]))
    monkeypatch.setenv(
        "FLRCE_CACHE", os.environ.get("FLRCE_CACHE") or str(tmp_path_factory.getbasetemp())
    )
    for name in (
        "MIN_PRODUCT_OPERATIONS",
        "MIN_VALUES",
        "MIN_LAYER_WEIGHTS",
        "MIN_BATCH_OPERATIONS",
    ):
        monkeypatch.setattr(compiled_calls, name, 1)
    monkeypatch.setattr(compiled_calls, "is_faster_here", lambda: True)
    layers.load_library.cache_clear()
    try:
        layers.load_library()
    except KernelUnavailable as why:
        pytest.skip(str(why))
    yield
    layers.load_library.cache_clear()


def found(call, given, seed=0, mode=CompiledCalls):
    """What a call gives, and the gradients of a random sum of it."""
    given = [x.clone().requires_grad_() for x in given]
    with mode():
        out = call(*given)
        factors = torch.randn(
            out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        grads = torch.autograd.grad((out * factors.to(out.dtype)).sum(), given, allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


def assert_like_torch(call, *given, most=3e-6):
    got, want = found(call, given), found(call, [x.double() for x in given], mode=torch.enable_grad)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= most * b.norm() + 1e-6
    assert all(torch.equal(a, b) for a, b in zip(found(call, given), got, strict=True))


@FEW
@given(
    st.integers(1, 60), st.integers(1, 600), st.integers(1, 70), st.booleans(), st.floats(0.1, 10)
)
def test_linear(n, inputs, outputs, bias, scale):
    given = [scale * torch.randn(n, 2, inputs), torch.randn(outputs, inputs), torch.randn(outputs)]
    assert_like_torch(F.linear, *given[: 3 if bias else 2])


@pytest.mark.parametrize(
    ("n", "inputs", "outputs"), [(130, 1024, 33), (20, 300, 1030), (700, 16, 16), (1, 1, 1)]
)
def test_linear_beyond_one_block(n, inputs, outputs):
    assert_like_torch(
        F.linear, torch.randn(n, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    )


def test_a_row_is_the_same_whatever_stands_around_it():
    x, w, b = torch.randn(37, 300), torch.randn(45, 300), torch.randn(45)
    with CompiledCalls():
        whole, alone = F.linear(x, w, b), [F.linear(x[i : i + 1], w, b) for i in range(37)]
    assert torch.equal(whole, torch.cat(alone))


def test_strange_strides():
    x, w = torch.randn(9, 3, 40), torch.randn(40, 17)
    assert_like_torch(lambda x, w: F.linear(x.transpose(0, 1)[..., ::2], w[::2].T), x, w)
    assert_like_torch(lambda x: F.gelu(x.transpose(0, 2)), x)
    assert_like_torch(
        lambda q: F.scaled_dot_product_attention(*[q.expand(3, 2, 5, 8)] * 3),
        torch.randn(1, 2, 5, 8),
    )
    assert_like_torch(
        lambda q: F.scaled_dot_product_attention(*[q.transpose(2, 3)] * 3), torch.randn(2, 2, 5, 8)
    )


def test_rows_without_a_gradient_are_left_out(monkeypatch):
    """A loss of each sample's last token: the same bits with and without the rows that are 0."""
    x, w, b = torch.randn(6, 7, 20), torch.randn(30, 20), torch.randn(30)
    last = found(lambda x, w, b: F.linear(x, w, b)[:, -1], [x, w, b])
    monkeypatch.setattr(layers, "_find_live_rows", lambda rows: (rows, None))
    assert all(
        torch.equal(a, b)
        for a, b in zip(last, found(lambda *g: F.linear(*g)[:, -1], [x, w, b]), strict=True)
    )
    assert_like_torch(lambda x, w, b: 0 * F.linear(x, w, b), x, w, b)  # none has one


def test_gelu():
    x = torch.cat([torch.linspace(-6, 6, 997), torch.tensor([-40.0, 40.0, 0.0, -0.0, 1e-20])])
    assert_like_torch(F.gelu, x)
    with CompiledCalls():
        assert torch.isnan(F.gelu(torch.tensor([torch.nan, 1.0]))).tolist() == [True, False]
        assert F.gelu(torch.tensor([1.0])).item() == pytest.approx(
            0.8413447
        )  # 1 times the share below 1


@FEW
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
    st.floats(0.1, 5),
)
def test_attention(samples, heads, asking, seen, numbers, causal, same, scale):
    seen = asking if same else seen
    q, k, v = (
        scale * torch.randn(samples, n, heads, numbers).transpose(1, 2)
        for n in (asking, seen, seen)
    )
    call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    assert_like_torch(call, q, k, v, most=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("first", [0, 1, 20, 39])
def test_attention_of_which_the_first_tokens_do_not_matter(first, causal):
    q, k, v = torch.randn(3, 2, 3, 40, 6)
    call = lambda *given: F.scaled_dot_product_attention(*given, is_causal=causal)[:, :, first:]  # noqa: E731
    assert_like_torch(call, q, k, v, most=1e-5)
    assert_like_torch(lambda *given: 0 * call(*given), q, k, v)


def test_one_sees_itself_and_what_was_before():
    # two tokens, equal scores: the first sees itself alone, the second the mean of both
    q, v = torch.zeros(1, 1, 2, 1), torch.tensor([2.0, 6.0]).view(1, 1, 2, 1)
    with CompiledCalls():
        assert F.scaled_dot_product_attention(q, q, v, is_causal=True).flatten().tolist() == [
            2.0,
            4.0,
        ]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_torchs_transformer_layers(first, causal):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 3, 40, 0.0, "gelu", batch_first=first, norm_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(19) if causal else None
    x = torch.randn((5, 19, 24) if first else (19, 5, 24))
    calls = []
    known = layers.Attention.forward

    def counted(*args):
        calls.append(args[1].shape)
        return known(*args)

    layers.Attention.forward = staticmethod(counted)
    try:
        for mode in (True, False):
            net.train(mode)
            exact = copy.deepcopy(net).double()
            with CompiledCalls():
                out = net(x, mask, is_causal=causal)
            want = exact(x.double(), None if mask is None else mask.double(), is_causal=causal)
            assert (out - want).norm() < 1e-5 * want.norm()
            grads = torch.autograd.grad(out.square().sum(), list(net.parameters()))
            right = torch.autograd.grad(want.square().sum(), list(exact.parameters()))
            assert all(
                (a - b).norm() < 1e-4 * b.norm() + 1e-5 for a, b in zip(grads, right, strict=True)
            )
    finally:
        layers.Attention.forward = staticmethod(known)
    assert calls == [(3, 5, 3, 19, 8)] * 4


def test_gradients_of_gradients():
    x, w, b = torch.randn(5, 6), torch.randn(4, 6), torch.randn(4)

    def penalty(x, w, b):
        out = F.gelu(F.linear(x, w, b))
        return torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]

    assert_like_torch(penalty, x, w, b, most=1e-5)
    q = torch.randn(1, 1, 5, 4, requires_grad=True)
    with CompiledCalls():
        (g,) = torch.autograd.grad(
            F.scaled_dot_product_attention(q, q, q).square().sum(), q, create_graph=True
        )
        with pytest.raises(
            RuntimeError, match="not implemented"
        ):  # nor has torch any of attention on a CPU
            torch.autograd.grad(g.sum(), q)


def test_recomputed_layers():
    net = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5))
    grads = []
    for call in (lambda x: checkpoint(net, x, use_reentrant=False), net):
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with CompiledCalls():
            call(x).sum().backward()
        grads.append(x.grad)
    assert torch.allclose(*grads, atol=1e-6)


def test_in_place_layers_behind_them():
    net = nn.Sequential(
        nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 5), nn.Dropout(0.0, inplace=True)
    )
    assert_like_torch(lambda x: copy.deepcopy(net).to(x.dtype)(x), torch.randn(7, 2, 6))


def test_other_calls_are_torchs():
    x, w, q = torch.randn(5, 6), torch.randn(4, 6), torch.randn(2, 2, 5, 4)
    mask = torch.randn(5, 5)
    attention = F.scaled_dot_product_attention
    calls = [
        lambda: F.linear(x.double(), w.double()),
        lambda: F.gelu(x, approximate="tanh"),
        lambda: F.linear(x[0], w),
        lambda: attention(q, q, q, mask),
        lambda: attention(q[0], q[0], q[0]),
        lambda: attention(q, q, q[..., :3]),
        lambda: attention(q, q[:, :1], q[:, :1], enable_gqa=True),
        lambda: attention(q, q, q, scale=-1.0),
        lambda: torch.func.vmap(lambda x: F.linear(x, w))(x[:, None]),
        lambda: F.linear(input=x, weight=w),
    ]
    want = [call() for call in calls]
    with CompiledCalls():
        got = [call() for call in calls]
    assert all(torch.equal(a, b) for a, b in zip(got[:-1], want[:-1], strict=True))
    assert torch.allclose(got[-1], want[-1], atol=1e-5)
    with CompiledCalls(), pytest.raises(RuntimeError, match="shapes"):
        F.linear(x, w.T)
    masked = nn.MultiheadAttention(4, 2, batch_first=True)
    given = torch.randn(3, 5, 4)
    plain = masked(given, given, given, attn_mask=mask, need_weights=True)
    with CompiledCalls():
        again = masked(given, given, given, attn_mask=mask, need_weights=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(again, plain, strict=True))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 flags")
@pytest.mark.parametrize(
    ("flags", "machine"), [("-mno-avx512f", Processor(8, 16)), ("-mno-avx", Processor(4, 16))]
)
def test_narrower_vectors_give_the_same(monkeypatch, flags, machine):
    known = c_compiler.detect_target
    monkeypatch.setattr(
        c_compiler, "detect_target", lambda *a: (("-march=native", flags), known(*a)[1], machine)
    )
    layers.load_library.cache_clear()
    assert_like_torch(F.linear, torch.randn(23, 270), torch.randn(37, 270), torch.randn(37))
    assert_like_torch(F.gelu, torch.randn(77))
    causal = lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True)  # noqa: E731
    assert_like_torch(causal, torch.randn(2, 2, 21, 5), most=1e-5)


def test_which_batches_are_worth_it(monkeypatch):
    nets = [
        nn.Sequential(nn.Linear(2, 3)),
        nn.MultiheadAttention(4, 2),
        nn.LSTM(3, 4),
        nn.Conv2d(3, 4, 3),
    ]
    assert [find_widest_layer(net) for net in nets] == [6, 48, 0, 0]  # three projections of 4 x 4
    monkeypatch.setattr(compiled_calls, "MIN_LAYER_WEIGHTS", 7)
    assert find_widest_layer(nets[0]) == 0
    with monkeypatch.context() as other:
        other.setattr(compiled_calls, "is_faster_here", lambda: False)
        assert find_widest_layer(nets[1]) == 0
    monkeypatch.setattr(compiled_calls, "MIN_BATCH_OPERATIONS", 480)
    ids, patches, flat = (
        torch.zeros(9, 5, dtype=torch.int64),
        torch.zeros(9, 5, 7),
        torch.zeros(9, 5),
    )
    assert [is_worth_compiling(48, x, 2) for x in (ids, patches, flat)] == [
        True,
        True,
        False,
    ]  # 2 samples of 5 tokens, 10 x 48
    assert is_worth_compiling(48, flat, 10)
    assert not is_worth_compiling(48, ids, 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # torch's own layers go by several
    assert not is_worth_compiling(48, ids, 2)


@pytest.mark.parametrize("update", [{}, {"momentum": 0.9}])
def test_a_run_with_a_transformer_is_like_torchs(update, tmp_path, caplog):
    caplog.set_level("INFO", "flrce")
    like_torchs(
        {"name": "gpt", "options": {"width": 16, "layers": 1, "heads": 2}}, update, tmp_path
    )
    assert "wide layers by compiled code" in caplog.text


def test_what_attention_keeps_is_known_beforehand():
    """Three layers, four heads, 32 x 32 pairs of tokens: 4 bytes each, 49,152 in all for each
    sample.
    """
    net = GPT(50, 50, 32, every=True, layers=3, width=64, heads=4)
    ids = torch.randint(50, (2, 32), generator=torch.Generator().manual_seed(0))
    assert count_attention_bytes(net, ids) == 4 * 3 * 4 * 32 * 32
    with CompiledCalls():
        out = net(ids)
    assert sum(x.nbytes for x in shares(out.grad_fn)) == 2 * count_attention_bytes(
        net, ids
    )  # what two samples do keep
    encoder = nn.TransformerEncoderLayer(64, 8, 128, dropout=0.0, batch_first=True)
    assert count_attention_bytes(encoder, torch.randn(3, 16, 64)) == 4 * 8 * 16 * 16
    assert (
        count_attention_bytes(encoder, torch.randn(1, 257, 64)) == 0
    )  # beyond what compiled code attends to
    assert count_attention_bytes(nn.Linear(4, 4), torch.randn(2, 4)) == 0


def shares(node, seen=None):
    """What calls of compiled attention have saved last, in the graph before a node."""
    seen = set() if seen is None else seen
    if node is None or node in seen:
        return
    seen.add(node)
    if type(node).__name__ == "AttentionBackward":
        yield node.saved_tensors[-1]
    for before, _ in node.next_functions:
        yield from shares(before, seen)


def test_workers_take_what_attention_keeps():
    """A batch of 5 samples at most; 400 bytes less than two workers want leave one."""
    net = GPT(50, 50, 32, every=True, layers=1, width=64, heads=4)
    ids = torch.randint(50, (9, 32), generator=torch.Generator().manual_seed(0))
    runner = ClientRunner(net, (32,), Samples(ids, ids), objective=NextToken())
    task = Task("", 0, 1, 0, LocalWork(batch=5))
    each = 4 * 10 * sum(p.numel() for p in net.parameters()) + 5 * 4 * 4 * 32 * 32
    for left, count in ((None, 3), (2 * each, 2), (2 * each - 400, 1), (0, 1)):
        crew = start_workers(runner, "auto", 3, task, left)
        crew.close()
        assert crew.worker_processes == (count, each)
