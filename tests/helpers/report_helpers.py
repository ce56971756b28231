"""Small real run directories that the tests of reports and answers read; each is made once a
session.
"""

import atexit
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from flrce.config.experiment import Experiment
from flrce.data.sources import read_digits
from flrce.simulation import runs

SMALL = {"rounds": 16, "clients": 12, "per_round": 5, "engine": {"workers": 1}}
EXPLOITING = {"piece": "relationship", "decay": 0.8}
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>",
    '=HYPERLINK("http://example.invalid")',
    "'\"><svg onload=alert(1)>",
    "plain",
    'new\nline, "quoted"',
    "\x1b[31mred",
    "&lt;b&gt;",
    "${name}",
    "日本語 اسم",
    "</title><b>",
    "a" * 90,
)


def experiment(name: str, seed: int = 0, recipe: dict | None = None, **more) -> Experiment:
    published = {"preset": "paper", "selector": EXPLOITING} if name.startswith("flrce") else {}
    return Experiment(
        seed=seed, recipe={"name": name, **published, **(recipe or {})}, **{**SMALL, **more}
    )


@cache
def folder() -> Path:
    made = Path(tempfile.mkdtemp(prefix="flrce-reports-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@cache
def compared() -> Path:
    """FedAvg with a server average, FLrce that stops early, and FLrce that does not: two seeds
    each.
    """
    out = folder() / "compared"
    for name, recipe in {
        "fedavg": {"average": "ema"},
        "flrce": {"psi": 1.5},
        "flrce-no-stop": {},
    }.items():
        runs.run_seeds(experiment(name, recipe=recipe), [0, 1], out / name)
    return out


@cache
def hostile() -> Path:
    """A run whose clients' names attack whoever shows them."""
    pool, out = read_digits(), folder() / "hostile"
    group = np.arange(len(pool.y)) % len(HOSTILE)
    data = replace(pool, group=group.astype(np.int64), groups=HOSTILE)
    runs.run(experiment("flrce-no-stop", rounds=8, data={"partition": "natural"}), out, data=data)
    return out
