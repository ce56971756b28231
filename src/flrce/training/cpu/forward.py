"""C text of forward_s: a stage's product, batch statistics, and the shaping of its output into the
next input.
"""

from flrce.training.cpu.frames import get_axes
from flrce.training.cpu.plan import Norm
from flrce.training.cpu.setting import Setting

CLEAR = """memset(c->first, 0, sizeof c->first + sizeof c->second);
    memset(c->sum, 0, sizeof c->sum + sizeof c->square);"""


def write_stage(it: Setting) -> str:
    """forward_s(n, b, train): with batch statistics if train, else with running ones."""
    alone = {
        "pool": _write_pool,
        "average": _write_average,
        "group": _write_group,
        "sum": _write_sum,
    }
    op = it.stage.op
    body = alone[op](it) if op in alone else _write_product_stage(it)
    return f"""{"" if op in alone or it.product_is_output else _write_shape(it)}
static void forward_{it.s}(struct net *n, const struct batch *b, int train) {{
    {body}
}}
"""


def _write_pool(it: Setting) -> str:
    stage = it.stage
    sizes = (
        *stage.inside,
        *stage.kernel,
        *stage.stride,
        *stage.padding,
        *stage.out[1:],
        *it.target_strides,
    )
    return f"""for (long t = 0; t < b->tiles; t++) {{
        {it.load_samples}
        pool_forward({it.input_tile}, {it.output_tile}, {", ".join(map(str, sizes))});
    }}"""


def _write_average(it: Setting) -> str:
    stage = it.stage
    sizes = (*stage.inside, *stage.kernel, *stage.stride, *stage.out[1:], *it.target_strides)
    return f"""for (long t = 0; t < b->tiles; t++) {{
        {it.load_samples}
        average_forward({it.input_tile}, {it.output_tile}, {", ".join(map(str, sizes))});
    }}"""


def _write_group(it: Setting) -> str:
    """Each sample by its own statistics, so training and evaluation do the same."""
    stage, group = it.stage, it.group
    how = f"{it.address(group.gamma)}, {it.address(group.beta)}, {group.eps}f, {stage.act}"
    sizes = ", ".join(map(str, (group.groups, *stage.inside, *it.target_strides)))
    return f"""for (long t = 0; t < b->tiles; t++) {{
        {it.load_samples}
        group_forward({it.input_tile}, {it.output_tile}, {it.moments}, {how}, {sizes});
    }}"""


def _write_sum(it: Setting) -> str:
    a, b = [*it.list_sum_inputs(), ("0", 0, 0)][:2]
    sizes = ", ".join(
        map(str, (it.stage.act, *it.stage.inside, *a[1:], *b[1:], *it.target_strides))
    )
    return f"""for (long t = 0; t < b->tiles; t++) {{
        {it.load_samples}
        sum_forward({a[0]}, {b[0]}, {it.output_tile}, {sizes});
    }}"""


def _write_shape(it: Setting) -> str:
    """shape_s: BatchNorm, activation, pooling of tile t into the next stage's input."""
    sizes = ", ".join(map(str, (*it.stage.middle, *it.stage.pool, *it.target_strides)))
    best = f"n->best{it.s} + (train ? t : 0) * {it.out_size}" if it.has_pool else "0"
    return f"""
KERNEL void shape_{it.s}(struct net *n, const vec *y, long t, int train) {{
    shape_forward(n->c{it.s}, y, {best}, {it.output_tile}, {it.has_norm}, {it.stage.act}, {sizes});
}}"""


def _write_product_stage(it: Setting) -> str:
    norm, C = it.stage.norm, it.stage.middle[0]
    frozen = (
        f"if (!train) norm_frozen(c, {C}, {_write_tensors(it, norm)}, {norm.eps}f);" if norm else ""
    )
    parts = [f"struct channel *c = n->c{it.s};", frozen]
    parts += [_write_conv(it)] if it.stage.op == "conv" else [_write_whole(it)]
    parts += [_write_statistics(it, norm)] if norm else []
    if it.stage.op != "conv" or norm:
        when = "if (train) " if it.stage.op == "conv" else ""
        # the last tile first, as in other second passes: it is still in cache
        parts += [
            f"{when}for (long t = b->tiles - 1; t >= 0; t--) shape_{it.s}(n, {it.product} + t *"
            f" {it.middle_size}, t, train);"
        ]
    return "\n    ".join(part for part in parts if part)


def _write_tensors(it: Setting, norm: Norm) -> str:
    return ", ".join(it.address(name) for name in (norm.gamma, norm.beta, norm.mean, norm.var))


def _write_starts(it: Setting) -> str:
    bias = f"{it.address(it.stage.bias)}[i]" if it.stage.bias else "0"
    return f"for (int i = 0; i < {it.stage.middle[0]}; i++) c->start[i] = {bias};"


def _write_conv(it: Setting) -> str:
    """Tile by tile; what needs no batch statistics is shaped at once, and y then kept only to
    train.
    """
    stage, s = it.stage, it.s
    after = f"shape_{s}(n, y, t, train);" if not it.product_is_output else ""
    tile = "t" if it.product_is_output else "(train ? t : 0)"
    if stage.norm:  # training, the sums start around the last batch's mean instead of the bias
        after = f"if (train) norm_collect(c, {stage.middle[0]}, filled(b, t)); else {after}"
    return f"""{"if (!train) " if stage.norm else ""}{_write_starts(it)}
    {CLEAR if stage.norm else ""}
    for (long t = 0; t < b->tiles; t++) {{
        vec *y = {it.product} + {tile} * {it.middle_size};
        {it.load_samples}
        product_{s}({it.input_tile}, {it.address(stage.weight)}, c->start, y, train ? c->sum : 0, c->square);
        {after}
    }}"""


def _write_whole(it: Setting) -> str:
    """A linear layer, or none: all tiles at once."""
    load = f"for (long t = 0; t < b->tiles; t++) {it.load_samples}" if it.s == 0 else ""
    if it.stage.op != "linear":
        return load
    product = f"product_{it.s}({it.all_inputs}, {it.address(it.stage.weight)}, c->start, n->y{it.s}, b->tiles);"
    return "\n    ".join([load, _write_starts(it), product])


def _write_statistics(it: Setting, norm: Norm) -> str:
    """The batch's mean and variance, from the convolution's own sums or by two passes over y."""
    C, H, W = it.stage.middle
    count = f"(double)b->size * {H * W}"
    measure, offset, moved = f"norm_measure(c, b, {it.product}, {C}, {H * W});", "0", ""
    if it.stage.op == "conv":
        h, w = get_axes(it.stage)
        dead = H * W - (h.dead - h.live) * (w.dead - w.live)
        bias = f"{it.address(it.stage.bias)}[i]" if it.stage.bias else "0"
        measure = f"""for (int i = 0; i < {C}; i++) c->level[i] = {bias} - c->start[i];
        norm_moments(c, {C}, {count}, (double)b->size * {dead});"""
        offset, moved = "c->level", f"for (int i = 0; i < {C}; i++) c->start[i] -= c->mean[i];"
    return f"""if (train) {{
        {measure}
        norm_apply(c, {C}, {count}, {_write_tensors(it, norm)}, {offset}, {norm.eps}f, {norm.momentum}f);
        {moved}
    }}"""
