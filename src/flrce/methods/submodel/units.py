"""Clients that hold only some units of every hidden layer, and train a physically smaller
network.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from flrce.core.bounds import PositiveFloat, PositiveProportion
from flrce.core.roles import RoundView, SubModel
from flrce.core.types import Portion, Task
from flrce.errors import BadInput
from flrce.rng import make_stream


@dataclass(frozen=True)
class SubmodelUnits(SubModel):
    """What both kinds share: a rate, or several of them, and that a part is trained.

    All hold a share `rate` of each hidden layer; or each one of several `rates`: its own for the
    whole run, or with `seconds` the largest that lets its device finish in time (Wen et al. 2022),
    else the smallest.
    """

    rate: PositiveProportion = 0.75
    rates: tuple[PositiveProportion, ...] = ()
    seconds: PositiveFloat | None = None
    ordered: ClassVar[bool]  # whether it is always the first units

    def __post_init__(self) -> None:
        _validate_rates(self)

    @property
    def partial(self) -> bool:
        return min(self.rates or (self.rate,)) < 1

    @property
    def needs_layer_chain(self) -> bool:
        return self.partial

    @property
    def changes_coordinates(self) -> bool:
        """Whether a client's coordinates change from round to round: what fits a device in time
        once always does.
        """
        return self.partial and not self.ordered

    def assign(self, tasks: list[Task], view: RoundView) -> list[Task]:
        return [_with_client_rate(self, task, view) for task in tasks]


@dataclass(frozen=True)
class RandomUnits(SubmodelUnits):
    """Federated Dropout (Caldas et al. 2018): other units for every client and round, drawn from a
    shared seed.
    """

    ordered: ClassVar[bool] = False


@dataclass(frozen=True)
class PrefixUnits(SubmodelUnits):
    """HeteroFL and FjORD (Diao et al., Horvath et al. 2021): the first units of each layer, so that
    parts nest.

    The first units are in every part, the last only in the largest.
    """

    ordered: ClassVar[bool] = True


def _validate_rates(piece: SubmodelUnits) -> None:
    object.__setattr__(piece, "rates", tuple(piece.rates))  # experiment files have lists
    for rate in (piece.rate, *piece.rates):
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise BadInput(f"rate {rate!r}: must be above 0 and at most 1 (1: the whole model)")
    if piece.seconds is not None and not piece.rates:
        raise BadInput(
            f"seconds = {piece.seconds!r} chooses among rates; give some, such as rates = [1, 0.75,"
            " 0.5]"
        )


def _with_client_rate(piece: SubmodelUnits, task: Task, view: RoundView) -> Task:
    """The task with its client's rate."""
    if not piece.rates:
        return replace(task, part=Portion(float(piece.rate), piece.ordered))
    sizes = sorted((float(rate) for rate in piece.rates), reverse=True)
    options = [replace(task, part=Portion(rate, piece.ordered)) for rate in sizes]
    if piece.seconds is None:
        return options[int(make_stream(task.seed, "rate", 0, task.client).integers(len(options)))]
    return next(
        (one for one in options if view.estimate(one).seconds <= piece.seconds), options[-1]
    )
