"""Of several global models, send the one that the client trains."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flrce.core.bounds import PositiveInt
from flrce.core.downlink import DownloadRequest, EncodedModel, encode_model, with_bytes
from flrce.core.pieces import Recipe
from flrce.core.roles import Downlink
from flrce.core.types import Download
from flrce.errors import BadInput
from flrce.methods.compression.trained_group import TrainedGroup
from flrce.models.model_groups import find_group_columns


@dataclass(frozen=True)
class GivenGroupDownload(Downlink):
    """The model whose number is the task's tensor "group", and the number in a byte. The client
    holds zeros in the place of the others.
    """

    groups: PositiveInt = 2

    def check_recipe(self, recipe: Recipe) -> str:
        if recipe.chain.evaluations:
            return "given-group sends one model, and a link compares several; drop the downlink"
        return ""

    def plan_download(self, state: Any, k: int) -> Download:
        return Download("full", TrainedGroup(self.groups))

    def encode_models(
        self, state: Any, w: Tensor, requests: Sequence[DownloadRequest]
    ) -> tuple[list[EncodedModel], Any]:
        return [self._encode(w, request) for request in requests], state

    def _encode(self, w: Tensor, request: DownloadRequest) -> EncodedModel:
        task, part = request.task, request.part
        if "group" not in task.tensors:
            raise BadInput('given-group: no trainer sends the tensor "group" with a task; add one')
        columns = find_group_columns(part.trained_layout, self.groups)
        others = torch.ones(len(w), dtype=torch.bool)
        others[columns[int(task.tensors["group"])]] = False
        others[part.trained :] = False
        download = self.plan_download(None, task.k)
        stream = (task.seed, task.t, "")
        payload, model = encode_model(w.masked_fill(others, 0), None, download.code, part, stream)
        return EncodedModel(model, with_bytes(download, payload), payload)
