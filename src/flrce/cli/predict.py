"""flrce predict runs/a new.csv --out predictions.csv"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from flrce.cli.terminal import print_table
from flrce.core.metric_format import PLAIN_FROM, PLAIN_TO
from flrce.data.preprocessing import ColumnTable
from flrce.errors import BadInput
from flrce.inference.predictions import Predictions
from flrce.inference.raw_samples import prepare_samples
from flrce.inference.trained_model import TrainedModel, load

SHOWN_ROWS = 20  # predictions that a terminal lists
SHOWN_CLASSES = 6  # probabilities that a terminal lists beside a prediction


def predict_file(
    run: Path, file: Path, out: Path | None, last: bool, as_json: bool, trust: bool = False
) -> None:
    """Predict the samples of a file with the model of a run."""
    model = load(run, last=last, trust=trust)
    samples = prepare_samples(file, model.spec)
    predictions = model.predict_samples(samples)
    score = describe_score(predictions, model, samples.table)
    if out is not None:
        predictions.to_csv(out)
    if as_json:
        print(json.dumps({"predictions": predictions.to_columns(), "score": score}, indent=1))
        return
    print_predictions(predictions)
    if score:
        print(score)
    if out is not None:
        print(f"wrote {len(predictions)} predictions to {out}")


def print_predictions(predictions: Predictions) -> None:
    """The first predictions as a table."""
    columns = predictions.to_columns()
    if len(predictions.classes) > SHOWN_CLASSES:
        columns = {key: value for key, value in columns.items() if not key.startswith("p(")}
        if predictions.probabilities is not None and predictions.values.ndim == 1:
            columns["probability"] = predictions.probabilities.max(1).tolist()
    rows = [
        [format_cell(values[i]) for values in columns.values()]
        for i in range(min(len(predictions), SHOWN_ROWS))
    ]
    print_table(f"{len(predictions)} predictions", tuple(columns), rows)
    if len(predictions) > SHOWN_ROWS:
        print(f"... and {len(predictions) - SHOWN_ROWS} more; --out FILE.csv writes all of them")


def format_cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if PLAIN_FROM <= abs(value) < PLAIN_TO else f"{value:.4g}"


def describe_score(predictions: Predictions, model: TrainedModel, table: ColumnTable | None) -> str:
    """How good the predictions are, where the file has the target column too; otherwise ""."""
    targets = predictions.targets
    if table is None or len(targets) != 1 or targets[0] not in table:
        return ""
    truth = table[targets[0]]
    if model.spec.kind == "classes":
        share = float(np.mean(predictions.values.astype(str) == truth.astype(str)))
        return f"accuracy {100 * share:.1f} % against the column {targets[0]!a} of the file"
    if model.spec.kind == "values" and truth.dtype.kind in "biuf":
        error = float(np.mean(np.abs(predictions.values - truth)))
        told = f"mean absolute error {format_cell(error)}"
        return f"{told} against the column {targets[0]!a} of the file"
    raise BadInput(
        f"the column {targets[0]!a} of the file holds {truth.dtype}, not what is predicted"
    )
