"""flrce profile --out my.toml: measure this machine, so that a fleet can be made of it"""

import platform
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import resources
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import tomli_w
import torch
from scipy.optimize import nnls

from flrce.cli.profile_trial import SpeedTrial, build_experiment_trial, build_named_trial
from flrce.cli.targets import prepare_file
from flrce.cli.terminal import print_table
from flrce.devices.costs import FIGURES
from flrce.devices.energy import EnergyMeter
from flrce.errors import BadInput, format_one_line, suggest_name
from flrce.models.nets import PAPER_CNNS
from flrce.storage.disk import BY_UMASK, write_atomically
from flrce_client.meter import open_meter

MIN_TIMING_SECONDS = 0.15  # seconds that one timing takes at least
# a link has two ends: not measured here
RADIO_KEYS = ("up_bits", "down_bits", "up_joules", "down_joules")
MAX_FIT_TRIES = 3  # at a fit, and at power: other work may drown them
MAX_WATTS_RATIO = 2.0  # between two measurements of one power
POOR_ERROR = 1.0  # a fit that is off by more than a factor of 2 is measured anew
MAX_PROFILE_ERROR = 9.0  # a profile that is off by more than a factor of 10 misleads
TIMING_REPEATS = 3  # of each timing; the fastest counts, the others were disturbed

#: quantities whose seconds add up to a step's: what a profile can state
FITTED_FORMS = (("batches", "flops"), ("operations", "moved_bytes", "flops"))
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
    meter: str | None = None,
) -> None:
    """Measure how fast this machine trains and, where it can tell, what it draws."""
    _validate_networks(model, experiment, overrides)
    _validate_numbers({"--watts": watts, "--idle-watts": idle_watts, "--seconds": seconds})
    if out is not None and out.suffix != ".toml":
        raise BadInput(f"--out {out}: a profile's name ends in .toml")
    if out is not None:
        prepare_file(out, "--out")
    if experiment is None:
        trials = [build_named_trial(name) for name in model or PAPER_CNNS]
    else:
        trials = [build_experiment_trial(experiment, overrides, trust)]
    fit, errors, timings = measure_speed(trials)
    figures = build_speed_figures(fit, trials, timings)
    figures |= measure_power(watts, idle_watts, trials[-1], seconds, meter)
    figures |= read_shipped_figures("laptop-cpu", RADIO_KEYS)
    figures["error"] = build_error_figure(trials, fit, errors, timings)
    print_errors(errors, figures["error"]["value"])
    figures = {name: figures[name] for name in FIGURES if name in figures}
    if out is not None:
        write_atomically(out, tomli_w.dumps(figures).encode(), BY_UMASK)
    rows = [[name, f"{figure['value']:.4g}", figure["source"]] for name, figure in figures.items()]
    print_table("this machine", ("figure", "value", "source"), rows, as_json)
    if out is not None and not as_json:
        print(f'use it with: fleet.profile = "{out}"')


def _validate_networks(
    model: Sequence[str], experiment: Path | None, overrides: Sequence[str]
) -> None:
    """BadInput unless the options name networks to train in one way."""
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


def _validate_numbers(values: Mapping[str, float | None]) -> None:
    for option, value in values.items():
        if value is not None and not 0 < value < 1e6:
            raise BadInput(f"{option} {value:g}: must be above 0")


@dataclass(frozen=True)
class StepTiming:
    """How long a training step of a network took, and what it does."""

    network: str
    size: int  # samples
    fitted: bool  # or kept to try the fit on
    work: Mapping[str, float]  # quantity of FITTED_FORMS -> amount
    seconds: float


@dataclass(frozen=True)
class SpeedFit:
    """Seconds of a step as a sum over quantities of its work."""

    seconds_each: Mapping[str, float]  # quantity -> seconds of one

    def predict(self, work: Mapping[str, float]) -> float:
        return sum(each * work[name] for name, each in self.seconds_each.items())

    def compute_error(self, timing: StepTiming) -> float:
        """By how much more than 1 the larger of predicted and measured is the other's multiple."""
        ratio = max(self.predict(timing.work), 1e-12) / timing.seconds
        return max(ratio, 1 / ratio) - 1


def time_steps(trials: Sequence[SpeedTrial]) -> list[StepTiming]:
    """How long one training step takes, of every network and size."""
    timings = []
    for trial in trials:
        operations, batch, sample = trial.traffic or (0.0, 0.0, 0.0)
        for size in (*trial.sizes, *trial.others):
            work = {"batches": 1.0, "operations": operations, "flops": size * trial.flops}
            work["moved_bytes"] = batch + size * sample
            step, fitted = trial.stepper(size), size in trial.sizes
            seconds = min(time_step(step, MIN_TIMING_SECONDS) for _ in range(TIMING_REPEATS))
            timings.append(StepTiming(trial.name, size, fitted, work, seconds))
    return timings


