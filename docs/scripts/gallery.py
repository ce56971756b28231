"""Run the gallery and keep its pictures: python docs/scripts/gallery.py [FOLDER]"""

import re
import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

PAGE = Path(__file__).resolve().parent.parent / "gallery.md"


def pictures(page: Path = PAGE) -> list[str]:
    """The pictures that the page shows."""
    return re.findall(r"\(img/(gallery-[\w-]+\.svg)\)", page.read_text())


def main(out: Path = PAGE.parent / "img") -> None:
    out = out.resolve()
    names: dict[str, Any] = {"__name__": "gallery"}
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        matplotlib.rc_context({"svg.hashsalt": "flrce"}),
    ):
        for block in re.findall(
            r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
        ):
            exec(compile(block, str(PAGE), "exec"), names)
        for name in pictures():
            shutil.copy(name, out / name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
