"""C text of a convolution's three products: forward, gradient of the input, gradient of the
weights.
"""

from itertools import product
from math import prod

from flrce.core.c_compiler import Processor
from flrce.training.cpu.blocks import (
    Correlation,
    Product,
    choose_block_size,
    split_blocks,
    write_loops,
)
from flrce.training.cpu.frames import Frame, get_axes
from flrce.training.cpu.plan import Stage


def gradient_frame(stage: Stage) -> Frame:
    """The output's gradient of one tile, padded so that the input's gradient needs no bounds."""
    (top, bottom), (left, right) = (axis.reach for axis in get_axes(stage))
    C, H, W = stage.middle
    return Frame(C, top + H + bottom, left + W + right, top, left)


def row_group(stage: Stage) -> int:
    """Rows of gradient to make and use at once: whole pooling windows, enough columns to pay for
    loading the sums.

    Many weights' sums come from beyond the second-level cache, so that they pay for more columns.
    """
    step, rows = stage.pool[0], stage.pool[0]
    columns = 24 if stage.middle[0] * stage.inside[0] * prod(stage.kernel) <= 8192 else 128
    while rows * stage.middle[2] < columns and rows < stage.middle[1]:
        rows += step
    return min(rows, stage.middle[1])


def _join_function(kernels: dict[str, str], name: str, arguments: str, body: list[str]) -> str:
    """The kernels, and the function that calls them."""
    head = f"\nstatic void {name}({arguments}) {{\n"
    return "\n".join(kernels.values()) + head + "\n".join(body) + "\n}\n"


def write_forward(stage: Stage, s: int, machine: Processor, frame: Frame) -> str:
    """product_s: y of one tile of this frame, with the sums BatchNorm needs."""
    h, w = get_axes(stage)
    C, H, W = stage.middle
    taps = tuple(
        (i * frame.pitch + j, i * w.kernel + j) for i in range(h.kernel) for j in range(w.kernel)
    )
    K, width = prod(stage.kernel), max(1, w.dead - w.live)
    weights, norm = stage.inside[0] * K, stage.norm is not None
    rows, cols = choose_block_size(C, width, machine)
    kernels: dict[str, str] = {}
    loops: list[str] = []
    base = f"x + (h * {h.stride} + {h.before - h.padding}) * {frame.pitch} + {w.position(w.live)}"
    sums = ", sum ? sum + c : 0, square + c" if norm else ""
    for r, c in product(split_blocks(C, rows), split_blocks(width, cols)):
        name = f"conv{s}_{r.size}x{c.size}"
        depths = (stage.inside[0], frame.plane, K)
        strides = (weights, w.stride, H * W, 1)
        kernel = Product(name, r.size, c.size, *depths, taps, *strides, starts=True, sums=norm)
        kernels[name] = kernel.text()
        out = f"y + (c * {H} + h) * {W} + {w.live} + o"
        call = f"{name}({base} + o * {w.stride}, w + c * {weights}, {out}, start + c{sums});"
        loops += write_loops([r], "c", " ".join(write_loops([c], "o", call)))
    dead = ""  # outputs that see padding only
    if (h.live, h.dead, w.live, w.dead) != (0, H, 0, W):
        dead = (
            f"for (int c = 0; c < {C}; c++) for (int h = 0; h < {H}; h++) for (int o = 0; o < {W};"
            f" o++)\nif (h < {h.live} || h >= {h.dead} || o < {w.live} || o >= {w.dead})\ny[(c *"
            f" {H} + h) * {W} + o] = fill(start[c]);\n"
        )
    arguments = "const vec *x, const float *w, const float *start, vec *y, vec *sum, vec *square"
    loop = f"{dead}for (int h = {h.live}; h < {h.dead}; h++) {{"
    body = "\n".join(loops) if w.dead > w.live else ""
    return _join_function(kernels, f"product_{s}", arguments, [loop, body, "}"])


