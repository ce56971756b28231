"""FedLECC (Jimenez-Gutierrez et al. 2026, arXiv 2603.08911): clients with like labels in groups,
the worst off first.

Clients are grouped by how alike their labels are shared out (Hellinger's distance); of the groups
with the largest mean loss those clients train whose own loss is largest. A client tells its shares
with its reply (client/label_census.py).
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.bounds import PositiveInt
from flrce.core.pieces import Recipe
from flrce.core.roles import RoundView, Selector
from flrce.core.types import RoundEvent, Selection
from flrce.methods.selection.clustered import MAX_CLIENTS_CONSIDERED

LABEL_SHARES_KEY = "labels"  # of a reply's extras, as client/label_census.py sends them


@dataclass(frozen=True)
class FedLECCState:
    """What each client last told. Written in place."""

    # (M,) infinite: never heard from
    loss: Tensor = field(metadata={"rows": "trained", "fill": math.inf})
    shares: Tensor = field(metadata={"rows": "trained"})  # (M, classes)


@dataclass(frozen=True)
class FedLECC(Selector):
    """P clients of the `some` groups, out of `groups`, with the largest mean loss; in each those
    with the largest.

    Those never heard from go first. Losses are those of a client's last round, where the paper asks
    everyone in every round; groups are by average linkage, where it has OPTICS. Of more than
    MAX_CLIENTS_CONSIDERED clients, so many drawn at random are considered.
    """

    groups: PositiveInt = 10
    some: PositiveInt = 5
    classes: PositiveInt = 10

    def check_recipe(self, recipe: Recipe) -> str:
        if recipe.trainer.reported_classes == self.classes:
            return ""
        return (
            f'selector = "lecc" wants trainer = {{piece = "counting", classes = {self.classes}}},'
            " which tells labels"
        )

    def initial_state(self, M: int, d: int, D: int) -> FedLECCState:
        return FedLECCState(torch.full((M,), math.inf), torch.zeros(M, self.classes))

    def select(self, state: FedLECCState, view: RoundView, rng: Generator) -> Selection:
        pool = np.array(
            [view.pool[i] for i in rng.permutation(len(view.pool))[:MAX_CLIENTS_CONSIDERED]],
            np.int64,
        )
        loss = state.loss[torch.from_numpy(pool)].numpy()
        group = cluster_by_labels(state.shares[torch.from_numpy(pool)].numpy(), self.groups)
        order = np.argsort(-loss, kind="stable")  # the largest first; equal ones as they were drawn
        picked = order[group[order] < 0][: view.P].tolist()
        groups = sorted(set(group[group >= 0].tolist()))
        worst = sorted(groups, key=lambda g: -float(loss[group == g].mean()))[: self.some]
        places = math.ceil((view.P - len(picked)) / max(len(worst), 1))  # places a group has
        for g in worst:
            picked += order[group[order] == g][:places].tolist()
        picked += [i for i in order.tolist() if i not in picked]  # where those groups are too small
        picked = picked[: view.P]
        return Selection(
            tuple(int(pool[i]) for i in picked), exploit=True, why={"groups": len(groups)}
        )

    def observe(self, state: FedLECCState, event: RoundEvent) -> FedLECCState:
        k, updates = event.updates.k, event.updates
        if updates.loss is not None:
            state.loss[k] = updates.loss.to(state.loss)
        if LABEL_SHARES_KEY in updates.extras:
            state.shares[k] = updates.extras[LABEL_SHARES_KEY].to(state.shares)
        return state


def cluster_by_labels(shares: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """(L,) a group's number for each row of shares; -1 for rows that are nothing but 0."""
    reported = shares.sum(1) > 0
    groups = np.full(len(shares), -1, np.int64)
    if reported.sum() < 2:
        groups[reported] = 0
        return groups
    from scipy.cluster.hierarchy import (
        fcluster,
        linkage,
    )  # takes a second to load, and other recipes do without

    merges = linkage(
        np.sqrt(shares[reported]), "average"
    )  # Hellinger's distance times the root of 2
    groups[reported] = fcluster(merges, count, "maxclust")
    return groups
