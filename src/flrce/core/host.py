"""What this machine has to offer, and processes that end with the one that started them, however
that one ends: SIGKILL leaves it no time to tell them.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from flrce.errors import BadInput

SECONDS_BETWEEN_LOOKS = 0.5
PR_SET_PDEATHSIG = 1  # of Linux's prctl
T = TypeVar("T")
THREADS_FOLDER = Path("/proc/self/task")
CGROUP_FOLDER = Path("/sys/fs/cgroup")


class Starter(NamedTuple):
    """A process that starts others, and names them."""

    pid: int
    # when, as the system writes it: numbers of processes are used again; "" where it does not tell
    begun: str
    # Linux counts the end of the thread that forked as the end of the parent
    from_main_thread: bool


def describe_starter() -> Starter:
    """This process, for those that it is about to start."""
    main = threading.current_thread() is threading.main_thread()
    return Starter(os.getpid(), _state_and_begin(os.getpid())[1], main)


def end_with_parent(parent: Starter) -> None:
    """End this process when its parent has ended: at once by the kernel on Linux, else within a
    second.
    """
    if sys.platform == "linux" and parent.from_main_thread:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _watch_process(lambda: os.getppid() == parent.pid)


def _watch_process(is_there: Callable[[], bool]) -> None:
    """Look now, and from now on in a thread; exits as if killed, for the journal is made for
    that.
    """

    def check_process() -> None:
        while is_there():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    if not is_there():
        os._exit(1)
    threading.Thread(target=check_process, name="flrce-lifetime", daemon=True).start()


def _is_alive(starter: Starter) -> bool:
    state, begun = _state_and_begin(starter.pid)
    if starter.begun:
        return begun == starter.begun and state not in ("Z", "X")
    try:
        os.kill(starter.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _state_and_begin(pid: int) -> tuple[str, str]:
    """A process's state and when it began, from Linux's /proc; both empty elsewhere, or where there
    is none.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        return words[0].decode(), words[19].decode()
    except (OSError, IndexError):
        return "", ""


def get_available_memory() -> int | None:
    """Bytes that can still be had: what the system has left, or what its control group allows;
    None: unknown.
    """
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(1024 * int(lines["MemAvailable"].split()[0]))
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if (left := _get_cgroup_memory(CGROUP_FOLDER)) is not None:
        limits.append(left)
    return min(limits, default=None)


def _get_cgroup_memory(root: Path) -> int | None:
    """Bytes that a control group allows beyond what it holds; None where it sets no limit.

    Pages of files that were read count as used, and are given up as soon as memory is wanted: they
    are left.
    """
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    files = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    return max(int(limit) - used + files, 0)


def find_device(wanted: str, engine: str = "simulator") -> str:
    """Where clients train, "cuda" or "cpu": "auto" chooses, an explicit device is required."""
    if engine == "flower":
        if wanted == "cuda":
            raise BadInput(
                "engine.device = 'cuda': Flower clients of an experiment train on the CPU; set"
                " engine.device = 'auto', or engine.name = 'simulator'"
            )
        return "cpu"
    if wanted == "cuda":
        require_gpu("engine.device = 'cuda'")
    return "cuda" if wanted != "cpu" and _has_gpu() else "cpu"


def require_gpu(setting: str) -> None:
    """BadInput where torch finds no GPU; `setting` is what asked for one."""
    if not _has_gpu():
        raise BadInput(
            f"{setting}: torch finds no GPU on this machine; use device 'auto' or 'cpu' (--device"
            " auto)"
        )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def require_memory(need: int, what: str, remedy: str) -> None:
    """BadInput unless so many bytes can still be had: told in advance, for the system would kill
    the run later.
    """
    have = get_available_memory()
    if have is not None and need > have:
        raise BadInput(
            f"{what} needs {need / 1e9:.1f} GB, and {have / 1e9:.1f} GB are available; {remedy}"
        )


def choose_start_method() -> str:
    """How worker processes begin: "fork" shares samples without a copy and knows any user's class;
    else "spawn".

    macOS cannot fork safely. Nor can a process that has used a GPU, or in which autograd has begun
    its threads, one for each GPU: a child of it could not train.
    """
    torch: Any = sys.modules.get("torch")  # not imported for this
    used = torch is not None and torch.cuda.is_initialized()
    threads = any(name.startswith("pt_autograd") for name in _list_thread_names())
    return "spawn" if sys.platform != "linux" or used or threads else "fork"


def run_in_child(work: Callable[[], T]) -> T:
    """What `work` gives, found in a child that is forked for it: what it begins in the process ends
    with that.

    Here, where there is no forking. An exception of the child's is raised here.
    """
    if choose_start_method() != "fork":
        return work()
    context = get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(
        target=_send_result, args=(work, there, here, describe_starter()), daemon=True
    )
    child.start()
    there.close()
    try:
        result: T | Exception = here.recv()
    except EOFError:  # it died without a word
        return work()
    finally:
        child.join()
    if isinstance(result, Exception):
        raise result
    return result


def start_process(child: Any, told: bytes = b"") -> None:
    """Start a spawned process. It reads the caller's script again only if what it is `told` names
    something of it.

    So a script needs no `if __name__ == "__main__"`, nor a file: it may come from standard input.
    """
    if b"__main__" in told:
        child.start()
        return
    script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        child.start()
    finally:
        sys.modules["__main__"] = script


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _send_result(
    work: Callable[[], T], pipe: Connection, other: Connection, parent: Starter
) -> None:
    end_with_parent(parent)
    other.close()  # the parent's end, which it was forked with
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        # OpenMP's threads are the parent's: a child that waits for them waits for ever
        torch.set_num_threads(1)
    try:
        pipe.send(work())
    except Exception as error:
        pipe.send(error)


def _list_thread_names() -> list[str]:
    """Names of this process's threads, where the system tells."""
    names = []
    for comm in THREADS_FOLDER.glob("*/comm"):
        try:
            names.append(comm.read_text())
        except OSError:  # it has just ended
            continue
    return names
