"""Named places at which a test kills the process or makes a write fail.

Without the environment variable FLRCE_FAILPOINT they do nothing.

FLRCE_FAILPOINT=name:count        the process kills itself at the count-th call
FLRCE_FAILPOINT=name:count:ENOSPC that call raises OSError with this errno instead, or sends
                                  the signal (SIGTERM)
FLRCE_FAILPOINT=record:FILE       the name of every call is appended to FILE
"""

import errno
import os
import signal
from collections import Counter

FAILPOINT_VARIABLE = "FLRCE_FAILPOINT"
call_counts: Counter[str] = Counter()  # specification -> calls so far


def hit_failpoint(name: str) -> None:
    """Act as FLRCE_FAILPOINT says if it names this place."""
    specification = os.environ.get(FAILPOINT_VARIABLE)
    if not specification:
        return
    place, _, rest = specification.partition(":")
    if place == "record":
        with open(rest, "a") as f:
            f.write(name + "\n")
        return
    if place != name:
        return
    call_counts[specification] += 1
    count, _, action = rest.partition(":")
    if call_counts[specification] != int(count):
        return
    if action.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, action))
    elif action:
        code = getattr(errno, action)
        raise OSError(code, os.strerror(code))
    else:
        os.kill(os.getpid(), signal.SIGKILL)
