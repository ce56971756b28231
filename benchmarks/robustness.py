"""Attack tables: what a share of bad clients does to FedAvg, trimmed mean, Krum and FLrce, as published and hardened.

    python benchmarks/robustness.py --data digits --seeds 5 --out docs/robustness.md
    python benchmarks/robustness.py --data mnist-writers --seeds 5 --out docs/robustness.md

Attackers are a fixed share of the clients. They see all honest updates of a round (the worst case) and send what the
attack says through the ordinary gate. Each data set's section of the page is rewritten in place.
"""

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import norm
from scipy.stats import t as student
from torch import Tensor

from flrce import runs
from flrce.config import Experiment
from flrce.data.federation import Federation
from flrce.data.sources import Source, source
from flrce.engines.simulator import Simulator
from flrce.models.flat import unpack
from flrce.rng import stream
from flrce.types import Payload, Reply, Task

ROOT = Path(__file__).resolve().parent.parent
M, P, T = 50, 10, 30
RECIPES: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "trimmed-mean": {"name": "trimmed-mean", "share": 0.2},
    "krum": {"name": "krum", "attackers": 2},
    "flrce (paper)": {"name": "flrce", "preset": "paper"},
    "flrce (hardened)": {"name": "flrce", "preset": "hardened"},
}
TARGET, BOOST = 0, 5.0  # the backdoor's label, and how much its senders amplify it
SLEEP = 8  # rounds for which those who force a stop behave
Run = tuple[str, str, str, float, int]  # data, recipe, attack, share, seed


