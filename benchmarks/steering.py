"""Who steers the stop: the round in which a run ends with 5 or 10 bad clients of 50, and with none.

    python benchmarks/steering.py --recipe frugal
    python benchmarks/steering.py --recipe frugal --preset hardened

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
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
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
T_REPLAY = 160
SEEDS = (6, 7, 8)
COUNTS = (M // 10, M // 5)
LIES = {  # what is told after t of T rounds
    "tells a rise": lambda t, rng: min(t / 60, 1.0),
    "tells a fall": lambda t, rng: max(1 - t / 60, 0.0),
    "tells anything": lambda t, rng: float(rng.random()),
    "tells a rise of 1e7 samples": lambda t, rng: min(t / 60, 1.0),
    "tells 0.01 t of 1e7 samples": lambda t, rng: min(t / 100, 1.0),
    "tells a slow rise of 1e7 samples": lambda t, rng: min(0.12 * math.log2(t + 1), 1.0),
    "tells 0.3 and then 1": lambda t, rng: 0.3 if t <= 40 else 1.0,
    "tells 0 and 1 by turns": lambda t, rng: float(t % 2),
}
SENT = {"norm x 10": "scale x10", "sign-flip": "sign-flip", "minus 3u": "-3u"}
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


def open_run(seed: int, mode: str, recipe: Mapping[str, Any], T: int = T) -> Any:
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
    return exp, runs.build_simulation(exp, pool_of("digits"))


def choose_bad(clients: Sequence[str], seed: int, count: int) -> set[str]:
    return {clients[i] for i in make_stream(seed, "steering").permutation(M)[:count]}


def one(
    run: Run, recipe: Mapping[str, Any] = MappingProxyType({"name": "flrce", "preset": "default"})
) -> dict[str, Any]:
    mode, attack, count, seed = run
    torch.set_num_threads(1)
    exp, built = open_run(seed, mode, recipe)
    bad = choose_bad(built.federation.clients, seed, count)
    kind, n = CLAIMED.get(attack, (SENT.get(attack), 0))
    lie = attack if attack in LIES else ""
    with closing(built.engine):
        engine = Steered(built.engine, bad, kind or "", seed, n, lie=lie) if bad else built.engine
        done = [r.record for r in replace(built, engine=engine).iterate_rounds(exp)]
    return {"run": run, "rounds": done[-1].t, "stop": done[-1].stop, "accuracy": handed(done)}


@cache
def record_honest(seed: int, mode: str, recipe: tuple[tuple[str, Any], ...]) -> Any:
    """The rule of a recipe, the clients, and the records of T_REPLAY rounds without a stop.

    Training does not read reports, so a lie about hold-outs is replayed on these records exactly.
    """
    torch.set_num_threads(1)
    exp, built = open_run(seed, mode, {**dict(recipe), "stop": "never"}, T_REPLAY)
    with closing(built.engine):
        records = [r.record for r in built.iterate_rounds(exp)]
    return open_run(seed, mode, dict(recipe))[1].recipe.stop, built.federation.clients, records


def replay_lie(run: Run, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The round in which a run would end whose bad clients only lie about their hold-outs."""
    mode, attack, count, seed = run
    rule, clients, records = record_honest(seed, mode, tuple(sorted(recipe.items())))
    bad = choose_bad(clients, seed, count)
    told = []
    for h in records:
        values = [
            LIES[attack](h.t, make_stream(seed, "lie", h.t, client)) if client in bad else value
            for client, value in zip(h.replied, h.evaluation.holdouts, strict=True)
        ]
        told.append(replace(h, holdouts=tuple(values)))
    end = next((t for t in range(1, T_REPLAY + 1) if rule(told[:t])), T_REPLAY)
    return {"run": run, "rounds": end, "stop": rule(told[:end]), "accuracy": None}


def wanted(seeds: Sequence[int]) -> list[Run]:
    """Seed after seed."""
    cells = [("none", 0), *((kind, count) for kind in KINDS for count in COUNTS)]
    return [(mode, *cell, seed) for seed in seeds for mode in MODES for cell in cells]


def table(
    found: dict[Run, dict[str, Any]], modes: Sequence[str], seeds: Sequence[int] = SEEDS
) -> str:
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
                for s in seeds
            ]
            known = [(one["rounds"], other["rounds"]) for one, other in pairs if one and other]
            ratios = [a / b for a, b in known]
            ends = ", ".join(f"{a}" if a < T_REPLAY else f"{a}*" for a, _ in known)
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
        for run in wanted(given.seeds)
        if run[0] in given.modes and run[1] in ("none", *given.only)
    ]
    name = f"steering {given.recipe} {given.preset}"
    given.raw = given.raw or ROOT / f"research/results/attacks/{name.replace(' ', '-')}.jsonl"
    found = {tuple(line["run"]): line for line in read(given.raw)}
    recipe: dict[str, Any] = {"name": given.recipe, "preset": given.preset}
    if given.recipe == "frugal":
        recipe["bits_up"] = 32  # attacked updates are dense
    pool_of("digits")
    for run in runs_:
        if run not in found:
            lies = run[1] in (*LIES, "none") and run[0] == "clients alone"
            found[run] = replay_lie(run, recipe) if lies else one(run, recipe)
            with opened(given.raw, "at") as f:
                f.write(json.dumps(found[run]) + "\n")
    write(given.out, name, table(found, given.modes, given.seeds))


if __name__ == "__main__":
    main()
