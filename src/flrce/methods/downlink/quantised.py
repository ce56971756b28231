"""Every client is sent the same encoded model; nobody remembers anything."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flrce.core.downlink import DownloadRequest, EncodedModel, encode_model, with_bytes
from flrce.core.pieces import Recipe
from flrce.core.roles import Compressor, Downlink
from flrce.core.types import Download, Task
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.downlink.codes import explain_stateful_code


@dataclass(frozen=True)
class QuantisedDownload(Downlink):
    """Every client is sent the code of w; its error stays in the model that clients train from."""

    code: Compressor = field(default=Quantizer(8), metadata={"piece": "compressor"})

    def check_recipe(self, recipe: Recipe) -> str:
        return explain_stateful_code(self.code)

    def plan_download(self, state: Any, k: int) -> Download:
        return Download("full", self.code)

    def encode_models(
        self, state: Any, w: Tensor, requests: Sequence[DownloadRequest]
    ) -> tuple[list[EncodedModel], Any]:
        whole: EncodedModel | None = None
        models = []
        for request in requests:
            if request.part.coordinates is not None:
                models.append(self._encode(w, request))
                continue
            whole = whole or self._encode(w, request)
            models.append(whole)
        return models, state

    def get_inquiry_model(
        self, state: Any, w: Tensor, request: DownloadRequest
    ) -> tuple[Tensor, int | None]:
        """Clients report their loss of the model that they would train from."""
        encoded = self._encode(w, request)
        assert encoded.payload is not None
        return encoded.model, encoded.payload.nbytes

    def _encode(self, w: Tensor, request: DownloadRequest) -> EncodedModel:
        task: Task = request.task
        download = self.plan_download(None, task.k)
        payload, model = encode_model(w, None, self.code, request.part, (task.seed, task.t, ""))
        return EncodedModel(model, with_bytes(download, payload), payload)
