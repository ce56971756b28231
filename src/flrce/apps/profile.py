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
from flrce.errors import BadInput, nearest
from flrce.fleet.costs import Profile, training_flops
from flrce.fleet.energy import Meter
from flrce.local.link import Local
from flrce.local.optimisers import SGD
from flrce.local.trainer import Trainer
from flrce.local.updates import Chain
from flrce.models.nets import CNNS, build
from flrce.store.checkpoint import write_through
from flrce.types import Task

SIZES = (4, 16, 64, 128)  # samples a batch
OTHERS = (8, 32, 96)  # those that the fit is tried on
LASTS = 0.15  # seconds that one timing takes at least
RADIO = ("up_bits", "down_bits", "up_joules", "down_joules")  # a link has two ends: not measured here
REPEATS = 3  # of each timing; the fastest counts, the others were disturbed

Point = tuple[float, float]  # FLOPs and seconds of a batch
Figures = dict[str, dict[str, Any]]  # figure -> value, source


def profile(
    out: Path | None, model: tuple[str, ...], watts: float | None, idle_watts: float | None, seconds: float,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure how fast this machine trains and, where it can tell, what it draws."""
    names = list(model) or list(CNNS)
    for name in names:
        if name not in CNNS:
            raise BadInput(f"--model {name!r}: {nearest(name, CNNS)}")
    for option, value in (("--watts", watts), ("--idle-watts", idle_watts), ("--seconds", seconds)):
        if value is not None and not 0 < value < 1e6:
            raise BadInput(f"{option} {value:g}: must be above 0")
    if out is not None and out.suffix != ".toml":
        raise BadInput(f"--out {out}: a profile's name ends in .toml")
    fixed, flops = measured_speed(names)
    figures = speed(fixed, flops, names) | power(watts, idle_watts, names[-1], seconds) | shipped("laptop-cpu", RADIO)
    figures |= {"error": error(names, fixed, flops)}
    figures = {f.name: figures[f.name] for f in fields(Profile)[1:]}
    if out is not None:
        write_through(out, tomli_w.dumps(figures).encode())
    rows = [[name, f"{figure['value']:.4g}", figure["source"]] for name, figure in figures.items()]
    table("this machine", ("figure", "value", "source"), rows, as_json)
    if out is not None and not as_json:
        print(f'use it with: fleet.profile = "{out}"')


def timings(name: str, sizes: Sequence[int] = SIZES, lasts: float = LASTS) -> list[Point]:
    """How long one training step takes on batches of several sizes."""
    shape, _ = CNNS[name]
    flops = training_flops(build(name, shape, 10, 0), shape)
    return [(size * flops, min(timed(stepper(name, size), lasts) for _ in range(REPEATS))) for size in sizes]


def stepper(name: str, size: int, steps: int = 4) -> Callable[[], int]:
    """A function that takes `steps` training steps, and says how many."""
    shape, _ = CNNS[name]
    trainer = Trainer(build(name, shape, 10, 0), shape)
    local = Local(Task("", 0, 1, 0), steps, size, trainer.layout)
    x, y = torch.rand(size, *shape), torch.arange(size) % 10
    order, sizes = np.tile(np.arange(size), steps), np.full(steps, size)
    w = trainer.w.clone()

    def run() -> int:
        trainer.train(w, x, y, 1.0, 0.0, order, sizes, Chain((SGD(1e-9),)), local)
        return steps

    return run


def timed(step: Callable[[], int], lasts: float) -> float:
    """Seconds of one step, over at least `lasts` seconds."""
    step()
    began, count = perf_counter(), 0
    while perf_counter() - began < lasts:
        count += step()
    return (perf_counter() - began) / count


def measured_speed(names: list[str], tries: int = 4) -> tuple[float, float]:
    """Seconds a batch and FLOP/s of this machine; measured anew where other work drowned the timings."""
    for _ in range(tries - 1):
        try:
            return fit([point for name in names for point in timings(name)])
        except BadInput:
            continue
    return fit([point for name in names for point in timings(name)])


def error(names: Sequence[str], fixed: float, flops: float) -> dict[str, Any]:
    """The profile's error: the largest of predictions against timings that were not fitted.

    Batches of other sizes by the fit of all networks; and, of several networks, each by the fit of the others.
    """
    found = [off(fixed, flops, point) for name in names for point in timings(name, OTHERS)]
    tried = f"{len(names)} networks, batches of {', '.join(map(str, OTHERS))}"
    if len(names) > 1:
        points = {name: timings(name) for name in names}
        for name in names:
            with suppress(BadInput):  # the others' timings may not grow with the work
                other = fit([point for each in names if each != name for point in points[each]])
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


def speed(fixed: float, flops: float, names: Sequence[str]) -> Figures:
    how = (
        f"measured by flrce profile on {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads,"
    )
    how = f"{how} torch {torch.__version__}, training {', '.join(names)}; {date.today()}"
    return {"batch_seconds": {"value": fixed, "source": how}, "flops": {"value": flops, "source": how}}


def power(watts: float | None, idle: float | None, name: str, seconds: float) -> Figures:
    """Busy and idle power: as told, else as the machine's counters say, else a laptop's."""
    found = shipped("laptop-cpu", ("active_watts", "idle_watts"))
    for figure in found.values():
        figure["source"] = f"not measured here, taken from laptop-cpu: {figure['source']}"
    meter = Meter()
    if meter.why:
        print(f"{meter.why}; give --watts and --idle-watts, or a laptop's are taken", file=sys.stderr)
    else:
        step, how = stepper(name, 64), f"measured by zeus ({', '.join(meter.seen)}); {date.today()}"
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
