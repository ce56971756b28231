"""flrce deploy init fleet experiment.toml, flrce deploy monitor FOLDER"""

import json
import keyword
import os
import re
from importlib import resources
from pathlib import Path

from flrce.cli.grafana import build_dashboard
from flrce.cli.options import look_at
from flrce.cli.targets import prepare_folder
from flrce.errors import BadInput

#: template -> path in the app
APP_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "LICENSE": "LICENSE",
    "server_app.py": "@package@/server_app.py",
    "client_app.py": "@package@/client_app.py",
    "__main__.py": "@package@/__main__.py",
}
MONITORING_FILES = ("prometheus.yml", "alerts.yml")


def write_monitoring(folder: Path, target: str) -> None:
    """Write prometheus.yml, alerts.yml and a Grafana dashboard for `flrce watch --metrics`."""
    values = {"@target@": json.dumps(target)[1:-1]}
    for name in MONITORING_FILES:
        text = fill_placeholders(read_template(name), values)
        write_new_file(folder / name, text, "deploy monitor")
    dashboard = json.dumps(build_dashboard(), indent=2) + "\n"
    write_new_file(folder / "grafana-dashboard.json", dashboard, "deploy monitor")
    print(f"wrote {folder}; start `flrce watch RUN --metrics {target}` and Prometheus there")


def write_flower_app(
    folder: Path, file: Path | None, overrides: tuple[str, ...], own: bool, publisher: str
) -> None:
    """Write a Flower app (`flwr run` works) that trains an experiment's recipe, data and model."""
    exp = look_at(file, [*overrides, 'engine.name="flower"'])
    files = render_app_files(folder.resolve().name, publisher, own)
    prepare_folder(folder, "deploy init", private=False)
    for path, text in files.items():
        write_new_file(folder / path, text, "deploy init")
    experiment = folder / to_package_name(folder.resolve().name) / "experiment.toml"
    write_new_file(experiment, exp.to_toml(), "deploy init")
    print(f"wrote {folder}; next: see its README.md")


def render_app_files(name: str, publisher: str, own: bool) -> dict[str, str]:
    """Fill in the templates of the app: path -> text."""
    package = to_package_name(name)
    names = {"@name@": package.replace("_", "-"), "@package@": package, "@publisher@": publisher}
    task = "task_own.py" if own else "task.py"
    files = {**APP_FILES, task: "@package@/task.py"}
    texts = {path: read_template(source) for source, path in files.items()}
    texts["@package@/__init__.py"] = '"""Federated learning with flrce on Flower."""\n'
    return {
        fill_placeholders(path, names): fill_placeholders(text, names)
        for path, text in texts.items()
    }


def to_package_name(name: str) -> str:
    """Convert a folder's name to a name of a Python package."""
    package = re.sub(r"\W", "_", name).lower()
    if not package.isidentifier() or keyword.iskeyword(package) or package in ("flrce", "flwr"):
        raise BadInput(
            f"deploy init {name!r}: not a valid name of a Python package; use letters, digits and -"
        )
    return package


def read_template(name: str) -> str:
    return (resources.files("flrce") / "cli" / "templates" / f"{name}.txt").read_text()


def fill_placeholders(text: str, names: dict[str, str]) -> str:
    for placeholder, value in names.items():
        text = text.replace(placeholder, value)
    return text


def write_new_file(path: Path, text: str, command: str, mode: int = 0o644) -> None:
    """Write a file that must not exist yet; a secret file is never readable by others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise BadInput(
            f"{path} exists already; {command} overwrites no file: name another folder"
        ) from None
    with os.fdopen(handle, "w") as file:
        file.write(text)
