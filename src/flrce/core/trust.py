"""Who is out of line: pure functions of a round's updates and of the record, so that every verdict
can be replayed.

A flag is a remark in the ledger. Hardened rules give flagged clients no vote; nothing else follows
from it, since an honest client with unusual data looks the same.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from flrce.core.linalg import mean_conflicts
from flrce.core.types import RoundRecord

MAX_NORM_RATIO = 5.0  # times the median norm
MIN_OPPOSED_SHARE = 0.5  # share of peers that an update points against, and
MIN_SHARE_EXCESS = 0.25  # how far that share lies above the round's median
STRIKES, WINDOW = 2, 20  # flags in the last rounds that silence a client even where it behaves


def flag_updates(G: Tensor, clients: Sequence[str]) -> dict[str, str]:
    """Client -> what is odd about its update, for those where something is; G (P, P) are the
    updates' products.
    """
    norms = G.diagonal().clamp(min=0).sqrt()
    moved = norms > 0
    found = {
        client: "zero update"
        for client, moves in zip(clients, moved.tolist(), strict=True)
        if not moves
    }
    if int(moved.sum()) < 4:  # three clients have no majority worth the name
        return found
    usual = norms[moved].median()
    share = ((G < 0).sum(1) / (moved.sum() - 1)).where(moved, 0.0)
    middle = share[moved].median()
    far, against = (
        norms > MAX_NORM_RATIO * usual,
        (share > MIN_OPPOSED_SHARE) & (share - middle > MIN_SHARE_EXCESS),
    )
    for i in (far | against).nonzero()[:, 0].tolist():
        if far[i]:
            found[clients[i]] = f"norm {float(norms[i] / usual):.3g} times the median"
        else:
            found[clients[i]] = (
                f"against {float(share[i]):.0%} of its peers, median {float(middle):.0%}"
            )
    return found


def find_muted_clients(history: Sequence[RoundRecord], now: Mapping[str, str]) -> set[str]:
    """Clients without a vote: flagged in this round, or often enough lately."""
    strikes: dict[str, int] = {}
    for record in history[-WINDOW:]:
        for client in record.diagnostics.flagged:
            strikes[client] = strikes.get(client, 0) + 1
    return {*now, *(client for client, count in strikes.items() if count >= STRIKES)}


def count_trusted_conflicts(G: Tensor, clients: Sequence[str], mute: set[str]) -> float:
    """Conflicting peers per client (Algorithm 3) among those with a vote, scaled to the whole
    round's size.

    0 where fewer than half of the clients have one: then nobody is left to trust.
    """
    heard = [i for i, client in enumerate(clients) if client not in mute]
    if len(heard) < 2 or 2 * len(heard) < len(clients):
        return 0.0
    return mean_conflicts(G[heard][:, heard]) * (len(clients) - 1) / (len(heard) - 1)
