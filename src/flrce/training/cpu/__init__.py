"""Fused kernels for small feed-forward networks on the CPU: one C file per net, compiled at first
use and cached.

`build_kernel(net, shape)` gives a `Kernel`, or raises `KernelUnavailable` with one line that says
why there is none; torch then does the work. `explain_no_kernel` asks beforehand.
"""

from torch import nn

from flrce.core import c_compiler as build
from flrce.core.c_compiler import KernelUnavailable
from flrce.models.kinds import FUSED_KINDS
from flrce.models.tracing import is_plain_sequence
from flrce.training.cpu.check import find_difference
from flrce.training.cpu.emit import write_source
from flrce.training.cpu.stages import plan_stages
from flrce.training.cpu.trainer import Kernel

__all__ = ["Kernel", "KernelUnavailable", "build_kernel", "explain_no_kernel"]


def build_kernel(net: nn.Module, shape: tuple[int, ...]) -> Kernel:
    """A compiled trainer for this net and sample shape; KernelUnavailable says why there is none."""
    stages = plan_stages(net, tuple(shape))
    command, macros, machine = build.find_toolchain()
    text = write_source(stages, machine)
    lanes = machine.lanes
    try:
        path = build.load_or_build_library(text, command, macros)
        try:
            made = Kernel(stages, tuple(shape), lanes, path)
        except OSError:  # damaged, or on a disk without programs: the second try tells
            path.unlink()
            path = build.load_or_build_library(text, command, macros)
            made = Kernel(stages, tuple(shape), lanes, path)
    except OSError as why:
        raise KernelUnavailable(
            f"the compiled kernel does not load ({why}); set FLRCE_CACHE to another folder"
        ) from why
    if not is_plain_sequence(net, FUSED_KINDS) and (
        where := find_difference(made, net, tuple(shape), stages.classes)
    ):
        raise KernelUnavailable(
            f"{type(net).__name__} does something in {where} that its layers do not say"
        )
    return made


def explain_no_kernel(net: nn.Module, shape: tuple[int, ...]) -> str:
    """Why there is no kernel for this net; "" where there is one."""
    try:
        build_kernel(net, shape)
    except KernelUnavailable as why:
        return str(why)
    return ""
