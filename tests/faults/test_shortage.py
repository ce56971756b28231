"""Row 36: a stopped worker; too few descriptors, too little memory; another kernel after a
resume.
"""

import errno
import os
import resource
import signal
import threading
import time

import numpy as np
import pytest
from harness import DATA, experiment, go, in_child

from flrce.cli.cli import main
from flrce.errors import BadInput, explain_shortage
from flrce.simulation import runs, workers
from flrce.simulation.workers import WorkerFailure, WorkerProcesses

row36 = pytest.mark.row(
    36, "worker stopped, machine short of something", "one line, resumable, never a hang"
)


def pid_and(x):
    time.sleep(0.2)
    return os.getpid(), x


@row36
def test_a_stopped_worker_is_replaced(monkeypatch, seen):
    monkeypatch.setattr(workers, "STOPPED_CHECK_SECONDS", 0.3)
    crew = WorkerProcesses(pid_and, 2)
    try:
        victim = crew.workers[0][0].pid
        timer = threading.Timer(0.1, os.kill, (victim, signal.SIGSTOP))
        timer.start()
        began = time.monotonic()
        found = crew.run([(i,) for i in range(8)])
        assert [x for _, x in found] == list(range(8))
        assert not any(isinstance(each, WorkerFailure) for each in found)
        assert victim not in {process.pid for process, _ in crew.workers}
        seen(f"replaced, all done after {time.monotonic() - began:.1f} s")
    finally:
        crew.close()


@row36
def test_a_slow_worker_is_left_alone(monkeypatch):
    monkeypatch.setattr(workers, "STOPPED_CHECK_SECONDS", 0.02)
    crew = WorkerProcesses(pid_and, 1)
    try:
        first = crew.workers[0][0].pid
        assert crew.run([(1,), (2,)]) == [(first, 1), (first, 2)]
    finally:
        crew.close()


@row36
def test_too_few_descriptors(tmp_path, capfd):
    """The limit is reached while workers are hired: exit code 2 and one line."""

    def child():
        most = len(os.listdir("/proc/self/fd")) + 6
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        small = ["rounds=1", "clients=6", "per_round=2", "engine.kernel=torch", "engine.workers=64"]
        code = main(["run", *(word for each in small for word in ("--set", each))])
        os.write(2, b"code %d\n" % code)

    assert in_child(child) == 0
    said = capfd.readouterr().err.splitlines()
    assert said[-1] == "code 2"
    assert [line for line in said if line.startswith("error: ")] == [said[-2]]
    assert "out of file descriptors; raise ulimit -n" in said[-2]


@row36
@pytest.mark.parametrize(
    ("why", "says"),
    [
        (MemoryError(), "out of memory"),
        (OSError(errno.ENOMEM, "x"), "out of memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "out of memory",
        ),
        (OSError(errno.EMFILE, "x"), "descriptors"),
        (BlockingIOError(errno.EAGAIN, "x"), "process or thread"),
        (RuntimeError("can't start new thread"), "process or thread"),
        (
            RuntimeError("unable to open shared memory object </torch_1_2> in read-write mode"),
            "shared memory",
        ),
        (RuntimeError("shapes cannot be multiplied"), ""),
        (OSError(errno.ENOENT, "x"), ""),
        (KeyError("x"), ""),
    ],
)
def test_what_counts_as_a_shortage(why, says):
    assert says in explain_shortage(why)
    assert bool(explain_shortage(why)) == bool(says)


@row36
def test_memory_that_the_system_refuses(tmp_path, capfd):
    """A limit on addresses just above what the process has: products over 6,000 clients, 288 MB,
    cannot be had.
    """
    np.savez(tmp_path / "many.npz", x=np.zeros((12_000, 4), np.float32), y=np.arange(12_000) % 2)

    def go(*more):
        small = [
            "rounds=1",
            "per_round=2",
            "engine.kernel=torch",
            "engine.workers=1",
            "recipe.name=divfl",
            *more,
        ]
        return main(["run", *(word for each in small for word in ("--set", each))])

    def child():
        assert go("clients=4") == 0  # all that is imported later is here
        with open("/proc/self/statm") as f:
            most = int(f.read().split()[0]) * resource.getpagesize() + 2**26
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        many = (
            "clients=6000",
            "data.minimum=2",
            "data.partition=iid",
            f"data.path={tmp_path / 'many.npz'}",
        )
        os.write(2, b"code %d\n" % go(*many))

    assert in_child(child) == 0
    said = capfd.readouterr().err.splitlines()
    assert said[-1] == "code 2"
    assert said[-2].startswith("error: out of memory; free some") or said[-2].startswith(
        "error: no further process"
    )


@row36
def test_shared_memory_is_known_beforehand(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "SHARED_MEMORY_PATH", str(tmp_path))
    monkeypatch.setattr(workers.shutil, "disk_usage", lambda path: type("", (), {"free": 1000}))
    with pytest.raises(BadInput, match=r"has 0\.0 MB left, the model needs"):
        runs.run(experiment(1), data=DATA)


@row36
def test_another_kernel_after_a_resume_is_told(tmp_path, caplog, monkeypatch):
    """A run begun with fused kernels goes on without a compiler: the bits may differ, and the log
    says so.
    """
    auto = {"workers": 1, "kernel": "auto"}
    go(tmp_path / "a", what=experiment(1, {"name": "fedavg"}, engine=auto))
    if "native" not in (tmp_path / "a" / "checkpoint" / "manifest.a.json").read_text():
        pytest.skip("no compiler here")
    monkeypatch.setattr(workers, "explain_no_kernel", lambda net, shape: "no C compiler")
    go(tmp_path / "a", resume=True, what=experiment(2, {"name": "fedavg"}, engine=auto))
    assert "kernel native -> torch" in caplog.text
