"""How much privacy rounds cost: Renyi differential privacy by Opacus, the extra `privacy`.

Two fleets are neighbours if one has a client more than the other. A round releases a sum of updates
of length at most S with Gaussian noise of standard deviation z S in each coordinate; z is the noise
multiplier. Rounds add up in Renyi divergence, order by order (Mironov 2017). Where each client is
drawn with chance q, independently of all others, sampling amplifies privacy (Mironov, Talwar and
Zhang 2019); q = 1 is the Gaussian mechanism without sampling.
"""

import logging
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from flrce.errors import BadInput, format_install_command

#: Renyi orders: small ones for large epsilons, large ones for small epsilons
ORDERS: tuple[float, ...] = (
    *(1 + step / 10 for step in range(1, 100)),
    *(float(order) for order in range(11, 64)),
    *(float(2**power) for power in range(6, 13)),
)


def load_accountant() -> Any:
    """Opacus' functions of Renyi differential privacy."""
    handlers = list(logging.root.handlers)  # opacus sets up logging as it is imported
    try:
        from opacus.accountants.analysis import rdp
    except ImportError as why:
        raise BadInput(
            f"differential privacy needs opacus to account for it;"
            f" {format_install_command('privacy')}"
        ) from why
    logging.root.handlers[:] = handlers
    return rdp


@lru_cache(maxsize=1024)
def compute_round_rdp(rate: float, noise: float) -> tuple[float, ...]:
    """Renyi divergence of one round at each of ORDERS: sampling rate q, noise multiplier z."""
    rdp = load_accountant().compute_rdp(
        q=rate, noise_multiplier=noise, steps=1, orders=list(ORDERS)
    )
    return tuple(float(value) for value in rdp)


def compute_epsilon(rdp: Sequence[float], delta: float) -> float:
    """The epsilon that these divergences give at this delta."""
    if not any(rdp):
        return 0.0
    with (
        warnings.catch_warnings()
    ):  # that the best order is an end of the list: still an upper bound
        warnings.simplefilter("ignore")
        epsilon, _ = load_accountant().get_privacy_spent(
            orders=list(ORDERS), rdp=list(rdp), delta=delta
        )
    return max(float(epsilon), 0.0)


def account_rounds(rate: float, noise: float, rounds: int, delta: float) -> float:
    """Epsilon after so many rounds."""
    return compute_epsilon([rounds * value for value in compute_round_rdp(rate, noise)], delta)
