"""Experiments that name code: random objects of Python's library, of installed packages and of a
stranger's folder.

None may be called or imported that has no right to be: an audit hook watches for commands, files
that go, and canaries.
"""

import importlib
import inspect
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
OWN_MODULES = (
    "flrce.cli.options",
    "flrce.cli.profile",
    "flrce.core.host",
    "flrce.core.state_values",
    "flrce_client.meter",
)
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
    *OWN_MODULES,
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
    (stranger / "other.toml").write_text('recipe = {aggregator = "stranger:Own"}')
    return stranger


@cache
def _list_own_functions() -> list[str]:
    """Functions of flrce that ask for a file, or for a name."""
    found = [
        f"{module}:{attribute}"
        for module in OWN_MODULES
        for attribute, value in vars(importlib.import_module(module)).items()
        if inspect.isfunction(value)
    ]
    return [name for name in found if _list_parameters(name) & {"file", "name", "named", "path"}]


def name_of(rng: random.Random) -> str:
    """A name of code: mostly of something that is there."""
    if rng.random() < 0.3:
        return rng.choice(_list_own_functions())
    module = rng.choice(MODULES)
    known = sys.modules.get(module)
    if known is None and (module in sys.stdlib_module_names or module.startswith("flrce")):
        known = importlib.import_module(module)
    attributes = sorted(vars(known)) if known is not None else ["Own", "METRIC"]
    return f"{module}:{rng.choice(attributes)}"


def _list_parameters(name: str) -> set[str]:
    """What the object of a name asks for; nothing where it is not loaded or does not say."""
    module, _, attribute = name.partition(":")
    try:
        return set(inspect.signature(getattr(sys.modules.get(module), attribute)).parameters)
    except (AttributeError, TypeError, ValueError):
        return set()


def tables_of(rng: random.Random, folder: Path) -> dict[str, Any]:
    """An experiment with one such name in it, and arguments that would do harm."""
    harm = f"touch {folder / 'canary'}"
    given = {
        "command": harm,
        "args": ["touch", str(folder / "canary")],
        "path": str(folder / "victim"),
        "source": harm,
        "named": "stranger:Own",
        "name": "stranger:Own",
        "file": str(folder / "stranger-run" / "other.toml"),
        "overrides": [],
        "trust": True,
    }
    name = name_of(rng)
    wanted = _list_parameters(name)
    some = dict(rng.sample(list(given.items()), rng.randint(0, 2)))
    if rng.random() < 0.5:  # what it asks for
        some = {key: value for key, value in given.items() if key in wanted}
    named: Any = {"piece": name, **some} if rng.random() < 0.8 else name
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
        {"objective": {**some, "name": name}},
        {"objective": {"name": "classification", "metrics": [name_of(rng)]}},
        {"model": {"name": name, "options": {k: v for k, v in some.items() if isinstance(v, str)}}},
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
        if isinstance(trust, Trust):
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
