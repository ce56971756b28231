"""flrce advise mine.toml --joules 200000 --bytes 2e9"""

import json
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from flrce.cli.options import load_experiment, parse_on_option
from flrce.cli.targets import prepare_file, prepare_folder
from flrce.core.intervals import ConfidenceInterval
from flrce.errors import BadInput
from flrce.simulation.build import choose_device
from flrce.simulation.executors import get_remote_executor
from flrce.storage import metric_format
from flrce.storage.disk import BY_UMASK, write_atomically
from flrce_arena.advise import PLAIN_LABEL, Advice, SearchBudget
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
        found = search(asked, SearchBudget(joules, nbytes, seconds), Path(folder), told, send=send)
    if out is not None:
        write_atomically(out, found.experiment.to_toml().encode(), BY_UMASK)
    if as_json:
        answer = {key: value for key, value in asdict(found).items() if key != "experiment"}
        print(
            json.dumps(
                {
                    **answer,
                    "enough": found.is_fedavg_enough,
                    "experiment": found.experiment.to_toml(),
                },
                indent=1,
            )
        )
        return
    for line in describe_advice(found):
        print(line)
    print(f"flrce run {out}" if out else "\n" + found.experiment.to_toml())


def describe_advice(found: Advice) -> list[str]:
    """The advice in words."""
    rounds, spent = found.experiment.rounds, found.spent
    lines = [
        (
            f"Run {found.label}, {rounds} rounds: {metric_format.format_metric_name(found.metric)}"
            f" {_format_expected_metric(found.expected, found.metric)} ({found.expected.n} seeds,"
            " 95 % interval)."
        ),
        (
            f"Finding out took {spent['joules']:.3g} J, {spent['bytes'] / 1e6:.3g} MB and"
            f" {spent['seconds']:.3g} s of the fleet's; the rounds are what the rest of the budget"
            " pays for."
        ),
    ]
    if found.label.startswith(f"{PLAIN_LABEL},"):
        lines.append(
            "Plain FedAvg with an average is enough here: nothing that was tried does better."
        )
    elif found.is_fedavg_enough:
        lines.append(
            f"Plain FedAvg with an average has {_format_expected_metric(found.plain, found.metric)}"
            " for the same joules: it cannot be told apart, so take it if you prefer the simpler."
        )
    else:
        lines.append(
            f"Plain FedAvg with an average has {_format_expected_metric(found.plain, found.metric)}"
            " for the same joules."
        )
    return lines


def _format_expected_metric(value: ConfidenceInterval, metric: str) -> str:
    unit = " %" if metric in metric_format.SHARES else ""
    scaled = value.divide_by(metric_format.metric_unit(metric))
    return f"{scaled.format_interval(metric_format.metric_digits(metric))}{unit}"
