"""The stacked trainer against a plain loop over clients, one after another."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.errors import BadInput
from flrce.models.flat import make_layout, pack_model, unpack_model
from flrce.models.graph import build_layer_chain
from flrce.models.nets import PAPER_CNNS, build_network
from flrce.training.gpu.batch_trainer import ClientBatchTrainer
from flrce.training.gpu.lanes import iterate_lane_runs, plan_batches, round_up_lanes

SCALE, SHIFT = 1 / 64, -1.5


def samples(
    shape: tuple[int, ...], N: int = 60, classes: int = 5, seed: int = 0
) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (N, *shape), dtype=torch.uint8, generator=rng)
    return x, torch.randint(0, classes, (N,), generator=rng)


def plans(
    N: int, sizes: list[list[int]], seed: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, N, sum(s)) for s in sizes], [np.array(s, np.int64) for s in sizes]


def starts(net: nn.Module, K: int, seed: int = 0) -> Tensor:
    """K different starting vectors with running variances that are positive."""
    rng = torch.Generator().manual_seed(seed)
    w = pack_model(net) * (1 + 0.2 * torch.rand(K, make_layout(net).size, generator=rng))
    return w + 0.01 * torch.rand(w.shape, generator=rng)


def plain(net, w, x, y, order, sizes, lr, mu=0.0, first=0, squared=True):  # type: ignore[no-untyped-def]
    """One client in torch's own layers and autograd, in float64."""
    net = unpack_model(net.double().train(), w.double())
    if first:
        links = build_layer_chain(net.float(), tuple(x.shape[1:]))
        net = unpack_model(net.double().train(), w.double())
        for layer in links.layers[: links.layers.index(links.weight_layers[first])]:
            if layer.name:
                net.get_submodule(layer.name).eval().requires_grad_(False)
    start = [p.detach().clone() for p in net.parameters()]
    losses, squares = [], []
    for index in np.split(order, np.cumsum(sizes)[:-1]) if len(sizes) else ():
        each = F.cross_entropy(net(x[index].double() * SCALE + SHIFT), y[index], reduction="none")
        losses.append(each.mean().item())
        squares.append(each.square().mean().item())
        net.zero_grad()
        each.mean().backward()
        with torch.no_grad():
            for p, p0 in zip(net.parameters(), start, strict=True):
                if p.grad is None:
                    continue
                away = p - p0
                norm = away.norm()
                away = away if squared else away / norm if norm else away
                p -= lr * (p.grad + mu * away)
    net.requires_grad_(True)
    out = torch.cat([t.detach().reshape(-1) for t in [*net.parameters(), *floats(net)]])
    net.float()
    return out, losses, squares


def floats(net: nn.Module) -> list[Tensor]:
    return [b for b in net.buffers() if b.is_floating_point()]


def compare(
    net: nn.Module,
    shape: tuple[int, ...],
    sizes: list[list[int]],
    device: str = "cpu",
    floating: bool = False,
    lr: float | Tensor = 0.05,
    tolerance: float = 2e-4,
    **options: Any,
) -> Tensor:
    """Stack against plain(); returns the stacked result."""
    x, y = samples(shape)
    x = x.float() if floating else x
    orders, steps = plans(len(x), sizes)
    w = starts(net, len(sizes))
    out, losses, squares = ClientBatchTrainer(net, shape, x, y, SCALE, SHIFT, device).train(
        w, orders, steps, lr, **options
    )
    for i in range(len(sizes)):
        rate = lr if isinstance(lr, float) else lr[i].item()
        one = {k: v[i].item() if isinstance(v, Tensor) else v for k, v in options.items()}
        expected, loss, square = plain(net, w[i], x, y, orders[i], steps[i], rate, **one)
        assert (out[i].double() - expected).norm() <= tolerance * expected.norm()
        assert (out[i].double() - expected).abs().max() <= 10 * tolerance
        torch.testing.assert_close(
            losses[i].double(), torch.tensor(loss, dtype=torch.float64), rtol=1e-3, atol=1e-4
        )
        torch.testing.assert_close(
            squares[i].double(), torch.tensor(square, dtype=torch.float64), rtol=1e-3, atol=1e-4
        )
    return out


DIGITS = (1, 8, 8)
RAGGED = [[7, 7, 3], [16], [5, 5, 5, 5, 2], [], [9, 1]]
MANY = [[7, 7, 3], [16], [5, 5, 2]]


