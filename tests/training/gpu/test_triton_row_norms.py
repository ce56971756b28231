"""LayerNorm and RMSNorm of many lanes, in Triton's interpreter, against torch's own in float64."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batch_trainer import mend_interpreter
from test_triton_convolution import close, pushed
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.models.gpt import GPT
from flrce.training.gpu.chain_net import DeviceSamples
from flrce.training.gpu.norms import (
    MAX_ROW_VALUES,
    RowNormFunction,
    choose_row_tile,
    count_tiles_per_part,
    row_norm,
)
from flrce.training.gpu.vmap_net import VmapNet

EPS = 1e-5
Shape = tuple[int, ...]  # lanes, samples, positions, and what a norm is over


@given(st.integers(1, MAX_ROW_VALUES))
def test_a_program_holds_whole_rows_and_no_more_than_it_can(width: int) -> None:
    cut = choose_row_tile(width)
    assert width <= cut["COLS"] < 2 * width
    assert cut["ROWS"] * cut["COLS"] <= MAX_ROW_VALUES
    assert cut["ROWS"] * cut["COLS"] <= 32 * 16 * cut["num_warps"]
    assert count_tiles_per_part(width) * cut["ROWS"] >= 16


def test_a_gpts_rows() -> None:
    assert choose_row_tile(128) == {"WIDTH": 128, "COLS": 128, "ROWS": 16, "num_warps": 4}
    assert (
        count_tiles_per_part(128) == 4
    )  # 64 rows a part, so that 60 lanes of 1280 rows are 1200 programs
    assert choose_row_tile(768)["ROWS"] == 2
    assert choose_row_tile(4096) == {"WIDTH": 4096, "COLS": 4096, "ROWS": 1, "num_warps": 8}
    assert count_tiles_per_part(4096) == 16


def lanes(
    shape: Shape, many: int, weights: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """x, and so many of weight and bias; the last `many` dimensions are what a norm is over."""
    rng = torch.Generator().manual_seed(sum(shape))
    own = (shape[0], *shape[-many:])
    x = torch.randn(shape, generator=rng).to(dtype)
    return [x, *(1 + torch.randn(own, generator=rng) for _ in range(weights))]


def made(given: list[Tensor], shape: Shape, centred: bool, eps: float | None = EPS) -> list[Tensor]:
    """What the kernels give, and the gradients of a sum of it with fixed weights."""
    leaves = [each.clone().requires_grad_() for each in given]
    x, weight, bias = [*leaves, None, None][:3]
    assert x is not None
    y = row_norm(x, shape, weight, bias, eps, centred, direct=True)
    return [y.detach(), *torch.autograd.grad(y, leaves, pushed(y))]


def expected(given: list[Tensor], shape: Shape, centred: bool) -> list[Tensor]:
    leaves = [each.double().requires_grad_() for each in given]
    norm = F.layer_norm if centred else F.rms_norm
    y = torch.stack([norm(x, shape, *own, eps=EPS) for x, *own in zip(*leaves, strict=True)])
    return [y.detach(), *torch.autograd.grad(y, leaves, pushed(y.float()).double())]


def compare(shape: Shape, many: int, weights: int, centred: bool) -> None:
    given, over = lanes(shape, many, weights), shape[-many:]
    one, again = (made(given, over, centred) for _ in range(2))
    close(one, expected(given, over, centred), 2e-6)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))


def usual() -> None:
    for width in (64, 128, 300):
        for weights, centred in ((2, True), (1, True), (0, True), (1, False), (0, False)):
            compare((2, 3, 27, width), 1, weights, centred)
    compare((1, 2, 2, 1000), 1, 2, True)
    compare((2, 1, 17, MAX_ROW_VALUES), 1, 2, True)  # a part of 16 rows, and one of a single row
    compare((2, 3, 40, 2, 5, 3), 3, 2, True)  # over three dimensions
    compare((2, 3, 40, 7), 1, 2, True)  # 256 rows at once, of which there are 120


shapes = st.tuples(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 30),
    st.sampled_from([1, 2, 7, 33, 100, 128]),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(shapes, st.integers(0, 2), st.booleans())
def any_rows(shape: Shape, weights: int, centred: bool) -> None:
    if (
        shape[-1] > 2
    ):  # the normalised values of one or two are fixed, whatever they were: gradients are rounding
        compare(shape, 1, weights if centred else min(weights, 1), centred)


def by_hand() -> None:
    # rows 1 3 1 3 and 0 4 4 0: means 2, variances 1 and 4, normalised -1 1 -1 1 and -1 1 1 -1
    x = torch.tensor([[[1.0, 3.0, 1.0, 3.0], [0.0, 4.0, 4.0, 0.0]]], requires_grad=True)
    weight = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    bias = torch.tensor([[0.0, 0.0, 1.0, -1.0]], requires_grad=True)
    y = row_norm(x, (4,), weight, bias, 0.0, centred=True, direct=True)
    assert y.tolist() == [[[-1.0, 2.0, -2.0, 3.0], [-1.0, 2.0, 4.0, -5.0]]]
    g = torch.tensor([[[4.0, 0.0, 0.0, 1.0], [0.0, 2.0, 0.0, 0.0]]])
    gx, gw, gb = torch.autograd.grad(y, (x, weight, bias), g)
    assert gb.tolist() == [[4.0, 2.0, 0.0, 1.0]]
    assert gw.tolist() == [[-4.0, 2.0, 0.0, 1.0]]
    # g weight = 4 0 0 4: mean 2, times the normalised -4 0 0 4: mean 0; 4 - 2, 0 - 2, ...
    # g weight = 0 4 0 0: mean 1, times the normalised 0 4 0 0: mean 1; (0 - 1 + 1) / 2, (4 - 1 - 1)
    # / 2, ...
    assert gx.tolist() == [[[2.0, -2.0, -2.0, 2.0], [0.0, 1.0, -1.0, 0.0]]]
    # RMS: 2 2 2 2 has mean square 4, so 1 1 1 1; g 4 0 0 0 less its mean product 1, divided by 2
    x = torch.full((1, 1, 4), 2.0, requires_grad=True)
    y = row_norm(x, (4,), None, None, 0.0, centred=False, direct=True)
    assert y.tolist() == [[[1.0] * 4]]
    assert torch.autograd.grad(y, x, torch.tensor([[[4.0, 0.0, 0.0, 0.0]]]))[0].tolist() == [
        [[1.5, -0.5, -0.5, -0.5]]
    ]


def far_from_zero() -> None:
    """The spread is taken about the mean: squares' mean less the mean's square would have lost
    it.
    """
    given = lanes((1, 2, 3, 100), 1, 2)
    given[0] += 1000
    close(
        made(given, (100,), True), expected(given, (100,), True), 3e-4
    )  # 1000 itself is rounded to 6e-5


def only_what_is_asked() -> None:
    """A weight that stands still has no gradient; the others are the same."""
    x, weight, bias = lanes((2, 3, 27, 64), 1, 2)
    whole = made([x, weight, bias], (64,), True)
    for moving in ((0,), (0, 2), (1,)):
        leaves = [
            each.clone().requires_grad_(i in moving) for i, each in enumerate((x, weight, bias))
        ]
        y = row_norm(leaves[0], (64,), leaves[1], leaves[2], EPS, centred=True, direct=True)
        found = torch.autograd.grad(y, [leaves[i] for i in moving], pushed(y))
        assert all(torch.equal(g, whole[1 + i]) for i, g in zip(moving, found, strict=True))


def bits_by_lane() -> None:
    given = lanes((3, 2, 50, 100), 1, 2)
    alone = made([each[1:2] for each in given], (100,), True)
    for one, among in zip(alone, made(given, (100,), True), strict=True):
        assert torch.equal(one[0], among[1])


def half() -> None:
    """bfloat16 comes in and its gradient goes out; weights and all between are float32."""
    given = lanes((2, 2, 30, 100), 1, 2, torch.bfloat16)
    found = made(given, (100,), True)
    assert [each.dtype for each in found] == [
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    wide = expected([each.float() for each in given], (100,), True)
    close(found[:1] + found[2:], wide[:1] + wide[2:], 2e-6)
    close(found[1:2], wide[1:2], 1e-2)


def no_eps_given() -> None:
    """nn.RMSNorm's own: what is least in float32."""
    x = lanes((2, 1, 5, 30), 1, 0)[0] * 1e-4
    y = made([x], (30,), False, eps=None)[0]
    torch.testing.assert_close(y, F.rms_norm(x, (30,)), rtol=1e-5, atol=1e-6)


