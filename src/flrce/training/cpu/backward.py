"""C text of backward_s: from the gradient of a stage's output to its tensors' SGD steps and its
input's gradient.
"""

from flrce.training.cpu import convolution
from flrce.training.cpu.frames import Frame
from flrce.training.cpu.setting import Setting


def write_stage(it: Setting) -> str:
    """backward_s(n, b, step, deeper): the input's gradient only if deeper."""
    alone = {
        "pool": _write_pool,
        "average": _write_average,
        "group": _write_group,
        "sum": _write_sum,
    }
    body = alone[it.stage.op](it) if it.stage.op in alone else _write_product_stage(it)
    return f"""
static void backward_{it.s}(struct net *n, const struct batch *b, const struct step *step, int deeper) {{
    {body}
}}
"""


def _write_tiles(body: str) -> str:
    return f"for (long t = 0; t < b->tiles; t++) {body}"


def _add_gradient(it: Setting, call: str) -> str:
    """The call, with INTO the input's gradient; made aside and then added where another's is there
    already.
    """
    if not it.needs_scratch:
        return call.replace("INTO", it.input_gradient_tile)
    return f"{{ {call.replace('INTO', 'n->aside')} more({it.input_gradient_tile}, n->aside, {it.inside_size}); }}"


def _write_sum(it: Setting) -> str:
    """The gradient goes to both sources alike."""
    if not it.has_input_gradient:
        return ""
    ways = [
        f"(n->d{flow.source} + t * {it.inside_size}), {int(flow.adds)}" if flow.learns else "0, 0"
        for flow in it.flows
    ]
    sources = ", ".join([*ways, "0, 0"][:2])
    sizes = ", ".join(map(str, (it.stage.act, *it.stage.inside, *it.target_strides)))
    return _write_tiles(f"sum_back({it.output_tile}, {it.gradient_tile}, {sources}, {sizes});")


def _write_window(it: Setting, call: str, *sizes: int) -> str:
    """Pooling or averages that are a stage of their own."""
    if not it.has_input_gradient:
        return ""
    return _write_tiles(_add_gradient(it, f"{call}, INTO, {', '.join(map(str, sizes))});"))


def _write_pool(it: Setting) -> str:
    stage, call = it.stage, f"pool_back({it.input_tile}, {it.gradient_tile}"
    windows = (*stage.kernel, *stage.stride, *stage.padding)
    return _write_window(it, call, *stage.inside, *windows, *stage.out[1:])


def _write_average(it: Setting) -> str:
    stage, call = it.stage, f"average_back({it.gradient_tile}"
    return _write_window(it, call, *stage.inside, *stage.kernel, *stage.stride, *stage.out[1:])


def _write_group(it: Setting) -> str:
    stage, group, below = it.stage, it.group, "deeper ? INTO : 0" if it.has_input_gradient else "0"
    sizes = ", ".join(map(str, (group.groups, *stage.inside)))
    tensors = f"{it.address(group.gamma)}, {it.address(group.beta)}"
    steps = _write_descents(it, [(group.beta, "level", "first"), (group.gamma, "slope", "second")])
    call = (
        f"group_back(c, {it.input_tile}, {it.gradient_tile}, {below}, {it.moments}, {tensors},"
        f" {stage.act}, {sizes});"
    )
    begin = "memset(c->first, 0, sizeof c->first + sizeof c->second);"
    tiles = _write_tiles(_add_gradient(it, call))
    return "\n    ".join([f"struct channel *c = n->c{it.s};", begin, tiles, *steps])


def _write_product_stage(it: Setting) -> str:
    stage, (C, H, W) = it.stage, it.stage.middle
    parts = [
        f"struct channel *c = n->c{it.s};",
        "memset(c->first, 0, sizeof c->first + sizeof c->second);",
    ]
    if it.has_norm or stage.bias or stage.act != "PLAIN":
        pooled = f"n->best{it.s}" if it.has_pool else it.product
        sizes = f"{it.has_norm}, {stage.act}, {int(bool(it.has_norm or stage.bias))}, {C}, {it.out_size // C}"
        parts += [
            f"for (long t = b->tiles - 1; t >= 0; t--) shape_sums(c, {pooled} + t * {it.out_size},"
            f" {it.gradient_tile}, {sizes});"
        ]
    if it.has_norm:
        parts += [f"norm_slopes(c, {C}, (double)b->size * {H * W});"]
    parts += {"conv": _write_conv, "linear": _write_linear, "none": _write_none}[stage.op](it)
    return "\n    ".join([*parts, *_write_channel_steps(it)])


