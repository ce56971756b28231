"""Linear layers, GELU and attention as compiled C, with their gradients; compiled_calls.py says which
calls come here.

Numbers are float32, laid out as torch has them. Gradients of gradients are torch's.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flrce.core import c_compiler as build
from flrce.core.c_compiler import KernelUnavailable, Processor
from flrce.training.cpu.emit import define_interleaving

HERE = Path(__file__).parent
Place = ctypes.c_long * 3


def write_source(machine: Processor) -> str:
    """The C file."""
    # two vectors of sums each, beside two of inputs and one weight
    rows = (machine.registers - 4) // 2
    counts = range(1, rows + 1)
    tiles = " ".join(f"TILE({r}, {v})" for r in counts for v in (1, 2))
    names = ", ".join(f"{{0, tile_{r}_1, tile_{r}_2}}" for r in counts)
    head = f"#define LANES {machine.lanes}\n#define CHANNELS 1\n#define ROWS {rows}"
    prelude, products, layers = (
        (HERE / name).read_text() for name in ("prelude.h", "products.h", "layers.h")
    )
    products = products.replace("\nTILES\n", f"\n{tiles}\n").replace("NAMES", names)
    return "\n".join([head, define_interleaving(machine.lanes), prelude, products, layers])


@lru_cache
def load_library() -> tuple[Any, int]:
    """(the functions, floats in a vector); KernelUnavailable says why there are none."""
    command, macros, machine = build.find_toolchain()
    try:
        code = ctypes.CDLL(str(build.load_or_build_library(write_source(machine), command, macros)))
    except OSError as why:
        raise KernelUnavailable(
            f"the compiled layers do not load ({why}); set FLRCE_CACHE to another folder"
        ) from why
    pointer: Any = ctypes.c_void_p
    long: Any = ctypes.c_long
    number: Any = ctypes.c_int
    code.product.argtypes = [pointer, long, long] * 2 + [pointer] + [long] * 4 + [pointer, number]
    code.columns.argtypes = code.alive.argtypes = [pointer, long, long, pointer]
    code.gelu_back.argtypes = [pointer] * 3 + [long]
    code.attend.argtypes = [pointer] * 7 + [ctypes.c_float, number, number]
    code.attend_back.argtypes = [pointer] * 11 + [ctypes.c_float, number]
    code.alive.restype = long
    return code, machine.lanes


def multiply(
    a: Tensor, b: Tensor, start: Tensor | None = None, shape: Sequence[int] = ()
) -> Tensor:
    """start + a b, of a (m, k) whose rows or columns are contiguous and b (k, n); k above 0.
    `shape`: instead of m.
    """
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(*(shape or (m,)), n)
    code, _ = load_library()
    begin = start.data_ptr() if start is not None else None
    code.product(
        a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), c.data_ptr(), n, m, n, k, begin, 0
    )
    return c


def _differentiate_by_torch(
    call: Callable[..., Tensor], given: Sequence[Any], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients that have gradients, by torch."""
    wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    with torch._C.DisableTorchFunction(), torch.enable_grad():
        grads = iter(torch.autograd.grad(call(*given), wanted, dy, create_graph=True))
    return tuple(next(grads) if isinstance(x, Tensor) and x.requires_grad else None for x in given)


class Linear(torch.autograd.Function):
    """x (..., inputs) -> (..., outputs)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w, b)
        return multiply(_flatten_rows(x), w.T, None if b is None else b.contiguous(), x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, b = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiate_by_torch(F.linear, (x, w, b), dy)
        wants, given = ctx.needs_input_grad, _flatten_rows(x)
        rows, few = _find_live_rows(_flatten_rows(dy))
        dx = dw = None
        if wants[0]:
            found = multiply(rows, w)
            dx = found if few is None else torch.zeros_like(given).index_copy_(0, few, found)
            dx = dx.view(x.shape)
        if wants[1]:
            dw = multiply(rows.T, given if few is None else given.index_select(0, few))
        return dx, dw, _sum_rows(rows) if wants[2] else None


def _find_live_rows(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """(the rows that are not 0, which these are), or (all of them, None): a loss may be of each
    sample's last token.
    """
    which = torch.empty(len(rows), dtype=torch.int64)
    found = load_library()[0].alive(rows.data_ptr(), *rows.shape, which.data_ptr())
    if not 0 < found <= len(rows) // 2:
        return rows, None
    return rows.index_select(0, which[:found]), which[:found]


def _sum_rows(rows: Tensor) -> Tensor:
    to = rows.new_empty(rows.shape[1])
    load_library()[0].columns(rows.data_ptr(), *rows.shape, to.data_ptr())
    return to


def _flatten_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


class Gelu(torch.autograd.Function):
    """Torch's, with a faster way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiate_by_torch(F.gelu, (x,), dy)
        x, dy = x.contiguous(), dy.contiguous()
        dx = torch.empty_like(x)
        load_library()[0].gelu_back(x.data_ptr(), dy.data_ptr(), dx.data_ptr(), x.numel())
        return (dx,)


def _list_strides(*tensors: Tensor) -> Any:
    """Strides of sample, head and token, one tensor's after the other."""
    return (Place * len(tensors))(*(Place(*x.stride()[:3]) for x in tensors))


class Attention(torch.autograd.Function):
    """q (samples, heads, tokens, numbers), k and v likewise -> as q; or all in one (3, ...).
    Numbers are neighbours.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        scale: float,
        causal: bool,
        keep: bool,
    ) -> Tensor:
        given = (q, k, v)
        q, k, v = _split_projections(q, k, v)
        (N, H, L, D), S = q.shape, k.shape[2]
        code, lanes = load_library()
        # as layers behind it want it
        out = torch.empty_strided((N, H, L, D), (L * H * D, D, H * D, 1))
        shares = q.new_empty(N * H if keep else 1, S, -(-L // lanes) * lanes)
        tensors, size = (q, k, v, out, shares), (ctypes.c_long * 6)(N, H, L, S, D, shares.shape[-1])
        pointers, places = [x.data_ptr() for x in tensors], _list_strides(q, k, v, out)
        code.attend(*pointers, places, size, scale, causal, keep)
        ctx.save_for_backward(*given, shares)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *given, shares = ctx.saved_tensors
        if torch.is_grad_enabled():
            attend = partial(_attend_by_torch, causal=ctx.causal, scale=ctx.scale)
            return (*_differentiate_by_torch(attend, given, dout), None, None, None)
        grads = [None if x is None else _allocate_gradient(x) for x in given]
        (q, k, v), (dq, dk, dv) = _split_projections(*given), _split_projections(*grads)
        (N, H, L, D), S = q.shape, k.shape[2]
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        size, work = (
            (ctypes.c_long * 6)(N, H, L, S, D, shares.shape[-1]),
            torch.empty_like(shares[0]),
        )
        places = _list_strides(q, k, v, dout, dq, dk, dv)
        pointers = [x.data_ptr() for x in (q, k, v, dout, shares, dq, dk, dv, work)]
        load_library()[0].attend_back(*pointers, places, size, ctx.scale, ctx.causal)
        return *grads, None, None, None


def _allocate_gradient(x: Tensor) -> Tensor:
    """Memory for a gradient, laid out as x where that has each number once."""
    found = torch.empty_like(x)
    return found if found.stride(-1) == 1 else x.new_empty(x.shape)


def _split_projections(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (q, k, v) if k is not None else q.unbind(0)


def _attend_by_torch(
    q: Tensor, k: Tensor | None, v: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """By torch."""
    return F.scaled_dot_product_attention(
        *_split_projections(q, k, v), is_causal=causal, scale=scale
    )
