"""Rounds on their way to an experiment tracker. Each adapter passes on every round it was given,
after logging it.

>>> for r in log_to_tensorboard(rounds(experiment), "logs"): ...    # doctest: +SKIP
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flrce.core.cost_table import list_booked_amounts
from flrce.core.types import Round, RoundRecord
from flrce.errors import BadInput

TRACKED_FIGURES = ("accuracy", "accuracy_weighted", "averaged", "loss", "conflicts", "consensus")


def list_round_metrics(record: RoundRecord) -> dict[str, float]:
    """A round's figures under names that a tracker shows; what was not measured is left out."""
    found = {name: getattr(record, name) for name in TRACKED_FIGURES}
    found |= list_booked_amounts(record)
    found |= {
        "exploit": record.exploit,
        "replied": len(record.replied),
        "rejected": len(record.rejected),
    }
    found |= {f"{name}": value for name, value in record.metrics.items()}
    found |= {f"figures/{name}": value for name, value in record.figures.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def log_to_tensorboard(rounds: Iterable[Round], folder: Path | str) -> Iterator[Round]:
    """Scalars and the reason of the stop as TensorBoard event files in `folder`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as why:
        raise _missing_package("tensorboard") from why
    with SummaryWriter(str(folder)) as writer:
        for done in rounds:
            for name, value in list_round_metrics(done.record).items():
                writer.add_scalar(name, value, done.record.t)
            if done.record.stop:
                writer.add_text("stop", done.record.stop, done.record.t)
            yield done


def log_to_mlflow(
    rounds: Iterable[Round],
    uri: str | None = None,
    experiment: str = "flrce",
    name: str | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Iterator[Round]:
    """Metrics and parameters as one MLflow run, on the server or in the folder that `uri` names.

    Recent MLflow writes to a folder only with MLFLOW_ALLOW_FILE_STORE=true in the environment.
    """
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as why:
        raise _missing_package("mlflow-skinny") from why
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    run = client.create_run(
        found.experiment_id if found else client.create_experiment(experiment), run_name=name
    ).info
    for key, value in (parameters or {}).items():
        client.log_param(run.run_id, key, value)
    status = "KILLED"  # whoever iterates may leave early
    try:
        for done in rounds:
            for key, value in list_round_metrics(done.record).items():
                client.log_metric(run.run_id, key, value, step=done.record.t)
            if done.record.stop:
                client.set_tag(run.run_id, "stop", done.record.stop)
            yield done
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        client.set_terminated(run.run_id, status)


def log_to_trackio(
    rounds: Iterable[Round],
    project: str = "flrce",
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Iterator[Round]:
    """Metrics as one trackio run; trackio keeps them where TRACKIO_DIR says."""
    try:
        import trackio as tracker
    except ImportError as why:
        raise _missing_package("trackio") from why
    run = tracker.init(
        project=project, name=name, config=dict(config or {}), embed=False, auto_log_gpu=False
    )
    try:
        for done in rounds:
            run.log(list_round_metrics(done.record), step=done.record.t)
            yield done
    finally:
        tracker.finish()


def _missing_package(package: str) -> BadInput:
    return BadInput(f"this adapter needs {package}; pip install {package}")
