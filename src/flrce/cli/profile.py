"""flrce profile --out my.toml: measure this machine, so that a fleet can be made of it"""

import platform
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from importlib import resources
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import tomli_w
import torch

from flrce.cli.profile_trial import SpeedTrial, build_experiment_trial, build_named_trial
from flrce.cli.targets import prepare_file
from flrce.cli.terminal import print_table
from flrce.devices.costs import FIGURES
from flrce.devices.energy import EnergyMeter
from flrce.errors import BadInput, suggest_name
from flrce.models.nets import PAPER_CNNS
from flrce.storage.disk import BY_UMASK, write_atomically

MIN_TIMING_SECONDS = 0.15  # seconds that one timing takes at least
# a link has two ends: not measured here
RADIO_KEYS = ("up_bits", "down_bits", "up_joules", "down_joules")
MAX_FIT_TRIES = 4  # at a fit: other work may drown the timings
TIMING_REPEATS = 3  # of each timing; the fastest counts, the others were disturbed

TimedBatch = tuple[float, float]  # FLOPs and seconds of a batch
ProfileFigures = dict[str, dict[str, Any]]  # figure -> value, source


def profile_machine(
    out: Path | None,
    model: tuple[str, ...],
    experiment: Path | None,
    overrides: tuple[str, ...],
    watts: float | None,
    idle_watts: float | None,
    seconds: float,
    as_json: bool,
    trust: bool = False,
) -> None:
    """Measure how fast this machine trains and, where it can tell, what it draws."""
    for name in model:
        if name not in PAPER_CNNS:
            raise BadInput(
                f"--model {name!r}: {suggest_name(name, PAPER_CNNS)}; --for trains an experiment's"
                " own network"
            )
    if experiment is not None and model:
        raise BadInput("--for names an experiment's network, --model others; give one of the two")
    if overrides and experiment is None:
        raise BadInput("--set changes an experiment; name it with --for FILE")
    for option, value in (("--watts", watts), ("--idle-watts", idle_watts), ("--seconds", seconds)):
        if value is not None and not 0 < value < 1e6:
            raise BadInput(f"{option} {value:g}: must be above 0")
    if out is not None and out.suffix != ".toml":
        raise BadInput(f"--out {out}: a profile's name ends in .toml")
    if out is not None:
        prepare_file(out, "--out")
    trials = (
        [build_named_trial(name) for name in model or PAPER_CNNS]
        if experiment is None
        else [build_experiment_trial(experiment, overrides, trust)]
    )
    fixed, flops = measure_speed(trials)
    figures = build_speed_figures(fixed, flops, trials) | measure_power(
        watts, idle_watts, trials[-1], seconds
    )
    figures |= read_shipped_figures("laptop-cpu", RADIO_KEYS) | {
        "error": estimate_profile_error(trials, fixed, flops)
    }
    figures = {name: figures[name] for name in FIGURES if name in figures}
    if out is not None:
        write_atomically(out, tomli_w.dumps(figures).encode(), BY_UMASK)
    rows = [[name, f"{figure['value']:.4g}", figure["source"]] for name, figure in figures.items()]
    print_table("this machine", ("figure", "value", "source"), rows, as_json)
    if out is not None and not as_json:
        print(f'use it with: fleet.profile = "{out}"')


def time_batches(trial: SpeedTrial, sizes: Sequence[int]) -> list[TimedBatch]:
    """How long one training step takes on batches of several sizes."""
    return [
        (
            size * trial.flops,
            min(time_step(trial.stepper(size), MIN_TIMING_SECONDS) for _ in range(TIMING_REPEATS)),
        )
        for size in sizes
    ]


def time_step(step: Callable[[], int], lasts: float) -> float:
    """Seconds of one step, over at least `lasts` seconds."""
    step()
    began, count = perf_counter(), 0
    while perf_counter() - began < lasts:
        count += step()
    return (perf_counter() - began) / count


def measure_speed(trials: Sequence[SpeedTrial]) -> tuple[float, float]:
    """Seconds a batch and FLOP/s of this machine; measured anew where other work drowned the
    timings.
    """
    for _ in range(MAX_FIT_TRIES - 1):
        try:
            return fit_speed(
                [point for trial in trials for point in time_batches(trial, trial.sizes)]
            )
        except BadInput:
            continue
    return fit_speed([point for trial in trials for point in time_batches(trial, trial.sizes)])


