"""Named places where a test makes the process die, or a write fail. Silent unless FLRCE_FAILPOINT
is set.

FLRCE_FAILPOINT=name:count        the process kills itself at the count-th passage
FLRCE_FAILPOINT=name:count:ENOSPC that passage raises OSError with this errno instead; with
                                  SIGTERM it sends the signal
FLRCE_FAILPOINT=record:FILE       every passage's name is appended to FILE for tests
"""

import errno
import os
import signal
from collections import Counter

FAILPOINT_VARIABLE = "FLRCE_FAILPOINT"
passage_counts: Counter[str] = Counter()  # passages so far, by specification and name


def hit_failpoint(name: str) -> None:
    """Pass a named place."""
    wanted = os.environ.get(FAILPOINT_VARIABLE)
    if not wanted:
        return
    where, _, rest = wanted.partition(":")
    if where == "record":
        with open(rest, "a") as f:
            f.write(name + "\n")
        return
    if where != name:
        return
    passage_counts[wanted] += 1
    count, _, action = rest.partition(":")
    if passage_counts[wanted] != int(count):
        return
    if action.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, action))
    elif action:
        code = getattr(errno, action)
        raise OSError(code, os.strerror(code))
    else:
        os.kill(os.getpid(), signal.SIGKILL)
