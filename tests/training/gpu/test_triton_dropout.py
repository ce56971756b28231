"""Dropout of many lanes by Triton, in its interpreter, against the same draws in plain torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_batch_trainer import mend_interpreter
from torch import Tensor

from flrce.training.gpu.operations import drop_values

SEEDS, STEP, PLACE = torch.tensor([5, 2**62, -7]), torch.tensor([3]), 0xFFFF1234


def drop_with_gradient(x: Tensor, g: Tensor, p: float, direct: bool) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = drop_values(x, p, SEEDS, STEP, PLACE, direct=direct)
    return y.detach(), torch.autograd.grad(y, x, g)[0]


def compare_in_the_interpreter() -> None:
    mend_interpreter()
    rng = torch.Generator().manual_seed(0)
    for shape in ((3, 4, 5), (3, 2, 700, 3), (3, 1, 1024)):
        x, g = torch.randn(2, *shape, generator=rng)
        for p in (0.1, 0.5, 0.9):
            for a, b in zip(
                drop_with_gradient(x, g, p, True), drop_with_gradient(x, g, p, False), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    x = torch.randn(2, 3, 40, generator=rng).transpose(0, 1)  # not contiguous
    a, b = (drop_values(x, 0.3, SEEDS, STEP, PLACE, direct=direct) for direct in (True, False))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_the_kernel_drops_what_plain_torch_drops() -> None:
    pytest.importorskip("triton")
    code = "import test_triton_dropout; test_triton_dropout.compare_in_the_interpreter()"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parent, env=environment
    )
