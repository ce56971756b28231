"""The C file of one net: its stages, a workspace, and the two functions that Python calls."""

from pathlib import Path

from flrce.core.c_compiler import Processor
from flrce.training.cpu import backward, convolution, forward, linear
from flrce.training.cpu.frames import Place, make_input_frame, place_tensors
from flrce.training.cpu.joints import find_flows, plan_frame
from flrce.training.cpu.plan import Plan
from flrce.training.cpu.setting import Setting

HERE = Path(__file__).parent


def write_source(plan: Plan, machine: Processor) -> str:
    """The whole C file, reproducible: its text is the key of the build cache."""
    linear = {stage.weight for stage in plan.stages if stage.op == "linear"}
    where, floats = place_tensors(plan.layout.slots, linear, machine.lanes)
    frames = [plan_frame(plan.stages, s) for s in range(-1, len(plan.stages))]  # the samples' first
    settings = []
    for s, (stage, flows) in enumerate(zip(plan.stages, find_flows(plan.stages), strict=True)):
        origins = tuple(frames[v + 1] for v in stage.sources)
        settings.append(Setting(s, stage, origins, frames[s + 1], flows, where, machine))
    widest = max(stage.middle[0] for stage in plan.stages)
    parts = [
        f"#define LANES {machine.lanes}",
        f"#define CHANNELS {widest}",
        define_interleaving(machine.lanes),
    ]
    headers = (
        "prelude.h",
        "normal.h",
        "alone.h",
        *(("joined.h",) if plan.has_skip_connections else ()),
    )
    parts += [(HERE / name).read_text() for name in headers]
    parts += [_write_workspace(settings, frames[-1].size, floats), _write_places(settings[0])]
    parts += [
        part
        for it in settings
        for part in (*_write_products(it), forward.write_stage(it), backward.write_stage(it))
    ]
    parts += [_write_slots(where), _write_step(settings, plan), (HERE / "driver.h").read_text()]
    return "\n".join(parts)


def _write_products(it: Setting) -> list[str]:
    stage, s, machine = it.stage, it.s, it.machine
    if stage.op == "conv":
        reads = it.origins[0]
        parts = [
            convolution.write_forward(stage, s, machine, reads),
            convolution.write_weight_gradient(stage, s, machine, reads, it.gradient_frame),
        ]
        if it.has_input_gradient:
            adds = it.adds_to_gradient
            parts.append(convolution.write_input_gradient(stage, s, machine, adds))
        return parts
    if stage.op == "linear":
        place = it.places[stage.weight]
        parts = [
            linear.write_forward(stage, s, machine, place),
            linear.write_weight_gradient(stage, s, machine, place),
        ]
        if it.has_input_gradient:
            adds = it.adds_to_gradient
            parts.append(linear.write_input_gradient(stage, s, machine, place, adds))
        return parts
    return []


