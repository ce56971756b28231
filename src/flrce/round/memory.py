"""How much memory a run will want, known before any of it is taken."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flrce.engine import Near, Staffed
from flrce.errors import BadInput
from flrce.host import available
from flrce.pieces import Last, Recipe
from flrce.state_values import list_fields
from flrce.traits import Blockwise, Sketched

ROUND = 8  # copies of a round's updates that are alive at once: payloads, rows, float64 sums, the rows' file
LEAN = (2, 8)  # where the aggregator makes none: copies of a round's updates, and models beside them (as measured)
WORKER = 10  # models in a worker process that trains with torch: w, its gradient, what it was sent and sends
TOLD = 4 << 30  # bytes from which a run says beforehand what it will take
log = logging.getLogger("flrce")
CLIENT = 400  # bytes of a client's name in the roster and in the sets and lists that a round makes of all names
COLUMNS = 2**14  # float64 columns for each of a round's clients while it is compared with all others, block by block
SMALLEST = 64  # floats: a shorter sketch ranks by noise


def tables(recipe: Recipe, M: int, d: int, D: int) -> dict[str, int]:
    """Bytes of every table the pieces will keep, by "role.field"."""
    memory = _shapes(recipe, M, d, D)
    held = ((role, kept, f.name) for role, kept in memory.items() for f in list_fields(kept))
    return {f"{role}.{name}": _bytes(getattr(kept, name)) for role, kept, name in held}


def renewed(recipe: Recipe, M: int, d: int, D: int) -> int:
    """Bytes of what pieces make anew each round, while the old is still there: all tensors but tables over clients."""
    memory = _shapes(recipe, M, d, D)
    kept = ((f, getattr(each, f.name)) for each in memory.values() for f in list_fields(each))
    return sum(_bytes(value) for f, value in kept if isinstance(value, Tensor) and not f.metadata.get("rows"))


def _shapes(recipe: Recipe, M: int, d: int, D: int) -> dict[str, Any]:
    """What the pieces would remember, as tensors that have shapes and no contents."""
    try:
        with torch.device("meta"):
            return recipe.init(M, d, D)
    except RuntimeError:  # a piece that computes while it makes its tables: no estimate
        return {}


def needed(recipe: Recipe, M: int, d: int, D: int, near: bool = False) -> int:
    """Bytes a server needs for M clients and a model of D floats, d of them trained; `near`: updates stay elsewhere."""
    P = min(recipe.P, M)
    if near:
        copies = LEAN[1]
    elif _lean(recipe, d):
        copies = LEAN[0] * P + LEAN[1]
    else:
        copies = ROUND * P + 4
    copies += not isinstance(recipe.average, Last)  # the model that is handed back
    held = sum(tables(recipe, M, d, D).values()) + renewed(recipe, M, d, D)
    return held + 4 * D * copies + CLIENT * M + 8 * P * min(16 * M, COLUMNS)


def _lean(recipe: Recipe, d: int) -> bool:
    """Whether a round's updates are held as payloads and as rows, and nothing else of their size is."""
    sends = recipe.chain is not None and recipe.chain.sends(d)
    return isinstance(recipe.aggregator, Blockwise) and recipe.aggregator.blockwise and not sends


def sketch_that_fits(recipe: Recipe, M: int, d: int, D: int, have: int) -> int:
    """Floats per client, a power of two, of the largest sketched maps within `have` bytes; 0: none is possible."""
    maps = _maps(recipe, M, d, D)
    size = 1 << (d - 1).bit_length()  # at least d: V exact, Omega not kept
    while maps and size >= SMALLEST:
        sketched: dict[str, Any] = {role: piece.sketched(size) for role, piece in maps.items()}
        if needed(replace(recipe, **sketched), M, d, D) <= have:
            return size
        size //= 2
    return 0


def _maps(recipe: Recipe, M: int, d: int, D: int) -> dict[str, Sketched]:
    """Role -> piece, of those that keep something of every client's update and could keep less."""
    kept = tables(recipe, M, d, D)
    return {role: p for role, p in recipe.pieces() if isinstance(p, Sketched) and kept.get(f"{role}.V")}


def near(engine: Any) -> bool:
    """Whether a round's updates stay on the engine's device."""
    return isinstance(engine, Near) and engine.near


def turn(engine: Any) -> AbstractContextManager[Any]:
    """What is held while the server works on the engine's device, if it does."""
    return engine.turn if isinstance(engine, Near) and engine.near else nullcontext()


def staff(engine: Any) -> tuple[int, int]:
    """Worker processes of the engine's on this machine, and bytes of each."""
    return engine.staff if isinstance(engine, Staffed) else (0, 0)


def worker(D: int, kept: int = 0) -> int:
    """Bytes of a process that trains a model of D floats with torch and keeps so many of a batch's attention."""
    return 4 * D * WORKER + kept


def spare(recipe: Recipe, M: int, d: int, D: int) -> int | None:
    """Bytes that are left for workers beside the server; None: unknown. Others may want some before these are taken."""
    have = available()
    return None if have is None else max(have * 9 // 10 - needed(recipe, M, d, D), 0)


def preflight(
    recipe: Recipe, M: int, d: int, D: int, near: bool = False, staff: tuple[int, int] = (0, 0)
) -> None:  # fmt: skip
    """BadInput naming the figures if tables and workers cannot fit; a run is never killed for memory later."""
    want, have = needed(recipe, M, d, D, near), available()
    hands, each = min(staff[0], recipe.P), staff[1] or worker(D)  # no more train at once than are asked
    if want + hands * each > TOLD:
        whose = f"each of {hands} workers" if hands > 1 else "each worker"
        rest = "a batch's activations" if each == worker(D) else "a batch's activations but for attention"
        log.warning(
            "memory: about %.1f GB for the server, and on a CPU %.1f GB and %s for %s",
            want / 1e9, each / 1e9, rest, whose,
        )  # fmt: skip
    if have is None or want + hands * each <= have:
        return
    if want <= have:
        fit = (have - want) // each
        remedy = f"set engine.workers = {fit}" if fit else "lower train.batch or per_round, or take a smaller model"
        raise BadInput(
            f"{hands} of engine.workers with {each / 1e9:.1f} GB each need {hands * each / 1e9:.1f} GB beside the "
            f"server's {want / 1e9:.1f} GB, but {have / 1e9:.1f} GB are available; {remedy}"
        )
    parts = sorted(tables(recipe, M, d, D).items(), key=lambda item: -item[1])[:2]
    largest = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in parts if size)
    # room for workers too, if that leaves any for the map
    fits = sketch_that_fits(recipe, M, d, D, have - max(hands, 1) * each) or sketch_that_fits(recipe, M, d, D, have)
    maps = [f'[recipe.{r}] piece = "{p.piece}", sketch = {fits}' for r, p in _maps(recipe, M, d, D).items()]
    sketch = f"sketch the map ({'; '.join(maps)}), " if fits else ""
    raise BadInput(
        f"{M} clients and {d} trained floats need {want / 1e9:.1f} GB ({largest or 'updates'}), "
        f"but {have / 1e9:.1f} GB are available; {sketch}lower clients, take a smaller model, or a recipe without a "
        "relationship map such as fedavg"
    )


def fits(recipe: Recipe, M: int, d: int, D: int, near: bool = False) -> bool:
    """Whether tables for M clients can be made beside those there are: they are copied when they grow."""
    have = available()
    return have is None or needed(recipe, M, d, D, near) <= have


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value.values())) if isinstance(value, dict) else 0