def _write_channel_steps(it: Setting) -> list[str]:
    """SGD on gamma, beta or the bias. A bias in front of BatchNorm has no gradient: the mean takes
    it away.
    """
    stage = it.stage
    pairs = [(stage.bias, "level", "first")]
    if stage.norm:
        pairs = [(stage.norm.beta, "level", "first"), (stage.norm.gamma, "slope", "second")]
    return _write_descents(it, pairs)


def _write_descents(it: Setting, pairs: list[tuple[str, str, str]]) -> list[str]:
    """SGD on a number per channel: the tensor, its gradient as floats, and as the sums it comes
    from.
    """
    C = it.stage.middle[0]
    return [
        f"for (int i = 0; i < {C}; i++) c->{to}[i] = c->{source}[i];\n   "
        f" descend({it.address(name, 'n->q')}, {it.address(name, 'n->origin')}, c->{to}, {C}, step->lr,"
        f" {it.pull(name)});"
        for name, to, source in pairs
        if name
    ]


def _write_shape_back(it: Setting, dy: str, rows: tuple[str, str], frame: Frame) -> str:
    sizes = ", ".join(map(str, (*it.stage.middle, *it.stage.pool, *rows, frame.plane, frame.pitch)))
    best = f"n->best{it.s} + t * {it.out_size}" if it.has_pool else "0"
    return (
        f"shape_back(c, filled(b, t), {it.product} + t * {it.middle_size}, {best}, {it.gradient_tile}, {dy}, {it.has_norm},"
        f" {sizes});"
    )


def _write_conv(it: Setting) -> list[str]:
    """A group of rows of dy at a time, used for the weights while in the first-level cache."""
    stage, s, H, dy = it.stage, it.s, it.stage.middle[1], it.gradient_frame
    rows, weight = convolution.row_group(stage), it.address(stage.weight)
    place = it.places[stage.weight]
    into = f"n->dy{s} + {dy.origin} + h * {dy.pitch}" if it.has_input_gradient else f"n->dy{s}"
    tile = f"""{{
        {it.load_samples}
        for (int h = 0; h < {H}; h += {rows}) {{
            int end = h + {rows} < {H} ? h + {rows} : {H};
            {_write_shape_back(it, into, ("h", "end"), dy)}
            dw_{s}({it.input_tile}, {into}, n->g{s}, h, end);
        }}
        {f"if (deeper) dx_{s}(n->dy{s}, {weight}, {it.input_gradient_tile});" if it.has_input_gradient else ""}
    }}"""
    stepped, origin = it.address(stage.weight, "n->q"), it.address(stage.weight, "n->origin")
    pull = it.pull(stage.weight)
    return [
        f"memset(n->g{s}, 0, sizeof(vec) * {place.pitch});",
        _write_tiles(tile),
        f"descend_lanes({stepped}, {origin}, n->g{s}, {place.cols}, step->lr, {pull});",
    ]


def _write_linear(it: Setting) -> list[str]:
    stage, s = it.stage, it.s
    weight, stepped, origin = (
        it.address(stage.weight, base) for base in ("n->p", "n->q", "n->origin")
    )
    parts = []
    if it.has_norm:  # in place
        parts.append(
            _write_tiles(_write_shape_back(it, it.gradient_tile, ("0", "1"), Frame(0, 1, 1)))
        )
    if it.has_input_gradient:
        parts.append(f"if (deeper) dx_{s}(n->d{s}, {weight}, n->d{stage.sources[0]}, b->tiles);")
    rest = f"n->strip, b->size, step->lr, {it.pull(stage.weight)}"
    return [
        *parts,
        f"dw_{s}({it.all_inputs}, (const float *)n->d{s}, {stepped}, {origin}, {rest});",
    ]


def _write_none(it: Setting) -> list[str]:
    _, H, W = it.stage.middle
    back = _write_tiles(
        _add_gradient(it, _write_shape_back(it, "INTO", ("0", str(H)), Frame(0, H, W)))
    )
    return [f"if (deeper) {back}"] if it.has_input_gradient else []
