"""Norms of many lanes with channels last, in Triton's interpreter: against torch's own
in float64.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batch_trainer import mend_interpreter
from test_triton_convolution import close, pushed
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.errors import BadInput
from flrce.training.gpu import norms
from flrce.training.gpu.chain_net import DeviceSamples
from flrce.training.gpu.norms import group_norm
from flrce.training.gpu.vmap_net import VmapNet

EPS = 1e-5
Shape = tuple[int, int, int, int, int, int]  # lanes, samples, groups, channels of a group, H, W


def lanes(shape: Shape, affine: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, weight and bias."""
    k, B, groups, width, H, W = shape
    rng = torch.Generator().manual_seed(groups * width + H)
    sizes = [(k, B, groups * width, H, W), *[(k, groups * width)] * (2 * affine)]
    return [
        torch.randn(size, generator=rng).to(dtype if i == 0 else torch.float32)
        for i, size in enumerate(sizes)
    ]


def made(given: list[Tensor], groups: int) -> list[Tensor]:
    """What the kernels give, and the gradients of a sum of it with fixed weights."""
    leaves = [t.clone().requires_grad_() for t in given]
    x, weight, bias = leaves if len(leaves) > 1 else (leaves[0], None, None)
    y = group_norm(x, weight, bias, groups, EPS, direct=True)
    return [y.detach(), *torch.autograd.grad(y, leaves, pushed(y))]


def expected(given: list[Tensor], groups: int) -> list[Tensor]:
    leaves = [t.double().requires_grad_() for t in given]
    y = torch.stack(
        [F.group_norm(x, groups, *affine, eps=EPS) for x, *affine in zip(*leaves, strict=True)]
    )
    return [y.detach(), *torch.autograd.grad(y, leaves, pushed(y.float()).double())]


def compare(shape: Shape, affine: bool) -> None:
    given, groups = lanes(shape, affine), shape[2]
    one, again = made(given, groups), made(given, groups)
    close(one, expected(given, groups), 2e-6)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))


def resnets() -> None:
    for shape in (
        (1, 2, 8, 8, 32, 32),
        (2, 1, 8, 16, 16, 16),
        (2, 2, 8, 64, 4, 4),
        (1, 2, 8, 2, 28, 28),
    ):
        for affine in (True, False):
            compare(shape, affine)


shapes = st.tuples(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 9]),
    st.sampled_from([1, 2, 3, 10, 17]),
    st.sampled_from([1, 3, 7]),
    st.sampled_from([2, 5, 8]),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(shapes, st.booleans())
def any_groups(shape: Shape, affine: bool) -> None:
    compare(shape, affine)


def by_hand() -> None:
    # one group of 2 channels x 2 pixels, 1 3 and 1 3: mean 2, variance 1, normalised -1 1 -1 1
    x = torch.tensor([1.0, 1.0, 3.0, 3.0]).reshape(1, 1, 2, 1, 2).requires_grad_()
    weight, bias = (torch.tensor([each], requires_grad=True) for each in ([2.0, 3.0], [1.0, -1.0]))
    y = group_norm(x, weight, bias, 1, 0.0, direct=True)
    assert y.flatten().tolist() == [-1.0, -1.0, 4.0 - 2.0, 3.0 - 1.0]
    gx, gw, gb = torch.autograd.grad(
        y, (x, weight, bias), torch.tensor([0.0, 0.0, 1.0, 3.0]).reshape(y.shape)
    )
    assert gb.tolist() == [[0.0, 4.0]]  # 1 + 3
    assert gw.tolist() == [[0.0, 4.0]]  # the same times 1
    # g weight = 0 0 3 9, mean 3, mean of it times the normalised 3: 0 - 3 + 3, ..., 3 - 3 - 3, 9 -
    # 3 - 3
    assert gx.flatten().tolist() == [0.0, 0.0, -3.0, 3.0]


def far_from_zero() -> None:
    """The spread is taken about the mean: squares' mean less the mean's square would have lost
    it.
    """
    x = 1000 + lanes((1, 2, 2, 3, 7, 5), False)[0]
    _, mean, scale = norms.ChannelNormFunction.apply(norms._to_pixel_rows(x), None, None, x, 2, EPS)
    groups = x.double().reshape(2, 2, -1)  # samples, groups
    rows = (
        each.repeat_interleave(3, 1)
        for each in (groups.mean(2), groups.var(2, correction=0).add(EPS).rsqrt())
    )
    for mine, theirs in zip((mean, scale), rows, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=0)


def bits_by_lane() -> None:
    shape = (3, 2, 9, 10, 3, 5)
    given = lanes(shape, True)
    for alone, among in zip(made([each[1:2] for each in given], 9), made(given, 9), strict=True):
        assert torch.equal(alone[0], among[1])


def half() -> None:
    """bfloat16 comes in and its gradient goes out; all between is float32, as in two passes."""
    for shape in ((2, 2, 8, 2, 8, 8), (2, 2, 3, 10, 5, 3)):
        given = lanes(shape, True, torch.bfloat16)
        one = made(given, shape[2])
        assert [each.dtype for each in one] == [
            torch.float32,
            torch.bfloat16,
            torch.float32,
            torch.float32,
        ]
        wide = expected([each.float() for each in given], shape[2])
        close(one[:1] + one[2:], wide[:1] + wide[2:], 2e-6)
        close(one[1:2], wide[1:2], 1e-2)


def refused_where_kernels_fail() -> None:
    """A kernel that cannot be made, as on a device it is not for: the way is not gone, and the next
    one is tried.
    """
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(100, 3))
    samples = DeviceSamples(torch.randn(6, 3, 5, 5), torch.zeros(6), 1.0, 0.0)
    VmapNet(module, samples, direct=True)

    plan = norms._plan_launch

    def odd(x: Tensor, groups: int) -> tuple[Any, ...]:
        launch, shape, sizes = plan(x, groups)
        return launch, shape | {"PIXELS": 25}, sizes  # no power of two

    with (
        mock.patch.object(norms, "_plan_launch", odd),
        pytest.raises(BadInput, match="cannot run Sequential"),
    ):
        VmapNet(module, samples, direct=True)


def in_the_interpreter() -> None:
    mend_interpreter()
    by_hand()
    resnets()
    any_groups()
    far_from_zero()
    bits_by_lane()
    half()
    refused_where_kernels_fail()


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds")
    code = "import test_triton_norms; test_triton_norms.in_the_interpreter()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
