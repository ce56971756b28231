"""Calls on other machines: a Ray cluster, Slurm's jobs, or processes of this one. The place changes
nothing but the time.

A call is a function of some module and arguments that can be pickled. `get_remote_executor(where)`
takes calls and yields the number of each with what it gave, as they end, or with LostCall where it
gave nothing. A call whose machine is lost is made again, with a warning; what calls write must
therefore be such that they go on from what is there, as run directories are.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from flrce.config.experiment import Experiment
from flrce.core.host import Starter, describe_starter, end_with_parent, start_process
from flrce.core.types import RoundRecord
from flrce.errors import BadInput, format_install_command, format_one_line
from flrce.simulation import runs
from flrce.storage.disk import make_folder, refuse_writable_by_others, write_atomically

MAX_RETRIES = 3  # of a call whose worker was lost
GPU_MEMORY_MARGIN = 1.5  # of a call's measured GPU memory, for the next one
POLL_SECONDS = 0.2  # between looks at submitit's jobs
SLURM_PARALLEL_JOBS = 32  # of one array, unless the setting `parallel` says otherwise
SLURM_JOB_SECONDS = 600  # a job has as many calls as take this long, so that starts are few
PILOT_MINUTES = 240  # time limit of a call whose length nobody knows yet
TIME_LIMIT_MARGIN = 3  # of the measured time, plus TIME_LIMIT_MINUTES
TIME_LIMIT_MINUTES = 5
CALL_BEGUN = "begun"  # what a process sends before it makes a call
SHARED_FOLDER_MARK = "out-of"  # lies in a folder that all machines must see
log = logging.getLogger("flrce")


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
    seconds: float = 0.0


@dataclass(frozen=True)
class CallGroup:
    """Calls of one job, by number."""

    numbers: tuple[int, ...]
    minutes: int  # time limit
    losses: int = 0  # jobs with these calls that were lost

    def split_after_loss(self) -> list["CallGroup"]:
        """In halves, with twice the time, so that one call cannot take others with it."""
        middle = len(self.numbers) // 2
        parts = (self.numbers[:middle], self.numbers[middle:])
        again = replace(self, minutes=2 * self.minutes, losses=self.losses + 1)
        return [replace(again, numbers=part) for part in parts if part]


# calls, a folder for logs -> (number, value)
RemoteExecutor = Callable[[Sequence[RemoteCall], Path], Iterator[tuple[int, Any]]]


def get_remote_executor(where: str, settings: Mapping[str, Any]) -> RemoteExecutor:
    """By name: "ray", "slurm", or "processes" of this machine."""
    if where == "ray":
        return RayExecutor(settings)
    if where == "slurm":
        return JobExecutor(settings)
    if where == "processes":
        return ProcessExecutor(settings)
    raise BadInput(f"--on {where!r}: here, ray, slurm or processes")


def count_workers(where: str, settings: Mapping[str, Any]) -> int:
    """Calls that a place makes at once: GPUs where it has some, else cores."""
    if where != "ray":
        return count_parallel_jobs(where, settings)
    if not os.environ.get("RAY_ADDRESS"):
        return torch.cuda.device_count() or count_cores()
    ray = _import_optional("ray", "ray")
    begun = not ray.is_initialized()
    if begun:
        _start_ray(ray)
    try:
        resources = ray.cluster_resources()
    finally:
        if begun:
            ray.shutdown()
    return int(resources.get("GPU", 0) or resources.get("CPU", 1))


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_parallel_jobs(where: str, settings: Mapping[str, Any]) -> int:
    parallel = settings.get("parallel")
    if parallel is None:
        return SLURM_PARALLEL_JOBS if where == "slurm" else count_cores()
    if not isinstance(parallel, int) or parallel < 1:
        raise BadInput(f"parallel = {parallel!r}: jobs at once, a whole number of at least 1")
    return parallel


def run_call(call: RemoteCall) -> CallResult:
    """A call's value, in a process of any kind, and the GPU memory that it took."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    value = call.function(*call.arguments)
    seconds = time.monotonic() - began
    if not gpu or not torch.cuda.is_initialized():
        return CallResult(value, 0.0, seconds)
    peak = torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    return CallResult(value, peak, seconds)


