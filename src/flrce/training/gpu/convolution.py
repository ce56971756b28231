"""Convolutions of many lanes: x (k, B, C, H, W) and weight (k, O, C / groups, R, S).

columns  one matrix product per lane: weight (O, C R S) times columns (C R S, B P Q) of what each
         output pixel sees; on any device
direct   Triton kernels that read the pixels themselves, with channels last in memory, so that
         neither factor of a product is ever transposed

Weight gradients have the weight's strides and are summed in a fixed order, without atomic
additions: the same bits each time, and no transposing copy in a step.
"""

from itertools import product as grid
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from flrce.training.gpu.fused_block import supports_triton
from flrce.training.precision import cast_like_autocast

Pair = tuple[int, int]
Tile = tuple[int, int, int, int, int]

MAX_FEW_CHANNELS = 8  # half of what a product sums over at once
MAX_NARROW_CHANNELS = 16
# Tiles as measured on an H200: (outputs, pixels, channels, warps, stages), and for weight gradients
# (outputs, channels, pixels, warps, stages). The programs of one lane's weight gradient are not
# chosen by the number of lanes, so that bits do not depend on it.
FORWARD_TILE, WIDE_FORWARD_TILE = (64, 128, 32, 4, 3), (128, 128, 32, 8, 3)
NARROW_FORWARD_TILE = (64, 256, 16, 8, 3)
WEIGHT_TILE, NARROW_WEIGHT_TILE = (128, 64, 32, 4, 3), (64, 64, 128, 2, 2)
WEIGHT_GRADIENT_PROGRAMS = 128
MIN_PART_ROWS = 512  # of a sum over rows that is split
COPY_BLOCK_VALUES = 2048  # values that one program copies
MAX_RUN_VALUES = 64  # values that a tile of a copy reads or writes in a row


class ConvolutionGeometry(NamedTuple):
    """Each as (height, width); zeros around x."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def compute_output_size(self, x_size: Pair, kernel: Pair) -> Pair:
        height, width = (
            (n + 2 * pad - dilation * (taps - 1) - 1) // stride + 1
            for n, taps, stride, pad, dilation in zip(x_size, kernel, *self, strict=True)
        )
        return height, width


def convolve_lanes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: ConvolutionGeometry,
    groups: int = 1,
    direct: bool = False,
) -> Tensor:
    """x (k, B, C, H, W), weight (k, O, C / groups, R, S), bias (k, O) -> (k, B, O, P, Q)."""
    k = len(weight)
    if k == 1 and not direct:
        own = None if bias is None else bias[0]
        return F.conv2d(x[0], weight[0], own, *geometry, groups)[None]
    x, weight, bias = cast_like_autocast(x, weight, bias)
    if groups > 1 and weight.shape[2] == 1:  # depthwise: torch's own kernels, no product
        side = x.transpose(0, 1).flatten(1, 2)  # (B, k C, H, W)
        joined = None if bias is None else bias.flatten()
        y: Tensor = F.conv2d(side, weight.flatten(0, 1), joined, *geometry, k * groups)
        lanes: Tensor = y.unflatten(1, (k, -1))
        return lanes.transpose(0, 1)
    if groups > 1:  # each group is a lane
        x = x.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1)
        weight = weight.unflatten(1, (groups, -1)).flatten(0, 1)
    if direct and supports_kernels(x):
        own = None if bias is None else bias.reshape(len(weight), -1)
        y, bias = convolve_channels_last(x, weight, own, geometry), None
    else:
        y = _ColumnsConvolution.apply(x, weight, geometry)
    if groups > 1:
        y = y.unflatten(0, (k, groups)).transpose(1, 2).flatten(2, 3)
    return y if bias is None else y + bias[:, None, :, None, None]


class _ColumnsConvolution(torch.autograd.Function):
    """x (k, B, C, H, W), weight (k, O, C, R, S) -> (k, B, O, P, Q)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, geometry: ConvolutionGeometry) -> Tensor:
        x = _pad_images(x, geometry.padding)
        ctx.save_for_backward(x, weight)  # columns are made again: they are R S times as large as x
        ctx.geometry = geometry
        columns, size = _unfold_columns(x, weight, geometry)
        y = torch.bmm(weight.flatten(2), columns)  # (k, O, B P Q)
        return y.reshape(len(x), -1, x.shape[1], *size).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = g.transpose(1, 2).reshape(len(g), g.shape[2], -1)  # (k, O, B P Q)
        gw = gx = None
        if ctx.needs_input_grad[1]:
            columns, _ = _unfold_columns(x, weight, ctx.geometry)
            gw = torch.bmm(rows, columns.mT).reshape(weight.shape)
        if ctx.needs_input_grad[0]:
            spread = torch.bmm(weight.flatten(2).mT, rows)
            gx = _fold_columns(spread, x, weight, ctx.geometry, (g.shape[3], g.shape[4]))
        return gx, gw, None


