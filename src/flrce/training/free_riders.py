"""What a client sends that does not train (data/trouble.py says who they are)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from flrce.core.types import Reply, Task
from flrce.data.trouble import FreeRiders
from flrce.rng import make_stream
from flrce.training.client import ClientRunner

# the model that the client was sent before, among what it carries
PREVIOUS_MODEL_KEY = "free-rider.w"


def make_free_rider_reply(
    runner: ClientRunner,
    w: Tensor,
    task: Task,
    how: FreeRiders,
    n: int,
    client_state: Mapping[str, Tensor],
) -> Reply:
    """A reply in the form that the task asks for, made of the models that the client was sent."""
    part = runner.get_part(task)
    way = w - client_state.get(PREVIOUS_MODEL_KEY, w)
    rng = make_stream(task.seed, "free-rider", task.t, task.client)
    noise = torch.from_numpy(rng.normal(size=len(w))).to(w.dtype)
    u = _fabricate_update(way, w, how, noise, runner.layout.trainable)
    coordinates = part.coordinates
    u = u if coordinates is None else u[coordinates]
    encoder = make_stream(task.seed, "encode", task.t, task.client)
    payload, kept = task.compressor.encode(u, part.names, encoder, client_state)
    sends = task.update.list_extra_sizes(runner.layout.trainable) if task.update is not None else {}
    extras = {name: torch.zeros(size) for name, size in sends.items()}
    return Reply(
        task.client,
        task.t,
        payload,
        n=n,
        extras=extras,
        client_state={**client_state, **kept, PREVIOUS_MODEL_KEY: w.clone()},
    )


def _fabricate_update(
    way: Tensor, w: Tensor, how: FreeRiders, noise: Tensor, trained: int
) -> Tensor:
    """(D,) u; statistics of BatchNorm are sent back as they came, since noise on them would be
    refused.
    """
    u = torch.zeros_like(w)
    if how.sends == "stale":
        u[:trained] = how.level * way[:trained]
    if how.sends == "noise":
        # asked for the first time
        length = float(way[:trained].norm()) or 0.01 * float(w[:trained].norm())
        u[:trained] = how.level * length * noise[:trained] / noise[:trained].norm()
    return u
