"""Fused CPU kernels against torch in float64, on random networks; caching; and every reason for
having none.
"""

import copy
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.core import c_compiler
from flrce.core.c_compiler import Processor
from flrce.errors import BadInput
from flrce.models.flat import make_layout, pack_model, unpack_model
from flrce.models.nets import PAPER_CNNS
from flrce.models.nets import build_network as named
from flrce.training.batches import SampleBatches, Samples
from flrce.training.cpu import Kernel, build_kernel, explain_no_kernel
from flrce.training.cpu.blocks import split_blocks
from flrce.training.cpu.emit import write_source
from flrce.training.cpu.frames import ConvolutionAxis
from flrce.training.cpu.stages import plan_stages

SCALE, SHIFT = 1 / 64, -2.0
BatchNorms = (nn.BatchNorm1d, nn.BatchNorm2d)


pytestmark = pytest.mark.usefixtures("own_cache")


def compiled(net: nn.Module, shape: tuple[int, ...]) -> Kernel:
    why = explain_no_kernel(net, shape)
    if "no C compiler" in why or "processor has none" in why:
        pytest.skip(why)
    return build_kernel(net, shape)


def scramble(net: nn.Module, seed: int) -> Tensor:
    """w with BatchNorm factors of both signs and running statistics away from 0 and 1."""
    rng = torch.Generator().manual_seed(seed)
    w = pack_model(net)
    for slot in make_layout(net).slots:
        part = w[slot.span]
        if "running_var" in slot.name:
            w[slot.span] = torch.rand(part.shape, generator=rng) + 0.5
        elif len(slot.shape) == 1:
            w[slot.span] = torch.randn(part.shape, generator=rng)
    return w


def data(
    shape: tuple[int, ...], classes: int, n: int, seed: int, whole: bool = True
) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=rng)
    return x if whole else x.float() + torch.rand(x.shape, generator=rng), torch.randint(
        0, classes, (n,), generator=rng
    )


