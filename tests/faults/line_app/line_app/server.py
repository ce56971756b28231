import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from flrce.flower import FLrce

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    strategy = FLrce(
        per_round=3,
        psi=2,
        state=config["state"],
        ask_names=False,
        fraction_evaluate=0.0,
        min_evaluate_nodes=0,
    )
    w = np.random.default_rng(0).standard_normal(config["floats"]).astype(np.float32)
    arrays = ArrayRecord({"w": Array(w)})
    strategy.start(
        grid=grid, initial_arrays=arrays, num_rounds=config["rounds"], timeout=config["timeout"]
    )
