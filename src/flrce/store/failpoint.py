"""Named places where a test makes the process die, or a write fail. Silent unless FLRCE_FAILPOINT is set.

FLRCE_FAILPOINT=name:count        the process kills itself at the count-th passage
FLRCE_FAILPOINT=name:count:ENOSPC that passage raises OSError with this errno instead, or, named SIGTERM, sends it
FLRCE_FAILPOINT=record:FILE       every passage's name is appended to FILE, so that a test can enumerate them
"""

import errno
import os
import signal
from collections import Counter

VARIABLE = "FLRCE_FAILPOINT"
passed: Counter[str] = Counter()  # passages so far, by specification and name


def failpoint(name: str) -> None:
    """Pass a named place."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    where, _, rest = wanted.partition(":")
    if where == "record":
        with open(rest, "a") as f:
            f.write(name + "\n")
        return
    if where != name:
        return
    passed[wanted] += 1
    count, _, action = rest.partition(":")
    if passed[wanted] != int(count):
        return
    if action.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, action))
    elif action:
        code = getattr(errno, action)
        raise OSError(code, os.strerror(code))
    else:
        os.kill(os.getpid(), signal.SIGKILL)