def digits() -> nn.Module:
    return build_network("cnn-digits", DIGITS, 5, seed=3)


def mixed() -> nn.Sequential:
    """Everything the digits net lacks: groups, dilation, stride, tanh, overlapping pool,
    BatchNorm1d, no affine.
    """
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=2, dilation=2, groups=2, bias=False),
        nn.BatchNorm2d(4, affine=False),
        nn.Tanh(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 6, 2, stride=(2, 1)),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.0),
        nn.Linear(12, 7, bias=False),
        nn.BatchNorm1d(7, momentum=0.3),
        nn.ReLU(),
        nn.Linear(7, 5),
    )


class Branching(nn.Module):
    """Not a chain: the input meets itself again."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3 * 64, 5)
        self.norm = nn.BatchNorm2d(3) if norm else nn.GroupNorm(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((torch.relu(self.norm(self.conv(x))) + x).flatten(1))


class Mixes(nn.Module):
    """Samples of a batch see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x.flatten(1))
        return y - y.mean(0)


class Drawn(Mixes):
    """Random without a layer that says so."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(x[:, torch.randperm(64)] if self.training else x)


@pytest.mark.parametrize("floating", [False, True])
def test_ragged_lanes_equal_the_plain_loop(floating: bool) -> None:
    compare(digits(), DIGITS, RAGGED, floating=floating)


def test_every_kind_of_layer() -> None:
    compare(mixed(), (2, 6, 6), MANY)


def test_mlp() -> None:
    compare(build_network("mlp", (2, 3), 5, seed=0), (2, 3), RAGGED)


@pytest.mark.parametrize("name", ["cnn-cifar", "cnn-cifar-tanh", "cnn-emnist", "cnn-speech"])
def test_the_papers_networks(name: str) -> None:
    shape = PAPER_CNNS[name][0]
    compare(build_network(name, shape, 5, seed=0), shape, [[6, 3], [4]], lr=0.02)


@pytest.mark.parametrize("squared", [True, False])
def test_proximal_terms(squared: bool) -> None:
    # no bias in front of a BatchNorm here: its gradient is rounding noise, which the unsquared pull
    # blows up to mu
    near = compare(mixed(), (2, 6, 6), MANY, mu=2.0, squared=squared)
    assert not torch.allclose(near, compare(mixed(), (2, 6, 6), MANY))


def test_rates_and_pulls_per_lane() -> None:
    compare(
        digits(),
        DIGITS,
        RAGGED,
        lr=torch.tensor([0.1, 0.05, 0.02, 0.3, 0.01]),
        mu=torch.tensor([0.0, 1, 2, 1, 0.5]),
    )


@pytest.mark.parametrize("first", [1, 2])
def test_frozen_blocks_keep_their_bits(first: int) -> None:
    net = digits()
    out = compare(net, DIGITS, RAGGED, first=first, mu=0.1)
    links, where = build_layer_chain(net, DIGITS), make_layout(net)
    frozen = {
        layer.name
        for layer in links.layers[: links.layers.index(links.weight_layers[first])]
        if layer.name
    }
    for slot in where.slots:
        same = torch.equal(out[:, slot.span], starts(digits(), len(RAGGED))[:, slot.span])
        assert same == (slot.name.rpartition(".")[0] in frozen)


def test_any_module_without_batchnorm() -> None:
    torch.manual_seed(0)
    compare(Branching(), DIGITS, RAGGED, mu=0.5)


def test_one_step_by_hand() -> None:
    # logits 0, so p = 1/2 each; loss ln 2; dlogits = (-1/2, 1/2), times x = 2 and lr = 1: weights
    # (1, -1)
    net = nn.Sequential(nn.Linear(1, 2, bias=False))
    stack = ClientBatchTrainer(net, (1,), torch.tensor([[2.0]]), torch.tensor([0]), 1.0, 0.0, "cpu")
    w, losses, squares = stack.train(torch.zeros(1, 2), [np.array([0])], [np.array([1])], 1.0)
    assert w.tolist() == [[1.0, -1.0]]
    assert losses[0].item() == pytest.approx(np.log(2))
    assert squares[0].item() == pytest.approx(np.log(2) ** 2)


def test_long_lanes_cross_segments_and_others_leave() -> None:
    # 150 steps pass the boundary of a segment (128); lanes leave at 2, 3 and 150 steps
    compare(
        build_network("mlp", (2, 3), 5, seed=0),
        (2, 3),
        [[3] * 150, [2] * 3, [4] * 2, [1] * 40],
        lr=0.01,
    )


def test_splitting_does_not_change_results() -> None:
    net, (x, y) = digits(), samples(DIGITS)
    orders, sizes = plans(len(x), RAGGED)
    together, alone = (
        ClientBatchTrainer(net, DIGITS, x, y, SCALE, SHIFT, "cpu", memory) for memory in (None, 1)
    )
    w = starts(net, len(RAGGED))
    a, b = together.train(w, orders, sizes, 0.05), alone.train(w, orders, sizes, 0.05)
    torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(a[1]), torch.cat(b[1]), rtol=1e-5, atol=1e-6)
    assert alone._count_fitting_lanes(16) == 1
    assert together._count_fitting_lanes(16) > 100


def test_the_same_bits_again() -> None:
    net, (x, y) = digits(), samples(DIGITS)
    orders, sizes = plans(len(x), RAGGED)
    w = starts(net, len(RAGGED))
    stack = ClientBatchTrainer(net, DIGITS, x, y, SCALE, SHIFT, "cpu")
    first = stack.train(w, orders, sizes, 0.05, mu=0.1)[0]
    stack.train(w + 1, orders[::-1], sizes[::-1], 0.05)
    assert torch.equal(first, stack.train(w, orders, sizes, 0.05, mu=0.1)[0])
    assert torch.equal(
        first,
        ClientBatchTrainer(net, DIGITS, x, y, SCALE, SHIFT, "cpu").train(
            w, orders, sizes, 0.05, mu=0.1
        )[0],
    )


def test_buffers_with_room_to_spare_serve_fewer_lanes() -> None:
    net, (x, y) = digits(), samples(DIGITS)
    orders, sizes = plans(len(x), RAGGED)
    w = starts(net, len(RAGGED))
    stack = ClientBatchTrainer(net, DIGITS, x, y, SCALE, SHIFT, "cpu")
    stack.train(w, orders, sizes, 0.05, mu=0.1)
    few = stack.train(w[1:3], orders[1:3], sizes[1:3], 0.05, mu=0.1)
    assert len(stack._buffers) == 1
    alone = ClientBatchTrainer(net, DIGITS, x, y, SCALE, SHIFT, "cpu").train(
        w[1:3], orders[1:3], sizes[1:3], 0.05, mu=0.1
    )
    torch.testing.assert_close(few[0], alone[0], rtol=1e-5, atol=1e-6)
    for a, b in zip(few[1] + few[2], alone[1] + alone[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_buffers_are_let_go_when_they_would_not_fit_together() -> None:
    net, (x, y) = digits(), samples(DIGITS)
    roomy = ClientBatchTrainer(net, DIGITS, x, y, SCALE, SHIFT, "cpu")
    stack = ClientBatchTrainer(net, DIGITS, x, y, SCALE, SHIFT, "cpu", roomy._estimate_bytes(3, 16))
    w = starts(net, 2)
    for K in (1, 2):  # one lane and two fit together
        stack.train(w[:K], *plans(len(x), [[3]] * K), 0.05)
    assert len(stack._buffers) == 2
    stack.train(
        w, *plans(len(x), [[3]] * 2), 0.05, mu=0.1
    )  # two more do not, and the oldest goes first
    assert [(mode.lanes, mode.prox) for mode in stack._buffers] == [(2, 2)]


def test_models_may_be_judged_on_samples_of_their_own() -> None:
    net, (x, y) = digits(), samples(DIGITS)
    stack, w = ClientBatchTrainer(net, DIGITS, x, y, SCALE, SHIFT, "cpu"), starts(net, 2)
    index = np.array([[3, 1, 4], [1, 5, 9]])
    both = stack.evaluate(w, index)
    for i in range(2):
        one = stack.evaluate(w[i : i + 1], index[i])
        assert torch.equal(both["accuracy"][i], one["accuracy"][0])
        torch.testing.assert_close(both["loss"][i], one["loss"][0])


@pytest.mark.parametrize("memory", [None, 1])
def test_evaluate_equals_torch(memory: int | None) -> None:
    net, (x, y) = digits(), samples(DIGITS, N=300)
    w, index = starts(net, 3), np.arange(299, 10, -1)
    found = ClientBatchTrainer(net, DIGITS, x, y, SCALE, SHIFT, "cpu", memory).evaluate(w, index)
    correct, loss = found["accuracy"], found["loss"]
    for i in range(3):
        with torch.no_grad():
            logits = unpack_model(net.eval(), w[i])(x[index].float() * SCALE + SHIFT)
        torch.testing.assert_close(
            loss[i], F.cross_entropy(logits, y[index], reduction="none"), rtol=1e-4, atol=1e-5
        )
        assert (correct[i] == (logits.argmax(1) == y[index])).float().mean() > 0.99


@given(st.integers(1, 700), st.integers(1, 700))
def test_levels_are_few_and_waste_little(k: int, most: int) -> None:
    size = round_up_lanes(min(k, most), most)
    assert min(k, most) <= size <= most
    assert size < 1.5 * min(k, most) + 1
    assert len({round_up_lanes(i, 700) for i in range(1, 701)}) <= 20


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(0, 29), st.integers(1, 10))
def test_every_step_of_every_lane_runs(steps: list[int], begin: int, many: int) -> None:
    ranked = np.array(sorted(steps, reverse=True))
    runs = list(iterate_lane_runs(ranked, begin, begin + many, len(steps)))
    assert sum(count for _, count in runs) == many
    at = begin
    for k, count in runs:
        assert (ranked > at).sum() <= k
        at += count


@given(
    st.lists(st.lists(st.integers(1, 8), max_size=9), min_size=1, max_size=5),
    st.integers(0, 9),
    st.integers(1, 9),
)
@settings(max_examples=50)
def test_a_plan_holds_the_batches_in_order(sizes: list[list[int]], begin: int, many: int) -> None:
    orders, steps = plans(1000, sizes)
    indices, counts = plan_batches(orders, steps, begin, begin + many, 8)
    for lane, (order, size) in enumerate(zip(orders, steps, strict=True)):
        expected = np.split(order, np.cumsum(size)[:-1])[begin : begin + many] if len(size) else []
        assert counts[:, lane].tolist() == [len(e) for e in expected] + [0] * (many - len(expected))
        for row, e in zip(indices[:, lane], expected, strict=False):
            assert row.tolist() == e.tolist() + [0] * (8 - len(e))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Mixes(), "mixes samples"),
        (Drawn(), "draws at random"),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, momentum=None), nn.Flatten()),
            "momentum",
        ),
    ],
)
def test_networks_that_cannot_be_stacked(net: nn.Module, message: str) -> None:
    x, y = samples(DIGITS)
    with pytest.raises(BadInput, match=message):
        ClientBatchTrainer(net, DIGITS, x, y, SCALE, SHIFT, "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": 3}, "first=3"),
        ({"orders": [np.array([60])]}, "0..59"),
        ({"sizes": [np.array([2])]}, "add up to 1"),
        ({"w": torch.zeros(2, 3)}, "does not fit 1 lanes"),
    ],
)
def test_bad_calls_say_what_is_wrong(change: dict[str, object], message: str) -> None:
    net, (x, y) = digits(), samples(DIGITS)
    call = {
        "w": starts(net, 1),
        "orders": [np.array([3])],
        "sizes": [np.array([1])],
        "lr": 0.1,
    } | change
    with pytest.raises(BadInput, match=message):
        ClientBatchTrainer(net, DIGITS, x, y, SCALE, SHIFT, "cpu").train(**call)  # type: ignore[arg-type]


def mend_interpreter() -> None:
    """Triton 3.6's interpreter turns arrays of one number into integers as numpy 2.5 no longer
    allows.

    Also its products take bfloat16's bits for integers.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def repatch(tensor, *scope):  # type: ignore[no-untyped-def]
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = repatch
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(self, a, b, *more):  # type: ignore[no-untyped-def]
        return dot(self, *(_widened(each) for each in (a, b)), *more)

    interpreter.InterpreterBuilder.create_dot = widened


