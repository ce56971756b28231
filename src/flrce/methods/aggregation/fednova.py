"""FedNova (Wang et al. 2020): a client that makes more steps does not pull the mean towards its own
optimum.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from flrce.core.pieces import Recipe
from flrce.core.roles import Aggregator
from flrce.core.types import Updates
from flrce.methods.aggregation.mean import add_weighted_mean

# links whose steps |a| below counts rightly
SUPPORTED_LINKS = ("GradientClip", "WeightDecay", "Momentum", "ProximalTerm", "SGD")


@dataclass(frozen=True)
class FedNovaMean(Aggregator):
    """w + tau_eff sum p_k u_k / |a_k|, tau_eff = sum p_k |a_k|.

    |a_k| is how many gradients' lengths tau_k steps go: tau_k for plain SGD, and with a client's
    `momentum` rho (tau_k - rho (1 - rho^tau_k) / (1 - rho)) / (1 - rho); with a proximal term, of
    which each step takes the share `prox` = lr mu of the way back,
    (1 - (1 - prox)^tau_k) / prox. tau_k are the batches that a client says it
    trained on. Statistics of BatchNorm are no gradients: their mean is the plain one.
    """

    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0
    prox: Annotated[float, Ge(0), Lt(1)] = 0.0
    device_agnostic: ClassVar[bool] = True

    def check_recipe(self, recipe: Recipe) -> str:
        if why := recipe.explain_parts("FedNova's mean is of whole updates"):
            return why
        links: tuple[Any, ...] = recipe.chain.links if recipe.chain is not None else ()
        momenta = [link for link in links if type(link).__name__ == "Momentum"]
        strange = [
            type(link).__name__ for link in links if type(link).__name__ not in SUPPORTED_LINKS
        ]
        strange += ["nesterov" for link in momenta if link.nesterov]
        if strange:
            return (
                f"FedNova knows the steps of SGD and its momentum only, not of {strange[0]};"
                " drop it"
            )
        pulls = [link for link in links if type(link).__name__ == "ProximalTerm"]
        if any(not link.squared for link in pulls):
            return "FedNova knows the squared proximal term only; set squared = true"
        share = recipe.chain.lr * sum(link.mu for link in pulls) if pulls else 0.0
        if abs(share - self.prox) > 1e-9:
            return (
                f"aggregator.prox = {self.prox:g} must be the clients' lr times mu, {share:g}; set"
                " both alike"
            )
        if self.prox and (self.momentum or type(links[-1].schedule).__name__ != "ConstantRate"):
            return (
                "FedNova's proximal form is of plain steps at one rate; drop the momentum or the"
                " schedule"
            )
        betas = {link.beta for link in momenta} or {0.0}
        if betas != {self.momentum}:
            return (
                f"aggregator.momentum = {self.momentum} must be the clients' {min(betas)}; set both"
                " alike"
            )
        return ""

    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        a = self.effective_steps(updates)
        p = updates.n / updates.n.sum()
        # `add_weighted_mean` divides by its weights' sum: the rate puts it back
        rate = float((p * a).sum() * (p / a).sum())
        moved, mean = (
            add_weighted_mean(w, updates, p / a, rate),
            add_weighted_mean(w, updates, updates.n),
        )
        return torch.cat([moved[: updates.trainable], mean[updates.trainable :]])

    def effective_steps(self, updates: Updates) -> Tensor:
        """(P,) |a_k|; of clients that do not say, the others' mean."""
        tau = torch.tensor([spent.batches for spent in updates.spent], dtype=torch.float64)
        is_known = tau > 0
        if not bool(is_known.any()):
            return torch.ones(len(updates), dtype=torch.float64)
        tau = torch.where(is_known, tau, tau[is_known].mean())
        rho = self.momentum
        if self.prox:
            return (1 - (1 - self.prox) ** tau) / self.prox
        return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
