"""Who goes together: clients of one round chosen by their sizes and by the directions of their last
updates.

Lengths are taken out of every update before it is compared: a long one counts no more than a short
one, and no sum of rows of length 1 can overflow.
"""

from collections.abc import Sequence

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core.linalg import normalize_rows


def cap_sample_counts(n: Tensor, cap: float) -> Tensor:
    """(L,) samples, no more than `cap` times their median (0: all of them); 1 where nobody's are
    known.
    """
    n = n.double()
    if not bool((n > 0).any()):
        return torch.ones_like(n)
    return n.clamp(max=cap * float(n[n > 0].median())) if cap else n


def split_by_size(n: Tensor, count: int) -> tuple[Tensor, ...]:
    """Positions sorted by n, from the fewest samples to the most, in `count` parts as equal as can
    be.
    """
    return n.argsort(stable=True).tensor_split(count)


def select_stratified(n: Tensor, count: int) -> list[int]:
    """`count` positions: the first of each part of those sorted by n."""
    return [int(part.min()) for part in split_by_size(n, count)]


def select_balanced(
    D: Tensor, n: Tensor, count: int, rng: Generator, already: Sequence[int] = (), tries: int = 2
) -> list[int]:
    """`count` of the rows of D (L, size) not `already` chosen: one of each size, whose directions
    cancel out.

    Those left are parted by size. From the largest part to the smallest, `tries` of a part are
    drawn, and the one of them goes along that points most against what the chosen have too much of.
    Directions are measured from the mean of all rows, weighted by n, and are of length 1 again: how
    far a client is from the mean does not decide when it goes.
    """
    mean = (n[:, None] * D).sum(0) / n.sum()
    # never heard from: no direction
    away = normalize_rows(torch.where((D != 0).any(1, keepdim=True), D - mean, 0.0))
    surplus = (n[:, None] * away)[list(already)].sum(0)
    left = [i for i in range(len(D)) if i not in set(already)]
    picked: list[int] = []
    for part in reversed(split_by_size(n[left], count)):
        drawn = [left[int(part[i])] for i in rng.permutation(len(part))[: tries or None]]
        pull = away[drawn] @ surplus
        best = drawn[int(pull.argmin())]
        picked.append(best)
        surplus = surplus + n[best] * away[best]
    return picked


def mean_cosines(V: Tensor) -> Tensor:
    """(L,) mean cosine of each row with all; 0 for a zero update."""
    unit = normalize_rows(V)
    return unit @ unit.mean(0)


def cosines_with_others(V: Tensor, k: Tensor) -> Tensor:
    """(P, M) cosines of the rows k of V, which have length 1 or 0, with all others; 0 with those
    never heard from.
    """
    cosines: Tensor = (V[k] @ V.T).clamp(-1, 1)
    cosines[torch.arange(len(k)), k] = 0.0
    return cosines
