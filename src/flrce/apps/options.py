"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from flrce.config import Experiment
from flrce.errors import BadInput

File = Annotated[Path | None, typer.Argument(help="Experiment file (TOML); without one, FLrce on the embedded digits.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key; may be repeated.")]
Out = Annotated[Path | None, typer.Option("--out", help="Run directory.")]
Seeds = Annotated[str | None, typer.Option("--seeds", help="Several seeds, such as 0,1,2 or 0-4.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last committed round.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def experiment(file: Path | None, overrides: list[str] | None, device: str | None = None) -> Experiment:
    more = [f'engine.device="{device}"'] if device else []
    return Experiment.load(file, [*(overrides or ()), *more])


def seeds(text: str | None) -> list[int] | None:
    """0,1,2 or 0-4 as a list."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            raise BadInput(f"--seeds {text!r}: {part!r} is no seed; write for example 0,1,2 or 0-4")
        found += range(int(low), int(high or low) + 1)
    if len(set(found)) < len(found) or not found:
        raise BadInput(f"--seeds {text!r} names no seed, or one twice; write for example 0,1,2 or 0-4")
    return found
