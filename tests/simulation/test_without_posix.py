"""The simulator with PyTorch needs no module that only POSIX systems have, unless a run is saved."""

import subprocess
import sys
from pathlib import Path

import flrce

SETTINGS = {"rounds": 2, "clients": 6, "per_round": 2, "engine": {"kernel": "torch", "workers": 1}}
POSIX = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")
SCRIPT = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {POSIX}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

for name in {POSIX}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Blocked())
import flrce

print(repr(flrce.run(flrce.Experiment(**{SETTINGS})).summary["accuracy"]))
try:
    flrce.run(flrce.Experiment(**{SETTINGS}), sys.argv[1])
except flrce.BadInput as why:
    print(why)
"""


def test_a_run_without_posix_modules(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    accuracy, refusal = done.stdout.splitlines()
    assert float(accuracy) == flrce.run(flrce.Experiment(**SETTINGS)).summary["accuracy"]
    assert refusal.endswith("this system has no file locks; run without saving")
