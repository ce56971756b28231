"""Choices of clients by released selectors and by flrce, on the same random histories."""

import logging
import math
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from released import Check, load_definitions
from scipy.cluster.hierarchy import fcluster

from flrce.core.roles import RoundView
from flrce.core.types import ClientCost, LocalWork, Task
from flrce.methods.client.pyramidfl import PyramidState, PyramidTraining
from flrce.methods.compression.tensors import TensorDropout
from flrce.methods.selection.clustered import (
    build_ward_tree,
    fill_urns_by_similarity,
    fill_urns_by_size,
)
from flrce.methods.selection.diverse import select_facilities
from flrce.methods.selection.utility import (
    CANDIDATES_PER_PLACE,
    SCORE_CUTOFF_RATIO,
    duration_percentile,
    find_blacklisted,
    slowness_penalty,
    utility_scores,
)

CLIP = 0.98
PENALTY = 2.0


def verify_selection(code: Path) -> list[Check]:
    return [
        verify_oort(code),
        verify_pyramidfl(code),
        verify_divfl(code),
        verify_urns_by_size(code),
        verify_urns_by_similarity(code),
    ]


class ChoiceRecorder:
    """numpy's `random.choice`, which keeps what it was asked and returns the first ones."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], np.ndarray[Any, Any]]] = []
        self.random = SimpleNamespace(choice=self._choose, seed=lambda _: None)

    def _choose(self, clients: list[int], count: int, p: list[float], replace: bool) -> Any:
        self.calls.append((list(clients), np.array(p)))
        return clients[:count]


def verify_oort(code: Path) -> Check:
    """Candidates of a round and their probabilities, to exploit and to explore; in half of the
    cases with a blacklist.
    """
    recorder = ChoiceRecorder()
    namespace = {
        "math": math,
        "np2": recorder,
        "logging": logging,
        "OrderedDict": OrderedDict,
        "Random": Random,
    }
    name = "_training_selector"
    # a list cannot be cut at a float: the released blacklist fails once it is full
    limit = "self.args.blacklist_max_len * len(self.totalArms)"
    replacements = {limit: f"int({limit})"}
    scope = load_definitions(code, "oort", "oort/oort.py", [name], namespace, replacements)
    worst, cases = 0.0, 300
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        recorder.calls.clear()
        history = draw_history(rng)
        selector = scope[name](build_oort_settings(history))
        fill_selector(selector, history)
        selector.getTopK(history.count, history.t, set(range(len(history.n))))
        (exploited, p), *explored = recorder.calls
        worst = max(worst, compare_odds(exploited, p, *score_seen(history)))
        if explored:
            worst = max(worst, compare_odds(*explored[0], *score_unseen(history)))
    return Check("Oort", f"{name}.getTopK", cases, worst, 1e-12)


def draw_history(rng: Generator) -> SimpleNamespace:
    clients = int(rng.integers(15, 60))
    seen = rng.random(clients) < 0.6
    seen[:6], seen[-6:] = True, False
    t = int(rng.integers(5, 90))
    history = SimpleNamespace(
        t=t,
        count=int(rng.integers(4, 9)),
        seen=torch.from_numpy(seen),
        n=torch.from_numpy(rng.integers(1, 500, clients)).double(),
        U=torch.from_numpy(rng.lognormal(3, 2, clients)),
        L=torch.from_numpy(rng.integers(1, t, clients)),
        seconds=torch.from_numpy(rng.lognormal(1, 1, clients)),
        threshold=float(rng.choice([10, 30, 60, 95])),
        exploration=float(rng.choice([0.2, 0.4, 0.6])),
    )
    history.asked = torch.from_numpy(rng.integers(1, 9, clients)).where(history.seen, 0)
    history.blacklist = int(rng.choice([-1, 4]))
    # the released code needs one client more than it exploits
    spare = int(history.seen.sum()) - int(history.count * (1 - history.exploration)) - 1
    history.share = min(0.3, spare / clients)
    return history


def build_oort_settings(history: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(
        exploration_factor=history.exploration,
        exploration_decay=1.0,
        exploration_min=0.0,
        exploration_alpha=0.3,
        round_threshold=history.threshold,
        sample_window=CANDIDATES_PER_PLACE,
        pacer_step=10**6,
        pacer_delta=5,
        blacklist_rounds=history.blacklist,
        blacklist_max_len=history.share,
        clip_bound=CLIP,
        round_penalty=PENALTY,
        cut_off_util=SCORE_CUTOFF_RATIO,
    )


def fill_selector(selector: Any, history: SimpleNamespace) -> None:
    for k in range(len(history.n)):
        seen = bool(history.seen[k])
        reward = float(history.U[k] if seen else history.n[k])
        selector.register_client(k, {"reward": reward, "duration": float(history.seconds[k])})
        if seen:
            selector.totalArms[k].update(count=int(history.asked[k]), time_stamp=int(history.L[k]))
            selector.unexplored.discard(k)


def score_seen(history: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    """(clients within reach of the top, their odds)."""
    known = history.seen
    if history.blacklist >= 0:
        known = known & ~find_blacklisted(history.asked, history.blacklist, history.share)
    known = known.nonzero()[:, 0]
    preferred = duration_percentile(history.seconds, history.threshold)
    slow = slowness_penalty(history.seconds, preferred, PENALTY)
    score = utility_scores(
        history.U[known], history.L[known], history.t, CLIP, history.n[~history.seen]
    )
    score = score * slow[known]
    places = min(int(history.count * (1 - history.exploration)), len(known))
    ordered = score.sort(descending=True)[0]
    within = score >= SCORE_CUTOFF_RATIO * float(ordered[min(places, len(score) - 1)])
    return known[within], score[within]


def score_unseen(history: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    unseen = (~history.seen).nonzero()[:, 0]
    preferred = duration_percentile(history.seconds, history.threshold)
    hope = (history.n * slowness_penalty(history.seconds, preferred, PENALTY))[unseen]
    places = history.count - int(history.count * (1 - history.exploration))
    top = hope.argsort(descending=True, stable=True)[
        : CANDIDATES_PER_PLACE * min(places, len(unseen))
    ]
    return unseen[top], hope[top]


def compare_odds(
    released: list[int], p: np.ndarray[Any, Any], clients: torch.Tensor, score: torch.Tensor
) -> float:
    """The largest difference of a probability; infinite where other clients are candidates."""
    mine = dict(zip(clients.tolist(), (score / score.sum()).tolist(), strict=True))
    if set(mine) != set(released):
        return math.inf
    return max(abs(mine[k] - chance) for k, chance in zip(released, p.tolist(), strict=True))


def verify_pyramidfl(code: Path) -> Check:
    """Dropout rates, and steps of whoever would wait; the released code rounds some steps down."""
    name, cases, worst, one_less, tasks_seen = "prune_client_tasks", 300, 0.0, 0, 0
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        P = int(rng.integers(3, 8))
        K = math.ceil(1.3 * P)
        steps = 5
        compute, transfer = rng.uniform(1, 50, K), rng.uniform(0.1, 20, K)
        importance = rng.uniform(0.1, 9, K)
        scope = load_definitions(
            code, "pyramidfl", "training/param_server.py", [name], build_pyramid_namespace(P, steps)
        )
        sampler = SimpleNamespace(
            getCompletionTime=lambda k, compute=compute, transfer=transfer, **_: (
                compute[k] + transfer[k],
                compute[k],
                transfer[k],
            ),
            isClientActive=lambda *_: True,
            getClientGradient=lambda k, importance=importance: {"gradient": importance[k]},
        )
        running, _, _, _, ratios, rates = scope[name](sampler, list(range(K)), P, 0.0)
        mine = assign_pyramid_tasks(compute, transfer, importance, P, steps)
        for k, ratio, rate in zip(running, ratios, rates, strict=True):
            task = mine[k]
            worst = max(worst, abs(task.compressor.rate - rate))
            allowed = min(int(ratio * steps), 5 * steps)
            difference = (task.work.steps or steps) - allowed
            worst = max(worst, 0.0 if difference in (0, 1) else math.inf)
            one_less, tasks_seen = one_less + difference, tasks_seen + 1
    note = f"{one_less} of {tasks_seen} clients have one step more"
    return Check("PyramidFL", name, cases, worst, 1e-12, note)


def build_pyramid_namespace(P: int, steps: int) -> dict[str, Any]:
    args = SimpleNamespace(
        batch_size=1,
        upload_epoch=steps,
        model_size=1.0,
        clock_factor=1.0,
        enable_dropout=True,
        dropout_low=0.1,
        dropout_high=0.6,
        total_worker=P,
        enable_adapt_local_epoch=True,
        adaptive_epoch_beta=1,
        enable_obs_local_epoch=False,
    )
    return {"math": math, "args": args}


def assign_pyramid_tasks(
    compute: Any, transfer: Any, importance: Any, P: int, steps: int
) -> dict[int, Task]:
    def estimate(task: Task) -> ClientCost:
        return ClientCost(
            compute_seconds=float(compute[task.k]),
            transfer_seconds=float(transfer[task.k]),
            batches=steps,
        )

    K = len(compute)
    tasks = [Task(str(k), k, 1, 0, LocalWork(1), compressor=TensorDropout(0.0)) for k in range(K)]
    view = RoundView(1, P, tuple(range(K)), torch.ones(K), estimate, None, None)
    state = PyramidState(torch.from_numpy(importance))
    assigned = PyramidTraining(most=5.0).assign(tasks, state, view)
    return {task.k: task for task in assigned}


def verify_divfl(code: Path) -> Check:
    """The cost of what is chosen: the sum of distances to the nearest chosen client."""
    cases, worst = 300, 0.0
    scope = load_definitions(
        code, "divfl", "flearn/trainers/fedbase.py", ["BaseFedarated"], {"np": np}
    )
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        M, count = int(rng.integers(5, 40)), int(rng.integers(1, 5))
        V = rng.standard_normal((M, 6))
        distances = np.linalg.norm(V[:, None] - V[None], axis=2)
        trainer = SimpleNamespace(clients=range(M), norm_diff=distances)
        released = list(scope["BaseFedarated"].greedy(trainer, count))
        mine = select_facilities(torch.from_numpy(distances), count)
        costs = [distances[:, chosen].min(1).sum() for chosen in (released, mine)]
        worst = max(worst, abs(costs[0] - costs[1]) / costs[0])
    return Check("DivFL", "greedy", cases, float(worst), 1e-12)


def verify_urns_by_size(code: Path) -> Check:
    name, cases, worst = "get_clusters_with_alg1", 200, 0.0
    scope = load_definitions(code, "clustered", "py_func/clustering.py", [name], {"np": np})
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        n, P = draw_urn_sizes(rng)
        released = scope[name](P, n / n.sum())
        mine = fill_urns_by_size(n, P) / n.sum()
        worst = max(worst, float(np.abs(released - mine).max()))
    return Check("clustered sampling, by size", name, cases, worst, 1e-8)


def verify_urns_by_similarity(code: Path) -> Check:
    """The urns, whatever their order, where neither side shuffles the clients of a group."""
    name, cases, different = "get_clusters_with_alg2", 200, 0
    namespace = {"np": UnshuffledNumpy(), "deepcopy": deepcopy, "fcluster": fcluster}
    unshuffled: Any = SimpleNamespace(permutation=list)
    numpy_2 = {"int(new_weight * epsilon)": "int(new_weight[0] * epsilon)"}
    file = "py_func/clustering.py"
    scope = load_definitions(code, "clustered", file, [name], namespace, numpy_2)
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        n, P = draw_urn_sizes(rng)
        tree = build_ward_tree(rng.uniform(0, 3, (len(n), len(n))))
        released = scope[name](tree, P, n / n.sum())
        mine = fill_urns_by_similarity(n, P, tree, unshuffled) / n.sum()
        different += list_urns(released) != list_urns(mine)
    note = "share of the cases with other urns"
    return Check("clustered sampling, by similarity", name, cases, different / cases, 0.05, note)


def draw_urn_sizes(rng: Generator) -> tuple[np.ndarray[Any, Any], int]:
    """(samples of each client, P), nobody with an urn alone."""
    while True:
        P, clients = int(rng.integers(2, 7)), int(rng.integers(10, 30))
        n = rng.integers(1, 10**6, clients)  # ties, which have no order, do not occur
        if (P * n < n.sum()).all():
            return n, P


def list_urns(urns: np.ndarray[Any, Any]) -> list[list[float]]:
    """The urns in an order of their own."""
    return sorted((urn + 0.0).round(6).tolist() for urn in urns)


class UnshuffledNumpy:
    """numpy whose `random.shuffle` does nothing."""

    random = SimpleNamespace(shuffle=lambda _: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
