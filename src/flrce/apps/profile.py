"""flrce profile --out my.toml: measure this machine, so that a fleet can be made of it"""

import platform
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import date
from importlib import resources
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import tomli_w
import torch

from flrce.apps.show import table
from flrce.apps.targets import prepare_file
from flrce.apps.trial import Trial, by_name, of
from flrce.errors import BadInput, nearest
from flrce.fleet.costs import Profile
from flrce.fleet.energy import Meter
from flrce.models.nets import CNNS
from flrce.store.disk import BY_UMASK, write_through

LASTS = 0.15  # seconds that one timing takes at least
RADIO = ("up_bits", "down_bits", "up_joules", "down_joules")  # a link has two ends: not measured here
TRIES = 4  # at a fit: other work may drown the timings
REPEATS = 3  # of each timing; the fastest counts, the others were disturbed

Point = tuple[float, float]  # FLOPs and seconds of a batch
Figures = dict[str, dict[str, Any]]  # figure -> value, source


def profile(
    out: Path | None, model: tuple[str, ...], experiment: Path | None, overrides: tuple[str, ...], watts: float | None,
    idle_watts: float | None, seconds: float, as_json: bool, trust: bool = False,
) -> None:  # fmt: skip
    """Measure how fast this machine trains and, where it can tell, what it draws."""
    for name in model:
        if name not in CNNS:
            raise BadInput(f"--model {name!r}: {nearest(name, CNNS)}; --for trains an experiment's own network")
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
    trials = [by_name(name) for name in model or CNNS] if experiment is None else [of(experiment, overrides, trust)]
    fixed, flops = measured_speed(trials)
    figures = speed(fixed, flops, trials) | power(watts, idle_watts, trials[-1], seconds)
    figures |= shipped("laptop-cpu", RADIO) | {"error": error(trials, fixed, flops)}
    figures = {f.name: figures[f.name] for f in fields(Profile)[1:]}
    if out is not None:
        write_through(out, tomli_w.dumps(figures).encode(), BY_UMASK)
    rows = [[name, f"{figure['value']:.4g}", figure["source"]] for name, figure in figures.items()]
    table("this machine", ("figure", "value", "source"), rows, as_json)
    if out is not None and not as_json:
        print(f'use it with: fleet.profile = "{out}"')


def timings(trial: Trial, sizes: Sequence[int]) -> list[Point]:
    """How long one training step takes on batches of several sizes."""
    return [(size * trial.flops, min(timed(trial.stepper(size), LASTS) for _ in range(REPEATS))) for size in sizes]


def timed(step: Callable[[], int], lasts: float) -> float:
    """Seconds of one step, over at least `lasts` seconds."""
    step()
    began, count = perf_counter(), 0
    while perf_counter() - began < lasts:
        count += step()
    return (perf_counter() - began) / count


def measured_speed(trials: Sequence[Trial]) -> tuple[float, float]:
    """Seconds a batch and FLOP/s of this machine; measured anew where other work drowned the timings."""
    for _ in range(TRIES - 1):
        try:
            return fit([point for trial in trials for point in timings(trial, trial.sizes)])
        except BadInput:
            continue
    return fit([point for trial in trials for point in timings(trial, trial.sizes)])


def error(trials: Sequence[Trial], fixed: float, flops: float) -> dict[str, Any]:
    """The profile's error: the largest of predictions against timings that were not fitted.

    Batches of other sizes by the fit of all networks; and, of several networks, each by the fit of the others.
    """
    found = [off(fixed, flops, point) for trial in trials for point in timings(trial, trial.others)]
    what = f"{len(trials)} networks" if len(trials) > 1 else trials[0].name
    tried = f"{what}, batches of {', '.join(map(str, trials[0].others))}"
    if len(trials) > 1:
        points = {trial.name: timings(trial, trial.sizes) for trial in trials}
        for name in points:
            with suppress(BadInput):  # the others' timings may not grow with the work
                other = fit([point for each in points if each != name for point in points[each]])
                found += [off(*other, point) for point in points[name]]
        tried += "; and each network by the fit of the others"
    source = f"the largest of {len(found)} timings that were not fitted: {tried}; {date.today()}"
    return {"value": round(max(found), 3), "source": source}


def off(fixed: float, flops: float, point: Point) -> float:
    """By how much more than 1 the larger of predicted and measured is the other's multiple."""
    work, seconds = point
    ratio = (fixed + work / flops) / seconds
    return max(ratio, 1 / ratio) - 1


def fit(points: Sequence[Point]) -> tuple[float, float]:
    """(a, R) of seconds = a + FLOPs / R by least squares, each point weighed by 1 / seconds: small batches count."""
    F, seconds = np.array(points).T
    A = np.stack([np.ones_like(F), F / F.max()], 1) / seconds[:, None]
    (a, b), *_ = np.linalg.lstsq(A, np.ones_like(F), rcond=None)
    if b <= 0:
        raise BadInput("the timings do not grow with the work; measure again while nothing else runs")
    if a < 0:  # a fixed cost lost in the noise: fit the rate alone
        a, b = 0.0, A[:, 1].sum() / (A[:, 1] ** 2).sum()
    return float(a), float(F.max() / b)


def speed(fixed: float, flops: float, trials: Sequence[Trial]) -> Figures:
    how = (
        f"measured by flrce profile on {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads,"
    )
    how = f"{how} torch {torch.__version__}, training {', '.join(trial.name for trial in trials)}; {date.today()}"
    return {"batch_seconds": {"value": fixed, "source": how}, "flops": {"value": flops, "source": how}}


def power(watts: float | None, idle: float | None, trial: Trial, seconds: float) -> Figures:
    """Busy and idle power: as told, else as the machine's counters say, else a laptop's."""
    found = shipped("laptop-cpu", ("active_watts", "idle_watts"))
    for figure in found.values():
        figure["source"] = f"not measured here, taken from laptop-cpu: {figure['source']}"
    meter = Meter()
    if meter.why:
        print(f"{meter.why}; give --watts and --idle-watts, or a laptop's are taken", file=sys.stderr)
    else:
        step, how = trial.stepper(trial.usual), f"measured by zeus ({', '.join(meter.seen)}); {date.today()}"
        work: dict[str, Callable[[], Any]] = {
            "idle_watts": lambda: sleep(seconds), "active_watts": lambda: timed(step, seconds),
        }  # fmt: skip
        found = {key: {"value": meter.measure(do)[1].watts, "source": how} for key, do in work.items()}
    for key, told in (("active_watts", watts), ("idle_watts", idle)):
        if told is not None:
            found[key] = {"value": told, "source": f"told to flrce profile; {date.today()}"}
    return found


def shipped(name: str, keys: Sequence[str]) -> Figures:
    """Figures of a shipped profile, with their sources."""
    text = (resources.files("flrce") / "fleet" / "profiles" / f"{name}.toml").read_text()
    return {key: dict(figure) for key, figure in tomllib.loads(text).items() if key in keys}
