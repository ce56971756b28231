"""Which cells of an arena share a process of this machine, and how many processes there are.

Cells whose clients can train together make a stack on a GPU, which several processes share. Cells
that are meant for one core have a process each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flrce.core.pieces import FullModel, Recipe, SynchronousPace
from flrce.methods.client.workload import PlainTraining
from flrce.methods.selection.power_of_choice import PowerOfChoice
from flrce.methods.selection.tiers import AdaptiveTierSelector
from flrce.simulation import multiprocess, runs
from flrce.simulation.executors import count_cores
from flrce_arena.plan import ArenaCell

MAX_BATCH_CELLS = 12  # cells of a stack: more in one process are bound by its Python


@dataclass(frozen=True)
class CellBatch:
    """Cells that one process runs at once."""

    cells: tuple[ArenaCell, ...]
    device: str  # cuda: as a stack


def build_cell_batches(
    cells: Sequence[ArenaCell], device: Callable[[ArenaCell], str], size: int = MAX_BATCH_CELLS
) -> list[CellBatch]:
    """Stacks of equal size, at most `size`, in the order of their first cells; a cell for the CPU
    is one of its own.
    """
    groups: dict[Any, list[int]] = {}
    for i, cell in enumerate(cells):
        key = batching_key(cell) if device(cell) == "cuda" else i
        groups.setdefault((device(cell), key), []).append(i)
    batches = []
    for (where, _), members in groups.items():
        count = -(-len(members) // size)
        for part in range(count):
            some = members[len(members) * part // count : len(members) * (part + 1) // count]
            batches.append((some[0], CellBatch(tuple(cells[i] for i in some), where)))
    return [batch for _, batch in sorted(batches, key=lambda pair: pair[0])]


def batching_key(cell: ArenaCell) -> tuple[str, ...]:
    """What cells of one stack share: samples and network, and how clients train."""
    e = cell.experiment
    network, recipe = e.model.model_dump_json(), e.build_recipe()
    training = f"plain, {recipe.holdouts}" if is_plain_training(recipe) else cell.method
    identity = (runs.data_identity(e), network, str(e.objective), str(e.engine.precision))
    return (*identity, training)


def is_plain_training(recipe: Recipe) -> bool:
    """Whether clients take SGD's steps on whole models, round by round, and nobody is asked for a
    loss before.
    """
    asks = isinstance(recipe.selector, PowerOfChoice | AdaptiveTierSelector)
    whole = recipe.submodel == FullModel() and not recipe.personal and not recipe.augment
    steady = recipe.pace == SynchronousPace() and not asks
    plain = type(recipe.trainer) is PlainTraining and len(recipe.chain.links) == 1
    return whole and steady and plain


def count_processes(batches: Sequence[CellBatch]) -> dict[str, int]:
    """Processes for each device: a few for a GPU, and one for each core that these leave."""
    cores, gpus = count_cores(), 0
    stacks = sum(batch.device == "cuda" for batch in batches)
    if stacks:
        memory = torch.cuda.get_device_properties(0).total_memory
        room = min(multiprocess.MAX_PROCESSES, memory // multiprocess.GPU_BYTES_PER_PROCESS)
        gpus = max(1, min(stacks, cores // 2, torch.cuda.device_count() * room))
    return {"cuda": gpus, "cpu": min(len(batches) - stacks, max(cores - gpus, 1))}
