"""What a committed round shows besides its model: conflict, consensus, headway, and who is out of line.

Nothing here changes the run; stop rules and reports read it from the record.
"""

from collections.abc import Sequence
from dataclasses import replace

from flrce.linalg import conflicts, consensus, gram
from flrce.pieces import Recipe
from flrce.round.trust import flags, silenced, votes
from flrce.traits import Doubts, MeasuresHeadway, MeasuresWay, holder
from flrce.types import Event, Record, State


def diagnosed(record: Record, recipe: Recipe, state: State, after: State, event: Event) -> Record:
    """The record with the round's diagnostics; `state` is that before the round. Of sums: what models alone tell."""
    stop = holder(recipe.stop)
    if isinstance(stop, MeasuresWay):
        record = replace(record, way=stop.way(after.memory["stop"]))
    if recipe.sums:
        return record
    updates = event.updates
    G = gram(updates.u)
    odd = flags(G, record.replied)
    headway = None
    if isinstance(recipe.average, MeasuresHeadway):
        headway = recipe.average.headway(after.memory["average"])
    left: Sequence[float] = ()
    if isinstance(recipe.aggregator, Doubts):
        left = recipe.aggregator.left(after.memory["aggregator"])
    return replace(
        record,
        conflicts=conflicts(G),
        consensus=consensus(G, updates.n),
        headway=headway,
        flagged=odd,
        doubted={client: share for client, share in zip(record.replied, left, strict=False) if share < 1},
        votes=votes(G, record.replied, silenced(state.history, odd)),
    )
