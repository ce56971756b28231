"""Each client is sent the difference between w and the model that it holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flrce.core.downlink import (
    DownloadRequest,
    EncodedModel,
    encode_model,
    encode_model_batch,
    split_batches,
    with_bytes,
)
from flrce.core.pieces import Recipe
from flrce.core.roles import Compressor, Downlink
from flrce.core.tensor_bytes import HASH_BYTES, SEED_BYTES, count_value_bytes
from flrce.core.types import Download, Payload, PendingTask
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.downlink.codes import explain_growing_error, explain_stateful_code


@dataclass(frozen=True)
class HeldModels:
    """The model that each client has acknowledged."""

    models: Tensor = field(metadata={"rows": "trained"})  # (M, D); rows of newcomers are unused
    versions: Tensor = field(metadata={"rows": "trained"})  # (M,) downloads acknowledged; 0: none
    # {0: (D,)}: the model before the first round, once there is one
    initial: dict[int, Tensor] = field(default_factory=dict, metadata={"rounds": True})


@dataclass(frozen=True)
class DifferenceDownload(Downlink):
    """A client is sent the code of w - h, h being the model that it decoded last.

    The error of one download is part of the next difference, so errors do not add up. A first
    contact is a difference to the initial model, in its own code: the initial model is a seed from
    which every client makes it. `first` = dense sends all of w instead. The server holds a model
    for each client.
    """

    code: Compressor = field(default=RotatedCode(1), metadata={"piece": "compressor"})
    first: Compressor = field(default=RotatedCode(2), metadata={"piece": "compressor"})

    def check_recipe(self, recipe: Recipe) -> str:
        return (
            explain_stateful_code(self.code)
            or explain_stateful_code(self.first)
            or explain_growing_error(self.code)
        )

    def initial_state(self, M: int, d: int, D: int) -> HeldModels:
        return HeldModels(torch.zeros(M, D), torch.zeros(M, dtype=torch.int64))

    def count_models(self, P: int) -> int:
        return P + 1  # with the initial one

    def plan_download(self, state: HeldModels, k: int) -> Download:
        if int(state.versions[k]):
            return Download("difference", self.code, 2 * HASH_BYTES)
        if self.first.is_dense:
            return Download("full", None, HASH_BYTES)
        return Download("first", self.first, SEED_BYTES + 2 * HASH_BYTES)

    def encode_models(
        self, state: HeldModels, w: Tensor, requests: Sequence[DownloadRequest]
    ) -> tuple[list[EncodedModel], HeldModels]:
        if not state.initial:
            state = replace(state, initial={0: w.clone()})
        encoded: dict[int, tuple[Payload, Tensor]] = {}  # by the places of their requests
        for code, places in _group_batches(requests, len(w)):
            batch = [requests[i] for i in places]
            bases = [self._get_base(state, request.task.k) for request in batch]
            models = encode_model_batch(w, bases, code, batch)
            encoded |= dict(zip(places, models, strict=True))
        return [
            _build_model(request, *encoded[i]) if i in encoded else self._encode(state, w, request)
            for i, request in enumerate(requests)
        ], state

    def acknowledge(self, state: HeldModels, sent: PendingTask) -> HeldModels:
        state.models[sent.task.k] = sent.w
        state.versions[sent.task.k] += 1
        return state

    def forget(self, state: HeldModels, k: int) -> HeldModels:
        state.versions[k] = 0
        return state

    def get_inquiry_model(
        self, state: HeldModels, w: Tensor, request: DownloadRequest
    ) -> tuple[Tensor, int | None]:
        """Clients report their loss of the model that they hold; nothing is sent for it."""
        return (self._get_base(state, request.task.k) if state.initial else w), 0

    def _get_base(self, state: HeldModels, k: int) -> Tensor:
        return state.models[k] if int(state.versions[k]) else state.initial[0]

    def _encode(self, state: HeldModels, w: Tensor, request: DownloadRequest) -> EncodedModel:
        task, download = request.task, request.task.download
        assert download is not None
        base = self._get_base(state, task.k)
        if download.code is None:
            return EncodedModel(*_send_exact_part(w, base, request), None)
        stream = (task.seed, task.t, task.client)
        return _build_model(request, *encode_model(w, base, download.code, request.part, stream))


def _build_model(request: DownloadRequest, payload: Payload, model: Tensor) -> EncodedModel:
    assert request.task.download is not None
    return EncodedModel(model, with_bytes(request.task.download, payload), payload)


def _group_batches(
    requests: Sequence[DownloadRequest], size: int
) -> list[tuple[Compressor, Sequence[int]]]:
    """(code, places of the requests that it encodes together), as many as memory has room for."""
    groups: dict[Compressor, list[int]] = {}
    for i, request in enumerate(requests):
        if request.batch_code is not None:
            groups.setdefault(request.batch_code, []).append(i)
    return [
        (code, batch) for code, places in groups.items() for batch in split_batches(places, size)
    ]


def _send_exact_part(w: Tensor, base: Tensor, request: DownloadRequest) -> tuple[Tensor, Download]:
    """The model of a client that is sent what it holds of w as it is."""
    part, download = request.part, request.task.download
    assert download is not None
    download = replace(download, nbytes=count_value_bytes(part.size, w.dtype))
    if part.coordinates is None:
        return w, download
    model = base.clone()
    model[part.coordinates] = w[part.coordinates]
    return model, download
