"""How much memory a run will want, known before any of it is taken."""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flrce.core.host import get_available_memory
from flrce.core.pieces import Recipe
from flrce.core.roles import Piece
from flrce.core.state_values import list_fields
from flrce.core.tensor_bytes import count_bytes, count_value_bytes
from flrce.errors import BadInput

# copies of a round's updates that are alive at once: payloads, rows, float64 sums, the rows' file
UPDATE_COPIES = 8
# where the aggregator makes none: copies of a round's updates, and models beside them (as measured)
BLOCKWISE_COPIES = (2, 8)
# models in a worker process that trains with torch: w, its gradient, what it was sent and sends
WORKER_MODEL_COPIES = 10
WARNING_BYTES = 4 << 30  # bytes from which a run says beforehand what it will take
log = logging.getLogger("flrce")
# bytes of a client's name in the roster and in the sets and lists that a round makes of all names
BYTES_PER_CLIENT = 400
# float64 columns for each of a round's clients while it is compared with all others, block by block
COMPARISON_COLUMNS = 2**14
MIN_SKETCH_FLOATS = 64  # floats: a shorter sketch ranks by noise


def estimate_table_bytes(recipe: Recipe, M: int, d: int, D: int) -> dict[str, int]:
    """Bytes of every table the pieces will keep, by "role.field"."""
    memory = _make_meta_state(recipe, M, d, D)
    held = ((role, kept, f.name) for role, kept in memory.items() for f in list_fields(kept))
    return {f"{role}.{name}": _count_bytes(getattr(kept, name)) for role, kept, name in held}


def estimate_temporary_bytes(recipe: Recipe, M: int, d: int, D: int) -> int:
    """Bytes of what pieces make anew each round, while the old is still there: all tensors but
    tables over clients.
    """
    memory = _make_meta_state(recipe, M, d, D)
    kept = (
        (f, getattr(piece_state, f.name))
        for piece_state in memory.values()
        for f in list_fields(piece_state)
    )
    return sum(
        _count_bytes(value)
        for f, value in kept
        if isinstance(value, Tensor) and not f.metadata.get("rows")
    )


def _make_meta_state(recipe: Recipe, M: int, d: int, D: int) -> dict[str, Any]:
    """What the pieces would remember, as tensors that have shapes and no contents."""
    try:
        with torch.device("meta"):
            return recipe.initial_state(M, d, D)
    except RuntimeError:  # a piece that computes while it makes its tables: no estimate
        return {}


def estimate_server_bytes(recipe: Recipe, M: int, d: int, D: int, on_device: bool = False) -> int:
    """Bytes a server needs for M clients and a model of D floats, d of them trained;
    `on_device`: updates stay elsewhere.
    """
    P = min(recipe.P, M)
    if on_device:
        copies = BLOCKWISE_COPIES[1]
    elif _needs_few_copies(recipe, d):
        copies = BLOCKWISE_COPIES[0] * P + BLOCKWISE_COPIES[1]
    else:
        copies = UPDATE_COPIES * P + 4
    copies += recipe.downlink.count_models(P)
    copies += not recipe.average.is_last_model  # the final model
    held = sum(estimate_table_bytes(recipe, M, d, D).values()) + estimate_temporary_bytes(
        recipe, M, d, D
    )
    comparison = count_value_bytes(P * min(16 * M, COMPARISON_COLUMNS), torch.float64)
    return held + count_value_bytes(D * copies) + BYTES_PER_CLIENT * M + comparison


def _needs_few_copies(recipe: Recipe, d: int) -> bool:
    """Whether a round's updates are held as payloads and as rows, and nothing else of their size
    is.
    """
    sends = recipe.chain is not None and recipe.chain.list_extra_sizes(d)
    return recipe.aggregator.blockwise and not sends


def find_fitting_sketch_size(recipe: Recipe, M: int, d: int, D: int, have: int) -> int:
    """Floats per client, a power of two, of the largest sketched maps within `have` bytes; 0: none
    is possible.
    """
    maps = _find_sketchable_pieces(recipe, M, d, D)
    size = 1 << (d - 1).bit_length()  # at least d: V exact, Omega not kept
    while maps and size >= MIN_SKETCH_FLOATS:
        sketched: dict[str, Any] = {
            role: piece.with_sketch_size(size) for role, piece in maps.items()
        }
        if estimate_server_bytes(replace(recipe, **sketched), M, d, D) <= have:
            return size
        size //= 2
    return 0