def _widened(tensor: Any) -> Any:
    """A tensor of the interpreter in float32, if it holds bfloat16."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import TensorHandle

    if tensor.dtype != bfloat16:
        return tensor
    return TensorHandle((tensor.data.astype(np.uint32) << 16).view(np.float32), float32)


def kernels_against_the_loop() -> None:
    """Run in Triton's interpreter, in a process of its own."""
    mend_interpreter()
    torch.manual_seed(0)
    odd = nn.Sequential(
        nn.Conv2d(2, 3, 2, stride=2, padding=2), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5),
    )  # fmt: skip
    compare(odd, (2, 9, 9), [[7, 7, 3], [9, 1]], mu=0.1)
    compare(odd, (2, 9, 9), [[5, 2]], first=1)
    compare(digits(), DIGITS, [[7, 3], [16]], floating=True)
    test_evaluate_equals_torch(None)
    wide_convolutions()
    norms()


def norms() -> None:
    """GroupNorm and BatchNorm of many lanes, on samples of which some do not count."""
    from flrce.training.gpu.norms import batch_norm, group_norm

    rng = torch.Generator().manual_seed(0)
    cases = [(2, 3, 6, (4, 5), 2), (3, 2, 4, (), 2), (2, 2, 4, (40, 40), 4), (1, 2, 90, (3, 3), 9)]
    for k, B, C, area, groups in cases:
        shapes = ((k, B, C, *area), (k, C), (k, C))
        x, w, b = (torch.randn(shape, generator=rng, requires_grad=True) for shape in shapes)
        count = [B, B - 1, B][:k]
        expected = torch.stack([F.group_norm(x[i], groups, w[i], b[i]) for i in range(k)])
        check(group_norm(x, w, b, groups, 1e-5, direct=True), expected, (x, w, b), rng)
        if any(n * max(1, torch.Size(area).numel()) == 1 for n in count):
            continue
        moving = torch.zeros(k, C), torch.ones(k, C)
        theirs = [torch.zeros(k, C), torch.ones(k, C)]
        many = torch.tensor(count, dtype=torch.int32)
        y = batch_norm(x, *moving, w, b, many, True, 0.1, 1e-5, direct=True)
        real = torch.cat([y[i, :n] for i, n in enumerate(count)])
        alone = [
            F.batch_norm(x[i, :n], theirs[0][i], theirs[1][i], w[i], b[i], training=True)
            for i, n in enumerate(count)
        ]
        check(real, torch.cat(alone), (x, w, b), rng)
        for mine, other in zip(moving, theirs, strict=True):
            torch.testing.assert_close(mine, other)


