"""Who is there: the rows of the server's tables, and what is known of their clients."""

from dataclasses import replace

import torch
from torch import Tensor

from flrce.pieces import Engine
from flrce.round.tables import grow
from flrce.traits import Counts
from flrce.types import State


def present(state: State, clients: tuple[str, ...]) -> tuple[State, tuple[int, ...]]:
    """The state with newcomers on its roster, and the rows of all who are here."""
    if clients == state.roster:  # as a rule nobody came or went, and a million names need not be looked up
        return state, tuple(range(len(clients)))
    here = set(clients)
    roster = state.roster + tuple(sorted(here - set(state.roster)))
    if len(roster) > len(state.roster):
        state = replace(state, roster=roster, memory=grow(state.memory, len(roster)))
    return state, tuple(k for k, client in enumerate(state.roster) if client in here)


def samples(engine: Engine, roster: tuple[str, ...]) -> Tensor:
    """(M,) training samples."""
    if isinstance(engine, Counts):
        return engine.counts(roster)
    return torch.tensor([engine.samples(k) for k in roster], dtype=torch.float64)
