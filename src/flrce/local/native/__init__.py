"""Fused kernels for small feed-forward networks on the CPU: one C file per net, compiled at first use and cached.

`kernel(net, shape)` gives a `Kernel`, or raises `Unsupported` with one line that says why there is none; torch then
does the work. `why_none` asks beforehand.
"""

from torch import nn

from flrce import compiling as build
from flrce.compiling import Unsupported
from flrce.local.native.check import differs
from flrce.local.native.emit import source
from flrce.local.native.stages import plan
from flrce.local.native.trainer import Kernel
from flrce.models.kinds import FUSED
from flrce.models.tracing import told

__all__ = ["Kernel", "Unsupported", "kernel", "why_none"]


def kernel(net: nn.Module, shape: tuple[int, ...]) -> Kernel:
    """A compiled trainer for this net and sample shape; Unsupported says why there is none."""
    stages = plan(net, tuple(shape))
    command, macros, machine = build.tools()
    text = source(stages, machine)
    try:
        path = build.library(text, command, macros)
        try:
            made = Kernel(stages, tuple(shape), machine.lanes, path)
        except OSError:  # a damaged file, or a disk that may not hold programs: the second try tells
            path.unlink()
            made = Kernel(stages, tuple(shape), machine.lanes, build.library(text, command, macros))
    except OSError as why:
        raise Unsupported(f"the compiled kernel does not load ({why}); set FLRCE_CACHE to another folder") from why
    if not told(net, FUSED) and (where := differs(made, net, tuple(shape), stages.classes)):
        raise Unsupported(f"{type(net).__name__} does something in {where} that its layers do not say")
    return made


def why_none(net: nn.Module, shape: tuple[int, ...]) -> str:
    """Why there is no kernel for this net; "" where there is one."""
    try:
        kernel(net, shape)
    except Unsupported as why:
        return str(why)
    return ""
