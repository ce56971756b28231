"""The model's way to one client.

A client trains from the model that it decoded, h, and sends (its trained model - h); the server
applies the aggregate of these updates to w. BatchNorm's statistics always travel as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flrce.core.roles import Compressor, Downlink
from flrce.core.tensor_bytes import count_bytes, count_value_bytes, to_device, to_host
from flrce.core.types import Download, Payload, Task
from flrce_client.downloads import STATISTICS_KEY as STATISTICS_KEY
from flrce_client.streams import make_download_stream as make_download_stream

HOST = torch.device("cpu")
MAX_BATCH_FLOATS = 1 << 24  # that are encoded at once: some 0.7 GB of a device's memory


@dataclass(frozen=True, eq=False)
class HeldPart:
    """What a client holds of w under a task."""

    coordinates: Tensor | None  # of w; None: all
    layout: tuple[tuple[str, int], ...]  # names and sizes of the tensors, in order
    trained: int  # the first floats are trained, the rest are BatchNorm's statistics

    @property
    def size(self) -> int:
        return sum(size for _, size in self.layout)

    @property
    def trained_layout(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the tensors that a code encodes."""
        found, start = [], 0
        for name, size in self.layout:
            if start < self.trained:
                found.append((name, size))
            start += size
        return tuple(found)


@dataclass(frozen=True, eq=False)
class DownloadRequest:
    """A task whose client needs a model, and what of the model it holds."""

    task: Task
    part: HeldPart
    device: torch.device = HOST  # where many models are encoded at once

    @property
    def batch_code(self) -> Compressor | None:
        """The code that encodes its difference together with others'; None: it is encoded alone."""
        download = self.task.download
        code = None if download is None else download.code
        if code is None or self.device == HOST or self.part.coordinates is not None:
            return None
        return code if code.encodes_batches else None


@dataclass(frozen=True, eq=False)
class EncodedModel:
    """A download: the model that the client has once it decoded it, and what travels."""

    model: Tensor  # (D,)
    download: Download | None  # with its bytes; None: dense
    payload: Payload | None = None  # None: the model itself


@dataclass(frozen=True)
class DenseDownload(Downlink):
    """Every client is sent w as it is, in float32."""

    is_dense: ClassVar[bool] = True

    def encode_models(
        self, state: Any, w: Tensor, requests: Sequence[DownloadRequest]
    ) -> tuple[list[EncodedModel], Any]:
        return [EncodedModel(w, None) for _ in requests], state

    def count_models(self, P: int) -> int:
        return 0


DENSE_DOWNLOAD = DenseDownload()


def encode_model(
    w: Tensor, base: Tensor | None, code: Any, part: HeldPart, stream: tuple[int, int, str]
) -> tuple[Payload, Tensor]:
    """(what travels, the decoded model (D,)): the code of w - base on what the client holds.

    `stream` is (seed, t, client). Without a base, which is then 0, w itself is encoded.
    """
    base = torch.zeros_like(w) if base is None else base
    target, d = take_part(w, part), part.trained
    if torch.equal(target, take_part(base, part)):
        return Payload({}), base.clone()  # as in the first round: there is nothing to send
    difference = (target[:d] - take_part(base, part)[:d]).float()
    coded, _ = code.encode(difference, part.trained_layout, make_download_stream(*stream), {})
    buffers = dict(coded.buffers)
    if part.size > d:
        buffers[STATISTICS_KEY] = target[d:].clone()
    payload = Payload(buffers)
    return payload, decode_model(payload, base, code, part, stream)


def encode_model_batch(
    w: Tensor, bases: Sequence[Tensor], code: Compressor, requests: Sequence[DownloadRequest]
) -> list[tuple[Payload, Tensor]]:
    """As `encode_model` of requests for whole models, together and on their device."""
    part, device = requests[0].part, requests[0].device
    d, models = part.trained, to_device(torch.stack(list(bases)), device)
    target = to_device(w, device)
    unchanged = (models == target).all(1).tolist()
    rngs = [make_download_stream(r.task.seed, r.task.t, r.task.client) for r in requests]
    differences = (target[:d] - models[:, :d]).float()
    payloads, decoded = code.encode_batch(differences, part.trained_layout, rngs)
    models[:, :d] += decoded.to(models.dtype)
    models[:, d:] = target[d:]
    statistics = {STATISTICS_KEY: w[d:].clone()} if part.size > d else {}
    return [
        (Payload({}), base.clone())
        if is_same
        else (Payload({**payload.buffers, **statistics}), model)
        for payload, model, base, is_same in zip(
            payloads, to_host(models), bases, unchanged, strict=True
        )
    ]


def split_batches(places: Sequence[int], floats: int) -> list[Sequence[int]]:
    """Places of vectors of so many floats, in groups that are encoded at once."""
    count = max(1, MAX_BATCH_FLOATS // max(1, floats))
    return [places[start : start + count] for start in range(0, len(places), count)]


def decode_model(
    payload: Payload, base: Tensor, code: Any, part: HeldPart, stream: tuple[int, int, str]
) -> Tensor:
    """(D,) the model that a download makes of the base; what the client does not hold stays."""
    buffers: Mapping[str, Tensor] = payload.buffers
    if not buffers:
        return base.clone()
    coded = {name: value for name, value in buffers.items() if name != STATISTICS_KEY}
    rng = make_download_stream(*stream)
    u = code.decode(Payload(coded), part.trained_layout, rng)
    model = base.clone()
    values = take_part(model, part)
    values[: part.trained] += u.to(values.dtype)
    if part.size > part.trained:
        values[part.trained :] = buffers[STATISTICS_KEY]
    if part.coordinates is not None:
        model[part.coordinates] = values
    return model


def take_part(w: Tensor, part: HeldPart) -> Tensor:
    """The floats of w that the client holds; a view where these are all."""
    return w if part.coordinates is None else w[part.coordinates]


def estimate_download_bytes(task: Task, part: HeldPart, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a task's model as its client receives it: as encoded, as its code says, or dense."""
    download = task.download
    if download is None:
        return count_value_bytes(part.size, dtype)
    if download.nbytes is not None:
        return download.nbytes
    if download.code is None:
        return download.missed + count_value_bytes(part.size, dtype)
    rest = count_value_bytes(part.size - part.trained, dtype)
    coded = download.missed + estimate_code_bytes(download.code, part.trained_layout) + rest
    return min(coded, count_value_bytes(part.size, dtype)) if download.missed else coded


def estimate_code_bytes(code: Compressor, layout: Sequence[tuple[str, int]]) -> int:
    """Bytes that a code will need: as it says, or as it needs for random numbers."""
    size = code.estimate_bytes(layout, make_download_stream(0, 0))
    if size is None:
        rng = make_download_stream(0, 0)
        u = torch.from_numpy(rng.standard_normal(sum(n for _, n in layout))).float()
        size = count_bytes(code.encode(u, layout, make_download_stream(0, 0), {})[0].buffers)
    return int(size)


def with_bytes(download: Download, payload: Payload) -> Download:
    """The download with the bytes of its payload."""
    coded = download.code is not None
    return replace(download, nbytes=download.missed + payload.nbytes, coded=coded)
