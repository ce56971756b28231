"""Attack tables: what a share of bad clients does to FedAvg, to defences of the literature and to
FLrce's presets.

    python benchmarks/robustness.py --data digits --seeds 10-13 --raw
    research/results/attacks/attacks-digits.jsonl.gz

Attackers (`attacks.py`) are a fixed share of the clients and send what the attack says through the
ordinary gate. Each data set's section of the page is rewritten in place. Flags were tuned on the
digits' seeds 0 to 4: those are no evidence for them.
"""

import argparse
import gzip
import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attacks import ATTACKS, Attacked, attackers, lying, poisoned, success

from flrce.cli import options
from flrce.config.experiment import Experiment
from flrce.core.types import RoundRecord
from flrce.data import cache
from flrce.data.sources import Source, load_source
from flrce.simulation import runs

ROOT = Path(__file__).resolve().parent.parent
M, P, T = 50, 10, 30
ROOTED = {
    "name": "fedavg",
    "selector": "rooted",
    "aggregator": "root-trust",
}  # with a sample of the server's own
FORMER = {  # what `preset = "hardened"` was until fleet-clip; hardened.py measures what it is now
    "name": "flrce",
    "preset": "paper",
    "selector": {"piece": "relationship", "floor": 0.2, "most": 1.5, "window": 10},
    "aggregator": {"piece": "clipped", "by": "equal"},
    "stop": {
        "piece": "conflicts",
        "psi": 5.0,
        "r": 3,
        "n": 5,
        "after": 10,
        "trusted": True,
        "confirmed": True,
    },
}
RECIPES: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "trimmed-mean": {"name": "trimmed-mean", "share": 0.4},
    "krum": {"name": "krum", "attackers": 3},
    "clipped-mean": {"name": "clipped-mean", "aggregator": {"piece": "clipped", "by": "equal"}},
    "centred-clip": {"name": "fedavg", "aggregator": "centred-clip"},
    "geometric-median": {"name": "fedavg", "aggregator": "geometric-median"},
    "bucketed": {
        "name": "fedavg",
        "aggregator": {"piece": "bucketed", "inner": "geometric-median"},
    },
    "mixed": {
        "name": "fedavg",
        "aggregator": {"piece": "mixed", "inner": "median", "attackers": 4},
    },
    "root-trust": ROOTED,
    "flrce (default)": {"name": "flrce", "preset": "default"},
    "flrce (wary)": {"name": "flrce", "preset": "wary"},
    "flrce (paper)": {"name": "flrce", "preset": "paper"},
    "flrce (hardened before)": FORMER,
}
LIES = ("sign-flip, n = 3000", "sign-flip, n = 1e7", "scale x10, n = 3000")
Run = tuple[str, str, str, float, int]  # data, recipe, attack, share, seed


