"""The adapters write real files with the real trackers, and pass every round on unchanged."""

import importlib.util

import pytest

from flrce.config.experiment import Experiment
from flrce.core.types import RoundRecord
from flrce.errors import BadInput
from flrce.report import tracking
from flrce.simulation.runs import rounds

TINY = Experiment(rounds=3, clients=6, per_round=2, engine={"workers": 1})


def needs(package: str, module: str = "") -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(module or package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed (extra `track`)")


@pytest.fixture(scope="module")
def done():
    """Three real rounds; adapters take any iterable of rounds."""
    return list(rounds(TINY))


def test_metrics_are_the_figures_of_the_round_without_those_not_measured():
    found = tracking.list_round_metrics(
        RoundRecord(
            4, exploit=True, replied=("a", "b"), rejected={"c": "late"}, accuracy=0.5, joules=2.0
        )
    )
    assert found["accuracy"] == 0.5
    assert found["joules"] == 2.0
    assert (found["exploit"], found["replied"], found["rejected"]) == (1.0, 2.0, 1.0)
    assert "averaged" not in found  # None: there was no server average
    assert all(type(value) is float for value in found.values())


@needs("tensorboard")
def test_tensorboard_events_hold_every_round(done, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    passed = list(tracking.log_to_tensorboard(done, tmp_path))
    assert passed == done
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    written = [(e.step, e.value) for e in events.Scalars("accuracy")]
    assert [step for step, _ in written] == [1, 2, 3]
    assert [value for _, value in written] == pytest.approx([r.record.accuracy for r in done])
    assert [e.value for e in events.Scalars("joules")] == pytest.approx(
        [r.record.joules for r in done]
    )


@needs("mlflow-skinny", "mlflow")
def test_mlflow_keeps_metrics_parameters_and_status(done, tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv(
        "MLFLOW_ALLOW_FILE_STORE", "true"
    )  # newer ones want a database for anything but a test
    uri = tmp_path.as_uri()
    assert list(tracking.log_to_mlflow(done, uri, name="first", parameters={"psi": 5.0})) == done
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("flrce")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params) == (
        "first",
        "FINISHED",
        {"psi": "5.0"},
    )
    history = client.get_metric_history(run.info.run_id, "accuracy")
    assert [(m.step, m.value) for m in history] == [
        (r.record.t, pytest.approx(r.record.accuracy)) for r in done
    ]


@needs("mlflow-skinny", "mlflow")
@pytest.mark.parametrize("how", ["left", "failed"])
def test_mlflow_says_when_a_run_did_not_end_well(done, tmp_path, how, monkeypatch):
    from mlflow.tracking import MlflowClient

    def broken():
        yield done[0]
        raise RuntimeError("a client caught fire")

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = tmp_path.as_uri()
    tracked = tracking.log_to_mlflow(broken() if how == "failed" else done, uri)
    next(tracked)
    if how == "failed":
        with pytest.raises(RuntimeError, match="caught fire"):
            next(tracked)
    else:
        tracked.close()
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("flrce").experiment_id])
    assert run.info.status == {"left": "KILLED", "failed": "FAILED"}[how]


@needs("mlflow-skinny", "mlflow")
def test_mlflow_takes_a_folder_as_it_is_and_says_what_it_refuses(done, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    assert list(tracking.log_to_mlflow(done, str(tmp_path / "logs"))) == done
    assert list((tmp_path / "logs").glob("*/*/metrics/accuracy"))
    with pytest.raises(BadInput, match="MLflow cannot log to odd://place"):
        list(tracking.log_to_mlflow(done, "odd://place"))


@needs("wandb")
def test_wandb_keeps_an_offline_run(done, tmp_path):
    assert list(tracking.log_to_wandb(done, folder=tmp_path, config={"psi": 5})) == done
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