def time_step(step: Callable[[], int], lasts: float) -> float:
    """Seconds of one step, over at least `lasts` seconds."""
    step()
    began, count = perf_counter(), 0
    while perf_counter() - began < lasts:
        count += step()
    return (perf_counter() - began) / count


def fit_timings(timings: Sequence[StepTiming], form: Sequence[str]) -> SpeedFit:
    """Non-negative least squares; each timing is weighed by 1 / seconds."""
    seconds = np.array([timing.seconds for timing in timings])
    X = np.array([[timing.work[name] for name in form] for timing in timings]) / seconds[:, None]
    scale = np.where(X.max(0) > 0, X.max(0), 1.0)
    solution, _ = nnls(X / scale, np.ones(len(seconds)))
    return SpeedFit(dict(zip(form, (solution / scale).tolist(), strict=True)))


def compute_held_out_errors(timings: Sequence[StepTiming], form: Sequence[str]) -> dict[str, float]:
    """Network -> the largest error of its timings as predicted by a fit of the others."""
    names = dict.fromkeys(timing.network for timing in timings)
    if len(names) < 2:
        return {}
    errors = {}
    for name in names:
        fit = fit_timings([timing for timing in timings if timing.network != name], form)
        errors[name] = max(fit.compute_error(t) for t in timings if t.network == name)
    return errors


def choose_form(timings: Sequence[StepTiming]) -> Sequence[str]:
    """The form that predicts left-out networks best; of few networks, the simplest."""
    networks = {timing.network for timing in timings}
    if len(networks) < 3 or not all(timing.work["operations"] for timing in timings):
        return FITTED_FORMS[0]
    return min(FITTED_FORMS, key=lambda f: median(compute_held_out_errors(timings, f).values()))


def measure_speed(
    trials: Sequence[SpeedTrial],
) -> tuple[SpeedFit, dict[str, float], list[StepTiming]]:
    """The fit, each network's error by a fit of the others, and the timings."""
    tries = []
    for _ in range(MAX_FIT_TRIES):
        timings = time_steps(trials)
        form = choose_form(timings)
        fit = fit_timings([timing for timing in timings if timing.fitted], form)
        errors = compute_held_out_errors(timings, form)
        tries.append((find_largest_error(fit, errors, timings), fit, errors, timings))
        if tries[-1][0] <= POOR_ERROR and fit.seconds_each["flops"]:
            break
    error, fit, errors, timings = min(tries, key=lambda each: each[0])
    if error > MAX_PROFILE_ERROR:
        raise BadInput(
            f"the fit is off by a factor of {1 + error:.3g} on steps that it has not seen, so no"
            " profile is written; measure while nothing else runs, or profile the network that"
            " you train: --for EXPERIMENT"
        )
    return fit, errors, timings


def find_largest_error(
    fit: SpeedFit, errors: Mapping[str, float], timings: Sequence[StepTiming]
) -> float:
    """Of networks and of batch sizes that were not fitted."""
    sizes = [fit.compute_error(timing) for timing in timings if not timing.fitted]
    return max([*errors.values(), *sizes])


def build_error_figure(
    trials: Sequence[SpeedTrial],
    fit: SpeedFit,
    errors: Mapping[str, float],
    timings: Sequence[StepTiming],
) -> dict[str, Any]:
    """The profile's error: the largest of predictions against timings that were not fitted."""
    what = f"{len(trials)} networks" if len(trials) > 1 else trials[0].name
    tried = f"{what}, batches of {', '.join(map(str, trials[0].others))}"
    count = len(timings) if errors else sum(not timing.fitted for timing in timings)
    tried += "; and each network by the fit of the others" if errors else ""
    source = f"the largest of {count} timings that were not fitted: {tried}; {date.today()}"
    return {"value": round(find_largest_error(fit, errors, timings), 3), "source": source}


def print_errors(errors: Mapping[str, float], error: float) -> None:
    """How far off the fit is, network by network."""
    for name, value in errors.items():
        print(f"{name}: off by up to {value:.0%} by a fit of the other networks", file=sys.stderr)
    if error > POOR_ERROR:
        print(
            f"the fit is poor: steps that it has not seen are off by a factor of {1 + error:.2g};"
            " --for EXPERIMENT profiles the network that you train",
            file=sys.stderr,
        )


