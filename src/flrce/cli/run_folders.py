"""flrce runs; names of run directories, and the experiment and seeds that a directory holds."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from flrce.cli.terminal import print_table
from flrce.errors import BadInput
from flrce.report.live import RunWatcher
from flrce.simulation.stop_memory import SEEDS_FILE
from flrce.storage.disk import PRIVATE_FOLDER_MODE, make_folder
from flrce.storage.limited import read_limited

RUNS_FOLDER = Path("runs")
MAX_NAME_TRIES = 1000
MAX_SEEDS_FILE_BYTES = 2**20
TABLE_HEADINGS = (
    *("folder", "recipe", "data", "seed", "rounds"),
    *("state", "final model", "last round"),
)
TEXT_COLUMNS = ("folder", "recipe", "data", "state", "last round")


def list_runs(folder: Path | None, as_json: bool) -> None:
    """List every run below a folder, the newest last."""
    root = folder or RUNS_FOLDER
    runs = find_runs(root) if folder is not None or root.is_dir() else []
    if not runs and not as_json:
        print(f"no runs in {root}; `flrce run` starts one")
        return
    rows = [format_run_row(run) for run in runs]
    print_table(f"runs in {root}", TABLE_HEADINGS, rows, as_json, left=TEXT_COLUMNS)
    states = {row[TABLE_HEADINGS.index("state")] for row in rows}
    if not as_json and "interrupted" in states:
        print("to continue an interrupted run: flrce run --out FOLDER --resume")
    if not as_json and "damaged" in states:
        print("files of a damaged run have changed; to list them: flrce verify FOLDER")


def find_runs(root: Path) -> list[dict[str, Any]]:
    """Views of the runs below a folder (report.live), the newest last; unreadable ones left out."""
    views = RunWatcher([root]).take_snapshot()
    readable = [view for view in views if not view["state"].startswith("unreadable")]
    return sorted(readable, key=lambda view: (view.get("last", 0.0), view["folder"]))


def format_run_row(run: dict[str, Any]) -> list[str]:
    if "t" not in run:  # damaged
        return [run["folder"], "--", "--", "--", "--", run["state"].partition(":")[0], "--", "--"]
    metric = "--" if run["value"] is None else f"{run['metric']['name']} {run['shown']}"
    last = f"{datetime.fromtimestamp(run['last']):%Y-%m-%d %H:%M}" if run["last"] else "--"
    rounds = f"{run['t']} of {run['T']}"
    seed = str(run["seed"])
    return [run["folder"], run["recipe"], run["data"], seed, rounds, run["state"], metric, last]


def create_run_folder(name: str, root: Path = RUNS_FOLDER, now: datetime | None = None) -> Path:
    """Create a new folder NAME-DATE for a run."""
    stem = f"{name}-{now or datetime.now():%Y-%m-%d-%H%M%S}"
    for i in range(MAX_NAME_TRIES):
        folder = root / (f"{stem}-{i + 1}" if i else stem)
        try:
            make_folder(root)
            folder.mkdir(mode=PRIVATE_FOLDER_MODE)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise BadInput(
                f"cannot create {folder}: {error.strerror}; name a folder with --out, or add"
                " --no-save"
            ) from error
    raise BadInput(f"{root / stem} exists {MAX_NAME_TRIES} times; name a folder with --out")


def find_stored_experiment(folder: Path) -> Path:
    """The experiment file of a run directory, or of the first seed in a folder of seeds."""
    for path in (folder / "experiment.toml", *sorted(folder.glob("seed-*/experiment.toml"))):
        if path.is_file():
            return path
    raise BadInput(f"--resume: {folder} holds no run; `flrce runs` lists all runs")


def read_seeds(folder: Path) -> list[int]:
    """The requested seeds of a folder of seeds, started or not."""
    try:
        seeds = json.loads(read_limited(folder / SEEDS_FILE, MAX_SEEDS_FILE_BYTES))
        if isinstance(seeds, list) and seeds and all(isinstance(s, int) and s >= 0 for s in seeds):
            return seeds
    except (OSError, ValueError, RecursionError):
        pass  # a folder of an earlier version
    paths = folder.glob("seed-*/experiment.toml")
    names = [path.parent.name.removeprefix("seed-") for path in paths]
    return sorted(int(name) for name in names if name.isdigit())
