"""What `preset = "hardened"` is made of: candidates under attack, by a plan and its rule.

    python benchmarks/hardened.py --raw research/results/attacks/hardened.jsonl.gz --workers 2
    python benchmarks/hardened.py --raw research/results/attacks/hardened.jsonl.gz --table

The plan is research/studies/plans/hardened.json, of which what it calls the cut is run;
research/studies/plans/README.md says what was decided before the runs. They are as robustness.py's, but none
is stopped early: what is compared is what an attacker does to the model. "Today" is the preset as
it was then.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from robustness import ROOT, Run, cell, one, opened, pool_of, read, write

WHOLE: dict[str, Any] = json.loads(
    (ROOT / "research" / "studies" / "plans" / "hardened.json").read_text()
)
PLAN = {
    **WHOLE,
    **WHOLE["cut"],
    "candidates": {c: WHOLE["candidates"][c] for c in WHOLE["cut"]["candidates"]},
}
GROUPS = {"none": (0.0,), "20 %": (0.2,), "40 %": (0.4,)}


def wanted(data: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """Seed after seed, so that whoever is cut short has whole tables of fewer seeds."""
    cells = [
        ("none", 0.0),
        *((attack, share) for attack in PLAN["attacks"] for share in PLAN["shares"]),
    ]
    return [
        (d, recipe, *c, seed)
        for seed in seeds
        for d in data
        for c in cells
        for recipe in PLAN["candidates"]
    ]


def planned(run: Run) -> dict[str, Any]:
    return one(run, PLAN["candidates"])


class Found:
    """Accuracies in %, by run; a seed counts where every run of it is there."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.by = {tuple(line["run"]): 100 * line["accuracy"] for line in lines}
        self.seeds = [
            s for s in PLAN["seeds"] if all(run in self.by for run in wanted(PLAN["data"], [s]))
        ]

    def values(
        self, recipe: str, data: str, shares: Sequence[float], seed: int
    ) -> dict[str, float]:
        """Attack -> accuracy, mean over these shares."""
        attacks = ["none"] if tuple(shares) == (0.0,) else PLAN["attacks"]
        return {
            a: float(np.mean([self.by[data, recipe, a, s, seed] for s in shares])) for a in attacks
        }

    def means(self, recipe: str, data: Sequence[str], shares: Sequence[float]) -> np.ndarray:
        """(seeds,) mean over data sets and attacks."""
        rows = [
            [np.mean(list(self.values(recipe, d, shares, s).values())) for d in data]
            for s in self.seeds
        ]
        return np.array(rows).mean(1)

    def worst(self, recipe: str, data: str, share: float) -> tuple[float, str]:
        """The mean over seeds under the attack where it is least, and that attack."""
        seeds = [self.values(recipe, data, [share], s) for s in self.seeds]
        return min((float(np.mean([v[attack] for v in seeds])), attack) for attack in seeds[0])


def shown(values: np.ndarray) -> str:
    """Mean and 95 % interval over seeds; of one seed the value alone."""
    return cell(list(values), 1) if len(values) > 1 else f"{values[0]:.1f}"


def verdict(found: Found) -> tuple[str, list[str]]:
    """The candidate that the rule chooses, or today's; and why, line by line."""
    today, rule, lines, scores = PLAN["today"], PLAN["rule"], [], {}
    for recipe in PLAN["candidates"]:
        if recipe in (today, PLAN["reference"]):
            continue
        gain = {
            name: (
                found.means(recipe, PLAN["data"], shares) - found.means(today, PLAN["data"], shares)
            )
            for name, shares in GROUPS.items()
        }
        falls = [
            found.worst(recipe, d, 0.2)[0] - found.worst(today, d, 0.2)[0] for d in PLAN["data"]
        ]
        if len(found.seeds) == 1:
            lines.append(
                f"| {recipe} | {' | '.join(shown(v) for v in gain.values())} | {min(falls):.1f}"
                " |  |"
            )
            continue
        refused = [
            *(["costs honest fleets"] if gain["none"].mean() < rule["honest"] else []),
            *(["no better at 20 %"] if not _above(gain["20 %"]) else []),
            *(["worse at 40 %"] if gain["40 %"].mean() < 0 else []),
            *(["its worst attack at 20 % is worse"] if min(falls) < rule["worst"] else []),
        ]
        told = " | ".join(shown(values) for values in gain.values())
        lines.append(
            f"| {recipe} | {told} | {min(falls):.1f} | {', '.join(refused) or 'may replace it'} |"
        )
        if not refused:
            scores[recipe] = found.means(recipe, PLAN["data"], PLAN["shares"]).mean()
    return max(scores, key=lambda name: scores[name], default=today), lines


def _above(values: np.ndarray) -> bool:
    """Whether the whole 95 % interval of the mean is above 0."""
    from scipy.stats import t as student

    half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return bool(values.mean() - half > 0)


def page(found: Found) -> str:
    """The tables and the verdict."""
    chosen, why = verdict(found)
    lines = []
    for d in PLAN["data"]:
        heads = "".join(f" {share:.0%} |" for share in PLAN["shares"])
        lines += [f"| {d} | none |{heads}", "|---|---|" + "---|" * len(PLAN["shares"])]
        for recipe in PLAN["candidates"]:
            cells = [shown(found.means(recipe, [d], [0.0]))]
            for share in PLAN["shares"]:
                least, attack = found.worst(recipe, d, share)
                cells.append(
                    f"{shown(found.means(recipe, [d], [share]))}, worst {least:.1f} ({attack})"
                )
            lines.append(f"| {recipe} | {' | '.join(cells)} |")
        lines.append("")
    alone = len(found.seeds) == 1
    ended = (
        "One seed has no interval, so the rule decides nothing."
        if alone
        else f"By the rule: **{chosen}**."
    )
    return "\n".join(
        [
            (
                f"{'Seed' if alone else 'Seeds'} {', '.join(map(str, found.seeds))}; mean over"
                f" {len(PLAN['attacks'])}"
                f" attacks{'' if alone else ', 95 % intervals over seeds'}, %."
            ),
            "",
            *lines,
            "Differences to the preset as it was, points, over all four data sets:",
            "",
            (
                "| candidate | none | 20 % | 40 % | its worst attack at 20 %, least of the four |"
                " by the rule |"
            ),
            "|---|---|---|---|---|---|",
            *why,
            "",
            ended,
            "",
        ]
    )


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("--seeds", nargs="+", type=int, default=PLAN["seeds"])
    ask.add_argument("--data", nargs="+", choices=PLAN["data"], default=PLAN["data"])
    ask.add_argument("--workers", type=int, default=2)
    ask.add_argument(
        "--raw",
        type=Path,
        required=True,
        help="One JSON line per run; those in it are not repeated.",
    )
    ask.add_argument("--table", action="store_true", help="Run nothing; write the page's section.")
    ask.add_argument(
        "--out", type=Path, default=ROOT / "research" / "results" / "attacks" / "hardened.md"
    )
    given = ask.parse_args()
    if given.table:
        text = page(Found(read(given.raw)))
        print(text)
        return write(given.out, "hardened", text)
    have = {tuple(line["run"]) for line in read(given.raw)}
    for d in given.data:
        pool_of(d)  # before the workers are made, which then have it
    with ProcessPoolExecutor(given.workers) as pool:
        todo = [run for run in wanted(given.data, given.seeds) if run not in have]
        for future in as_completed([pool.submit(planned, run) for run in todo]):
            with opened(given.raw, "at") as f:
                f.write(json.dumps(future.result()) + "\n")


if __name__ == "__main__":
    main()
