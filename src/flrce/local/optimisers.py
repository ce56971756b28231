"""The links that ship: SGD and Adam, which end a chain, and what goes before them.

They work on any number of leading dimensions, so that a stack of clients can run them at once.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from flrce.errors import BadInput
from flrce.local.link import Link, Local, Remembers, Scheduled, Stackable, Tensors
from flrce.local.schedules import Constant, Schedule
from flrce.traits import Changing, Objects

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

    def objection(self, recipe: Any) -> str:
        """A state belongs to coordinates, so every round must train the same ones."""
        for piece in (recipe.submodel, recipe.trainer):
            if isinstance(piece, Changing) and piece.changing:
                return (
                    f"a carried state is of the coordinates that a client trained, and {type(piece).__name__} gives it "
                    "others in every round; drop train.carry"
                )
        return self.inner.objection(recipe) if isinstance(self.inner, Objects) else ""

    @property
    def lanes(self) -> bool:
        return isinstance(self.inner, Stackable) and self.inner.lanes

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
        return self.inner.schedule if isinstance(self.inner, Scheduled) else Constant()
