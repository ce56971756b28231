"""flrce whatif runs/a --psi 4,4.5,5 --preset frugal,accurate"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flrce.cli.terminal import format_bars, print_table
from flrce.core.cost_table import Cost
from flrce.core.intervals import confidence_interval
from flrce.core.metric_format import SHARES, format_metric_heading, format_metric_name
from flrce.core.roles import StopRule
from flrce.core.user_code import apply_trust, trust_file
from flrce.errors import BadInput
from flrce.methods.catalogue.recipes import resolve_conflict_threshold
from flrce.methods.stopping.marginal_gain import metric_scale
from flrce.report import tables
from flrce.report.carbon import shift_run_start
from flrce.report.cost_per_point import compute_point_prices, thin_prices
from flrce.report.named_rules import build_limits, build_named_pieces, list_recorded_figures
from flrce.report.tasks import require_one_task
from flrce.report.whatif import (
    ReplayOutcome,
    build_stop_rules,
    build_threshold_rules,
    list_caveats,
    replay_rule,
)
from flrce.storage import read

ValueList = str | None  # A,B,...
SHIFTED_START_CAVEAT = (
    "The same rounds, clients and joules: who would have been there at another time needs a new"
    " run."
)


def show_whatif(
    run: Path,
    start: ValueList,
    as_json: bool,
    stops: tuple[str, ...] = (),
    budget: str | None = None,
    trust: bool = False,
    **budgets: ValueList,
) -> None:
    """Replay stop rules on a recorded run: where each would have ended it, and the savings.

    Every value is a rule of its own; without any, the paper's thresholds psi. `budgets` are psi,
    patience, preset, points and limits of costs, by name. `stops` are rules by name, classes of the
    user's among them; `budget` has limits of costs and figures.
    """
    runs = read.read_runs([run])

    def parse_psi(part: str) -> float:
        return resolve_conflict_threshold(part if "%" in part else float(part), runs[0].P)

    parsers: dict[str, Callable[[str], Any]] = {"psi": parse_psi, "preset": str.strip}
    parsers |= {"patience": int, "rounds": int}
    wanted = {k: _parse_values(k, text, parsers.get(k, float)) for k, text in budgets.items()}
    with apply_trust(trust_file(None, trust)):
        named = build_named_pieces("stop", stops)
    figures = list_recorded_figures([h for each in runs for h in each.rounds])
    named |= build_limits(budget, figures)
    if len({each.name for each in runs}) > 1:
        raise BadInput(
            f"{run} holds several recipes; name the folder of one, such as {runs[0].folder.parent}"
        )
    with read.explain_damaged_runs(runs):
        require_one_task(runs, "name the folder of one")
        if start:
            _show_shifted_starts(runs, start.split(","), as_json)
        else:
            _show_replayed_rules(run, runs, wanted, named, as_json)


def _print_json(rows: Iterable[Mapping[str, Any]], notes: Sequence[str]) -> None:
    print(json.dumps({"runs": list(rows), "notes": list(notes)}, indent=1))


def _format_mean(values: Sequence[float], digits: int = 3) -> str:
    return confidence_interval(values).format_interval(digits)


def _show_shifted_starts(runs: list[read.RecordedRun], starts: list[str], as_json: bool) -> None:
    """Grams at other times."""
    emissions = {each: shift_run_start(each, starts) for each in runs}
    if as_json:
        rows = (
            {"run": str(r.folder), "starts": list(map(asdict, m))} for r, m in emissions.items()
        )
        return _print_json(rows, [SHIFTED_START_CAVEAT])
    lines = []
    for same in zip(*emissions.values(), strict=True):
        grams, ratios = [m.grams for m in same], [m.ratio for m in same]
        lines.append([same[0].start, _format_mean(grams), _format_mean(ratios, 2)])
    heads = ["start", "g CO2", "times what was booked"]
    print_table("the same rounds begun at another time", heads, lines)
    print(SHIFTED_START_CAVEAT)


def _show_replayed_rules(
    run: Path,
    runs: list[read.RecordedRun],
    wanted: dict[str, Any],
    named: Mapping[str, StopRule],
    as_json: bool,
) -> None:
    """Where each rule would have stopped the runs, and the savings."""
    outcomes = {}
    for each in runs:
        rules = {**build_stop_rules(each, **wanted), **named} or build_threshold_rules(each)
        outcomes[each] = [replay_rule(each, *rule) for rule in rules.items()]
    notes = dict.fromkeys(note for each in runs for note in list_caveats(each, outcomes[each]))
    if as_json:
        return _print_json(map(_describe_outcomes, runs, outcomes.values()), list(notes))
    title = f"{run}: {len(runs)} runs, 95 % intervals"
    if len(runs) == 1:
        title = f"{run}: {len(runs[0].committed_rounds)} rounds recorded"
    print_table(title, *_build_rule_table(runs, outcomes))
    for note in notes:
        print(note)
    if len(runs) == 1:
        _print_point_prices(runs[0])


def _describe_outcomes(run: read.RecordedRun, outcomes: Sequence[ReplayOutcome]) -> dict[str, Any]:
    """One run's rules and prices for a program."""
    return {
        "run": str(run.folder),
        "rules": [outcome.to_plain() for outcome in outcomes],
        "price": [asdict(price) for price in compute_point_prices(run)],
    }


