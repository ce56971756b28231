"""Log rounds to experiment trackers. Each adapter logs a round, then yields it.

>>> for r in log_to_tensorboard(rounds(experiment), "logs"): ...    # doctest: +SKIP
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from flrce.core.cost_table import list_booked_amounts
from flrce.core.types import Round, RoundRecord
from flrce.errors import BadInput, format_one_line

TRACKED_FIGURES = ("accuracy", "accuracy_weighted", "averaged", "loss", "conflicts", "consensus")


def list_round_metrics(record: RoundRecord) -> dict[str, float]:
    """A round's figures under names that a tracker shows; what was not measured is left out."""
    figures = {name: getattr(record, name) for name in TRACKED_FIGURES}
    figures |= list_booked_amounts(record)
    figures |= {"replied": len(record.replied), "rejected": len(record.rejected)}
    figures |= {"exploit": record.exploit, **record.metrics}
    figures |= {f"figures/{name}": value for name, value in record.figures.items()}
    return {name: float(value) for name, value in figures.items() if value is not None}


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
    """One MLflow run: on a server, in a database (needs the whole mlflow), or in a folder."""
    client, run = _open_mlflow_run(uri, experiment, name)
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


def _open_mlflow_run(uri: str | None, experiment: str, name: str | None) -> tuple[Any, Any]:
    """A client and a new run; BadInput where MLflow refuses the place."""
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as why:
        raise _missing_package("mlflow-skinny") from why
    if uri is not None and ("://" not in str(uri) or str(uri).startswith("file:")):
        # MLflow 3 refuses folders unless told; whoever names one wants it
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        client = MlflowClient(None if uri is None else str(uri))
        known = client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else client.create_experiment(experiment)
        return client, client.create_run(number, run_name=name).info
    except (MlflowException, ImportError, OSError) as why:
        raise BadInput(
            f"MLflow cannot log to {uri or 'its usual place'}: {format_one_line(why, 160)}; give a"
            " folder, sqlite:///mlflow.db (pip install mlflow) or the address of a server"
        ) from why


def log_to_wandb(
    rounds: Iterable[Round],
    project: str = "flrce",
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    folder: Path | str | None = None,
    mode: Literal["offline", "online"] = "offline",
) -> Iterator[Round]:
    """One run of Weights & Biases; offline, `wandb sync` sends it from `folder`."""
    try:
        import wandb
    except ImportError as why:
        raise _missing_package("wandb") from why
    place = None if folder is None else str(folder)
    run = wandb.init(project=project, name=name, config=dict(config or {}), dir=place, mode=mode)
    try:
        for done in rounds:
            run.log(list_round_metrics(done.record), step=done.record.t)
            if done.record.stop:
                run.summary["stop"] = done.record.stop
            yield done
    finally:
        run.finish()


def _missing_package(package: str) -> BadInput:
    return BadInput(f"this adapter needs {package}; pip install {package}")
