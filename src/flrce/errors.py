"""What a user did wrong, in one line: what, where, remedy."""

import errno
import importlib.metadata
import os
import re
import shlex
import traceback
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
MAX_TEXT_LENGTH = 300  # characters of a stranger's text that are kept
MAX_MESSAGE_LENGTH = 2000  # of a message
LIBRARY_PATHS = (os.path.join("site-packages", "torch", ""), str(Path(__file__).parent) + os.sep)


class BadInput(ValueError):
    """Raised before any work is lost; the command line prints it and exits with 2. Its message is
    one line.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(format_one_line(message, MAX_MESSAGE_LENGTH))


class UnfinishedRun(RuntimeError):
    """A run that ended before its time but can be resumed; the command line exits with 130."""


class Diverged(UnfinishedRun):
    """Training diverged, so that the run ended without a usable model; `result` is what came of
    it.
    """

    def __init__(self, message: object = "", result: Any = None) -> None:
        super().__init__(format_one_line(message, MAX_MESSAGE_LENGTH))
        self.result = result


class InterruptedRun(UnfinishedRun):
    """Ctrl-C, with what is kept and how to go on."""


def suggest_name(word: str, valid: Iterable[str]) -> str:
    """A hint naming the closest valid word, or all of them when none is close."""
    valid = sorted(valid)
    close = get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(valid)}"


def look_up_name(name: str, of: Mapping[str, T], key: str) -> T:
    """What a name stands for; BadInput with a hint where it is none of those that the key may
    have.
    """
    if name not in of:
        raise BadInput(f"{key} = {name!r}: {suggest_name(name, of)}")
    return of[name]


def format_one_line(value: Any, most: int = MAX_TEXT_LENGTH) -> str:
    """Anything as text in one line: no giant integer written out, nothing that a terminal would
    obey.
    """
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = str(value)[: 2 * most]
    except Exception:  # an object with a mind of its own
        text = f"a {type(value).__name__}"
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text).strip()[
        :most
    ]


def describe_exception(why: BaseException, most: int = 160) -> str:
    """An exception of the user's code in one line: its type and text, and the last line of that
    code on its way.
    """
    text = f"{type(why).__name__}: {format_one_line(why, most)}"
    frames = traceback.extract_tb(why.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in LIBRARY_PATHS)]
    return (
        f"{text} (in {own[-1].name}, {Path(own[-1].filename).name} line {own[-1].lineno})"
        if own
        else text
    )


def format_install_command(extra: str) -> str:
    """The command that installs what an extra of this package wants, however the package itself
    came here.

    It names the packages that are missing: flrce may have come from a checkout, a wheel or an
    index, and an extra of it could only be asked for from there.
    """
    try:
        known = importlib.metadata.requires("flrce") or ()
    except importlib.metadata.PackageNotFoundError:
        known = ()
    # lines such as: matplotlib>=3.8; extra == 'report'
    cut = [line.partition(";") for line in known]
    wanted = [
        name.strip() for name, _, marker in cut if re.search(rf"extra == ['\"]{extra}['\"]", marker)
    ]
    wanted = [shlex.quote(name) for name in wanted] or [f"'.[{extra}]' in its checkout"]
    return f"pip install {' '.join(wanted)}"


def unusable_path(why: BaseException) -> str:
    """Which path the system refused, and why; "" where the exception is about something else."""
    wrong = (
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENAMETOOLONG,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
    )
    if not isinstance(why, OSError) or why.errno not in wrong or why.filename is None:
        return ""
    name = os.fsdecode(why.filename) if isinstance(why.filename, bytes) else why.filename
    notes = "; ".join(getattr(why, "__notes__", ()))
    return (
        f"{format_one_line(name, 200)}: {why.strerror}; name another"
        f" path{f' ({notes})' if notes else ''}"
    )


def is_out_of_memory(why: BaseException) -> bool:
    """Whether memory was short: the host's, torch's on a device, or that of CUDA's libraries."""
    signs = ("allocate memory", "out of memory", "status_alloc_failed")
    text = str(why).lower() if isinstance(why, RuntimeError) else ""
    return isinstance(why, MemoryError) or any(sign in text for sign in signs)


def explain_shortage(why: BaseException) -> str:
    """What the machine has too little of, and what to do; "" where the exception is about something
    else.
    """
    text, kept = str(why).lower(), "what is committed is kept: then go on with --resume"
    number = why.errno if isinstance(why, OSError) else 0
    if number == errno.ENOMEM or is_out_of_memory(why):
        return f"out of memory; free some, or lower clients, per_round or train.batch; {kept}"
    if number in (errno.EMFILE, errno.ENFILE) or "too many open files" in text:
        return f"out of file descriptors; raise ulimit -n, or lower engine.workers; {kept}"
    if number == errno.EAGAIN or "start new thread" in text:
        return f"no further process or thread; raise ulimit -u, or lower engine.workers; {kept}"
    if "shared memory" in text or "/torch_" in text:
        return f"out of shared memory; make room in /dev/shm; {kept}"
    return ""
