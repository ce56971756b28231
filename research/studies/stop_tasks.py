"""The recorded tasks that ship with the stop rule: `python research/studies/stop_tasks.py`.

One row for every setting of the decision set: rounds in a sweep, runs, and how many of them
`marginal-gain` ends too early. The margin of error is the least one that conformal risk control
over these tasks allows (`choose_margin`).
"""

import json

import stop

from flrce.methods.stopping import marginal_gain

TARGET = stop.ROOT.parent / "src/flrce/methods/stopping/recorded_tasks.json"
MARGINS = (0.0, 0.25, 0.5, 1.0)
MAX_RISK = 0.08  # share of the tasks that may be stopped too early


def choose_margin(risks, usual):
    """The least margin of error whose risk over tasks is controlled: conformal risk control.

    `risks`: margin -> for each task the share of its runs that are stopped too early. With n tasks
    that are exchangeable with the next one, a mean risk R with (n R + 1) / (n + 1) <= MAX_RISK
    bounds the expected risk by MAX_RISK. With too few tasks to tell, the usual margin.
    """
    for margin in sorted(risks):
        shares = risks[margin]
        if shares and (sum(shares) + 1) / (len(shares) + 1) <= MAX_RISK:
            return margin
    return usual


def find_stop(run, margin):
    """The round in which the rule ends a run with this margin of error; None: never."""
    for look in stop.assess(run, "reports"):
        own = marginal_gain.NEXT_DOUBLING_SHARE * look.measured.gain
        if look.final and own + margin * look.measured.error < stop.PRICE:
            return look.t
    return None


def is_too_early(run, margin):
    t = find_stop(run, margin)
    return t is not None and stop.trusted(run, t) is False


def main():
    runs = stop.load(sorted((stop.ROOT / "results" / "stop").glob("*.jsonl.gz")))
    cells = {}
    for run in runs:
        if not run.dead:
            cells.setdefault(run.cell, []).append(run)
    counts = {
        margin: [sum(is_too_early(run, margin) for run in cell) for cell in cells.values()]
        for margin in MARGINS
    }
    sizes = [len(cell) for cell in cells.values()]
    risks = {
        margin: [n / size for n, size in zip(found, sizes, strict=True)]
        for margin, found in counts.items()
    }
    for margin, shares in risks.items():
        print(
            f"margin {margin:g}: (sum of risks + 1) / (tasks + 1) = "
            f"{(sum(shares) + 1) / (len(shares) + 1):.3f}"
        )
    print("conformal risk control allows", choose_margin(risks, marginal_gain.ERROR_MARGIN))
    rows = [
        [" / ".join(name), cell[0].sweep, len(cell), early]
        for (name, cell), early in zip(
            cells.items(), counts[marginal_gain.ERROR_MARGIN], strict=True
        )
    ]
    lines = ",\n".join(json.dumps(row) for row in rows)
    TARGET.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
