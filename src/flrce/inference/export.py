"""A trained model as a file for other runtimes: torch.export and ONNX, preprocessing included."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flrce.errors import BadInput, describe_exception
from flrce.inference.raw_samples import require_preprocessing
from flrce.inference.trained_model import TrainedModel
from flrce.storage.disk import make_folder

EXAMPLE_BATCH = 2


class RawInputNetwork(nn.Module):
    """A network that takes raw features or pixels, scales them first, and gives raw targets.

    Columns of text must be encoded by the caller, one feature of 0 and 1 per value.
    """

    fill: Tensor
    mean: Tensor
    deviation: Tensor
    target_mean: Tensor
    target_deviation: Tensor

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        spec, prepared = model.spec, require_preprocessing(model.spec)
        self.network, self.takes_tokens = model.network, spec.dtype == "int64"
        self.scale, self.shift = spec.scale, spec.shift
        self.has_fill, self.has_mean = bool(prepared.fill), bool(prepared.mean)
        for name in ("fill", "mean", "deviation"):
            values = torch.tensor(getattr(prepared, name), dtype=torch.float32)
            self.register_buffer(name, values.reshape(spec.shape) if len(values) else values)
        self.has_target_mean = bool(prepared.target_mean)
        for name in ("target_mean", "target_deviation"):
            self.register_buffer(name, torch.tensor(getattr(prepared, name), dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """x (N, ...) raw; the outputs of the network."""
        if not self.takes_tokens:
            x = x.float()
            if self.has_fill:
                x = torch.where(torch.isnan(x), self.fill, x)
            if self.has_mean:
                x = (x - self.mean) / self.deviation
            x = x * self.scale + self.shift
        out: Tensor = self.network(x)
        return out * self.target_deviation + self.target_mean if self.has_target_mean else out


@contextmanager
def _silence_onnx() -> Iterator[None]:
    """Without the exporter's remarks about packages that it could use."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def export_network(model: TrainedModel, path: Path) -> None:
    """Write the model with its preprocessing: FILE.pt2 (torch.export) or FILE.onnx."""
    suffix = path.suffix.lower()
    if suffix not in (".pt2", ".onnx"):
        raise BadInput(f"--out {path}: name a file that ends in .pt2 (torch.export) or .onnx")
    make_folder(path.parent)
    module = RawInputNetwork(model).eval()
    dtype = torch.int64 if module.takes_tokens else torch.float32
    example = (torch.zeros((EXAMPLE_BATCH, *model.spec.shape), dtype=dtype),)
    batch = torch.export.Dim("batch", min=1)
    try:
        if suffix == ".pt2":
            program = torch.export.export(module, example, dynamic_shapes={"x": {0: batch}})
            torch.export.save(program, path)
        else:
            options: Any = {"dynamo": True, "external_data": False, "verbose": False}
            shapes = {"x": {0: batch}}
            with _silence_onnx():
                torch.onnx.export(module, example, path, dynamic_shapes=shapes, **options)
    except ImportError as why:
        raise BadInput(
            f"ONNX export needs onnx and onnxscript ({why}); pip install onnx onnxscript"
        ) from why
    except Exception as why:  # whatever the tracer meets in a network
        raise BadInput(
            f"{type(model.network).__name__} cannot be exported: {describe_exception(why)}"
        ) from why
