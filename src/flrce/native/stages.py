"""C text of one stage: forward_s and backward_s, which call the products and the shared shaping around them."""

from dataclasses import dataclass

from flrce.native import convolution, linear
from flrce.native.blocks import Machine
from flrce.native.frames import Frame, Place, axes, entry
from flrce.native.plan import Stage


@dataclass(frozen=True)
class Setting:
    """A stage's surroundings: its number, the frame it writes to, and the tensors by name."""

    s: int
    stage: Stage
    target: Frame  # of the next stage's input; tight at the end
    places: dict[str, Place]
    machine: Machine
    deeper: bool  # whether any stage before it learns

    def at(self, name: str, base: str = "n->p") -> str:
        return f"({base} + {self.places[name].inner})" if name else "0"

    def pull(self, name: str) -> str:
        return f"step->pull[{list(self.places).index(name)}]"

    @property
    def dy(self) -> Frame:
        """Where a convolution's output gradient goes: a whole tile, or only the rows in use if no stage below needs it."""
        if self.deeper:
            return convolution.gradient_frame(self.stage)
        return Frame(self.stage.middle[0], convolution.row_group(self.stage), self.stage.middle[2])

    @property
    def middle(self) -> int:
        C, H, W = self.stage.middle
        return C * H * W

    @property
    def out(self) -> int:
        C, H, W = self.stage.out
        return C * H * W

    @property
    def pooled(self) -> bool:
        return self.stage.pool != (1, 1)


def text(it: Setting) -> str:
    """Everything of one stage."""
    stage, s = it.stage, it.s
    if stage.op == "pool":
        return _pool(it)
    parts = []
    if stage.op == "conv":
        parts = [convolution.forward(stage, s, it.machine), convolution.weights(stage, s, it.machine, it.dy)]
        parts += [convolution.backward(stage, s, it.machine)] if it.deeper else []
    if stage.op == "linear":
        place = it.places[stage.weight]
        parts = [linear.forward(stage, s, it.machine, place), linear.weights(stage, s, it.machine, place)]
        parts += [linear.backward(stage, s, it.machine, place)] if it.deeper else []
    return "\n".join([*parts, _shape(it), _forward(it), _backward(it)])


def _pool(it: Setting) -> str:
    stage, s = it.stage, it.s
    sizes = ", ".join(map(str, (*stage.inside, *stage.kernel, *stage.stride, *stage.padding, *stage.out[1:])))
    size = entry(stage).size
    load = f"load_tile(b, t, n->in{s} + t * {size}, place, {size});" if s == 0 else ""
    back = (
        f"pool_back(n->in{s} + t * {size}, n->d{s} + t * {it.out}, n->d{s - 1} + t * {size}, {sizes});"
        if it.deeper
        else ""
    )
    return f"""
static void forward_{s}(struct net *n, const struct batch *b, int train) {{
    for (long t = 0; t < b->tiles; t++) {{
        {load}
        pool_forward(n->in{s} + t * {size}, {_target(it)}, {sizes}, {_extent(it)[0]}, {_extent(it)[1]});
    }}
}}
static void backward_{s}(struct net *n, const struct batch *b, const struct step *step, int deeper) {{
    for (long t = 0; t < b->tiles; t++) {{ {back} }}
}}
"""


def _target(it: Setting) -> str:
    return f"n->in{it.s + 1} + t * {it.target.size} + {it.target.origin}"


def _shape(it: Setting) -> str:
    """shape_s: BatchNorm, activation, pooling of tile t into the next stage's input."""
    stage = it.stage
    sizes = ", ".join(map(str, (*stage.middle, *stage.pool, *_extent(it))))
    best = f"n->best{it.s} + (train ? t : 0) * {it.out}" if it.pooled else "0"
    return f"""
KERNEL void shape_{it.s}(struct net *n, const vec *y, long t, int train) {{
    shape_forward(n->c{it.s}, y, {best}, {_target(it)}, {int(stage.norm is not None)}, {stage.act}, {sizes});
}}
"""


def _extent(it: Setting) -> tuple[int, int]:
    """How far apart channels and rows lie in the target: as in y's own planes where the next stage flattens."""
    _, H, W = it.stage.out
    return (it.target.plane, it.target.pitch) if it.target.channels == it.stage.out[0] else (H * W, W)