def check(mine: Tensor, theirs: Tensor, leaves: tuple[Tensor, ...], rng: torch.Generator) -> None:
    """Values, and gradients of a random sum of them."""
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    g = torch.randn(mine.shape, generator=rng)
    for a, b in zip(*(torch.autograd.grad(z, leaves, g) for z in (mine, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def wide_convolutions() -> None:
    """The convolution of any width: strides, borders, dilation and sizes that fill no tile."""
    from flrce.training.gpu.convolution import ConvolutionGeometry, convolve_channels_last
    from flrce.training.precision import use_precision

    rng = torch.Generator().manual_seed(0)
    for k, B, C, H, W, O, R, S, *how in [
        (2, 3, 5, 6, 7, 9, 3, 3, (1, 1), (1, 1), (1, 1)),
        (2, 2, 4, 8, 8, 20, 3, 3, (2, 2), (1, 1), (1, 1)),
        (1, 2, 3, 5, 9, 4, 1, 1, (2, 2), (0, 0), (1, 1)),
        (2, 2, 3, 9, 9, 4, 2, 3, (2, 1), (2, 0), (1, 2)),
        (1, 2, 3, 9, 9, 4, 3, 3, (1, 1), (2, 2), (2, 2)),
    ]:
        shapes = ((k, B, C, H, W), (k, O, C, R, S))
        x, w = (torch.randn(shape, generator=rng, requires_grad=True) for shape in shapes)
        expected = torch.stack([F.conv2d(x[i], w[i], None, *how) for i in range(k)])
        mine = convolve_channels_last(x, w, None, ConvolutionGeometry(*how))
        check(mine, expected, (x, w), rng)
    x, w = (
        torch.randn(shape, generator=rng, requires_grad=True)
        for shape in ((1, 2, 17, 3, 3), (1, 18, 17, 3, 3))
    )
    with use_precision("tf32"):  # wide enough for weights by rows
        check(
            convolve_channels_last(x, w, None, ConvolutionGeometry(padding=(1, 1))),
            F.conv2d(x[0], w[0], padding=1)[None],
            (x, w),
            rng,
        )


def test_fused_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds")
    code = "import test_batch_trainer; test_batch_trainer.kernels_against_the_loop()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    compare(digits(), DIGITS, RAGGED, device="cuda")
