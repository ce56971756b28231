"""Run a notebook top to bottom without Jupyter and keep what it shows.

python docs/scripts/notebook.py [NOTEBOOK]
"""

import ast
import base64
import io
import os
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_output

NOTEBOOK = Path(__file__).resolve().parent.parent / "quickstart.ipynb"


def run(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run every code cell in one namespace; keep what it printed and the value of its last line."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for count, cell in enumerate([c for c in notebook.cells if c.cell_type == "code"], 1):
        printed = io.StringIO()
        with redirect_stdout(printed):
            value = execute(cell.source, names)
        cell.execution_count, cell.outputs = count, []
        if printed.getvalue():
            cell.outputs.append(new_output("stream", name="stdout", text=printed.getvalue()))
        if value is not None:
            cell.outputs.append(
                new_output("execute_result", data=shown(value), execution_count=count)
            )
    return notebook


def execute(source: str, names: dict[str, Any]) -> Any:
    """A cell's statements, and its last line's value where that is an expression."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None  # type: ignore[attr-defined]
    exec(compile(tree, "<cell>", "exec"), names)
    return eval(compile(last, "<cell>", "eval"), names) if last else None


def shown(value: Any) -> dict[str, str]:
    """A value as Jupyter would show it: text, and a picture of figures."""
    data = {"text/plain": repr(value)}
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=80)
        data["image/png"] = base64.b64encode(picture.getvalue()).decode()
    return data


def main(path: Path = NOTEBOOK) -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        run(notebook)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
