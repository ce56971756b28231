"""flrce report runs/all --out report.html --figures figures"""

import json
from pathlib import Path

from flrce.apps.show import table
from flrce.errors import BadInput
from flrce.results import page, tables
from flrce.store import read


def report(runs: list[Path], out: Path | None, figures: Path | None, as_json: bool) -> None:
    """Write one self-contained page about any number of runs; with --figures, static figures too."""
    found = read.find(runs)
    with read.careful(found):
        _report(found, runs, out, figures, as_json)


def _report(found: list[read.Run], runs: list[Path], out: Path | None, figures: Path | None, as_json: bool) -> None:
    groups = tables.groups(found)
    written: list[Path] = []
    try:
        if out is not None or figures is None:
            written.append(page.write(runs, out or Path("report.html")))
        if figures is not None:
            from flrce.results.figures import draw

            written += draw(groups, figures)
    except OSError as why:
        raise BadInput(f"{why.filename or out} cannot be written: {why.strerror}; name another place") from why
    if as_json:
        print(json.dumps({"written": list(map(str, written)), "headline": tables.plain(groups)}, indent=1))
        return
    heads, rows = tables.headline(groups)
    digits = [digits for _, _, digits in tables.columns(groups).values()]
    cells = [[row[0], str(row[1]), *(c.text(n) for c, n in zip(row[2:], digits, strict=True))] for row in rows]
    kept = [i for i, head in enumerate(heads) if not head.startswith(("Seeds", "Time", "Wasted"))]
    most = max(len(part.runs) for part in groups)
    spread = "mean ± 95 % interval" if most > 2 else "from least to most of two seeds" if most == 2 else "one seed"
    table(spread, [heads[i] for i in kept], [[row[i] for i in kept] for row in cells])
    for path in written:
        print(f"wrote {path}")
