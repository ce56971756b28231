"""The server: FLrce over Flower's grid."""

from flwr.app import ArrayRecord, Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from flrce.flower import Result
from flrce_baseline.dataset import load_federation
from flrce_baseline.model import build_model
from flrce_baseline.strategy import build_strategy

app = ServerApp()


def run_rounds(grid: Grid, config: UserConfig) -> Result:
    """All rounds, or as many as the stop rule allows."""
    source = load_federation(config).source
    model = build_model(config, source)
    strategy = build_strategy(config, model, source.shape)
    arrays = ArrayRecord(model.state_dict())
    return strategy.start(grid, arrays, num_rounds=int(config["num-server-rounds"]))


@app.main()
def main(grid: Grid, context: Context) -> None:
    result = run_rounds(grid, context.run_config)
    print(f"{len(result.history)} rounds; stopped early: {result.stopped or 'no'}")
