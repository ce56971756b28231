"""Leave the layers that move least out of the next uploads: the client's half of FedLUAR (Kim,
Kang & Lee 2025).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import torch
from annotated_types import MaxLen
from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import NonNegativeInt
from flrce.core.pieces import NoCompression, Recipe
from flrce.core.roles import Compressor, RoundView
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import Payload, RoundEvent, Task
from flrce.errors import BadInput
from flrce.methods.compression.buffers import join_spans
from flrce.methods.compression.wrapping import WrappingCompressor
from flrce.rng import make_stream
from flrce_client.fixed_point import split_skipped
from flrce_client.layout import TensorSizes, count_floats, count_span_floats

MAX_NAME_CHARACTERS = 10**6  # of all skipped tensors
SEPARATOR = ","  # between the names of skipped tensors
MIN_SCORE = 1e-12  # of a layer that did not move: it is skipped almost surely, not by division by 0


@dataclass(frozen=True)
class LayerScoreState:
    """|update| / |weights| of each matrix or kernel, when it was last aggregated."""

    names: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class SkippedLayers(WrappingCompressor):
    """Each round, `layers` matrices or kernels are not uploaded; `inner` compresses the rest.

    The server draws them without replacement with probabilities in proportion to 1 / s, s the ratio
    |update| / |weights| of the layer's last aggregated update. Biases and norms always travel. In
    the first round nothing is skipped, and one matrix always travels. Use the server step
    `recycled`, which repeats a skipped layer's last update; without it, the layer rests.
    """

    layers: NonNegativeInt = 2
    inner: Compressor = field(default=NoCompression(), metadata={"piece": True})
    # set by the server: names of the tensors that a task leaves out
    skipped: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.keeps_state:
            raise BadInput(
                "error feedback keeps a residual per coordinate, and skipped layers change the"
                " coordinates of every round; use another inner compressor"
            )

    @property
    def partial(self) -> bool:
        return self.layers > 0 or self.inner.partial

    @property
    def instruction_bytes(self) -> int:
        """Two bytes for the number of each skipped tensor."""
        return 2 * len(self.skipped_names)

    @property
    def skipped_names(self) -> frozenset[str]:
        return frozenset(self.skipped.split(SEPARATOR)) - {""}

    def check_recipe(self, recipe: Recipe) -> str:
        if recipe.compressor is not self:
            return "skip-layers goes outermost: put the other compressors into its inner"
        return super().check_recipe(recipe)

    def initial_state(self, M: int, d: int, D: int) -> LayerScoreState:
        return LayerScoreState()

    def observe(self, state: LayerScoreState, event: RoundEvent) -> LayerScoreState:
        scores = dict(zip(state.names, state.scores, strict=True))
        covered = event.updates.covered
        start = 0
        for name, shape in event.updates.shapes:
            size = math.prod(shape)
            span = slice(start, start + size)
            start += size
            if len(shape) < 2 or (covered is not None and not bool(covered[:, span].any())):
                continue  # no matrix, or nobody sent it: the score of its last update stands
            w = event.w[span].double()
            step = torch.linalg.vector_norm(event.w_next[span].double() - w)
            scores[name] = float(step / (torch.linalg.vector_norm(w) + 1e-6))
        return LayerScoreState(tuple(scores), tuple(scores.values()))

    def assign(self, tasks: list[Task], state: LayerScoreState, view: RoundView) -> list[Task]:
        if not tasks or not state.names:
            return tasks
        rng = make_stream(tasks[0].seed, "recycle", view.t)
        count = min(self.layers, len(state.names) - 1)
        drawn = draw_layers(state, count, rng)
        chosen = replace(self, skipped=SEPARATOR.join(drawn))
        return [replace(task, compressor=chosen) for task in tasks]

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        spans, rest = self._split_layout(layout)
        parts = [u.new_empty(0), *(u[span] for span in spans)]
        return self.inner.encode(torch.cat(parts), rest, rng, client_state)

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator) -> Tensor:
        spans, rest = self._split_layout(layout)
        return join_spans([(spans, self.inner.decode(payload, rest, rng))], count_floats(layout))

    def estimate_bytes(self, layout: TensorSizes, rng: Generator) -> int | None:
        spans, rest = self._split_layout(layout)
        if self.inner.is_dense:
            return count_value_bytes(count_span_floats(spans))
        return self.inner.estimate_bytes(rest, rng)

    def coverage_mask(self, layout: TensorSizes, rng: Generator) -> Tensor | None:
        spans, rest = self._split_layout(layout)
        inner = self.inner.coverage_mask(rest, rng)
        if inner is None and len(rest) == len(layout):
            return None
        sent = torch.ones(count_span_floats(spans)) if inner is None else inner
        return join_spans([(spans, sent)], count_floats(layout)).bool()

    def _split_layout(self, layout: TensorSizes) -> tuple[list[slice], list[tuple[str, int]]]:
        """(where the tensors that travel lie in u, their layout)."""
        return split_skipped(layout, self.skipped_names)


def draw_layers(state: LayerScoreState, count: int, rng: Generator) -> list[str]:
    """So many names without replacement, with probabilities in proportion to 1 / score."""
    inverse = 1 / np.maximum(np.array(state.scores), MIN_SCORE)
    drawn = rng.choice(len(inverse), size=count, replace=False, p=inverse / inverse.sum())
    return [state.names[i] for i in sorted(drawn.tolist())]
