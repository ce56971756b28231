"""The arena page in a browser."""

import csv
import io
from pathlib import Path

import pytest
from test_browser import browser, pytestmark

from flrce.cli import cli

__all__ = ["browser", "pytestmark"]  # fixtures and marks of this module too


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    """The committed arena's page, made anew of two of its tasks' records."""
    out = tmp_path_factory.mktemp("arena")
    committed = Path(__file__).resolve().parent.parent / "results" / "arena"
    asked = [
        "arena",
        str(committed / "plan.toml"),
        "--against",
        str(committed),
        "--out",
        str(out),
        "--json",
    ]
    assert cli.main([*asked, "--tasks", "cifar10-sizes,fed-heart"]) == 0
    return out / "arena.html"


def test_the_arena_is_offline_and_its_controls_work(browser, arena):
    from selenium.webdriver.support.ui import Select

    browser.size(1200)
    browser.driver.get_log("browser")
    browser.open(arena)
    assert [
        url for url in browser.requests() if not url.startswith(("file:", "data:", "blob:"))
    ] == []
    first = browser.find("#board tbody").text
    Select(browser.find("#axis")).select_by_value("bytes")
    assert browser.find("#board tbody").text != first
    assert "bytes" in browser.find("#saving").text
    dots = len(browser.all("#fronts circle"))
    browser.click("#legend button")
    assert len(browser.all("#fronts circle")) < dots
    browser.click("#legend .every:last-child")
    assert len(browser.all("#fronts circle")) == 0
    browser.click("#legend button")
    assert len(browser.all("#fronts circle")) == 2  # one method, two tasks
    browser.click("#board thead th:nth-child(2)")
    ranks = [float(cell.text) for cell in browser.all("#board tbody td:nth-child(2)")]
    assert ranks == sorted(ranks)
    rows = list(csv.reader(io.StringIO(browser.download("arena-bytes.csv", "#csv").decode())))
    assert len(rows) == 1 + len(ranks)
    assert [entry["message"] for entry in browser.driver.get_log("browser")] == []


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_arena_fits_phones_and_the_dark(browser, arena, width, scheme):
    browser.size(width)
    browser.media(prefers_color_scheme=scheme)
    browser.open(arena)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run("return matchMedia('(prefers-color-scheme: dark)').matches") == (
        scheme == "dark"
    )


def test_two_seeds_show_both_values_and_nothing_beyond_the_metric(browser, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        "seeds = [1, 2]\n[tasks.d]\nrounds = 2\nclients = 4\nper_round = 2\n"
        "train = { epochs = 1 }\n[methods.fedavg]\n[methods.fedadam]\n"
    )
    assert cli.main(["arena", str(plan), "--out", str(tmp_path / "out"), "--json"]) == 0
    browser.size(1200)
    browser.open(tmp_path / "out" / "arena.html")
    scores = [cell.text for cell in browser.all("#board td:last-child")]
    assert all(" to " in score for score in scores)
    ends = browser.run(
        "return D.fronts.joules.map((p) => spread({n: 5, mean: p.value.mean, half: 9}, p.task))"
    )
    assert ends == [[0, 1], [0, 1]]
    assert len(browser.all("#cards article p")) == 2
