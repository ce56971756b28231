"""How a gradient becomes a step: a chain of links, each a frozen dataclass that turns g into another g.

    Chain((Clip(1.0), Prox(0.01), Momentum(0.9), SGD(0.1)))

The last link says how far to go: w -= lr * g, with a rate that may follow a schedule. What a link is: link.py.
Shipped links work on any number of leading dimensions, so that a stack of clients can run them at once.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from flrce.errors import BadInput
from flrce.local.link import Adds, Batch, Costs, Ends, Holds, Link, Local, Probes, Remembers, Sends, Tensors
from flrce.local.schedules import Constant, Schedule

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Clip:
    """g scaled down to a norm of at most `norm`, taken over all trained coordinates."""

    norm: Positive = 1.0
    lanes: ClassVar[bool] = True

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        length = g.norm(dim=-1, keepdim=True)
        return g * (self.norm / length.clamp(min=torch.finfo(g.dtype).tiny)).clamp(max=1.0), state


@dataclass(frozen=True)
class WeightDecay:
    """g + decay * w: the gradient of decay/2 |w|^2, as in SGD; AdamW has its own."""

    decay: NotNegative = 1e-4
    lanes: ClassVar[bool] = True

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return g.add(w, alpha=self.decay), state


@dataclass(frozen=True)
class Prox:
    """g + mu (w - w_start), the gradient of FedProx's mu/2 |w - w_start|^2; not `squared`: of mu |.| per tensor."""

    mu: NotNegative = 0.01
    squared: bool = True

    @property
    def lanes(self) -> bool:
        return self.squared

    def begin(self, w: Tensor, local: Local, carry: Tensors) -> Tensors:
        state = {"start": w.clone()}
        if not self.squared:
            state["spans"] = torch.tensor([[s.offset, s.offset + s.size] for s in local.layout.slots if s.trainable])
        return state

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        pull = w - state["start"]
        if not self.squared:
            parts = [pull[start:end] for start, end in state["spans"].tolist()]
            pull = torch.cat([part / part.norm() if part.any() else part for part in parts])
        return g.add(pull, alpha=self.mu), state


@dataclass(frozen=True)
class Momentum:
    """b = beta b + g; the step goes along b, or with `nesterov` along g + beta b (as torch.optim.SGD)."""

    beta: Share = 0.9
    nesterov: bool = False
    lanes: ClassVar[bool] = True

    def begin(self, w: Tensor, local: Local, carry: Tensors) -> Tensors:
        return {"b": torch.zeros_like(w)}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        b = self.beta * state["b"] + g
        return (g.add(b, alpha=self.beta) if self.nesterov else b), {"b": b}


@dataclass(frozen=True)
class Drift:
    """g + a fixed vector that came with the task under `name`, minus one that the client keeps under it.

    Control variates in general: SCAFFOLD's g - c_k + c. Whoever builds on it says in its own `end` what is kept.
    """

    name: Annotated[str, Field(min_length=1, max_length=60)] = "drift"
    lanes: ClassVar[bool] = True

    def begin(self, w: Tensor, local: Local, carry: Tensors) -> Tensors:
        sent, kept = local.task.tensors.get(self.name), carry.get(self.name)
        shift = torch.zeros_like(w)
        shift = shift if sent is None else shift + sent
        return {"shift": shift if kept is None else shift - kept}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return g + state["shift"], state


@dataclass(frozen=True)
class SGD:
    """The end of a chain: w -= lr g."""

    lr: Positive = 0.1
    schedule: Schedule = field(default=Constant(), metadata={"piece": "schedule"})
    lanes: ClassVar[bool] = True

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return g, state


@dataclass(frozen=True)
class Adam:
    """The end of a chain: Adam (Kingma & Ba 2015); with `decay`, AdamW's decoupled weight decay."""

    lr: Positive = 1e-3
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Positive = 1e-8
    decay: NotNegative = 0.0
    schedule: Schedule = field(default=Constant(), metadata={"piece": "schedule"})
    lanes: ClassVar[bool] = True

    def begin(self, w: Tensor, local: Local, carry: Tensors) -> Tensors:
        return {"m": torch.zeros_like(w), "v": torch.zeros_like(w), "s": torch.zeros_like(w[..., :1])}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        m = torch.lerp(g, state["m"], self.beta1)
        v = torch.lerp(g.square(), state["v"], self.beta2)
        s = state["s"] + 1
        unbiased = m / (1 - self.beta1**s)
        size = (v / (1 - self.beta2**s)).sqrt() + self.eps
        step = unbiased / size
        return (step.add(w, alpha=self.decay) if self.decay else step), {"m": m, "v": v, "s": s}