def _build_rule_table(
    runs: list[read.RecordedRun], outcomes: Mapping[read.RecordedRun, Sequence[ReplayOutcome]]
) -> tuple[list[str], list[list[str]]]:
    """Headings and a row for each rule over the seeds."""
    groups = tables.group_runs(runs)
    units, metric = tables.choose_units(groups), tables.get_primary_metric(groups)
    # a rule that ends a run saves rounds and time by the stop itself
    costs = [cost for cost in tables.list_shown_costs(groups) if cost.by_client]
    names = _name_columns([(cost, units[cost.name][1]) for cost in costs])
    figures = list_figure_names(outcomes)
    heads = ["rule", "stops", "round", format_metric_heading(metric)]
    heads += [f"averaged{' %' if metric in SHARES else ''}", *names]
    heads += [*(f"{name} saved" for name in names), *figures]
    rows = [
        [*_format_rule_row(list(same), units, costs), *_format_figures(list(same), figures)]
        for same in zip(*outcomes.values(), strict=True)
    ]
    return heads, rows


def _name_columns(costs: Sequence[tuple[Cost, str]]) -> list[str]:
    """Each cost by its unit; by its name too where another cost has the same unit."""
    shown = Counter(unit for _, unit in costs)
    return [
        f"{cost.label}, {unit}"
        if unit and cost.optional and shown[unit] > 1
        else unit or cost.label
        for cost, unit in costs
    ]


def _print_point_prices(run: read.RecordedRun) -> None:
    """What a point would have cost, over the run."""
    prices = thin_prices(compute_point_prices(run))
    if not prices:
        return
    scale = metric_scale(run.committed_rounds)
    if scale.in_points:
        what = "one more point"
    else:
        what = f"improving {format_metric_name(scale.metric)} by {scale.format_amount(1.0)}"
    print(
        f"\nEstimated cost of {what} (as many rounds again, over the upper end of their predicted"
        " gain):"
    )
    labels, lengths = [f"round {p.t}" for p in prices], [p.joules for p in prices]
    print("\n".join(format_bars(labels, lengths, [p.describe() for p in prices])))


def list_figure_names(outcomes: Mapping[read.RecordedRun, Sequence[ReplayOutcome]]) -> list[str]:
    """The figures that pieces of these runs reported."""
    names = (name for same in outcomes.values() for outcome in same for name in outcome.figures)
    return list(dict.fromkeys(names))


def _format_figures(same: Sequence[ReplayOutcome], names: Sequence[str]) -> list[str]:
    """One rule over the seeds: the figures of pieces in the round that it ends with."""
    figures = [outcome.figures for outcome in same]
    return [_format_mean([each[name] for each in figures if name in each]) for name in names]


def _format_rule_row(
    same: list[ReplayOutcome], units: dict[str, tuple[float, str]], costs: Sequence[Cost]
) -> list[str]:
    """One rule over the seeds."""
    stops, many = [float(o.stop) for o in same if o.stop is not None], len(same) > 1
    said = "yes" if stops else "no"
    if many:
        said = f"{len(stops)} of {len(same)}"
    share = units["headline"][0]
    digits = 1 if share != 1 else 4
    cells = []
    for metrics in ([o.accuracy for o in same], [o.averaged for o in same]):
        values = [value / share for value in metrics if value is not None]
        cells.append(_format_mean(values, digits))
    for amounts in ([o.spent for o in same], [o.saved for o in same]):
        for cost in costs:
            values = [amount[cost.name] / units[cost.name][0] for amount in amounts]
            cells.append(_format_mean(values, cost.digits))
    return [same[0].rule, said, _format_mean(stops, 1 if many else 0), *cells]


def _parse_values(name: str, text: str | None, kind: Callable[[str], Any]) -> list[Any]:
    """A,B,... as numbers."""
    try:
        return [kind(part) for part in text.split(",")] if text else []
    except BadInput:
        raise
    except ValueError:
        word = "whole numbers" if kind is int else "numbers"
        raise BadInput(
            f"--{name} {text!r}: give {word} with commas, such as --{name} 5,10"
        ) from None
