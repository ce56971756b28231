"""Runs by what they learnt: scores of different data or metrics are never put side by side."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flrce.core.metric_format import format_metric_name
from flrce.errors import BadInput, format_one_line
from flrce.storage.read import RecordedRun
from flrce.storage.settings import flatten_tables

MAX_SLUG_CHARACTERS = 40  # characters of a task's name in a file's name


@dataclass(frozen=True)
class TaskRuns:
    """Runs on the same samples, by the same metric."""

    label: str
    slug: str  # the label as part of a file's name
    runs: tuple[RecordedRun, ...]


def group_by_task(runs: Sequence[RecordedRun]) -> list[TaskRuns]:
    """Runs by task, in the order of their first runs; labels tell tasks apart."""
    groups: dict[tuple[str, ...], list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(task_key(run), []).append(run)
    labels: list[str] = []
    for key, part in groups.items():
        label = get_dataset_name(part[0])
        if sum(get_dataset_name(other[0]) == label for other in groups.values()) > 1:
            label = f"{label}, {format_metric_name(key[0])}"
        again = sum(before == label or before.startswith(f"{label} #") for before in labels)
        labels.append(f"{label} #{again + 1}" if again else label)
    slugs = [
        re.sub(r"[^\w.]+", "-", label).strip("-.")[:MAX_SLUG_CHARACTERS] or "task"
        for label in labels
    ]
    slugs = [f"{slug}-{i + 1}" if slugs.count(slug) > 1 else slug for i, slug in enumerate(slugs)]
    return [
        TaskRuns(label, slug, tuple(part))
        for label, slug, part in zip(labels, slugs, groups.values(), strict=True)
    ]


def task_key(run: RecordedRun) -> tuple[str, ...]:
    """What two runs must share for their scores to be compared: metric, samples, targets.

    Samples are known by their digest; where trouble changes them with every seed, by the settings
    that name them.
    """
    dealt, data = run.partition, run.experiment.get("data", {})
    digest = None if data.get("trouble") else dealt.get("digest")
    samples = (
        (data.get("path"), data.get("name"), data.get("trouble")) if digest is None else digest
    )
    shape = (dealt.get("data"), dealt.get("kind"), dealt.get("classes"))
    return str(run.summary.get("metric", "accuracy")), *map(repr, shape), repr(samples)


def split_key(run: RecordedRun) -> tuple[tuple[str, str], ...]:
    """How the samples were shared out; runs that differ in it are not comparable."""
    settings = flatten_tables(run.experiment)
    return tuple(
        (key, str(settings[key]))
        for key in sorted(settings)
        if key.startswith("data.") or key == "clients"
    )


def require_one_task(runs: Sequence[RecordedRun], why: str) -> None:
    """BadInput where runs are of several tasks; `why` says what to do instead."""
    tasks = group_by_task(runs)
    if len(tasks) > 1:
        each = "; ".join(
            f"{format_one_line(task.label, 60)}: {task.runs[0].folder}" for task in tasks[:4]
        )
        raise BadInput(f"these runs are of {len(tasks)} different tasks ({each}); {why}")


def get_dataset_name(run: RecordedRun) -> str:
    """The data set, as people call it."""
    data = run.experiment.get("data", {})
    named = Path(str(data["path"])).name if data.get("path") else str(data.get("name", "digits"))
    dealt = str(run.partition.get("data", named))
    return named if data.get("path") or dealt == named else dealt
