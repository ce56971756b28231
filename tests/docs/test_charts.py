"""The charts of the research pages show the tables of these pages."""

import sys

import pytest

from reading import ROOT

pytest.importorskip("matplotlib")
sys.path.insert(0, str(ROOT / "docs" / "scripts"))
import charts


def test_intervals_are_read_in_every_form_that_pages_use():
    assert charts.parse_interval("+1.19 ± 1.10") == pytest.approx((1.19, 0.09, 2.29))
    assert charts.parse_interval("0.97 [0.89, 1.05]") == (0.97, 0.89, 1.05)
    assert charts.parse_interval("0.30 (0.24 to 0.37)") == (0.30, 0.24, 0.37)
    assert charts.parse_interval("1.53 (1.48-1.63)") == (1.53, 1.48, 1.63)
    assert charts.parse_interval("**22.0**") == (22.0, 22.0, 22.0)
    assert charts.parse_interval("\N{MINUS SIGN}0.5 ± 0.7") == pytest.approx((-0.5, -1.2, 0.2))
    assert charts.parse_interval("") is None


@pytest.mark.parametrize("chart", charts.CHARTS, ids=lambda chart: chart.page)
def test_every_chart_has_rows_and_its_page_shows_it(chart):
    assert len(charts.select_rows(chart)) >= 3
    assert f"(img/{chart.page}.svg)" in (charts.PAGES / f"{chart.page}.md").read_text()
    assert (charts.PAGES / "img" / f"{chart.page}.svg").is_file()
