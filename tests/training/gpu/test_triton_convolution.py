"""Convolutions of many lanes by Triton without rows, in its interpreter, against torch's own in
float64.
"""

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
from torch import Tensor
from torch.nn import functional as F

from flrce.models.flat import list_model_tensors
from flrce.models.gpt import GPT
from flrce.training.gpu import operations
from flrce.training.gpu.chain_net import DeviceSamples
from flrce.training.gpu.convolution import (
    FORWARD_TILE,
    NARROW_FORWARD_TILE,
    WIDE_FORWARD_TILE,
    ConvolutionGeometry,
    choose_forward_tile,
    convolve_channels_last,
    convolve_lanes,
    has_few_channels,
    move_taps_first,
    multiply_rows,
)
from flrce.training.gpu.vmap_net import VmapNet
from flrce.training.precision import use_precision


def test_tiles_by_what_was_measured() -> None:
    for how, wide in (("tf32x3", 33), ("tf32", 65), ("bf16", 65)):
        assert choose_forward_tile(wide, 64, how) == WIDE_FORWARD_TILE
        assert choose_forward_tile(wide - 1, 64, how) == FORWARD_TILE
    assert choose_forward_tile(64, 3, "tf32x3") == NARROW_FORWARD_TILE
    assert (
        choose_forward_tile(64, 3, "tf32") == choose_forward_tile(32, 3, "tf32x3") == FORWARD_TILE
    )


Shape = tuple[int, ...]  # lanes, samples, C, H, W, O, R, S


def lanes(shape: Shape, biased: bool) -> list[Tensor]:
    """x, weight and bias."""
    k, B, C, H, W, O, R, S = shape
    rng = torch.Generator().manual_seed(C * O + R)
    sizes = [(k, B, C, H, W), (k, O, C, R, S), *[(k, O)] * biased]
    return [torch.randn(size, generator=rng) for size in sizes]


def made(given: list[Tensor], how: ConvolutionGeometry) -> list[Tensor]:
    """What the kernels give, and the gradients of a sum of it with fixed weights."""
    leaves = [t.clone().requires_grad_() for t in given]
    geometry = ConvolutionGeometry(*how)
    z = convolve_channels_last(
        leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None, geometry
    )
    return [z.detach(), *torch.autograd.grad(z, leaves, pushed(z))]


def pushed(z: Tensor) -> Tensor:
    """A gradient that is the same for a lane wherever it stands."""
    g = torch.randn(z.shape[1:], generator=torch.Generator().manual_seed(1))
    return g.to(z.dtype).expand(z.shape)


def expected(given: list[Tensor], how: ConvolutionGeometry) -> list[Tensor]:
    leaves = [t.double().requires_grad_() for t in given]
    z = torch.stack([F.conv2d(x, w, *b or [None], *how) for x, w, *b in zip(*leaves, strict=True)])
    return [z.detach(), *torch.autograd.grad(z, leaves, pushed(z.to(given[0].dtype)).double())]


