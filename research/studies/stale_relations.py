"""Do cosines with a client's old update say less about it than orthogonal distances do?

    python research/studies/stale_relations.py run --datasets digits,femnist --data DIR --seeds 0-4
    python research/studies/stale_relations.py table --page research/docs/relations.md

The paper (section 3.2) compares a fresh update u_p with an old one, u_q of t - m, by the change of
an orthogonal distance, because the cosine "can diverge drastically from the real value", which is
the cosine with the update u'_q that client q would send now. Here u'_q is known: in some rounds of
federated averaging every client trains from the round's model. Each pair (p, q) with m >= 2 gives

- the true value, cos(u_p, u'_q);
- what the server could know: the stale cosine; eq. 6 with the line through the origin, as printed,
  and with the line through the model that q started from, as in the released code; and, as the least
  error that chance leaves, the cosine with a second update of q from the same model;
- what p's update does for q: the relative fall of q's training loss from w to w + u_p.

`run` appends one line for each data set, regime, seed and range of m; `table` averages over seeds.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import cross_entropy

from flrce.cli.options import parse_seeds
from flrce.data.partition import partition_samples
from flrce.data.sources import Source
from flrce.models.flat import make_layout, pack_model, unpack_model
from flrce.models.nets import build_network
from flrce.rng import make_stream
from flrce_reproduction.execute import load_dataset
from flrce_reproduction.page import fill_page
from flrce_reproduction.tables import SeedInterval, paired_difference

RESULTS = Path(__file__).resolve().parents[1] / "results" / "relations"
REGIMES = ("dirichlet", "quantity")
STALENESS_RANGES = ((2, 4), (5, 9), (10, 19), (20, 30))  # rounds since q's last update
ESTIMATES = ("stale cosine", "eq. 6, origin", "eq. 6, model", "fresh cosine")
PER_ROUND, EPOCHS, BATCH, ROUNDS, PROBES = 10, 5, 16, 30, (10, 20, 30)
SETTINGS = {"digits": (50, 0.05), "femnist": (100, 0.002)}  # clients, learning rate


@dataclass
class Federation:
    """Samples of each client, and the network that all of them train."""

    x: Tensor
    y: Tensor
    parts: list[Any]
    net: torch.nn.Module
    lr: float
    seed: int
    trainable: int

    def train(self, w: Tensor, k: int, t: int, purpose: str = "train") -> Tensor:
        """Client k's update from model w: all that travels, trained parameters first."""
        net = unpack_model(self.net, w).train()
        step = torch.optim.SGD(net.parameters(), lr=self.lr)
        rng = make_stream(self.seed, purpose, t, str(k))
        for _ in range(EPOCHS):
            order = self.parts[k][rng.permutation(len(self.parts[k]))]
            for batch in np.array_split(order, -(-len(order) // BATCH)):
                if len(batch) > 1:  # BatchNorm
                    step.zero_grad()
                    cross_entropy(net(self.x[batch]), self.y[batch]).backward()
                    step.step()
        return pack_model(net) - w

    def client_losses(self, w: Tensor) -> Tensor:
        """(M,) mean training loss of each client."""
        net = unpack_model(self.net, w).eval()
        with torch.no_grad():
            every = torch.cat(
                [
                    cross_entropy(net(x), y, reduction="none")
                    for x, y in zip(self.x.split(512), self.y.split(512), strict=True)
                ]
            )
        return torch.stack([every[part].mean() for part in self.parts])


@dataclass
class Pairs:
    """What is known of each pair of a fresh and a stale client."""

    age: list[int] = field(default_factory=list)
    true: list[float] = field(default_factory=list)
    benefit: list[float] = field(default_factory=list)
    estimates: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in ESTIMATES}
    )


def make_federation(source: Source, dataset: str, regime: str, seed: int) -> Federation:
    M, lr = SETTINGS[dataset]
    rng = make_stream(seed, "partition")
    parts = partition_samples(source, regime, M, 0.1, 5, rng)
    x = torch.from_numpy(np.array(source.x))
    x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
    net = build_network("auto", tuple(x.shape[1:]), len(source.classes), seed)
    trainable = make_layout(net).trainable
    return Federation(x, torch.from_numpy(np.array(source.y)), parts, net, lr, seed, trainable)


