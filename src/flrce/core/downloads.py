"""Models on their way to a round's clients: encoded before tasks are sent, acknowledged by replies.

A client that replied has decoded its model, whether or not its reply counts. Of a client without a
reply nothing is known: the next difference refers to the model that it acknowledged last, which
clients keep beside the newest one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from flrce.core.downlink import DownloadRequest, EncodedModel
from flrce.core.engine import Engine
from flrce.core.gate import match_replies
from flrce.core.pieces import Recipe
from flrce.core.types import PendingTask, Portion, Reply, State, Task

MEMORY_KEY = "downlink"  # in State.server_state


def encode_downloads(
    recipe: Recipe, engine: Engine, state: State, tasks: Sequence[Task]
) -> tuple[State, list[EncodedModel]]:
    """The model of each task as its client decodes it, and the state once they are sent."""
    dense = [EncodedModel(state.w, None) for _ in tasks]
    if recipe.downlink.is_dense or not tasks:
        return state, dense
    coded = [i for i, task in enumerate(tasks) if task.download is not None]
    requests = [DownloadRequest(tasks[i], engine.get_held_part(tasks[i])) for i in coded]
    piece_state = state.server_state.get(MEMORY_KEY)
    models, piece_state = recipe.downlink.encode_models(piece_state, state.w, requests)
    for i, model in zip(coded, models, strict=True):
        dense[i] = model
    if MEMORY_KEY in state.server_state:
        state = replace(state, server_state={**state.server_state, MEMORY_KEY: piece_state})
    return state, dense


def count_download_kinds(recipe: Recipe, models: Sequence[EncodedModel]) -> dict[str, Any]:
    """For the ledger: how many downloads of each kind a round has; nothing where all are dense."""
    if recipe.downlink.is_dense or not models:
        return {}
    kinds = Counter("full" if model.download is None else model.download.kind for model in models)
    return {"downloads": dict(sorted(kinds.items()))}


def acknowledge_downloads(
    recipe: Recipe, state: State, pending: Sequence[PendingTask], replies: Sequence[Reply]
) -> dict[str, Any]:
    """The downlink's memory once these replies to pending tasks are here."""
    if recipe.downlink.is_dense or MEMORY_KEY not in state.server_state:
        return {}
    piece_state = state.server_state[MEMORY_KEY]
    answers, _ = match_replies([one.task for one in pending], replies)
    for one in sorted(pending, key=lambda each: each.task.k):
        reply = answers.get(one.task.client)
        if reply is None or one.task.download is None:
            continue
        if reply.lost_base:
            piece_state = recipe.downlink.forget(piece_state, one.task.k)
        elif not reply.error and reply.payload is not None:
            piece_state = recipe.downlink.acknowledge(piece_state, one)
    return {MEMORY_KEY: piece_state}


def find_inquiry_models(
    recipe: Recipe, engine: Engine, state: State, tasks: Sequence[Task], dense_bytes: int
) -> list[tuple[Tensor, int]]:
    """Of which model each client reports its loss, and the bytes that it downloads for it."""
    if recipe.downlink.is_dense:
        return [(state.w, dense_bytes)] * len(tasks)
    piece_state, found = state.server_state.get(MEMORY_KEY), []
    for task in tasks:
        whole = replace(task, part=Portion())
        request = DownloadRequest(whole, engine.get_held_part(whole))
        model, size = recipe.downlink.get_inquiry_model(piece_state, state.w, request)
        found.append((model, dense_bytes if size is None else size))
    return found
