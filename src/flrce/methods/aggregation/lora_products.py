"""Adapters averaged as what they do: the mean of the products B_k A_k, not the product of the
means.

FLoRA (Wang et al. 2024) stacks clients' factors, which is the sum of their products without an
error, whatever their ranks; FlexLoRA (Bai et al. 2024) goes on to the nearest product of the rank
that travels, by its singular values.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flrce.core.bounds import NonNegativeFloat
from flrce.core.roles import Aggregator
from flrce.core.types import Updates
from flrce.errors import BadInput
from flrce.methods.aggregation.mean import add_weighted_mean, compute_reply_weights
from flrce.models.adapters import pair_adapter_factors


@dataclass(frozen=True)
class LoRAProductMean(Aggregator):
    """w with each adapter's (A, B) such that B A is the mean of clients' B_k A_k, or the nearest of
    its rank to it.

    A client of lower rank counts with what it holds. Everything that is no adapter, and an adapter
    of which only one matrix travels, is averaged as it is. Among all (A, B) with this product the
    one nearest to w is taken, so that rounds can be compared and averaged; where clients' ranks
    differ, the one whose first units matter most.
    """

    by: Literal["samples", "equal"] = "samples"
    cap: NonNegativeFloat = 0.0
    needs_adapters: ClassVar[bool] = True

    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        n = compute_reply_weights(updates.n, self.by, self.cap)
        made = add_weighted_mean(w, updates, n)
        if not updates.shapes:
            raise BadInput(
                'aggregator = "products" must know the shapes of tensors; this engine does not tell'
                " them"
            )
        starts = [0]
        for _, shape in updates.shapes:
            starts.append(starts[-1] + int(torch.Size(shape).numel()))
        p = (n / n.sum()).tolist()
        for a, b in pair_adapter_factors(updates.shapes):
            spans = [slice(starts[i], starts[i + 1]) for i in (a, b)]
            shapes = [updates.shapes[i][1] for i in (a, b)]
            clients = [
                _extract_client_factors(w, updates, row, spans, shapes)
                for row in range(len(updates))
            ]
            # (out, sum of ranks)
            B = torch.cat([share * B for share, (_, B) in zip(p, clients, strict=True)], 1)
            A = torch.cat([A for A, _ in clients])  # (sum of ranks, in)
            before = [
                w[span].double().reshape(shape) for span, shape in zip(spans, shapes, strict=True)
            ]
            new = nearest_low_rank_factors(
                A, B, before[0], before[1], ordered=updates.covered is not None
            )
            for span, value in zip(spans, new, strict=True):
                made[span] = value.reshape(-1).to(w.dtype)
        return made


def _extract_client_factors(
    w: Tensor, updates: Updates, row: int, spans: list[slice], shapes: list[Any]
) -> tuple[Tensor, Tensor]:
    """(A_k, B_k) in float64; units that the client does not hold are left out."""
    A, B = (
        (w[span].double() + updates.U[row, span].double()).reshape(shape)
        for span, shape in zip(spans, shapes, strict=True)
    )
    if updates.covered is None:
        return A, B
    held = updates.covered[row, spans[0]].reshape(shapes[0])[:, 0]  # (R,)
    return A[held], B[:, held]


def nearest_low_rank_factors(
    A: Tensor, B: Tensor, A0: Tensor, B0: Tensor, ordered: bool
) -> tuple[Tensor, Tensor]:
    """(A, B) of A0's rank R whose product is nearest to B A, for A (m, in) and B (out, m).

    Rows of A are orthogonal and keep the mean length of A0's; units beyond m keep A0's row and do
    nothing yet. Of all turns of the R units the one nearest to (A0, B0), or `ordered` by singular
    values, each unit's sign as before.
    """
    R = len(A0)
    qa, ra = torch.linalg.qr(A.T)  # (in, m'), (m', m)
    qb, rb = torch.linalg.qr(B)
    u, s, vt = torch.linalg.svd(rb @ ra.T)
    size = float(A0.norm(dim=1).mean()) or 1.0
    r = min(R, len(s))
    new_a, new_b = A0.clone(), torch.zeros_like(B0)
    new_a[:r] = size * (qa @ vt[:r].T).T
    new_b[:, :r] = qb @ u[:, :r] * s[:r] / size
    if ordered:
        sign = torch.where((new_a * A0).sum(1) + (new_b * B0).sum(0) < 0, -1.0, 1.0).to(A)
        return new_a * sign[:, None], new_b * sign
    left, _, right = torch.linalg.svd(new_a @ A0.T + new_b.T @ B0)
    turn = left @ right  # orthogonal (R, R): makes turn^T A nearest to A0 and B turn to B0
    return turn.T @ new_a, new_b @ turn
