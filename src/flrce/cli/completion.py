"""What Tab offers: recipes, data sets, keys of an experiment, experiment files, run folders; and
setting Tab up.

The words come from words.json beside this file, so that a Tab does not wait for PyTorch. `python -m
flrce.cli.completion` writes it anew from the catalogue and the experiment's settings; a test says
when that is due.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from flrce.errors import BadInput

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
MAX_FOLDER_DEPTH = 3  # folders below the one at hand in which runs are looked for
MAX_SEARCHED_FOLDERS = 200  # folders that a Tab looks into
SHELL_STARTUP_FILES = {
    "bash": ".bashrc",
    "zsh": ".zshrc",
    "fish": ".config/fish/completions/flrce.fish",
}
COMPLETION_VARIABLE = "_FLRCE_COMPLETE"


@cache
def load_words() -> dict[str, dict[str, str]]:
    """Kind -> word -> a few words about it."""
    found: dict[str, dict[str, str]] = json.loads(
        (files("flrce.cli") / "words.json").read_text("utf-8")
    )
    return found


def match_completions(found: dict[str, str], incomplete: str) -> list[CompletionItem]:
    return [
        CompletionItem(word, help=told)
        for word, told in found.items()
        if word.startswith(incomplete)
    ]


def complete_choices(*some: str) -> Completer:
    return lambda context, parameter, incomplete: match_completions(
        dict.fromkeys(some, ""), incomplete
    )


def complete_word_kind(name: str, lists: bool = False) -> Completer:
    """Words of a kind; in a list, those after its last comma."""

    def complete_word(
        context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        head, comma, last = incomplete.rpartition(",") if lists else ("", "", incomplete)
        found = {
            f"{head}{comma}{word}": told
            for word, told in load_words()[name].items()
            if word not in head.split(",")
        }
        return match_completions(found, f"{head}{comma}{last}")

    return complete_word


recipe, recipes, data = (
    complete_word_kind("recipes"),
    complete_word_kind("recipes", lists=True),
    complete_word_kind("data"),
)


def complete_setting_keys(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """`key=`, then what the key takes where that is a short list."""
    key, equals, _ = incomplete.partition("=")
    if not equals:
        return match_completions(
            {f"{name}=": told for name, told in load_words()["keys"].items()}, incomplete
        )
    values = {"recipe.name": load_words()["recipes"], "data.name": load_words()["data"]}.get(
        key, {}
    )
    return match_completions({f"{key}={value}": told for value, told in values.items()}, incomplete)


def complete_experiments(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    found = sorted([*Path(".").glob("*.toml"), *Path(".").glob("experiments/*.toml")])
    named = {str(path): "" for path in found if path.name != "pyproject.toml"}
    return match_completions(named, incomplete) or [CompletionItem(incomplete, type="file")]


def complete_data_or_experiments(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Data sets; where none begins so, experiments that have some."""
    return data(context, parameter, incomplete) or complete_experiments(
        context, parameter, incomplete
    )


def complete_run_folders(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Folders that hold a run, or whose folders do."""
    start = Path(incomplete if incomplete.endswith("/") else os.path.dirname(incomplete) or ".")
    found: dict[str, str] = {}
    looked, level = 0, [start]
    for _ in range(MAX_FOLDER_DEPTH):
        inner = [
            path
            for folder in level
            if folder.is_dir()
            for path in sorted(folder.iterdir())
            if _is_searchable_folder(path)
        ]
        looked += len(inner)
        for path in inner:
            if (path / "rounds.jsonl").is_file():
                found |= {
                    str(parent): "runs"
                    for parent in path.parents
                    if parent != start and start in parent.parents
                }
                found[str(path)] = "a run"
        if looked > MAX_SEARCHED_FOLDERS:
            break
        level = inner
    return match_completions(dict(sorted(found.items())), incomplete) or [
        CompletionItem(incomplete, type="dir")
    ]


def _is_searchable_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".") and path.name != "checkpoint"


def build_completion_script(app: click.Command, shell: str | None = None) -> tuple[str, str]:
    """(shell, the script that completes in it); of the shell this runs in unless named."""
    name = shell or Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(name)
    if kind is None or name not in SHELL_STARTUP_FILES:
        raise BadInput(
            f"completion for {name or 'an unknown shell'}: there is one for"
            f" {', '.join(SHELL_STARTUP_FILES)}; set SHELL"
        )
    try:
        return name, kind(app, {}, "flrce", COMPLETION_VARIABLE).source()
    except RuntimeError as why:  # click asks bash for its version
        raise BadInput(f"completion: {why}") from why


def install_completion_script(app: click.Command) -> str:
    """Set Tab up for the shell this runs in; where it was written."""
    shell, text = build_completion_script(app)
    home = Path.home()
    try:
        if shell == "fish":
            target = home / SHELL_STARTUP_FILES[shell]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            return str(target)
        kept = home / ".local" / "share" / "flrce" / f"complete.{shell}"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text)
        target, line = home / SHELL_STARTUP_FILES[shell], f'. "{kept}"  # flrce completion'
        before = target.read_text() if target.exists() else ""
        if line not in before.splitlines():
            with target.open("a") as startup:
                startup.write(
                    f"{'' if not before or before.endswith(chr(10)) else chr(10)}{line}\n"
                )
    except OSError as why:
        raise BadInput(
            f"completion cannot be written to {why.filename}: {why.strerror}; place `flrce"
            " --show-completion` by hand"
        ) from why
    return str(target)


def collect_words() -> dict[str, dict[str, str]]:
    """The words as the catalogue and the experiment's settings have them now."""
    from flrce.config.compose import RECIPE_FLAGS, list_recipe_settings
    from flrce.config.experiment import Experiment
    from flrce.core.pieces import ROLES
    from flrce.data.sources import DATASET_NAMES
    from flrce.methods.catalogue.recipes import CATALOGUE, summarize_recipe

    settings: dict[str, str] = {}
    for name, field in Experiment.model_fields.items():
        section: Any = field.annotation
        if name == "recipe":
            own = {key for make in CATALOGUE.values() for key in list_recipe_settings(make)}
            settings |= {
                f"recipe.{key}": ""
                for key in ("name", "base", *sorted(own), *ROLES, "minimum", *RECIPE_FLAGS)
            }
        elif hasattr(section, "model_fields"):
            settings |= {f"{name}.{key}": "" for key in section.model_fields}
        else:
            settings[name] = ""
    about = {name: summarize_recipe(name) for name in CATALOGUE}
    return {"recipes": about, "data": dict.fromkeys(sorted(DATASET_NAMES), ""), "keys": settings}


if __name__ == "__main__":
    Path(__file__).with_name("words.json").write_text(json.dumps(collect_words(), indent=1) + "\n")
    print("wrote words.json", file=sys.stderr)
