"""One self-contained page: tables in plain HTML, charts drawn from data in the page.

No library and no request: the content security policy forbids both, and runs only the script whose
hash it names. Client names and folders are untrusted text: escaped in HTML, and handled as text by
the script.
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

from flrce.core.cost_table import BASIS_FIELDS, COSTS, Cost, describe_basis
from flrce.core.intervals import ConfidenceInterval
from flrce.core.metric_format import format_metric_heading, format_metric_name, metric_unit
from flrce.report import carbon, run_detail, tables
from flrce.report.endings import describe_ending
from flrce.report.tables import RunGroup
from flrce.report.tasks import get_dataset_name, require_one_task
from flrce.report.verdict import describe_groups
from flrce.storage import read
from flrce.storage.disk import BY_UMASK, write_atomically
from flrce.storage.read import RecordedRun
from flrce.version import __version__

MAX_MAP_BYTES = 1_500_000  # bytes of relationship maps in one page
CURVE_KINDS = ("raw", "averaged", "smooth")
SCRIPT_FILES = ("draw.js", "lines.js", "grids.js", "page.js")


def write_report(folders: Sequence[Path | str], out: Path | str) -> Path:
    """The report of every run in the folders; BadInput where they are of several tasks."""
    runs = read.read_runs(folders)
    require_one_task(runs, "write a report of each")
    return write_task_report(runs, Path(out))


def write_task_report(runs: Sequence[RecordedRun], path: Path) -> Path:
    """The report of runs of one task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_report(runs).encode(), BY_UMASK)
    return path


def render_report(runs: Sequence[RecordedRun]) -> str:
    """The page as text."""
    parts = tables.group_runs(runs)
    metric = html.escape(format_metric_name(tables.get_primary_metric(parts)))
    costs = tables.list_shown_costs(parts)
    script = "\n".join(_read_asset(name) for name in SCRIPT_FILES)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_read_asset("page.html")).substitute(
        script=script,
        digest=digest,
        style=_read_asset("page.css"),
        data=to_embedded_json(build_report_payload(parts)),
        version=__version__,
        story="".join(f"<p>{html.escape(text)}</p>" for text in describe_groups(parts)),
        carbon=carbon.render_carbon_table(runs),
        headline=render_summary_table(parts),
        metric=metric,
        energy=describe_energy_origin(runs),
        setting=html.escape(describe_setting(runs)),
        spread=describe_spread(parts),
        compared="Recipes compared" if len(parts) > 1 else metric,
        picker=render_run_options(parts),
        settings=render_settings(parts),
        axes=render_cost_choices("axis", costs),
        costs=render_cost_choices("cost", [cost for cost in costs if cost.by_client]),
    )


def render_cost_choices(group: str, costs: Sequence[Cost]) -> str:
    """Radio buttons, the first of them chosen."""
    return "\n".join(
        f'<label><input type="radio" name="{group}" value="{html.escape(cost.name)}"'
        f"{'' if i else ' checked'}> {html.escape(cost.label)}</label>"
        for i, cost in enumerate(costs)
    )


def to_embedded_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever the names in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def build_report_payload(parts: Sequence[RunGroup]) -> dict[str, Any]:
    """All that the script draws."""
    runs, rosters, partitions = [], _UniqueItems(), _UniqueItems()
    for i, part in enumerate(parts):
        for run in part.runs:
            rows = run_detail.select_charted_clients(run)
            labels = run.partition.get("labels", [])
            detail = run_detail.build_run_detail(run, rows)
            classes = [str(name) for name in run.partition.get("classes", ())]
            order = list(range(len(rows)))
            if len(rows) == len(run.roster):
                order = run_detail.order_by_relationship(run)
            described = {
                "recipe": i,
                "seed": run.seed,
                "M": len(run.roster),
                "clients": rosters.get_index([run.roster[k] for k in rows]),
                "partition": partitions.get_index([labels[k] for k in rows if k < len(labels)]),
                "classes": classes or [str(label) for label in range(len(detail["byClass"]))],
                "order": order,
                "relations": None,
            }
            runs.append(described | detail)
    _add_maps(runs, [run for part in parts for run in part.runs])
    metric, units = tables.get_primary_metric(parts), tables.choose_units(parts)
    return {
        "units": {name: {"per": per, "name": unit} for name, (per, unit) in units.items()},
        "metric": {"name": format_metric_heading(metric), "per": metric_unit(metric)},
        "axes": {cost.name: cost.label for cost in tables.list_shown_costs(parts)},
        "scales": {name: cost.units for name, cost in COSTS.items()},
        "recipes": [build_group_payload(part) for part in parts],
        "runs": runs,
        "rosters": rosters.items,
        "partitions": partitions.items,
    }


def _add_maps(described: list[dict[str, Any]], runs: Sequence[RecordedRun]) -> None:
    """Relationship maps as far as the page's size allows: each recipe's first seed first."""
    left, seen = MAX_MAP_BYTES, [0] * (1 + max((d["recipe"] for d in described), default=0))
    turn = []
    for d in described:
        turn.append(seen[d["recipe"]])
        seen[d["recipe"]] += 1
    for i in sorted(range(len(runs)), key=lambda i: (turn[i], i)):
        relationship_rows = run_detail.pack_relationship_rows(runs[i])
        size = sum(map(len, relationship_rows["rows"])) if relationship_rows else 0
        if relationship_rows and size > left:
            described[i]["left_out"] = True
        elif relationship_rows:
            left -= size
            described[i]["relations"] = relationship_rows


