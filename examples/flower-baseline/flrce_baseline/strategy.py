"""FLrce as a Flower strategy: the clients that agree most with all others train; the run stops once
the chosen ones conflict.
"""

from flwr.app import UserConfig
from torch import nn

from flrce.flower import FLrce


def build_strategy(config: UserConfig, model: nn.Module, sample_shape: tuple[int, ...]) -> FLrce:
    return FLrce(
        preset=str(config["preset"]),
        psi=float(config["psi"]),
        per_round=int(config["clients-per-round"]),
        epochs=int(config["local-epochs"]),
        batch=int(config["batch-size"]),
        lr=float(config["learning-rate"]),
        min_available_nodes=int(config["num-clients"]),
        wait_for_nodes=float(config["wait-for-nodes"]),
        seed=int(config["seed"]),
        state=str(config["state"]) or None,
        model=model,
        sample_shape=sample_shape,
    )
