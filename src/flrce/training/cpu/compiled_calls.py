"""Transformers and wide linear layers on a CPU: which calls go through compiled code, whatever
makes them.

`CompiledCalls()` is a mode of torch: while it lasts, calls of F.linear, F.gelu,
F.scaled_dot_product_attention and of nn.MultiheadAttention's function go through layers.py, from
any layer or network. A call beyond the plain case (masks, dropout, other precisions, few numbers)
is torch's.
"""

import copy
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flrce.core.c_compiler import KernelUnavailable
from flrce.models import drawing
from flrce.training.cpu.layers import Attention, Gelu, Linear, load_library

MIN_PRODUCT_OPERATIONS = 2**23  # multiply-adds from which on a product is worth the call
MIN_VALUES = 2**15  # numbers from which on the others are
MAX_ATTENDED_TOKENS = 256  # tokens that attend: all their shares are kept for the way back
MIN_LAYER_WEIGHTS = 2**12  # weights of a layer that counts
# multiply-adds of a batch in the largest layer from which on the mode is worth its calls
MIN_BATCH_OPERATIONS = 2**24
get_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # inside vmap and its like


@lru_cache
def is_faster_here() -> bool:
    """Whether compiled layers are known to be faster than torch's: measured on AMD, where MKL's
    products are slow.
    """
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _are_plain_tensors(*tensors: Any) -> bool:
    """Whether all are plain float32 numbers here, and nobody watches what is kept for the way back.

    Layers that are recomputed on that way are: torch recomputes them without its modes.
    """
    if torch.is_autocast_enabled("cpu") or get_saved_tensor_hooks(False) is not None:
        return False
    return all(map(_is_plain_tensor, tensors))


def _is_plain_tensor(x: Any) -> bool:
    if not (type(x) is Tensor or isinstance(x, nn.Parameter)) or is_wrapped(x):
        return False
    return (x.dtype, x.device.type, x.layout) == (torch.float32, "cpu", torch.strided)


def call_linear(input: Any, weight: Any, bias: Any = None, **more: Any) -> Tensor | None:
    """F.linear; None, here and below: not by compiled code."""
    given = (input, weight) if bias is None else (input, weight, bias)
    if more or not _are_plain_tensors(*given) or weight.dim() != 2 or input.dim() < 2:
        return None
    fits = input.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])
    if not fits or input.numel() * len(weight) < MIN_PRODUCT_OPERATIONS:
        return None
    return cast(Tensor, Linear.apply(input, weight, bias))


def call_gelu(input: Any, *, approximate: str = "none", **more: Any) -> Tensor | None:
    """F.gelu"""
    if more or approximate != "none" or not torch.is_grad_enabled():
        return None
    if not _are_plain_tensors(input) or input.numel() < MIN_VALUES:
        return None
    return cast(Tensor, Gelu.apply(input))


def call_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """F.scaled_dot_product_attention"""
    odd = attn_mask is not None or dropout_p or enable_gqa
    if odd or not _are_plain_tensors(query, key, value) or not query.dim() == key.dim() == 4:
        return None
    if key.shape != value.shape or query.shape[:2] != key.shape[:2]:
        return None
    L, S, D = query.shape[2], key.shape[2], query.shape[3]
    scale = D**-0.5 if scale is None else float(scale)
    if key.shape[3] != D or query.numel() < MIN_VALUES:
        return None
    if max(L, S) > MAX_ATTENDED_TOKENS or scale <= 0:
        return None
    near = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
    return cast(Tensor, Attention.apply(*near, scale, is_causal, torch.is_grad_enabled()))


