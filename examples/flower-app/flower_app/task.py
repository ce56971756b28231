"""What is trained, and on what: both as experiment.toml says; node k holds the samples of client k."""

from pathlib import Path

from flrce.flower import server
from flrce.config.experiment import Experiment
from flrce.flower import Local, Result


def experiment(config) -> Experiment:
    """experiment.toml with the changes of this run."""
    return Experiment.load(Path(__file__).with_name("experiment.toml"), str(config.get("set", "")).split())


def serve(grid, config, **settings) -> Result:
    return server.serve(grid, experiment(config), **settings)


def load(context) -> Local:
    return server.local_of(experiment(context.run_config), context)
