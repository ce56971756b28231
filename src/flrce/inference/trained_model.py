"""The model of a run, ready to use."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flrce.config.experiment import Experiment
from flrce.core.user_code import trust_record
from flrce.data.fields import attach_fields
from flrce.data.sources import SampleSpec
from flrce.errors import BadInput
from flrce.inference.predictions import Predictions, interpret_outputs
from flrce.inference.raw_samples import RawSamples, prepare_samples
from flrce.models.flat import list_model_tensors
from flrce.models.inputs import find_scores, scale_inputs
from flrce.simulation.build import finish_network
from flrce.storage.run_model import load_run_tensors, read_model_card, read_model_marks
from flrce.storage.seal import MAX_SETTINGS_BYTES, FileMarks, parse_document, read_sealed_file

PREDICTION_BATCH = 256  # samples that are predicted at once
log = logging.getLogger("flrce")


@dataclass(frozen=True, eq=False, repr=False)
class TrainedModel:
    """A trained network with the preprocessing of its data.

    `predict` takes raw samples. `network` takes samples that are scaled already: x * spec.scale +
    spec.shift, or token ids as they are.
    """

    network: nn.Module
    spec: SampleSpec
    run: Path

    def __repr__(self) -> str:
        what = f"{self.spec.outputs} {self.spec.kind}"
        return (
            f"TrainedModel({type(self.network).__name__}, samples {self.spec.shape}, {what},"
            f" {self.run})"
        )

    def predict(self, data: Any) -> Predictions:
        """Predictions for raw samples: a path, DataFrame, dict of columns, array or tensor."""
        return self.predict_samples(prepare_samples(data, self.spec))

    def predict_samples(self, samples: RawSamples) -> Predictions:
        """Predictions for samples that were prepared as in training."""
        outputs = [
            self._run_network(samples.x[i : i + PREDICTION_BATCH])
            for i in range(0, len(samples.x), PREDICTION_BATCH)
        ]
        if not outputs:
            raise BadInput("there is no sample to predict")
        return interpret_outputs(torch.cat(outputs), self.spec, samples.rows)

    def _run_network(self, x: Any) -> Tensor:
        scaled = scale_inputs(
            torch.from_numpy(np.ascontiguousarray(x)), self.spec.scale, self.spec.shift
        )
        with torch.no_grad():
            return find_scores(self.network(scaled)).float()


def load(
    run: Path | str, model: nn.Module | None = None, last: bool = False, trust: bool = False
) -> TrainedModel:
    """The final model of a run directory, or its `last` one, with its preprocessing.

    A network that was passed to `flrce.run(model=...)` must be passed again as `model`. `trust`
    allows the import of the installed module that the experiment names for its network.
    """
    run = Path(run)
    if not (run / "experiment.toml").is_file():
        raise BadInput(f"{run} is no run directory; give the --out of a run")
    marks = read_model_marks(run, last)
    read_sealed_file(run / "experiment.toml", marks, MAX_SETTINGS_BYTES)  # as it was sealed
    experiment = Experiment.load(
        run / "experiment.toml", trust=trust_record(str(run.absolute()), trust)
    )
    card = read_model_card(run, marks)
    if card is None:
        log.warning(
            "%s was made by an earlier version: the form of samples is read from its data", run
        )
    given = "" if card is None else str(card["given_network"])
    if model is None and given:
        raise BadInput(
            f"{run} trained a network that was passed in Python ({given}); pass it again:"
            f" flrce.load({str(run)!r}, model=...)"
        )
    if card is None:
        spec = experiment.data.read_source().spec
    else:
        spec = SampleSpec.from_json(card["samples"])
    fields = spec.preprocessing.fields if spec.preprocessing else ()
    network = experiment.build_network(spec) if model is None else attach_fields(model, fields)
    frozen = experiment.build_recipe().frozen
    network = finish_network(network, make_example(spec), experiment, frozen)
    copy_tensors(network, load_run_tensors(run, last, marks), run)
    _warn_if_untrained(run, marks)
    return TrainedModel(network.eval().requires_grad_(False), spec, run)


def _warn_if_untrained(run: Path, marks: FileMarks) -> None:
    path = run / "summary.json"
    if path.name not in marks:
        return
    summary = parse_document(read_sealed_file(path, marks, MAX_SETTINGS_BYTES), path)
    if summary.get("rounds") == 0:
        log.warning("%s committed no round: its network is not trained", run)


def make_example(spec: SampleSpec, count: int = 2) -> Tensor:
    """Samples of zeros (count, ...) in the form that the network takes."""
    dtype = torch.int64 if spec.dtype == "int64" else torch.float32
    return torch.zeros((count, *spec.shape), dtype=dtype)


def copy_tensors(network: nn.Module, tensors: Mapping[str, Tensor], run: Path) -> None:
    """Copy the tensors of a run into a network; BadInput where the two differ in name or shape."""
    own = {name: tensor for name, tensor, _ in list_model_tensors(network)}
    own |= {name: tensor for name, tensor in network.named_parameters() if name in tensors}
    own |= {name: tensor for name, tensor in network.named_buffers() if name in tensors}
    odd = sorted({*own} ^ {*tensors}) or sorted(
        name for name, tensor in own.items() if tensor.shape != tensors[name].shape
    )
    if odd:
        raise BadInput(
            f"{run} holds the tensors of another network: {odd[0]!r} is missing on one side or has"
            " another shape; pass the network that was trained as model="
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
