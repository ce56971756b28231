"""Accuracy round by round: the paper's figure of accuracy, its motivation, and the search for
learning rates.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flrce_reproduction import paper
from flrce_reproduction.grid import FinishedRuns, compute_mean_ratio, get_values_by_seed
from flrce_reproduction.plan import SHOWN_METHODS, get_paper_rate
from flrce_reproduction.records import PaperRun
from flrce_reproduction.tables import (
    NOT_RUN_TEXT,
    PaperTable,
    SeedInterval,
    paired_difference,
    parse_columns,
)

#: a rate is too large if this share of T reaches that share of the final accuracy
EARLY, STILL_LEARNING = 0.1, 0.9


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
    rows: list[tuple[Any, ...]] = []
    long: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        label = paper.get_dataset_label(dataset)
        for method in SHOWN_METHODS:
            points = mean_accuracy_curve(grid.get_runs(dataset, method), T)
            rows.append(
                (label, method, *_list_milestones(points, T), grid.describe_row(dataset, method))
            )
            long += [(dataset, method, t, point) for t, point in points.items()]
    note = (
        "Accuracy in %, mean over the clients' hold-outs. A stopped run keeps the accuracy it"
        " stopped with. The paper's figure gives no numbers."
    )
    columns = f"data set|method|{_name_milestones(T)}|note"
    table = grid.make_table("fig-accuracy", "Accuracy per round", columns, rows, note)
    by_round = parse_columns("data set|method|round|accuracy %")
    return replace(table, long=by_round, long_rows=tuple(long))


def _name_milestones(T: int) -> str:
    return "|".join(f"round {t}" for t in list_milestone_rounds(T))


def _list_milestones(points: Mapping[int, SeedInterval], T: int) -> list[Any]:
    return [points.get(t, NOT_RUN_TEXT) for t in list_milestone_rounds(T)]


def build_motivation_table(grid: FinishedRuns) -> PaperTable:
    """IID against non-IID (section 2): accuracy after a few rounds, and resources per accuracy."""
    dataset, T = grid.request.motivation_dataset, grid.request.scale.motivation
    rows: list[tuple[Any, ...]] = []
    long: list[tuple[Any, ...]] = []
    for method, said in paper.MOTIVATION_RATIOS.items():
        even, skewed = (grid.get_runs(dataset, method, name, T) for name in ("iid", grid.regime))
        theirs, ours = (get_values_by_seed(runs, "accuracy", 100) for runs in (even, skewed))
        joules, traffic = (
            compute_mean_ratio(even, skewed, name)
            for name in ("computation_efficiency", "communication_efficiency")
        )
        gap = traffic.mean - said if traffic and grid.has_paper_scale else None
        seen = [SeedInterval.from_values(x.values()) or NOT_RUN_TEXT for x in (theirs, ours)]
        note = grid.describe_row(dataset, method, min(len(ours), len(theirs)))
        difference = paired_difference(ours, theirs)
        rows.append((method, *seen, difference, joules, traffic, said, gap, note))
        for name, runs in (("iid", even), (grid.regime, skewed)):
            long += [(method, name, t, point) for t, point in mean_accuracy_curve(runs, T).items()]
    columns = (
        f"method|IID % at round {T}:2|non-IID %:2|difference:+2"
        "|joules per accuracy, non-IID / IID:2|bytes per accuracy, non-IID / IID:2|paper:2"
        "|difference :+2|note"
    )
    subject = f"Motivation: {T} rounds, IID and not"
    note = (
        f"Data set: {paper.get_dataset_label(dataset)}. IID: equal shares drawn at random from one"
        " pool."
    )
    table = grid.make_table("fig-motivation", subject, columns, rows, note)
    by_round = parse_columns("method|data|round|accuracy %")
    return replace(table, long=by_round, long_rows=tuple(long))


def build_rates_table(grid: FinishedRuns) -> PaperTable:
    """The search for a learning rate by the paper's rule, with FedAvg."""
    T = grid.request.scale.rounds
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        curves = {
            lr: mean_accuracy_curve(grid.get_runs_at_rate(dataset, lr), T)
            for lr in grid.request.list_search_rates(dataset)
        }
        best = choose_learning_rate({lr: points for lr, points in curves.items() if points})
        for lr, points in curves.items():
            said = ["chosen"] if lr == best else []
            if dataset in paper.PAPER_SETTINGS and lr == get_paper_rate(dataset):
                said.append("the paper's")
            row = (f"{lr:g}", *_list_milestones(points, T), ", ".join(said) or None)
            rows.append((paper.get_dataset_label(dataset), *row))
    return grid.make_table(
        "learning_rates",
        "Search for learning rates",
        f"data set|lr|{_name_milestones(T)}|note",
        rows,
        "The paper's rule: too large a rate is one with which all methods are accurate within the"
        " very first few rounds, too small a one needs many more than T. Read here as: the most"
        f" accurate after T rounds among those that have not reached {STILL_LEARNING:.0%} of their"
        f" final accuracy after {EARLY:.0%} of T; if all have, the most accurate.",
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
