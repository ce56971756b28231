"""The README stays short, uses public names only, and quotes the committed results."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from reading import DOCS, ROOT, blocks, script

sys.path.insert(0, str(ROOT / "research" / "studies"))

import headline_tables
import savings_tables

README = (ROOT / "README.md").read_text()


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 900


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda p: p.name)
def test_first_pages_import_public_names_only(page: Path) -> None:
    code = "\n".join(block.text for block in blocks(page) if block.kind == "python")
    modules = set(re.findall(r"^(?:from|import) (flrce[\w.]*)", code, re.MULTILINE))
    assert modules <= {"flrce", "flrce.methods.catalogue.recipes", "flrce.flower"}


def test_first_pages_open_alike() -> None:
    index = (DOCS / "index.md").read_text()
    assert README.split("\n\n")[:2] == index.split("\n\n")[:2]


def read_savings(name: str) -> tuple[dict[str, Any], dict[Any, Any], Path]:
    """A plan of the savings, its runs, and their folder."""
    folder = ROOT / "research" / "results" / name
    plan = json.loads((ROOT / "research" / "studies" / "plans" / f"{name}.json").read_text())
    return plan, savings_tables.read_lines(folder), folder


def test_readme_quotes_the_savings() -> None:
    plan, lines, _ = read_savings("savings-fresh")
    rows = list(savings_tables.build_rows(plan, lines))
    cells = next(row for row in rows if row[:2] == ["all tasks", "frugal"])
    for cell in (cells[4], cells[5], cells[6]):  # bytes to both targets, joules to the first
        assert f"{cell} times fewer" in README
    page = (ROOT / "research" / "docs" / "savings.md").read_text()
    for row in rows:
        if row[1] == "frugal":
            assert " | ".join(row[4:8]) in page


@pytest.mark.parametrize("name", ["savings", "savings-fresh"])
def test_committed_table_of_the_savings_is_of_the_committed_runs(name: str, tmp_path: Path) -> None:
    plan, lines, folder = read_savings(name)
    savings_tables.format_tables(plan, lines, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == (folder / "savings.csv").read_text()


def test_readme_quotes_the_cost_of_a_target() -> None:
    made = headline_tables.tables(ROOT / "research" / "results" / "headline")
    for cost in ("joules", "bytes"):
        cells = made[f"headline-{cost}"].strip().splitlines()[-1].split("|")
        assert f"{cells[7].strip()} times" in README  # FLrce's former default with 4 bits


def test_readme_quotes_the_study_of_the_stop() -> None:
    """The page's table is made again from the records by research/tests/test_stop_study.py."""
    page = (ROOT / "research" / "docs" / "stop.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| reports (the default)"))
    for cell in row.split("|")[2:4]:  # trust, thrift
        assert f"{cell.strip()} %" in README


def test_readme_quotes_the_benchmark_of_simulators() -> None:
    text = (ROOT / "benchmarks" / "results" / "peers.md").read_text()
    line = next(line for line in text.splitlines() if "in seconds by the clock" in line)
    for ratio in re.findall(r"[\d.]+ \([\d.]+-[\d.]+\)", line):
        assert ratio in README


def test_picture_of_the_savings_is_of_the_committed_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = script("savings")
    ratios = picture.read_task_ratios("frugal", "bytes")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert f"{mean:.1f} [" in README
    picture.main(tmp_path / "picture.svg")
    ElementTree.parse(tmp_path / "picture.svg")
    assert (DOCS / "img" / "savings.svg").exists()
