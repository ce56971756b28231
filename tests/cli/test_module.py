"""`python -m flrce` is the command line."""

import subprocess
import sys

from flrce.version import __version__


def test_module_runs_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flrce", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"flrce {__version__}")


def test_module_returns_exit_codes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flrce", "run", "missing.toml"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "missing.toml" in done.stderr
