"""How an arena was run, in words: for whoever sees its page and not its plan."""

from collections.abc import Sequence
from typing import Any

from flrce.config.experiment import Experiment
from flrce_arena.plan import ArenaPlan, TuningGrid

TASK_HEADINGS = ("Task", "Data", "Clients", "A round", "Rounds", "Local work", "Network")


def describe_plan(plan: ArenaPlan) -> dict[str, Any]:
    """The rule by which settings were chosen, and what the tasks are."""
    return {
        "rule": describe_tuning_rule(plan),
        "heads": TASK_HEADINGS,
        "tasks": [_describe_task(plan, task) for task in plan.tasks],
    }


def describe_tuning_rule(plan: ArenaPlan) -> str:
    """What everybody tried, and what everybody is judged by."""
    judged = f"seed{'s' * (len(plan.seeds) > 1)} {_format_values(plan.seeds)}"
    spent = f"Budgets are shares of what {plan.reference} spends."
    if not plan.tuning.has_choice:
        return f"Judged on {judged}, with the settings of tasks and methods as they are. {spent}"
    tuned = plan.tuning
    short = f" for {100 * tuned.share:.0f} % of the rounds" if tuned.share < 1 else ""
    seeds = f"seed{'s' * (len(tuned.seeds) > 1)} {_format_values(tuned.seeds)}"
    return (
        f"Every method tried {_format_tuning_grid(tuned)} on {seeds}{short}, and is judged on"
        f" {judged} with what ended best. {spent}"
    )


def _format_tuning_grid(tuned: TuningGrid) -> str:
    grid = [f"{key} = {_format_values(values)}" for key, values in tuned.grid.items()]
    times = [
        f"{key} at {_format_values(values)} times its own" for key, values in tuned.times.items()
    ]
    return " and ".join([*grid, *times])


def _format_values(values: Sequence[Any]) -> str:
    return ", ".join(
        f"{value:g}" if isinstance(value, int | float) else str(value) for value in values
    )


def _describe_task(plan: ArenaPlan, task: str) -> list[str]:
    e = Experiment.from_tables(plan.tasks[task], trust=plan.get_trust)
    data = e.data.name if e.data.path is None else e.data.path.rpartition("/")[2]
    alpha = f"({e.data.alpha:g})" if e.data.partition in ("dirichlet", "by-group") else ""
    work = (
        f"{e.train.steps} steps"
        if e.train.steps
        else f"{e.train.epochs} epoch{'s' * (e.train.epochs != 1)}"
    )
    return [
        task,
        f"{data}, {e.data.partition}{alpha}",
        str(e.clients),
        str(e.per_round),
        str(e.rounds),
        f"{work}, batches of {e.train.batch}, lr {e.train.lr:g}",
        e.model.name,
    ]
