"""The pages as pictures, for the documentation.

    python docs/scripts/pictures.py [FOLDER] [--runs FOLDER]

Runs what the pages show (digits, a few minutes on two cores; --runs keeps it), writes the reports
of one run and of a comparison, and takes pictures with Debian's Chromium.
"""

import argparse
import base64
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver

from flrce.report import page

ROOT = Path(__file__).resolve().parent.parent.parent
IMG = ROOT / "docs" / "img"
FILE = str(ROOT / "experiments" / "digits.toml")
RECIPES = "fedavg,fedprox,frugal,flrce,oort"
#: name -> page, width, height, colours
PICTURES = {
    "report": ("compare", 1100, 1500, "light"),
    "report-run-dark": ("run", 1200, 1500, "dark"),
}


def flrce(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "flrce.cli.cli", *words], check=True, cwd=ROOT)


def trained(folder: Path, more: Sequence[str] = ()) -> None:
    """The runs that the pages are about; what is there already is gone on with."""
    again = [
        word for name in ("run", "compare") if (folder / name).exists() for word in ("--resume",)
    ][:1]
    flrce("run", FILE, "--out", str(folder / "run"), *more, *again)
    flrce(
        "compare",
        FILE,
        "--recipes",
        RECIPES,
        "--seeds",
        "0-4",
        "--out",
        str(folder / "compare"),
        *more,
        *again,
    )


def pages(folder: Path) -> dict[str, str]:
    """The report of each, by name, as an address."""
    return {
        name: page.write_report([folder / name], folder / f"{name}.html").as_uri()
        for name in ("run", "compare")
    }


@contextmanager
def browser(folder: Path) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder}",
    ):
        options.add_argument(flag)
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService("/usr/bin/chromedriver")
    )
    try:
        yield driver
    finally:
        driver.quit()


def taken(driver: Any, url: str, width: int, height: int, colours: str) -> bytes:
    """A picture of the top of a page."""
    features = [{"name": "prefers-color-scheme", "value": colours}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(url)
    for _ in range(100):
        if driver.execute_script("return document.documentElement.dataset.ready === 'true'"):
            break
        time.sleep(0.1)
    time.sleep(0.5)  # observers of size run after layout
    return base64.b64decode(
        driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    )


def small(png: bytes) -> bytes:
    """The same picture with 256 colours, a third of the bytes; as it is where there is no
    Pillow.
    """
    try:
        from PIL import Image
    except ImportError:
        return png
    kept = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, kmeans=1).save(
        kept, "PNG", optimize=True
    )
    return kept.getvalue()


def main(out: Path = IMG, runs: Path | None = None, more: Sequence[str] = ()) -> None:
    with tempfile.TemporaryDirectory() as made:
        out, folder = out.resolve(), (runs or Path(made)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        trained(folder, more)
        found = pages(folder)
        with browser(Path(made) / "profile") as driver:
            for name, (which, *how) in PICTURES.items():
                (out / f"{name}.png").write_bytes(small(taken(driver, found[which], *how)))


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("out", type=Path, nargs="?", default=IMG)
    asked.add_argument("--runs", type=Path)
    asked.add_argument("--set", action="append", default=[])
    given = asked.parse_args()
    main(given.out, given.runs, [word for each in given.set for word in ("--set", each)])
