"""One self-contained page: tables in plain HTML, charts drawn by our own script from data in the page.

No library and no request: the content security policy forbids both, and runs only the script whose hash it names.
Client names and folders are untrusted text: escaped in HTML, and handled as text by the script.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from flrce.intervals import Interval
from flrce.results import carbon, detail, tables
from flrce.results.story import ended, story
from flrce.results.tables import AXES, HEADLINE, Group
from flrce.results.tasks import require_one_task
from flrce.store import headline as words
from flrce.store import read
from flrce.store.disk import BY_UMASK, write_through
from flrce.store.read import Run
from flrce.version import __version__

MAPS = 1_500_000  # bytes of relationship maps in one page
KINDS = ("raw", "averaged", "smooth")
SCRIPTS = ("draw.js", "lines.js", "grids.js", "page.js")


def write(folders: Sequence[Path | str], out: Path | str) -> Path:
    """The report of every run in the folders; BadInput where they are of several tasks."""
    runs = read.find(folders)
    require_one_task(runs, "write a report of each")
    return write_runs(runs, Path(out))


def write_runs(runs: Sequence[Run], path: Path) -> Path:
    """The report of runs of one task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_through(path, page(runs).encode(), BY_UMASK)
    return path


def page(runs: Sequence[Run]) -> str:
    """The page as text."""
    parts = tables.groups(runs)
    metric = html.escape(words.name(tables.metric(parts)))
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_asset("page.html")).substitute(
        script=script, digest=digest, style=_asset("page.css"), data=embed(payload(parts)), version=__version__,
        story=told(parts), carbon=carbon.grid(runs), headline=headline(parts), metric=metric, energy=modelled(runs),
        setting=html.escape(setting(runs)), spread=spread(parts),
        compared="Recipes compared" if len(parts) > 1 else metric, picker=picker(parts), settings=experiment(parts),
    )  # fmt: skip