def try_call(call: RemoteCall) -> CallResult | LostCall:
    """The same, or why it failed: whatever it is, it must not end the others."""
    try:
        return run_call(call)
    except Exception as why:
        return LostCall(format_one_line(why, 200) or type(why).__name__)


def run_calls(calls: Sequence[RemoteCall]) -> list[CallResult | LostCall]:
    """The calls of one job in turn."""
    return [try_call(call) for call in calls]


@dataclass
class RayExecutor:
    """Calls on the cluster that RAY_ADDRESS names, or one that is started here.

    The first call has a GPU for itself; the others share one by the memory that it took.
    """

    settings: Mapping[str, Any]
    gpu_share: float = 1.0  # of a GPU, for one call

    def __call__(self, calls: Sequence[RemoteCall], folder: Path) -> Iterator[tuple[int, Any]]:
        ray = _import_optional("ray", "ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        begun = not ray.is_initialized()
        if begun:
            _start_ray(ray)
        try:
            yield from self._execute_calls(ray, calls)
        finally:
            if begun:
                ray.shutdown()

    def _execute_calls(self, ray: Any, calls: Sequence[RemoteCall]) -> Iterator[tuple[int, Any]]:
        gpus = ray.cluster_resources().get("GPU", 0)
        remote = ray.remote(max_retries=0)(run_call)  # made again below, with a warning
        try:
            remote.options(**self.settings)
        except (ValueError, TypeError) as why:
            raise BadInput(f"--on ray: {format_one_line(why, 200)}") from why
        waiting = [(i, 0) for i in range(len(calls))]
        pending: dict[Any, tuple[int, int]] = {}
        while waiting or pending:
            measuring = gpus and pending and self.gpu_share == 1.0  # the first, alone
            if waiting and not measuring:
                i, losses = waiting.pop(0)
                needs = {"num_cpus": 1, **self.settings}
                needs |= {"num_gpus": self.gpu_share} if gpus else {}
                pending[remote.options(**needs).remote(calls[i])] = i, losses
                continue
            for ready in ray.wait(list(pending), num_returns=1)[0]:
                i, losses = pending.pop(ready)
                outcome = self._get_outcome(ray, ready, losses)
                if outcome is None:
                    waiting.insert(0, (i, losses + 1))
                else:
                    yield i, outcome.value if isinstance(outcome, CallResult) else outcome

    def _get_outcome(self, ray: Any, ready: Any, losses: int) -> CallResult | LostCall | None:
        """What a call gave, or why nothing; None: its worker was lost, and it is made again."""
        try:
            result = ray.get(ready)
        except ray.exceptions.RayTaskError as why:  # the call itself failed
            return LostCall(format_one_line(getattr(why, "cause", None) or why, 200))
        except ray.exceptions.RayError as why:
            reason = format_one_line(why, 200)
            if losses >= MAX_RETRIES:
                return LostCall(reason)
            _warn_of_loss("Ray worker", 1, reason)
            return None
        assert isinstance(result, CallResult)
        if result.memory:
            share = round(GPU_MEMORY_MARGIN * result.memory, 2)
            self.gpu_share = min(0.99, max(0.02, share))
        return result


def _warn_of_loss(kind: str, calls: int, reason: str) -> None:
    log.warning(
        "a %s was lost (%s): its %s made again, from the last committed round",
        kind,
        reason,
        "call is" if calls == 1 else f"{calls} calls are",
    )


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


@dataclass(frozen=True)
class BusyProcess:
    """A process of this machine and the call that it makes."""

    process: Any
    number: int
    losses: int  # processes that were lost with this call
    deadline: float = math.inf  # by the monotonic clock, once the call has begun


@dataclass
class ProcessExecutor:
    """Calls in processes of this machine, `parallel` at once. Each makes one call after another; a
    call whose process ends, or is at work for more than `timeout_min` minutes, is made again.
    """

    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        names = {"parallel", "timeout_min"}
        unknown = sorted(k for k in set(self.settings) - names if not k.startswith("slurm_"))
        if unknown:
            raise BadInput(
                f"--on processes: {unknown[0]!r} is unknown; use parallel or timeout_min"
            )
        self.parallel = count_parallel_jobs("processes", self.settings)
        minutes = self.settings.get("timeout_min", math.inf)
        if not isinstance(minutes, int | float) or not minutes > 0:
            raise BadInput(f"timeout_min = {minutes!r}: minutes, a number above 0")
        self.limit_seconds = 60 * minutes

    def __call__(self, calls: Sequence[RemoteCall], folder: Path) -> Iterator[tuple[int, Any]]:
        waiting = [(i, 0) for i in range(len(calls))]
        busy: dict[Connection, BusyProcess] = {}
        idle: list[tuple[Connection, Any]] = []
        try:
            while waiting or busy:
                while waiting and len(busy) < self.parallel:
                    pipe, process = idle.pop() if idle else _start_call_process()
                    i, losses = waiting.pop(0)
                    busy[pipe] = BusyProcess(process, i, losses)
                    with suppress(OSError):  # it may have died already: its end is heard next
                        pipe.send(calls[i])
                for pipe in self._wait_for_pipes(busy):
                    one = busy.pop(pipe)
                    try:
                        outcome = pipe.recv()
                    except (EOFError, OSError):
                        outcome = self._handle_loss(pipe, one)
                        if outcome is None:
                            waiting.insert(0, (one.number, one.losses + 1))
                            continue
                    else:
                        if outcome == CALL_BEGUN:
                            deadline = time.monotonic() + self.limit_seconds
                            busy[pipe] = replace(one, deadline=deadline)
                            continue
                        idle.append((pipe, one.process))
                    yield one.number, outcome.value if isinstance(outcome, CallResult) else outcome
        finally:
            processes = [one.process for one in busy.values()] + [process for _, process in idle]
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(10)

    def _wait_for_pipes(self, busy: Mapping[Connection, BusyProcess]) -> list[Connection]:
        """Processes with a result, that have ended, or whose time is over: these are ended."""
        left = min(one.deadline for one in busy.values()) - time.monotonic()
        ready = wait(list(busy), None if math.isinf(left) else max(left, 0))
        for pipe, one in busy.items():
            if pipe not in ready and time.monotonic() > one.deadline:
                one.process.kill()
        return [pipe for pipe in busy if pipe in ready]

    def _handle_loss(self, pipe: Connection, one: BusyProcess) -> LostCall | None:
        """Why a call gave nothing; None: it is made again."""
        pipe.close()
        one.process.join(10)
        reason = f"its process ended ({one.process.exitcode})"
        if time.monotonic() > one.deadline:
            reason = f"it took more than {self.limit_seconds / 60:g} minutes"
        if one.losses >= MAX_RETRIES:
            return LostCall(reason)
        _warn_of_loss("process", 1, reason)
        return None


def _start_call_process() -> tuple[Connection, Any]:
    context = get_context("spawn")  # a forked process cannot use the GPU
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve_calls, args=(theirs, describe_starter()))
    start_process(process)
    theirs.close()
    return mine, process


