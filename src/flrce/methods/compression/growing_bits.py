"""Precision that follows the run: DAdaQuant (Hoenig, Zhao & Mullins 2021)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from flrce.core.bounds import PositiveInt, find_problem
from flrce.core.pieces import Recipe
from flrce.core.roles import Compressor, RoundView
from flrce.core.types import RoundEvent, Task
from flrce.errors import BadInput
from flrce.methods.compression.qsgd import FixedPointCode
from flrce.methods.compression.wrapping import WrappingCompressor

KNOBS = ("levels", "bits")  # fields that say how precise a compressor is


@dataclass(frozen=True)
class BitGrowthState:
    """How precise the codes are now, and the running averages of the loss that decide it."""

    precision: float  # levels or bits of a round in which all clients are alike
    averages: Tensor  # (patience + 1,) float64, of the last rounds, the latest last
    rounds: int = 0  # observed since the precision grew


@dataclass(frozen=True)
class GrowingBits(WrappingCompressor):
    """The inner compressor with more levels, or bits, once the training loss stops falling.

    It begins with the precision that `inner` has. After each round the server averages the clients'
    loss, G = smoothing G + (1 - smoothing) loss. Where G is no lower than `patience` rounds before,
    and the precision is as old, levels double (bits: one more; fractions of a bit double), up to
    `most`. With `by_samples`, a client of weight p among a round's clients gets levels in
    proportion to p^(2/3), which sends the fewest levels at the same variance of the mean.
    """

    inner: Compressor = field(default=FixedPointCode(), metadata={"piece": True})
    most: PositiveInt = 8
    patience: PositiveInt = 10
    smoothing: Annotated[float, Ge(0), Lt(1)] = 0.9
    by_samples: bool = True
    instruction_bytes: ClassVar[int] = 1  # the levels or bits of the client's task

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_precision(self.inner) is None:
            name = type(self.inner).__name__
            raise BadInput(f"inner = {name} has neither levels nor bits that could grow")
        try:
            why = find_problem(set_precision(self.inner, self.most))
        except BadInput as error:
            why = str(error)
        if why:
            raise BadInput(f"most = {self.most} is more than inner can have: {why}")

    def check_recipe(self, recipe: Recipe) -> str:
        if recipe.compressor is not self:
            return "growing-bits goes outermost: put the other compressors into its inner"
        return super().check_recipe(recipe)

    def initial_state(self, M: int, d: int, D: int) -> BitGrowthState:
        averages = torch.full((self.patience + 1,), math.inf, dtype=torch.float64)
        return BitGrowthState(float(find_precision(self.inner) or 1), averages)

    def observe(self, state: BitGrowthState, event: RoundEvent) -> BitGrowthState:
        updates = event.updates
        if updates.loss is None or not len(updates):
            return state
        loss = float((updates.n * updates.loss).sum() / updates.n.sum())
        last = float(state.averages[-1])
        average = loss if last == math.inf else self.smoothing * last + (1 - self.smoothing) * loss
        averages = torch.cat([state.averages[1:], state.averages.new_tensor([average])])
        rounds = state.rounds + 1
        stalled = rounds >= self.patience and bool(averages[-1] >= averages[0])
        grown = self._grow(state.precision) if stalled else state.precision
        return BitGrowthState(grown, averages, 0 if grown != state.precision else rounds)

    def assign(self, tasks: list[Task], state: BitGrowthState, view: RoundView) -> list[Task]:
        precisions = [state.precision] * len(tasks)
        n = [float(view.n[task.k]) for task in tasks]
        if self.by_samples and state.precision >= 1 and tasks and min(n) > 0:
            precisions = self._share_precision(state.precision, n)
        return [
            replace(task, compressor=replace(self, inner=set_precision(self.inner, precision)))
            for task, precision in zip(tasks, precisions, strict=True)
        ]

    def _grow(self, precision: float) -> float:
        """The next precision; the same one where it would exceed `most`."""
        if find_knob(self.inner)[1] == "bits" and precision >= 1:
            grown = precision + 1
        else:
            grown = 2 * precision if precision >= 1 else min(2 * precision, 1.0)
        return grown if grown <= self.most else precision

    def _share_precision(self, precision: float, n: Sequence[float]) -> list[float]:
        """Each client's levels or bits, from 1 to `most`."""
        knob = find_knob(self.inner)[1]
        q = precision if knob == "levels" else 2**precision - 1
        levels = share_levels(q, n)
        if knob == "bits":
            levels = [math.log2(level + 1) for level in levels]
        return [float(min(max(math.floor(level + 0.5), 1), self.most)) for level in levels]


def share_levels(q: float, n: Sequence[float]) -> list[float]:
    """q_k = sqrt(a / b) p_k^(2/3), a = sum p^(2/3), b = sum p^2 / q^2, p = n / sum n: the fewest
    levels in all for which sum p_k^2 / q_k^2, the variance of the mean up to a factor, is that of
    q for everyone (the paper's theorem).
    """
    shares = [count / sum(n) for count in n]
    a = sum(p ** (2 / 3) for p in shares)
    b = sum(p**2 for p in shares) / q**2
    return [math.sqrt(a / b) * p ** (2 / 3) for p in shares]


def find_knob(compressor: Any) -> tuple[Any, str]:
    """(the compressor, itself or inner, that has a precision; its field's name, "" if none)."""
    names = {f for f in KNOBS if f in getattr(compressor, "__dataclass_fields__", {})}
    if names and getattr(compressor, min(names)) is not None:
        return compressor, min(names)
    inner = getattr(compressor, "inner", None)
    return (compressor, "") if inner is None else find_knob(inner)


def find_precision(compressor: Any) -> float | None:
    """The levels or bits of a compressor, or of the one inside it; None: it has none."""
    owner, name = find_knob(compressor)
    return getattr(owner, name) if name else None


def set_precision(compressor: Any, precision: float) -> Any:
    """The same compressor with so many levels or bits; whole numbers as integers."""
    owner, name = find_knob(compressor)
    if owner is compressor:
        exact = int(precision) if precision == int(precision) else precision
        changed: Any = replace(compressor, **{name: exact})
        return changed
    return replace(compressor, inner=set_precision(compressor.inner, precision))
