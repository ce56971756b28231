"""One run as the page shows it: conflicts, selections, costs, the relationship map."""

import base64
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.core.checked_replies import FREE_OF_WASTE
from flrce.core.cost_table import COSTS
from flrce.core.metric_format import format_metric_heading, metric_unit
from flrce.report.cost_per_point import build_course_chart, build_price_chart, find_course
from flrce.report.endings import describe_ending, get_stop_criterion
from flrce.report.selection import get_phase
from flrce.storage.read import RecordedRun

MAX_CHARTED_CLIENTS = 300  # clients in a chart; the most often chosen of a larger fleet


def select_charted_clients(run: RecordedRun) -> list[int]:
    """Rows of the clients that the charts show."""
    if len(run.roster) <= MAX_CHARTED_CLIENTS:
        return list(range(len(run.roster)))
    chosen = Counter(run.client_indices[client] for h in run.rounds for client in h.chosen)
    ranked = sorted(range(len(run.roster)), key=lambda k: (-chosen[k], k))
    return sorted(ranked[:MAX_CHARTED_CLIENTS])


def build_run_detail(run: RecordedRun, rows: Sequence[int]) -> dict[str, Any]:
    """Rounds and clients of one run; clients by their place in `rows`."""
    place = {run.roster[k]: i for i, k in enumerate(rows)}
    return {
        "t": [h.t for h in run.rounds],
        "outcome": [h.outcome for h in run.rounds],
        "exploit": [int(h.exploit) for h in run.rounds],
        "phases": any(map(get_phase, run.rounds)),
        "conflicts": [round(run.count_conflicts(h), 3) for h in run.rounds],
        **build_headway_series(run),
        "worth": build_course_chart(run),
        "point": build_price_chart(run),
        "accuracy": [_round_digits(h.last_model_metric) for h in run.rounds],
        "averaged": [_round_digits(h.averaged) for h in run.rounds],
        **{name: _round_sums(cost.accumulate(run.rounds)) for name, cost in COSTS.items()},
        "chosen": [[place[c] for c in h.chosen if c in place] for h in run.rounds],
        "rejected": [[place[c] for c in h.rejected if c in place] for h in run.rounds],
        "loss": [_round_digits(h.loss) for h in run.rounds],
        "figures": build_figure_series(run),
        "training": mean_training_losses(run),
        "decided": get_stop_criterion(run),
        "psi": run.psi,
        "stop": run.rounds[-1].stop if run.rounds else "",
        "ended": describe_ending(run),
        "costs": sum_client_costs(run, rows),
        **build_final_metrics(run, rows),
    }


def _round_sums(sums: Iterable[Any]) -> list[Any]:
    return [x if isinstance(x, int) else _round_digits(x) for x in sums]


def build_figure_series(run: RecordedRun) -> dict[str, list[float | None]]:
    """What pieces reported: name -> (rounds,)."""
    names = dict.fromkeys(name for h in run.rounds for name in h.figures)
    return {name: [_round_digits(h.figures.get(name)) for h in run.rounds] for name in names}


def build_final_metrics(run: RecordedRun, rows: Sequence[int]) -> dict[str, Any]:
    """The final model's metric for each client and class, where recorded."""
    metric = str(run.final.get("metric", "accuracy"))
    clients = run.final.get("clients", [])
    classes = run.final.get("classes", []) if metric == "accuracy" else []
    return {
        "byClient": [_round_digits(clients[k]) if k < len(clients) else None for k in rows],
        "byClass": [_round_digits(value) for value in classes],
        "served": {
            "name": format_metric_heading(metric),
            "per": metric_unit(metric),
            "lower": run.summary["better"] == "lower",
        },
    }


def mean_training_losses(run: RecordedRun) -> list[float | None]:
    """Mean loss of the clients whose replies counted, over the first epoch of each round."""
    losses_by_round = []
    for lines in run.client_lines:
        useful = [line for line in lines if line["outcome"] == "useful"]
        losses = [line["loss"] for line in useful if line.get("loss") is not None]
        losses_by_round.append(_round_digits(sum(losses) / len(losses)) if losses else None)
    return losses_by_round


def build_headway_series(run: RecordedRun) -> dict[str, Any]:
    """Headway of each round; the mean that a stop rule compares, and its limit."""
    course = find_course(run, "headway")
    means = dict(zip(course.rounds, course.values, strict=True)) if course else {}
    return {
        "headway": [_round_digits(h.headway) for h in run.rounds],
        "course": [_round_digits(means.get(h.t)) for h in run.rounds],
        "least": _round_digits(course.limits[-1]) if course else None,
    }


def sum_client_costs(run: RecordedRun, rows: Sequence[int]) -> dict[str, list[float]]:
    """Each client's costs, useful and wasted, and the times it was chosen."""
    costs = [cost for cost in COSTS.values() if cost.by_client]
    names = [f"{cost.name}{wasted}" for cost in costs for wasted in ("", "_wasted")]
    totals = {name: np.zeros(len(run.roster)) for name in (*names, "n")}
    for line in run.costs:
        k = run.client_indices.get(line["client"])
        if k is None:
            continue  # a reply from somebody who is no client
        wasted = "" if line["outcome"] in FREE_OF_WASTE else "_wasted"
        for cost in costs:
            totals[f"{cost.name}{wasted}"][k] += cost.of_line(line)
    for h in run.rounds:
        totals["n"][[run.client_indices[client] for client in h.chosen]] += 1
    shown = {name: values[list(rows)] for name, values in totals.items()}
    return {name: [_round_digits(x, 9) for x in values] for name, values in shown.items()}


def pack_relationship_rows(run: RecordedRun) -> dict[str, Any] | None:
    """Rows of Omega as each round left them, still packed; None where they were not kept."""
    kept = [r for r in run.relations if r.Omega is not None]
    if not kept or len(run.roster) > MAX_CHARTED_CLIENTS:
        return None
    packed = [base64.b64encode(r.Omega.tobytes()).decode() for r in kept if r.Omega is not None]
    return {"t": [r.t for r in kept], "k": [list(r.k) for r in kept], "rows": packed}


def rebuild_relationship_map(run: RecordedRun, t: int | None = None) -> NDArray[np.float64] | None:
    """(M, M) Omega after round t (the last one), to 1/127; None where it was not kept."""
    kept = [r for r in run.relations if r.Omega is not None and (t is None or r.t <= t)]
    if not kept:
        return None
    M = max(len(run.roster), *(r.Omega.shape[1] for r in kept if r.Omega is not None))
    Omega = np.zeros((M, M))
    for r in kept:
        assert r.Omega is not None
        Omega[list(r.k), : r.Omega.shape[1]] = r.Omega / 127
    return Omega


def order_by_relationship(run: RecordedRun) -> list[int]:
    """Rows ordered so that clients that agree stand together (average linkage)."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    Omega = rebuild_relationship_map(run)
    if Omega is None or len(Omega) < 3:
        return list(range(len(run.roster)))
    apart = 1 - (Omega + Omega.T) / 2
    np.fill_diagonal(apart, 0)
    order = leaves_list(linkage(squareform(apart, checks=False), "average", optimal_ordering=True))
    return [int(k) for k in order]


def _round_digits(x: Any, digits: int = 5) -> Any:
    """As many digits as are read; five are more than a chart shows."""
    return None if x is None else float(f"{float(x):.{digits}g}")