def flip(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    return -u


def scale(factor: float) -> Any:
    return lambda u, honest, rng, t, count: factor * u


def noise(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """Five times as long as the honest update, in no direction at all."""
    return torch.from_numpy(rng.normal(0, 5 * float(u.norm()) / len(u) ** 0.5, len(u))).float()


def alie(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """A little is enough (Baruch et al. 2019): as far from the mean as the honest spread hides.

    Their z grows with the number of attackers; for as few as here it is nearly 0, so it is at least 1.
    """
    supporters = (len(honest) + count) // 2 + 1 - count
    share = (len(honest) - supporters) / max(len(honest), 1)
    z = max(float(norm.ppf(min(max(share, 0.5), 0.999))), 1.0)
    return honest.mean(0) - z * honest.std(0, correction=0)


def capture(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """What everybody agrees with most: the honest mean, so that colluders' relationships outgrow all others'."""
    return honest.mean(0)


def force(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """Agree with everybody until one is chosen for it, then point against everybody."""
    mean = honest.mean(0)
    return mean if t <= SLEEP else -mean


def boost(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """Trained on poisoned samples (see `poisoned`), and amplified."""
    return BOOST * u


ATTACKS = {
    "sign-flip": flip, "scale x10": scale(10.0), "scale x1e6": scale(1e6), "noise": noise, "alie": alie,
    "backdoor": boost, "forced stop": force, "capture": capture,
}  # fmt: skip


def attackers(clients: Sequence[str], share: float, seed: int) -> set[str]:
    order = stream(seed, "attackers").permutation(len(clients))
    return {clients[i] for i in order[: round(share * len(clients))]}


@dataclass
class Attacked:
    """An engine whose attackers' replies are replaced; everything else is the engine's own."""

    engine: Simulator
    bad: set[str]
    kind: str
    seed: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, w: Tensor, tasks: Sequence[Task], carry: Mapping[str, Mapping[str, Tensor]]) -> list[Reply]:
        replies = list(self.engine.train(w, tasks, carry))
        updates = [r.payload.buffers["u"] if r.payload else torch.zeros_like(w) for r in replies]
        good = [u for u, task in zip(updates, tasks, strict=True) if task.client not in self.bad]
        if len(good) == len(tasks):
            return replies
        honest = torch.stack(good or updates)
        return [
            self._worse(reply, u, honest, task, len(tasks) - len(good)) if task.client in self.bad else reply
            for reply, u, task in zip(replies, updates, tasks, strict=True)
        ]

    def _worse(self, reply: Reply, u: Tensor, honest: Tensor, task: Task, count: int) -> Reply:
        rng = stream(self.seed, self.kind, task.t, task.client)
        return replace(reply, payload=Payload({"u": ATTACKS[self.kind](u, honest, rng, task.t, count)}))


def triggered(x: np.ndarray) -> np.ndarray:
    """Samples with the trigger: a bright 3x3 corner."""
    marked = x.copy()
    marked[..., :3, :3] = x.max()
    return marked


def poisoned(pool: Source, federation: Federation, bad: set[str]) -> Source:
    """The pool with half of the attackers' training samples marked and relabelled; hold-outs stay clean."""
    x, y = pool.x.copy(), pool.y.copy()
    for client in sorted(bad):
        index = federation.train[federation.row[client]][::2]
        x[index], y[index] = triggered(x[index]), TARGET
    return replace(pool, x=x, y=y)


def success(built: runs.Parts, clean: Source, w: Tensor) -> float:
    """Share of marked hold-out samples of other classes that the model takes for the target."""
    index, _ = built.federation.judges
    index = index[clean.y[index] != TARGET]
    x = torch.from_numpy(triggered(clean.x[index])).float() * clean.scale + clean.shift
    net = unpack(built.net, w).eval()
    with torch.inference_mode():
        return float((net(x).argmax(1) == TARGET).float().mean())


def pool_of(name: str) -> Source:
    """The digits, or 50 writers of MNIST at half resolution, from the folder of real data."""
    if name == "digits":
        return source("digits", None)
    folder = Path(os.environ.get("FLRCE_TEST_DATA", ROOT.parent / "shared" / "data"))
    with np.load(folder / "mnist_writers.npz", allow_pickle=False) as z:
        x, y, writer = (z[key] for key in ("x", "y", "writer"))
    some = np.unique(writer)[:: max(1, len(np.unique(writer)) // M)][:M]
    keep = np.isin(writer, some)
    x = x[keep].reshape(-1, 1, 28, 28)
    half = x.reshape(len(x), 1, 14, 2, 14, 2).mean((3, 5)).astype(np.uint8)
    return Source(name, half, y[keep].astype(np.int64), tuple("0123456789"), np.searchsorted(some, writer[keep]),
                  tuple(map(str, some)), 1 / 255)  # fmt: skip


def settings(data: str, recipe: str, seed: int) -> Experiment:
    partition = {"partition": "dirichlet", "alpha": 0.5} if data == "digits" else {"partition": "natural"}
    return Experiment.of({
        "seed": seed, "rounds": T, "clients": M, "per_round": P, "data": partition, "recipe": RECIPES[recipe],
        "model": {"name": "mlp" if data != "digits" else "auto"}, "engine": {"workers": 1},
    })  # fmt: skip


def one(run: Run) -> dict[str, Any]:
    """One run under attack, and what came of it."""
    data, recipe, attack, share, seed = run
    torch.set_num_threads(1)
    began, clean, exp = time.monotonic(), pool_of(data), settings(data, recipe, seed)
    built = runs.parts(exp, clean)
    bad = attackers(built.federation.clients, share, seed)
    if attack == "backdoor" and bad:
        built.engine.close()
        built = runs.parts(exp, poisoned(clean, built.federation, bad))
    with closing(built.engine):
        engine = Attacked(built.engine, bad, attack, seed) if bad else built.engine
        done = list(replace(built, engine=engine).rounds(exp))
    last, exploits = done[-1].state, [r.record for r in done if r.record.exploit]
    slots = [client in bad for record in exploits for client in record.chosen]
    return {
        "run": run, "accuracy": next((r.record.accuracy for r in reversed(done) if r.record.accuracy is not None), 0.0),
        "rounds": last.t, "stop": done[-1].record.stop, "captured": float(np.mean(slots)) if slots else None,
        "success": success(built, clean, last.w) if attack == "backdoor" else None,
        "flagged": sum(client in bad for r in done for client in r.record.flagged),
        "wrongly": sum(client not in bad for r in done for client in r.record.flagged),
        "seconds": time.monotonic() - began,
    }  # fmt: skip


def grid(data: str, seeds: int, attacks: Sequence[str], shares: Sequence[float]) -> list[Run]:
    none = [(data, recipe, "none", 0.0, seed) for recipe in RECIPES for seed in range(seeds)]
    return none + [
        (data, recipe, attack, share, seed)
        for attack in attacks for share in shares for recipe in RECIPES for seed in range(seeds)
    ]  # fmt: skip


def cell(values: Sequence[float], factor: float = 100, digits: int = 1) -> str:
    """Mean and half-width of the 95 % interval."""
    if not values:
        return "--"
    x = np.array(values) * factor
    half = student.ppf(0.975, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5 if len(x) > 1 else 0.0
    return f"{x.mean():.{digits}f} ± {half:.{digits}f}"


def table(found: Sequence[dict[str, Any]], rows: Sequence[tuple[str, float]], field: str, **shown: Any) -> list[str]:
    lines = ["| attack | attackers | " + " | ".join(RECIPES) + " |", "|---|---|" + "---|" * len(RECIPES)]
    for attack, share in rows:
        cells = []
        for recipe in RECIPES:
            mine = [r[field] for r in found if tuple(r["run"][1:4]) == (recipe, attack, share) and r[field] is not None]
            cells.append(cell(mine, **shown))
        lines.append(f"| {attack} | {share:.0%} | " + " | ".join(cells) + " |")
    return lines


def flagged(found: Sequence[dict[str, Any]], rows: Sequence[tuple[str, float]]) -> list[str]:
    lines = ["| attack | attackers | flags on attackers | flags on honest clients |", "|---|---|---|---|"]
    for attack, share in rows:
        mine = [r for r in found if tuple(r["run"][1:4]) == ("flrce (hardened)", attack, share)]
        cells = [cell([r[field] for r in mine], factor=1) for field in ("flagged", "wrongly")]
        lines.append(f"| {attack} | {share:.0%} | {' | '.join(cells)} |")
    return lines


def section(data: str, found: Sequence[dict[str, Any]], seeds: int) -> str:
    """One data set's tables."""
    every = sorted({tuple(r["run"][2:4]) for r in found}, key=lambda row: (["none", *ATTACKS].index(row[0]), row[1]))
    some = lambda *names: [row for row in every if row[0] in names]  # noqa: E731
    what = "digits, Dirichlet 0.5" if data == "digits" else "MNIST by 50 of its writers, 14x14"
    stops = some("none", "sign-flip", "forced stop")
    return "\n".join([
        f"## {what}", "",
        f"M = {M} clients, P = {P} a round, T = {T}, {seeds} seeds, 95 % intervals; {platform.machine()}, "
        f"torch {torch.__version__}; {len(found)} runs.", "",
        "Accuracy of the last model, mean over clients, %:", "", *table(found, every, "accuracy"), "",
        f"Rounds until the end (T = {T}; fewer: stopped early, or given up for lack of usable replies):", "",
        *table(found, stops, "rounds", factor=1), "",
        "Attackers' share of the places in exploit rounds, %:", "", *table(found, some("capture", "forced stop"),
                                                                           "captured"), "",
        *(["Backdoor: marked samples taken for the target, %:", "", *table(found, some("backdoor"), "success"), ""]
          if some("backdoor") else []),
        "Flags in a run of FLrce (hardened), on attackers and on honest clients, of 300 updates:", "",
        *flagged(found, every), "",
    ])  # fmt: skip


def write(page: Path, name: str, text: str) -> None:
    """Replace the part of the page between this data set's marks."""
    begin, end = f"<!-- {name} begins -->", f"<!-- {name} ends -->"
    old = page.read_text() if page.exists() else f"# Robustness\n\n{begin}\n{end}\n"
    old = old if begin in old else f"{old.rstrip()}\n\n{begin}\n{end}\n"
    page.write_text(re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{text}\n{end}", old, flags=re.DOTALL))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--data", choices=("digits", "mnist-writers"), default="digits")
    ask.add_argument("--seeds", type=int, default=5)
    ask.add_argument("--attacks", nargs="+", choices=tuple(ATTACKS), default=list(ATTACKS))
    ask.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.2])
    ask.add_argument("--workers", type=int, default=2)
    ask.add_argument("--out", type=Path, default=ROOT / "docs" / "robustness.md")
    ask.add_argument("--raw", type=Path, help="Keep one JSON line per run here; runs found in it are not repeated.")
    given = ask.parse_args()
    found = (
        [json.loads(line) for line in given.raw.read_text().splitlines()] if given.raw and given.raw.exists() else []
    )
    known = {tuple(r["run"]) for r in found}
    todo = [run for run in grid(given.data, given.seeds, given.attacks, given.shares) if run not in known]
    with ProcessPoolExecutor(given.workers) as pool:
        for result in pool.map(one, todo):
            found.append(result)
            if given.raw:
                with open(given.raw, "a") as f:
                    f.write(json.dumps(result) + "\n")
    mine = [r for r in found if r["run"][0] == given.data]
    write(given.out, given.data, section(given.data, mine, given.seeds))


if __name__ == "__main__":
    main()
