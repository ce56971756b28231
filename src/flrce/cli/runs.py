"""flrce runs"""

from datetime import datetime
from pathlib import Path

from flrce.cli import run_folders
from flrce.cli.terminal import print_table
from flrce.errors import BadInput
from flrce.storage import metric_format as words


def list_runs(folder: Path | None, as_json: bool) -> None:
    """Every run below a folder, the newest last."""
    root = folder or run_folders.RUNS_FOLDER
    if folder is not None and not folder.is_dir():
        raise BadInput(f"{folder} is no folder; name one that holds runs")
    rows = [
        [
            str(each.folder),
            each.recipe,
            each.data,
            *format_run_counts(each),
            each.state,
            "--"
            if each.value is None
            else f"{each.metric} {words.format_metric_value(each.metric, each.value)}",
            f"{datetime.fromtimestamp(each.changed):%Y-%m-%d %H:%M}",
        ]
        for each in run_folders.find_runs(root)
    ]
    heads = ("folder", "recipe", "data", "seed", "rounds", "state", "final model", "last round")
    if not rows and not as_json:
        print(f"no runs in {root}; `flrce run` makes one")
        return
    print_table(
        f"runs in {root}",
        heads,
        rows,
        as_json,
        left=("folder", "recipe", "data", "state", "last round"),
    )
    if not as_json and any(row[5] == "unfinished" for row in rows):
        print("continue an unfinished run with: flrce run --out FOLDER --resume")
    if not as_json and any(row[5] == "damaged" for row in rows):
        print("files of a damaged run are not as they were written: flrce verify FOLDER names them")


def format_run_counts(each: run_folders.RunOverview) -> tuple[str, str]:
    """A run's seed and how far it is; of a damaged one neither is known."""
    return (
        ("--", "--") if each.state == "damaged" else (str(each.seed), f"{each.rounds} of {each.T}")
    )
