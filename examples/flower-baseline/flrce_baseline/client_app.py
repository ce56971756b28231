"""The client: trains on its own samples as the strategy asks."""

from flwr.app import Context

from flrce.flower import Local, client_app
from flrce_baseline.dataset import load_federation
from flrce_baseline.model import build_model


def load(context: Context) -> Local:
    """The samples of this node."""
    federation = load_federation(context.run_config)
    source, k = federation.source, int(context.node_config["partition-id"])
    return Local(
        build_model(context.run_config, source),
        federation.x,
        federation.y,
        federation.train[k],
        federation.held[k],
        source.scale,
        source.shift,
        federation.clients[k],
    )


app = client_app(load)