def write_input_gradient(stage: Stage, s: int, machine: Processor, adds: bool) -> str:
    """dx_s: one tile's input gradient, gathered phase by phase where the stride skips; `adds`: to
    what is there.
    """
    h, w = get_axes(stage)
    kernels: dict[str, str] = {}
    loops: list[str] = []
    for p, q in product(range(min(h.stride, h.size)), range(min(w.stride, w.size))):
        loops += _write_phase(stage, s, machine, (p, q), adds, kernels)
    return _join_function(kernels, f"dx_{s}", "const vec *dy, const float *w, vec *dx", loops)


def _write_phase(
    stage: Stage,
    s: int,
    machine: Processor,
    phase: tuple[int, int],
    adds: bool,
    kernels: dict[str, str],
) -> list[str]:
    """The loops over the inputs of one phase of the stride; their kernels are added."""
    (h, w), (p, q) = get_axes(stage), phase
    C, frame, K = stage.inside[0], gradient_frame(stage), prod(stage.kernel)
    taps = tuple(
        ((h.gather(p, i) + frame.top) * frame.pitch + w.gather(q, j) + frame.left, i * w.kernel + j)
        for i in h.taps(p)
        for j in w.taps(q)
    )
    if adds and not taps:
        return []
    rows, cols = -(-(h.size - p) // h.stride), -(-(w.size - q) // w.stride)
    most = choose_block_size(C, cols, machine)
    loops = [f"for (int h = 0; h < {rows}; h++) {{"]
    for r, c in product(split_blocks(C, most[0]), split_blocks(cols, most[1])):
        name = f"back{s}_{p}_{q}_{r.size}x{c.size}"
        depths = (stage.middle[0], frame.plane, C * K)
        strides = (K, 1, h.size * w.size, w.stride)
        kernels[name] = Product(name, r.size, c.size, *depths, taps, *strides, adds=adds).text()
        call = (
            f"{name}(dy + h * {frame.pitch} + o, w + c * {K}, dx + (c * {h.size} + h *"
            f" {h.stride} + {p}) * {w.size} + o * {w.stride} + {q});"
        )
        loops += write_loops([r], "c", " ".join(write_loops([c], "o", call)))
    return [*loops, "}"]


def write_weight_gradient(stage: Stage, s: int, machine: Processor, frame: Frame, dy: Frame) -> str:
    """dw_s: adds output rows [from, to) of one tile to the weights' gradient; dy points at row
    `from`; `frame`: x's.
    """
    h, w = get_axes(stage)
    C, K, inputs = stage.middle[0], prod(stage.kernel), stage.inside[0]
    # of a 1 x 1 kernel, several inputs are taken together: their gradients lie side by side, as
    # other kernels' taps do
    group = next(n for n in range(min(8, inputs), 0, -1) if inputs % n == 0) if K == 1 else 1
    taps = [
        c * frame.plane + i * frame.pitch + j
        for c, i, j in product(range(group), range(h.kernel), range(w.kernel))
    ]
    rows, cols = choose_block_size(C, len(taps), machine)
    kernels: dict[str, str] = {}
    loops: list[str] = []
    for r, t in product(split_blocks(C, rows), split_blocks(len(taps), cols)):
        for at in range(t.start, t.start + t.size * t.count, t.size):
            name, some = f"correlate{s}_{r.size}_{at}", tuple(taps[at : at + t.size])
            strides = (dy.plane, dy.pitch, w.stride, h.stride * frame.pitch, inputs * K)
            kernels[name] = Correlation(name, r.size, some, w.dead - w.live, *strides).text()
            sums = f"g + (c * {inputs} + i) * {K} + {at}"
            call = f"{name}(x + i * {frame.plane}, dy + c * {dy.plane}, {sums}, to - from);"
            more = f"i += {group}" if group > 1 else "i++"
            loops += write_loops([r], "c", f"for (int i = 0; i < {inputs}; {more}) {call}")
    start = [
        f"if (from < {h.live}) {{ dy += ({h.live} - from) * {dy.pitch}; from = {h.live}; }}",
        f"if (to > {h.dead}) to = {h.dead};",
        f"x += (from * {h.stride} + {h.before - h.padding}) * {frame.pitch} +"
        f" {w.position(w.live)}; dy += {w.live};",
    ]
    arguments = "const vec *x, const vec *dy, vec *g, int from, int to"
    return _join_function(kernels, f"dw_{s}", arguments, [*start, *loops])