def _forward(it: Setting) -> str:
    stage, s, (C, H, W) = it.stage, it.s, it.stage.middle
    norm, size = stage.norm, entry(stage).size
    count = f"(double)b->size * {H * W}"
    frozen = start = moments = ""
    bias = it.at(stage.bias)
    if norm:
        tensors = ", ".join(it.at(name) for name in (norm.gamma, norm.beta, norm.mean, norm.var))
        frozen = f"if (!train) norm_frozen(c, {C}, {tensors}, {norm.eps}f);"
        fused = stage.op == "conv"
        offset = "c->level" if fused else "0"
        measured = _moments(it, count) if fused else f"norm_measure(c, b, n->{_y(it)}, {C}, {H * W});"
        moved = f"for (int i = 0; i < {C}; i++) c->start[i] -= c->mean[i];" if fused else ""
        moments = f"""if (train) {{
        {measured}
        norm_apply(c, {C}, {count}, {tensors}, {offset}, {norm.eps}f, {norm.momentum}f);
        {moved}
    }}"""
    if stage.op in ("conv", "linear"):
        own = "if (!train) " if norm and stage.op == "conv" else ""  # else sums start around the last mean
        start = f"{own}for (int i = 0; i < {C}; i++) c->start[i] = {bias + '[i]' if stage.bias else '0'};"
    return f"""
static void forward_{s}(struct net *n, const struct batch *b, int train) {{
    struct channel *c = n->c{s};
    {frozen}
    {start}
    {_conv_tiles(it) if stage.op == "conv" else _all_tiles(it, size)}
    {moments}
    {_shape_tiles(it)}
}}
"""


def _shape_tiles(it: Setting) -> str:
    """Shaping after the whole batch is known; a convolution without batch statistics has shaped each tile already."""
    if it.stage.op == "conv" and not it.stage.norm:
        return ""
    when = "if (train) " if it.stage.op == "conv" else ""
    return f"{when}for (long t = 0; t < b->tiles; t++) shape_{it.s}(n, n->{_y(it)} + t * {it.middle}, t, train);"


def _y(it: Setting) -> str:
    return f"in{it.s}" if it.stage.op == "none" else f"y{it.s}"


def _conv_tiles(it: Setting) -> str:
    """The convolution tile by tile; what needs no batch statistics is shaped at once, and y then kept only to train."""
    stage, s, size = it.stage, it.s, entry(it.stage).size
    load = f"load_tile(b, t, x, place, {stage.inside[0] * stage.inside[1] * stage.inside[2]});" if s == 0 else ""
    slot = "train ? t : 0" if s == 0 else "t"
    after = f"shape_{s}(n, y, t, train);"
    if stage.norm:
        after = f"if (train) norm_collect(c, {stage.middle[0]}, filled(b, t)); else {after}"
    clear = (
        "memset(c->first, 0, sizeof c->first + sizeof c->second); memset(c->sum, 0, sizeof c->sum + sizeof c->square);"
    )
    return f"""{clear if stage.norm else ""}
    for (long t = 0; t < b->tiles; t++) {{
        vec *x = n->in{s} + ({slot}) * {size}, *y = n->y{s} + (train ? t : 0) * {it.middle};
        {load}
        product_{s}(x, {it.at(stage.weight)}, c->start, y, train ? c->sum : 0, c->square);
        {after}
    }}"""


def _all_tiles(it: Setting, size: int) -> str:
    stage, s = it.stage, it.s
    load = f"for (long t = 0; t < b->tiles; t++) load_tile(b, t, n->in0 + t * {size}, place, {size});" if s == 0 else ""
    product = (
        f"product_{s}(n->in{s}, {it.at(stage.weight)}, c->start, n->y{s}, b->tiles);" if stage.op == "linear" else ""
    )
    return f"{load}\n{product}"


def _moments(it: Setting, count: str) -> str:
    C, H, W = it.stage.middle
    h, w = axes(it.stage)
    dead = H * W - (h.dead - h.live) * (w.dead - w.live)
    bias = f"{it.at(it.stage.bias)}[i]" if it.stage.bias else "0"
    return f"""for (int i = 0; i < {C}; i++) c->level[i] = {bias} - c->start[i]; /* the true mean minus y's */
        norm_moments(c, {C}, {count}, (double)b->size * {dead});"""


