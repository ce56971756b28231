"""Record the quick start: runs its commands and draws what they print.

python docs/scripts/record.py [SVG]
"""

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent.parent
SVG = ROOT / "docs" / "img" / "quickstart.svg"
WIDTH, KEPT = 118, 3  # columns; lines kept at either end of a long listing

#: rich's own drawing asks a font server for its letters; this one asks nobody
OFFLINE = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def commands(page: Path = ROOT / "docs" / "index.md") -> list[str]:
    """The first console block of the quick start."""
    block = re.search(r"^```console\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert block, f"{page} has no console block"
    return [line.removeprefix("$ ") for line in block.group(1).splitlines()]


def output(command: str, folder: Path) -> list[str]:
    """What a command of flrce prints, as it would in a pipe as wide as the picture."""
    _, *arguments = shlex.split(command)
    flrce = [sys.executable, "-m", "flrce.cli.cli", *arguments]
    environment = {
        "COLUMNS": str(WIDTH),
        "PATH": "/usr/bin:/bin",
        "HOME": str(Path.home()),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        flrce,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout.rstrip().splitlines()


def shortened(lines: list[str]) -> list[str]:
    """A run's progress with its middle left out."""
    rounds = [i for i, line in enumerate(lines) if "  round " in line]
    if len(rounds) <= 2 * KEPT + 1:
        return lines
    first, last = rounds[KEPT], rounds[-KEPT]
    return [*lines[:first], f"... {last - first} more rounds ...", *lines[last:]]


def main(svg: Path = SVG, overrides: str = "") -> None:
    with tempfile.TemporaryDirectory() as name, open("/dev/null", "w") as nowhere:
        folder = Path(name)
        (folder / "experiments").symlink_to(ROOT / "experiments")
        console = Console(record=True, width=WIDTH, file=nowhere)
        for command in commands():
            console.print(Text(f"$ {command}", style="bold green"))
            more = f" {overrides}" if command.startswith("flrce run") else ""
            for line in shortened(output(command + more, folder)):
                console.print(Text(line))
            console.print()
        console.save_svg(str(svg), title="flrce", code_format=OFFLINE, unique_id="flrce")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