def batches(n: int, sizes: list[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(seed).integers(0, n, sum(sizes)), np.array(sizes)


def by_torch(net, w, x, y, order, sizes, lr, mu=0.0, first=0, squared=True):
    """The same training by torch in float64, layer by layer of a Sequential."""
    net = unpack_model(copy.deepcopy(net), w).double().train()
    trained = [i for i, m in enumerate(net) if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Linear)]
    for m in net[: trained[first] if first else 0]:
        m.requires_grad_(False).eval()
    parameters = [p for p in net.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters]
    losses, squares = [], []
    for index in np.split(order, np.cumsum(sizes)[:-1]):
        each = F.cross_entropy(net(x[index].double() * SCALE + SHIFT), y[index], reduction="none")
        losses.append(each.mean().item())
        squares.append(each.square().mean().item())
        for p, p0, g in zip(
            parameters, start, torch.autograd.grad(each.mean(), parameters), strict=True
        ):
            away = p.detach() - p0
            # a bias before BatchNorm moves by rounding alone, some 1e-17: that has no direction
            pull = away if squared else away / away.norm() if away.norm() > 1e-9 else 0
            p.data -= lr * (g + mu * pull)
    return pack_model(net.requires_grad_(True)), losses, squares


class NearbyRuns:
    """The reference from starts that differ by the rounding of float32: how far results may lie
    apart on any processor. Computed where a plain tolerance is not enough, which is rare.
    """

    def __init__(self, reference, w: Tensor) -> None:
        self.reference, self.w = reference, w
        self.results: list[tuple[Tensor, list[float], list[float]]] = []

    def spread(self, part: int, want, norm) -> float:
        """Five times the largest distance of part 0 (weights), 1 (losses) or 2 (squares)."""
        if not self.results:
            rng = torch.Generator().manual_seed(0)
            # 1e-7: one rounding; 1e-6: a sum of some hundred terms
            for scale in (1e-7, 1e-7, 1e-7, 1e-7, 1e-6, 1e-6):
                noise = 1 + scale * torch.randn(self.w.shape, generator=rng)
                self.results.append(self.reference(self.w * noise))
        return 5 * max(float(norm(torch.as_tensor(r[part]), want)) for r in self.results)


def assert_trains_alike(k, net, w, x, y, sizes, lr, tolerance=2e-4, seed=0, **options):
    order, sizes = batches(len(x), sizes, seed)
    got = k.train(w, SampleBatches(Samples(x, y, SCALE, SHIFT), order, sizes), lr, **options)
    assert_same_training(
        lambda start: by_torch(net, start, x, y, order, sizes, lr, **options),
        net, w, got, tolerance, options.get("squared", True),
    )  # fmt: skip


def assert_same_training(reference, net, w, got, tolerance, squared=True):
    """Weights, losses and squares after training from w against the reference's."""
    want, nearby = reference(w), NearbyRuns(reference, w)
    for slot in make_layout(net).slots:  # each tensor by its own movement
        moved = (want[0] - w)[slot.span].norm()
        if not squared and moved < 1e-6:
            # BatchNorm takes this gradient away; the plain distance makes a direction of what
            # rounding leaves
            continue

        def distance(one, other, span=slot.span):
            return (one - other)[span].norm()

        error = distance(got[0], want[0])
        allowed = tolerance * moved + 2e-5 * slot.size**0.5
        if error > allowed:  # a norm over two values can amplify rounding a thousand times
            allowed += nearby.spread(0, want[0], distance)
        assert error <= allowed, (slot.name, float(error), float(moved), float(allowed))
    for part, rtol in ((1, 2e-4), (2, 4e-4)):
        for i, value in enumerate(want[part]):

            def difference(one, other, i=i):
                return abs(one[i] - other[i])

            error, allowed = abs(got[part][i] - value), rtol * abs(value) + 1e-5
            if error > allowed:
                allowed += nearby.spread(part, want[part], difference)
            assert error <= allowed, (("losses", "squares")[part - 1], i, error, allowed)


def assert_evaluates_alike(k, net, w, x, y):
    correct, loss = k.evaluate(w, x, y, SCALE, SHIFT)
    with torch.no_grad():
        logits = unpack_model(copy.deepcopy(net), w).double().eval()(x.double() * SCALE + SHIFT)
    torch.testing.assert_close(
        loss.double(), F.cross_entropy(logits, y, reduction="none"), rtol=1e-4, atol=1e-4
    )
    top = logits.topk(2, dim=1).values
    clear = top[:, 0] - top[:, 1] > 1e-4
    assert torch.equal(correct[clear], (logits.argmax(1) == y)[clear])


def assert_gradient_is_torchs(k, net, w, x, y, first):
    """Gradient, losses and moved statistics of one batch against a step of torch's at rate 1."""
    batch, where = x.float() * SCALE + SHIFT, make_layout(net)
    after, g = w.clone(), torch.full((where.trainable,), 7.0)
    losses = k.gradient(after, batch, y, g, first=first)
    got = torch.cat([w[: where.trainable] - g, after[where.trainable :]])

    def step(start):
        return by_torch(
            net, start, x, y, np.arange(len(x)), np.array([len(x)]), lr=1.0, first=first
        )

    moments = [losses.mean().item()], [losses.square().mean().item()]
    assert_same_training(step, net, w, (got, *moments), tolerance=2e-4)
    assert torch.equal(after[: where.trainable], w[: where.trainable])


@st.composite
def networks(draw) -> tuple[nn.Sequential, tuple[int, ...]]:
    """Any order of the known layers that fits together, ending in a linear layer with 5 outputs."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(5, 11), st.integers(5, 11)))
    layers: list[nn.Module] = []
    x = torch.zeros(2, *shape)
    few = st.integers(1, 3)
    for _ in range(draw(st.integers(0, 2))):
        kernel_size, stride = (
            draw(st.tuples(few, few)),
            draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        )
        padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
        bias, width = draw(st.booleans()), draw(st.integers(1, 9))
        block: list[nn.Module] = [
            nn.Conv2d(x.shape[1], width, kernel_size, stride, padding, bias=bias)
        ]
        block += draw(st.permutations(after(draw, width, nn.BatchNorm2d)))
        pools = [nn.MaxPool2d(2), nn.MaxPool2d((2, 3)), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, ceil_mode=True), None,
                 nn.AvgPool2d(2), nn.AvgPool2d((3, 2), 1)]  # fmt: skip
        pool = draw(st.sampled_from(pools))
        block.insert(
            draw(st.integers(0 if not layers and pool else 1, len(block))), pool or nn.Identity()
        )
        x, layers = extend(x, layers, block)
    layers.append(nn.Flatten())
    x = x.flatten(1)
    for _ in range(draw(st.integers(0, 2))):
        width = draw(st.integers(1, 40))
        block = [
            nn.Linear(x.shape[1], width, bias=draw(st.booleans())),
            *after(draw, width, nn.BatchNorm1d),
        ]
        x, layers = extend(x, layers, block)
    return nn.Sequential(*layers, nn.Linear(x.shape[1], 5)), shape


def after(draw, width: int, norm: type[nn.Module]) -> list[nn.Module]:
    groups = draw(st.sampled_from([n for n in range(1, width + 1) if width % n == 0]))
    norms = [
        norm(width, affine=draw(st.booleans()), momentum=0.3),
        nn.GroupNorm(groups, width),
        None,
    ]
    normal = draw(st.sampled_from(norms))
    some = [normal] if normal else []
    return some + draw(st.sampled_from([[], [nn.ReLU()], [nn.Tanh()]]))


def extend(
    x: Tensor, layers: list[nn.Module], block: list[nn.Module]
) -> tuple[Tensor, list[nn.Module]]:
    """With the block's layers that fit; others (a window larger than its plane) are left out."""
    for layer in block:
        try:
            with torch.no_grad():
                y = layer.eval()(x)
        except RuntimeError:
            continue
        if y.numel():
            x, layers = y, [*layers, layer]
    return x, layers


# no shrinking: every example is a build
@settings(
    max_examples=10,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    networks(),
    st.integers(0, 99),
    st.booleans(),
    st.integers(8, 40),
    st.floats(0.01, 1.0),
    st.booleans(),
)
def test_random_networks_train_as_in_torch(made, seed, whole, size, mu, squared):
    net, shape = made
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # a quick build: the paper's networks below have the usual one
        patch.setattr(c_compiler, "COMPILER_FLAGS", ("-O1", *c_compiler.COMPILER_FLAGS[1:]))
        k, w = compiled(net, shape), scramble(net, seed)
    x, y = data(shape, 5, 60, seed, whole)
    assert_trains_alike(k, net, w, x, y, [size], lr=1.0)
    assert_trains_alike(k, net, w, x, y, [size, 16, 37, 9], lr=0.05, tolerance=2e-3)
    blocks = len([m for m in net if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Linear)])
    for first in range(blocks):
        assert_trains_alike(
            k, net, w, x, y, [size, 11], 0.05, 2e-3, mu=mu, first=first, squared=squared
        )
    assert_evaluates_alike(k, net, w, x, y)
    assert_gradient_is_torchs(k, net, w, x[:size], y[:size], blocks - 1)


