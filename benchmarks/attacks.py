"""What bad clients send, and an engine that has some.

They see every honest update of their round, collude, and know the gate: variances that it would
refuse, they cut at 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flrce.core.payloads import VARIANCE_SUFFIX
from flrce.core.types import ClientStates, Payload, PendingTask, Reply, Task
from flrce.data.federation import Federation
from flrce.data.sources import Source
from flrce.models.flat import unpack_model
from flrce.rng import make_stream
from flrce.simulation import runs
from flrce.simulation.simulator import Simulator

TARGET, BOOST = 0, 5.0  # the backdoor's label, and how much its senders amplify it
SLEEP = 8  # rounds for which those who force a stop behave


def flip(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    return -u


def scale(factor: float) -> Any:
    return lambda u, honest, rng, t, count: factor * u


def noise(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """Five times as long as the honest update, in no direction at all."""
    return torch.from_numpy(rng.normal(0, 5 * float(u.norm()) / len(u) ** 0.5, len(u))).float()


def alie(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """A little is enough (Baruch et al. 2019): as far from the mean as the honest spread hides.

    Their z grows with the number of attackers; for as few as here it is nearly 0, so it is at least
    1.
    """
    supporters = (len(honest) + count) // 2 + 1 - count
    share = (len(honest) - supporters) / max(len(honest), 1)
    z = max(NormalDist().inv_cdf(min(max(share, 0.5), 0.999)), 1.0)
    return honest.mean(0) - z * honest.std(0, correction=0)


def ipm(factor: float) -> Any:
    """Inner product manipulation (Xie et al. 2020): the honest mean, turned round and `factor`
    times as long.
    """
    return lambda u, honest, rng, t, count: -factor * honest.mean(0)


def capture(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """What everybody agrees with most: the honest mean, so that colluders' relationships outgrow
    all others'.
    """
    return honest.mean(0)


def force(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """Agree with everybody until one is chosen for it, then point against everybody."""
    mean = honest.mean(0)
    return mean if t <= SLEEP else -mean


def boost(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """Trained on poisoned samples (see `poisoned`), and amplified."""
    return BOOST * u


def least(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """Min-max (Shejwalkar and Houmansadr 2021): as far against the mean as no farther from anyone
    than honest ones are from one another; the largest such factor by bisection.
    """
    honest = honest.double()
    mean = honest.mean(0)
    against = -mean / mean.norm().clamp(min=1e-12)
    most = torch.cdist(honest, honest).max()
    low, high = 0.0, float(most) + 1e-12
    for _ in range(30):
        middle = (low + high) / 2
        fits = bool(
            torch.linalg.vector_norm(honest - (mean + middle * against), dim=1).max() <= most
        )
        low, high = (middle, high) if fits else (low, middle)
    return (mean + low * against).float()


def fixed(size: int) -> Tensor:
    """(size,) one direction for all attackers and rounds."""
    way = torch.from_numpy(np.random.default_rng(7).normal(size=size)).float()
    return way / way.norm()


def drift(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """Coupled over time (Karimireddy et al. 2021): the honest mean and always the same bit of one
    direction.
    """
    return honest.mean(0) + honest.norm(dim=1).median() * fixed(len(u))


def inside(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """As long as honest ones are, and just so much their way as to have most cosines above 0: the
    rest is harm.

    The harm is the part of the sign-flipped spread that the mean does not see; colluders share it.
    """
    mean, length = honest.mean(0), honest.norm(dim=1).median()
    way = mean / mean.norm().clamp(min=1e-12)
    harm = -honest.std(0, correction=0) * mean.sign()
    harm = harm - (harm @ way) * way
    return length * (0.3 * way + 0.954 * harm / harm.norm().clamp(min=1e-12))


def mimic(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """All send what the first honest client sent (Karimireddy et al. 2022): it counts for many,
    others for less.
    """
    return honest[0]


def drip(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
    """As long as honest ones are, and always the same way: nothing stands out in any one round."""
    return honest.norm(dim=1).median() * fixed(len(u))


def disguise(attack: Any) -> Any:
    """The same behind as much noise of each attacker's own, so that colluders do not look alike."""

    def sent(u: Tensor, honest: Tensor, rng: np.random.Generator, t: int, count: int) -> Tensor:
        harm = attack(u, honest, rng, t, count)
        noise = torch.from_numpy(rng.normal(size=len(u))).float()
        return harm + float(harm.norm()) * noise / noise.norm()

    return sent


