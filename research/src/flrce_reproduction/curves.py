"""Accuracy round by round: the paper's figure of accuracy, its motivation, and the search for
learning rates.
"""

from collections.abc import Mapping
from typing import Any

from flrce_reproduction import paper
from flrce_reproduction.grid import FinishedRuns, compute_seed_ratios, get_values_by_seed
from flrce_reproduction.plan import SHOWN_METHODS, get_paper_rate
from flrce_reproduction.records import PaperRun
from flrce_reproduction.results import format_title
from flrce_reproduction.tables import (
    NOT_RUN_TEXT,
    PaperTable,
    SeedInterval,
    TableColumn,
    paired_difference,
)

EARLY, STILL_LEARNING = (
    0.1,
    0.9,
)  # a rate is too large if a tenth of T reaches nine tenths of the final accuracy


def mean_accuracy_curve(runs: Mapping[int, PaperRun], T: int) -> dict[int, SeedInterval]:
    """Accuracy in % by round, where every run was evaluated; a stopped run keeps its final
    model.
    """
    curves = [_extend_to_end(run, T) for run in runs.values()]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    points = {
        t: SeedInterval.from_values(100 * curve[t] for curve in curves) for t in rounds if t <= T
    }
    return {t: point for t, point in points.items() if point}


def _extend_to_end(run: PaperRun, T: int) -> dict[int, float]:
    accuracies = run.accuracies
    if not accuracies:
        return {}
    last = max(accuracies)
    rest = range(run.history[-1].t + 1, T + 1)
    return accuracies | dict.fromkeys(rest, accuracies[last])


def list_milestone_rounds(T: int) -> list[int]:
    return sorted({max(1, round(share * T)) for share in (0.1, 0.25, 0.5, 0.75, 1)})


def build_accuracy_table(grid: FinishedRuns) -> PaperTable:
    """Mean validation accuracy per round; the csv has every round."""
    T = grid.request.scale.rounds
    columns = (
        TableColumn("data set"),
        TableColumn("method"),
        *(TableColumn(f"round {t}") for t in list_milestone_rounds(T)),
        TableColumn("note"),
    )
    rows: list[tuple[Any, ...]] = []
    long: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        for method in SHOWN_METHODS:
            points = mean_accuracy_curve(grid.get_runs(dataset, method), T)
            shown = [points.get(t, NOT_RUN_TEXT) for t in list_milestone_rounds(T)]
            rows.append(
                (
                    paper.get_dataset_label(dataset),
                    method,
                    *shown,
                    grid.describe_row(dataset, method),
                )
            )
            long += [(dataset, method, t, point) for t, point in points.items()]
    notes = (
        (
            "Accuracy in %, mean over the clients' hold-outs. A stopped run keeps the accuracy it"
            " stopped with. The paper's figure gives no numbers."
        ),
    )
    return PaperTable(
        f"fig-accuracy-{grid.regime}",
        format_title(grid, "Accuracy per round"),
        columns,
        tuple(rows),
        notes,
        (
            TableColumn("data set"),
            TableColumn("method"),
            TableColumn("round"),
            TableColumn("accuracy %"),
        ),
        tuple(long),
    )


