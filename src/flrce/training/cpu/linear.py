"""C text of a linear layer's products: tiles of the batch take the place of a convolution's
columns.
"""

from flrce.core.c_compiler import Processor
from flrce.training.cpu.blocks import Outer, Product, split_blocks, write_loops
from flrce.training.cpu.frames import Place
from flrce.training.cpu.plan import Stage


def _rows(n: int, tiles: int, machine: Processor) -> int:
    """Sums per block: all registers but those for the inputs and one weight."""
    return max(1, (machine.registers - 4) // tiles - (0 if tiles > 1 else 4))


def write_product(
    name: str,
    call: str,
    outputs: int,
    depth: int,
    w_row: int,
    w_depth: int,
    machine: Processor,
    adds: bool = False,
) -> str:
    """y[tile][output] = start + sum of w x[tile][input], two tiles at a time and one at the end."""
    unroll = next(u for u in (4, 3, 2, 1) if depth % u == 0)
    taps = tuple((i, i * w_depth) for i in range(unroll))
    forward = call == "forward"
    kernels: dict[str, str] = {}
    loops = []
    for tiles, loop in ((2, "for (; t + 2 <= tiles; t += 2)"), (1, "for (; t < tiles; t++)")):
        blocks = split_blocks(outputs, _rows(outputs, tiles, machine))
        for size in {b.size for b in blocks}:
            kernel, depths = f"{name}_{size}x{tiles}", (depth // unroll, unroll, unroll * w_depth)
            strides = (w_row, depth, 1, outputs)
            kernels[kernel] = Product(
                kernel, size, tiles, *depths, taps, *strides, starts=forward, adds=adds
            ).text()
        start = ", start + c" if forward else ""
        text = (
            f"{name}_{{size}}x{tiles}(x + t * {depth}, w + c * {w_row}, y + t * {outputs} +"
            f" c{start});"
        )
        loops += [f"{loop} {{", *write_loops(blocks, "c", text), "}"]
    start = ", const float *start" if forward else ""
    head = f"\nstatic void {name}(const vec *x, const float *w{start}, vec *y, long tiles) {{\n"
    return "\n".join(kernels.values()) + head + "long t = 0;\n" + "\n".join(loops) + "\n}\n"


def write_forward(stage: Stage, s: int, machine: Processor, place: Place) -> str:
    """product_s: y of all tiles."""
    return write_product(
        f"product_{s}", "forward", stage.middle[0], place.cols, place.pitch, 1, machine
    )


def write_input_gradient(stage: Stage, s: int, machine: Processor, place: Place, adds: bool) -> str:
    """dx_s: the inputs' gradient of all tiles; `adds`: to what is there."""
    return write_product(
        f"dx_{s}", "backward", place.cols, stage.middle[0], 1, place.pitch, machine, adds
    )


def write_weight_gradient(stage: Stage, s: int, machine: Processor, place: Place) -> str:
    """dw_s: the weights' gradient and SGD step. Inputs are turned to [strip of two vectors][sample]
    once, so that the products run along a row of w and the step is taken while the sums are in
    registers.
    """
    lanes, outputs = machine.lanes, stage.middle[0]
    strips = -(-place.cols // (2 * lanes))
    blocks = split_blocks(outputs, _rows(outputs, 2, machine))
    kernels = [
        Outer(f"outer{s}_{b}", b, 2, lanes, place.pitch, outputs).text()
        for b in {b.size for b in blocks}
    ]
    call = (
        f"outer{s}_{{size}}(strip, dy + c * {lanes}, w + c * {place.pitch} + s * {2 * lanes}, "
        f"origin + c * {place.pitch} + s * {2 * lanes}, size, lr, pull);"
    )
    return (
        "\n".join(kernels)
        + f"""
static void dw_{s}(const vec *x, const float *dy, float *w, const float *origin, vec *strip, long size, float lr,
                 float pull) {{
    for (int s = 0; s < {strips}; s++) {{
        for (long t = 0; t * LANES < size; t++)
            for (int half = 0; half < 2; half++) {{
                int at = (2 * s + half) * LANES;
                turn(x + t * {place.cols} + at, {place.cols} - at, strip + t * LANES * 2 + half, 2);
            }}
        {" ".join(write_loops(blocks, "c", call))}
    }}
}}
"""
    )
