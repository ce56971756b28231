"""The documentation opened as files, without a server: its search, and what it asks for."""

from pathlib import Path

import yaml
from test_browser import browser, pytestmark

__all__ = ["browser", "pytestmark"]  # fixtures and marks of this module too

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "docs" / "js" / "iframe-worker.js"
WORKER = """
addEventListener("message", async (event) => {
  await importScripts(event.data);
  postMessage(doubled);
});
"""


def test_a_worker_answers_from_a_file(browser, tmp_path):
    (tmp_path / "worker.js").write_text(WORKER)
    (tmp_path / "more.js").write_text("var doubled = 42;")
    page = tmp_path / "page.html"
    page.write_text(f"""<!doctype html><html data-ready="true"><head><title>page</title></head><body>
<script>{SHIM.read_text()}</script>
<script>
const worker = new Worker("worker.js");
worker.addEventListener("message", (event) => (document.title = `answer ${{event.data}}`));
worker.postMessage(new URL("more.js", location).href);
</script></body></html>""")
    browser.open(page)
    for _ in range(50):
        if browser.run("return document.title") == "answer 42":
            return
        browser.driver.implicitly_wait(0.1)
        browser.driver.find_elements("css selector", "#never")
    raise AssertionError(browser.run("return document.title"))


def test_the_site_searches_without_a_server_and_asks_for_no_versions():
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node))
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    assert "offline" in site["plugins"]
    assert [str(SHIM.relative_to(ROOT / "docs"))] == site["extra"]["polyfills"]
    assert site["extra"]["version"]["provider"] == ["DOCS_VERSIONS", ""]  # unless several are made
