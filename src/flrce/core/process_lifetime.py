"""Processes that end with the one that started them, however that one ends: SIGKILL leaves it no
time to tell them.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

SECONDS_BETWEEN_LOOKS = 0.5
PR_SET_PDEATHSIG = 1  # of Linux's prctl


class Starter(NamedTuple):
    """A process that starts others, as they are told of it."""

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


def end_with_starter(starter: Starter) -> None:
    """End this process within a second of its starter's end, where other processes lie between the
    two.
    """
    _watch_process(lambda: _is_alive(starter))


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