def call_multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **more: Any,
) -> tuple[Tensor, None] | None:
    """F.multi_head_attention_forward where a sequence attends to itself: (tokens, samples,
    width).
    """
    alone = query is key and key is value and _are_plain_tensors(query) and query.dim() == 3
    if not alone or query.shape[-1] != embed_dim_to_check or embed_dim_to_check % num_heads:
        return None
    others = (bias_k, bias_v, key_padding_mask, *more.values())
    flags = (add_zero_attn, use_separate_proj_weight, need_weights, training and dropout_p)
    if any(flags) or any(x is not None for x in others):
        return None
    if is_causal != (attn_mask is not None):  # a mask that is not causal, or a mistake
        return None
    if query.numel() < MIN_VALUES or len(query) > MAX_ATTENDED_TOKENS:
        return None
    # nn.MultiheadAttention has turned samples first into tokens first
    turned = query.transpose(0, 1).is_contiguous()
    x = query.transpose(0, 1) if turned else query
    qkv = _call_linear_or_torch(x, in_proj_weight, in_proj_bias)
    qkv = qkv.view(*x.shape[:2], 3, num_heads, -1)
    # of (samples, heads, tokens, numbers)
    three = qkv.permute((2, 0, 3, 1, 4) if turned else (2, 1, 3, 0, 4))
    scale = (embed_dim_to_check // num_heads) ** -0.5
    seen: Tensor = Attention.apply(three, None, None, scale, is_causal, torch.is_grad_enabled())
    seen = seen.permute((0, 2, 1, 3) if turned else (2, 0, 1, 3)).reshape(x.shape)
    out = _call_linear_or_torch(seen, out_proj_weight, out_proj_bias)
    return (out.transpose(0, 1) if turned else out), None


def _call_linear_or_torch(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    found = call_linear(x, w, b)
    return F.linear(x, w, b) if found is None else found


REPLACED: dict[Any, Callable[..., Any]] = {
    F.linear: call_linear,
    F.gelu: call_gelu,
    F.scaled_dot_product_attention: call_attention,
    F.multi_head_attention_forward: call_multi_head_attention,
}


class CompiledCalls(TorchFunctionMode):
    """While it lasts, calls that compiled code knows go there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = REPLACED.get(func)
        found = None if known is None else known(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found


def find_widest_layer(net: nn.Module) -> int:
    """Weights of the largest layer that compiled code may be faster for; 0: there is none, or no
    code.
    """
    layers = [m for m in net.modules() if isinstance(m, nn.Linear | nn.MultiheadAttention)]
    sizes = [p.numel() for layer in layers for p in layer.parameters() if p.dim() == 2]
    widest = max(sizes, default=0)
    if widest < MIN_LAYER_WEIGHTS or not is_faster_here():
        return 0
    try:
        load_library()
    except KernelUnavailable:
        return 0
    return widest


def is_worth_compiling(weights: int, x: Tensor, n: int) -> bool:
    """Whether n samples like those of x give such a layer enough to do; by shapes alone: a resume
    does alike.
    """
    # tokens, or samples
    rows = n * (x.shape[1] if x.dim() == 3 or (x.dim() == 2 and not x.is_floating_point()) else 1)
    return rows * weights >= MIN_BATCH_OPERATIONS and torch.get_num_threads() == 1


class AttentionByteCounter(TorchFunctionMode):
    """While it lasts, attention's shares are counted: 4 bytes for each sample, head and pair of
    tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, (_, self.lanes) = 0, load_library()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:  # (..., heads, tokens, numbers)
            query, key = (
                args[i] if len(args) > i else given[name] for i, name in enumerate(("query", "key"))
            )
            self._add(math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2])
        elif func is F.multi_head_attention_forward:  # (tokens, samples, width), and how many heads
            query, key, heads = args[0], args[1], args[4]
            self._add(math.prod(query.shape[1:-1]) * heads, len(query), len(key))
        return func(*args, **given)

    def _add(self, heads: int, L: int, S: int) -> None:
        if max(L, S) <= MAX_ATTENDED_TOKENS:
            self.nbytes += 4 * heads * S * -(-L // self.lanes) * self.lanes  # whole vectors


def count_attention_bytes(net: nn.Module, x: Tensor) -> int:
    """Bytes for each sample, found by a pass over a few of them; 0 where the network has no
    attention.
    """
    counter = AttentionByteCounter()
    with drawing.preserve_rng_states(torch.device("cpu")), torch.no_grad(), counter:
        copy.deepcopy(net).train()(x)
    return counter.nbytes // len(x)
