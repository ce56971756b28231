"""GRU layers on a CPU: the steps in compiled C, what is one product over all steps by torch.

torch walks a GRU through a dozen small operations a step; here a step is one product and one pass
over the gates, samples side by side in vectors. A network keeps its layers: `compile_gru_layers` changes their
class, and a call beyond the plain case (states given, packed sequences, other precisions) is
torch's. Its LSTM is fused already, and is left as it is.
"""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flrce.core import c_compiler as build
from flrce.core.c_compiler import KernelUnavailable, Processor
from flrce.training.cpu.emit import define_interleaving
from flrce.training.cpu.linear import write_product

HERE = Path(__file__).parent
ALIGNED = 64  # bytes of the widest vector
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # inside vmap and its like


def write_source(units: int, machine: Processor) -> str:
    """The C file of one width."""
    parts = [
        f"#define LANES {machine.lanes}\n#define CHANNELS 1\n#define H {units}",
        define_interleaving(machine.lanes),
    ]
    parts += [(HERE / "prelude.h").read_text()]
    parts += [write_product("states", "forward", 3 * units, units, units, 1, machine)]
    parts += [write_product("gates", "backward", units, 3 * units, 1, units, machine)]
    return "\n".join([*parts, (HERE / "gru.h").read_text()])


@lru_cache
def load_library(units: int) -> tuple[Any, int]:
    """(the functions of this width, samples in a vector); KernelUnavailable says why there are none."""
    command, macros, machine = build.find_toolchain()
    try:
        code = ctypes.CDLL(
            str(build.load_or_build_library(write_source(units, machine), command, macros))
        )
    except OSError as why:
        raise KernelUnavailable(
            f"the compiled GRU layers do not load ({why}); set FLRCE_CACHE to another folder"
        ) from why
    for call in (code.steps_forward, code.steps_back):
        call.restype, call.argtypes = None, [ctypes.c_void_p] * 6 + [ctypes.c_long] * 2
    return code, machine.lanes


class _GRUSteps(torch.autograd.Function):
    """One layer over all steps: x (in, steps, samples) and its tensors -> states (units, steps,
    samples).

    Samples are padded to whole vectors; the padding's gradients are 0. Without `back` nothing is
    kept for them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, wi: Tensor, wh: Tensor, bi: Tensor, bh: Tensor, back: bool
    ) -> Tensor:
        units, (_, steps, n) = wh.shape[1], x.shape
        code, lanes = load_library(units)
        given = torch.addmm(bi[:, None], wi, x.flatten(1))  # (3 units, steps samples)
        out, work = x.new_empty(units, steps, n), x.new_empty(4, units, n)
        kept = x.new_empty(4, units, steps, n) if back else x.new_empty(0)
        tensors = [given, wh.contiguous(), bh.contiguous(), out, kept, work]
        pointers = [t.data_ptr() if t.numel() else None for t in tensors]
        code.steps_forward(*pointers, steps, n // lanes)
        ctx.save_for_backward(x, wi, wh, out, kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, wi, wh, out, kept = ctx.saved_tensors
        units, (_, steps, n) = wh.shape[1], x.shape
        code, lanes = load_library(units)
        d, work = x.new_empty(4 * units, steps, n), x.new_empty(5, units, n)
        tensors = [_align_tensor(dout), out, kept, wh.contiguous(), d, work]
        code.steps_back(*(t.data_ptr() for t in tensors), steps, n // lanes)
        # rows of d: r, z, n as the inputs see it, n as the states do (times r)
        inner, last = d[: 3 * units].flatten(1), d[3 * units :].flatten(1)
        # steps but the first, and where they began
        later, before = (d[:, 1:].flatten(1), out[:, :-1].flatten(1).T)
        dwh = torch.cat([later[: 2 * units] @ before, later[3 * units :] @ before])
        dbi = inner.sum(1)
        dx = (wi.T @ inner).view(x.shape) if ctx.needs_input_grad[0] else None
        dbh = torch.cat([dbi[: 2 * units], last.sum(1)])
        return dx, inner @ x.flatten(1).T, dwh, dbi, dbh, None


def _align_tensor(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNED else x


class CompiledGRU(nn.GRU):
    """nn.GRU by compiled steps."""

    def forward(self, x: Any, given: Any = None) -> Any:
        if given is not None or not self._is_plain_call(x):
            return super().forward(x, given)
        n, (_, lanes) = x.shape[0 if self.batch_first else 1], load_library(self.hidden_size)
        now = x.permute(2, 1, 0) if self.batch_first else x.permute(2, 0, 1)  # (in, steps, samples)
        now, last = nn.functional.pad(now, (0, -n % lanes)), []
        for layer in range(self.num_layers):
            wi, wh = getattr(self, f"weight_ih_l{layer}"), getattr(self, f"weight_hh_l{layer}")
            none = wi.new_zeros(len(wi))
            bi, bh = (
                getattr(self, f"bias_{which}_l{layer}") if self.bias else none
                for which in ("ih", "hh")
            )
            now = cast(
                Tensor, _GRUSteps.apply(now.contiguous(), wi, wh, bi, bh, torch.is_grad_enabled())
            )
            last.append(now[:, -1, :n].T)
        out = now[..., :n].permute(2, 1, 0) if self.batch_first else now[..., :n].permute(1, 2, 0)
        return out, torch.stack(last)

    def _is_plain_call(self, x: Any) -> bool:
        """Whether the compiled steps know this call."""
        if not isinstance(x, Tensor) or x.dim() != 3 or not x.numel():
            return False
        if x.shape[-1] != self.input_size or (self.training and self.dropout):
            return False
        for t in (x, self.weight_hh_l0):
            if t.dtype != torch.float32 or t.device.type != "cpu" or is_wrapped(t):
                return False
        return not torch.is_autocast_enabled("cpu")


def has_compiled_steps(layer: nn.Module) -> bool:
    """Whether a layer is a GRU that has compiled steps."""
    if type(layer) is not nn.GRU or layer.bidirectional:
        return False
    try:
        load_library(layer.hidden_size)
    except KernelUnavailable:
        return False
    return True


def compile_gru_layers(net: nn.Module) -> nn.Module:
    """The net, its GRU layers by compiled steps from now on."""
    for layer in net.modules():
        if has_compiled_steps(layer):
            layer.__class__ = CompiledGRU
    return net
