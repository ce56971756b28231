"""What a committed round shows besides its model: conflict, consensus, headway, and who is out of
line.

Nothing here changes the run; stop rules and reports read it from the record.
"""

from dataclasses import replace

from flrce.core.linalg import gram_matrix, mean_conflicts, update_consensus
from flrce.core.pieces import Recipe
from flrce.core.trust import count_trusted_conflicts, find_muted_clients, flag_updates
from flrce.core.types import RoundEvent, RoundRecord, State


def add_diagnostics(
    record: RoundRecord, recipe: Recipe, state: State, after: State, event: RoundEvent
) -> RoundRecord:
    """The record with the round's diagnostics; `state` is that before the round. Of sums: what
    models alone tell.
    """
    server_state = after.server_state
    way = recipe.stop.distance_from_start(server_state.get("stop"))
    before = replace(record.diagnostics, way=way)
    if recipe.sums:
        return replace(record, diagnostics=before)
    updates = event.updates
    G = gram_matrix(updates.u)
    odd = flag_updates(G, record.replied)
    left = recipe.aggregator.downweights(server_state.get("aggregator"))
    diagnostics = replace(
        before,
        conflicts=mean_conflicts(G),
        consensus=update_consensus(G, updates.n),
        headway=recipe.average.get_headway(server_state.get("average")),
        flagged=odd,
        doubted={
            client: share for client, share in zip(record.replied, left, strict=False) if share < 1
        },
        votes=count_trusted_conflicts(G, record.replied, find_muted_clients(state.history, odd)),
    )
    return replace(record, diagnostics=diagnostics)
