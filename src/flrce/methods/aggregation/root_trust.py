"""FLTrust (Cao et al. 2021): the server has a few samples of its own, and an update counts as far
as it goes their way.

The server's sample is a client like any other, the *root*, that the server's operator runs and that
is asked in every round (selection/rooted.py); in a simulation `data.trouble` with `server-sample`
gives the first client such a sample.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flrce.core.bounds import NonNegativeInt
from flrce.core.pieces import Recipe
from flrce.core.roles import Aggregator
from flrce.core.types import Updates


@dataclass(frozen=True)
class FLTrust(Aggregator):
    """w + sum t_k |u_0| u_k / |u_k| / sum t_k, t_k = max(cos(u_k, u_0), 0), over all replies but
    the root's u_0.

    BatchNorm statistics are no gradients: theirs is the mean with the same t_k, none longer than
    the root's. Where the root's reply is missing, or nobody goes its way, the model stays.
    """

    root: NonNegativeInt = 0

    def check_recipe(self, recipe: Recipe) -> str:
        if why := recipe.explain_parts("root-trust compares whole updates"):
            return why
        if recipe.selector.root_client != self.root:
            return (
                'root-trust needs its root in every round; set selector = {piece = "rooted", root'
                f" = {self.root}}}"
            )
        return ""

    def __call__(self, w: Tensor, updates: Updates, state: object) -> Tensor:
        rows = (updates.k == self.root).nonzero().flatten().tolist()
        if not rows or len(updates) < 2:
            return w
        d, U = updates.trainable, updates.U.double()
        own = U[rows[0]]
        length = torch.linalg.vector_norm(U[:, :d], dim=1)
        trust = (U[:, :d] @ own[:d]).clamp(min=0) / (length * length[rows[0]]).clamp(min=1e-300)
        trust[rows[0]] = 0.0
        total = float(trust.sum())
        if not total:
            return w
        scale = trust * length[rows[0]] / length.clamp(min=1e-300)
        far = torch.linalg.vector_norm(U[:, d:], dim=1)
        short = trust * (far[rows[0]] / far.clamp(min=1e-300)).clamp(max=1)
        moved = torch.cat([scale @ U[:, :d], short @ U[:, d:]]) / total
        return (w.double() + moved).to(w.dtype)
