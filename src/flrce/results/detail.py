"""One run in detail, as the page shows it: conflicts, selections, costs per client, the relationship map."""

import base64
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.results.price import course, points
from flrce.results.story import decided, ended
from flrce.stops.standstill import Standstill
from flrce.store import headline as words
from flrce.store.read import Run

SHOWN = 300  # clients in a chart; the most often chosen of a larger fleet


def shown(run: Run) -> list[int]:
    """Rows of the clients that the charts show."""
    if len(run.roster) <= SHOWN:
        return list(range(len(run.roster)))
    chosen = Counter(run.row[client] for h in run.rounds for client in h.chosen)
    return sorted(sorted(range(len(run.roster)), key=lambda k: (-chosen[k], k))[:SHOWN])


def detail(run: Run, rows: Sequence[int]) -> dict[str, Any]:
    """Rounds and clients of one run; clients by their place in `rows`."""
    place = {run.roster[k]: i for i, k in enumerate(rows)}
    return {
        "t": [h.t for h in run.rounds],
        "outcome": [h.outcome for h in run.rounds],
        "exploit": [int(h.exploit) for h in run.rounds],
        "conflicts": [round(run.conflicts(h), 3) for h in run.rounds],
        **headways(run),
        "worth": course(run),
        "point": points(run),
        "accuracy": [_short(h.headline) for h in run.rounds],
        "averaged": [_short(h.averaged) for h in run.rounds],
        "joules": [_short(x) for x in np.cumsum([h.joules for h in run.rounds])],
        "bytes": [int(x) for x in np.cumsum([h.bytes_up + h.bytes_down for h in run.rounds])],
        "grams": [_short(x) for x in np.cumsum([h.grams for h in run.rounds])],
        "seconds": [_short(x) for x in [h.began + h.seconds for h in run.rounds]],
        "chosen": [[place[c] for c in h.chosen if c in place] for h in run.rounds],
        "rejected": [[place[c] for c in h.rejected if c in place] for h in run.rounds],
        "loss": [_short(h.loss) for h in run.rounds],
        "training": training(run),
        "decided": decided(run),
        "psi": run.psi,
        "stop": run.rounds[-1].stop if run.rounds else "",
        "ended": ended(run),
        "costs": client_costs(run, rows),
        **served(run, rows),
    }


def served(run: Run, rows: Sequence[int]) -> dict[str, Any]:
    """The headline of the model handed back for each client, and its accuracy for each class, where recorded."""
    metric = str(run.final.get("metric", "accuracy"))
    clients, classes = run.final.get("clients", []), run.final.get("classes", []) if metric == "accuracy" else []
    return {
        "byClient": [_short(clients[k]) if k < len(clients) else None for k in rows],
        "byClass": [_short(value) for value in classes],
        "served": {
            "name": words.heading(metric), "per": words.unit(metric), "lower": run.summary["better"] == "lower",
        },
    }  # fmt: skip


def training(run: Run) -> list[float | None]:
    """Mean loss of the clients whose replies counted, over the first epoch of each round."""
    found = []
    for lines in run.parts:
        losses = [line["loss"] for line in lines if line["outcome"] == "useful" and line.get("loss") is not None]
        found.append(_short(sum(losses) / len(losses)) if losses else None)
    return found


def headways(run: Run) -> dict[str, Any]:
    """Headway of each round; where a standstill ends the run, the mean it looks at, and the least that goes on."""
    rules = [rule for rule in run.rules if isinstance(rule, Standstill)]
    seen = [rules[0].figures(run.done[: i + 1]) for i in range(len(run.done))] if rules else []
    at = {h.t: figures for h, figures in zip(run.done, seen, strict=False) if figures}
    return {
        "headway": [_short(h.headway) for h in run.rounds],
        "course": [_short(at[h.t][0]) if h.t in at else None for h in run.rounds],
        "least": next((_short(least) for _, least in reversed(at.values())), None),
    }


def client_costs(run: Run, rows: Sequence[int]) -> dict[str, list[float]]:
    """Joules and bytes of each client, useful and wasted, and the times it was chosen."""
    totals = {name: np.zeros(len(run.roster)) for name in ("joules", "joules_wasted", "bytes", "bytes_wasted", "n")}
    for line in run.costs:
        k = run.row.get(line["client"])
        if k is None:
            continue  # a reply from somebody who is no client
        wasted = "" if line["outcome"] in ("useful", "asked") else "_wasted"
        totals[f"joules{wasted}"][k] += line["joules"]
        totals[f"bytes{wasted}"][k] += line["bytes_up"] + line["bytes_down"]
    for h in run.rounds:
        totals["n"][[run.row[client] for client in h.chosen]] += 1
    return {name: [_short(x, 9) for x in values[list(rows)]] for name, values in totals.items()}


def relations(run: Run) -> dict[str, Any] | None:
    """Rows of Omega as each round left them, still packed; None where they were not kept."""
    kept = [r for r in run.relations if r.Omega is not None]
    if not kept or len(run.roster) > SHOWN:
        return None
    packed = [base64.b64encode(r.Omega.tobytes()).decode() for r in kept if r.Omega is not None]
    return {"t": [r.t for r in kept], "k": [list(r.k) for r in kept], "rows": packed}


def final_map(run: Run, t: int | None = None) -> NDArray[np.float64] | None:
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


def clustered(run: Run) -> list[int]:
    """Rows ordered so that clients that agree stand together: average linkage on 1 - mutual relationship."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    Omega = final_map(run)
    if Omega is None or len(Omega) < 3:
        return list(range(len(run.roster)))
    apart = 1 - (Omega + Omega.T) / 2
    np.fill_diagonal(apart, 0)
    order = leaves_list(linkage(squareform(apart, checks=False), "average", optimal_ordering=True))
    return [int(k) for k in order]


def _short(x: Any, digits: int = 5) -> Any:
    """As many digits as are read; five are more than a chart shows."""
    return None if x is None else float(f"{float(x):.{digits}g}")
