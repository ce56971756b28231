"""Register-blocked inner loops as C text: sums live in named variables, which compilers keep in
registers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from flrce.core.c_compiler import Processor


@dataclass(frozen=True)
class Block:
    """`count` neighbouring blocks of `size` things, the first at `start`."""

    start: int
    size: int
    count: int


def split_blocks(n: int, most: int) -> list[Block]:
    """n things in the fewest, nearly equal blocks of at most `most`, equal neighbours together."""
    parts = -(-n // most)
    sizes = [n // parts + (i < n % parts) for i in range(parts)]
    blocks, start = [], 0
    for size, run in groupby(sizes):
        count = len(list(run))
        blocks.append(Block(start, size, count))
        start += size * count
    return blocks


def choose_block_size(rows: int, cols: int, machine: Processor) -> tuple[int, int]:
    """The most rows and columns of one block of sums, by counting cycles: 2 products or 2 loads
    each, 4 deep.
    """

    def cycles(r: int, c: int) -> float:
        return sum(
            max(a.size * b.size / 2, (a.size + b.size) / 2, 4) * a.count * b.count
            for a in split_blocks(rows, r)
            for b in split_blocks(cols, c)
        )

    fits = [
        (r, c)
        for r in range(1, min(rows, machine.registers) + 1)
        for c in range(1, min(cols, machine.registers) + 1)
        if r * c + min(r, c) + 1 < machine.registers
    ]
    return min(
        fits, key=lambda f: (cycles(*f) + 0.05 * rows * cols * (f[0] + f[1]) / (f[0] * f[1]), f)
    )


def write_loops(blocks: Iterable[Block], variable: str, body: str) -> Iterator[str]:
    """C loops over blocks; `body` may use the variable (where a block starts) and {size}."""
    for b in blocks:
        end = b.start + b.size * b.count
        text = body.replace("{size}", str(b.size))
        yield f"for (int {variable} = {b.start}; {variable} < {end}; {variable} += {b.size}) {text}"


def _outer(sums: str, row: str, rows: list[str], col: str, cols: list[str]) -> str:
    """sums[r][c] += rows[r] * cols[c], the shorter side held in variables."""
    held, passing = (cols, rows) if len(cols) <= len(rows) else (rows, cols)
    name, other = (col, row) if len(cols) <= len(rows) else (row, col)
    lines = [
        "vec " + ", ".join(f"{name}_{i} = {value}" for i, value in enumerate(held)) + f", {other}_;"
    ]
    for j, value in enumerate(passing):
        at = [(j, i) if held is cols else (i, j) for i in range(len(held))]
        adds = " ".join(f"{sums}{r}_{c} += {other}_ * {name}_{i};" for i, (r, c) in enumerate(at))
        lines += [f"{other}_ = {value}; {adds}"]
    return "\n".join(lines)


@dataclass(frozen=True)
class Product:
    """y[r][c] = start[r] + sum over depth and taps of w[r] x[c]: convolutions and matrix products,
    forward and back.

    Distances are in vectors for x and y, in floats for w. A tap is (offset in x, offset in w).
    """

    name: str
    rows: int
    cols: int
    depth: int
    x_depth: int
    w_depth: int
    taps: tuple[tuple[int, int], ...]
    w_row: int
    x_col: int
    y_row: int
    y_col: int
    starts: bool = False  # whether sums begin with start[r] rather than 0
    sums: bool = False  # whether to add up y and its square per row
    adds: bool = False  # whether sums begin with y

    def text(self) -> str:
        R, C = range(self.rows), range(self.cols)
        start = ", const float *restrict start" if self.starts else ""
        sums = ", vec *sum, vec *square" if self.sums else ""
        first = "fill(start[{}])" if self.starts else "{{0}}"
        if self.adds:
            first = f"y[{{}} * {self.y_row} + {{}} * {self.y_col}]"
        lines = [
            f"KERNEL void {self.name}(const vec *restrict x, const float *restrict w, vec *restrict"
            f" y{start}{sums}) {{",
            *(f"vec {', '.join(f'a{r}_{c} = {first.format(r, c)}' for c in C)};" for r in R),
            f"for (int i = 0; i < {self.depth}; i++, x += {self.x_depth}, w += {self.w_depth}) {{",
        ]
        for at, weight in self.taps:
            xs = [f"x[{at + c * self.x_col}]" for c in C]
            ws = [f"fill(w[{weight + r * self.w_row}])" for r in R]
            lines += ["{ " + _outer("a", "w", ws, "x", xs), "}"]
        lines.append("}")
        for r in R:
            row = (f"y[{r * self.y_row + c * self.y_col}] = a{r}_{c};" for c in C)
            lines.append(" ".join(row))
        if self.sums:
            squares = "square[{0}] += " + " + ".join(f"a{{0}}_{c} * a{{0}}_{c}" for c in C) + ";"
            lines.append("if (sum) {")
            lines += [f"sum[{r}] += {' + '.join(f'a{r}_{c}' for c in C)};" for r in R]
            lines += [*(squares.format(r) for r in R), "}"]
        return "\n".join([*lines, "}"])


@dataclass(frozen=True)
class Correlation:
    """g[r][t] += sum over rows and columns of dy[r] x[tap t]: a convolution's weight gradient, one
    sum per lane.
    """

    name: str
    rows: int
    taps: tuple[int, ...]
    width: int  # columns
    dy_row: int
    dy_pitch: int
    x_col: int
    x_pitch: int
    g_row: int

    def text(self) -> str:
        R, T = range(self.rows), range(len(self.taps))
        gradients = [f"dy[i + {r * self.dy_row}]" for r in R]
        lines = [
            f"KERNEL void {self.name}(const vec *restrict x, const vec *restrict dy, vec *restrict"
            " g, int rows) {",
            *(f"vec {', '.join(f'a{r}_{t} = g[{r * self.g_row + t}]' for t in T)};" for r in R),
            f"for (int h = 0; h < rows; h++, x += {self.x_pitch}, dy += {self.dy_pitch})",
            f"for (int i = 0; i < {self.width}; i++) {{ const vec *p = x + i * {self.x_col};",
            _outer("a", "d", gradients, "x", [f"p[{t}]" for t in self.taps]),
            "}",
            *(" ".join(f"g[{r * self.g_row + t}] = a{r}_{t};" for t in T) for r in R),
        ]
        return "\n".join([*lines, "}"])


@dataclass(frozen=True)
class Outer:
    """A linear layer's weight gradient and SGD step: rows of w, `cols` vectors of inputs, summed
    over the samples.
    """

    name: str
    rows: int
    cols: int
    lanes: int
    w_row: int
    outputs: int

    def text(self) -> str:
        R, C, L = range(self.rows), range(self.cols), self.lanes
        place = {(r, c): r * self.w_row + c * L for r in R for c in C}
        inputs = [f"x[{c}]" for c in C]
        lines = [
            f"KERNEL void {self.name}(const vec *restrict x, const float *restrict dy, float"
            " *restrict w, const float *restrict origin, long size, float lr, float pull) {",
            *(f"vec {', '.join(f'a{r}_{c} = {{0}}' for c in C)};" for r in R),
            f"for (long n = 0; n < size; n += {L}, dy += {self.outputs * L}) {{",
            f"long end = size - n < {L} ? size - n : {L};",
            f"for (long i = 0; i < end; i++, x += {self.cols}) {{",
            _outer("a", "d", [f"fill(dy[i + {r * L}])" for r in R], "x", inputs),
            "} }",
            "if (pull != 0) {",
        ]
        lines += [
            f"a{r}_{c} += pull * (*(vec *)(w + {at}) - *(const vec *)(origin + {at}));"
            for (r, c), at in place.items()
        ]
        lines.append("}")
        for r in R:
            row = (f"*(vec *)(w + {place[r, c]}) -= lr * a{r}_{c};" for c in C)
            lines.append(" ".join(row))
        return "\n".join([*lines, "}"])
