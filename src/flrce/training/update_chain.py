"""How a gradient becomes a step: a chain of links, each a frozen dataclass that turns g into
another g.

    UpdateChain((GradientClip(1.0), ProximalTerm(0.01), Momentum(0.9), SGD(0.1)))

The last link says how far to go: w -= lr * g, with a rate that may follow a schedule. What a link
is: links.py; those that ship: optimizers.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsFloat

from torch import Tensor

from flrce.core.piece_checks import explain_renamed_method
from flrce.errors import BadInput, format_one_line
from flrce.training.links import Batch, ClientContext, Link, Tensors, explain_wrong_link
from flrce.training.optimizers import (
    SGD,
    Adam,
    GradientClip,
    GradientShift,
    Momentum,
    PersistentLink,
    ProximalTerm,
    WeightDecay,
)

__all__ = [
    "SGD",
    "Adam",
    "GradientClip",
    "GradientShift",
    "Momentum",
    "PersistentLink",
    "PlainSGD",
    "ProximalTerm",
    "UpdateChain",
    "WeightDecay",
    "match_plain_sgd",
]


@dataclass(frozen=True)
class UpdateChain:
    """Links in order; the last has `lr` and `schedule`. What link i keeps and sends bears its
    number: "0.b".
    """

    links: tuple[Link, ...] = (SGD(),)

    def __post_init__(self) -> None:
        for link in self.links:
            why = explain_renamed_method(link) or explain_wrong_link(link)
            if why:
                raise BadInput(f"update: {why}")
        if not self.links or self.links[-1].lr is None:
            raise BadInput("update: the last link must have a rate lr, such as SGD or Adam")
        self.list_extra_sizes(1)  # refuses two links that send one name

    @property
    def lr(self) -> float:
        return float(self.links[-1].lr)  # type: ignore[arg-type] # checked above

    def compute_step_rate(self, step: int, local: ClientContext) -> float:
        """How far step number `step` (from 0) of this round goes."""
        last = self.links[-1]
        factor = last.schedule(step, local.steps, local.task.t, local.task.rounds)
        if not isinstance(factor, int | float | SupportsFloat) or not math.isfinite(factor):
            name = type(last.schedule).__name__
            raise BadInput(
                f"{name} gave {factor!r:.60} for step {step} of round {local.task.t}; return a"
                " factor of lr"
            )
        return self.lr * float(factor)

    def prepend_link(self, link: Any) -> "UpdateChain":
        """With one more link at the front, where it sees the plain gradient."""
        return UpdateChain((link, *self.links))

    def begin_round(
        self, w: Tensor, local: ClientContext, client_state: Tensors
    ) -> tuple[Tensors, ...]:
        return tuple(
            link.begin_round(w, local, _select_link_state(client_state, i))
            for i, link in enumerate(self.links)
        )

    @cached_property
    def passes_per_step(self) -> float:
        """Forward and backward passes of a step."""
        return 1.0 + sum(float(link.extra_passes) for link in self.links)

    @cached_property
    def evaluations(self) -> int:
        """Passes over a client's samples before the first step, forward only."""
        return sum(link.evaluations for link in self.links)

    @cached_property
    def needs_batch(self) -> bool:
        """Whether some link wants more of a batch than its gradient."""
        return bool(self._probing_links or self._loss_term_links)

    @cached_property
    def _probing_links(self) -> frozenset[int]:
        return frozenset(i for i, link in enumerate(self.links) if link.probes_batch)

    @cached_property
    def _loss_term_links(self) -> frozenset[int]:
        return frozenset(i for i, link in enumerate(self.links) if link.has_loss_term)

    @cached_property
    def _stepping_links(self) -> frozenset[int]:
        """Links that change the gradient; the others only add to the loss."""
        return frozenset(i for i, link in enumerate(self.links) if link.has_step)

    @cached_property
    def _ending_links(self) -> tuple[int, ...]:
        return tuple(i for i, link in enumerate(self.links) if link.may_end_early)

    def ends_training(self, states: tuple[Tensors, ...]) -> bool:
        """Whether some link stops the client after this step."""
        return any(self.links[i].ends_training(states[i]) for i in self._ending_links)

    def step(
        self, g: Tensor, w: Tensor, states: tuple[Tensors, ...], batch: Batch | None = None
    ) -> tuple[Tensor, tuple[Tensors, ...]]:
        """The direction that the links make of g, and their states after it; `batch` is for those
        that ask.
        """
        after = []
        for i, (link, state) in enumerate(zip(self.links, states, strict=True)):
            if i in self._probing_links:
                assert batch is not None  # `needs_batch` asks for it
                g, state = _validate_link_step(link, "probe", link.probe(g, w, state, batch), g)
            elif i in self._stepping_links:
                g, state = _validate_link_step(link, "step", link.step(g, w, state), g)
            after.append(state)
        return g, tuple(after)

    def compute_loss_terms(self, batch: Batch, states: tuple[Tensors, ...]) -> list[Tensor]:
        """What the links add to each sample's loss, (n,) each."""
        found = []
        for i in sorted(self._loss_term_links):
            term = self.links[i].loss_term(batch, states[i])
            if not isinstance(term, Tensor) or term.shape != batch.y.shape[:1]:
                name = type(self.links[i]).__name__
                given = f"a tensor of {tuple(term.shape)}" if isinstance(term, Tensor) else term
                raise BadInput(
                    f"{name}.loss_term gave {given!s:.60}, not one value for each sample"
                )
            found.append(term)
        return found

    def frozen_coordinates(self, states: tuple[Tensors, ...]) -> list[Tensor]:
        """Coordinates that do not move in this step, (d,) bool each."""
        found = [
            link.frozen_coordinates(state) for link, state in zip(self.links, states, strict=True)
        ]
        return [mask for mask in found if mask is not None]

    def list_extra_sizes(self, d: int) -> dict[str, int]:
        """Names and sizes of all that travels back beside the update."""
        sizes: dict[str, int] = {}
        for link in self.links:
            named = link.list_extra_sizes(d)
            _refuse_second_sender(link, named, sizes)
            sizes |= dict(named)
        return sizes

    def end_round(
        self, w: Tensor, states: tuple[Tensors, ...]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(what stays with the client, what travels), each name with its link's number before
        it.
        """
        kept: dict[str, Tensor] = {}
        sent: dict[str, Tensor] = {}
        for i, (link, state) in enumerate(zip(self.links, states, strict=True)):
            client_state, extras = _validate_link_end(link, link.end_round(w, state))
            kept |= {f"{i}.{name}": value for name, value in client_state.items()}
            _refuse_second_sender(link, extras, sent)
            sent |= dict(extras)
        return kept, sent


def _validate_link_end(link: Any, found: Any) -> tuple[Tensors, Tensors]:
    """What a link keeps and sends, if both are named tensors."""
    if isinstance(found, tuple) and len(found) == 2:
        parts = [part for part in found if isinstance(part, Mapping)]
        if len(parts) == 2 and all(isinstance(v, Tensor) for part in parts for v in part.values()):
            return found
    raise BadInput(
        f"{type(link).__name__}.end_round returned {format_one_line(found, 100)}; return a pair:"
        " named tensors that stay, and named tensors that travel"
    )


def _refuse_second_sender(link: Any, names: Mapping[str, Any], sent: Mapping[str, Any]) -> None:
    """BadInput where a link sends a name that a link before it sends too: one of the two would be
    lost.
    """
    for name in names:
        if name in sent:
            kind = type(link).__name__
            raise BadInput(
                f"update: {kind} sends {name!r}, as a link before it does; rename it, or drop one"
                " of the two"
            )


def _select_link_state(client_state: Tensors, i: int) -> dict[str, Tensor]:
    """What link i kept, without its number."""
    return {
        name.removeprefix(f"{i}."): value
        for name, value in client_state.items()
        if name.startswith(f"{i}.")
    }


@dataclass(frozen=True)
class PlainSGD:
    """A chain that fused kernels know: plain SGD at one rate, at most with a proximal term."""

    lr: float
    mu: float = 0.0
    squared: bool = True


def match_plain_sgd(update: UpdateChain, local: ClientContext) -> PlainSGD | str:
    """The chain as its few numbers, or what there is more to it."""
    *front, last = update.links
    strange = [link for link in front if type(link) is not ProximalTerm]
    if strange or len(front) > 1 or type(last) is not SGD:
        return f"the update has {type((*strange, *front[1:], last)[0]).__name__}"
    rates = {update.compute_step_rate(step, local) for step in range(max(local.steps, 1))}
    if len(rates) > 1:
        return f"the rate changes within a round ({type(last.schedule).__name__})"
    prox = next((link for link in front if isinstance(link, ProximalTerm)), ProximalTerm(0.0))
    return PlainSGD(rates.pop(), prox.mu, prox.squared or not prox.mu)


def _validate_link_step(link: Any, how: str, found: Any, g: Tensor) -> tuple[Tensor, Tensors]:
    """What a link gave, if it is what a link gives: links are users' own as well."""
    name = f"{type(link).__name__}.{how}"
    if not isinstance(found, tuple) or len(found) != 2:
        raise BadInput(
            f"{name} gave {type(found).__name__}; it is to return a pair: the gradient, and its"
            " state"
        )
    gradient, state = found
    if not isinstance(gradient, Tensor) or not isinstance(state, Mapping):
        kinds = f"{type(gradient).__name__}, {type(state).__name__}"
        raise BadInput(f"{name} gave {kinds}; it is to return a pair: the gradient, and its state")
    if gradient.shape != g.shape:
        raise BadInput(f"{name} gave a gradient of {tuple(gradient.shape)} for {tuple(g.shape)}")
    return gradient, state