def _pad_images(x: Tensor, padding: Pair) -> Tensor:
    return F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x


def _unfold_columns(
    x: Tensor, weight: Tensor, geometry: ConvolutionGeometry
) -> tuple[Tensor, Pair]:
    """(k, C R S, B P Q): what each output pixel sees of padded x, and (P, Q)."""
    k, B, C, height, width = x.shape
    R, S = weight.shape[3:]
    stride, _, dilation = geometry
    P, Q = geometry._replace(padding=(0, 0)).compute_output_size((height, width), (R, S))
    a, b, c, d, e = x.stride()
    strides = (a, c, d * dilation[0], e * dilation[1], b, d * stride[0], e * stride[1])
    columns = x.as_strided((k, C, R, S, B, P, Q), strides)
    return columns.reshape(k, C * R * S, B * P * Q), (P, Q)


def _fold_columns(
    spread: Tensor, x: Tensor, weight: Tensor, geometry: ConvolutionGeometry, size: Pair
) -> Tensor:
    """The gradient by x, of which the padding is cut off, from spread (k, C R S, B P Q)."""
    k, B, C, height, width = x.shape
    R, S = weight.shape[3:]
    stride, padding, dilation = geometry
    spread = spread.reshape(k, C, R, S, B, *size)
    total = x.new_zeros(k, C, B, height, width)
    for r, s in grid(range(R), range(S)):  # in a fixed order: no atomic additions
        down, right = r * dilation[0], s * dilation[1]
        rows = slice(down, down + stride[0] * size[0], stride[0])
        columns = slice(right, right + stride[1] * size[1], stride[1])
        total[:, :, :, rows, columns] += spread[:, :, r, s]
    inner = total[..., padding[0] : height - padding[0], padding[1] : width - padding[1]]
    return inner.transpose(1, 2)


def supports_kernels(x: Tensor) -> bool:
    """Whether the Triton kernels take x where it is."""
    return supports_triton(x.device) and x.dtype in (torch.float32, torch.bfloat16)


def convolve_channels_last(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvolutionGeometry
) -> Tensor:
    """x (k, B, C, H, W) of any layout -> (k, B, O, P, Q) with channels last in memory."""
    z = _DirectConvolution.apply(x.permute(0, 1, 3, 4, 2), weight, bias, geometry)
    return cast(Tensor, z).permute(0, 1, 4, 2, 3)


def multiply_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer as a convolution of one pixel: x (k, n, I), weight (k, O, I), bias (k, O) ->
    (k, n, O).
    """
    pixels, taps = x[:, :, None, None], weight[..., None, None]
    z = _DirectConvolution.apply(pixels, taps, bias, ConvolutionGeometry())
    return cast(Tensor, z)[:, :, 0, 0]


class _DirectConvolution(torch.autograd.Function):
    """x (k, B, H, W, C), weight (k, O, C, R, S), bias (k, O) or None -> (k, B, P, Q, O)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvolutionGeometry
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        ctx.geometry = geometry
        if has_few_channels(weight):
            return _convolve_unfolded_rows(x, weight, bias, geometry)
        return _launch_forward(x, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, bias = ctx.saved_tensors
        by_x, by_weight, by_bias, _ = ctx.needs_input_grad
        g = g.contiguous()
        gx = gw = gb = None
        if by_x:
            gx = _launch_input_gradient(g, weight, (x.shape[2], x.shape[3]), ctx.geometry)
        if by_weight and _prefers_unfolded_rows(x, weight):
            gw = _multiply_unfolded_rows(x, g, weight, ctx.geometry)
        elif by_weight:
            gw, gb = _launch_weight_gradient(x, g, weight, by_bias, ctx.geometry)
        if by_bias and gb is None:
            gb = g.sum((1, 2, 3))
        return gx, gw, None if gb is None else gb.to(bias.dtype), None


def has_few_channels(weight: Tensor) -> bool:
    """Whether sums of a convolution by weight (k, O, C, R, S) go over channels and taps at once."""
    return weight.shape[2] <= MAX_FEW_CHANNELS and weight.shape[3] * weight.shape[4] > 1


def choose_product_mode(x: Tensor) -> str:
    """How products are made: bfloat16 under autocast, TF32 where it is allowed, else three TF32
    products.
    """
    if x.dtype == torch.bfloat16:
        return "bf16"
    return "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"


def choose_forward_tile(O: int, C: int, mode: str) -> Tile:
    """The tile of a product that gives O channels from C; three TF32 products want more warps than
    one.
    """
    if C <= MAX_NARROW_CHANNELS:
        return NARROW_FORWARD_TILE if mode == "tf32x3" and O > 32 else FORWARD_TILE
    return WIDE_FORWARD_TILE if (32 if mode == "tf32x3" else 64) < O else FORWARD_TILE


def choose_tile_size(n: int, least: int, most: int) -> int:
    """A power of two near n."""
    size = least
    while size < n and size < most:
        size *= 2
    return size


def _list_constants(
    x: Tensor, O: int, size: Pair, kernel: Pair, geometry: ConvolutionGeometry
) -> dict[str, Any]:
    """The kernels' constants for x (k, B, H, W, C), O output channels and output pixels `size`."""
    (H, W, C), (P, Q), (R, S) = x.shape[2:], size, kernel
    sizes = {"C": C, "H": H, "W": W, "O": O, "P": P, "Q": Q, "S": S, "TAPS": R * S}
    return {**sizes, "GEOMETRY": (*geometry.stride, *geometry.padding, *geometry.dilation)}


def _launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvolutionGeometry
) -> Tensor:
    O, C, R, S = weight.shape[1:]
    size = geometry.compute_output_size((x.shape[2], x.shape[3]), (R, S))
    constants = _list_constants(x, O, size, (R, S), geometry)
    constants |= {"BACK": False, "PHASES_H": 1, "PHASES_W": 1}
    tile = choose_forward_tile(O, C, choose_product_mode(x))
    return _launch(x, move_taps_first(weight), bias, constants, tile, C)