class Gated(nn.Module):
    """With a tensor of its own, so that its code sees one lane."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.words, self.norm = (
            nn.Parameter(torch.ones(9)),
            nn.Embedding(11, 9),
            nn.LayerNorm(9),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.norm(self.words(ids)) * self.gate
        return x


def networks() -> tuple[list[nn.Module], DeviceSamples]:
    torch.manual_seed(0)
    fixed = GPT(11, 11, 6, every=True, layers=1, width=12, heads=2).requires_grad_(False)
    fixed.head.requires_grad_(True)
    odd = nn.Sequential(
        nn.Embedding(11, 6), nn.RMSNorm(6), nn.LayerNorm((6, 6), bias=False), nn.Linear(6, 5),
        nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 3),
    )  # fmt: skip
    trained = GPT(11, 11, 6, every=True, layers=1, width=12, heads=2)
    return [trained, fixed, odd, Gated()], DeviceSamples(
        torch.arange(60).reshape(10, 6) % 11, torch.zeros(10), 1.0, 0.0
    )


def in_networks() -> None:
    """The verification compares each with one lane after another, in float64 without the kernels
    and in float32 with them.
    """
    nets, samples = networks()
    # trained norms in three passes
    for net, norms in zip(nets, (9, 0, 6, 3), strict=True):
        with mock.patch.object(
            RowNormFunction, "apply", side_effect=RowNormFunction.apply
        ) as kernel:
            VmapNet(net, samples, direct=True)
        assert kernel.call_count == norms


def in_the_interpreter() -> None:
    mend_interpreter()
    by_hand()
    usual()
    any_rows()
    far_from_zero()
    only_what_is_asked()
    bits_by_lane()
    half()
    no_eps_given()
    in_networks()


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds")
    code = "import test_triton_row_norms; test_triton_row_norms.in_the_interpreter()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
