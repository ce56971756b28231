"""A convolution, its BatchNorm, ReLU and max-pool as one differentiable step of Triton kernels."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flrce.models.chain import Layer

try:
    from flrce.local import triton_kernels as kernels
except ImportError:  # torch's CPU builds come without Triton
    kernels = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Tuning:
    """How the kernels cut their work; the same for any number of lanes, so that a lane's bits do not depend on it."""

    exact: tuple[bool, bool, bool] = (True, True, True)  # forward, weight, input
    share: int = 128  # weight gradients a thread holds
    tile: int = 256  # pixels a program convolves
    warps: int = 4
    chunks: int = 32  # partial sums of a weight gradient
    pixels: int = 128  # of a step of them
    weight_warps: int = 4


TUNING = Tuning()
Source = tuple[Tensor, Tensor | None, float, float]  # input or all samples, index (k, B) into them, scale, shift


def usable(device: torch.device) -> bool:
    """Whether the kernels run there: on a GPU, or anywhere in Triton's interpreter."""
    return kernels is not None and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def _power(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())


@dataclass(frozen=True)
class FusedBlock:
    """conv, batchnorm and relu of a chain, with the max-pool behind them if `window` > 1."""

    conv: Layer
    norm: Layer
    window: int

    @property
    def floats(self) -> int:
        """Floats a sample's activations take: z and its input's gradient, the pooled values and their winners."""
        z = torch.Size(self.norm.out).numel()
        return z + torch.Size(self.conv.inside).numel() + 2 * z // self.window**2

    @property
    def shape(self) -> dict[str, int]:
        """The kernels' compile-time constants."""
        C, H, W = self.conv.inside
        O, P, Q = self.conv.out
        (R, S), STEP, PAD = self.conv["kernel"], self.conv["stride"][0], self.conv["padding"][0]
        return {"C": C, "H": H, "W": W, "O": O, "P": P, "Q": Q, "R": R, "S": S, "STEP": STEP, "PAD": PAD}

    def __call__(self, source: Source, t: dict[str, Tensor], count: Tensor, training: bool) -> Tensor:
        """(k, B, C, H, W) or all samples -> (k, B, O, P // window, Q // window)."""
        names = ("weight", "bias", "running_mean", "running_var")
        norm = [t[f"{self.norm.name}.{name}"] for name in names]
        weight, bias = t[f"{self.conv.name}.weight"], t.get(f"{self.conv.name}.bias")
        out: Tensor = _Block.apply(  # type: ignore[no-untyped-call]
            source[0], weight, bias, *norm, self, source[1:], count, training
        )
        return out


def fuse(layers: tuple[Layer, ...]) -> list[tuple[int, FusedBlock | Layer]]:
    """(place, part) of a chain with every run of layers that the kernels know made one part."""
    parts: list[tuple[int, FusedBlock | Layer]] = []
    at = 0
    while at < len(layers):
        block, used = _match(layers[at : at + 4])
        parts.append((at, block or layers[at]))
        at += used
    return parts


