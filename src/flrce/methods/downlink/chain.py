"""One chain of differences for all clients: each downloads those that it missed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flrce.core.downlink import DownloadRequest, EncodedModel, HeldPart, encode_model
from flrce.core.pieces import FullModel, Recipe
from flrce.core.roles import Compressor, Downlink
from flrce.core.tensor_bytes import HASH_BYTES, SEED_BYTES, count_value_bytes
from flrce.core.types import Download, PendingTask
from flrce.errors import BadInput
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.downlink.codes import explain_growing_error, explain_stateful_code

NO_PARTS = "one chain of differences is of whole models; use downlink = difference for sub-models"


@dataclass(frozen=True)
class ChainState:
    """The model at the end of the chain, and how far each client has followed it."""

    model: Tensor  # (D,) what a client holds that followed the whole chain
    versions: Tensor = field(metadata={"rows": "trained"})  # (M,) differences that a client has
    totals: tuple[int, ...] = ()  # bytes of the first n differences; () before the first round


@dataclass(frozen=True)
class ChainedDownload(Downlink):
    """Each round the server encodes one difference between w and the end of the chain, and a client
    downloads all differences that it missed, or the model itself where that has fewer bytes.

    The server holds one model and a number for each client, so that millions of clients or large
    models are possible. A client that trains rarely downloads more than with `difference`. The
    chain begins at the initial model, a seed from which every client makes it.
    """

    code: Compressor = field(default=RotatedCode(1), metadata={"piece": "compressor"})

    def check_recipe(self, recipe: Recipe) -> str:
        if not isinstance(recipe.submodel, FullModel):
            return NO_PARTS
        return explain_stateful_code(self.code) or explain_growing_error(self.code)

    def initial_state(self, M: int, d: int, D: int) -> ChainState:
        return ChainState(torch.zeros(D), torch.zeros(M, dtype=torch.int64))

    def plan_download(self, state: ChainState, k: int) -> Download:
        """A download as it would be now, with the difference that the round will add."""
        download = self._list_missed(state, k)
        return replace(download, code=self.code, nbytes=None if state.totals else 0)

    def encode_models(
        self, state: ChainState, w: Tensor, requests: Sequence[DownloadRequest]
    ) -> tuple[list[EncodedModel], ChainState]:
        if any(request.part.coordinates is not None for request in requests):
            raise BadInput(NO_PARTS)
        if requests:
            state = self._extend_chain(state, w, requests[0])
        models = []
        for request in requests:
            download = self._list_missed(state, request.task.k)
            models.append(EncodedModel(state.model, _send_cheaper(download, request.part)))
        return models, state

    def acknowledge(self, state: ChainState, sent: PendingTask) -> ChainState:
        download = sent.task.download
        assert download is not None
        state.versions[sent.task.k] = download.version
        return state

    def forget(self, state: ChainState, k: int) -> ChainState:
        state.versions[k] = 0
        return state

    def get_inquiry_model(
        self, state: ChainState, w: Tensor, request: DownloadRequest
    ) -> tuple[Tensor, int | None]:
        """Clients report their loss of the model at the end of the chain, which is billed."""
        if not state.totals:
            return w, 0
        download = _send_cheaper(self._list_missed(state, request.task.k), request.part)
        return state.model, download.nbytes

    def _extend_chain(self, state: ChainState, w: Tensor, request: DownloadRequest) -> ChainState:
        if not state.totals:
            return replace(state, model=w.clone(), totals=(0,))
        stream = (request.task.seed, len(state.totals), "chain")
        payload, model = encode_model(w, state.model, self.code, request.part, stream)
        totals = (*state.totals, state.totals[-1] + payload.nbytes)
        return replace(state, model=model, totals=totals)

    def _list_missed(self, state: ChainState, k: int) -> Download:
        """The download of the differences that client k has not got."""
        held, totals = int(state.versions[k]), state.totals or (0,)
        kind = "difference" if held else "first"
        framing = 2 * HASH_BYTES + (0 if held else SEED_BYTES)
        missed = totals[-1] - totals[held]
        return Download(kind, None, framing, missed, missed, len(totals) - 1)


def _send_cheaper(download: Download, part: HeldPart) -> Download:
    """The download, or the model itself where that has fewer bytes."""
    whole = count_value_bytes(part.size)
    if download.missed <= whole:
        return download
    return replace(download, kind="full", missed=0, nbytes=whole)
