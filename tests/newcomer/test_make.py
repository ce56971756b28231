"""`make test` reports all its parts, and none of them is empty."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from flrce.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def variable(name: str) -> list[str]:
    """Its words; a backslash at a line's end goes on in the next."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    return re.search(rf"^{name} := (.*)$", text, re.MULTILINE)[1].split()


@pytest.mark.parametrize(("broken", "code"), [((), 0), (("types",), 1), (("lint", "faults"), 1)])
def test_every_part_is_run_and_reported(tmp_path, broken, code):
    """Whatever fails: a stand-in for make says which parts were asked for."""
    stand_in = tmp_path / "make"
    stand_in.write_text(f'#!/bin/sh\ncase " {" ".join(broken)} " in *" $2 "*) exit 1;; esac\n')
    stand_in.chmod(0o755)
    told = subprocess.run(
        [ROOT / ".ci" / "parts", *variable("PARTS")],
        env={**os.environ, "MAKE": str(stand_in)},
        capture_output=True,
        text=True,
    )
    assert told.returncode == code
    lines = told.stdout.partition("==> parts\n")[2].splitlines()
    assert [line.split()[:2] for line in lines] == [
        [part, "FAILED" if part in broken else "passed"] for part in variable("PARTS")
    ]


def test_the_citation_is_of_this_version():
    """CITATION.cff: the required keys, and the version that the package has."""
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version"} <= cited.keys()
    assert cited["version"] == __version__
    assert cited["references"][0]["doi"] in (ROOT / "README.md").read_text()


def test_every_extra_is_explained_and_pinned():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    readme, pins = (
        (ROOT / "README.md").read_text(),
        (ROOT / "constraints.txt").read_text().lower().replace("_", "-"),
    )
    for name, needed in extras.items():
        assert name in ("dev", "docs") or f"`{name}`" in readme, name
        for one in needed:
            wanted = re.match(r"[\w.-]+", one)[0].lower().replace("_", "-")
            assert f"\n{wanted}==" in pins, one


def test_pins_go_with_the_first_python_that_is_promised():
    """Debian's 3.11.2 is a Python 3.11: a pin that asks for a later one leaves `make` without a
    solution.
    """
    pins = (ROOT / "constraints.txt").read_text()
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", pins, re.MULTILINE):
        try:
            found = metadata(name)
        except PackageNotFoundError:
            continue  # of an extra that is not installed here
        asked = found["Requires-Python"] or ""
        assert found["Version"] != version or SpecifierSet(asked).contains("3.11.0"), (
            f"{name} {version}: {asked}"
        )


def test_the_parts_are_targets_and_their_tests_exist():
    text = (ROOT / "Makefile").read_text()
    assert set(variable("PARTS")) <= set(re.findall(r"^(\w+):", text, re.MULTILINE))
    numbers = [ROOT / "tests" / f"{name}.py" for name in variable("NUMBERS")]
    assert [path for path in numbers if not path.exists()] == []
    apart = [*variable("CRASHES"), *variable("WALKS"), "research/tests"]
    assert [name for name in apart if not (ROOT / name).exists()] == []
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_what_check_leaves_out_is_run_by_test():
    """A file that `make unit` ignores has a part of its own; those that take longest are begun
    first.
    """
    text = (ROOT / "Makefile").read_text()
    assert "$(WALKS:%=--ignore %)" in text
    assert "$(TEST) $(WALKS) -n 2" in text
    assert "$(TEST) research/tests -n 2" in text
    assert {"unit", "walks", "research"} <= set(variable("PARTS"))
    assert "parts lint types quick\n" in text
    assert '\t$(UNIT) -m "not slow and not nightly"\n' in text
    assert "\t$(UNIT)\n" in text
    longest = re.findall(r'"(test_\w+)"', (ROOT / "conftest.py").read_text())
    assert len(longest) > 20
    folders = (ROOT / "tests", ROOT / "research" / "tests")
    assert [
        name for name in longest if not any(list(at.rglob(f"{name}.py")) for at in folders)
    ] == []


@pytest.mark.parametrize("root", [ROOT, ROOT / "research"], ids=["flrce", "flrce-research"])
def test_what_is_imported_is_declared(root):
    """Every package that the sources import is asked for by the wheel, or by one of its extras."""
    asked = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = [
        *asked["dependencies"],
        *(line for extra in asked["optional-dependencies"].values() for line in extra),
    ]
    declared = {re.split(r"[<>=\[ ]", line)[0].lower().replace("-", "_") for line in lines}
    declared |= {
        "sklearn",
        "PIL",
        "mlflow",
        "flrce",
        "triton",
    }  # other names; triton comes with torch
    declared |= {
        "pandas",
        "librosa",
        "soundfile",
        "datasets",
        "pyarrow",
    }  # named in the error where they are missing
    found = set()
    own = {path.name for path in (root / "src").iterdir()}
    for path in (root / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
    assert found - set(sys.stdlib_module_names) - declared - own == set()
