"""Run calls as submitit jobs: on a Slurm cluster, or as processes of this machine.

A call is an importable function with arguments that can be pickled. An executor yields the number
and the result of each call when it ends; a call that failed yields a LostCall. The calls of a lost
job are submitted again. They must therefore continue from what they wrote, as run directories do.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flrce.config.experiment import Experiment
from flrce.core.process_lifetime import Starter, describe_starter, end_with_starter
from flrce.core.types import RoundRecord
from flrce.errors import BadInput, format_install_command, format_one_line
from flrce.simulation import runs
from flrce.storage.disk import make_folder, refuse_writable_by_others, write_atomically

SUBMITIT_CLUSTERS = {"slurm": "slurm", "processes": "local"}  # submitit's names
MAX_RETRIES = 3  # submissions of a call after its job was lost
POLL_SECONDS = 0.2
SLURM_PARALLEL_JOBS = 32  # jobs of one array that run at once, unless `parallel` is set
TIME_LIMIT_MINUTES = 240  # of a job, unless `timeout_min` is set
JOBS_PER_CORE = 3  # jobs for each job that may run at once: short jobs even out long ones
SHARED_FOLDER_MARK = "out-of"  # file in a folder that all machines must see
log = logging.getLogger("flrce")


@dataclass(frozen=True)
class RemoteCall:
    """A function and its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class LostCall:
    """Why a call has no result."""

    why: str


@dataclass(frozen=True)
class CallGroup:
    """The calls of one job, by number."""

    numbers: Sequence[int]
    losses: int = 0  # lost jobs with these calls

    def split_after_loss(self) -> list["CallGroup"]:
        """Split into halves, so that one bad call does not lose the others again and again."""
        middle = len(self.numbers) // 2
        halves = (self.numbers[:middle], self.numbers[middle:])
        return [CallGroup(half, self.losses + 1) for half in halves if half]


# calls, a folder for logs -> (number, value)
RemoteExecutor = Callable[[Sequence[RemoteCall], Path], Iterator[tuple[int, Any]]]


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_parallel_jobs(where: str, settings: Mapping[str, Any]) -> int:
    """Jobs that run at once: the setting `parallel`, or a default."""
    parallel = settings.get("parallel")
    if parallel is None:
        return SLURM_PARALLEL_JOBS if where == "slurm" else count_cores()
    if not isinstance(parallel, int) or parallel < 1:
        raise BadInput(f"parallel = {parallel!r}: jobs at once, a whole number of at least 1")
    return parallel


def run_calls(calls: Sequence[RemoteCall], starter: Starter | None = None) -> list[Any]:
    """Run the calls of one job in turn. A call that fails gives a LostCall.

    With a `starter`, this process ends when its starter ends.
    """
    if starter is not None:
        end_with_starter(starter)
    results: list[Any] = []
    for call in calls:
        try:
            results.append(call.function(*call.arguments))
        except Exception as why:  # any error: the other calls still run
            results.append(LostCall(format_one_line(why, 200) or type(why).__name__))
    return results


def get_remote_executor(where: str, settings: Mapping[str, Any]) -> RemoteExecutor:
    """Build the executor for "slurm" or "processes". `settings` go to submitit, but for `parallel`.

    At most `parallel` jobs run at once; a job has several calls.
    """
    if where not in SUBMITIT_CLUSTERS:
        raise BadInput(f"--on {where!r}: use here, slurm or processes")
    parallel = count_parallel_jobs(where, settings)

    def execute_calls(calls: Sequence[RemoteCall], folder: Path) -> Iterator[tuple[int, Any]]:
        executor = _make_submitit_executor(where, settings, folder, parallel)
        starter = None if where == "slurm" else describe_starter()  # Slurm has scancel
        waiting = group_calls(len(calls), parallel)
        pending: dict[Any, CallGroup] = {}
        while waiting or pending:
            # Slurm queues all jobs as one array; processes start when cores are free
            free = len(waiting) if where == "slurm" else parallel - len(pending)
            groups, waiting = waiting[:free], waiting[free:]
            with executor.batch() if len(groups) > 1 else nullcontext():
                jobs = [
                    executor.submit(run_calls, [calls[i] for i in group.numbers], starter)
                    for group in groups
                ]
            pending.update(zip(jobs, groups, strict=True))
            ended = [job for job in pending if job.done()]
            for job in ended:
                group = pending.pop(job)
                if (why := job.exception()) is None:
                    yield from zip(group.numbers, job.result(), strict=True)
                elif _is_final(why) or group.losses >= MAX_RETRIES:
                    reason = LostCall(format_one_line(why, 200))
                    yield from ((i, reason) for i in group.numbers)
                else:
                    log.warning(
                        "a job was lost (%s); calls to run again: %d",
                        format_one_line(why, 200),
                        len(group.numbers),
                    )
                    waiting += group.split_after_loss()
            if not ended:
                time.sleep(POLL_SECONDS)

    return execute_calls


