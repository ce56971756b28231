"""The study of advice: its tables come out of the committed lines as the page has them."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "studies"))

import advise as study  # noqa: E402


def test_the_tables_of_the_page_are_those_of_the_lines(capsys):
    tasks = [*study.PLAN["confirm"], *study.PLAN["develop"]]
    study.print_table(study.read_lines(ROOT / "studies" / "lines"), tasks)
    page = (ROOT / "docs" / "advice.md").read_text().splitlines()
    rows = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(rows) > 40
    assert [row for row in rows if row not in page] == []


def test_every_search_cost_less_than_a_quarter():
    lines = study.read_lines(ROOT / "studies" / "lines").values()
    shares = [line["searched"] / line["joules"] for line in lines if "searched" in line]
    assert len(shares) == 26
    assert max(shares) < 0.25
