"""The links that ship: SGD and Adam, which end a chain, and what goes before them.

They work on any number of leading dimensions, so that a stack of clients can run them at once.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from flrce.core.roles import overrides
from flrce.errors import BadInput
from flrce.training.links import ClientContext, Link, Tensors
from flrce.training.schedules import ConstantRate, Schedule

PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
ProportionBelowOne = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class GradientClip(Link):
    """g scaled down to a norm of at most `norm`, taken over all trained coordinates."""

    norm: PositiveFloat = 1.0
    supports_client_batches: ClassVar[bool] = True

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        length = g.norm(dim=-1, keepdim=True)
        return g * (self.norm / length.clamp(min=torch.finfo(g.dtype).tiny)).clamp(max=1.0), state


@dataclass(frozen=True)
class WeightDecay(Link):
    """g + decay * w: the gradient of decay/2 |w|^2, as in SGD; AdamW has its own."""

    decay: NonNegativeFloat = 1e-4
    supports_client_batches: ClassVar[bool] = True

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return g.add(w, alpha=self.decay), state


@dataclass(frozen=True)
class ProximalTerm(Link):
    """g + mu (w - w_start), the gradient of FedProx's mu/2 |w - w_start|^2; not `squared`: of mu
    |.| per tensor.
    """

    mu: NonNegativeFloat = 0.01
    squared: bool = True

    @property
    def supports_client_batches(self) -> bool:
        return self.squared

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        state = {"start": w.clone()}
        if not self.squared:
            state["spans"] = torch.tensor(
                [[s.offset, s.offset + s.size] for s in local.layout.slots if s.trainable]
            )
        return state

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        pull = w - state["start"]
        if not self.squared:
            parts = [pull[start:end] for start, end in state["spans"].tolist()]
            pull = torch.cat([part / part.norm() if part.any() else part for part in parts])
        return g.add(pull, alpha=self.mu), state


@dataclass(frozen=True)
class Momentum(Link):
    """b = beta b + g; the step goes along b, or with `nesterov` along g + beta b (as
    torch.optim.SGD).
    """

    beta: ProportionBelowOne = 0.9
    nesterov: bool = False
    supports_client_batches: ClassVar[bool] = True

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        return {"b": torch.zeros_like(w)}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        b = self.beta * state["b"] + g
        return (g.add(b, alpha=self.beta) if self.nesterov else b), {"b": b}


@dataclass(frozen=True)
class GradientShift(Link):
    """g + a fixed vector that came with the task under `name`, minus one that the client keeps
    under it.

    Control variates in general: SCAFFOLD's g - c_k + c. Whoever builds on it says in its own
    `end_round` what is kept.
    """

    name: Annotated[str, Field(min_length=1, max_length=60)] = "drift"
    supports_client_batches: ClassVar[bool] = True

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        sent, kept = local.task.tensors.get(self.name), client_state.get(self.name)
        shift = torch.zeros_like(w)
        shift = shift if sent is None else shift + sent
        return {"shift": shift if kept is None else shift - kept}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return g + state["shift"], state


@dataclass(frozen=True)
class SGD(Link):
    """The end of a chain: w -= lr g."""

    lr: PositiveFloat = 0.1
    schedule: Schedule = field(default=ConstantRate(), metadata={"piece": "schedule"})
    supports_client_batches: ClassVar[bool] = True

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return g, state


@dataclass(frozen=True)
class Adam(Link):
    """The end of a chain: Adam (Kingma & Ba 2015); with `decay`, AdamW's decoupled weight decay."""

    lr: PositiveFloat = 1e-3
    beta1: ProportionBelowOne = 0.9
    beta2: ProportionBelowOne = 0.999
    eps: PositiveFloat = 1e-8
    decay: NonNegativeFloat = 0.0
    schedule: Schedule = field(default=ConstantRate(), metadata={"piece": "schedule"})
    supports_client_batches: ClassVar[bool] = True

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        moments = {"m": torch.zeros_like(w), "v": torch.zeros_like(w)}
        return {**moments, "s": torch.zeros_like(w[..., :1])}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        m = torch.lerp(g, state["m"], self.beta1)
        v = torch.lerp(g.square(), state["v"], self.beta2)
        s = state["s"] + 1
        unbiased = m / (1 - self.beta1**s)
        size = (v / (1 - self.beta2**s)).sqrt() + self.eps
        step = unbiased / size
        return (step.add(w, alpha=self.decay) if self.decay else step), {"m": m, "v": v, "s": s}


@dataclass(frozen=True)
class PersistentLink(Link):
    """A link whose state stays with the client from one of its rounds to the next, instead of
    starting anew.
    """

    inner: Link = field(default=Momentum(), metadata={"piece": "link"})

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Link) or not overrides(self.inner, Link, "step"):
            raise BadInput(
                f"carried: {type(self.inner).__name__} has no step(g, w, state) whose state could"
                " stay; drop it"
            )

    def check_recipe(self, recipe: Any) -> str:
        """A state belongs to coordinates, so every round must train the same ones."""
        for piece in (recipe.submodel, recipe.trainer):
            if piece.changes_coordinates:
                return (
                    "a carried state is of the coordinates that a client trained, and"
                    f" {type(piece).__name__} gives it others in every round; drop train.carry"
                )
        return self.inner.check_recipe(recipe)

    @property
    def supports_client_batches(self) -> bool:
        return self.inner.supports_client_batches

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        fresh = self.inner.begin_round(w, local, client_state)
        return {name: client_state.get(name, value) for name, value in fresh.items()}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return self.inner.step(g, w, state)

    def end_round(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        return dict(state), {}

    @property
    def lr(self) -> float | None:
        return self.inner.lr

    @property
    def schedule(self) -> Schedule:
        return self.inner.schedule
