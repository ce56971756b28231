"""Convolutions of many lanes by Triton without rows, in its interpreter, against torch's own in float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from flrce.local.precision import exact
from flrce.local.stacked.last import FEW_CHANNELS, FORWARD, WIDE_FORWARD, How, convolve_last, forward_tile
from test_stacked import mend_interpreter


def test_tiles_by_what_was_measured() -> None:
    for how, wide in (("tf32x3", 33), ("tf32", 65), ("bf16", 65)):
        assert forward_tile(wide, 64, how) == WIDE_FORWARD
        assert forward_tile(wide - 1, 64, how) == FORWARD
    assert forward_tile(64, 3, "tf32x3") == FEW_CHANNELS
    assert forward_tile(64, 3, "tf32") == forward_tile(32, 3, "tf32x3") == FORWARD


def lanes(k: int, B: int, C: int, H: int, W: int, O: int, R: int, S: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(C * O + R)
    return torch.randn(k, B, C, H, W, generator=rng), torch.randn(k, O, C, R, S, generator=rng)


def made(x: Tensor, w: Tensor, how: How) -> list[Tensor]:
    """What the kernels give, and the gradients of a sum of it with fixed weights."""
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    z = convolve_last(leaves[0], leaves[1], how, direct=True)
    return [z.detach(), *torch.autograd.grad(z, leaves, pushed(z))]


def pushed(z: Tensor) -> Tensor:
    """A gradient that is the same for a lane wherever it stands."""
    g = torch.randn(z.shape[1:], generator=torch.Generator().manual_seed(1))
    return g.to(z.dtype).expand(z.shape)


def expected(x: Tensor, w: Tensor, how: How) -> list[Tensor]:
    leaves = [t.double().requires_grad_() for t in (x, w)]
    z = torch.stack([F.conv2d(leaves[0][i], leaves[1][i], None, *how) for i in range(len(x))])
    return [z.detach(), *torch.autograd.grad(z, leaves, pushed(z.to(x.dtype)).double())]


def close(mine: list[Tensor], theirs: list[Tensor], share: float) -> None:
    """Within a share of the largest value."""
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).abs().max() <= share * b.abs().max().clamp(min=1)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[tuple[int, ...], How]:
    R, S = draw(st.sampled_from([(1, 1), (3, 3), (5, 5), (1, 7), (2, 3)]))
    pair = st.tuples(st.integers(1, 2), st.integers(1, 2))
    stride, dilation = draw(pair), draw(pair)
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    H, W = (dilation[i] * ((R, S)[i] - 1) + draw(st.integers(1, 5)) for i in range(2))
    C, O = draw(st.tuples(st.sampled_from([1, 3, 5, 17]), st.sampled_from([1, 3, 17, 66])))
    return (draw(st.integers(1, 3)), draw(st.integers(1, 3)), C, H, W, O, R, S), (stride, padding, dilation)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(convolutions())
def any_convolution(case: tuple[tuple[int, ...], How]) -> None:
    shape, how = case
    x, w = lanes(*shape)
    close(made(x, w, how), expected(x, w, how), 1e-5)


def bits_by_lane() -> None:
    """The same bits again, and for a lane alone as among others; over several parts of the pixels."""
    how: How = ((1, 1), (1, 1), (1, 1))
    for shape in ((2, 3, 5, 12, 12, 17, 3, 3), (2, 1, 20, 5, 4, 70, 2, 2)):
        x, w = lanes(*shape)
        whole = made(x, w, how)
        for again, alone, first in zip(made(x, w, how), made(x[1:2], w[1:2], how), whole, strict=True):
            assert torch.equal(again, first)
            assert torch.equal(alone[0], first[1])


def other_precisions() -> None:
    how: How = ((1, 1), (1, 1), (1, 1))
    for shape in ((2, 2, 17, 4, 3, 18, 3, 3), (2, 2, 20, 3, 3, 17, 1, 1), (2, 2, 3, 4, 4, 18, 3, 3)):
        x, w = lanes(*shape)
        with exact("tf32"):  # wide enough for weights by rows
            close(made(x, w, how), expected(x, w, how), 1e-5)
        half = made(x.bfloat16(), w.bfloat16(), how)
        assert all(each.dtype == torch.bfloat16 for each in half)
        close(half, expected(x.bfloat16(), w.bfloat16(), how), 1e-2)


def in_the_interpreter() -> None:
    mend_interpreter()
    any_convolution()
    bits_by_lane()
    other_precisions()


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds")
    code = "import test_direct; test_direct.in_the_interpreter()"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True,
                          env=os.environ | {"TRITON_INTERPRET": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
