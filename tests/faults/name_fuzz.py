"""Experiments that name code: random objects of Python's library, of installed packages and of a
stranger's folder.

None may be called or imported that has no right to be: an audit hook watches for commands, files
that go, and canaries.
"""

import importlib
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from flrce.config.experiment import Experiment
from flrce.core.user_code import NOTHING, Trust, trust_file, trust_record
from flrce.data.sources import load_source
from flrce.errors import BadInput

SMALL: dict[str, Any] = {"rounds": 1, "clients": 6, "per_round": 2}
MODULES = (
    "os",
    "posix",
    "subprocess",
    "builtins",
    "shutil",
    "sys",
    "io",
    "pathlib",
    "functools",
    "operator",
    "ctypes",
    "importlib",
    "runpy",
    "pickle",
    "code",
    "tempfile",
    "socket",
    "http.server",
    "multiprocessing",
    "threading",
    "torch",
    "torch.nn",
    "torch.hub",
    "numpy",
    "click",
    "pydantic",
    "flrce.simulation.runs",
    "flrce.cli.cli",
    "flrce.core.pieces",
    "flrce.config.experiment",
    "flrce.storage.disk",
    "stranger",
    "stranger.inner",
    "nowhere",
    "__main__",
)
ROLES = (
    "selector",
    "trainer",
    "submodel",
    "compressor",
    "aggregator",
    "server",
    "pace",
    "stop",
    "average",
)
FORBIDDEN = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "shutil.rmtree",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.kill",
    "socket.connect",
    "webbrowser.open",
    "ctypes.dlopen",
    "pty.spawn",
    "code.__new__",
}
CANARY = """
from pathlib import Path

Path({canary!r}).touch()


class Own:
    def __call__(self, *given):
        pass
"""
_seen: list[str] = []
_watching: list[bool] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in FORBIDDEN:
        _seen.append(event)


sys.addaudithook(_watch)


def prepared(folder: Path) -> Path:
    """A stranger's run directory, with code in it."""
    stranger = folder / "stranger-run"
    (stranger / "stranger").mkdir(parents=True, exist_ok=True)
    for path in (stranger / "stranger" / "__init__.py", stranger / "stranger" / "inner.py"):
        path.write_text(CANARY.format(canary=str(folder / "canary")))
    return stranger


def name_of(rng: random.Random) -> str:
    """A name of code: mostly of something that is there."""
    module = rng.choice(MODULES)
    known = sys.modules.get(module)
    if known is None and module in sys.stdlib_module_names:
        known = importlib.import_module(module)
    attributes = sorted(vars(known)) if known is not None else ["Own", "METRIC"]
    return f"{module}:{rng.choice(attributes)}"


def tables_of(rng: random.Random, folder: Path) -> dict[str, Any]:
    """An experiment with one such name in it, and arguments that would do harm."""
    harm = f"touch {folder / 'canary'}"
    given = {
        "command": harm,
        "args": ["touch", str(folder / "canary")],
        "path": str(folder / "victim"),
        "source": harm,
    }
    some = dict(rng.sample(sorted(given.items()), rng.randint(0, 2)))
    named: Any = {"piece": name_of(rng), **some} if rng.random() < 0.8 else name_of(rng)
    if rng.random() < 0.2:
        named = {"piece": "error-feedback", "inner": named}
    places: list[dict[str, Any]] = [
        {"recipe": {"name": "fedavg", rng.choice(ROLES): named}},
        {"train": {"schedule": named}},
        {"train": {"update": [named]}},
        {"train": {"augment": [named]}},
        {"fleet": {"availability": named}},
        {"fleet": {"availability": [named]}},
        {"fleet": {"battery": named}},
        {"data": {"trouble": [named]}},
        {"objective": {"name": name_of(rng), **some}},
        {"objective": {"name": "classification", "metrics": [name_of(rng)]}},
        {
            "model": {
                "name": name_of(rng),
                "options": {k: v for k, v in some.items() if isinstance(v, str)},
            }
        },
    ]
    return {**SMALL, **rng.choice(places)}


@cache
def load_own_code() -> None:
    """Modules and compiled code of flrce itself, which the first experiment builds and loads."""
    Experiment.from_tables(SMALL).build_network(load_source("digits"))


def case(folder: Path, rng: random.Random) -> bool:
    """Whether one experiment was valid; anything but that or one line raises, and so does whatever
    was called.
    """
    load_own_code()
    stranger = prepared(folder)
    (folder / "victim").write_text("here")
    trusts: list[Callable[[], Trust | bool]] = [
        lambda: NOTHING,
        lambda: False,
        lambda: True,
        lambda: trust_file(None),
        lambda: trust_record(str(stranger)),
        lambda: trust_record(str(stranger), everything=True),
    ]
    tables, trust = tables_of(rng, folder), rng.choice(trusts)()
    _seen.clear()
    _watching.append(True)
    path = list(sys.path)
    try:
        if isinstance(trust, Trust) and trust.barred:
            sys.path.append(str(stranger))
        made = Experiment.from_tables(tables, trust=trust)
        made.build_network(load_source("digits"))
        line = ""
    except BadInput as why:
        line = f"refused: {why}"
    finally:
        _watching.clear()
        sys.path[:] = path
    assert not _seen, (_seen, tables)
    assert not (folder / "canary").exists(), tables
    assert (folder / "victim").read_text() == "here", tables
    assert line.isprintable(), (line, tables)
    return not line
