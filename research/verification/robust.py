"""Released robust rules and flrce's, on the same random updates, some of them far away."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from released import Check, load_definitions
from torch import Tensor

from flrce.core.types import Updates
from flrce.methods.aggregation.defences import centred_clipping, geometric_median
from flrce.methods.aggregation.robust import CoordinateMedian, TrimmedMean, rank_by_krum_score

CASES, STEPS = 100, 1000
LIMIT = 1e-6  # relative to the length of the result


def verify_robust_rules(code: Path) -> list[Check]:
    return [
        verify_geometric_median(code),
        verify_centred_clipping(code),
        verify_krum(code),
        verify_trimmed_mean(code),
        verify_median(code),
    ]


def draw_updates(seed: int) -> tuple[np.random.Generator, Tensor]:
    """5 to 14 updates; up to a third of them point elsewhere and are long."""
    rng = np.random.default_rng(seed)
    P, d = int(rng.integers(5, 15)), int(rng.integers(2, 60))
    U = rng.standard_normal((P, d)) + rng.standard_normal(d)
    U[: P // 3] = rng.standard_normal((P // 3, d)) * rng.lognormal(1, 1)
    return rng, torch.from_numpy(U)


def measure_difference(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs).norm() / theirs.norm())


def make_updates(U: Tensor) -> Updates:
    return Updates(torch.arange(len(U)), U, torch.ones(len(U)).double(), U.shape[1])


def load_rule(code: Path, file: str, names: list[str]) -> dict[str, Any]:
    namespace = {"torch": torch, "_BaseAggregator": object}
    return load_definitions(code, "robust", f"codes/aggregator/{file}.py", names, namespace)


def verify_geometric_median(code: Path) -> Check:
    """Where both end: the released steps start at the mean, flrce's at the medians."""
    namespace = {"np": np, "AGGR_MEAN": "mean"}
    found = load_definitions(code, "rfa", "models/model.py", ["ServerModel"], namespace)
    worst = 0.0
    for seed in range(CASES):
        _, U = draw_updates(seed)
        points = [[u.numpy()] for u in U]
        median, _, _ = found["ServerModel"].geometric_median_update(
            points, np.ones(len(U)), STEPS, 1e-12, ftol=0.0
        )
        worst = max(worst, measure_difference(geometric_median(U, STEPS), torch.tensor(median[0])))
    name = "geometric_median_update"
    return Check("RFA", name, CASES, worst, 1e-4, f"the limit of {STEPS} steps")


def verify_centred_clipping(code: Path) -> Check:
    """Three rounds, each of which starts where the last one ended."""
    scope, worst = load_rule(code, "clipping", ["Clipping"]), 0.0
    for seed in range(CASES):
        rng, _ = draw_updates(seed)
        tau, steps = float(rng.lognormal(0, 1)), int(rng.integers(1, 4))
        rule: Any = scope["Clipping"](tau, steps)
        v = None
        for part in range(3):
            _, U = draw_updates(1000 * seed + 7 * part)
            U = U[:, :2]
            v = torch.zeros(2).double() if v is None else v
            v = centred_clipping(U, v, tau, steps)
            worst = max(worst, measure_difference(v, rule(list(U))))
    return Check("centred clipping", "Clipping", CASES, worst, LIMIT)


def verify_krum(code: Path) -> Check:
    """The chosen updates; the released function gets distances, and squares them itself."""
    scope, wrong = load_rule(code, "krum", ["_compute_scores", "multi_krum"]), 0
    for seed in range(CASES):
        rng, U = draw_updates(seed)
        f = int(rng.integers(0, (len(U) - 3) // 2 + 1))
        m = int(rng.integers(1, len(U) - f + 1))
        distances = {
            i: {j: float((U[i] - U[j]).norm()) for j in range(i + 1, len(U))}
            for i in range(len(U) - 1)
        }
        wrong += {*scope["multi_krum"](distances, len(U), f, m)} != {*rank_by_krum_score(U, f)[:m]}
    name = "multi_krum"
    return Check("Multi-Krum", name, CASES, wrong / CASES, 0.0, "share of cases with other updates")


def verify_trimmed_mean(code: Path) -> Check:
    scope, worst = load_rule(code, "trimmed_mean", ["TM"]), 0.0
    for seed in range(CASES):
        rng, U = draw_updates(seed)
        b = int(rng.integers(0, (len(U) - 1) // 2 + 1))
        rule: Any = SimpleNamespace(b=b)
        theirs = scope["TM"].__call__(rule, list(U))
        mine = TrimmedMean(b / len(U))(torch.zeros(U.shape[1]).double(), make_updates(U), None)
        worst = max(worst, measure_difference(mine, theirs))
    return Check("trimmed mean", "TM", CASES, worst, LIMIT)


def verify_median(code: Path) -> Check:
    scope, worst = load_rule(code, "coordinatewise_median", ["CM"]), 0.0
    for seed in range(CASES):
        _, U = draw_updates(seed)
        theirs = scope["CM"]()(list(U))
        mine = CoordinateMedian()(torch.zeros(U.shape[1]).double(), make_updates(U), None)
        worst = max(worst, measure_difference(mine, theirs))
    return Check("median", "CM", CASES, worst, LIMIT)
