"""What a server sees under secure aggregation: sums over a round's clients, and nobody's own update
or figure.
"""

from dataclasses import replace

import torch

from flrce.core.types import RoundRecord, Updates


def average_updates(updates: Updates) -> Updates:
    """One row: the mean update by samples and the samples of all; `k` still says who took part."""
    n = updates.n
    total = torch.zeros_like(updates.U[0], dtype=torch.float64)
    for row in range(len(updates.U)):
        total.add_(updates.U[row].double(), alpha=float(n[row]))
    mean = (total / n.sum()).to(updates.U.dtype)
    return Updates(
        updates.k, mean[None], n.sum()[None], updates.trainable, age=updates.age, base=updates.base
    )


def average_client_metrics(record: RoundRecord) -> RoundRecord:
    """The record with one figure of the model: the mean over the hold-outs' samples."""
    known = [
        (value, n)
        for value, n in zip(record.evaluation.holdouts, record.evaluation.held, strict=True)
        if value is not None
    ]
    if not known:
        return replace(record, evaluation=replace(record.evaluation, holdouts=(), held=()))
    samples = sum(n for _, n in known)
    mean = sum(value * n for value, n in known) / samples
    return replace(record, evaluation=replace(record.evaluation, holdouts=(mean,), held=(samples,)))