def _backward(it: Setting) -> str:
    stage, s, (C, H, W) = it.stage, it.s, it.stage.middle
    norm = int(stage.norm is not None)
    pooled = f"n->best{s}" if it.pooled else f"n->{_y(it)}"
    summed = int(bool(norm or stage.bias))
    need = norm or stage.bias or stage.act != "PLAIN"
    sums = (
        f"for (long t = 0; t < b->tiles; t++) shape_sums(c, {pooled} + t * {it.out}, n->d{s} + t * {it.out}, "
        f"{norm}, {stage.act}, {summed}, {C}, {it.out // C});"
    )
    body = {"conv": _conv_back, "linear": _linear_back, "none": _none_back}[stage.op](it)
    return f"""
static void backward_{s}(struct net *n, const struct batch *b, const struct step *step, int deeper) {{
    struct channel *c = n->c{s};
    memset(c->first, 0, sizeof c->first + sizeof c->second);
    {sums if need else ""}
    {f"norm_slopes(c, {C}, (double)b->size * {H * W});" if norm else ""}
    {body}
    {_channel_steps(it)}
}}
"""


def _channel_steps(it: Setting) -> str:
    """SGD on gamma, beta or the bias. A bias in front of BatchNorm has no gradient: the mean takes it away."""
    stage, C = it.stage, it.stage.middle[0]
    pairs = [(stage.bias, "level", "first")]
    if stage.norm:
        pairs = [(stage.norm.beta, "level", "first"), (stage.norm.gamma, "slope", "second")]
    lines = [
        f"for (int i = 0; i < {C}; i++) c->{to}[i] = c->{source}[i];\n    "
        f"descend({it.at(name)}, {it.at(name, 'n->origin')}, c->{to}, {C}, step->lr, {it.pull(name)});"
        for name, to, source in pairs
        if name
    ]
    return "\n    ".join(lines)


def _back(it: Setting, dy: str, first: str, last: str, frame: Frame) -> str:
    sizes = ", ".join(map(str, (*it.stage.middle, *it.stage.pool)))
    best = f"n->best{it.s} + t * {it.out}" if it.pooled else "0"
    return (
        f"shape_back(c, filled(b, t), n->{_y(it)} + t * {it.middle}, {best}, n->d{it.s} + t * {it.out}, {dy}, "
        f"{int(it.stage.norm is not None)}, {sizes}, {first}, {last}, {frame.plane}, {frame.pitch});"
    )


def _conv_back(it: Setting) -> str:
    stage, s, H, dy = it.stage, it.s, it.stage.middle[1], it.dy
    rows, weight = convolution.row_group(stage), it.places[stage.weight]
    into = f"n->dy{s} + {dy.origin} + h * {dy.pitch}" if it.deeper else f"n->dy{s}"
    dx = f"if (deeper) dx_{s}(n->dy{s}, {it.at(stage.weight)}, n->d{s - 1} + t * {_inside(it)});" if it.deeper else ""
    return f"""memset(n->g{s}, 0, sizeof(vec) * {weight.pitch});
    for (long t = 0; t < b->tiles; t++) {{
        for (int h = 0; h < {H}; h += {rows}) {{
            int end = h + {rows} < {H} ? h + {rows} : {H};
            {_back(it, into, "h", "end", dy)}
            dw_{s}(n->in{s} + t * {entry(stage).size}, {into}, n->g{s}, h, end);
        }}
        {dx}
    }}
    descend_lanes({it.at(stage.weight)}, {it.at(stage.weight, "n->origin")}, n->g{s}, {weight.cols}, step->lr, {it.pull(stage.weight)});"""


def _linear_back(it: Setting) -> str:
    stage, s, C = it.stage, it.s, it.stage.middle[0]
    weight = it.at(stage.weight)
    dy = f"n->d{s}"
    normed = (
        f"for (long t = 0; t < b->tiles; t++) {_back(it, f'{dy} + t * {C}', '0', '1', Frame(C, 1, 1))}"
        if stage.norm
        else ""
    )
    dx = f"if (deeper) dx_{s}({dy}, {weight}, n->d{s - 1}, b->tiles);" if it.deeper else ""
    return f"""{normed}
    {dx}
    dw_{s}(n->in{s}, (const float *){dy}, {weight}, {it.at(stage.weight, "n->origin")}, n->strip, b->size, step->lr, {it.pull(stage.weight)});"""


def _none_back(it: Setting) -> str:
    if not it.deeper:
        return ""
    _, H, W = it.stage.middle
    return f"if (deeper) for (long t = 0; t < b->tiles; t++) {_back(it, f'n->d{it.s - 1} + t * {it.middle}', '0', str(H), Frame(0, H, W))}"


def _inside(it: Setting) -> int:
    C, H, W = it.stage.inside
    return C * H * W
