"""Who is there: the rows of the server's tables, and what is known of their clients."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flrce.pieces import Engine
from flrce.round.tables import grow
from flrce.traits import Counts
from flrce.types import State

log = logging.getLogger("flrce")


def present(
    state: State, clients: tuple[str, ...], fits: Callable[[int], bool] = lambda M: True
) -> tuple[State, tuple[int, ...]]:
    """The state with newcomers on its roster, and the rows of all who are here.

    Rows are never given up, since clients come back and the ledger speaks of rows. So that nobody can fill the memory
    with names, newcomers for whom the tables have no room (`fits` is told how many clients there would be) stay out.
    """
    if clients == state.roster:  # as a rule nobody came or went, and a million names need not be looked up
        return state, tuple(range(len(clients)))
    here = set(clients)
    newcomers = tuple(sorted(here - set(state.roster)))
    M = len(state.roster) + len(newcomers)
    if newcomers and fits(M):
        state = replace(state, roster=state.roster + newcomers, memory=grow(state.memory, M))
    elif newcomers:
        log.warning(
            "%d newcomers (%.60r first) stay out: there is no memory for tables of %d clients; begin a new run, or one "
            "without a relationship map", len(newcomers), newcomers[0], M,
        )  # fmt: skip
    return state, tuple(k for k, client in enumerate(state.roster) if client in here)


def samples(engine: Engine, roster: tuple[str, ...]) -> Tensor:
    """(M,) training samples."""
    if isinstance(engine, Counts):
        return engine.counts(roster)
    return torch.tensor([engine.samples(k) for k in roster], dtype=torch.float64)
