"""A convolution, its BatchNorm, ReLU and max-pool as one differentiable step of Triton kernels."""

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flrce.models.graph import LayerSpec

try:
    from flrce.training.gpu import triton_fused_block as kernels
except ImportError:  # torch's CPU builds come without Triton
    kernels = None  # type: ignore[assignment]

# How the kernels cut their work, as measured on an H200; not by the number of lanes, so that bits
# do not depend on it.
FORWARD, BACKWARD = 64, 32  # sums a thread holds in a convolution, and in its transpose
PIXELS, TILES = 64, 32  # a weight gradient's partial sums are over TILES tiles of PIXELS pixels


def supports_triton(device: torch.device) -> bool:
    """Whether the kernels run there: on a GPU, or anywhere in Triton's interpreter."""
    return kernels is not None and (
        device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    )


def next_power_of_two(n: int) -> int:
    """n rounded up to a power of two."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class FusedBlock:
    """conv, batchnorm and relu of a chain, with the max-pool behind them if `window` > 1.

    Its input has the convolution's border of zeros around it, its output a border of `edge`, for
    the next block.
    """

    conv: LayerSpec
    norm: LayerSpec
    window: int
    edge: int = 0

    @property
    def activation_floats(self) -> int:
        """Floats a sample's activations take: z and its input's gradient, the pooled values and
        their winners.
        """
        z = torch.Size(self.norm.out).numel()
        return z + 2 * torch.Size(self.conv.inside).numel() + 2 * z // self.window**2

    @property
    def padding(self) -> int:
        return int(self.conv["padding"][0])

    @property
    def kernel_constants(self) -> dict[str, int]:
        """The kernels' compile-time constants."""
        C, H, W = self.conv.inside
        O, P, Q = self.conv.out
        (R, S), STEP, E = self.conv["kernel"], self.conv["stride"][0], 2 * self.padding
        return {
            "C": C,
            "H": H + E,
            "W": W + E,
            "O": O,
            "P": P,
            "Q": Q,
            "R": R,
            "S": S,
            "STEP": STEP,
        }

    def gather_inputs(self, x: Tensor, index: Tensor, scale: float, shift: float) -> Tensor:
        """Samples x[index] (k, B, C, H, W) as float32, with the border this block wants."""
        C, H, W = self.conv.inside
        out = x.new_empty(
            *index.shape, C, H + 2 * self.padding, W + 2 * self.padding, dtype=torch.float32
        )
        grid = (-(-out[0].numel() // 1024), len(index))
        kernels.gather_samples[grid](
            x,
            index,
            out,
            scale,
            shift,
            index.shape[1],
            C=C,
            H=out.shape[3],
            W=out.shape[4],
            EDGE=self.padding,
            BLOCK=1024,
        )
        return out

    def __call__(self, x: Tensor, t: dict[str, Tensor], count: Tensor, training: bool) -> Tensor:
        """(k, B, C, H + 2 pad, W + 2 pad) -> (k, B, O, P // window + 2 edge, Q // window + 2
        edge).
        """
        names = ("weight", "bias", "running_mean", "running_var")
        norm = [t[f"{self.norm.name}.{name}"] for name in names]
        weight, bias = t[f"{self.conv.name}.weight"], t.get(f"{self.conv.name}.bias")
        out: Tensor = _FusedBlockFunction.apply(x, weight, bias, *norm, self, count, training)
        return out


def fuse_layers(layers: tuple[LayerSpec, ...]) -> list[tuple[int, FusedBlock | LayerSpec]]:
    """(place, part) of a chain with every run of layers that the kernels know made one part."""
    parts: list[tuple[int, FusedBlock | LayerSpec]] = []
    at = 0
    while at < len(layers):
        block, used = _match_block(layers[at : at + 4])
        if block and parts and isinstance(parts[-1][1], FusedBlock):
            parts[-1] = (parts[-1][0], replace(parts[-1][1], edge=block.padding))
        parts.append((at, block or layers[at]))
        at += used
    return parts


def _match_block(layers: tuple[LayerSpec, ...]) -> tuple[FusedBlock | None, int]:
    """The block these layers begin with, if any, and the number of layers it takes."""
    if [layer.kind for layer in layers[:3]] != ["conv", "batchnorm", "relu"]:
        return None, 1
    conv, norm = layers[:2]
    even = all(len(set(conv[key])) == 1 for key in ("stride", "padding"))
    if not even or conv["groups"] != 1 or conv["dilation"] != (1, 1) or not norm["affine"]:
        return None, 1
    pool = layers[3] if len(layers) > 3 and layers[3].kind == "maxpool" else None
    if (
        pool is None
        or pool["kernel"] != pool["stride"]
        or len(set(pool["kernel"])) > 1
        or pool["kernel"][0] > 8
    ):
        return FusedBlock(conv, norm, 1), 3
    if pool["padding"] != (0, 0) or pool["dilation"] != (1, 1) or pool["ceil"]:
        return FusedBlock(conv, norm, 1), 3
    return FusedBlock(conv, norm, pool["kernel"][0]), 4


class _FusedBlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor,
        beta: Tensor,
        mean: Tensor,
        var: Tensor,
        block: FusedBlock,
        count: Tensor,
        training: bool,
    ) -> Tensor:
        (k, B), (O, P, Q), u = x.shape[:2], block.conv.out, block.window
        high = next_power_of_two(O)
        tile = 128 * max(1, FORWARD // high)
        tiles = -(-B * P * Q // tile)
        z, moments, facts = (
            x.new_empty(k, B, O, P, Q),
            x.new_empty(k, 2, O, tiles),
            x.new_empty(k, 4, O),
        )
        kernels.convolve[(tiles, k)](
            x,
            weight,
            weight if bias is None else bias,
            z,
            moments,
            count,
            B,
            **block.kernel_constants,
            BIAS=bias is not None,
            BLOCK_O=high,
            BLOCK=tile,
        )
        if training:
            kernels.merge_moments[(O, k)](
                moments,
                count,
                gamma,
                beta,
                mean,
                var,
                facts,
                block.norm["momentum"],
                block.norm["eps"],
                tiles,
                O=O,
                AREA=P * Q,
                TILE=tile,
                BLOCK=next_power_of_two(tiles),
            )
        else:
            inverse = torch.rsqrt(var + block.norm["eps"])
            torch.stack(
                [mean, inverse, gamma * inverse, beta - mean * gamma * inverse], 1, out=facts
            )
        out = x.new_empty(k, B, O, P // u + 2 * block.edge, Q // u + 2 * block.edge)
        peak, code = (
            (torch.empty_like(out), torch.empty_like(out, dtype=torch.uint8))
            if training
            else (out, out)
        )
        kernels.normalise_and_pool[(-(-out[0].numel() // 256), k)](
            z,
            facts,
            count,
            out,
            peak,
            code,
            B,
            O=O,
            P=P,
            Q=Q,
            U=u,
            EDGE=block.edge,
            KEEP=training,
            BLOCK=256,
        )
        ctx.block, ctx.bias = block, bias
        ctx.save_for_backward(x, weight, z, peak, code, facts, count)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight, z, peak, code, facts, count = ctx.saved_tensors
        block, g = ctx.block, g.contiguous()
        (k, B, O, P, Q), u, edge = z.shape, block.window, block.edge
        sums, area = z.new_empty(2, k, O), g[0, 0, 0].numel()
        wide = 4 if B * area > 8192 else 1
        kernels.reduce_norm_gradients[(O, k)](
            g,
            peak,
            code,
            facts,
            count,
            sums,
            B,
            O=O,
            AREA=area,
            DEAD=u * u,
            BLOCK=1024 * wide,
            num_warps=4 if wide == 1 else 8,
        )
        grid = (-(-z[0].numel() // 1024), k)
        kernels.backpropagate_pool[grid](
            z, g, code, facts, sums, count, B, O=O, P=P, Q=Q, U=u, EDGE=edge, BLOCK=1024
        )
        dx = (
            _compute_input_gradient(block, z, weight, x, count) if ctx.needs_input_grad[0] else None
        )
        # BatchNorm takes the mean away again, so the bias in front of it has no gradient
        flat = None if ctx.bias is None else torch.zeros_like(ctx.bias)
        return (
            dx,
            _compute_weight_gradient(block, z, weight, x, count),
            flat,
            sums[1],
            sums[0],
            *(None,) * 5,
        )


def _compute_weight_gradient(
    block: FusedBlock, dz: Tensor, weight: Tensor, x: Tensor, count: Tensor
) -> Tensor:
    (k, B, O, P, Q), taps = dz.shape, weight[0, 0].numel()
    wide = min(64, max(16, next_power_of_two(taps)))
    chunks = -(-B * P * Q // (PIXELS * TILES))
    parts = dz.new_empty(k, chunks, *weight.shape[1:])
    kernels.grad_weight[(-(-taps // wide) * chunks, k)](
        x,
        dz,
        count,
        parts,
        B,
        chunks,
        **block.kernel_constants,
        BLOCK_O=max(16, next_power_of_two(O)),
        BLOCK_K=wide,
        BLOCK=PIXELS,
        num_warps=2,
        num_stages=3,
    )
    return parts.sum(1)


def _compute_input_gradient(
    block: FusedBlock, dz: Tensor, weight: Tensor, x: Tensor, count: Tensor
) -> Tensor:
    (C, H, W), (k, B) = block.conv.inside, x.shape[:2]
    high, dx = next_power_of_two(C), torch.empty_like(x)
    tile = 128 * max(1, BACKWARD // high)
    kernels.grad_input[(-(-B * H * W // tile), k)](
        dz,
        weight,
        dx,
        count,
        B,
        **block.kernel_constants,
        PAD=block.padding,
        BLOCK_C=high,
        BLOCK=tile,
        UNROLL=4,
    )
    return dx