def _match(layers: tuple[Layer, ...]) -> tuple[FusedBlock | None, int]:
    """The block these layers begin with, if any, and the number of layers it takes."""
    if [layer.kind for layer in layers[:3]] != ["conv", "batchnorm", "relu"]:
        return None, 1
    conv, norm = layers[:2]
    even = all(len(set(conv[key])) == 1 for key in ("stride", "padding"))
    if not even or conv["groups"] != 1 or conv["dilation"] != (1, 1) or not norm["affine"]:
        return None, 1
    pool = layers[3] if len(layers) > 3 and layers[3].kind == "maxpool" else None
    if pool is None or pool["kernel"] != pool["stride"] or len(set(pool["kernel"])) > 1 or pool["kernel"][0] > 8:
        return FusedBlock(conv, norm, 1), 3
    if pool["padding"] != (0, 0) or pool["dilation"] != (1, 1) or pool["ceil"]:
        return FusedBlock(conv, norm, 1), 3
    return FusedBlock(conv, norm, pool["kernel"][0]), 4


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor, mean: Tensor,
                var: Tensor, block: FusedBlock, source: tuple[Tensor | None, float, float], count: Tensor,
                training: bool) -> Tensor:  # fmt: skip
        shape, (index, scale, shift) = block.shape, source
        k, B = (x if index is None else index).shape[:2]
        O, P, Q = block.conv.out
        z = x.new_empty(k, B, O, P, Q, dtype=torch.float32)
        tune = TUNING
        tiles = -(-B * P * Q // tune.tile)
        moments, facts = z.new_empty(k, 2, O, tiles), z.new_empty(k, 4, O)
        least = 1 if tune.exact[0] else 16
        kernels.convolve[(tiles, k)](
            x, count if index is None else index, weight, weight if bias is None else bias, z, moments, count, scale,
            shift, B, **shape, GATHER=index is not None, BIAS=bias is not None, EXACT=tune.exact[0],
            BLOCK_O=_power(O, least), BLOCK_K=min(32, _power(weight[0, 0].numel(), 16)), BLOCK=tune.tile, num_warps=tune.warps,
        )  # fmt: skip
        if training:
            kernels.merge[(O, k)](
                moments, count, gamma, beta, mean, var, facts, block.norm["momentum"], block.norm["eps"], tiles,
                O=O, AREA=P * Q, TILE=tune.tile, BLOCK=_power(tiles, 1),
            )  # fmt: skip
        else:
            inverse = torch.rsqrt(var + block.norm["eps"])
            torch.stack([mean, inverse, gamma * inverse, beta - mean * gamma * inverse], 1, out=facts)
        u = block.window
        out = z.new_empty(k, B, O, P // u, Q // u)
        peak, code = (torch.empty_like(out), torch.empty_like(out, dtype=torch.uint8)) if training else (out, out)
        kernels.pool[(-(-out[0].numel() // 1024), k)](z, facts, count, out, peak, code, B, O=O, P=P, Q=Q, U=u,
                                                      KEEP=training, BLOCK=1024)  # fmt: skip
        ctx.block, ctx.source, ctx.bias = block, source, bias
        ctx.save_for_backward(x, weight, z, peak, code, facts, count)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight, z, peak, code, facts, count = ctx.saved_tensors
        block, (index, scale, shift) = ctx.block, ctx.source
        (k, B, O, P, Q), u, shape, g = z.shape, block.window, block.shape, g.contiguous()
        taps = weight[0, 0].numel()
        sums = z.new_empty(k, 2, O)
        kernels.reduce[(O, k)](g, peak, code, facts, count, sums, B, O=O, AREA=(P // u) * (Q // u), DEAD=u * u,
                               BLOCK=1024)  # fmt: skip
        deeper = ctx.needs_input_grad[0]
        if deeper:
            grid = (-(-z[0].numel() // 1024), k)
            kernels.spread[grid](z, g, code, facts, sums, count, B, O=O, P=P, Q=Q, U=u, BLOCK=1024)
        tune = TUNING
        least = 1 if tune.exact[2] else 16
        CHUNKS = tune.chunks
        high = _power(O, 1 if tune.exact[1] else 16)
        wide = max(1, tune.share // high) if tune.exact[1] else min(64, _power(taps, 16))
        parts = z.new_empty(k, CHUNKS, *weight.shape[1:])
        kernels.grad_weight[(-(-taps // wide) * CHUNKS, k)](
            x, count if index is None else index, z, g, code, facts, sums, count, scale, shift, parts, B, CHUNKS,
            **shape, U=u, GATHER=index is not None, SPREAD=deeper, EXACT=tune.exact[1], BLOCK_O=high,
            BLOCK_K=wide, BLOCK=tune.pixels, num_warps=tune.weight_warps,
        )  # fmt: skip
        dx = None
        if deeper:
            C, H, W = block.conv.inside
            dx = torch.empty_like(x)
            kernels.grad_input[(-(-B * H * W // tune.tile), k)](
                z, weight, dx, count, B, **shape, EXACT=tune.exact[2], BLOCK_C=_power(C, least),
                BLOCK_K=min(32, _power(O * shape["R"] * shape["S"], 16)), BLOCK=tune.tile, num_warps=tune.warps,
            )  # fmt: skip
        # BatchNorm takes the mean away again, so the bias in front of it has no gradient
        flat = None if ctx.bias is None else torch.zeros_like(ctx.bias)
        return dx, parts.sum(1), flat, sums[:, 1], sums[:, 0], *(None,) * 6
