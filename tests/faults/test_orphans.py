"""Row 4: processes that were started for a run end with it, also when it is killed without a chance
to tell them.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120  # far more than it takes; on a busy machine a spawned worker imports for long
row = pytest.mark.row(4, "kill -9 the parent of workers", "no process is left within seconds")

POOL = """
import os, sys, time
from flrce.simulation import workers

def work(what, size=0):
    if what == "sleep":
        time.sleep(600)
    return b"x" * size

if __name__ == "__main__":
    kind, case = sys.argv[1:]
    workers.choose_start_method = lambda: kind
    crew = workers.WorkerProcesses(work, 3)
    if case == "half a job":  # the length of a message, and not all of its bytes
        for _, pipe in crew.workers:
            os.write(pipe.fileno(), b"\\x00\\x10\\x00\\x00half")
    elif case == "a result that nobody reads":
        for slot in range(3):
            crew._send_job(slot, ("give", 2**24))
    elif case == "a job":
        for slot in range(3):
            crew._send_job(slot, ("sleep",))
    elif case == "a job of a thread's worker":
        import threading
        thread = threading.Thread(target=lambda: [crew._replace_worker(slot) for slot in range(3)])
        for process, _ in crew.workers:
            process.kill()
        thread.start()
        thread.join()
        time.sleep(1)
        assert all(process.is_alive() for process, _ in crew.workers), "workers outlive the thread"
        for slot in range(3):
            crew._send_job(slot, ("sleep",))
    time.sleep(1)
    print("ready", flush=True)
    time.sleep(600)
"""


def processes_with(mark: str) -> list[int]:
    """Processes whose environment holds a mark, but for this one's own."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (
                mark.encode() in (path / "environ").read_bytes()
                and b" Z " not in (path / "stat").read_bytes()
            ):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def started(arguments: list[str], mark: str, folder: Path) -> "subprocess.Popen[str]":
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"FLRCE_TEST_MARK": mark, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        cwd=folder,
    )


def gone(mark: str) -> bool:
    end = time.monotonic() + SECONDS
    while left := processes_with(mark):
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.1)
    return True


@row
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["fork", "spawn"])
@pytest.mark.parametrize(
    "case",
    ["nothing", "a job", "half a job", "a result that nobody reads", "a job of a thread's worker"],
)
def test_workers_end_with_a_killed_parent(tmp_path, kind, case):
    mark = f"orphans-{os.getpid()}-{tmp_path.name}-{kind}"
    (tmp_path / "script.py").write_text(textwrap.dedent(POOL))
    parent = started([str(tmp_path / "script.py"), kind, case], mark, tmp_path)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        assert len(processes_with(mark)) >= 4
    finally:
        parent.kill()
        parent.wait()
    assert gone(mark)
