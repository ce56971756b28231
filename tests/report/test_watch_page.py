"""The page of `flrce watch` in a real browser: it follows runs, survives its server's restart, and
names stay text.
"""

import shutil
import threading
import time
from contextlib import contextmanager

import pytest
from test_browser import browser as browser
from test_browser import pytestmark as pytestmark

from flrce.cli.watch_server import HOST, build_watch_server
from flrce.report.live import RunWatcher
from report_helpers import HOSTILE, compared, hostile


@contextmanager
def serving(place, port=0):
    with build_watch_server(RunWatcher([place]), port, "key") as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()


def opened(browser, web, width=1200):
    browser.media(prefers_color_scheme="light")
    browser.size(width)
    browser.driver.get_log("performance")
    browser.driver.get_log("browser")
    browser.driver.get(f"http://{HOST}:{web.server_port}/key/")
    wait(browser, "return document.documentElement.dataset.ready === 'true'")


def wait(browser, script, seconds=15):
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        found = browser.run(script)
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"never: {script}")


@pytest.fixture
def copied(tmp_path):
    """A run of which rounds are still to come: its ledger is cut back to five lines."""
    shutil.copytree(compared() / "flrce-no-stop" / "seed-0", tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "checkpoint")  # it and the seal would know the other rounds
    (tmp_path / "a" / "checksums.json").unlink()
    path = tmp_path / "a" / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]))
    return tmp_path, path, lines


def test_it_follows_a_run_and_asks_nobody_else(browser, copied):
    place, path, lines = copied
    with serving(place) as web:
        opened(browser, web)
        assert "5 of 16" in browser.find("#runs").text
        assert "interrupted" in browser.find("#runs").text
        before = browser.picture("course")
        with path.open("ab") as file:
            file.write(b"".join(lines[5:]))
        wait(browser, "return document.querySelector('#runs').textContent.includes('16 of 16')")
        assert browser.picture("course") != before
        assert "finished" in browser.find("#runs").text
        inside = f"http://{HOST}:{web.server_port}/key/"
        asked = [url for url in browser.requests() if not url.startswith(inside)]
        assert [
            url for url in asked if "favicon" not in url and not url.startswith(("data:", "blob:"))
        ] == []
        errors = [
            entry
            for entry in browser.driver.get_log("browser")
            if "favicon" not in entry["message"]
        ]
        assert errors == []


def test_it_outlives_its_server(browser, copied):
    place, _, _ = copied
    with serving(place) as web:
        opened(browser, web)
        port = web.server_port
    wait(browser, "return document.querySelector('#pulse').className === 'lost'")
    assert "runs go on without it" in browser.find("#pulse").text
    assert "5 of 16" in browser.find("#runs").text  # what was known stays
    with serving(place, port):
        wait(browser, "return document.querySelector('#pulse').className === ''")


def test_names_stay_text(browser):
    with serving(hostile()) as web:
        opened(browser, web)
        text = browser.find("#facts").text + browser.find("#trained").text
        assert browser.driver.title == "flrce watch"
        assert browser.all("#one img, #one b, #one script") == []
        assert sum(name in text for name in HOSTILE) >= 1
        assert browser.run("return document.querySelectorAll('#trained rect').length") > 5


def test_a_row_picks_its_run(browser):
    with serving(compared()) as web:
        opened(browser, web)
        rows = browser.all("#runs tbody tr")
        assert len(rows) == 6
        heads = set()
        for i in range(6):
            browser.click(f"#runs tbody tr:nth-child({i + 1}) button")
            heads.add(browser.find("#h-one").text)
        assert len(heads) == 6
        assert len(browser.all("#runs tbody tr[aria-selected='true']")) == 1


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (380, "light")])
def test_it_fits(browser, width, scheme):
    with serving(compared()) as web:
        opened(browser, web, width)
        browser.media(prefers_color_scheme=scheme)
        time.sleep(0.2)
        wide = browser.run(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide <= 0
        paper = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(22, 24, 27)") == (scheme == "dark")
