"""Where stages meet: who reads what, in which frame, and whose gradient flows where."""

from dataclasses import dataclass, replace

from flrce.models.graph import INPUT_NODE
from flrce.training.cpu.frames import Frame, make_input_frame, make_tight_frame
from flrce.training.cpu.plan import Shape, Stage


def untangle_stages(stages: list[Stage], shape: Shape) -> tuple[Stage, ...]:
    """The stages, with copies (sums of one) where an output is read both with padding and without,
    or samples of this shape by another stage than the first.
    """
    first = [s for s, stage in enumerate(stages) if INPUT_NODE in stage.sources]
    if first != [0] or stages[0].sources != (INPUT_NODE,):
        stages = [
            Stage("sum", 0, (INPUT_NODE,), shape, shape, shape),
            *(_renumber_sources(stage, 0, 1) for stage in stages),
        ]
    s = 0
    while s < len(stages):
        readers = [stage for stage in stages if s in stage.sources]
        plain = [stage for stage in readers if not _reads_padding(stage, stages[s])]
        if plain and any(_has_padding(stage) for stage in readers):
            out = stages[s].out
            copy = Stage("sum", stages[s].index, (s,), out, out, out)
            moved = [_renumber_sources(stage, s + 1, 1) for stage in stages[s + 1 :]]
            moved = [
                _change_source(stage, s, s + 1) if not _reads_padding(stage, stages[s]) else stage
                for stage in moved
            ]
            stages = [*stages[: s + 1], copy, *moved]
        s += 1
    return tuple(stages)


def _renumber_sources(stage: Stage, start: int, by: int) -> Stage:
    """The stage where those from `start` on have numbers `by` higher, and samples come from stage 0
    if all do.
    """
    known = tuple(
        v + by if v >= start or (v == INPUT_NODE and start == 0) else v for v in stage.sources
    )
    return replace(stage, sources=known)


def _change_source(stage: Stage, old: int, new: int) -> Stage:
    return replace(stage, sources=tuple(new if v == old else v for v in stage.sources))


def _reads_padding(reader: Stage, source: Stage) -> bool:
    """Whether it can read planes that are padded."""
    return reader.op in ("conv", "sum") and reader.inside == source.out


def _has_padding(stage: Stage) -> bool:
    return stage.op == "conv" and make_input_frame(stage) != make_tight_frame(stage.inside)


def plan_frame(stages: tuple[Stage, ...], s: int) -> Frame:
    """Where stage s puts its output: as its reader wants it, or with padding enough for all of
    them.
    """
    readers = [make_input_frame(stage) for stage in stages if s in stage.sources]
    if s != INPUT_NODE and len(readers) != 1:
        shape = stages[s].out
        readers = [one for one in readers if one.channels == shape[0]] or [make_tight_frame(shape)]
    C = readers[0].channels
    top, left = max(one.top for one in readers), max(one.left for one in readers)
    rows = top + max(one.rows - one.top for one in readers)
    return Frame(C, rows, left + max(one.pitch - one.left for one in readers), top, left)


@dataclass(frozen=True)
class Flow:
    """A stage's way back to one of its sources: whether any stage up there learns, and whether
    another, later in the network and so earlier on the way back, has left its gradient there
    already.
    """

    source: int
    learns: bool
    adds: bool
    below: int  # the largest index of the stages up there that learn; -1: none


def find_flows(stages: tuple[Stage, ...]) -> list[tuple[Flow, ...]]:
    """Of every stage, in the order of its sources."""
    highest: list[int] = []  # of each stage and those it depends on, the largest index that learns
    found = []
    for s, stage in enumerate(stages):
        below = [highest[v] if v != INPUT_NODE else -1 for v in stage.sources]
        later = {v for other in stages[s + 1 :] for v in other.sources}
        found.append(
            tuple(
                Flow(v, up >= 0, v in later or v in stage.sources[:i], up)
                for i, (v, up) in enumerate(zip(stage.sources, below, strict=True))
            )
        )
        highest.append(max([*below, stage.index if stage.learns else -1]))
    return found