def _serve_calls(pipe: Connection, parent: Starter) -> None:
    """Make calls until nobody asks for one."""
    end_with_parent(parent)
    while True:
        try:
            call = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(CALL_BEGUN)
        pipe.send(try_call(call))


@dataclass
class JobExecutor:
    """Calls as job arrays of Slurm through submitit: several calls a job, at most `parallel` jobs
    at once. A lost job is sent again in halves.

    The first call is a job of its own; its time sets the calls and the time limit of the others,
    unless `timeout_min` is given.
    """

    settings: Mapping[str, Any]
    cluster: str = "slurm"  # as submitit calls it

    def __post_init__(self) -> None:
        self.parallel = count_parallel_jobs("slurm", self.settings)

    def __call__(self, calls: Sequence[RemoteCall], folder: Path) -> Iterator[tuple[int, Any]]:
        submitit = _import_optional("submitit", "slurm")
        own = {key: value for key, value in self.settings.items() if key != "parallel"}
        executor = _make_submitit_executor(submitit, self.cluster, own, folder, self.parallel)
        rest = list(range(1, len(calls)))
        waiting = [CallGroup((0,), PILOT_MINUTES)] if calls else []
        pending: dict[Any, CallGroup] = {}
        while waiting or pending:
            self._submit_waiting(executor, calls, waiting, pending)
            ended = [job for job in pending if job.done()]
            for job in ended:
                group, why = pending.pop(job), job.exception()
                if why is None:
                    results = job.result()
                    if rest:
                        seconds = max(getattr(r, "seconds", 0.0) for r in results)
                        waiting += _group_calls(rest, self.parallel, seconds)
                        rest = []
                    for i, result in zip(group.numbers, results, strict=True):
                        yield i, result if isinstance(result, LostCall) else result.value
                    continue
                reason = format_one_line(why, 200)
                failed = isinstance(why, submitit.core.utils.FailedJobError)
                if failed or group.losses >= MAX_RETRIES:
                    yield from ((i, LostCall(reason)) for i in (*group.numbers, *rest))
                    rest = []
                    continue
                _warn_of_loss("job", len(group.numbers), reason)
                waiting += group.split_after_loss()
            if not ended:
                time.sleep(POLL_SECONDS)

    def _submit_waiting(
        self,
        executor: Any,
        calls: Sequence[RemoteCall],
        waiting: list[CallGroup],
        pending: dict[Any, CallGroup],
    ) -> None:
        """Submit all, as arrays whose jobs have one time limit."""
        while waiting:
            minutes = waiting[0].minutes
            groups = [group for group in waiting if group.minutes == minutes]
            waiting[:] = [group for group in waiting if group.minutes != minutes]
            executor.update_parameters(timeout_min=self.settings.get("timeout_min") or minutes)
            work = [[calls[i] for i in group.numbers] for group in groups]
            with executor.batch() if len(groups) > 1 else nullcontext():
                jobs = [executor.submit(run_calls, group_calls) for group_calls in work]
            pending.update(zip(jobs, groups, strict=True))


