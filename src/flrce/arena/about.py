"""How an arena was run, in words: for whoever sees its page and not its plan."""

from collections.abc import Sequence
from typing import Any

from flrce.arena.plan import Plan, Tuning
from flrce.config import Experiment

HEADS = ("Task", "Data", "Clients", "A round", "Rounds", "Local work", "Network")


def about(plan: Plan) -> dict[str, Any]:
    """The rule by which settings were chosen, and what the tasks are."""
    return {"rule": rule(plan), "heads": HEADS, "tasks": [_task(plan, task) for task in plan.tasks]}


def rule(plan: Plan) -> str:
    """What everybody tried, and what everybody is judged by."""
    judged = f"seed{'s' * (len(plan.seeds) > 1)} {_row(plan.seeds)}"
    spent = f"Budgets are shares of what {plan.reference} spends."
    if not plan.tuning.chooses:
        return f"Judged on {judged}, with the settings of tasks and methods as they are. {spent}"
    tuned = plan.tuning
    short = f" for {100 * tuned.share:.0f} % of the rounds" if tuned.share < 1 else ""
    seeds = f"seed{'s' * (len(tuned.seeds) > 1)} {_row(tuned.seeds)}"
    return (
        f"Every method tried {_tried(tuned)} on {seeds}{short}, and is judged on {judged} with what ended best. {spent}"
    )


def _tried(tuned: Tuning) -> str:
    grid = [f"{key} = {_row(values)}" for key, values in tuned.grid.items()]
    times = [f"{key} at {_row(values)} times its own" for key, values in tuned.times.items()]
    return " and ".join([*grid, *times])


def _row(values: Sequence[Any]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, int | float) else str(value) for value in values)


def _task(plan: Plan, task: str) -> list[str]:
    e = Experiment.of(plan.tasks[task], trust=plan.trust)
    data = e.data.name if e.data.path is None else e.data.path.rpartition("/")[2]
    alpha = f"({e.data.alpha:g})" if e.data.partition in ("dirichlet", "by-group") else ""
    work = f"{e.train.steps} steps" if e.train.steps else f"{e.train.epochs} epoch{'s' * (e.train.epochs != 1)}"
    return [
        task, f"{data}, {e.data.partition}{alpha}", str(e.clients), str(e.per_round), str(e.rounds),
        f"{work}, batches of {e.train.batch}, lr {e.train.lr:g}", e.model.name,
    ]  # fmt: skip