@pytest.mark.parametrize("wrong", ["rate", "losses", "squares"])
def test_the_comparison_notices_one_percent(wrong):
    """Also where the allowance for rounding is at its largest: statistics over two values."""
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(8, 8), nn.GroupNorm(4, 8), nn.Tanh(), nn.Linear(8, 5)
    )
    w, (x, y) = scramble(net, 1), data((2, 2, 2), 5, 60, 1)
    order, sizes = batches(60, [8, 16, 37, 9], 0)

    def reference(start, lr=0.05):
        return by_torch(net, start, x, y, order, sizes, lr)

    got = list(reference(w, 0.05 if wrong != "rate" else 0.0505))
    for part, name in ((1, "losses"), (2, "squares")):
        if wrong == name:
            got[part] = [1.01 * value for value in got[part]]
    assert_same_training(reference, net, w, reference(w), tolerance=2e-3)
    with pytest.raises(AssertionError):
        assert_same_training(reference, net, w, got, tolerance=2e-3)


@pytest.mark.parametrize("name", ["cnn-cifar", "cnn-cifar-tanh", "cnn-emnist", "cnn-speech"])
def test_the_papers_networks_train_as_in_torch(name):
    shape, classes = PAPER_CNNS[name][0], 10
    net = named(name, shape, classes, seed=1)
    k, (x, y) = compiled(net, shape), data(shape, classes, 40, seed=2)
    assert_trains_alike(k, net, pack_model(net), x, y, [33, 16], lr=0.05)
    assert_evaluates_alike(k, net, scramble(net, 3), x, y)


