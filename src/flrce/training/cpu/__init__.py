"""Fused kernels for small feed-forward networks on the CPU: one C file per net, compiled at first
use and cached.

`kernel(net, shape)` gives a `Kernel`, or raises `KernelUnavailable` with one line that says why
there is none; torch then does the work. `why_none` asks beforehand.
"""

from torch import nn

from flrce.core import c_compiler as build
from flrce.core.c_compiler import KernelUnavailable
from flrce.models.kinds import FUSED_KINDS
from flrce.models.tracing import is_plain_sequence
from flrce.training.cpu.check import differs
from flrce.training.cpu.emit import source
from flrce.training.cpu.stages import plan
from flrce.training.cpu.trainer import Kernel

__all__ = ["Kernel", "KernelUnavailable", "kernel", "why_none"]


def kernel(net: nn.Module, shape: tuple[int, ...]) -> Kernel:
    """A compiled trainer for this net and sample shape; Unsupported says why there is none."""
    stages = plan(net, tuple(shape))
    command, macros, machine = build.find_toolchain()
    text = source(stages, machine)
    try:
        path = build.load_or_build_library(text, command, macros)
        try:
            made = Kernel(stages, tuple(shape), machine.lanes, path)
        except (
            OSError
        ):  # a damaged file, or a disk that may not hold programs: the second try tells
            path.unlink()
            made = Kernel(
                stages,
                tuple(shape),
                machine.lanes,
                build.load_or_build_library(text, command, macros),
            )
    except OSError as why:
        raise KernelUnavailable(
            f"the compiled kernel does not load ({why}); set FLRCE_CACHE to another folder"
        ) from why
    if not is_plain_sequence(net, FUSED_KINDS) and (
        where := differs(made, net, tuple(shape), stages.classes)
    ):
        raise KernelUnavailable(
            f"{type(net).__name__} does something in {where} that its layers do not say"
        )
    return made


def why_none(net: nn.Module, shape: tuple[int, ...]) -> str:
    """Why there is no kernel for this net; "" where there is one."""
    try:
        kernel(net, shape)
    except KernelUnavailable as why:
        return str(why)
    return ""
