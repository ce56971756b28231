"""Trains cells. `execute_cells` is all that a faster engine has to replace: cells in, their run
directories filled.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from flrce.config.experiment import Experiment
from flrce.core.types import Round
from flrce.data import cache
from flrce.data.sources import Source, load_source
from flrce.errors import BadInput
from flrce.simulation import runs
from flrce.storage import ledger
from flrce_reproduction.plan import DatasetSizes, PaperCell

MAX_BATCH_CELLS = 96  # cells whose clients are trained together
CellCallback = Callable[[PaperCell, Round], None]
DatasetLoader = Callable[[str], Source]  # name -> samples, read once


class CellExecutor(Protocol):
    """Runs every cell to its end in `out / cell.folder`, going on from whatever is committed
    there.
    """

    def __call__(
        self, cells: Sequence[PaperCell], out: Path, sources: DatasetLoader, watch: CellCallback
    ) -> None: ...


def execute_cells(
    cells: Sequence[PaperCell], out: Path, sources: DatasetLoader, watch: CellCallback
) -> None:
    """All cells, by the GPU where the experiments may use one and there is one, else one after
    another.
    """
    if runs.choose_device(cells[0].experiment) == "cuda":
        return execute_on_gpu(cells, out, sources, watch)
    for cell in cells:
        runs.run(
            cell.experiment,
            out / cell.folder,
            resume=True,
            data=sources(cell.dataset),
            watch=lambda done, cell=cell: watch(cell, done),  # type: ignore[misc]
            allow_divergence=True,
        )


def execute_on_gpu(
    cells: Sequence[PaperCell],
    out: Path,
    sources: DatasetLoader,
    watch: CellCallback,
    device: str = "cuda",
) -> None:
    """Up to STACK cells of a data set as one stack on the GPU; their folders are written when the
    stack is done.
    """
    for dataset in dict.fromkeys(cell.dataset for cell in cells):
        mine = [cell for cell in cells if cell.dataset == dataset]
        for at in range(0, len(mine), MAX_BATCH_CELLS):
            group = mine[at : at + MAX_BATCH_CELLS]
            jobs: list[tuple[Experiment, Path | None]] = [(cell.experiment, None) for cell in group]
            notify = partial(_notify_cell_callback, watch, group)
            results = runs.run_together(jobs, data=sources, watch=notify, device=device)
            for cell, result in zip(group, results, strict=True):
                settings = cell.experiment.to_toml()
                ledger.write_finished_run(
                    out / cell.folder, settings, result.history, result.summary
                )


def _notify_cell_callback(
    watch: CellCallback, group: Sequence[PaperCell], i: int, done: Round
) -> None:
    watch(group[i], done)


def load_dataset(name: str, data: Path | None, verify: bool = True) -> Source:
    """A data set from the folder of prepared sets that --data names, or from the usual one."""
    if name == "digits" or data is None:
        return load_source(name)
    folder = data / name
    if not folder.is_dir():
        raise BadInput(
            f"--data {data} holds no {name}; run: FLRCE_DATA={data} flrce data prepare {name}"
            " --from DIR, or leave it out of --datasets"
        )
    return cache.load_prepared(folder, verify)


def read_dataset_sizes(name: str, data: Path | None) -> DatasetSizes:
    """Sizes only; the samples stay on disk."""
    pool = load_dataset(name, data, verify=False)
    groups = 0 if pool.group is None else int(pool.group.max()) + 1
    return DatasetSizes(len(pool.y), len(pool.classes), groups)
