"""FedDyn (Acar et al. 2021), the server's half; methods/client/feddyn.py is the client's."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flrce.core.roles import ServerStep
from flrce.core.types import Updates


@dataclass(frozen=True)
class FedDynState:
    """The sum of all updates that ever counted: -M h / alpha in the paper's letters."""

    total: Tensor  # (d,)
    clients: Tensor = field(metadata={"rows": "trained"})  # (M,) nothing but their number


@dataclass(frozen=True)
class FedDynStep(ServerStep):
    """Past the replies' mean, by the mean over all M clients of what they have gone so far: target
    - h / alpha.

    h loses alpha / M times the sum of a round's updates, so alpha cancels. Statistics of BatchNorm
    go to the target.
    """

    def initial_state(self, M: int, d: int, D: int) -> FedDynState:
        return FedDynState(torch.zeros(d), torch.zeros(M, dtype=torch.bool))

    def step(
        self, w: Tensor, target: Tensor, updates: Updates, state: FedDynState
    ) -> tuple[Tensor, FedDynState]:
        d = updates.trainable
        total = state.total.double() + updates.u.double().sum(0)
        moved = target[:d].double() + total / len(state.clients)
        return torch.cat([moved.to(w.dtype), target[d:]]), FedDynState(total.float(), state.clients)