def _make_submitit_executor(
    submitit: Any, cluster: str, settings: Mapping[str, Any], folder: Path, parallel: int
) -> Any:
    try:
        executor = submitit.AutoExecutor(folder=prepare_jobs_folder(folder), cluster=cluster)
        arrays = {"slurm_array_parallelism": parallel} if cluster == "slurm" else {}
        executor.update_parameters(**{"timeout_min": PILOT_MINUTES, **arrays, **settings})
    except (RuntimeError, NameError, ValueError, TypeError) as odd:  # no srun; unknown setting
        raise BadInput(f"--on slurm: {format_one_line(odd, 200)}") from odd
    return executor


def _group_calls(numbers: Sequence[int], parallel: int, seconds: float) -> list[CallGroup]:
    """Calls for jobs, by the measured seconds of one call."""
    fitting = math.ceil(SLURM_JOB_SECONDS / max(seconds, 1e-3))
    size = max(1, min(fitting, math.ceil(len(numbers) / parallel)))
    minutes = math.ceil(TIME_LIMIT_MARGIN * size * seconds / 60) + TIME_LIMIT_MINUTES
    return [CallGroup(tuple(numbers[i : i + size]), minutes) for i in range(0, len(numbers), size)]


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
        for i, history in send(calls, shared / "running"):
            if isinstance(history, LostCall):
                lost.append(f"{jobs[i][1]}: {history.why}")
            else:
                yield i, history
    finally:
        (shared / SHARED_FOLDER_MARK).unlink(missing_ok=True)
    if lost:
        raise BadInput(
            f"{len(lost)} of {len(jobs)} runs failed; first: {lost[0]}; the same command and"
            " --resume goes on"
        )
