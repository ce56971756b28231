"""The manual as a whole: its size, its spelling, and that a reader can get to every page."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from reading import DOCS, RESEARCH, ROOT

MAX_WORDS = 35_000
MAX_LINES = 100  # of a how-to guide
MAX_WORDS_OF_A_CHANGE = 20


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, which has values from the environment."""


Loader.add_constructor("!ENV", lambda loader, node: None)


def read_navigation() -> dict[str, Any]:
    """Part of the manual -> its pages, or groups of them."""
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    return {title: pages for part in site["nav"] for title, pages in part.items()}


def list_pages(part: Any) -> list[str]:
    """The pages of a part of the navigation, in order."""
    if isinstance(part, str):
        return [part]
    values = part.values() if isinstance(part, dict) else part
    return [page for value in values for page in list_pages(value)]


def test_the_manual_has_four_parts_and_the_research_book() -> None:
    parts = ["Quick start", "Tutorials", "How to", "Reference", "Explanation", "Research"]
    assert list(read_navigation()) == parts


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list_pages(read_navigation())
    pages = [path.name for path in DOCS.glob("*.md")]
    pages += [f"research/{path.name}" for path in RESEARCH.glob("*.md")]
    assert sorted(listed) == sorted(pages)


def test_the_manual_is_short() -> None:
    """Without tables that are made from the code when the site is built."""
    assert sum(len(page.read_text().split()) for page in DOCS.glob("*.md")) <= MAX_WORDS


@pytest.mark.parametrize("name", list_pages(read_navigation()["How to"]))
def test_guides_are_short(name: str) -> None:
    assert len((DOCS / name).read_text().splitlines()) <= MAX_LINES


def test_lines_of_the_changelog_are_short() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert re.findall(r"^### (\w+)", newest, re.MULTILINE) == [
        "Added",
        "Changed",
        "Fixed",
        "Removed",
    ]
    changes = re.findall(r"^- (.*)$", newest, re.MULTILINE)
    assert [line for line in changes if len(line.split()) > MAX_WORDS_OF_A_CHANGE] == []
    assert "unreleased" not in newest.lower()


def spell(*paths: Path | str) -> str:
    """What codespell says, with the settings of pyproject.toml; "" if all is well."""
    pytest.importorskip("codespell_lib")
    command = [sys.executable, "-m", "codespell_lib", *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def test_the_spelling_check_finds_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("The clients recieve a model.\n")
    assert "recieve ==> receive" in spell(tmp_path / "page.md")


def test_pages_and_docstrings_are_spelled_right() -> None:
    assert spell() == ""
