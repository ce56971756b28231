"""flrce deploy init fleet experiment.toml"""

import keyword
import re
from importlib import resources
from pathlib import Path

from flrce.apps.options import look_at
from flrce.apps.targets import prepare_folder
from flrce.errors import BadInput

#: template -> path in the app
FILES = {
    "pyproject.toml": "pyproject.toml", "README.md": "README.md", "server_app.py": "@package@/server_app.py",
    "client_app.py": "@package@/client_app.py", "__main__.py": "@package@/__main__.py",
}  # fmt: skip


def init(folder: Path, file: Path | None, overrides: tuple[str, ...], own: bool, publisher: str) -> None:
    """Write a Flower app (`flwr run` works) that trains an experiment's recipe, data and model."""
    exp = look_at(file, [*overrides, 'engine.name="flower"'])
    files = render(folder.resolve().name, publisher, own)
    prepare_folder(folder, "deploy init")
    for path, text in files.items():
        _write(folder / path, text)
    _write(folder / package_of(folder.resolve().name) / "experiment.toml", exp.toml())
    print(f"wrote {folder}; next: see its README.md")


def render(name: str, publisher: str, own: bool) -> dict[str, str]:
    """The app's files: path -> text."""
    package = package_of(name)
    names = {"@name@": package.replace("_", "-"), "@package@": package, "@publisher@": publisher}
    task = "task_own.py" if own else "task.py"
    files = {**FILES, task: "@package@/task.py"}
    made = {path: _template(source) for source, path in files.items()}
    made["@package@/__init__.py"] = '"""Federated learning with flrce on Flower."""\n'
    return {_filled(path, names): _filled(text, names) for path, text in made.items()}


def package_of(name: str) -> str:
    """A folder's name as that of a Python package."""
    package = re.sub(r"\W", "_", name).lower()
    if not package.isidentifier() or keyword.iskeyword(package) or package in ("flrce", "flwr"):
        raise BadInput(f"deploy init {name!r}: no name for a Python package; use letters, digits and -")
    return package


def _template(name: str) -> str:
    return (resources.files("flrce") / "apps" / "templates" / f"{name}.txt").read_text()


def _filled(text: str, names: dict[str, str]) -> str:
    for mark, value in names.items():
        text = text.replace(mark, value)
    return text


def _write(path: Path, text: str) -> None:
    if path.exists():
        raise BadInput(f"{path} exists already; deploy init overwrites nothing: name another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
