"""The model of a run directory: its tensors, and model.json with the preprocessing."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from flrce.errors import BadInput, format_one_line
from flrce.storage.disk import write_atomically
from flrce.storage.ledger import explain_write_errors
from flrce.storage.seal import (
    MODEL_FILE,
    SEAL_FILE,
    FileMarks,
    parse_document,
    read_seal,
    read_sealed_file,
    refuse_unlisted,
)


def write_model_card(folder: Path, samples: Mapping[str, Any], given_network: str = "") -> None:
    """Write model.json: the preprocessing of samples, and the class of a network from Python."""
    card = {"schema": 1, "samples": samples, "given_network": given_network}
    with explain_write_errors(folder):
        write_atomically(folder / MODEL_FILE, json.dumps(card, indent=1).encode())


def refuse_other_targets(folder: Path, samples: Mapping[str, Any]) -> None:
    """BadInput where a run to be resumed learnt values as they are, which now are standardised."""
    path = folder / MODEL_FILE
    prepared = samples.get("preprocessing") or {}
    if not path.is_file() or not prepared.get("target_mean"):
        return
    preprocessing = parse_document(path.read_bytes(), path)["samples"].get("preprocessing") or {}
    if not preprocessing.get("target_mean"):
        raise BadInput(
            f"{folder} was made by an earlier version, in which data.standardise left the values to"
            " be learnt as they are; start the run anew in another folder"
        )


def read_model_card(run: Path, marks: FileMarks) -> dict[str, Any] | None:
    """The contents of model.json; None if an earlier version made the run."""
    data = read_sealed_file(run / MODEL_FILE, marks)
    return parse_document(data, run / MODEL_FILE) if data else None


def read_model_marks(run: Path, last: bool) -> FileMarks:
    """The marks of a run's files. BadInput if the run has no model or no seal."""
    marks = read_seal(run)
    names = ("last.safetensors", "model.safetensors") if last else ("model.safetensors",)
    if not any(os.path.lexists(run / name) or name in marks for name in names):
        raise BadInput(
            f"{run} has no model yet; it is written when the run ends or is interrupted: resume it"
            " with --resume"
        )
    if not marks:
        raise BadInput(
            f"{run} has no {SEAL_FILE}, so its weights cannot be checked; flrce run --out {run}"
            " --resume writes it"
        )
    refuse_unlisted(run, marks)
    return marks


def load_run_tensors(run: Path, last: bool, marks: FileMarks) -> dict[str, Tensor]:
    """The tensors of the final model, or of the last one if `last` is set and they differ."""
    name = "last.safetensors" if last and "last.safetensors" in marks else "model.safetensors"
    path, size = run / name, marks.get(name, {"bytes": 0})["bytes"]
    try:
        return load(read_sealed_file(path, marks, size))
    except SafetensorError as why:
        raise BadInput(
            f"{path} cannot be read ({format_one_line(why, 80)}); restore it (flrce verify {run}"
            " checks all files)"
        ) from why