def _is_final(why: BaseException) -> bool:
    """Whether a job itself failed, rather than its process or machine."""
    from submitit.core.utils import FailedJobError

    return isinstance(why, FailedJobError)


def _make_submitit_executor(
    where: str, settings: Mapping[str, Any], folder: Path, parallel: int
) -> Any:
    try:
        import submitit
    except ImportError as why:
        raise BadInput(f"submitit is not installed; {format_install_command('slurm')}") from why
    own = {key: value for key, value in settings.items() if key != "parallel"}
    arrays = {"slurm_array_parallelism": parallel} if where == "slurm" else {}
    try:
        executor = submitit.AutoExecutor(
            folder=prepare_jobs_folder(folder), cluster=SUBMITIT_CLUSTERS[where]
        )
        executor.update_parameters(**{"timeout_min": TIME_LIMIT_MINUTES, **arrays, **own})
    except (RuntimeError, NameError, ValueError, TypeError) as why:  # no srun; unknown setting
        raise BadInput(f"--on {where}: {format_one_line(why, 200)}") from why
    return executor


def group_calls(count: int, parallel: int) -> list[CallGroup]:
    """Split `count` calls into about JOBS_PER_CORE * parallel jobs."""
    size = math.ceil(count / (JOBS_PER_CORE * parallel))
    return [CallGroup(range(i, min(i + size, count))) for i in range(0, count, max(size, 1))]


def prepare_jobs_folder(folder: Path) -> Path:
    """Make the folder of the jobs' pickles, which run code when they are loaded.

    Raises BadInput if others may write to it.
    """
    jobs = folder / "jobs"
    make_folder(jobs)
    for place in (folder.parent, folder, jobs):
        refuse_writable_by_others(place)
    return jobs


def run_in_shared_folder(
    experiment: Experiment, folder: str, shared: str, data: Any = None
) -> tuple[RoundRecord, ...]:
    """Run or resume one experiment in its run directory; a callable `data` is read here."""
    if not (Path(shared) / SHARED_FOLDER_MARK).exists():
        raise BadInput(
            f"{shared} is not on this machine; --out must lie on a disk that all machines see"
        )
    samples = data() if callable(data) else data
    return runs.run(experiment, folder, resume=True, data=samples, allow_divergence=True).history


def run_experiments_remotely(
    send: RemoteExecutor,
    jobs: Sequence[tuple[Experiment, Path]],
    shared: Path,
    data: Sequence[Any] = (),
) -> Iterator[tuple[int, tuple[RoundRecord, ...]]]:
    """Run every experiment in its run directory below `shared`; yield (number, history) of each.

    If some fail, the others still run, and BadInput says why at the end.
    """
    make_folder(shared)
    mark = shared / SHARED_FOLDER_MARK
    write_atomically(mark, b"the folder that a command with --on shares with other machines\n")
    calls = [
        RemoteCall(
            run_in_shared_folder,
            (experiment, str(folder.resolve()), str(shared.resolve()), data[i] if data else None),
        )
        for i, (experiment, folder) in enumerate(jobs)
    ]
    lost: list[str] = []
    try:
        for i, result in send(calls, shared / "running"):
            if isinstance(result, LostCall):
                lost.append(f"{jobs[i][1]}: {result.why}")
            else:
                yield i, result
    finally:
        mark.unlink(missing_ok=True)
    if lost:
        raise BadInput(
            f"{len(lost)} of {len(jobs)} runs failed; first: {lost[0]}; the same command and"
            " --resume goes on"
        )