def estimate_profile_error(
    trials: Sequence[SpeedTrial], fixed: float, flops: float
) -> dict[str, Any]:
    """The profile's error: the largest of predictions against timings that were not fitted.

    Batches of other sizes by the fit of all networks; and, of several networks, each by the fit of
    the others.
    """
    found = [
        prediction_error(fixed, flops, point)
        for trial in trials
        for point in time_batches(trial, trial.others)
    ]
    what = f"{len(trials)} networks" if len(trials) > 1 else trials[0].name
    tried = f"{what}, batches of {', '.join(map(str, trials[0].others))}"
    if len(trials) > 1:
        points = {trial.name: time_batches(trial, trial.sizes) for trial in trials}
        for name in points:
            with suppress(BadInput):  # the others' timings may not grow with the work
                other = fit_speed(
                    [point for each in points if each != name for point in points[each]]
                )
                found += [prediction_error(*other, point) for point in points[name]]
        tried += "; and each network by the fit of the others"
    source = f"the largest of {len(found)} timings that were not fitted: {tried}; {date.today()}"
    return {"value": round(max(found), 3), "source": source}


def prediction_error(fixed: float, flops: float, point: TimedBatch) -> float:
    """By how much more than 1 the larger of predicted and measured is the other's multiple."""
    work, seconds = point
    ratio = (fixed + work / flops) / seconds
    return max(ratio, 1 / ratio) - 1


def fit_speed(points: Sequence[TimedBatch]) -> tuple[float, float]:
    """(a, R) of seconds = a + FLOPs / R by least squares, each point weighed by 1 / seconds: small
    batches count.
    """
    F, seconds = np.array(points).T
    A = np.stack([np.ones_like(F), F / F.max()], 1) / seconds[:, None]
    (a, b), *_ = np.linalg.lstsq(A, np.ones_like(F), rcond=None)
    if b <= 0:
        raise BadInput(
            "the timings do not grow with the work; measure again while nothing else runs"
        )
    if a < 0:  # a fixed cost lost in the noise: fit the rate alone
        a, b = 0.0, A[:, 1].sum() / (A[:, 1] ** 2).sum()
    return float(a), float(F.max() / b)


def build_speed_figures(fixed: float, flops: float, trials: Sequence[SpeedTrial]) -> ProfileFigures:
    how = (
        f"measured by flrce profile on {platform.processor() or platform.machine()},"
        f" {torch.get_num_threads()} threads,"
    )
    how = (
        f"{how} torch {torch.__version__}, training {', '.join(trial.name for trial in trials)};"
        f" {date.today()}"
    )
    return {
        "batch_seconds": {"value": fixed, "source": how},
        "flops": {"value": flops, "source": how},
    }


def measure_power(
    watts: float | None, idle: float | None, trial: SpeedTrial, seconds: float
) -> ProfileFigures:
    """Busy and idle power: as told, else as the machine's counters say, else a laptop's."""
    found = read_shipped_figures("laptop-cpu", ("active_watts", "idle_watts"))
    for figure in found.values():
        figure["source"] = f"not measured here, taken from laptop-cpu: {figure['source']}"
    meter = EnergyMeter()
    if meter.why:
        print(
            f"{meter.why}; give --watts and --idle-watts, or a laptop's are taken", file=sys.stderr
        )
    else:
        step, how = (
            trial.stepper(trial.usual),
            f"measured by zeus ({', '.join(meter.seen)}); {date.today()}",
        )
        work: dict[str, Callable[[], Any]] = {
            "idle_watts": lambda: sleep(seconds),
            "active_watts": lambda: time_step(step, seconds),
        }
        found = {
            key: {"value": meter.measure(do)[1].watts, "source": how} for key, do in work.items()
        }
    for key, told in (("active_watts", watts), ("idle_watts", idle)):
        if told is not None:
            found[key] = {"value": told, "source": f"told to flrce profile; {date.today()}"}
    return found


def read_shipped_figures(name: str, keys: Sequence[str]) -> ProfileFigures:
    """Figures of a shipped profile, with their sources."""
    text = (resources.files("flrce") / "devices" / "profiles" / f"{name}.toml").read_text()
    return {key: dict(figure) for key, figure in tomllib.loads(text).items() if key in keys}