def _launch_input_gradient(
    g: Tensor, weight: Tensor, size: Pair, geometry: ConvolutionGeometry
) -> Tensor:
    """(k, B, *size, C) from the gradient g (k, B, P, Q, O) by the output."""
    O, C, R, S = weight.shape[1:]
    # rows and columns after which the same taps reach a pixel again; all do where taps lie apart
    stride, _, dilation = geometry
    phases = [step if gap == 1 else 1 for step, gap in zip(stride, dilation, strict=True)]
    constants = _list_constants(g, C, size, (R, S), geometry)
    constants |= {"BACK": True, "PHASES_H": phases[0], "PHASES_W": phases[1]}
    tile = choose_forward_tile(C, O, choose_product_mode(g))
    taps = move_taps_first(weight, back=True)
    return _launch(g, taps, None, constants, tile, O)


def _launch(
    x: Tensor, taps: Tensor, bias: Tensor | None, constants: dict[str, Any], tile: Tile, summed: int
) -> Tensor:
    """(k, B, P, Q, O): products that sum over `summed` channels."""
    from flrce.training.gpu import triton_convolution as kernels

    k, B = x.shape[:2]
    O, P, Q = (constants[name] for name in "OPQ")
    high, wide = (constants.get(name, 1) for name in ("PHASES_H", "PHASES_W"))
    z = torch.empty(k, B, P, Q, O, dtype=x.dtype, device=x.device)
    pixels = B * -(-P // high) * -(-Q // wide)  # of a phase
    most_o, block_n, most_c, warps, stages = tile
    block_o, block_c = choose_tile_size(O, 16, most_o), choose_tile_size(summed, 16, most_c)
    blocks = {"BLOCK_O": block_o, "BLOCK_N": block_n, "BLOCK_C": block_c}
    flags = {"BIASED": bias is not None, "MODE": choose_product_mode(x)}
    options = {"num_warps": warps, "num_stages": stages}
    launch = (high * wide * -(-pixels // block_n), -(-O // block_o), k)
    shift = z if bias is None else bias.contiguous()
    kernels.convolve[launch](
        x, taps, shift, z, B * P * Q, **constants, **flags, **blocks, **options
    )
    return z


def _launch_weight_gradient(
    x: Tensor, g: Tensor, weight: Tensor, biased: bool, geometry: ConvolutionGeometry
) -> tuple[Tensor, Tensor | None]:
    """The gradients by the weight and, if `biased`, by the bias; g (k, B, P, Q, O)."""
    from flrce.training.gpu import triton_convolution as kernels

    (k, B), (P, Q) = x.shape[:2], g.shape[2:4]
    O, C, R, S = weight.shape[1:]
    N, narrow = B * P * Q, max(O, C) <= MAX_NARROW_CHANNELS
    most_o, most_c, block_n, warps, stages = NARROW_WEIGHT_TILE if narrow else WEIGHT_TILE
    block_o, block_c = choose_tile_size(O, 16, most_o), choose_tile_size(C, 16, most_c)
    tiles = -(-O // block_o) * -(-C // block_c)
    parts = max(1, min(-(-N // (8 * block_n)), WEIGHT_GRADIENT_PROGRAMS // (tiles * R * S)))
    span, long = -(-N // (parts * block_n)) * block_n, O * C * R * S + O * biased
    out = torch.empty(parts, k, long, dtype=torch.float32, device=x.device)
    constants = _list_constants(x, O, (P, Q), (R, S), geometry) | {"MODE": choose_product_mode(x)}
    blocks = {"BLOCK_O": block_o, "BLOCK_N": block_n, "BLOCK_C": block_c}
    options = {"num_warps": warps, "num_stages": stages}
    launch = (tiles, R * S + biased, parts * k)
    kernels.weight_gradient[launch](x, g, out, N, k, span, long, **constants, **blocks, **options)
    total = out.sum(0) if parts > 1 else out[0]
    gw = _turn(total, R * S, O * C, 1).reshape(weight.shape)
    return gw.to(weight.dtype), total[:, -O:] if biased else None


def _prefers_unfolded_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether a weight's gradient is a product of unfolded rows by cuBLAS.

    With few channels a sum over channels and taps at once fills the matrix units; with TF32 they
    read along what is summed over, here the pixels, for which the kernel would turn every tile.
    """
    wide = min(weight.shape[1:3]) > MAX_NARROW_CHANNELS
    return has_few_channels(weight) or (choose_product_mode(x) == "tf32" and wide)


def _convolve_unfolded_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvolutionGeometry
) -> Tensor:
    k, O, _, R, S = weight.shape
    size = geometry.compute_output_size((x.shape[2], x.shape[3]), (R, S))
    rows = _unfold_rows(x, size, (R, S), geometry)
    taps = weight.permute(0, 3, 4, 2, 1).reshape(k, -1, O)  # (k, R S C, O)
    y = torch.bmm(rows, taps) if bias is None else torch.baddbmm(bias[:, None], rows, taps)
    return y.reshape(k, x.shape[1], *size, O)


def _multiply_unfolded_rows(
    x: Tensor, g: Tensor, weight: Tensor, geometry: ConvolutionGeometry
) -> Tensor:
    """The gradient by weight (k, O, C, R, S)."""
    k, O, C, R, S = weight.shape
    seen = _unfold_rows(x, (g.shape[2], g.shape[3]), (R, S), geometry)
    parts = count_row_parts(seen.shape[1])  # of each lane, so that more programs share the rows
    products = torch.bmm(g.reshape(k * parts, -1, O).mT, seen.reshape(k * parts, -1, R * S * C))
    gw = products.reshape(k, parts, -1).sum(1)  # (k, O R S C)
    return gw.reshape(k, O, R, S, C).permute(0, 1, 4, 2, 3).contiguous()


def count_row_parts(rows: int) -> int:
    """In how many equal parts a sum over so many rows is made: cuBLAS does not split the sum of a
    small product, and one program a lane then reads all rows.
    """
    parts = 1
    while rows % (2 * parts) == 0 and rows // (2 * parts) >= MIN_PART_ROWS:
        parts *= 2
    return parts


def _unfold_rows(x: Tensor, size: Pair, kernel: Pair, geometry: ConvolutionGeometry) -> Tensor:
    """(k, B P Q, R S C): what each output pixel sees of x (k, B, H, W, C)."""
    (down, right), (top, left), (gap, side) = geometry
    x = F.pad(x, (0, 0, left, left, top, top)) if top or left else x
    k, B, _, _, C = x.shape
    a, b, c, d, e = x.stride()
    strides = (a, b, c * down, d * right, c * gap, d * side, e)
    return x.as_strided((k, B, *size, *kernel, C), strides).reshape(k, B * size[0] * size[1], -1)


def move_taps_first(weight: Tensor, back: bool = False) -> Tensor:
    """weight (k, O, C, R, S) as (k, R, S, O, C), or for the product back as (k, R, S, C, O)."""
    k, O, C, R, S = weight.shape
    if R * S == 1 and not back:
        return weight.reshape(k, 1, 1, O, C).contiguous()
    if not weight[0].is_contiguous():
        weight = weight.contiguous()
    if back:
        return _turn(weight, O, C, R * S).reshape(k, R, S, C, O)
    return _turn(weight, O * C, 1, R * S).reshape(k, R, S, O, C)


def _turn(x: Tensor, A: int, C: int, T: int) -> Tensor:
    """(k, T, C, A) of x (k, A, C, T), whose lanes may be longer and lie anywhere."""
    from flrce.training.gpu import triton_convolution as kernels

    out = torch.empty(len(x), T, C, A, dtype=x.dtype, device=x.device)
    block_j = choose_tile_size(C * T, 1, MAX_RUN_VALUES)
    block_a = choose_tile_size(A, 1, COPY_BLOCK_VALUES // block_j)
    tiles = -(-A // block_a) * -(-(C * T) // block_j)
    blocks = {"BLOCK_A": block_a, "BLOCK_J": block_j, "num_warps": 4}
    kernels.transpose_taps[(len(x) * tiles,)](x, out, x.stride(0), A, C, T, **blocks)
    return out