#: networks in one dimension, with statistics of each sample, and averages
OTHERS = {
    "series": (nn.Sequential(
        nn.Conv1d(3, 8, 5, padding=2), nn.GroupNorm(4, 8), nn.ReLU(), nn.MaxPool1d(2, ceil_mode=True),
        nn.Conv1d(8, 6, 4, stride=2), nn.BatchNorm1d(6), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        nn.Linear(6, 5)), (3, 21)),
    "groups": (nn.Sequential(
        nn.GroupNorm(1, 2), nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.GroupNorm(3, 6, affine=False), nn.Tanh(),
        nn.AvgPool2d(2), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(3, 1),
        nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten(),
        nn.Linear(8, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 5)), (2, 14, 12)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("first", [0, 1])
def test_one_dimension_groups_and_averages_train_as_in_torch(name, first):
    net, shape = OTHERS[name]
    k, w, (x, y) = compiled(net, shape), scramble(net, 3), data(shape, 5, 60, seed=2)
    assert_trains_alike(k, net, w, x, y, [33], lr=1.0, first=first)
    assert_trains_alike(
        k, net, w, x, y, [17, 16, 37, 9], lr=0.05, tolerance=2e-3, mu=0.3, first=first
    )
    assert_evaluates_alike(k, net, w, x, y)


class Pooled(nn.Module):
    """Means taken by a method and by a function."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.keep, self.conv, self.last = keep, nn.Conv2d(2, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        return self.last(F.adaptive_avg_pool2d(x, 1).flatten(1) if self.keep else x.mean((-2, -1)))


@pytest.mark.parametrize("keep", [True, False])
def test_means_by_functions_are_averages(keep):
    net, (x, y) = Pooled(keep), data((2, 6, 7), 3, 20, 1)
    assert_evaluates_alike(compiled(net, (2, 6, 7)), net, pack_model(net), x, y)


MIXED = nn.Sequential(
    nn.Conv2d(2, 7, 3, stride=2, padding=1), nn.BatchNorm2d(7), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(7, 5, (2, 1)), nn.Tanh(), nn.Flatten(),
    nn.Linear(40, 11), nn.BatchNorm1d(11), nn.ReLU(), nn.Linear(11, 5),
)  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", ["mixed", *OTHERS])
def test_the_gradient_of_a_batch_is_torchs(name, first):
    net, shape = (MIXED, (2, 12, 16)) if name == "mixed" else OTHERS[name]
    k, w, (x, y) = compiled(net, shape), scramble(net, 3), data(shape, 5, 21, seed=2)
    assert_gradient_is_torchs(k, net, w, x, y, first)
    with pytest.raises(BadInput, match="written to"):
        k.gradient(w.double(), x.float(), y, torch.zeros(make_layout(net).trainable))


def test_a_linear_layer_by_hand():
    # one sample x = (1, 2), w = 0, label 0 of 2: softmax (1/2, 1/2), so dL/dlogits = (-1/2, 1/2),
    # dW = outer, loss ln 2
    net = nn.Sequential(nn.Linear(2, 2))
    x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([0])
    k = compiled(net, (2,))
    w, loss, square = k.train(
        torch.zeros(6), SampleBatches(Samples(x, y), np.array([0]), np.array([1])), lr=2.0
    )
    assert w.tolist() == [1.0, 2.0, -1.0, -2.0, 1.0, -1.0]
    assert loss.item() == pytest.approx(np.log(2))
    assert square.item() == pytest.approx(np.log(2) ** 2)
    correct, _ = k.evaluate(torch.zeros(6), x, torch.tensor([1]), 1.0, 0.0)
    assert not correct.item()  # a tie goes to the first class, as in torch


def test_a_zero_batchnorm_factor_sends_the_gradient_to_the_first_of_a_window():
    net = nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    )
    w = pack_model(net)
    w[make_layout(net)["1.weight"].span] = 0
    x, y = data((1, 5, 5), 3, 20, seed=1)
    assert_trains_alike(compiled(net, (1, 5, 5)), net, w, x, y, [20], lr=1.0)


def test_a_diverged_net_shows_it():
    k, (x, y) = compiled(MIXED, (2, 12, 16)), data((2, 12, 16), 5, 20, 1)
    w = pack_model(MIXED)
    w[0] = float("nan")
    order, sizes = batches(20, [16], 0)
    after, losses, _ = k.train(w, SampleBatches(Samples(x, y, SCALE, SHIFT), order, sizes), 0.1)
    assert losses.isnan().all()
    assert after.isnan().any()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 flags")
@pytest.mark.parametrize(
    ("flags", "machine"), [("-mno-avx512f", Processor(8, 16)), ("-mno-avx", Processor(4, 16))]
)
def test_narrower_vectors_give_the_same(monkeypatch, flags, machine):
    known = c_compiler.detect_target
    monkeypatch.setattr(
        c_compiler, "detect_target", lambda *a: (("-march=native", flags), known(*a)[1], machine)
    )
    k, (x, y) = compiled(MIXED, (2, 12, 16)), data((2, 12, 16), 5, 40, 1)
    assert_trains_alike(k, MIXED, pack_model(MIXED), x, y, [31, 9], 0.1, mu=0.3, first=1)
    assert_evaluates_alike(k, MIXED, pack_model(MIXED), x, y)
    assert_gradient_is_torchs(k, MIXED, pack_model(MIXED), x, y, 0)


def test_same_bits_on_every_thread_and_call():
    k, w = compiled(MIXED, (2, 12, 16)), scramble(MIXED, 1)
    x, y = data((2, 12, 16), 5, 90, 4)
    order, sizes = batches(90, [40, 40, 7] * 4, 5)

    def work(i: int) -> Tensor:
        if i % 2:  # other shapes of work in between must leave no trace
            k.train(
                w,
                SampleBatches(Samples(x, y, SCALE, SHIFT), order[:3], np.array([3])),
                0.5,
                first=i % 4,
            )
            k.evaluate(w, x[:i], y[:i], SCALE, SHIFT)
            k.gradient(w.clone(), x[:40].float(), y[:40], torch.zeros(make_layout(MIXED).trainable))
        return torch.cat(
            [
                *k.train(w, SampleBatches(Samples(x, y, SCALE, SHIFT), order, sizes), 0.1, mu=0.2),
                k.evaluate(w, x, y, SCALE, SHIFT)[1],
            ]
        )

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(12)))
    assert all(torch.equal(r, results[0]) for r in results)


def test_frozen_blocks_keep_every_bit():
    k, w = compiled(MIXED, (2, 12, 16)), scramble(MIXED, 1)
    x, y = data((2, 12, 16), 5, 30, 4)
    order, sizes = batches(30, [16, 16], 5)
    after, _, _ = k.train(
        w, SampleBatches(Samples(x, y, SCALE, SHIFT), order, sizes), 0.1, mu=0.2, first=2
    )
    for slot in make_layout(MIXED).slots:
        same = torch.equal(after[slot.span], w[slot.span])
        assert same == (int(slot.name.split(".")[0]) < 7 or slot.name == "7.bias"), (
            slot.name
        )  # no gradient before BatchNorm


def test_no_steps_change_nothing():
    k, w = compiled(MIXED, (2, 12, 16)), scramble(MIXED, 1)
    x, y = data((2, 12, 16), 5, 3, 4)
    none = np.array([], np.int64)
    after, losses, squares = k.train(w, SampleBatches(Samples(x, y, SCALE, SHIFT), none, none), 0.1)
    assert torch.equal(after, w)
    assert len(losses) == len(squares) == 0


def test_bad_calls_are_refused():
    k, w = compiled(MIXED, (2, 12, 16)), pack_model(MIXED)
    x, y = data((2, 12, 16), 5, 3, 4)
    one = np.array([0]), np.array([1])
    for changed, said in [
        ({"w": w[1:]}, "w has shape"),
        ({"x": x[:, :1]}, "the net takes"),
        ({"x": x.double()}, "uint8 or"),
        ({"y": y + 5}, "5 classes"),
        ({"order": np.array([3])}, "names sample 3"),
        ({"sizes": np.array([2])}, "add up to 2"),
        ({"first": 4}, "first must be from 0 to 3"),
        ({}, "no variance"),
    ]:
        call = {"w": w, "x": x, "y": y, "order": one[0], "sizes": one[1]} | changed
        batches = SampleBatches(Samples(call["x"], call["y"]), call["order"], call["sizes"])
        with pytest.raises(BadInput, match=said):
            k.train(call["w"], batches, 0.1, first=call.get("first", 0))


def test_what_is_not_supported_says_why():
    last = nn.Flatten(), nn.LazyLinear(3)
    for layers, said in [
        ([nn.Conv2d(2, 4, 3, groups=2)], "groups 2"),
        ([nn.Conv2d(2, 4, 2, dilation=2)], "dilation"),
        ([nn.Dropout(0.5)], "Dropout"),
        ([nn.BatchNorm2d(2, momentum=None)], "momentum"),
        ([nn.BatchNorm2d(2, track_running_stats=False)], "running statistics"),
        ([nn.AvgPool2d(2, padding=1)], "AvgPool2d"),
        ([nn.AdaptiveAvgPool2d(3)], "differ in size"),
        ([nn.LayerNorm(8)], "LayerNorm"),
        ([nn.GELU()], "GELU"),
        ([nn.Linear(8, 8)], "flatten first"),
        ([nn.MaxPool2d(2, dilation=2)], "dilation"),
    ]:
        net = nn.Sequential(*layers, *last)
        net(torch.zeros(2, 2, 8, 8))
        assert said in explain_no_kernel(net, (2, 8, 8))
        last = nn.Flatten(), nn.LazyLinear(3)
    frozen = nn.Sequential(nn.Linear(2, 2))
    frozen[0].weight.requires_grad_(False)
    assert "not trained" in explain_no_kernel(frozen, (2,))
    assert "logits" in explain_no_kernel(nn.Sequential(nn.Conv2d(1, 2, 1)), (1, 2, 2))
    assert "no convolution" in explain_no_kernel(nn.Sequential(nn.Flatten()), (1, 2, 2))


def script(path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(os.name != "posix", reason="shell scripts stand in for compilers")
def test_a_missing_or_broken_compiler_says_so(monkeypatch, tmp_path):
    net = nn.Sequential(nn.Linear(3, 2))
    real = c_compiler.find_compiler()
    monkeypatch.setenv("FLRCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(
        "CC",
        script(
            tmp_path / "one",
            f'case "$*" in *-shared*) echo "disk full" >&2; exit 1;; esac; exec {real} "$@"',
        ),
    )
    assert explain_no_kernel(net, (3,)) == "the C compiler failed: disk full"
    assert not list((tmp_path / "cache" / "native").iterdir())
    junk = (
        'case "$*" in *-shared*) while [ "$1" != -o ]; do shift; done; echo junk > "$2"; exit;;'
        f' esac; exec {real} "$@"'
    )
    monkeypatch.setenv("CC", script(tmp_path / "junk", junk))
    assert "does not load" in explain_no_kernel(net, (3,))
    monkeypatch.setenv("CC", script(tmp_path / "two", f'{real} "$@" | grep -v -e AVX -e NEON'))
    assert "processor has none" in explain_no_kernel(net, (3,))
    monkeypatch.setenv("CC", script(tmp_path / "three", "exit 1"))
    assert "knows neither" in explain_no_kernel(net, (3,))
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "no C compiler (cc, gcc, clang)" in explain_no_kernel(net, (3,))


def test_an_unusable_cache_says_so(monkeypatch, tmp_path):
    net = nn.Sequential(nn.Linear(3, 2))
    compiled(net, (3,))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLRCE_CACHE", str(tmp_path / "file"))
    assert "set FLRCE_CACHE" in explain_no_kernel(net, (3,))
    monkeypatch.setenv("FLRCE_CACHE", str(tmp_path))
    command, macros, machine = c_compiler.find_toolchain()
    path = c_compiler.load_or_build_library(
        write_source(plan_stages(net, (3,)), machine), command, macros
    )
    path.write_text("not a library")
    compiled(net, (3,))  # built again
    assert path.stat().st_size > 1000


def test_builds_are_reused(monkeypatch, tmp_path):
    monkeypatch.setenv("FLRCE_CACHE", str(tmp_path))
    compiled(nn.Sequential(nn.Linear(3, 2)), (3,))
    (built,) = (tmp_path / "native").glob("*.so")
    before = built.stat().st_mtime_ns
    compiled(nn.Sequential(nn.Linear(3, 2)), (3,))  # other weights, same net
    assert [f.stat().st_mtime_ns for f in (tmp_path / "native").glob("*.so")] == [before]
    compiled(nn.Sequential(nn.Linear(3, 4)), (3,))
    assert sorted(f.suffix for f in (tmp_path / "native").iterdir()) == [
        ".sha256",
        ".sha256",
        ".so",
        ".so",
    ]


@pytest.mark.slow
def test_processes_may_build_at_the_same_time(tmp_path):
    compiled(nn.Sequential(nn.Linear(3, 2)), (3,))
    code = (
        "from torch import nn, ones, tensor; import numpy as np; from flrce.training.cpu import"
        " build_kernel; from flrce.training.batches import SampleBatches, Samples\nk ="
        " build_kernel(nn.Sequential(nn.Linear(3, 7)), (3,))\nbatches = SampleBatches(Samples(ones(1, 3),"
        " tensor([1])), np.array([0]), np.array([1]))\nw, _, _ = k.train(ones(28), batches,"
        " 7.0)\nprint(round(w.sum().item(), 3), round(w[1].item() + 1, 3))"
    )
    environment = {**os.environ, "FLRCE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
        for _ in range(2)
    ]
    # equal logits: dL/dlogit = 1/7 except label 1, so every weight of row 0 falls by 7 / 7 = 1 and
    # the sum stays
    assert [p.communicate(timeout=60)[0].split() for p in both] == [[b"28.0", b"1.0"]] * 2
    assert sorted(f.suffix for f in (tmp_path / "native").iterdir()) == [".sha256", ".so"]


@given(st.integers(1, 200), st.integers(1, 32))
def test_split_covers_everything_once(n, most):
    found = [(b.start + i * b.size, b.size) for b in split_blocks(n, most) for i in range(b.count)]
    assert [s for s, _ in found] == list(np.cumsum([0] + [size for _, size in found])[:-1])
    assert sum(size for _, size in found) == n
    assert max(size for _, size in found) <= most


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4))
def test_axis_against_plain_loops(size, kernel_size, stride, padding):
    out = (size + 2 * padding - kernel_size) // stride + 1
    if out < 1:
        return
    axis = ConvolutionAxis(size, out, kernel_size, stride, padding)
    pairs = {(o, k, o * stride - padding + k) for o in range(out) for k in range(kernel_size)}
    real = {(o, k, i) for o, k, i in pairs if 0 <= i < size}
    assert set(range(axis.live, axis.dead)) >= {o for o, _, _ in real}
    assert (
        {o for o, _, _ in real} >= set(range(axis.live, axis.dead))
        or stride > kernel_size
        or not real
    )
    gathered = {(axis.gather(i, k), k, i) for i in range(size) for k in axis.taps(i % stride)}
    assert real <= gathered
    assert all(-axis.reach[0] <= o < out + axis.reach[1] for o, _, _ in gathered)
    if real:
        assert min(axis.position(o) for o in range(axis.live, axis.dead)) >= 0


def test_fusion_of_the_papers_network():
    stages = plan_stages(named("cnn-cifar", (3, 32, 32), 10, 1), (3, 32, 32)).stages
    assert [(s.op, s.act, s.pool, s.norm is not None) for s in stages] == [
        ("conv", "RELU", (2, 2), True),
        ("conv", "RELU", (2, 2), True),
        ("linear", "RELU", (1, 1), False),
        ("linear", "RELU", (1, 1), False),
        ("linear", "PLAIN", (1, 1), False),
    ]
