"""Who is there: the rows of the server's tables, and what is known of their clients."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from flrce.core.client_tables import grow_tables
from flrce.core.engine import Engine
from flrce.core.types import State

log = logging.getLogger("flrce")


def update_roster(
    state: State, clients: tuple[str, ...], fits: Callable[[int], bool] = lambda M: True
) -> tuple[State, tuple[int, ...]]:
    """The state with newcomers on its roster, and the rows of all who are here.

    Rows are never given up, since clients come back and the ledger speaks of rows. So that nobody
    can fill the memory with names, newcomers for whom the tables have no room (`fits` is told how
    many clients there would be) stay out.
    """
    if (
        clients is state.roster or clients == state.roster
    ):  # as a rule nobody came or went: no name is looked up
        return state, _list_all_indices(len(clients))
    here = set(clients)
    newcomers = tuple(sorted(here - set(state.roster)))
    M = len(state.roster) + len(newcomers)
    if newcomers and fits(M):
        state = replace(
            state, roster=state.roster + newcomers, server_state=grow_tables(state.server_state, M)
        )
    elif newcomers:
        log.warning(
            "%d newcomers (%.60r first) stay out: there is no memory for tables of %d clients;"
            " begin a new run, or one without a relationship map",
            len(newcomers),
            newcomers[0],
            M,
        )
    return state, tuple(k for k, client in enumerate(state.roster) if client in here)


def exclude_busy_clients(rows: tuple[int, ...], busy: set[int]) -> tuple[int, ...]:
    """Ascending rows but for those that are busy: few of many, so that what lies between them is
    taken at once.
    """
    left: list[int] = []
    start = 0
    for k in sorted(busy):
        at = bisect_left(rows, k)
        if at < len(rows) and rows[at] == k:
            left += rows[start:at]
            start = at + 1
    return (*left, *rows[start:])


def count_absent(
    roster: Sequence[str],
    pool: Sequence[int],
    busy: Collection[int],
    unreachable: Mapping[str, int],
) -> dict[str, Any]:
    """For the ledger: how many could be asked, how many were still at work, and how many could not
    be reached by reason; nothing where everybody could be asked.
    """
    if len(pool) == len(roster):
        return {}
    reasons = {"unreachable": dict(unreachable)} if unreachable else {}
    return {"reachable": len(pool), **({"busy": len(busy)} if busy else {}), **reasons}


@lru_cache(maxsize=4)
def _list_all_indices(M: int) -> tuple[int, ...]:
    return tuple(range(M))


def get_sample_counts(engine: Engine, roster: tuple[str, ...]) -> Tensor:
    """(M,) training samples."""
    return engine.count_all_samples(roster)
