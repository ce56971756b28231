"""The command line. Exit codes: 0 done, 1 defect, 2 bad input, 130 interrupted."""

import signal
import sys

import click

from flrce.cli.commands import app
from flrce.core.user_code import apply_trust, trust_file
from flrce.errors import (
    BadInput,
    Diverged,
    InterruptedRun,
    UnfinishedRun,
    explain_shortage,
    unusable_path,
)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    signal.signal(signal.SIGTERM, _raise_termination)
    try:
        with apply_trust(trust_file(None)):
            code = app.main(arguments, prog_name="flrce", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (BadInput, click.ClickException) as why:
        text = why.format_message() if isinstance(why, click.ClickException) else str(why)
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
        return 2
    except UnfinishedRun as why:
        words = {InterruptedRun: "interrupted", Diverged: "diverged:"}
        word = next((word for kind, word in words.items() if isinstance(why, kind)), "stopped:")
        print(f"{word} {' '.join(str(why).split())}", file=sys.stderr)
        return 130
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except _TerminationSignal as why:
        print(" ".join(["terminated", *getattr(why, "__notes__", ())]), file=sys.stderr)
        return 143
    except Exception as why:
        text = explain_shortage(why) or unusable_path(why)
        if not text:
            raise
        print(f"error: {text}", file=sys.stderr)
        return 2


class _TerminationSignal(BaseException):
    pass


def _raise_termination(*_: object) -> None:
    raise _TerminationSignal


if __name__ == "__main__":
    sys.exit(main())