@dataclass(frozen=True)
class Carried:
    """A link whose state stays with the client from one of its rounds to the next, instead of starting anew."""

    inner: Any = field(default=Momentum(), metadata={"piece": "link"})

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Link):
            raise BadInput(
                f"carried: {type(self.inner).__name__} has no step(g, w, state) whose state could stay; drop it"
            )

    @property
    def lanes(self) -> bool:
        return bool(getattr(self.inner, "lanes", False))

    def begin(self, w: Tensor, local: Local, carry: Tensors) -> Tensors:
        fresh = self.inner.begin(w, local, carry) if isinstance(self.inner, Remembers) else {}
        return {name: carry.get(name, value) for name, value in fresh.items()}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        found: tuple[Tensor, Tensors] = self.inner.step(g, w, state)
        return found

    def end(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        return dict(state), {}

    @property
    def lr(self) -> float:
        return float(self.inner.lr)

    @property
    def schedule(self) -> Schedule:
        found: Schedule = self.inner.schedule
        return found


@dataclass(frozen=True)
class Chain:
    """Links in order; the last has `lr` and `schedule`. What link i keeps and sends bears its number: "0.b"."""

    links: tuple[Any, ...] = (SGD(),)

    def __post_init__(self) -> None:
        for link in self.links:
            if not isinstance(link, Link | Probes | Adds):
                raise BadInput(f"update: {type(link).__name__} has no step(g, w, state), so it is no link")
        if not self.links or not hasattr(self.links[-1], "lr"):
            raise BadInput("update: the last link must have a rate lr, such as SGD or Adam")

    @property
    def lr(self) -> float:
        return float(self.links[-1].lr)

    def rate(self, step: int, local: Local) -> float:
        """How far step number `step` (from 0) of this round goes."""
        schedule = getattr(self.links[-1], "schedule", Constant())
        return self.lr * float(schedule(step, local.steps, local.task.t, local.task.rounds))

    def before(self, link: Any) -> "Chain":
        """With one more link at the front, where it sees the plain gradient."""
        return Chain((link, *self.links))

    def with_rate(self, lr: float) -> "Chain":
        return Chain((*self.links[:-1], replace(self.links[-1], lr=lr)))

    def begin(self, w: Tensor, local: Local, carry: Tensors) -> tuple[Tensors, ...]:
        return tuple(
            link.begin(w, local, _own(carry, i)) if isinstance(link, Remembers) else {}
            for i, link in enumerate(self.links)
        )

    @cached_property
    def passes(self) -> float:
        """Forward and backward passes of a step."""
        return 1.0 + sum(float(link.passes) for link in self.links if isinstance(link, Costs))

    @cached_property
    def asks(self) -> bool:
        """Whether some link wants more of a batch than its gradient."""
        return bool(self._probing or self._adding)

    @cached_property
    def _probing(self) -> frozenset[int]:
        return frozenset(i for i, link in enumerate(self.links) if isinstance(link, Probes))

    @cached_property
    def _adding(self) -> frozenset[int]:
        return frozenset(i for i, link in enumerate(self.links) if isinstance(link, Adds))

    @cached_property
    def _holding(self) -> frozenset[int]:
        return frozenset(i for i, link in enumerate(self.links) if isinstance(link, Holds))

    @cached_property
    def _idle(self) -> frozenset[int]:
        """Links that only add to the loss."""
        return frozenset(i for i, link in enumerate(self.links) if not isinstance(link, Link | Probes))

    def step(
        self, g: Tensor, w: Tensor, states: tuple[Tensors, ...], batch: Batch | None = None
    ) -> tuple[Tensor, tuple[Tensors, ...]]:
        """The direction that the links make of g, and their states after it; `batch` is for those that ask."""
        after = []
        for i, (link, state) in enumerate(zip(self.links, states, strict=True)):
            if i in self._probing:
                g, state = link.probe(g, w, state, batch)
            elif i not in self._idle:
                g, state = link.step(g, w, state)
            after.append(state)
        return g, tuple(after)

    def terms(self, batch: Batch, states: tuple[Tensors, ...]) -> list[Tensor]:
        """What the links add to each sample's loss, (n,) each."""
        found = []
        for i in sorted(self._adding):
            term = self.links[i].term(batch, states[i])
            if term.shape != batch.y.shape[:1]:
                name = type(self.links[i]).__name__
                raise BadInput(f"{name}.term gave a tensor of {tuple(term.shape)}, not one value for each sample")
            found.append(term)
        return found

    def still(self, states: tuple[Tensors, ...]) -> list[Tensor]:
        """Coordinates that do not move in this step, (d,) bool each."""
        found = [self.links[i].still(states[i]) for i in sorted(self._holding)]
        return [mask for mask in found if mask is not None]

    def sends(self, d: int) -> dict[str, int]:
        """Names and sizes of all that travels back beside the update."""
        return {name: n for link in self.links if isinstance(link, Sends) for name, n in link.sends(d).items()}

    def end(self, w: Tensor, states: tuple[Tensors, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(what stays with the client, what travels), each name with its link's number before it."""
        kept: dict[str, Tensor] = {}
        sent: dict[str, Tensor] = {}
        for i, (link, state) in enumerate(zip(self.links, states, strict=True)):
            if isinstance(link, Ends):
                carry, extras = link.end(w, state)
                kept |= {f"{i}.{name}": value for name, value in carry.items()}
                sent |= dict(extras)
        return kept, sent


def _own(carry: Tensors, i: int) -> dict[str, Tensor]:
    """What link i kept, without its number."""
    return {name.removeprefix(f"{i}."): value for name, value in carry.items() if name.startswith(f"{i}.")}


@dataclass(frozen=True)
class Simple:
    """A chain that fused kernels know: plain SGD at one rate, at most with a proximal term."""

    lr: float
    mu: float = 0.0
    squared: bool = True


def simple(update: Chain, local: Local) -> Simple | str:
    """The chain as its few numbers, or what there is more to it."""
    *front, last = update.links
    strange = [link for link in front if type(link) is not Prox]
    if strange or len(front) > 1 or type(last) is not SGD:
        return f"the update has {type((*strange, *front[1:], last)[0]).__name__}"
    rates = {update.rate(step, local) for step in range(max(local.steps, 1))}
    if len(rates) > 1:
        return f"the rate changes within a round ({type(last.schedule).__name__})"
    prox = front[0] if front else Prox(0.0)
    return Simple(rates.pop(), prox.mu, prox.squared or not prox.mu)