def build_motivation_table(grid: FinishedRuns) -> PaperTable:
    """IID against non-IID (section 2): accuracy after a few rounds, and resources per accuracy."""
    dataset, T = grid.request.motivation_dataset, grid.request.scale.motivation
    columns = (
        TableColumn("method"),
        TableColumn(f"IID % at round {T}", 2),
        TableColumn("non-IID %", 2),
        TableColumn("difference", 2, True),
        TableColumn("joules per accuracy, non-IID / IID", 2),
        TableColumn("bytes per accuracy, non-IID / IID", 2),
        TableColumn("paper", 2),
        TableColumn("difference ", 2, True),
        TableColumn("note"),
    )
    rows: list[tuple[Any, ...]] = []
    long: list[tuple[Any, ...]] = []
    for method, said in paper.MOTIVATION_RATIOS.items():
        even, skewed = (
            grid.get_runs(dataset, method, "iid", T),
            grid.get_runs(dataset, method, grid.regime, T),
        )
        ours, theirs = (
            get_values_by_seed(skewed, "accuracy", 100),
            get_values_by_seed(even, "accuracy", 100),
        )
        joules = SeedInterval.from_values(
            compute_seed_ratios(
                even, skewed, lambda run: run.summary["computation_efficiency"] or 0.0
            ).values()
        )
        traffic = SeedInterval.from_values(
            compute_seed_ratios(
                even, skewed, lambda run: run.summary["communication_efficiency"] or 0.0
            ).values()
        )
        gap = traffic.mean - said if traffic and grid.has_paper_scale else None
        seen = [
            SeedInterval.from_values(values.values()) or NOT_RUN_TEXT for values in (theirs, ours)
        ]
        note = grid.describe_row(dataset, method, min(len(ours), len(theirs)))
        rows.append(
            (method, *seen, paired_difference(ours, theirs), joules, traffic, said, gap, note)
        )
        for name, runs in (("iid", even), (grid.regime, skewed)):
            long += [(method, name, t, point) for t, point in mean_accuracy_curve(runs, T).items()]
    notes = (
        (
            f"Data set: {paper.get_dataset_label(dataset)}. IID: equal shares drawn at random from"
            " one pool."
        ),
    )
    return PaperTable(
        f"fig-motivation-{grid.regime}",
        format_title(grid, f"Motivation: {T} rounds, IID and not"),
        columns,
        tuple(rows),
        notes,
        (
            TableColumn("method"),
            TableColumn("data"),
            TableColumn("round"),
            TableColumn("accuracy %"),
        ),
        tuple(long),
    )


def build_rates_table(grid: FinishedRuns) -> PaperTable:
    """The search for a learning rate by the paper's rule, with FedAvg."""
    T = grid.request.scale.rounds
    columns = (
        TableColumn("data set"),
        TableColumn("lr"),
        *(TableColumn(f"round {t}") for t in list_milestone_rounds(T)),
        TableColumn("note"),
    )
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        points = {
            lr: mean_accuracy_curve(grid.get_runs_at_rate(dataset, lr), T)
            for lr in grid.request.list_search_rates(dataset)
        }
        best = choose_learning_rate({lr: found for lr, found in points.items() if found})
        for lr, found in points.items():
            said = ["chosen"] if lr == best else []
            said += (
                ["the paper's"]
                if dataset in paper.PAPER_SETTINGS and lr == get_paper_rate(dataset)
                else []
            )
            shown = [found.get(t, NOT_RUN_TEXT) for t in list_milestone_rounds(T)]
            rows.append(
                (paper.get_dataset_label(dataset), f"{lr:g}", *shown, ", ".join(said) or None)
            )
    notes = (
        (
            "The paper's rule: too large a rate is one with which all methods are accurate within"
            " the very first few rounds, too small a one needs many more than T. Read here as: the"
            f" most accurate after T rounds among those that have not reached {STILL_LEARNING:.0%}"
            f" of their final accuracy after {EARLY:.0%} of T; if all have, the most accurate."
        ),
    )
    return PaperTable(
        f"learning_rates-{grid.regime}",
        format_title(grid, "Search for learning rates"),
        columns,
        tuple(rows),
        notes,
    )


def choose_learning_rate(points: Mapping[float, Mapping[int, SeedInterval]]) -> float | None:
    """The rate that the rule picks, from each one's accuracy by round."""
    if not points:
        return None
    final = {lr: curve[max(curve)].mean for lr, curve in points.items()}
    early = {lr: _find_early_point(curve).mean for lr, curve in points.items()}
    slow = {lr for lr in points if early[lr] < STILL_LEARNING * final[lr]}
    return max(slow or points, key=lambda lr: (final[lr], -lr))


def _find_early_point(curve: Mapping[int, SeedInterval]) -> SeedInterval:
    """The last evaluation within the first tenth of the rounds."""
    limit = max(round(EARLY * max(curve)), min(curve))
    return curve[max(t for t in curve if t <= limit)]