def embed(data: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever the names in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def payload(parts: Sequence[Group]) -> dict[str, Any]:
    """All that the script draws."""
    runs, rosters, partitions = [], _Pool(), _Pool()
    for i, part in enumerate(parts):
        for run in part.runs:
            rows = detail.shown(run)
            labels = run.partition.get("labels", [])
            found = detail.detail(run, rows)
            classes = [str(name) for name in run.partition.get("classes", ())]
            runs.append(
                {
                    "recipe": i, "seed": run.seed, "M": len(run.roster),
                    "clients": rosters.index([run.roster[k] for k in rows]),
                    "partition": partitions.index([labels[k] for k in rows if k < len(labels)]),
                    "classes": classes or [str(label) for label in range(len(found["byClass"]))],
                    "order": detail.clustered(run) if len(rows) == len(run.roster) else list(range(len(rows))),
                    "relations": None, **found,
                }
            )  # fmt: skip
    _add_maps(runs, [run for part in parts for run in part.runs])
    return {
        "units": {name: {"per": per, "name": unit} for name, (per, unit) in tables.units(parts).items()},
        "metric": {"name": words.heading(tables.metric(parts)), "per": words.unit(tables.metric(parts))},
        "recipes": [group(part) for part in parts], "runs": runs,
        "rosters": rosters.items, "partitions": partitions.items,
    }  # fmt: skip


def _add_maps(described: list[dict[str, Any]], runs: Sequence[Run]) -> None:
    """Relationship maps as far as the page's size allows: every recipe's first seed, then the second ones, ..."""
    left, seen = MAPS, [0] * (1 + max((d["recipe"] for d in described), default=0))
    turn = []
    for d in described:
        turn.append(seen[d["recipe"]])
        seen[d["recipe"]] += 1
    for i in sorted(range(len(runs)), key=lambda i: (turn[i], i)):
        found = detail.relations(runs[i])
        size = sum(map(len, found["rows"])) if found else 0
        if found and size > left:
            described[i]["left_out"] = True
        elif found:
            left -= size
            described[i]["relations"] = found


class _Pool:
    """Equal things once: runs of one seed share their partition."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.known: dict[str, int] = {}

    def index(self, item: Any) -> int:
        key = json.dumps(item)
        if key not in self.known:
            self.known[key] = len(self.items)
            self.items.append(item)
        return self.known[key]


def group(part: Group) -> dict[str, Any]:
    """A recipe's bars and curves."""
    names = (*HEADLINE, "bytes_up", "bytes_down", "joules_wasted")
    return {
        "label": part.label,
        "seeds": len(part.runs),
        "figures": {name: [part.interval(name).mean, part.interval(name).spread] for name in names},
        "hasAverage": any(h.averaged is not None for run in part.runs for h in run.rounds),
        "curves": {kind: {axis: _curve(part, axis, kind) for axis in AXES} for kind in KINDS},
    }


def _curve(part: Group, axis: str, kind: str) -> list[Any]:
    x, mean, half = tables.band(part, axis, kind)
    return [None if values is None else [float(f"{v:.5g}") for v in values] for values in (x, mean, half)]


def headline(parts: Sequence[Group]) -> str:
    """The table at the top, readable without the script."""
    heads, rows = tables.headline(parts)
    digits = [digits for _, _, digits in tables.columns(parts).values()]
    lines = [
        "<thead><tr>",
        *(f'<th scope="col" tabindex="0">{html.escape(head)}</th>' for head in heads),
        "</tr></thead><tbody>",
    ]
    for label, seeds, *cells in rows:
        lines.append(f'<tr><th scope="row">{html.escape(label)}</th><td>{seeds}</td>')
        lines += [f"<td>{shown(cell, n)}</td>" for cell, n in zip(cells, digits, strict=True)]
        lines.append("</tr>")
    return "".join([*lines, "</tbody>"])


def shown(cell: Interval, digits: int) -> str:
    """A cell of the table, its interval in grey."""
    mean, sign, half = cell.text(digits).partition(" ± ")
    return f'{mean} <span class="half">± {half}</span>' if sign else mean


def told(parts: Sequence[Group]) -> str:
    """The opening sentences."""
    return "".join(f"<p>{html.escape(sentence)}</p>" for sentence in story(parts))


def spread(parts: Sequence[Group]) -> str:
    """What stands beside a mean."""
    most = max((len(part.runs) for part in parts), default=1)
    if most == 1:
        return "One seed, so no intervals."
    if most == 2:
        return "From the least to the most of two seeds; bands and whiskers likewise."
    return "Mean over seeds ± half-width of the 95 % interval (Student's t); rounds from fewest to most."


def modelled(runs: Sequence[Run]) -> str:
    """What the figures of energy and time are."""
    return "measured" if all(run.summary["energy"] == "measured" for run in runs) else "modelled"


def setting(runs: Sequence[Run]) -> str:
    """What the runs were about, in one line."""
    kinds = {}
    for run in runs:
        data = run.experiment.get("data", {})
        name = data.get("path") or data.get("name", "digits")
        M, P = run.experiment.get("clients", len(run.roster)), run.P
        kinds[f"{name}, {data.get('partition', 'dirichlet')} partition, {M} clients, {P} per round"] = True
    energy = " and ".join(sorted({run.summary["energy"] for run in runs}))
    return f"{'; '.join(kinds)}. {len(runs)} run{'s' if len(runs) > 1 else ''}; energy {energy}{doubt(runs)}."


def doubt(runs: Sequence[Run]) -> str:
    """How far the joules may be off by what the devices' profiles state; "" where they state nothing."""
    sums = [sum(run.summary[name] for run in runs) for name in ("joules_low", "joules", "joules_high")]
    low, joules, high = sums
    if not joules or not low or high <= joules * 1.0001:
        return ""
    return f" (by the profiles' stated errors {low / joules:.2f} to {high / joules:.2f} times as much)"


def picker(parts: Sequence[Group]) -> str:
    """One option per run."""
    names = [f"{part.label}, seed {run.seed}" for part in parts for run in part.runs]
    return "".join(f'<option value="{i}">{html.escape(name)}</option>' for i, name in enumerate(names))


def experiment(parts: Sequence[Group]) -> str:
    """Each group's settings, folders and versions, folded away."""
    blocks = []
    for part in parts:
        run = part.runs[0]
        lines = [f"{key} = {value}" for key, value in tables.settings(run).items()]
        lines += [f"{key} {value}" for key, value in run.summary["versions"].items()] + [run.summary["hardware"]]
        lines += [f"seed {each.seed}: {each.folder.name}, {ended(each)}" for each in part.runs]
        text = html.escape("\n".join(lines))
        blocks.append(f"<details><summary>{html.escape(part.label)}</summary><pre>{text}</pre></details>")
    return "".join(blocks)


def _asset(name: str) -> str:
    return (files("flrce.results") / "assets" / name).read_text("utf-8")