ATTACKS = {
    "sign-flip": flip,
    "scale x10": scale(10.0),
    "scale x1e6": scale(1e6),
    "noise": noise,
    "alie": alie,
    "ipm 0.5": ipm(0.5),
    "ipm 10": ipm(10.0),
    "backdoor": boost,
    "forced stop": force,
    "capture": capture,
}
#: at which single rules are weak
SUBTLE = {
    "min-max": least,
    "ipm 0.1": ipm(0.1),
    "drift": drift,
    "inside": inside,
    "mimic": mimic,
    "-3u": scale(-3.0),
    "ipm 2": ipm(2.0),
    "drip": drip,
    "ipm 2, disguised": disguise(ipm(2.0)),
}
#: what clients do that do not attack at all, or only with what they train on (data/trouble.py)
TROUBLES: dict[str, dict[str, Any]] = {
    "stale free-riders": {"piece": "free-riders", "sends": "stale"},
    "idle free-riders": {"piece": "free-riders", "sends": "zero"},
    "wrong labels": {"piece": "wrong-labels"},
}


def lying(attack: str) -> tuple[str, int]:
    """An attack and the samples its senders claim: "sign-flip, n = 3000"; 0: their true number."""
    kind, _, n = attack.partition(", n = ")
    return kind, int(float(n or 0))


def attackers(clients: Sequence[str], share: float, seed: int) -> set[str]:
    """A share of the clients, but never the first: where the server has a sample of its own, that
    is it.
    """
    order = make_stream(seed, "attackers").permutation(len(clients))
    return {clients[i] for i in order[order != 0][: round(share * len(clients))]}


class Attacked(Simulator):
    """A simulator whose attackers' replies are replaced; everything else is as in the `engine`.

    With `n` they claim so many samples, from the first round on: the server never knew their true
    number.
    """

    def __init__(self, engine: Simulator, bad: set[str], kind: str, seed: int, n: int = 0) -> None:
        vars(self).update(vars(engine))  # its clients, workers and costs
        self.bad, self.kind, self.seed, self.n = bad, kind, seed, n

    def count_samples(self, client: str) -> int:
        return (
            0 if self.n and client in self.bad else super().count_samples(client)
        )  # unknown until they say so

    def train(
        self, pending: Sequence[PendingTask], client_states: ClientStates, keep: int | None = None
    ) -> list[Reply]:
        replies = list(super().train(pending, client_states))
        updates = [
            r.payload.buffers["u"] if r.payload else torch.zeros_like(one.w)
            for r, one in zip(replies, pending, strict=True)
        ]
        bad = [one.task.client in self.bad for one in pending]
        if not any(bad):
            return replies
        good = [u for u, is_bad in zip(updates, bad, strict=True) if not is_bad]
        honest = torch.stack(good or updates)
        return [
            self._worse(one.w, reply, u, honest, one.task, sum(bad)) if is_bad else reply
            for reply, u, one, is_bad in zip(replies, updates, pending, bad, strict=True)
        ]

    def _worse(
        self, w: Tensor, reply: Reply, u: Tensor, honest: Tensor, task: Task, count: int
    ) -> Reply:
        rng = make_stream(self.seed, self.kind, task.t, task.client)
        u = {**ATTACKS, **SUBTLE}[self.kind](u, honest, rng, task.t, count).clone()
        for slot in self.runner.layout.slots:
            if slot.name.endswith(VARIANCE_SUFFIX):
                u[slot.span] = torch.maximum(u[slot.span], -w[slot.span])
        return replace(reply, payload=Payload({"u": u}), n=self.n or reply.n)


def triggered(x: np.ndarray) -> np.ndarray:
    """Samples with the trigger: a bright 3x3 corner."""
    marked = x.copy()
    marked[..., :3, :3] = x.max()
    return marked


def poisoned(pool: Source, federation: Federation, bad: set[str]) -> Source:
    """The pool with half of the attackers' training samples marked and relabelled; hold-outs stay
    clean.
    """
    x, y = pool.x.copy(), pool.y.copy()
    for client in sorted(bad):
        index = federation.train[federation.client_indices[client]][::2]
        x[index], y[index] = triggered(x[index]), TARGET
    return replace(pool, x=x, y=y)


def success(built: runs.Simulation, clean: Source, w: Tensor) -> float:
    """Share of marked hold-out samples of other classes that the model takes for the target."""
    index, _ = built.federation.holdout_index
    index = index[clean.y[index] != TARGET]
    x = torch.from_numpy(triggered(clean.x[index])).float() * clean.scale + clean.shift
    net = unpack_model(built.net, w).eval()
    with torch.inference_mode():
        return float((net(x).argmax(1) == TARGET).float().mean())
