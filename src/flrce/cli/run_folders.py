"""Where runs live when nobody says: runs/NAME-DATE; which there are; and the experiment that a
folder holds.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from flrce.errors import BadInput
from flrce.report.endings import describe_state
from flrce.simulation.stop_memory import SEEDS_FILE
from flrce.storage.disk import PRIVATE_FOLDER, make_folder
from flrce.storage.limited import read_limited
from flrce.storage.manifest import known_marks
from flrce.storage.read import parse_lines, read_settings, run_folders, validate_round_line
from flrce.storage.seal import DamagedRun, FileMarks, read_lines

RUNS_FOLDER = Path("runs")
MAX_FOLDER_DEPTH = 3  # a folder of recipes, of seeds, of runs


@dataclass(frozen=True)
class RunOverview:
    """A run directory at a glance."""

    folder: Path
    recipe: str
    data: str
    seed: int
    rounds: int  # committed
    T: int
    # "finished", "stopped early", "unfinished"; "damaged" where figures are not as they were
    # written
    state: str
    metric: str
    value: float | None
    changed: float  # seconds since 1970


def create_run_folder(name: str, root: Path = RUNS_FOLDER, now: datetime | None = None) -> Path:
    """A folder for a run that has none, made now so that nobody else takes it."""
    stem = f"{name}-{now or datetime.now():%Y-%m-%d-%H%M%S}"
    for i in range(1000):
        folder = root / (f"{stem}-{i + 1}" if i else stem)
        try:
            make_folder(root)
            folder.mkdir(mode=PRIVATE_FOLDER)
            return folder
        except FileExistsError:
            continue
        except OSError as why:
            raise BadInput(
                f"{folder} cannot be made: {why.strerror}; name a folder with --out, or add"
                " --no-save"
            ) from why
    raise BadInput(f"{root / stem} exists a thousand times; name a folder with --out")


def find_stored_experiment(folder: Path) -> Path:
    """The experiment of a run directory, or of the first seed in a folder of seeds."""
    for path in (folder / "experiment.toml", *sorted(folder.glob("seed-*/experiment.toml"))):
        if path.is_file():
            return path
    raise BadInput(f"--resume: {folder} holds no run; `flrce runs` lists those there are")


def read_seeds(folder: Path) -> list[int]:
    """The seeds of a folder of seeds: those that were asked for, begun or not."""
    try:
        asked = json.loads(read_limited(folder / SEEDS_FILE, 2**20))
        if (
            isinstance(asked, list)
            and asked
            and all(isinstance(seed, int) and seed >= 0 for seed in asked)
        ):
            return asked
    except (OSError, ValueError, RecursionError):
        pass  # a folder of an earlier version
    names = [
        path.parent.name.removeprefix("seed-") for path in folder.glob("seed-*/experiment.toml")
    ]
    return sorted(int(name) for name in names if name.isdigit())


def find_runs(root: Path) -> Iterator[RunOverview]:
    """Every run below a folder, the newest last."""
    if not root.is_dir():
        return
    for folder in sorted(
        run_folders(root, MAX_FOLDER_DEPTH), key=lambda place: (_get_last_write_time(place), place)
    ):
        try:
            marks, _ = known_marks(folder)
            yield read_run_overview(folder, marks)
        except DamagedRun:
            yield RunOverview(
                folder,
                "--",
                "--",
                0,
                0,
                0,
                "damaged",
                "accuracy",
                None,
                _get_last_write_time(folder),
            )
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ):
            continue  # not ours, or no run: `flrce report` says what is wrong with it


def _get_last_write_time(folder: Path) -> float:
    """When a run's last round was written."""
    try:
        return os.stat(folder / "rounds.jsonl").st_mtime
    except OSError:
        return 0.0


def read_run_overview(folder: Path, marks: FileMarks) -> RunOverview:
    """What a run's experiment and records say, in short; `marks` are what is known of its files."""
    experiment = read_settings(folder, marks)
    records = [
        validate_round_line(row)
        for row in parse_lines(read_lines(folder / "rounds.jsonl", marks), "rounds.jsonl")
    ]
    done = [r for r in records if r.outcome == "committed"]
    seen = [r for r in records if r.last_model_metric is not None]
    T = int(experiment.get("rounds", 100))
    data = experiment.get("data", {})
    return RunOverview(
        folder,
        str(experiment.get("recipe", {}).get("name", "flrce")),
        str(data.get("path") or data.get("name", "?")),
        int(experiment.get("seed", 0)),
        len(done),
        T,
        describe_state(records, T),
        seen[-1].metric if seen else "accuracy",
        seen[-1].final_model_metric if seen else None,
        _get_last_write_time(folder),
    )