def define_interleaving(lanes: int) -> str:
    """The lanes of two rows' first and second halves, interleaved, for transposing."""
    low, high = (
        ", ".join(f"{at + i}, {lanes + at + i}" for i in range(lanes // 2))
        for at in (0, lanes // 2)
    )
    return f"#define LOW {low}\n#define HIGH {high}\n#define SHUFFLES {lanes.bit_length() - 1}"


def _write_workspace(settings: list[Setting], logits: int, floats: int) -> str:
    """struct net and carve(): one block of memory, aligned parts; padding stays zero from the
    allocation on.
    """
    parts = [
        ("vec", "strip", "2 * LANES * tiles"),
        *(("float", name, str(floats)) for name in ("p", "origin")),
        ("float", "pull", str(max(1, len(settings[0].places)))),
        ("float", "loss", "LANES * tiles"),
    ]
    for it in settings:
        s, stage = it.s, it.stage
        tiles = "1" if s == 0 and stage.op == "conv" else "tiles"
        before = it.origins[0] if s == 0 else settings[s - 1].target
        parts.append(("vec", f"in{s}", f"{before.size} * {tiles}"))
        parts.append(("vec", f"d{s}", f"{it.out_size} * tiles"))
        if stage.op not in ("pool", "average", "sum"):
            parts += [("struct channel", f"c{s}", "1")]
        if stage.op == "group":
            parts += [("vec", f"m{s}", f"{2 * it.group.groups} * tiles")]
        if stage.op in ("conv", "linear") and not it.product_is_output:
            parts += [("vec", f"y{s}", f"{it.middle_size} * tiles")]
        if it.has_pool:
            parts += [("vec", f"best{s}", f"{it.out_size} * tiles")]
        if stage.op == "conv":
            parts.append(("vec", f"dy{s}", str(it.gradient_frame.size)))
            parts.append(("vec", f"g{s}", str(it.places[stage.weight].pitch)))
    parts += [("vec", f"in{len(settings)}", f"{logits} * tiles")]
    if aside := [it.inside_size for it in settings if it.needs_scratch]:
        parts += [("vec", "aside", str(max(aside)))]
    fields = "\n".join(f"    {kind} *{name};" for kind, name, _ in parts)
    carved = "\n".join(
        f"    n->{name} = (void *)(base + at);\n    at += ((long)sizeof({kind}) * {count} + 127) /"
        " 64 * 64;"
        for kind, name, count in parts
    )
    return f"""struct net {{
{fields}
    float *q; /* what steps are taken on: p itself, or zeros, of which they make the gradient */
}};

static long carve(struct net *n, char *base, long tiles) {{
    long at = 0;
{carved}
    return at;
}}
"""


def _write_places(first: Setting) -> str:
    """place[i]: where value i of a sample goes in a tile."""
    C, H, W = first.stage.inside
    frame = make_input_frame(first.stage)
    return f"""static int place[{C * H * W}];
__attribute__((constructor)) static void fill_places(void) {{
    for (int i = 0; i < {C * H * W}; i++)
        place[i] = i / {H * W} * {frame.plane} + i / {W} % {H} * {frame.pitch} + i % {W} + {frame.origin};
}}
"""


def _write_slots(where: dict[str, Place]) -> str:
    rows = ",\n".join(
        f"    {{{p.slot.offset}, {p.inner}, {p.rows}, {p.cols}, {p.pitch},"
        f" {int(p.slot.trainable)}}}"
        for p in where.values()
    )
    return (
        "/* Tensors: place in w, place in a trainer, rows, columns, pitch, trained. */\nstatic"
        " const struct { int flat, inner, rows, cols, pitch, trained; } slots[] ="
        f" {{\n{rows}\n}};\nenum {{ SLOTS = {len(where)} }};\n"
    )


def _write_step(settings: list[Setting], plan: Plan) -> str:
    """forward, backward and what a run starts with."""
    last = len(settings) - 1
    begin: list[str] = []
    down: list[str] = []
    up: list[str] = []
    for it in settings:
        s, stage = it.s, it.stage
        up += [f"forward_{s}(n, b, first <= {stage.index});"]
        if stage.op == "conv" and stage.norm:
            bias = f"{it.address(stage.bias)}[i]" if stage.bias else "0"
            start = f"{bias} - {it.address(stage.norm.mean)}[i]"
            begin += [f"for (int i = 0; i < {stage.middle[0]}; i++) n->c{s}->start[i] = {start};"]
        below = max(flow.below for flow in it.flows)
        needed = f"first <= {stage.index}" if stage.learns else f"first <= {below}"
        down = [f"if ({needed}) backward_{s}(n, b, step, first <= {below});", *down]
    line = "\n    "
    return f"""
enum {{ CLASSES = {plan.classes} }};
static void begin(struct net *n) {{
    {line.join(begin)}
}}
static void forward(struct net *n, const struct batch *b, int first) {{
    {line.join(up)}
}}
static void backward(struct net *n, const struct batch *b, const struct step *step, int first) {{
    {line.join(down)}
}}
static vec *logits(struct net *n) {{ return n->in{last + 1}; }}
static vec *slope(struct net *n) {{ return n->d{last}; }}
"""