def close(mine: list[Tensor], theirs: list[Tensor], share: float) -> None:
    """Within a share of the largest value."""
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).abs().max() <= share * b.abs().max().clamp(min=1)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Shape, ConvolutionGeometry]:
    R, S = draw(st.sampled_from([(1, 1), (3, 3), (5, 5), (1, 7), (2, 3)]))
    pair = st.tuples(st.integers(1, 2), st.integers(1, 2))
    stride, dilation = draw(pair), draw(pair)
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    H, W = (dilation[i] * ((R, S)[i] - 1) + draw(st.integers(1, 5)) for i in range(2))
    C, O = draw(st.tuples(st.sampled_from([1, 3, 10, 17]), st.sampled_from([1, 3, 17, 66])))
    return (draw(st.integers(1, 3)), draw(st.integers(1, 3)), C, H, W, O, R, S), (
        stride,
        padding,
        dilation,
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(convolutions(), st.booleans())
def any_convolution(case: tuple[Shape, ConvolutionGeometry], biased: bool) -> None:
    shape, how = case
    given = lanes(shape, biased)
    close(made(given, how), expected(given, how), 1e-5)


def few_channels() -> None:
    """Sums over pairs of channel and tap, in one tile and in several, over several parts of the
    pixels.
    """
    for (C, O, H, W, R, S), how in [
        ((3, 33, 8, 8, 3, 3), ((1, 1), (1, 1), (1, 1))),
        ((1, 20, 18, 18, 5, 5), ((1, 1), (2, 2), (1, 1))),
        ((8, 20, 6, 9, 3, 3), ((1, 2), (2, 1), (2, 1))),
        ((2, 130, 1, 40, 1, 9), ((1, 3), (0, 4), (1, 1))),
    ]:
        assert has_few_channels(torch.empty(1, O, C, R, S))
        for biased in (True, False):
            given = lanes((2, 2, C, H, W, O, R, S), biased)
            close(made(given, how), expected(given, how), 1e-5)


def strides() -> None:
    """Taps that reach each phase of the pixels: all, some, none, and of a kernel shorter than the
    stride.
    """
    for (C, O, H, W, R, S), how in [
        ((17, 18, 7, 6, 3, 3), ((2, 2), (1, 1), (1, 1))),
        ((20, 33, 8, 8, 1, 1), ((2, 2), (0, 0), (1, 1))),
        ((10, 12, 9, 8, 3, 2), ((3, 2), (1, 0), (1, 1))),
        ((10, 12, 9, 9, 3, 3), ((2, 2), (1, 1), (2, 1))),
        ((10, 5, 9, 9, 2, 2), ((3, 3), (0, 1), (1, 1))),
    ]:
        given = lanes((2, 2, C, H, W, O, R, S), False)
        close(made(given, how), expected(given, how), 1e-5)


def bits_by_lane() -> None:
    """The same bits again, and for a lane alone as among others; over several parts of the
    pixels.
    """
    how = ConvolutionGeometry(padding=(1, 1))
    for shape in ((2, 3, 5, 12, 12, 17, 3, 3), (2, 1, 20, 5, 4, 70, 2, 2)):
        given = lanes(shape, True)
        one = [each[1:2] for each in given]
        for again, alone, first in zip(
            made(given, how), made(one, how), made(given, how), strict=True
        ):
            assert torch.equal(again, first)
            assert torch.equal(alone[0], first[1])


def other_precisions() -> None:
    how = ConvolutionGeometry(padding=(1, 1))
    for shape in (
        (2, 2, 17, 4, 3, 18, 3, 3),
        (2, 2, 20, 3, 3, 17, 1, 1),
        (2, 2, 3, 4, 4, 18, 3, 3),
    ):
        given = lanes(shape, True)
        with use_precision("tf32"):  # wide enough for weights by rows
            close(made(given, how), expected(given, how), 1e-5)
        short = [each.bfloat16() for each in given]
        half = made(short, how)
        assert all(each.dtype == torch.bfloat16 for each in half)
        close(half, expected(short, how), 1e-2)


def some_gradients() -> None:
    """Of a bias alone; of a weight whose lanes lie apart; of groups, whose biases lie side by
    side.
    """
    how = ConvolutionGeometry((2, 1), (0, 1), (1, 1))
    x, w, b = lanes((2, 2, 3, 5, 5, 4, 3, 3), True)
    (alone,) = torch.autograd.grad(convolve_channels_last(x, w, b.requires_grad_(), how).sum(), b)
    assert torch.equal(alone, torch.full((2, 4), 20.0))  # 2 samples of 2 x 5 pixels
    apart = torch.stack([w, w + 1], 1)[:, 0]
    assert all(
        torch.equal(*each) for each in zip(made([x, apart], how), made([x, w], how), strict=True)
    )
    leaves = [x.requires_grad_(), w[:, :3, :1].requires_grad_(), b[:, :3]]
    mine = convolve_lanes(*leaves, ConvolutionGeometry(padding=(1, 1)), 3, direct=True)
    theirs = torch.stack(
        [F.conv2d(*lane, padding=1, groups=3) for lane in zip(*leaves, strict=True)]
    )
    both = [[z, *torch.autograd.grad(z.square().sum(), leaves)] for z in (mine, theirs)]
    close(both[0], [each.double() for each in both[1]], 1e-5)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.integers(1, 2),
    st.sampled_from([1, 5, 33]),
    st.integers(1, 7),
    st.sampled_from([(1, 1), (3, 3), (1, 7), (6, 11)]),
)
def turned_weights(k: int, O: int, C: int, kernel: tuple[int, int]) -> None:
    R, S = kernel
    w = torch.randn(k, O, C, R, S)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(
            move_taps_first(w.to(dtype), back=False), w.to(dtype).permute(0, 3, 4, 1, 2)
        )
        assert torch.equal(
            move_taps_first(w.to(dtype), back=True), w.to(dtype).permute(0, 3, 4, 2, 1)
        )


