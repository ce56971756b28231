"""A difference for each client where the server can hold a model for each, one chain elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le
from torch import Tensor

from flrce.core.downlink import DownloadRequest, EncodedModel
from flrce.core.pieces import Recipe
from flrce.core.roles import Compressor, Downlink
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import Download, PendingTask
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.downlink.chain import ChainedDownload, ChainState
from flrce.methods.downlink.difference import DifferenceDownload, HeldModels

HeldState = HeldModels | ChainState


@dataclass(frozen=True)
class FittedDownload(Downlink):
    """`difference` where one model for each client needs at most `max_bytes` on the server, else
    `chain`.

    Clients and floats decide, not the memory that happens to be free: the same experiment sends the
    same bytes on every machine. Sub-models need `difference`, for a chain is of whole models.
    """

    code: Compressor = field(default=RotatedCode(1), metadata={"piece": "compressor"})
    first: Compressor = field(default=RotatedCode(2), metadata={"piece": "compressor"})
    max_bytes: Annotated[int, Ge(1), Le(1 << 50)] = 2 << 30

    @property
    def difference(self) -> DifferenceDownload:
        return DifferenceDownload(self.code, self.first)

    @property
    def chain(self) -> ChainedDownload:
        return ChainedDownload(self.code)

    def choose_form(self, state: HeldState) -> Downlink:
        """The form whose state this is."""
        return self.chain if isinstance(state, ChainState) else self.difference

    def check_recipe(self, recipe: Recipe) -> str:
        return self.difference.check_recipe(recipe)

    def initial_state(self, M: int, d: int, D: int) -> HeldState:
        fits = M * count_value_bytes(D) <= self.max_bytes
        return (self.difference if fits else self.chain).initial_state(M, d, D)

    def count_models(self, P: int) -> int:
        return self.difference.count_models(P)

    def plan_download(self, state: HeldState, k: int) -> Download | None:
        return self.choose_form(state).plan_download(state, k)

    def encode_models(
        self, state: HeldState, w: Tensor, requests: Sequence[DownloadRequest]
    ) -> tuple[list[EncodedModel], Any]:
        return self.choose_form(state).encode_models(state, w, requests)

    def acknowledge(self, piece_state: HeldState, sent: PendingTask) -> HeldState:
        state: HeldState = self.choose_form(piece_state).acknowledge(piece_state, sent)
        return state

    def forget(self, piece_state: HeldState, k: int) -> HeldState:
        state: HeldState = self.choose_form(piece_state).forget(piece_state, k)
        return state

    def get_inquiry_model(
        self, state: HeldState, w: Tensor, request: DownloadRequest
    ) -> tuple[Tensor, int | None]:
        return self.choose_form(state).get_inquiry_model(state, w, request)
