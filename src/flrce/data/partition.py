"""Who holds which samples: seeded schemes that give every client at least `minimum`."""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from flrce.data.sources import Source
from flrce.errors import BadInput

IndexArray = NDArray[np.int64]
# quantity: a fifth of the clients hold four fifths of the samples
LARGE_CLIENTS, LARGE_SHARE, SIZE_JITTER = 0.2, 0.8, 0.25


def has_class_labels(source: Source) -> bool:
    """Whether each sample has one class, by which samples can be shared out."""
    return source.y.ndim == 1 and source.kind not in ("values", "labels")


def partition_dirichlet(source: Source, M: int, alpha: float, rng: Generator) -> list[IndexArray]:
    """Label skew: each class is shared out in proportions of Dir(alpha) (the paper's CIFAR)."""
    if not has_class_labels(source):
        raise BadInput(
            f"data.partition dirichlet shares out classes, {source.name} has {source.kind}; use"
            " quantity, iid or, with groups, natural"
        )
    parts: list[list[IndexArray]] = [[] for _ in range(M)]
    for label in range(len(source.classes)):
        index = rng.permutation(np.flatnonzero(source.y == label))
        cuts = (np.cumsum(rng.dirichlet(np.full(M, alpha)))[:-1] * len(index)).round().astype(int)
        for k, part in enumerate(np.split(index, cuts)):
            parts[k].append(part)
    return [np.concatenate(part) for part in parts]


def partition_by_group(source: Source, M: int, alpha: float, rng: Generator) -> list[IndexArray]:
    """Client k gets a share p_k ~ Dir(alpha) of the writers, at least one (the paper's EMNIST)."""
    group = _require_groups(source, M)
    order = rng.permutation(int(group.max()) + 1)
    extra = rng.multinomial(len(order) - M, rng.dirichlet(np.full(M, alpha)))
    owner = np.empty(len(order), np.int64)
    owner[order] = np.repeat(np.arange(M), 1 + extra)
    return _split_by_owner(owner[group], M)


def partition_natural(
    source: Source, M: int, alpha: float, rng: Generator, minimum: int = 1
) -> list[IndexArray]:
    """One group, one client: M at random of those with enough samples."""
    group = _require_groups(source, M)
    order = rng.permutation(int(group.max()) + 1)
    picked = order[np.bincount(group)[order] >= minimum][:M]
    if len(picked) < M:
        raise BadInput(
            f"clients = {M}, but only {len(picked)} groups of {source.name} have data.minimum ="
            f" {minimum} samples; lower one of them"
        )
    return [np.flatnonzero(group == g) for g in np.sort(picked)]


def partition_given(source: Source, M: int, alpha: float, rng: Generator) -> list[IndexArray]:
    """Client k is group k: a partition of one's own, with nothing drawn."""
    group = _require_groups(source, M)
    count = int(group.max()) + 1
    if count != M:
        raise BadInput(
            f"data.partition given has {count} groups, clients = {M}; set clients = {count}, or use"
            " natural"
        )
    return _split_by_owner(group, M)


def partition_quantity(source: Source, M: int, alpha: float, rng: Generator) -> list[IndexArray]:
    """Size skew with IID labels, as in the authors' client files: 20 % of clients hold 80 %."""
    big = max(1, round(LARGE_CLIENTS * M)) if M > 1 else 0
    weight = np.full(M, (1 - LARGE_SHARE) / max(M - big, 1))
    weight[rng.permutation(M)[:big]] = LARGE_SHARE / max(big, 1)
    weight *= rng.uniform(1 - SIZE_JITTER, 1 + SIZE_JITTER, M)
    cuts = (np.cumsum(weight / weight.sum())[:-1] * len(source.y)).round().astype(int)
    return np.split(rng.permutation(len(source.y)), cuts)


def partition_iid(source: Source, M: int, alpha: float, rng: Generator) -> list[IndexArray]:
    """Equal sizes, labels at random."""
    return np.array_split(rng.permutation(len(source.y)), M)


PARTITION_SCHEMES: dict[str, Callable[[Source, int, float, Generator], list[IndexArray]]] = {
    "dirichlet": partition_dirichlet,
    "by-group": partition_by_group,
    "natural": partition_natural,
    "given": partition_given,
    "quantity": partition_quantity,
    "iid": partition_iid,
}
NATURAL_SCHEMES = ("natural", "given")  # one group, one client, which bears the group's name


def partition_samples(
    source: Source, scheme: str, M: int, alpha: float, minimum: int, rng: Generator
) -> list[IndexArray]:
    """Each client's sample indices, in random order."""
    if M * minimum > len(source.y):
        raise BadInput(
            f"clients = {M} with data.minimum = {minimum} needs {M * minimum} samples,"
            f" {source.name} has {len(source.y)}; lower one of them"
        )
    if scheme == "natural":
        return [rng.permutation(part) for part in partition_natural(source, M, alpha, rng, minimum)]
    parts = PARTITION_SCHEMES[scheme](source, M, alpha, rng)
    if scheme in NATURAL_SCHEMES:
        small = min(map(len, parts))
        if small < minimum:
            remedy = 'leave that client out, as data.partition = "natural" does'
            if small > 1:
                remedy = "lower it"
            client = name_group(source, [len(part) for part in parts].index(small))
            count = f"{small} sample{'' if small == 1 else 's'}"
            raise BadInput(f"client {client!a} has {count}; data.minimum is {minimum}; {remedy}")
        return [rng.permutation(part) for part in parts]
    return [rng.permutation(part) for part in _top_up_clients(parts, minimum, rng)]


def name_group(source: Source, code: int) -> str:
    """The name of a group, or its number where groups have none."""
    return source.groups[code] if source.groups else str(code)


def _top_up_clients(parts: list[IndexArray], minimum: int, rng: Generator) -> list[IndexArray]:
    """Give clients with too few samples random ones that others hold beyond the minimum."""
    parts = [rng.permutation(part) for part in parts]
    surplus = rng.permutation(np.concatenate([part[minimum:] for part in parts]))
    moved: list[IndexArray] = []
    for k, part in enumerate(parts):
        lack = max(minimum - len(part), 0)
        if lack:
            parts[k], surplus = np.concatenate([part, surplus[:lack]]), surplus[lack:]
            moved.append(parts[k][len(part) :])
    gone = np.concatenate([*moved, np.empty(0, np.int64)])
    return [part if len(part) <= minimum else part[~np.isin(part, gone)] for part in parts]


def _require_groups(source: Source, M: int) -> IndexArray:
    if source.group is None:
        remedy = "set data.group, or use iid"
        if source.kind == "classes":
            remedy = "use dirichlet, quantity or iid"
        raise BadInput(f"data.partition by group needs groups, {source.name} has none; {remedy}")
    codes = np.asarray(source.group)
    if codes.dtype.kind not in "iu":
        raise BadInput(
            f"{source.name}'s group is {codes.dtype}; give whole numbers from 0 on, and names in"
            " groups"
        )
    count = int(codes.max()) + 1
    if count < M:
        raise BadInput(
            f"clients = {M}, but {source.name} has only {count} groups; lower clients or change"
            " data.partition"
        )
    return source.group


def _split_by_owner(owner: IndexArray, M: int) -> list[IndexArray]:
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(1, M)))
