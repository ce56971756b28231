"""Calls on other machines: a Ray cluster, Slurm's jobs, or processes of this one. Where changes
nothing but the time.

A call is a function of some module and arguments that can be pickled. `get_remote_executor(where)`
takes calls and yields the number of each with what it gave, as they end, or with Lost where it gave
nothing. A call whose machine is lost is made again; what calls write must therefore be such that
they go on from what is there, as run directories are.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flrce.config.experiment import Experiment
from flrce.core.process_lifetime import Starter, describe_starter, end_with_starter
from flrce.core.types import RoundRecord
from flrce.errors import BadInput, format_install_command, format_one_line
from flrce.simulation import runs
from flrce.storage.disk import make_folder, refuse_writable_by_others, write_atomically

MAX_RETRIES = 3  # of a call whose worker was lost
GPU_MEMORY_MARGIN = 1.5  # of a call's measured GPU memory, for the next one
POLL_SECONDS = 0.2  # seconds between looks at Slurm's jobs
SHARED_FOLDER_MARK = "out-of"  # lies in a folder that all machines must see


@dataclass(frozen=True)
class RemoteCall:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class LostCall:
    """Why a call gave nothing."""

    why: str


@dataclass(frozen=True)
class CallResult:
    """What a worker sends back."""

    value: Any
    memory: float = 0.0  # share of one GPU that was in use at most; 0: none


# calls, a folder for logs -> (number, value)
RemoteExecutor = Callable[[Sequence[RemoteCall], Path], Iterator[tuple[int, Any]]]


def get_remote_executor(where: str, settings: Mapping[str, Any]) -> RemoteExecutor:
    """By name: "ray", "slurm", or "processes" (submitit on this machine)."""
    if where == "ray":
        return build_ray_executor(settings)
    if where in ("slurm", "processes"):
        return build_job_executor("slurm" if where == "slurm" else "local", settings)
    raise BadInput(f"--on {where!r}: here, ray, slurm or processes")


def run_call(call: RemoteCall, starter: Starter | None = None) -> CallResult:
    """A call's value, in a process of any kind that ends with its starter, and the GPU memory that
    it took.
    """
    if starter is not None:
        end_with_starter(starter)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    value = call.function(*call.arguments)
    if not gpu or not torch.cuda.is_initialized():
        return CallResult(value)
    return CallResult(
        value, torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    )


def build_ray_executor(settings: Mapping[str, Any]) -> RemoteExecutor:
    """On the cluster that RAY_ADDRESS names, or one that is started here.

    The first call has a GPU for itself; the others share one by the memory that it took.
    """

    def execute_calls(calls: Sequence[RemoteCall], folder: Path) -> Iterator[tuple[int, Any]]:
        ray = _import_optional("ray", "ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        begun = not ray.is_initialized()
        if begun:
            _start_ray(ray)
        try:
            gpus = ray.cluster_resources().get("GPU", 0)
            remote = ray.remote(max_retries=MAX_RETRIES)(run_call)
            try:
                remote.options(**settings)
            except (ValueError, TypeError) as why:
                raise BadInput(f"--on ray: {format_one_line(why, 200)}") from why
            share, waiting = 1.0, list(range(len(calls)))
            pending: dict[Any, int] = {}
            while waiting or pending:
                if waiting and not (
                    gpus and pending and share == 1.0
                ):  # the first is measured alone
                    i = waiting.pop(0)
                    needs = {"num_cpus": 1, **settings} | ({"num_gpus": share} if gpus else {})
                    pending[remote.options(**needs).remote(calls[i])] = i
                    continue
                for ready in ray.wait(list(pending), num_returns=1)[0]:
                    i = pending.pop(ready)
                    try:
                        outcome = ray.get(ready)
                    except ray.exceptions.RayError as why:
                        yield i, LostCall(format_one_line(getattr(why, "cause", None) or why, 200))
                        continue
                    if outcome.memory:
                        share = min(0.99, max(0.02, round(GPU_MEMORY_MARGIN * outcome.memory, 2)))
                    yield i, outcome.value
        finally:
            if begun:
                ray.shutdown()

    return execute_calls


def _start_ray(ray: Any) -> None:
    address = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as why:
        remedy = "unset RAY_ADDRESS and one is started here" if address else "see ray's own message"
        raise BadInput(
            f"--on ray: no cluster at {address or 'this machine'} ({format_one_line(why, 120)});"
            f" {remedy}"
        ) from why


def build_job_executor(cluster: str, settings: Mapping[str, Any]) -> RemoteExecutor:
    """As jobs of submitit: `slurm`, or `local` for processes of this machine; a lost job is sent
    again.
    """

    def execute_calls(calls: Sequence[RemoteCall], folder: Path) -> Iterator[tuple[int, Any]]:
        submitit = _import_optional("submitit", "slurm")
        try:
            executor = submitit.AutoExecutor(folder=prepare_jobs_folder(folder), cluster=cluster)
            executor.update_parameters(**{"timeout_min": 240, **settings})
        except (
            RuntimeError,
            NameError,
            ValueError,
            TypeError,
        ) as odd:  # no srun here; a setting it does not know
            raise BadInput(
                f"--on {'processes' if cluster == 'local' else cluster}:"
                f" {format_one_line(odd, 200)}"
            ) from odd
        # Slurm's jobs are ended with scancel
        starter = describe_starter() if cluster == "local" else None
        pending = {executor.submit(run_call, call, starter): (i, 0) for i, call in enumerate(calls)}
        while pending:
            ended = [job for job in pending if job.done()]
            for job in ended:
                i, tries = pending.pop(job)
                if (why := job.exception()) is None:
                    yield i, job.result().value
                elif isinstance(why, submitit.core.utils.FailedJobError) or tries >= MAX_RETRIES:
                    yield i, LostCall(format_one_line(why, 200))
                else:
                    pending[executor.submit(run_call, calls[i], starter)] = (i, tries + 1)
            if not ended:
                time.sleep(POLL_SECONDS)

    return execute_calls


def prepare_jobs_folder(folder: Path) -> Path:
    """Where jobs lie as pickles, which are code to whoever loads them: nobody else may put one
    there.
    """
    jobs = folder / "jobs"
    make_folder(jobs)
    for place in (folder.parent, folder, jobs):
        refuse_writable_by_others(place)
    return jobs


def _import_optional(name: str, extra: str) -> Any:
    try:
        return __import__(name)
    except ImportError as why:
        raise BadInput(f"{name} is not installed; {format_install_command(extra)}") from why


def run_in_shared_folder(
    experiment: Experiment, folder: str, shared: str, data: Any = None
) -> tuple[RoundRecord, ...]:
    """One experiment in its run directory, on from what is there; `data` is read here, where it is
    a call.
    """
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
    """Every experiment in its run directory below `shared`; (number, history) as they end.

    What ended stays; if some did not, BadInput says why when all others have.
    """
    make_folder(shared)
    write_atomically(
        shared / SHARED_FOLDER_MARK,
        b"the folder that a command with --on shares with other machines\n",
    )
    calls = [
        RemoteCall(
            run_in_shared_folder,
            (experiment, str(folder.resolve()), str(shared.resolve()), data[i] if data else None),
        )
        for i, (experiment, folder) in enumerate(jobs)
    ]
    lost: list[str] = []
    try:
        for i, found in send(calls, shared / "running"):
            if isinstance(found, LostCall):
                lost.append(f"{jobs[i][1]}: {found.why}")
            else:
                yield i, found
    finally:
        (shared / SHARED_FOLDER_MARK).unlink(missing_ok=True)
    if lost:
        raise BadInput(
            f"{len(lost)} of {len(jobs)} runs failed; first: {lost[0]}; the same command and"
            " --resume goes on"
        )
