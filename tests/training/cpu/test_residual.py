"""Fused CPU kernels of residual networks against torch in float64, and every reason for having
none.
"""

import copy
import platform

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from flrce import Experiment, run
from flrce.core import c_compiler
from flrce.core.c_compiler import Processor
from flrce.core.host import run_in_child
from flrce.models.flat import make_layout, pack_model, unpack_model
from flrce.models.nets import build_network as named
from flrce.models.resnet import ResNet
from flrce.training.batches import SampleBatches, Samples
from flrce.training.cpu import Kernel, build_kernel, check, explain_no_kernel

SCALE, SHIFT = 1 / 64, -2.0


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Quick builds: what is tested is what the C says."""
    monkeypatch.setattr(c_compiler, "COMPILER_FLAGS", ("-O1", *c_compiler.COMPILER_FLAGS[1:]))


def compiled(net: nn.Module, shape: tuple[int, ...]) -> Kernel:
    why = explain_no_kernel(net, shape)
    if "no C compiler" in why or "processor has none" in why:
        pytest.skip(why)
    return build_kernel(net, shape)


def data(shape: tuple[int, ...], n: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=rng), torch.randint(
        0, 3, (n,), generator=rng
    )


def scrambled(net: nn.Module, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    w = pack_model(net)
    for slot in make_layout(net).slots:
        if "running_var" in slot.name:
            w[slot.span] = torch.rand(slot.size, generator=rng) + 0.5
        elif len(slot.shape) == 1:
            w[slot.span] = torch.randn(slot.size, generator=rng)
    return w


def by_torch(net, w, x, y, sizes, lr, mu=0.0):
    """SGD in float64 on consecutive batches: (w after, losses)."""
    net = unpack_model(copy.deepcopy(net), w).double().train()
    parameters, losses = list(net.parameters()), []
    start = [p.detach().clone() for p in parameters]
    for index in torch.arange(sum(sizes)).split(list(sizes)):
        loss = F.cross_entropy(net(x[index].double() * SCALE + SHIFT), y[index])
        losses.append(loss.item())
        for p, p0, g in zip(parameters, start, torch.autograd.grad(loss, parameters), strict=True):
            p.data -= lr * (g + mu * (p.detach() - p0))
    return pack_model(net), losses


def assert_like_torch(k, net, w, x, y):
    """One step's movement of every tensor, several steps' losses, the gradient and the
    evaluation.
    """
    n = len(x)
    got, _, _ = k.train(
        w, SampleBatches(Samples(x, y, SCALE, SHIFT), np.arange(n), np.array([n])), 1.0
    )
    want, losses = by_torch(net, w, x, y, [n], 1.0)
    after, g = w.clone(), torch.full((make_layout(net).trainable,), 7.0)
    each = k.gradient(after, x.float() * SCALE + SHIFT, y, g)
    assert each.mean().item() == pytest.approx(losses[0], rel=1e-4)
    for slot in make_layout(net).slots:
        moved = (want - w)[slot.span].norm()
        least = 1e-3 * moved + 2e-5 * slot.size**0.5
        assert (got - want)[slot.span].norm() <= least, slot.name
        if slot.trainable:
            assert (w[slot.span] - g[slot.span] - want[slot.span]).norm() <= least, slot.name
        else:
            assert torch.equal(after[slot.span], got[slot.span]), slot.name
    sizes = [n // 2, n - n // 2]
    got, losses, _ = k.train(
        w, SampleBatches(Samples(x, y, SCALE, SHIFT), np.arange(n), np.array(sizes)), 0.05, mu=0.3
    )
    want, losses_want = by_torch(net, w, x, y, sizes, 0.05, mu=0.3)
    np.testing.assert_allclose(losses, losses_want, rtol=1e-3, atol=1e-4)
    assert (got - want).norm() <= 5e-3 * (want - w).norm() + 1e-4
    with torch.no_grad():
        logits = unpack_model(copy.deepcopy(net), w).double().eval()(x.double() * SCALE + SHIFT)
    loss = k.evaluate(w, x, y, SCALE, SHIFT)[1].double()
    torch.testing.assert_close(
        loss, F.cross_entropy(logits, y, reduction="none"), rtol=1e-4, atol=1e-4
    )


class Skipping(nn.Module):
    """Blocks of layers, each beside a shortcut (None: the block's input itself), and an activation
    of the sum.
    """

    def __init__(self, stem: nn.Module, blocks, head: nn.Module) -> None:
        super().__init__()
        self.stem, self.head = stem, head
        self.inner = nn.ModuleList([inner for inner, _, _ in blocks])
        self.short = nn.ModuleList([short or nn.Sequential() for _, short, _ in blocks])
        self.acts = [act for _, _, act in blocks]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for inner, short, act in zip(self.inner, self.short, self.acts, strict=True):
            x = inner(x) + short(x)
            x = act(x) if act else x
        return self.head(x)


@st.composite
def networks(draw) -> tuple[Skipping, tuple[int, ...]]:
    """Blocks with and without a change of shape, norms of both kinds, in the usual order or the
    activation first.
    """
    shape = draw(st.tuples(st.integers(1, 3), st.integers(5, 9), st.integers(5, 9)))
    width = draw(st.integers(1, 5)) if draw(st.booleans()) else shape[0]
    bare = width == shape[0] and draw(st.booleans())  # the first block reads the samples themselves
    stem = (
        nn.Sequential() if bare else nn.Conv2d(shape[0], width, 3, padding=draw(st.integers(0, 1)))
    )
    blocks = []
    for _ in range(draw(st.integers(1, 2))):
        after, stride = draw(
            st.sampled_from([(width, 1), (width, 1), (width + 2, 1), (2 * width, 2)])
        )
        first = [
            nn.Conv2d(width, after, 3, stride, 1, bias=draw(st.booleans())),
            *norm(draw, after),
            nn.ReLU(),
        ]
        if draw(st.booleans()):
            first = [*norm(draw, width), nn.ReLU(), nn.Conv2d(width, after, 3, stride, 1)]
        inner = [
            *first,
            *draw(
                st.sampled_from([[], [nn.Conv2d(after, after, 3, padding=1), *norm(draw, after)]])
            ),
        ]
        short = None
        if (after, stride) != (width, 1):
            parts = [nn.Conv2d(width, after, 1, stride, bias=False), *norm(draw, after)]
            if stride == 2 and draw(st.booleans()):  # an average before the convolution
                parts = [nn.MaxPool2d(3, 2, 1), nn.Conv2d(width, after, 1)]
            short = nn.Sequential(*parts)
        blocks.append(
            (nn.Sequential(*inner), short, draw(st.sampled_from([F.relu, torch.tanh, None])))
        )
        width = after
    with torch.no_grad():
        size = Skipping(stem, blocks, nn.Flatten()).eval()(torch.zeros(2, *shape)).shape[1]
    heads = [
        nn.Sequential(nn.Flatten(), nn.Linear(size, 3)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3)),
    ]
    return Skipping(stem, blocks, draw(st.sampled_from(heads))), shape


def norm(draw, width: int) -> list[nn.Module]:
    groups = draw(st.sampled_from([n for n in range(1, width + 1) if width % n == 0]))
    return draw(
        st.sampled_from([[nn.GroupNorm(groups, width)], [nn.BatchNorm2d(width, momentum=0.3)], []])
    )


@settings(
    max_examples=8,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(networks(), st.integers(0, 99), st.integers(18, 40))
def test_random_residual_networks_train_as_in_torch(made, seed, size):
    net, shape = made
    k, w, (x, y) = compiled(net, shape), scrambled(net, seed), data(shape, size, seed)
    assert_like_torch(k, net, w, x, y)
    again = [
        k.train(
            w, SampleBatches(Samples(x, y, SCALE, SHIFT), np.arange(size), np.array([size])), 0.1
        )[0]
        for _ in range(2)
    ]
    assert torch.equal(*again)


@pytest.mark.parametrize("kind", ["group", "batch"])
def test_the_projects_residual_networks_train_as_in_torch(kind):
    net, shape = ResNet(3, 3, (8, 16), 1, kind), (3, 8, 8)
    assert_like_torch(compiled(net, shape), net, pack_model(net), *data(shape, 21, 1))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 flags")
@pytest.mark.parametrize(
    ("flags", "machine"), [("-mno-avx512f", Processor(8, 16)), ("-mno-avx", Processor(4, 16))]
)
def test_narrower_vectors_give_the_same(monkeypatch, flags, machine):
    known = c_compiler.detect_target
    monkeypatch.setattr(
        c_compiler, "detect_target", lambda *a: (("-march=native", flags), known(*a)[1], machine)
    )
    net, shape = ResNet(2, 3, (8, 16)), (2, 8, 8)
    assert_like_torch(compiled(net, shape), net, pack_model(net), *data(shape, 21, 1))


class Odd(nn.Module):
    """Two linear layers whose outputs meet in some way."""

    def __init__(self, meet, hidden: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.meet, self.hidden = nn.Linear(4, 3), nn.Linear(4, 3), meet, hidden

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        if self.hidden and not self.training:
            b = b * 0
        return self.meet(a, b)


def added_in_place(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


def read_after(a: Tensor, b: Tensor) -> Tensor:
    c = F.relu(a, inplace=True)
    return c + a


@pytest.mark.parametrize(
    "meet",
    [
        lambda a, b: a + b,
        torch.add,
        lambda a, b: a.add(b),
        added_in_place,
        lambda a, b: (a + a) + b,
        lambda a, b: torch.tanh(a) + (b + a),
    ],
)
def test_ways_to_add(meet):
    net = Odd(meet)
    assert_like_torch(compiled(net, (4,)), net, pack_model(net), *data((4,), 19, 2))


@pytest.mark.parametrize(
    ("meet", "said"),
    [
        (lambda a, b: torch.add(a, b, alpha=2), "adds something"),
        (lambda a, b: a + 1, "adds something"),
        (lambda a, b: a * b, "calls 'mul'"),
        (read_after, "in place"),
        (lambda a, b: a, "more than it gives"),
        (lambda a, b: (a + b, a), "more than one tensor"),
        (lambda a, b: a + b.sum(1, keepdim=True), "calls 'sum'"),
    ],
)
def test_what_is_not_understood_says_why(meet, said):
    assert said in explain_no_kernel(Odd(meet), (4,))


def test_what_a_trace_cannot_see_is_found_by_trying():
    net = Odd(lambda a, b: a + b, hidden=True)  # another network when it is judged
    assert "calls other layers in training than in evaluation" in explain_no_kernel(net, (4,))

    class Detached(Odd):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                a = self.a(x)
            return a + self.b(x)

    assert "in training that its layers do not say" in explain_no_kernel(Detached(torch.add), (4,))


def test_beside_a_gpu_the_trial_is_a_childs(monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check, "run_in_child", lambda work: asked.append(1) or run_in_child(work))
    assert not explain_no_kernel(Odd(torch.add), (4,))
    assert asked


def test_wide_residual_networks_are_left_to_torch():
    assert "torch is faster" in explain_no_kernel(
        named("resnet-18", (3, 32, 32), 10, 1), (3, 32, 32)
    )
    chain = nn.Sequential(
        nn.Conv2d(200, 200, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(200, 2)
    )
    assert not explain_no_kernel(chain, (200, 3, 3))


@pytest.mark.parametrize("train", [{}, {"momentum": 0.9}])
def test_a_run_with_skips_is_by_kernels_and_like_torchs(train, tmp_path):
    compiled(Odd(torch.add), (4,))  # skips where there is no compiler
    found = []
    for kernels in ("native" if not train else "auto", "torch"):
        exp = Experiment.from_tables(
            {
                "rounds": 2,
                "clients": 6,
                "per_round": 3,
                "data": {"name": "digits"},
                "recipe": {"name": "fedavg"},
                "model": {"name": "resnet-8"},
                "train": {"epochs": 1, "batch": 16, "lr": 0.005, **train},
                "engine": {"kernel": kernels, "workers": 1},
            }
        )
        model = run(exp, out=tmp_path / kernels).model
        found.append(torch.cat([model[name].flatten() for name in sorted(model)]))
    by_kernels, by_torch = found
    assert not torch.equal(by_kernels, by_torch)  # two trainers, two roundings
    assert (by_kernels - by_torch).norm() < 1e-3 * by_torch.norm()