def _find_sketchable_pieces(recipe: Recipe, M: int, d: int, D: int) -> dict[str, Piece]:
    """Role -> piece, of those that keep something of every client's update and could keep less."""
    kept = estimate_table_bytes(recipe, M, d, D)
    return {
        role: p
        for role, p in recipe.iter_pieces()
        if kept.get(f"{role}.V") and p.with_sketch_size(MIN_SKETCH_FLOATS) is not None
    }


def estimate_worker_bytes(D: int, kept: int = 0) -> int:
    """Bytes of a process that trains a model of D floats with torch and keeps so many of a batch's
    attention.
    """
    return count_value_bytes(D * WORKER_MODEL_COPIES) + kept


def estimate_spare_bytes(recipe: Recipe, M: int, d: int, D: int) -> int | None:
    """Bytes that are left for workers beside the server; None: unknown. Others may want some before
    these are taken.
    """
    have = get_available_memory()
    return None if have is None else max(have * 9 // 10 - estimate_server_bytes(recipe, M, d, D), 0)


def check_memory(
    recipe: Recipe,
    M: int,
    d: int,
    D: int,
    on_device: bool = False,
    workers: tuple[int, int] = (0, 0),
) -> None:
    """BadInput naming the figures if tables and workers cannot fit; a run is never killed for
    memory later.
    """
    want, have = estimate_server_bytes(recipe, M, d, D, on_device), get_available_memory()
    # no more train at once than are asked
    count, worker_bytes = (min(workers[0], recipe.P), workers[1] or estimate_worker_bytes(D))
    if want + count * worker_bytes > WARNING_BYTES:
        _warn_about_memory(want, count, worker_bytes, D)
    if have is None or want + count * worker_bytes <= have:
        return
    if want <= have:
        fit = (have - want) // worker_bytes
        remedy = (
            f"set engine.workers = {fit}"
            if fit
            else "lower train.batch or per_round, or take a smaller model"
        )
        raise BadInput(
            f"{count} of engine.workers with {worker_bytes / 1e9:.1f} GB each need"
            f" {count * worker_bytes / 1e9:.1f} GB beside the server's {want / 1e9:.1f} GB, but"
            f" {have / 1e9:.1f} GB are available; {remedy}"
        )
    raise BadInput(
        _explain_server_shortage(recipe, (M, d, D), want, have, max(count, 1) * worker_bytes)
    )


def _warn_about_memory(want: int, count: int, each: int, D: int) -> None:
    whose = f"each of {count} workers" if count > 1 else "each worker"
    but = "" if each == estimate_worker_bytes(D) else " but for attention"
    log.warning(
        "memory: about %.1f GB for the server, and on a CPU %.1f GB and a batch's activations%s"
        " for %s",
        want / 1e9,
        each / 1e9,
        but,
        whose,
    )


def _explain_server_shortage(
    recipe: Recipe, sizes: tuple[int, int, int], want: int, have: int, workers: int
) -> str:
    """What the server's tables need, and the settings that make them fit; `workers`: bytes that
    those take beside it.
    """
    M, d, D = sizes
    parts = sorted(estimate_table_bytes(recipe, M, d, D).items(), key=lambda item: -item[1])[:2]
    largest = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in parts if size)
    # room for workers too, if that leaves any for the map
    fits = find_fitting_sketch_size(recipe, M, d, D, have - workers) or find_fitting_sketch_size(
        recipe, M, d, D, have
    )
    maps = [
        f'[recipe.{r}] piece = "{p.piece}", sketch = {fits}'
        for r, p in _find_sketchable_pieces(recipe, M, d, D).items()
    ]
    held = estimate_table_bytes(recipe, M, d, D).get("downlink.models", 0)
    chain = (
        'set [recipe.downlink] piece = "chain", which holds one model for all clients, '
        if 2 * held > want
        else ""
    )
    sketch = f"sketch the map ({'; '.join(maps)}), " if fits else ""
    return (
        f"{M} clients and {d} trained floats need {want / 1e9:.1f} GB ({largest or 'updates'}), but"
        f" {have / 1e9:.1f} GB are available; {chain}{sketch}lower clients, take a smaller model,"
        " or a recipe without a relationship map such as fedavg"
    )


def has_memory_for_clients(recipe: Recipe, M: int, d: int, D: int, on_device: bool = False) -> bool:
    """Whether tables for M clients can be made beside those there are: they are copied when they
    grow.
    """
    have = get_available_memory()
    return have is None or estimate_server_bytes(recipe, M, d, D, on_device) <= have


def _count_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return count_bytes(value)
    return sum(map(_count_bytes, value.values())) if isinstance(value, dict) else 0
