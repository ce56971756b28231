"""Reads the documentation as a user does: a page's blocks, the commands in them, and all of them
run.

A page's blocks run in order in one folder and one namespace. A block whose first line is `#
name.ext` is also written to that file. Console lines starting with flrce run in this process, with
few rounds. Blocks marked text, sh or diff are not run; the options of the flrce commands in them
are checked (test_docs.py).
"""

import importlib.util
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from flrce.cli import cli
from flrce.config.experiment import Experiment
from flrce.devices.costs import load_profile
from flrce.methods.registry import PIECES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESEARCH = ROOT / "research" / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(RESEARCH.glob("*.md"))]
#: pages outside of the manual, whose links are checked too
OTHERS = [
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
    *(ROOT / name / "README.md" for name in ("client", "research", "research/results")),
    *sorted(ROOT.glob("examples/*/README.md")),
]
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```\s*$", re.DOTALL | re.MULTILINE)
RUN, NOT_RUN = {"console", "python", "toml"}, {"", "text", "sh", "diff"}
MOST = 4  # rounds of any documented run
NEEDS = {
    "flower.md": "flwr",
    "flower-deploy.md": "flwr",
    "tutorial-flower.md": "flwr",
    "flower-clients.md": "flwr",
    "flower-more.md": "flwr",
    "watch.md": "tensorboard",
    "data.md": "pandas",
    "data-python.md": "pandas",
}  # beyond the core


@dataclass(frozen=True)
class Block:
    line: int
    kind: str
    text: str

    @property
    def file(self) -> str | None:
        """The name in the first line, if it is a comment with one."""
        found = re.match(r"# ([\w.-]+\.\w+)\n", self.text)
        return found[1] if found else None


def name_page(page: Path) -> str:
    """A page's name in the list of tests; those of the research book are apart."""
    return f"research/{page.name}" if page.parent == RESEARCH else page.name


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        kind = found[2].split()[0] if found[2].strip() else ""
        yield Block(text[: found.start()].count("\n") + 1, kind, found[3])


def run(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """All blocks of a page, in an empty folder."""
    if name_page(page) in NEEDS:
        pytest.importorskip(NEEDS[name_page(page)])
    monkeypatch.setenv("FLRCE_DATA", str(folder / "prepared"))
    (folder / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    before, names = set(sys.modules), {"__name__": "documentation"}
    for role, pieces in PIECES.items():  # a page may name pieces of its own
        monkeypatch.setitem(PIECES, role, dict(pieces))
    try:
        for block in blocks(page):
            if block.file and block.kind in RUN:
                Path(block.file).write_text(block.text)
                monkeypatch.delitem(
                    sys.modules, Path(block.file).stem, raising=False
                )  # a namesake of another test
            if block.kind == "python":
                text = block.text
                if page.name == "gallery.md":  # its script runs it in full
                    text = re.sub(r'("rounds": |rounds=)\d+', rf"\g<1>{MOST}", text)
                exec(compile("\n" * block.line + text, str(page), "exec"), names)
            elif block.kind == "toml":
                check(block, folder / (block.file or "unnamed.toml"))
            elif block.kind == "console":
                for number, line in enumerate(block.text.splitlines(), block.line + 1):
                    capsys.readouterr()
                    assert command(line) == 0, (
                        f"{page.name}:{number} {line}: {capsys.readouterr().err}"
                    )
                    if "--json" in line:
                        json.loads(capsys.readouterr().out)
    finally:
        for name in (
            set(sys.modules) - before
        ):  # the page's own modules; another page may have its namesakes
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def check(block: Block, path: Path) -> None:
    """An experiment, an arena's plan, or a device profile."""
    tables = tomllib.loads(block.text)
    if "methods" in tables:
        from flrce_arena.plan import ArenaPlan

        ArenaPlan.from_tables(tables)
    elif set(tables) & set(Experiment.model_fields):
        Experiment.from_tables(tables)
    else:
        path.write_text(block.text)
        load_profile(str(path))


def command(line: str) -> int:
    """One line of a console block, in this process; runs are cut short."""
    prompt, *words = shlex.split(line, comments=True)
    while "=" in words[0]:
        assert words.pop(0) == "PYTHONPATH=.", (
            "the folder is on the path; other variables are not set here"
        )
    assert prompt == "$"
    assert words[0] == "flrce", f"only flrce is run here, mark the block text: {line}"
    if words[1] in ("run", "compare"):
        asked = [int(word.removeprefix("rounds=")) for word in words if word.startswith("rounds=")]
        words += ["--set", f"rounds={min([MOST, *asked])}", "--set", "train.epochs=1"]
    return cli.main(words[1:])


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