@lru_cache
def pool_of(name: str) -> Source:
    """The digits; at half resolution MNIST of 50 writers, or half of EMNIST: as prepared, or from
    the real data.
    """
    if name == "digits":
        return load_source("digits", None)
    x, y, group, classes = images("femnist" if name == "emnist" else "mnist-writers")
    half = x.reshape(len(x), 1, 14, 2, 14, 2).mean((3, 5)).astype(np.uint8)
    if name == "emnist":
        return Source(name, half[::2], y[::2], classes, scale=1 / 255)
    some = np.unique(group)[:: max(1, len(np.unique(group)) // M)][:M]
    keep = np.isin(group, some)
    return Source(
        name,
        half[keep],
        y[keep],
        classes,
        np.searchsorted(some, group[keep]),
        tuple(map(str, some)),
        1 / 255,
    )


def images(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]:
    """(N, 28, 28) bytes, labels, groups and the names of the classes."""
    prepared = Path(os.environ.get("FLRCE_CACHE", "")) / name
    if (prepared / "meta.json").exists():
        found = cache.load_prepared(prepared)
        assert found.group is not None
        return np.asarray(found.x).reshape(-1, 28, 28), found.y, found.group, found.classes
    folder = Path(os.environ.get("FLRCE_TEST_DATA", ROOT.parent / "shared" / "data"))
    with np.load(folder / f"{name.replace('-', '_')}.npz", allow_pickle=False) as z:
        x, y, group = (
            z["x"],
            z["y"].astype(np.int64),
            z["writer" if name == "mnist-writers" else "client"],
        )
    x = 255 - x if name == "femnist" else x  # black on white
    return (
        x.reshape(-1, 28, 28),
        y,
        np.unique(group, return_inverse=True)[1],
        tuple(map(str, range(y.max() + 1))),
    )


#: data set -> how it is shared out, and what the page calls it
DATA: dict[str, tuple[dict[str, Any], str]] = {
    "digits": ({"partition": "dirichlet", "alpha": 0.5}, "digits, Dirichlet 0.5"),
    "mnist-writers": ({"partition": "natural"}, "MNIST by 50 of its writers, 14x14"),
    "mnist-labels": (
        {"partition": "dirichlet", "alpha": 0.1},
        "the same MNIST by labels, Dirichlet 0.1",
    ),
    "emnist": (
        {"partition": "dirichlet", "alpha": 0.5},
        "EMNIST, 62 classes, 7,824 samples, Dirichlet 0.5, 14x14",
    ),
}


def settings(data: str, recipe: Mapping[str, Any], seed: int) -> Experiment:
    partition = dict(DATA[data][0])
    if recipe is ROOTED:
        partition["trouble"] = [{"piece": "server-sample", "samples": 100}]
    return Experiment.from_tables(
        {
            "seed": seed,
            "rounds": T,
            "clients": M,
            "per_round": P,
            "data": partition,
            "recipe": dict(recipe),
            "model": {"name": "mlp" if data != "digits" else "auto"},
            "engine": {"workers": 1},
        }
    )


def one(run: Run, recipes: Mapping[str, Mapping[str, Any]] = RECIPES) -> dict[str, Any]:
    """One run under attack, and what came of it."""
    data, recipe, attack, share, seed = run
    torch.set_num_threads(1)
    began, clean, exp = time.monotonic(), pool_of(data), settings(data, recipes[recipe], seed)
    built = runs.build_simulation(exp, clean)
    bad, (kind, n) = attackers(built.federation.clients, share, seed), lying(attack)
    if attack == "backdoor" and bad:
        built.engine.close()
        built = runs.build_simulation(exp, poisoned(clean, built.federation, bad))
    with closing(built.engine):
        engine = Attacked(built.engine, bad, kind, seed, n) if bad else built.engine
        done = list(replace(built, engine=engine).iterate_rounds(exp))
    last, exploits = done[-1].state, [r.record for r in done if r.record.exploit]
    slots = [client in bad for record in exploits for client in record.chosen]
    return {
        "run": run,
        "accuracy": handed([r.record for r in done]),
        "rounds": last.t,
        "stop": done[-1].record.stop,
        "captured": float(np.mean(slots)) if slots else None,
        "success": success(built, clean, last.w) if attack == "backdoor" else None,
        "flagged": sum(client in bad for r in done for client in r.record.flagged),
        "wrongly": sum(client not in bad for r in done for client in r.record.flagged),
        "seconds": time.monotonic() - began,
        "host": f"{platform.machine()}, torch {torch.__version__}",
    }


def handed(history: Sequence[RoundRecord]) -> float:
    """Accuracy of the final model."""
    last = next(
        (r for r in reversed(history) if r.accuracy is not None), RoundRecord(0, accuracy=0.0)
    )
    return float(last.accuracy or 0.0) if last.averaged is None else last.averaged


def grid(
    data: str,
    seeds: Sequence[int],
    attacks: Sequence[str],
    shares: Sequence[float],
    recipes: Sequence[str],
) -> list[Run]:
    """Seed after seed, so that whoever is cut short has whole tables of fewer seeds."""
    cells = [("none", 0.0), *((attack, share) for attack in attacks for share in shares)]
    return [(data, recipe, *cell, seed) for seed in seeds for cell in cells for recipe in recipes]


def cell(values: Sequence[float], factor: float = 100, digits: int = 1) -> str:
    """Mean and half-width of the 95 % interval."""
    from scipy.stats import t as student  # not needed to run them

    if not values:
        return "--"
    x = np.array(values) * factor
    half = student.ppf(0.975, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5 if len(x) > 1 else 0.0
    return f"{x.mean():.{digits}f} ± {half:.{digits}f}"


def table(
    found: Sequence[dict[str, Any]], rows: Sequence[tuple[str, float]], field: str, **shown: Any
) -> list[str]:
    recipes = [recipe for recipe in RECIPES if any(r["run"][1] == recipe for r in found)]
    lines = [
        "| attack | attackers | " + " | ".join(recipes) + " |",
        "|---|---|" + "---|" * len(recipes),
    ]
    for attack, share in rows:
        cells = []
        for recipe in recipes:
            mine = [
                r[field]
                for r in found
                if tuple(r["run"][1:4]) == (recipe, attack, share) and r[field] is not None
            ]
            cells.append(cell(mine, **shown))
        lines.append(f"| {attack} | {share:.0%} | " + " | ".join(cells) + " |")
    return lines


def overall(found: Sequence[dict[str, Any]]) -> list[str]:
    """Of every rule and share of attackers: the mean over all attacks, and the mean under the worst
    of them.
    """
    shares = sorted({r["run"][3] for r in found} - {0.0})
    heads = "".join(f" {share:.0%} attackers |" for share in shares)
    lines = [f"| rule | none |{heads}", "|---|---|" + "---|" * len(shares)]
    for recipe in [recipe for recipe in RECIPES if any(r["run"][1] == recipe for r in found)]:
        cells = [
            cell([r["accuracy"] for r in found if tuple(r["run"][1:4]) == (recipe, "none", 0.0)])
        ]
        for share in shares:
            under: dict[str, list[float]] = {}
            for r in found:
                if r["run"][1] == recipe and r["run"][3] == share:
                    under.setdefault(r["run"][2], []).append(100 * r["accuracy"])
            means = [float(np.mean(values)) for values in under.values()]
            cells.append(f"{np.mean(means):.1f}, worst {min(means):.1f}")
        lines.append(f"| {recipe} | {' | '.join(cells)} |")
    return lines


def flagged(found: Sequence[dict[str, Any]], rows: Sequence[tuple[str, float]]) -> list[str]:
    lines = [
        "| attack | attackers | flags on attackers | flags on honest clients |",
        "|---|---|---|---|",
    ]
    for attack, share in rows:
        mine = [
            r for r in found if tuple(r["run"][1:4]) == ("flrce (hardened before)", attack, share)
        ]
        cells = [cell([r[field] for r in mine], factor=1) for field in ("flagged", "wrongly")]
        lines.append(f"| {attack} | {share:.0%} | {' | '.join(cells)} |")
    return lines


def section(data: str, found: Sequence[dict[str, Any]], seeds: str) -> str:
    """One data set's tables."""
    every = sorted(
        {tuple(r["run"][2:4]) for r in found},
        key=lambda row: (["none", *ATTACKS, *LIES].index(row[0]), row[1]),
    )
    some = lambda *names: [row for row in every if row[0] in names]  # noqa: E731
    what = DATA[data][1]
    stops = some("none", "sign-flip", "forced stop")
    return "\n".join(
        [
            f"## {what}",
            "",
            (
                f"M = {M} clients, P = {P} a round, T = {T}, seeds {seeds}, 95 % intervals;"
                f" {len(found)} runs,"
                f" {' and '.join(sorted({r.get('host', 'x86_64, torch 2.11') for r in found}))}."
            ),
            "",
            (
                "Accuracy of the final model, mean over clients, %; here the mean over all"
                " attacks, and the worst's:"
            ),
            "",
            *overall(found),
            "",
            "By attack:",
            "",
            *table(found, every, "accuracy"),
            "",
            (
                f"Rounds until the end (T = {T}; fewer: stopped early, or given up for lack of"
                " usable replies):"
            ),
            "",
            *table(found, stops, "rounds", factor=1),
            "",
            *(
                [
                    "Attackers' share of the places in exploit rounds, %:",
                    "",
                    *table(found, some("capture", "forced stop"), "captured"),
                    "",
                ]
                if some("capture", "forced stop")
                else []
            ),
            *(
                [
                    "Backdoor: marked samples taken for the target, %:",
                    "",
                    *table(found, some("backdoor"), "success"),
                    "",
                ]
                if some("backdoor")
                else []
            ),
            (
                "Flags in a run of FLrce (hardened before), on attackers and on honest clients, of"
                " 300 updates:"
            ),
            "",
            *flagged(found, every),
            "",
        ]
    )


def write(page: Path, name: str, text: str) -> None:
    """Replace the part of the page between this data set's marks."""
    begin, end = f"<!-- {name} begins -->", f"<!-- {name} ends -->"
    old = page.read_text() if page.exists() else f"# Robustness\n\n{begin}\n{end}\n"
    old = old if begin in old else f"{old.rstrip()}\n\n{begin}\n{end}\n"
    page.write_text(
        re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{text}\n{end}", old, flags=re.DOTALL)
    )


def opened(path: Path, how: str) -> Any:
    return gzip.open(path, how) if path.suffix == ".gz" else open(path, how)


def read(path: Path | None) -> list[dict[str, Any]]:
    """Runs that were kept before."""
    if path is None or not path.exists():
        return []
    with opened(path, "rt") as f:
        return [json.loads(line) for line in f]


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("--data", choices=tuple(DATA), default="digits")
    ask.add_argument("--seeds", help="Such as 0-4 (default: 10-14 for the digits, else 0-4).")
    ask.add_argument("--attacks", nargs="+", choices=(*ATTACKS, *LIES), default=[*ATTACKS, *LIES])
    ask.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.2, 0.4])
    ask.add_argument("--recipes", nargs="+", choices=tuple(RECIPES), default=list(RECIPES))
    ask.add_argument("--workers", type=int, default=2)
    ask.add_argument(
        "--out", type=Path, default=ROOT / "research" / "results" / "attacks" / "tables.md"
    )
    ask.add_argument(
        "--raw",
        type=Path,
        help="Keep one JSON line per run here; runs found in it are not repeated.",
    )
    given = ask.parse_args()
    seeds = given.seeds or ("10-14" if given.data == "digits" else "0-4")
    wanted = grid(
        given.data, options.parse_seeds(seeds) or [], given.attacks, given.shares, given.recipes
    )
    pool_of(given.data)  # before the workers are made, which then have it
    found = {tuple(line["run"]): line for line in read(given.raw)}
    with ProcessPoolExecutor(given.workers) as pool:
        for future in as_completed([pool.submit(one, run) for run in wanted if run not in found]):
            result = future.result()
            found[tuple(result["run"])] = result
            if given.raw:
                with opened(given.raw, "at") as f:
                    f.write(json.dumps(result) + "\n")
    write(given.out, given.data, section(given.data, [found[run] for run in wanted], seeds))


if __name__ == "__main__":
    main()
