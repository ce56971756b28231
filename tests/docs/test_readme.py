"""The README stays short, uses public names only, and quotes the committed results."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from reading import DOCS, ROOT, blocks, script

sys.path.insert(0, str(ROOT / "research" / "studies"))

import headline_tables as study

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


def test_readme_quotes_the_cost_of_a_target() -> None:
    made = study.tables(ROOT / "research" / "results" / "headline")
    for cost in ("joules", "bytes"):
        cells = [
            cell.strip() for cell in made[f"headline-{cost}"].strip().splitlines()[-1].split("|")
        ]
        uniform, default = (
            cells[4],
            cells[7],
        )  # FedAvg with the average and 32 bits; FLrce's default with 4 bits
        assert f"{uniform} times" in README
        assert f"{default} times" in README


def test_readme_quotes_the_study_of_the_stop() -> None:
    rows = (ROOT / "research" / "results" / "stop" / "confirm-rules.md").read_text().splitlines()
    cells = next(row for row in rows if "as frozen for the confirming runs" in row).split("|")
    for cell in (cells[4], cells[6]):  # trust, thrift
        assert cell.partition(" of ")[0].strip() in README


def test_readme_quotes_the_benchmark_of_simulators() -> None:
    text = (ROOT / "benchmarks" / "results" / "peers.md").read_text()
    line = next(line for line in text.splitlines() if "in seconds by the clock" in line)
    for ratio in re.findall(r"[\d.]+ \([\d.]+-[\d.]+\)", line):
        assert ratio in README


def test_picture_of_target_costs_is_of_the_committed_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = script("target_cost")
    shown = "{:.2f} [{:.2f}, {:.2f}]".format(*picture.read_ratios()["default"]["joules"])
    assert shown in README
    picture.main(tmp_path / "picture.svg")
    ElementTree.parse(tmp_path / "picture.svg")
    assert (DOCS / "img" / "target-cost.svg").exists()
