"""Which tasks may be lanes of one client batch, and what of each goes into its lane."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.training.client import LINK_STATE_PREFIX, PreparedTask
from flrce.training.update_chain import PlainSGD, UpdateChain, match_plain_sgd


class BatchingKey(NamedTuple):
    """What the lanes of one client batch have in common."""

    rate: float | int  # share of the network that trains, of a sub-model
    first: int  # first block that trains
    proximal: tuple[bool, bool]  # whether there is a proximal term, and whether it is squared
    update: UpdateChain | None  # the chain of links; None for plain SGD


def batching_key(task: PreparedTask) -> BatchingKey:
    """Tasks with equal keys may be lanes of one client batch."""
    plain = match_plain_sgd(task.update, task.local)
    rate, first = task.part.key[0], task.task.part.first
    if isinstance(plain, PlainSGD):
        return BatchingKey(rate, first, (plain.mu > 0, plain.squared), None)
    return BatchingKey(rate, first, (False, True), task.update)


def extract_link_state(client_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that links keep, of all that a client keeps."""
    return {
        name.removeprefix(LINK_STATE_PREFIX): value
        for name, value in client_state.items()
        if name.startswith(LINK_STATE_PREFIX)
    }


def collect_learning_rates(
    tasks: Sequence[PreparedTask], update: UpdateChain | None
) -> Tensor | list[NDArray[np.float32]]:
    """One rate for each task, or for each of its steps where links may change it within a round."""
    if update is None:
        return torch.tensor([sgd_hyperparameters(task).lr for task in tasks])
    return [
        np.array(
            [task.update.compute_step_rate(s, task.local) for s in range(len(task.sizes))],
            np.float32,
        )
        for task in tasks
    ]


def sgd_hyperparameters(task: PreparedTask) -> PlainSGD:
    """The hyperparameters of plain SGD, as far as an update has them."""
    plain = match_plain_sgd(task.update, task.local)
    return plain if isinstance(plain, PlainSGD) else PlainSGD(task.update.lr)