def build_speed_figures(
    fit: SpeedFit, trials: Sequence[SpeedTrial], timings: Sequence[StepTiming]
) -> ProfileFigures:
    machine = platform.processor() or platform.machine()
    how = (
        f"measured by flrce profile on {machine}, {torch.get_num_threads()} threads, torch"
        f" {torch.__version__}, training {', '.join(trial.name for trial in trials)};"
        f" {date.today()}"
    )
    each = fit.seconds_each
    # a rate lost in the noise: FLOPs then take a thousandth of the time at most
    highest = 1e3 * max(timing.work["flops"] / timing.seconds for timing in timings)
    values = {
        "flops": 1 / each["flops"] if each["flops"] > 1 / highest else highest,
        "batch_seconds": each.get("batches", 0.0),
        "operation_seconds": each.get("operations", 0.0),
        "memory_bytes": 1 / each["moved_bytes"] if each.get("moved_bytes") else 0.0,
    }
    needed = ("flops", "batch_seconds")
    return {
        name: {"value": value, "source": how, "basis": "measured"}
        for name, value in values.items()
        if value or name in needed
    }


def measure_power(
    watts: float | None,
    idle: float | None,
    trial: SpeedTrial,
    seconds: float,
    named: str | None = None,
) -> ProfileFigures:
    """Busy and idle power: as given, else measured, else a laptop's."""
    given = {"active_watts": watts, "idle_watts": idle}
    source = f"told to flrce profile; {date.today()}"
    figures: ProfileFigures = {
        key: {"value": value, "source": source, "basis": "measured"}
        for key, value in given.items()
        if value is not None
    }
    missing = [key for key in given if key not in figures]
    if not missing:
        return figures
    meter = open_energy_meter(named)
    if meter.why:
        return figures | _assume_power(missing, meter.why)
    step, seen = trial.stepper(trial.usual), ", ".join(meter.seen)
    work: dict[str, Callable[[], Any]] = {
        "idle_watts": lambda: sleep(seconds),
        "active_watts": lambda: time_step(step, seconds),
    }
    for key in missing:
        value = _measure_steady_watts(meter, work[key], key.replace("_", " "), seconds)
        source = f"measured ({seen}); {date.today()}"
        figures[key] = {"value": value, "source": source, "basis": "measured"}
    return figures


def _measure_steady_watts(
    meter: EnergyMeter, work: Callable[[], Any], what: str, seconds: float
) -> float:
    """The mean of two measurements; they are repeated where they disagree."""
    remedy = "give more --seconds, or --watts and --idle-watts"
    watts = [0.0]
    for _ in range(MAX_FIT_TRIES):
        watts = [meter.measure(work)[1].watts or 0.0 for _ in range(2)]
        if 0 < max(watts) <= MAX_WATTS_RATIO * min(watts):
            return sum(watts) / 2
    seen = ", ".join(meter.seen)
    if not any(watts):
        raise BadInput(f"the meter ({seen}) did not move in {seconds:g} s; {remedy}")
    raise BadInput(
        f"the meter ({seen}) is too noisy: two measurements of {what} of {seconds:g} s each gave"
        f" {watts[0]:.3g} and {watts[1]:.3g}; {remedy}"
    )


def _assume_power(missing: Sequence[str], why: str) -> ProfileFigures:
    """A laptop's power, where this machine has no meter."""
    names = {"active_watts": "--watts", "idle_watts": "--idle-watts"}
    options = " and ".join(names[key] for key in missing)
    print(f"{why}; give {options}, or a laptop's are taken", file=sys.stderr)
    figures = read_shipped_figures("laptop-cpu", missing)
    for figure in figures.values():
        figure["source"] = f"not measured here, taken from laptop-cpu: {figure['source']}"
        figure["basis"] = "assumed"
    return figures


def open_energy_meter(named: str | None) -> EnergyMeter:
    """The machine's meter, or the one that is named."""
    if named is None:
        return EnergyMeter()
    sys.path.insert(0, "")  # a module beside the caller's files
    try:
        return EnergyMeter(open_meter(named))
    except (OSError, ValueError, ImportError, AttributeError) as why:
        reason = format_one_line(why, 120)
        raise BadInput(
            f"--meter {named!r} cannot be read ({reason}); give module:function, or a file that"
            " holds the joules so far"
        ) from why
    finally:
        sys.path.remove("")


def read_shipped_figures(name: str, keys: Sequence[str]) -> ProfileFigures:
    """Figures of a shipped profile, with their sources."""
    text = (resources.files("flrce") / "devices" / "profiles" / f"{name}.toml").read_text()
    return {key: dict(figure) for key, figure in tomllib.loads(text).items() if key in keys}
