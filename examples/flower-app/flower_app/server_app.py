"""The server: the experiment's recipe over Flower's grid."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_app.task import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    result = serve(
        grid, config, state=config["state"] or None, timeout=config["timeout"], wait_for_nodes=config["wait"]
    )
    print(f"{len(result.history)} rounds; stopped early: {result.stopped or 'no'}")