def compute_cosine(a: Tensor, b: Tensor) -> float:
    return float(a.double() @ b.double() / (a.double().norm() * b.double().norm()))


def compute_line_distance(point: Tensor, direction: Tensor) -> float:
    """From a point to the line through the origin along a direction."""
    point, direction = point.double(), direction.double()
    return float((point - (point @ direction) / (direction @ direction) * direction).norm())


def compute_approach(w: Tensor, u: Tensor, v: Tensor) -> float:
    """Eq. 6: by which share the step u from w comes nearer to the line along v."""
    return max(1 - compute_line_distance(w + u, v) / compute_line_distance(w, v), -1.0)


def collect_pairs(federation: Federation) -> Pairs:
    """Federated averaging with uniform selection; pairs of the rounds that are probed."""
    d, pairs = federation.trainable, Pairs()
    w = pack_model(federation.net)
    last: dict[int, tuple[int, Tensor, Tensor]] = {}  # round, update, model it started from
    for t in range(1, ROUNDS + 1):
        rng = make_stream(federation.seed, "select", t)
        cohort = rng.permutation(len(federation.parts))[:PER_ROUND].tolist()
        updates = {k: federation.train(w, k, t) for k in cohort}
        if t in PROBES:
            _probe_round(federation, w, t, updates, last, pairs)
        last |= {k: (t, u[:d], w[:d]) for k, u in updates.items()}
        sizes = {k: len(federation.parts[k]) for k in cohort}
        w = w + sum(sizes[k] / sum(sizes.values()) * u for k, u in updates.items())
    return pairs


def _probe_round(
    federation: Federation,
    w: Tensor,
    t: int,
    updates: dict[int, Tensor],
    last: dict[int, tuple[int, Tensor, Tensor]],
    pairs: Pairs,
) -> None:
    """Every stale client against every client of the round."""
    d = federation.trainable
    stale = [q for q, (r, _, _) in last.items() if t - r >= 2 and q not in updates]
    now, again = (
        {q: federation.train(w, q, t, purpose)[:d] for q in stale} for purpose in ("train", "again")
    )
    before = federation.client_losses(w)
    for u in updates.values():
        after, step, here = federation.client_losses(w + u), u[:d], w[:d]
        for q in stale:
            r, v, start = last[q]
            pairs.age.append(t - r)
            pairs.true.append(compute_cosine(step, now[q]))
            pairs.benefit.append(float(1 - after[q] / before[q]))
            found = (
                compute_cosine(step, v),
                compute_approach(here, step, v),
                compute_approach(here - start, step, v),
                compute_cosine(step, again[q]),
            )
            for name, value in zip(ESTIMATES, found, strict=True):
                pairs.estimates[name].append(value)


def summarize_pairs(pairs: Pairs) -> Iterator[dict[str, Any]]:
    """One line for each range of staleness, and one for all."""
    age, true, benefit = (np.array(x) for x in (pairs.age, pairs.true, pairs.benefit))
    whole = (2, ROUNDS)
    for low, high in (*STALENESS_RANGES, whole):
        which = (age >= low) & (age <= high)
        if which.sum() < 30:
            continue
        line: dict[str, Any] = {"low": low, "high": high, "pairs": int(which.sum())}
        line["conflicts"] = float((true[which] < 0).mean())
        for name, values in pairs.estimates.items():
            x = np.array(values)[which]
            line[name] = {
                "error": float(np.abs(x - true[which]).mean()),
                "sign": float(((x < 0) == (true[which] < 0)).mean()),
                "rank": float(spearmanr(x, true[which])[0]),
                "benefit": float(spearmanr(x, benefit[which])[0]),
            }
        yield line


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(options.out / "stale.jsonl", "a") as file:
        for dataset in options.datasets.split(","):
            source = load_dataset(dataset, options.data)
            for regime in options.regimes.split(","):
                for seed in parse_seeds(options.seeds) or ():
                    pairs = collect_pairs(make_federation(source, dataset, regime, seed))
                    for line in summarize_pairs(pairs):
                        about = {"dataset": dataset, "regime": regime, "seed": seed}
                        file.write(json.dumps(about | line) + "\n")
                    file.flush()
                    print(dataset, regime, seed, len(pairs.age), "pairs", flush=True)


