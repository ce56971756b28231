"""What the documentation says is run: every page's console, python and toml blocks, and the
notebook.
"""

from pathlib import Path

import pytest

from reading import DOCS, PAGES, RUN, blocks, name_page, run, script

TO_RUN = [
    page for page in PAGES if page.name != "README.md" and RUN & {b.kind for b in blocks(page)}
]


@pytest.mark.parametrize("page", TO_RUN, ids=name_page)
def test_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run(page, tmp_path, monkeypatch, capsys)


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    kept = nbformat.read(DOCS / "quickstart.ipynb", as_version=4)
    nbformat.validate(kept)
    done = script("notebook").run(nbformat.from_dict(kept))
    code = [cell for cell in done.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    assert (tmp_path / "report.html").stat().st_size > 10_000
