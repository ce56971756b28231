"""Who steers the stop: the round in which a run ends with 5 or 10 bad clients of 50, and with none.

    python benchmarks/steering.py --recipe frugal --workers 1
    python benchmarks/steering.py --recipe frugal --preset hardened --workers 1

Digits, Dirichlet 0.5, M = 50, P = 10, at most 300 rounds. Bad clients send an update that is too
long, noise, or claim samples they do not have; or they train as they should and lie about how good
the model is on their hold-out, and how large that is. In the mode `evaluated` the server evaluates
the final model too; the rules by clients' reports do not read that. The table goes into
research/results/attacks/tables.md; records of runs before the bounds of today's rule are
research/results/attacks/steering-bounded*.jsonl.gz.
"""

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from attacks import ATTACKS, SUBTLE, Attacked
from robustness import ROOT, handed, opened, pool_of, read, write

from flrce.config.experiment import Experiment
from flrce.core.types import Reply
from flrce.rng import make_stream
from flrce.simulation import runs

M, P, T = 50, 10, 300
SEEDS = (6, 7, 8)
COUNTS = (M // 10, M // 5)
LIES = {  # what is told after t of T rounds
    "tells a rise": lambda t, rng: min(t / 60, 1.0),
    "tells a fall": lambda t, rng: max(1 - t / 60, 0.0),
    "tells anything": lambda t, rng: float(rng.random()),
    "tells a rise of 1e7 samples": lambda t, rng: min(t / 60, 1.0),
    "tells 0.01 t of 1e7 samples": lambda t, rng: min(t / 100, 1.0),
    "tells a slow rise of 1e7 samples": lambda t, rng: min(0.12 * math.log2(t + 1), 1.0),
    "tells 0 and 1 by turns": lambda t, rng: float(t % 2),
}
SENT = {"norm x 10": "scale x10", "sign-flip": "sign-flip", "-3u": "-3u"}
CLAIMED = {"n = 1e7": (None, 10**7)}
KINDS = (*SENT, *CLAIMED, *LIES)
MODES = {"evaluated": 1, "clients alone": 10**6}  # eval_every
Run = tuple[str, str, int, int]  # mode, attack, bad clients, seed


class Steered(Attacked):
    """An engine some of whose clients also lie about their hold-outs, or only about their
    samples.
    """

    def __init__(self, *attack: Any, lie: str) -> None:
        super().__init__(*attack)
        self.lie = lie

    def _worse(
        self,
        w: torch.Tensor,
        reply: Reply,
        u: torch.Tensor,
        honest: torch.Tensor,
        task: Any,
        count: int,
    ) -> Reply:
        if self.kind in {**ATTACKS, **SUBTLE}:
            reply = super()._worse(w, reply, u, honest, task, count)
        if self.lie and reply.judged is not None:
            said = LIES[self.lie](task.t, make_stream(self.seed, "lie", task.t, task.client))
            held = 10**7 if self.lie.endswith("1e7 samples") else reply.judged.n
            reply = replace(reply, judged=replace(reply.judged, value=said, n=held))
        return replace(reply, n=self.n or reply.n)


def one(
    run: Run, recipe: Mapping[str, Any] = MappingProxyType({"name": "flrce", "preset": "default"})
) -> dict[str, Any]:
    mode, attack, count, seed = run
    torch.set_num_threads(1)
    exp = Experiment.from_tables(
        {
            "seed": seed,
            "rounds": T,
            "clients": M,
            "per_round": P,
            "recipe": dict(recipe),
            "data": {"partition": "dirichlet", "alpha": 0.5},
            "engine": {"workers": 1, "eval_every": MODES[mode]},
        }
    )
    built = runs.build_simulation(exp, pool_of("digits"))
    clients = built.federation.clients
    bad = {clients[i] for i in make_stream(seed, "steering").permutation(M)[:count]}
    kind, n = CLAIMED.get(attack, (SENT.get(attack), 0))
    lie = attack if attack in LIES else ""
    with closing(built.engine):
        engine = Steered(built.engine, bad, kind or "", seed, n, lie=lie) if bad else built.engine
        done = [r.record for r in replace(built, engine=engine).iterate_rounds(exp)]
    return {"run": run, "rounds": done[-1].t, "stop": done[-1].stop, "accuracy": handed(done)}


def wanted() -> list[Run]:
    """Seed after seed."""
    cells = [("none", 0), *((kind, count) for kind in KINDS for count in COUNTS)]
    return [(mode, *cell, seed) for seed in SEEDS for mode in MODES for cell in cells]


def table(found: dict[Run, dict[str, Any]], modes: Sequence[str]) -> str:
    lines = [
        "| bad clients | "
        + " | ".join(f"{mode}: rounds | over the honest run's" for mode in modes)
        + " |",
        "|---|" + "---|" * 2 * len(modes),
    ]
    attacks = [(kind, count) for count in COUNTS for kind in KINDS]
    known_attacks = [each for each in attacks if any(run[1:3] == each for run in found)]
    for attack, count in [("none", 0), *known_attacks]:
        cells = [f"{count} of {M}: {attack}" if count else "none"]
        for mode in modes:
            pairs = [
                (found.get((mode, attack, count, s)), found.get((mode, "none", 0, s)))
                for s in SEEDS
            ]
            known = [(one["rounds"], other["rounds"]) for one, other in pairs if one and other]
            ratios = [a / b for a, b in known]
            ends = ", ".join(f"{a}" if a < T else f"{T}*" for a, _ in known)
            mean = (
                f"{np.exp(np.mean(np.log(ratios))):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                if ratios
                else ""
            )
            cells += [ends, mean if count else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    ask.add_argument("--recipe", default="frugal")
    ask.add_argument("--preset", default="default")
    ask.add_argument("--raw", type=Path)
    ask.add_argument("--modes", nargs="+", choices=MODES, default=["clients alone"])
    ask.add_argument(
        "--out", type=Path, default=ROOT / "research" / "results" / "attacks" / "tables.md"
    )
    ask.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    ask.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    given = ask.parse_args()
    runs_ = [
        run
        for run in wanted()
        if run[0] in given.modes and run[1] in ("none", *given.only) and run[3] in given.seeds
    ]
    name = f"steering {given.recipe} {given.preset}"
    given.raw = given.raw or ROOT / f"research/results/attacks/{name.replace(' ', '-')}.jsonl"
    found = {tuple(line["run"]): line for line in read(given.raw)}
    recipe = {"name": given.recipe, "preset": given.preset}
    pool_of("digits")
    with ProcessPoolExecutor(given.workers) as pool:
        for future in as_completed(
            [pool.submit(one, run, recipe) for run in runs_ if run not in found]
        ):
            result = future.result()
            found[tuple(result["run"])] = result
            with opened(given.raw, "at") as f:
                f.write(json.dumps(result) + "\n")
    write(given.out, name, table(found, given.modes))


if __name__ == "__main__":
    main()
