"""What Tab offers: recipes, data sets, keys of an experiment, experiment files, run folders; and setting Tab up.

The words come from words.json beside this file, so that a Tab does not wait for PyTorch. `python -m
flrce.apps.complete` writes it anew from the catalogue and the experiment's settings; a test says when that is due.
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

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
DEEPEST = 3  # folders below the one at hand in which runs are looked for
MOST = 200  # folders that a Tab looks into
SHELLS = {"bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/fish/completions/flrce.fish"}
VARIABLE = "_FLRCE_COMPLETE"


@cache
def known() -> dict[str, dict[str, str]]:
    """Kind -> word -> a few words about it."""
    found: dict[str, dict[str, str]] = json.loads((files("flrce.apps") / "words.json").read_text("utf-8"))
    return found


def items(found: dict[str, str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word, help=told) for word, told in found.items() if word.startswith(incomplete)]


def words(*some: str) -> Complete:
    return lambda context, parameter, incomplete: items(dict.fromkeys(some, ""), incomplete)


def kind(name: str, lists: bool = False) -> Complete:
    """Words of a kind; in a list, those after its last comma."""

    def offered(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        head, comma, last = incomplete.rpartition(",") if lists else ("", "", incomplete)
        found = {f"{head}{comma}{word}": told for word, told in known()[name].items() if word not in head.split(",")}
        return items(found, f"{head}{comma}{last}")

    return offered


recipe, recipes, data = kind("recipes"), kind("recipes", lists=True), kind("data")


def keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """`key=`, then what the key takes where that is a short list."""
    key, equals, _ = incomplete.partition("=")
    if not equals:
        return items({f"{name}=": told for name, told in known()["keys"].items()}, incomplete)
    values = {"recipe.name": known()["recipes"], "data.name": known()["data"]}.get(key, {})
    return items({f"{key}={value}": told for value, told in values.items()}, incomplete)


def experiments(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    found = sorted([*Path(".").glob("*.toml"), *Path(".").glob("experiments/*.toml")])
    named = {str(path): "" for path in found if path.name != "pyproject.toml"}
    return items(named, incomplete) or [CompletionItem(incomplete, type="file")]


def described(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Data sets; where none begins so, experiments that have some."""
    return data(context, parameter, incomplete) or experiments(context, parameter, incomplete)


def runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Folders that hold a run, or whose folders do."""
    start = Path(incomplete if incomplete.endswith("/") else os.path.dirname(incomplete) or ".")
    found: dict[str, str] = {}
    looked, level = 0, [start]
    for _ in range(DEEPEST):
        inner = [path for folder in level if folder.is_dir() for path in sorted(folder.iterdir()) if _plain(path)]
        looked += len(inner)
        for path in inner:
            if (path / "rounds.jsonl").is_file():
                found |= {str(parent): "runs" for parent in path.parents if parent != start and start in parent.parents}
                found[str(path)] = "a run"
        if looked > MOST:
            break
        level = inner
    return items(dict(sorted(found.items())), incomplete) or [CompletionItem(incomplete, type="dir")]


def _plain(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".") and path.name != "checkpoint"


def script(app: click.Command, shell: str | None = None) -> tuple[str, str]:
    """(shell, the script that completes in it); of the shell this runs in unless named."""
    name = shell or Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(name)
    if kind is None or name not in SHELLS:
        raise BadInput(f"completion for {name or 'an unknown shell'}: there is one for {', '.join(SHELLS)}; set SHELL")
    try:
        return name, kind(app, {}, "flrce", VARIABLE).source()
    except RuntimeError as why:  # click asks bash for its version
        raise BadInput(f"completion: {why}") from why


def install(app: click.Command) -> str:
    """Set Tab up for the shell this runs in; where it was written."""
    shell, text = script(app)
    home = Path.home()
    try:
        if shell == "fish":
            target = home / SHELLS[shell]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            return str(target)
        kept = home / ".local" / "share" / "flrce" / f"complete.{shell}"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text)
        target, line = home / SHELLS[shell], f'. "{kept}"  # flrce completion'
        before = target.read_text() if target.exists() else ""
        if line not in before.splitlines():
            with target.open("a") as startup:
                startup.write(f"{'' if not before or before.endswith(chr(10)) else chr(10)}{line}\n")
    except OSError as why:
        raise BadInput(
            f"completion cannot be written to {why.filename}: {why.strerror}; place `flrce --show-completion` by hand"
        ) from why
    return str(target)


def gathered() -> dict[str, dict[str, str]]:
    """The words as the catalogue and the experiment's settings have them now."""
    from flrce.compose import FLAGS, keys_of
    from flrce.config import Experiment
    from flrce.data.sources import NAMES
    from flrce.pieces import ROLES
    from flrce.recipes import CATALOGUE

    settings: dict[str, str] = {}
    for name, field in Experiment.model_fields.items():
        section: Any = field.annotation
        if name == "recipe":
            own = {key for make in CATALOGUE.values() for key in keys_of(make)}
            settings |= {f"recipe.{key}": "" for key in ("name", "base", *sorted(own), *ROLES, "minimum", *FLAGS)}
        elif hasattr(section, "model_fields"):
            settings |= {f"{name}.{key}": "" for key in section.model_fields}
        else:
            settings[name] = ""
    about = {name: (make.__doc__ or "").split("\n")[0] for name, make in CATALOGUE.items()}
    return {"recipes": about, "data": dict.fromkeys(sorted(NAMES), ""), "keys": settings}


if __name__ == "__main__":
    Path(__file__).with_name("words.json").write_text(json.dumps(gathered(), indent=1) + "\n")
    print("wrote words.json", file=sys.stderr)
