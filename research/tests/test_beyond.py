"""The study's tables follow from the committed runs by the committed script, and the page shows
them.
"""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "results" / "beyond"


def test_tables_and_page_are_what_the_runs_say(tmp_path):
    spec = importlib.util.spec_from_file_location("beyond", ROOT / "studies" / "beyond.py")
    beyond = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(beyond)
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "first-study.md").read_text())
    beyond.main(tmp_path, page)
    made = sorted(path.name for path in tmp_path.glob("*.md"))
    assert made == sorted([*(path.name for path in TABLES.glob("*.md")), "page.md"])
    for table in TABLES.glob("*.md"):
        assert (tmp_path / table.name).read_text() == table.read_text()
        assert (tmp_path / table.name).with_suffix(".csv").read_text() == table.with_suffix(
            ".csv"
        ).read_text()
    assert page.read_text() == (ROOT / "docs" / "first-study.md").read_text()