class _UniqueItems:
    """Equal things once: runs of one seed share their partition."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.known: dict[str, int] = {}

    def get_index(self, item: Any) -> int:
        key = json.dumps(item)
        if key not in self.known:
            self.known[key] = len(self.items)
            self.items.append(item)
        return self.known[key]


def build_group_payload(part: RunGroup) -> dict[str, Any]:
    """A recipe's bars and curves."""
    names = (*tables.list_summary_figures(), "bytes_up", "bytes_down", "joules_wasted")
    intervals = {name: part.compute_interval(name) for name in names}
    return {
        "label": part.label,
        "seeds": len(part.runs),
        "figures": {name: [each.mean, each.spread] for name, each in intervals.items()},
        "hasAverage": any(h.averaged is not None for run in part.runs for h in run.rounds),
        "curves": {
            kind: {axis: _sample_mean_band(part, axis, kind) for axis in COSTS}
            for kind in CURVE_KINDS
        },
    }


def _sample_mean_band(part: RunGroup, axis: str, kind: str) -> list[Any]:
    x, mean, half = tables.compute_mean_band(part, axis, kind)
    return [
        None if values is None else [float(f"{v:.5g}") for v in values]
        for values in (x, mean, half)
    ]


def render_summary_table(parts: Sequence[RunGroup]) -> str:
    """The table at the top, readable without the script."""
    heads, rows = tables.build_summary_table(parts)
    digits = [digits for _, _, digits in tables.get_summary_columns(parts).values()]
    lines = [
        "<thead><tr>",
        *(f'<th scope="col" tabindex="0">{html.escape(head)}</th>' for head in heads),
        "</tr></thead><tbody>",
    ]
    for label, seeds, *cells in rows:
        lines.append(f'<tr><th scope="row">{html.escape(label)}</th><td>{seeds}</td>')
        pairs = zip(cells, digits, strict=True)
        lines += [f"<td>{render_interval(cell, n)}</td>" for cell, n in pairs]
        lines.append("</tr>")
    return "".join([*lines, "</tbody>"])


def render_interval(cell: ConfidenceInterval, digits: int) -> str:
    """A cell of the table, its interval in grey."""
    mean, sign, half = cell.format_interval(digits).partition(" ± ")
    return f'{mean} <span class="half">± {half}</span>' if sign else mean


def describe_spread(parts: Sequence[RunGroup]) -> str:
    """What stands beside a mean."""
    most = max((len(part.runs) for part in parts), default=1)
    if most == 1:
        return "One seed, so no intervals."
    if most == 2:
        return "From the least to the most of two seeds; bands and whiskers likewise."
    return (
        "Mean over seeds ± half-width of the 95 % interval (Student's t); rounds from fewest to"
        " most."
    )


def describe_energy_origin(runs: Sequence[RecordedRun]) -> str:
    """What the figures of energy and time are."""
    kinds = {run.summary["energy"] for run in runs}
    return kinds.pop() if len(kinds) == 1 else "modelled"


def describe_setting(runs: Sequence[RecordedRun]) -> str:
    """What the runs were about, in one line."""
    kinds = {}
    for run in runs:
        data = run.experiment.get("data", {})
        name = data.get("path") or get_dataset_name(run)
        M, P = run.experiment.get("clients", len(run.roster)), run.P
        partition = data.get("partition", "dirichlet")
        kinds[f"{name}, {partition} partition, {M} clients, {P} per round"] = True
    energy = " and ".join(sorted({run.summary["energy"] for run in runs}))
    return (
        f"{'; '.join(kinds)}. {len(runs)} run{'s' if len(runs) > 1 else ''}; energy"
        f" {energy}{describe_energy_error(runs)}."
    )


def describe_energy_error(runs: Sequence[RecordedRun]) -> str:
    """How far the joules may be off by what the devices' profiles state, and what they rest on."""
    names = ("joules_low", "joules", "joules_high", *BASIS_FIELDS)
    sums = {name: sum(run.summary.get(name) or 0.0 for run in runs) for name in names}
    low, joules, high = sums["joules_low"], sums["joules"], sums["joules_high"]
    basis = describe_basis(sums)
    of_which = f", of which {basis}" if basis else ""
    if not joules or not low or high <= joules * 1.0001:
        return of_which
    ratios = f"{low / joules:.2f} to {high / joules:.2f}"
    return f" (the true value may be {ratios} times this){of_which}"


def render_run_options(parts: Sequence[RunGroup]) -> str:
    """One option per run."""
    names = [f"{part.label}, seed {run.seed}" for part in parts for run in part.runs]
    return "".join(
        f'<option value="{i}">{html.escape(name)}</option>' for i, name in enumerate(names)
    )


def render_settings(parts: Sequence[RunGroup]) -> str:
    """Each group's settings, folders and versions, folded away."""
    blocks = []
    for part in parts:
        run = part.runs[0]
        lines = [f"{key} = {value}" for key, value in tables.list_result_settings(run).items()]
        lines += [f"{key} {value}" for key, value in run.summary["versions"].items()]
        lines.append(run.summary["hardware"])
        lines += [f"seed {r.seed}: {r.folder.name}, {describe_ending(r)}" for r in part.runs]
        text = html.escape("\n".join(lines))
        blocks.append(
            f"<details><summary>{html.escape(part.label)}</summary><pre>{text}</pre></details>"
        )
    return "".join(blocks)


def _read_asset(name: str) -> str:
    return (files("flrce.report") / "assets" / name).read_text("utf-8")
