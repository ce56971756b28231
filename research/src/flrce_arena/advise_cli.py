"""flrce advise mine.toml --joules 200000 --bytes 2e9"""

import json
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import tomli_w

from flrce.cli.options import load_experiment, parse_on_option
from flrce.cli.targets import prepare_file, prepare_folder
from flrce.config.experiment import Experiment
from flrce.core import metric_format
from flrce.core.intervals import ConfidenceInterval
from flrce.errors import BadInput
from flrce.simulation.build import choose_device
from flrce.simulation.executors import get_remote_executor
from flrce.storage.disk import BY_UMASK, write_atomically
from flrce_arena.advise import Advice, SearchBudget, TrialSummary
from flrce_arena.advise import advise_recipe as search


def show_advice(
    file: Path | None,
    overrides: tuple[str, ...],
    out: Path | None,
    joules: float | None,
    nbytes: float | None,
    seconds: float | None,
    work: Path | None,
    device: str | None,
    where: str,
    as_json: bool,
    trust: bool = False,
) -> None:
    """Say which recipe to run for an experiment and a budget."""
    asked = load_experiment(file, overrides, device, trust)
    budget = SearchBudget(joules, nbytes, seconds)
    if where == "here":
        choose_device(asked)
    if out is not None and out.is_file():
        raise BadInput(f"--out {out} exists; name a file that does not")
    if out is not None:
        prepare_file(out, "--out")
    told = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
    send = None if where == "here" else get_remote_executor(*parse_on_option(where))
    near = None if send is None else Path.cwd()  # where other machines see it too
    if work is not None:
        prepare_folder(work, "--work")
    with (
        tempfile.TemporaryDirectory(prefix="flrce-advise-", dir=near)
        if work is None
        else nullcontext(work)
    ) as folder:
        found = search(asked, budget, Path(folder), told, send=send)
    toml = format_experiment(found.experiment)
    if out is not None:
        write_atomically(out, toml.encode(), BY_UMASK)
    if as_json:
        answer = {key: value for key, value in asdict(found).items() if key != "experiment"}
        print(
            json.dumps({**answer, "enough": found.is_fedavg_enough, "experiment": toml}, indent=1)
        )
        return
    for line in describe_advice(found, budget.limits):
        print(line)
    print(f"flrce run {out}" if out else "\n" + toml)


def describe_advice(found: Advice, limits: Mapping[str, float]) -> list[str]:
    """The advice in words."""
    metric = metric_format.format_metric_name(found.metric)
    return [
        f"Run {found.label}, {found.experiment.rounds} rounds: {metric}"
        f" {_format_expected_metric(found.expected, found.metric)} ({found.expected.n} further"
        " seeds, 95 % interval).",
        _describe_plain(found),
        _describe_cost(found, limits),
        f"Tried: {'; '.join(_describe_trial(trial, found.metric) for trial in found.tried)}.",
        _describe_untried(found),
    ]


def _describe_plain(found: Advice) -> str:
    if found.is_plain and len(found.tried) == 1:
        return (
            "That is plain FedAvg with an average at your own rate: the budget is too small to try"
            " anything else. Give more joules to compare methods and rates."
        )
    if found.is_plain:
        return (
            "That is plain FedAvg with an average at your own rate: nothing that was tried did"
            " better."
        )
    plain = _format_expected_metric(found.plain, found.metric)
    unit = metric_format.metric_unit(found.metric)
    digits = metric_format.metric_digits(found.metric)
    gap = found.gain.divide_by(unit).format_interval(digits)
    line = (
        f"{found.plain_label} (your own rate) reaches {plain} for the same joules; the difference"
        f" is {gap}"
    )
    if found.is_fedavg_better:
        return f"{line}. FedAvg + average is better: run it instead, at your own rate."
    if found.is_fedavg_enough:
        return f"{line}. The two cannot be told apart: FedAvg + average is as good."
    return f"{line}. FedAvg + average is not as good."


def _describe_cost(found: Advice, limits: Mapping[str, float]) -> str:
    units = {"joules": (1.0, "J"), "bytes": (1e6, "MB"), "seconds": (1.0, "s")}
    spent = [f"{found.spent[axis] / size:.3g} {unit}" for axis, (size, unit) in units.items()]
    shares = [
        f"{100 * found.spent[axis] / limit:.0f} % of the {axis}" for axis, limit in limits.items()
    ]
    share = f" ({', '.join(shares)})" if shares else ""
    return (
        f"The search cost {', '.join(spent)}{share}. The advised rounds are what the rest pays"
        " for. The further seeds are simulated for the interval and not counted."
    )


def _describe_trial(trial: TrialSummary, metric: str) -> str:
    if trial.score is None:
        return f"{trial.label}: no model after {trial.rounds} rounds"
    value = trial.score / metric_format.metric_unit(metric)
    unit = " %" if metric in metric_format.SHARES else ""
    price = f", {trial.joules / value:.3g} J a point" if unit and value > 0 and trial.joules else ""
    return (
        f"{trial.label}: {value:.{metric_format.metric_digits(metric)}f}{unit} after"
        f" {trial.rounds} rounds{price}"
    )


def _describe_untried(found: Advice) -> str:
    rate = f"{found.experiment.train.lr:g}"
    lines = []
    if found.untried:
        lines.append(f"Not tried: {', '.join(found.untried)}, and every other recipe.")
    else:
        lines.append("Not tried: every other recipe.")
    if found.edge:
        way = "higher" if found.edge == "highest" else "lower"
        lines.append(
            f"{rate} is the {found.edge} rate that was tried with {found.method}; a {way} one may"
            " be better."
        )
    return " ".join(lines)


def format_experiment(experiment: Experiment) -> str:
    """The experiment as TOML; without the default data set's name where a path replaces it."""
    tables = experiment.model_dump(exclude_none=True)
    if "path" in tables["data"]:
        del tables["data"]["name"]
    return tomli_w.dumps(tables)


def _format_expected_metric(value: ConfidenceInterval, metric: str) -> str:
    unit = " %" if metric in metric_format.SHARES else ""
    scaled = value.divide_by(metric_format.metric_unit(metric))
    return f"{scaled.format_interval(metric_format.metric_digits(metric))}{unit}"
