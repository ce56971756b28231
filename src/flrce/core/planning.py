"""Before clients work: who can be reached, who is chosen, what each does, and who pays for it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from numpy.random import Generator
from torch import Tensor

from flrce.core.engine import (
    Engine,
    count_absent,
    exclude_busy_clients,
    reachable_clients,
    update_roster,
    view_with_fleet_state,
)
from flrce.core.forecast import RoundRefused, check_budget, count_model_bytes
from flrce.core.memory_limits import has_memory_for_clients
from flrce.core.pending import (
    count_download_kinds,
    dispatch,
    encode_downloads,
    find_inquiry_models,
    list_pending_tasks,
)
from flrce.core.piece_checks import validate_cohort_size, validate_selection
from flrce.core.pieces import Recipe
from flrce.core.roles import RoundView
from flrce.core.types import RoundPlan, Selection, State, Task
from flrce.rng import RoundStreams, make_stream


class LossInquiry:
    """Asks clients for their loss at w, and notes which: their bytes are booked."""

    def __init__(self, recipe: Recipe, engine: Engine, state: State) -> None:
        self.recipe, self.engine, self.state = recipe, engine, state
        self.view: RoundView | None = None  # of the round that is planned
        self.asked: list[tuple[str, int]] = []  # clients, and bytes that each downloads for it

    def __call__(self, indices: Sequence[int]) -> Tensor:
        assert self.view is not None
        state = self.state
        tasks = self.recipe.build_tasks(Selection(tuple(indices)), state.server_state, self.view)
        clients = [state.roster[k] for k in indices]
        dense = count_model_bytes(self.engine, state.w)
        models = find_inquiry_models(self.recipe, self.engine, state, tasks, dense)
        asked = [(client, size) for client, (_, size) in zip(clients, models, strict=True)]
        if self.recipe.stop.checks_costs:
            # nobody is asked for a round that the budget does not pay for
            check_budget(self.recipe, self.engine, state, tasks, asked, some=True)
        self.asked.extend(asked)
        return self.engine.losses([model for model, _ in models], clients)


def plan_round(recipe: Recipe, engine: Engine, state: State, seed: int, T: int = 0) -> RoundPlan:
    """Choose C_t and say what each client is to do."""
    t = state.t + 1
    purpose = f"select{state.attempt or ''}"  # another try at the same round draws anew
    pending = list_pending_tasks(recipe, state)
    now, reachable, unreachable = reachable_clients(recipe, engine, state, t, pending)
    engine.begin_round(now)
    state, pool = admit_clients(recipe, engine, state, reachable)
    busy = {task.task.k for task in pending}
    pool = exclude_busy_clients(pool, busy) if busy else pool
    inquiry, streams = LossInquiry(recipe, engine, state), RoundStreams(seed, t, state.attempt)
    n = engine.count_all_samples(state.roster)
    view = RoundView(
        t,
        validate_cohort_size(recipe.pace, recipe.pace.cohort_size(recipe.P, len(busy))),
        pool,
        n,
        engine.estimate,
        lambda k: draft_task(recipe, state, k, t, seed, T),
        inquiry,
        state.history,
        engine.blocks,
        state.w,
        now,
        streams=streams,
        shapes=engine.shapes,
    )
    inquiry.view = view = view_with_fleet_state(view, engine, state)
    selection, tasks, refusal = choose_tasks(
        recipe, engine, state, inquiry, make_stream(seed, purpose, t)
    )
    notes = engine.annotate_tasks(tasks)
    absent = count_absent(state.roster, pool, busy, unreachable)
    state, models = encode_downloads(recipe, engine, state, tasks)
    kinds = count_download_kinds(recipe, engine, models)
    selection = replace(selection, why={**selection.why, **notes, **absent, **kinds})
    pending_tasks = dispatch(recipe, engine, state, tasks, models, pending, now)
    keep = selection.keep or recipe.pace.max_replies(recipe.P)
    asked = tuple(inquiry.asked)
    return RoundPlan(state, t, selection, pending_tasks, asked, refusal, n, keep, now, streams)


def describe_round(recipe: Recipe, plan: RoundPlan) -> dict[str, Any]:
    """What updates say about their round: its random numbers, and how clients were drawn."""
    M = len(plan.state.roster)
    rate = recipe.selector.sampling_rate(recipe.P, M)
    return {"streams": plan.streams, "sampling_rate": rate, "clients": M}


def admit_clients(
    recipe: Recipe, engine: Engine, state: State, reachable: Sequence[str]
) -> tuple[State, tuple[int, ...]]:
    """The state with new clients in its roster, and the indices of those that can be reached."""

    def has_memory(M: int) -> bool:
        on_device = engine.updates_on_device
        return has_memory_for_clients(recipe, M, engine.trainable, len(state.w), on_device)

    return update_roster(state, tuple(reachable), has_memory)


def draft_task(recipe: Recipe, state: State, k: int, t: int, seed: int, T: int) -> Task:
    """The plain task of a client, before trainer, sub-model and pace fit it."""
    return Task(
        state.roster[k],
        k,
        t,
        seed,
        recipe.work,
        update=recipe.chain,
        augment=recipe.augment,
        compressor=recipe.compressor,
        rounds=T,
        download=recipe.downlink.plan_download(state.server_state.get("downlink"), k),
    )


def choose_tasks(
    recipe: Recipe, engine: Engine, state: State, inquiry: LossInquiry, rng: Generator
) -> tuple[Selection, tuple[Task, ...], str]:
    """The selector's choice and its tasks; without tasks and with a reason if a budget refuses."""
    view = inquiry.view
    assert view is not None
    selection = Selection(())
    try:
        if view.pool and view.P:
            selected = recipe.selector.select(state.server_state.get("selector"), view, rng)
            selection = validate_selection(recipe.selector, selected, len(state.roster))
        drafts = recipe.build_tasks(selection, state.server_state, view)
        tasks = tuple(engine.adapt_task(task) for task in drafts)
        if recipe.stop.checks_costs:
            check_budget(recipe, engine, state, tasks, inquiry.asked)
    except RoundRefused as why:
        return selection, (), str(why)
    return selection, tasks, ""