FIGURES = {  # heading, key, scale, digits
    "sign right, %": ("sign", 100, 1),
    "mean error": ("error", 1, 3),
    "rank correlation with the true cosine": ("rank", 1, 2),
    "rank correlation with what the update does for q": ("benefit", 1, 2),
}


def build_tables(lines: list[dict[str, Any]]) -> str:
    """All ranges of staleness, then the two questions: does the error grow, is eq. 6 better?"""
    return "\n".join([*_list_estimates(lines), "", *_compare_estimates(lines), ""])


def build_summary(lines: list[dict[str, Any]]) -> str:
    """The same for all pairs together."""
    whole = [line for line in lines if (line["low"], line["high"]) == (2, ROUNDS)]
    return "\n".join([*_list_estimates(whole), "", *_compare_estimates(lines), ""])


def _list_estimates(lines: list[dict[str, Any]]) -> list[str]:
    text = ["| data, regime | rounds old | pairs | estimate | " + " | ".join(FIGURES) + " |"]
    text.append("|---|---|---|---|" + "---|" * len(FIGURES))
    cells = sorted({(x["dataset"], x["regime"], x["low"], x["high"]) for x in lines})
    for cell in cells:
        mine = {
            x["seed"]: x for x in lines if (x["dataset"], x["regime"], x["low"], x["high"]) == cell
        }
        count = round(sum(x["pairs"] for x in mine.values()))
        for name in ESTIMATES:
            row = [f"{cell[0]}, {cell[1]}", f"{cell[2]} to {cell[3]}", f"{count:,}", name]
            for key, scale, digits in FIGURES.values():
                value = SeedInterval.from_values(scale * x[name][key] for x in mine.values())
                row.append(value.format_interval(digits) if value else "")
            text.append(f"| {' | '.join(row)} |")
    return text


def _compare_estimates(lines: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "| data, regime | stale cosine's error, 10 to 19 rounds minus 2 to 4 | eq. 6 (origin) minus"
        " stale cosine: sign right, points | rank correlation | correlation with what it does for q"
        " | eq. 6 (model) minus stale cosine: sign right, points | rank correlation | correlation"
        " with what it does for q |"
    )
    yield "|---|" + "---|" * 7
    for place in sorted({(x["dataset"], x["regime"]) for x in lines}):
        mine = [x for x in lines if (x["dataset"], x["regime"]) == place]
        old, young = (
            {x["seed"]: x["stale cosine"]["error"] for x in mine if (x["low"], x["high"]) == which}
            for which in ((10, 19), (2, 4))
        )
        row = [paired_difference(old, young)]
        digits = [3]
        whole = {x["seed"]: x for x in mine if (x["low"], x["high"]) == (2, ROUNDS)}
        for name in ESTIMATES[1:3]:
            for key, scale, places in (("sign", 100, 1), ("rank", 1, 2), ("benefit", 1, 2)):
                ours, theirs = (
                    {seed: scale * x[which][key] for seed, x in whole.items()}
                    for which in (name, ESTIMATES[0])
                )
                row.append(paired_difference(ours, theirs))
                digits.append(places)
        shown = [
            value.format_interval(places, True) if value else ""
            for value, places in zip(row, digits, strict=True)
        ]
        yield f"| {', '.join(place)} | {' | '.join(shown)} |"


def table(options: argparse.Namespace) -> None:
    rows = (options.out / "stale.jsonl").read_text().splitlines()
    lines = [json.loads(row) for row in rows]
    text = build_tables(lines)
    (options.out / "stale.md").write_text(text)
    if options.page:
        fill_page(options.page, {"relations": build_summary(lines)})
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--datasets", default="digits,femnist")
    parser.add_argument("--regimes", default=",".join(REGIMES))
    parser.add_argument("--seeds", default="0-4")
    parser.add_argument("--data", type=Path, help="folder of prepared data sets")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="a page with a mark for the table")
    options = parser.parse_args()
    {"run": run, "table": table}[options.command](options)


if __name__ == "__main__":
    main()