def linear_layers() -> None:
    """Of rows enough, by the same kernels: against float64, the same bits twice, a lane alone as
    among others.
    """
    for k, n, I, O in ((2, 300, 20, 33), (3, 257, 130, 17)):
        for biased in (True, False):
            given = [each[..., 0, 0] for each in lanes((k, n, I, 1, 1, O, 1, 1), False)]
            given += [torch.randn(k, O, generator=torch.Generator().manual_seed(O))] * biased
            one, again, alone = (
                multiplied(given),
                multiplied(given),
                multiplied([each[1:2] for each in given]),
            )
            wide = [each.double().requires_grad_() for each in given]
            y = torch.stack([F.linear(*lane) for lane in zip(*wide, strict=True)])
            close(
                one, [y.detach(), *torch.autograd.grad(y, wide, pushed(y.float()).double())], 1e-5
            )
            assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
            assert all(torch.equal(a[1], b[0]) for a, b in zip(one, alone, strict=True))


def multiplied(given: list[Tensor]) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in given]
    y = multiply_rows(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None)
    return [y.detach(), *torch.autograd.grad(y, leaves, pushed(y))]


def transformers() -> None:
    """Their linear layers go through the kernels in a trial, and where a lane has rows enough."""
    net = GPT(11, 20, 8, every=True, layers=1, width=24, heads=2)  # qkv, mix, up, down, head
    samples = DeviceSamples(torch.arange(80).reshape(10, 8) % 11, torch.zeros(10), 1.0, 0.0)
    own = {
        name: torch.stack([t.detach(), t.detach() + 0.1]) for name, t, _ in list_model_tensors(net)
    }
    with mock.patch.object(operations, "multiply_rows", wraps=multiply_rows) as kernel:
        plain, folded = VmapNet(net, samples), VmapNet(net, samples, direct=True)
        assert kernel.call_count == 15  # in three passes
        outputs = []
        for each, rows, calls in ((plain, 32, 15), (folded, 31, 15), (folded, 32, 20)):
            index, count = (
                torch.arange(rows, dtype=torch.int32).expand(2, -1) % 10,
                torch.tensor([rows, rows]),
            )
            outputs.append(
                each.compute_logits(own, index, count, 0, training=True)[:, :31].detach()
            )
            assert kernel.call_count == calls  # 32 samples of 8 ids are 256 rows
    assert not torch.equal(outputs[0], outputs[2])
    for other in outputs[1:]:
        close([other], [outputs[0].double()], 2e-4)  # norms make much of little


def in_the_interpreter() -> None:
    mend_interpreter()
    linear_layers()
    transformers()
    any_convolution()
    few_channels()
    strides()
    bits_by_lane()
    other_precisions()
    some_gradients()
    turned_weights()


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds")
    code = "import test_triton_convolution; test_triton_convolution.in_the_interpreter()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
