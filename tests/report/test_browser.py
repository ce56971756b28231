"""The report in a real browser: it stays silent and offline, its controls change the picture, names
stay text.
"""

import csv
import io
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import flrce
from flrce.report import page
from flrce.storage import read
from report_helpers import HOSTILE, compared, hostile

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
try:
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select
except ImportError:
    webdriver = None
MISSING = [
    name
    for name, found in {"chromium": CHROMIUM, "chromedriver": DRIVER, "selenium": webdriver}.items()
    if not found
]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"no browser to test with: {', '.join(MISSING)} not found"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--window-size=1200,1000",
)


class Page:
    """A report open in the browser."""

    def __init__(self, driver, downloads: Path) -> None:
        self.driver, self.downloads = driver, downloads

    def open(self, path: Path) -> float:
        """Load the page; the seconds until it was drawn."""
        self.driver.get_log("performance")
        start = time.perf_counter()
        self.driver.get(path.as_uri())
        assert self.run("return document.documentElement.dataset.ready") == "true"
        return time.perf_counter() - start

    def run(self, script: str, *arguments):
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        self.run("arguments[0].click()", self.find(selector))

    def picture(self, chart: str) -> str:
        return self.run(
            "return document.querySelector(arguments[0]).outerHTML", f"#{chart} .canvas svg"
        )

    def media(self, **features: str) -> None:
        wanted = [
            {"name": name.replace("_", "-"), "value": value} for name, value in features.items()
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})

    def size(self, width: int, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        time.sleep(0.3)  # observers of size run after layout

    def download(self, name: str, selector: str) -> bytes:
        target = self.downloads / name
        target.unlink(missing_ok=True)
        self.click(selector)
        for _ in range(100):
            if target.exists() and target.stat().st_size:
                return target.read_bytes()
            time.sleep(0.1)
        raise AssertionError(f"{name} was not downloaded; found {list(self.downloads.iterdir())}")

    def requests(self) -> list[str]:
        """Addresses asked for since the page was opened."""
        events = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        return [
            e["params"]["request"]["url"]
            for e in events
            if e["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=DRIVER)
    )
    downloads = tmp_path_factory.mktemp("downloads")
    driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)}
    )
    yield Page(driver, downloads)
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return page.write_report([compared()], tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture
def shown(browser, report):
    """The report, freshly opened on a desktop in light colours."""
    browser.media(prefers_color_scheme="light")
    browser.size(1200)
    browser.open(report)
    return browser


def test_no_error_and_no_request(shown, report):
    for selector in (
        'input[value="joules"]',
        "#seeds",
        "#theme",
        "#legend button",
        'input[name="order"][value="label"]',
    ):
        shown.click(selector)
    outside = [
        url
        for url in shown.requests()
        if not url.startswith(("data:", "blob:")) and url != report.as_uri()
    ]
    assert outside == []
    assert shown.driver.get_log("browser") == []


def test_the_page_may_not_ask_the_network_even_if_it_wanted_to(shown):
    refused = shown.driver.execute_async_script(
        "const done = arguments[0]; fetch('http://127.0.0.1:9/x').then(() => done('sent'), (e) =>"
        " done(String(e)))"
    )
    assert "TypeError" in refused
    assert any(
        "Content Security Policy" in entry["message"] for entry in shown.driver.get_log("browser")
    )


def test_every_chart_is_drawn_and_labelled(shown):
    charts = shown.all("figure.chart")
    assert len(charts) == 17
    drawn = [
        chart
        for chart in charts
        if chart.get_attribute("id") not in ("headway", "worth", "point", "figures")
    ]  # this run has none
    for chart in drawn:
        svg = chart.find_element(By.CSS_SELECTOR, ".canvas svg")
        assert svg.get_attribute("aria-label").startswith(
            chart.find_element(By.CSS_SELECTOR, "figcaption").text
        )
        assert svg.get_attribute("tabindex") == "0"


def test_headline_is_there_without_any_script(browser, report):
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.driver.get(report.as_uri())
        text = browser.find("#headline").text
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert all(name in text for name in ("fedavg", "flrce-no-stop", " to "))


def test_slider_goes_through_the_rounds(shown):
    def image():
        return shown.find("#relations image").get_attribute("href")

    last, fresh = image(), len(shown.all("#relations .fresh"))
    assert fresh == 5  # P rows are new in every round
    slider = shown.find("#slider")
    seen = {last}
    for _ in range(3):
        slider.send_keys(Keys.ARROW_LEFT)
        seen.add(image())
    assert len(seen) == 4
    shown.run("const s = arguments[0]; s.value = 0; s.dispatchEvent(new Event('input'))", slider)
    assert shown.find("#at").text.startswith("1 of")
    assert slider.get_attribute("aria-valuetext") == "after round 1"


def test_the_map_shows_what_was_recorded(shown):
    run = next(r for r in read.read_runs([compared()]) if r.name == "flrce")
    name = shown.run("return document.getElementById('run').selectedOptions[0].textContent")
    assert name.startswith("flrce")
    rows = list(
        csv.reader(
            io.StringIO(
                shown.download("relations.csv", "#relations .tools button:nth-child(3)").decode()
            )
        )
    )
    from flrce.report.run_detail import order_by_relationship, rebuild_relationship_map

    order, Omega = order_by_relationship(run), rebuild_relationship_map(run)
    assert rows[0][1:] == [run.roster[k] for k in order]
    for row, k in zip(rows[1:], order, strict=True):
        assert [float(v) for v in row[1:]] == pytest.approx(
            [round(Omega[k, j], 3) for j in order], abs=1e-3
        )


def test_toggles_change_the_picture(shown):
    pictures = [shown.picture("accuracy")]
    for selector in (
        'input[value="joules"]',
        'input[name="axis"][value="bytes"]',
        'input[value="seconds"]',
        'input[value="smooth"]',
        'input[value="averaged"]',
        "#seeds",
    ):
        shown.click(selector)
        pictures.append(shown.picture("accuracy"))
    assert len(set(pictures)) == len(pictures)
    assert len(shown.all("#accuracy .seed")) == 6  # three recipes, two seeds


def test_legend_hides_a_recipe_everywhere(shown):
    assert len(shown.all("#accuracy .mean")) == 3
    bars = len(shown.all("#per-joule .bar"))
    shown.click("#legend button:nth-child(2)")
    assert len(shown.all("#accuracy .mean")) == 2
    assert len(shown.all("#per-joule .bar")) == bars - 1
    assert shown.find("#legend button:nth-child(2)").get_attribute("aria-pressed") == "false"
    shown.click("#legend button:nth-child(2)")
    assert len(shown.all("#accuracy .mean")) == 3


def test_the_stop_and_psi_are_marked_only_where_there_are_any(shown):
    runs, picker = read.read_runs([compared()]), Select(shown.find("#run"))
    for i, run in enumerate(runs):
        picker.select_by_value(str(i))
        assert len(shown.all("#conflicts .psi")) == (run.psi is not None)
        assert len(shown.all("#conflicts .stop")) == bool(run.rounds[-1].stop)
        expected = (
            f"This run {'stopped after round' if run.rounds[-1].stop else 'ran all'}"
            f" {len(run.committed_rounds)}"
        )
        assert shown.find("#ended").text.startswith(expected)
    assert any(run.rounds[-1].stop for run in runs)


def test_headway_is_drawn_where_an_average_was_kept(shown):
    runs, picker = read.read_runs([compared()]), Select(shown.find("#run"))
    for i, run in enumerate(runs):
        picker.select_by_value(str(i))
        seen = [h for h in run.rounds if h.headway is not None]
        assert len(shown.all("#headway circle")) == (len(seen) + 1 if seen else 0)  # and the key
        assert shown.find("#headway").is_displayed() == bool(seen)
        assert shown.all('#headway svg[aria-label^="Headway"][tabindex="0"]') or not seen
    assert any(h.headway is not None for run in runs for h in run.rounds)


def test_recipes_without_a_map_say_so(shown):
    Select(shown.find("#run")).select_by_value("0")
    assert "keeps no relationship map" in shown.find("#relations .canvas").text
    assert not shown.find("#slider").is_enabled()


def test_hover_and_keys_read_the_same_values(shown):
    chart = shown.find("#conflicts .canvas svg")
    chart.send_keys(Keys.HOME)
    text = shown.find("#tip").text
    assert text.startswith("round 1,")
    assert shown.run("return document.getElementById('spoken').textContent") == text
    chart.send_keys(Keys.ARROW_RIGHT)
    assert shown.find("#tip").text.startswith("round 2,")
    run = next(r for r in read.read_runs([compared()]) if r.name == "flrce")
    assert f"Accuracy % {100 * run.rounds[1].accuracy:.1f}" in shown.find("#tip").text
    chart.send_keys(Keys.ESCAPE)
    assert not shown.find("#tip").is_displayed()
    box = shown.run(
        "const b = arguments[0].getBoundingClientRect(); return [b.left, b.top, b.width, b.height]",
        chart,
    )
    shown.run(
        "const [svg, clientX, clientY] = arguments;"
        "svg.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX, clientY}))",
        chart,
        box[0] + 53,
        box[1] + box[3] / 2,
    )
    assert shown.find("#tip").text.startswith("round ")


def test_tables_and_charts_download_as_csv(shown):
    rows = list(
        csv.reader(io.StringIO(shown.download("headline.csv", '[data-table="headline"]').decode()))
    )
    assert [row[0].split(" ")[0] for row in rows] == ["Recipe", "fedavg", "flrce", "flrce-no-stop"]
    rows = list(
        csv.reader(io.StringIO(shown.download("clients.csv", '[data-table="clients"]').decode()))
    )
    assert rows[0][:2] == ["client", "rounds"]
    run = next(r for r in read.read_runs([compared()]) if r.name == "flrce")
    assert sum(float(row[2]) + float(row[3]) for row in rows[1:]) == pytest.approx(
        run.summary["joules"], rel=1e-6
    )
    rows = list(
        csv.reader(
            io.StringIO(
                shown.download("conflicts.csv", "#conflicts .tools button:nth-child(3)").decode()
            )
        )
    )
    assert [float(row[3]) for row in rows[1:]] == pytest.approx(
        [h.conflicts for h in run.rounds], abs=1e-3
    )


@pytest.mark.parametrize("chart", ["accuracy", "energy", "relations", "selections"])
def test_pictures_download_as_svg_and_png(shown, chart):
    import xml.dom.minidom

    text = shown.download(f"{chart}.svg", f"#{chart} .tools button:nth-child(1)").decode()
    parsed = xml.dom.minidom.parseString(text)
    assert parsed.documentElement.tagName == "svg"
    assert "var(--" not in text  # stands on its own, without the page's styles
    assert shown.find(f"#{chart} figcaption").text in text
    png = shown.download(f"{chart}.png", f"#{chart} .tools button:nth-child(2)")
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == 1800


def test_hostile_names_stay_text(browser, tmp_path):
    browser.size(1200)
    browser.open(page.write_report([hostile()], tmp_path / "r.html"))
    for chart in ("selections", "relations", "partition", "costs"):
        svg = browser.find(f"#{chart} .canvas svg")
        for _ in range(12):
            svg.send_keys(Keys.ARROW_DOWN if chart != "costs" else Keys.ARROW_RIGHT)
    time.sleep(0.2)
    assert browser.driver.title.startswith("flrce report: digits, natural partition")
    assert browser.all("img, figure svg script, body > b") == []
    names = browser.run(
        "return [...document.querySelectorAll('#clients tbody th')].map((cell) => cell.textContent)"
    )
    assert set(names) == set(HOSTILE)
    assert browser.driver.get_log("browser") == []
    rows = list(
        csv.reader(
            io.StringIO(
                browser.download("clients.csv", '[data-table="clients"]').decode(), newline=""
            )
        )
    )
    cells = {row[0] for row in rows[1:]}
    assert not any(cell.startswith("=") for cell in cells)
    assert {"plain", 'new\nline, "quoted"', "'" + HOSTILE[2]} <= cells


def test_tab_goes_through_the_controls_in_the_order_of_the_page(shown):
    shown.run("document.body.tabIndex = -1; document.body.focus()")
    seen = []
    for _ in range(90):
        shown.driver.switch_to.active_element.send_keys(Keys.TAB)
        here = shown.run(
            "const a = document.activeElement, r = a.getBoundingClientRect();return [a.id || a.name"
            " || a.textContent.slice(0, 20) || a.tagName, r.top + scrollY, r.width > 0]"
        )
        seen.append(here)
        if here[0] == "slider":
            break
    names = [name for name, _, _ in seen]
    assert names[0] == "Skip to the charts"
    wanted = ["theme", "axis", "kind", "seeds", "run", "order", "slider"]
    assert [name for name in names if name in wanted] == wanted
    assert all(visible for _, _, visible in seen)
    place = (
        "return [...document.querySelectorAll('*')].indexOf(document.getElementById(arguments[0]))"
    )
    order = [shown.run(place, name) for name in ("theme", "seeds", "run", "slider")]
    assert order == sorted(order)


def test_keyboard_focus_survives_a_redraw(shown):
    shown.find("#accuracy .canvas svg").send_keys(Keys.END)
    shown.size(1000)
    assert shown.run("return document.activeElement.closest('figure').id") == "accuracy"


def test_dark_mode_follows_the_system_and_the_button(shown):
    def brightness(script):
        red, green, blue = shown.run(script)
        return red + green + blue

    body = (
        "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0,"
        " 3).map(Number)"
    )
    paper = (
        "const c = document.querySelector('#accuracy rect').getAttribute('fill');"
        "return [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16))"
    )
    assert brightness(body) > 700
    assert brightness(paper) > 700
    shown.media(prefers_color_scheme="dark")
    time.sleep(0.3)
    assert brightness(body) < 120
    assert brightness(paper) < 120
    shown.click("#theme")  # system -> light
    assert brightness(body) > 700
    assert brightness(paper) > 700
    shown.click("#theme")
    assert brightness(paper) < 120


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(shown, scheme):
    """WCAG AA: 4.5 to 1 for text."""
    shown.media(prefers_color_scheme=scheme)

    def luminance(name):
        hexes = shown.run(
            f"return getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()"
        )
        parts = [int(hexes[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for text in ("ink", "muted", "wasted"):
        for ground in ("paper", "panel"):
            high, low = sorted([luminance(text), luminance(ground)], reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def test_a_phone_shows_it_without_scrolling_sideways(shown):
    shown.size(360, 740)
    assert shown.run("return document.documentElement.scrollWidth") <= 360
    for svg in shown.all(".canvas svg"):
        assert svg.rect["width"] <= 340
    smallest = shown.run(
        "const scale = (s) => s.getBoundingClientRect().width / s.viewBox.baseVal.width;"
        "return Math.min(...[...document.querySelectorAll('.canvas svg')].map(scale))"
    )
    assert smallest > 0.99  # drawn at this width, so letters keep their size


def test_controls_have_names(shown):
    nameless = shown.run(
        "const named = (c) => c.textContent.trim() || c.ariaLabel || c.labels?.length;return"
        " [...document.querySelectorAll('button, select, input')].filter((c) => !named(c)).length"
    )
    assert nameless == 0
    assert shown.run("return document.documentElement.lang") == "en"
    levels = shown.run(
        "return [...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))"
    )
    assert levels[0] == 1
    assert set(levels[1:]) == {2}


def test_the_page_opens_with_sentences(shown):
    told = [each.text for each in shown.all("#story p")]
    assert " is the best trade-off: " in told[0]
    assert any("For comparison: always predicting class" in sentence for sentence in told)
    assert any(" accuracy (mean over 2 seeds) for " in sentence for sentence in told)
    assert shown.find("#h-compare").text == "Recipes compared"


def test_a_page_of_one_run_compares_nothing(browser, tmp_path):
    browser.size(1200)
    browser.open(page.write_report([compared() / "fedavg" / "seed-0"], tmp_path / "r.html"))
    assert browser.find("#h-compare").text == "Accuracy"
    assert not browser.find("#energy").is_displayed()
    assert browser.find("#story p").text.startswith("fedavg reached ")


def test_the_axis_zooms(shown):
    ticks = (
        "return [...document.querySelectorAll('#accuracy svg text')].map((t) =>"
        " parseFloat(t.textContent))"
    )
    near = [v for v in shown.run(ticks) if v is not None and v == v]
    shown.click("#zoom")
    whole = [v for v in shown.run(ticks) if v is not None and v == v]
    assert near != whole
    assert 0 in whole


def test_zooming_in_cuts_no_curve(shown):
    inside = shown.run(
        "const svg = document.querySelector('#accuracy svg');"
        "const box = svg.querySelector('clipPath rect').getBBox();"
        "return [...svg.querySelectorAll('path.mean')].map((p) => p.getBBox()).every("
        "(b) => b.y >= box.y - 0.1 && b.y + b.height <= box.y + box.height + 0.1)"
    )
    assert inside


def test_explore_and_exploit_are_named_of_methods_that_draw_between_them(browser, tmp_path):
    words = "return document.querySelector('#selections svg').textContent"
    for name, phases in (("fedavg", False), ("flrce", True)):
        browser.open(page.write_report([compared() / name / "seed-0"], tmp_path / f"{name}.html"))
        told = browser.run(words)
        assert ("explore" in told, "chosen" in told) == (phases, not phases)


@pytest.mark.parametrize("table", ["headline", "clients"])
def test_tables_sort(shown, table):
    shown.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    cells = (
        f"return [...document.querySelectorAll('#{table} tbody tr')].map((r) =>"
        " parseFloat(r.cells[2].textContent))"
    )
    shown.click(f"#{table} thead th:nth-child(3)")
    down = shown.run(cells)
    shown.click(f"#{table} thead th:nth-child(3)")
    up = shown.run(cells)
    assert len(down) > 1
    assert down == sorted(down, reverse=True)
    assert up == sorted(up)


def test_it_prints_on_a4_without_cutting(shown):
    """186 mm between the margins are 703 CSS pixels: nothing is wider, neither the page nor a table
    nor a picture.
    """
    shown.size(703)
    shown.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        wide = (
            "return [...document.querySelectorAll('table, svg, figure, p, pre')].map((e) =>"
            " e.getBoundingClientRect()).filter((b) => b.width && b.right > 704).length"
        )
        assert shown.run("return document.documentElement.scrollWidth") <= 703
        assert shown.run(wide) == 0
        assert not any(each.is_displayed() for each in shown.all(".tools, #theme"))
    finally:
        shown.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_a_regression_has_its_own_metric_and_no_empty_cards(browser, tmp_path):
    x = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32)
    asked = {
        "rounds": 3,
        "clients": 6,
        "per_round": 3,
        "engine": {"workers": 1},
        "data": {"partition": "iid"},
    }
    flrce.run(
        flrce.Experiment(**asked, model={"name": "linear"}), tmp_path / "run", data=(x, x.sum(1))
    )
    browser.size(1200)
    browser.open(page.write_report([tmp_path / "run"], tmp_path / "page.html"))
    assert browser.find("#by-client figcaption").text.startswith("MAE of the final model")
    assert len(browser.all("#by-client rect.served")) == 6
    shown = [
        figure.get_attribute("id")
        for figure in browser.all("figure.chart")
        if figure.is_displayed()
    ]
    assert not {"by-class", "worth", "point", "partition"} & set(shown)  # three rounds, no classes
    assert {"loss", "by-client", "conflicts", "selections", "costs"} <= set(shown)
    rounds = browser.run(
        "return [...document.querySelectorAll('#conflicts svg text')].filter((t) => "
        "t.getAttribute('text-anchor') === 'middle').map((t) => t.textContent)"
    )
    assert rounds == ["0", "1", "2", "3", "round"]  # none of them and a half


def test_clients_and_recipes_with_a_common_beginning_can_be_told_apart(browser, tmp_path):
    rng = np.random.default_rng(0)
    data = {f"cinema {k}": (rng.normal(size=(30, 3)), np.arange(30) % 2) for k in range(4)}
    for lr in (0.1, 0.02):
        asked = flrce.Experiment(rounds=2, recipe={"name": "fedprox"}, train={"lr": lr})
        flrce.run(asked, tmp_path / f"lr-{lr}", data=data)
    folders = [tmp_path / "lr-0.1", tmp_path / "lr-0.02"]
    browser.size(1200)
    browser.open(page.write_report(folders, tmp_path / "page.html"))
    rows = browser.run(
        "return [...document.querySelectorAll('#selections svg text')].map((t) => t.textContent)"
        ".filter((t) => t.startsWith('…'))"
    )
    assert sorted(rows) == ["…0", "…1", "…2", "…3"]
    bars = browser.run("return shorten(['fedavg', 'fedprox (lr 0.1)', 'fedprox (lr 0.02)'], 13)")
    assert bars == ["fedavg", "…rox (lr 0.1)", "…ox (lr 0.02)"]
    assert not browser.find("#relations").is_displayed()
