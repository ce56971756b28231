"""The samples and who holds which: node k trains on the samples of client k."""

from functools import lru_cache

from flwr.app import UserConfig

from flrce.data.federation import Federation, federate
from flrce.data.sources import load_source

HOLDOUT = 0.3  # share of each client's samples that it evaluates the model on


def load_federation(config: UserConfig) -> Federation:
    """All clients' samples as `config` says; the same on every node and on the server."""
    return _share_out(
        str(config["dataset"]),
        str(config["partition"]),
        int(config["num-clients"]),
        int(config["seed"]),
        float(config["alpha"]),
    )


@lru_cache(maxsize=2)
def _share_out(name: str, partition: str, clients: int, seed: int, alpha: float) -> Federation:
    return federate(load_source(name), partition, clients, seed, alpha, HOLDOUT)
