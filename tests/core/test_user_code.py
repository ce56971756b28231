"""Modules that settings name: where they may lie, what their objects must be, and which commands
import none.
"""

import pickle
import sys
from types import SimpleNamespace

import pytest
import tomli_w

from flrce.cli.cli import main
from flrce.config.experiment import Experiment
from flrce.core import user_code
from flrce.core.user_code import NOTHING, import_object
from flrce.data.sources import load_source
from flrce.errors import BadInput

SMALL = {
    "rounds": 1,
    "clients": 6,
    "per_round": 2,
    "train": {"epochs": 1},
    "engine": {"workers": 1},
}
STEADY = """
from dataclasses import dataclass
import flrce
from flrce.methods.aggregation.mean import WeightedMean


@dataclass(frozen=True)
class Steady(flrce.Aggregator):
    def __call__(self, w, updates, memory=None):
        return WeightedMean()(w, updates, memory)
"""
NOISY = "from pathlib import Path\nPath({marker!r}).touch()\n" + STEADY


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch, tmp_path):
    """An empty working directory, and a search path that a test may extend."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("steady", "noisy", "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def with_recipe(**pieces):
    return SMALL | {"recipe": {"name": "fedavg", **pieces}}


def attacks(marker):
    """Tables that run a command where the object that they name is called."""
    system = {"piece": "os:system", "command": f"touch {marker}"}
    return {
        "aggregator": with_recipe(aggregator=system),
        "nested": with_recipe(compressor={"piece": "error-feedback", "inner": system}),
        "posix": with_recipe(stop={**system, "piece": "posix:system"}),
        "call": with_recipe(stop={"piece": "subprocess:call", "args": ["touch", str(marker)]}),
        "popen": with_recipe(
            selector={"piece": "subprocess:Popen", "args": ["touch", str(marker)]}
        ),
        "eval": with_recipe(server={"piece": "builtins:eval", "source": "1"}),
        "exec": with_recipe(server="builtins:exec"),
        "breakpoint": with_recipe(pace="builtins:breakpoint"),
        "partial": with_recipe(aggregator={"piece": "functools:partial", "func": "os:system"}),
        "flrce": with_recipe(aggregator="flrce.cli.cli:main"),
        "again": with_recipe(aggregator="flrce.simulation.runs:run"),
        "schedule": SMALL | {"train": {"schedule": system}},
        "update": SMALL | {"train": {"update": [system]}},
        "augment": SMALL | {"train": {"augment": [system]}},
        "availability": SMALL | {"fleet": {"availability": [system]}},
        "presence": SMALL | {"fleet": {"presence": system}},
        "battery": SMALL | {"fleet": {"battery": system}},
        "touch": SMALL | {"data": {"trouble": [{"piece": "pathlib:Path", "args": str(marker)}]}},
        "trouble": SMALL | {"data": {"trouble": [system]}},
        "objective": SMALL | {"objective": {"name": "os:system", "command": f"touch {marker}"}},
        "metrics": SMALL | {"objective": {"name": "classification", "metrics": ["os:system"]}},
        "model": SMALL
        | {"model": {"name": "os:system", "options": {"command": f"touch {marker}"}}},
        "torch": SMALL
        | {"model": {"name": "torch.hub:load", "options": {"repo_or_dir": str(marker)}}},
    }


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", attacks(""))
def test_what_is_no_piece_is_never_called(name, trust, tmp_path):
    marker = tmp_path / "called"
    with pytest.raises(BadInput):
        Experiment.from_tables(attacks(marker)[name], trust=trust).build_network(
            load_source("digits")
        )
    assert not marker.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--no-save"],
        ["run", "--no-save", "--trust"],
        ["compare", "--out", "all"],
        ["doctor", "--trust"],
    ],
)
def test_commands_refuse_it_in_one_line(words, tmp_path, capsys):
    marker = tmp_path / "called"
    (tmp_path / "evil.toml").write_text(tomli_w.dumps(attacks(marker)["aggregator"]))
    assert main([words[0], str(tmp_path / "evil.toml"), *words[1:]]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "the module os belongs to Python's own library" in told
    assert not marker.exists()


OTHER = {"file": "far/other.toml", "overrides": [], "trust": True}
#: functions of flrce that would import what their arguments name
OWN_FUNCTIONS = {
    "objective": {"objective": {"name": "flrce.cli.options:load_experiment", **OTHER}},
    "model": {"model": {"name": "flrce.cli.options:load_experiment", "options": OTHER}},
    "look": {"objective": {"name": "flrce.cli.options:look_at", **OTHER}},
    "meter": {"fleet": {"availability": {"piece": "flrce.cli.profile:open_meter", "named": "m:x"}}},
    "class": {"fleet": {"battery": {"piece": "flrce.core.state_values:load_class", "name": "m:x"}}},
    "child": {"train": {"schedule": {"piece": "flrce.core.host:run_in_child", "work": "m:x"}}},
    "client": {"train": {"schedule": {"piece": "flrce_client.meter:open_meter", "named": "m:x"}}},
    "sampler": {"train": {"augment": ["flrce_client.meter:PowerSampler"]}},
    "thread": {"train": {"augment": [{"piece": "flrce.cli.profile:PowerSampler", "every": 1}]}},
    "partial": {"train": {"schedule": {"piece": "flrce.config.compose:partial", "func": "m:x"}}},
    "lookup": {"train": {"schedule": {"piece": "flrce.core.record:attrgetter", "attr": "x"}}},
}


@pytest.mark.parametrize("words", [["doctor"], ["data", "info"], ["run", "--no-save"]])
@pytest.mark.parametrize("name", OWN_FUNCTIONS)
def test_functions_of_flrce_are_no_factories(name, words, tmp_path, capsys, monkeypatch):
    """A file that names one would choose its arguments: another file, and that it is trusted."""
    marker, far = tmp_path / "imported", tmp_path / "here" / "far"
    far.mkdir()
    (far / "m.py").write_text(NOISY.format(marker=str(marker)))
    (far / "other.toml").write_text(tomli_w.dumps(with_recipe(aggregator="m:Steady")))
    monkeypatch.syspath_prepend(far)
    (tmp_path / "here" / "mine.toml").write_text(tomli_w.dumps(SMALL | OWN_FUNCTIONS[name]))
    assert main([*words, "mine.toml"]) in ((2,) if words[0] == "run" else (0, 2))
    assert not marker.exists()
    assert "m" not in sys.modules
    assert "Traceback" not in capsys.readouterr().err


def looks(file, out):
    return [
        ["doctor", file],
        ["data", "info", file],
        ["deploy", "init", out, file],
        ["recipes", "show", "fedavg", "--set", "recipe.aggregator=noisy:Steady"],
    ]


@pytest.mark.parametrize("i", range(4))
def test_commands_that_look_import_nothing(i, tmp_path, capsys):
    marker = tmp_path / "imported"
    (tmp_path / "here" / "noisy.py").write_text(NOISY.format(marker=str(marker)))
    file = tmp_path / "here" / "mine.toml"
    file.write_text(
        tomli_w.dumps(with_recipe(aggregator="noisy:Steady") | {"model": {"name": "noisy:Net"}})
    )
    main(looks(str(file), str(tmp_path / "fleet"))[i])
    assert not marker.exists()
    assert "Traceback" not in capsys.readouterr().err


def test_a_deployment_keeps_the_names(tmp_path, capsys):
    file = tmp_path / "here" / "mine.toml"
    file.write_text(tomli_w.dumps(with_recipe(aggregator="noisy:Steady")))
    assert main(["deploy", "init", str(tmp_path / "fleet"), str(file)]) == 0
    assert (
        'aggregator = "noisy:Steady"'
        in (tmp_path / "fleet" / "fleet" / "experiment.toml").read_text()
    )
    assert main(["doctor", str(file)]) == 0
    assert "names code" in capsys.readouterr().out


def test_records_are_read_without_importing(tmp_path, capsys):
    marker, run = tmp_path / "imported", tmp_path / "run"
    sets = [
        word
        for key in ("rounds=2", "clients=6", "per_round=2", "engine.workers=1")
        for word in ("--set", key)
    ]
    assert main(["run", "--out", str(run), *sets]) == 0
    text = (run / "experiment.toml").read_text()
    (run / "experiment.toml").write_text(
        text.replace("[recipe]", '[recipe]\nserver = "noisy:Steady"')
    )
    for folder in (run, tmp_path / "here"):
        (folder / "noisy.py").write_text(NOISY.format(marker=str(marker)))
    run = str(run)
    reading = [
        ["report", run],
        ["why", run],
        ["whatif", run],
        ["runs", str(tmp_path)],
        ["verify", run],
        ["watch", run, "--once"],
        ["export", run, "--out", "peft"],
        ["reach", run, "--target", "0.1"],
    ]
    for words in reading:
        assert main(words) in (0, 1, 2), words
        assert not marker.exists(), words
    assert "Traceback" not in capsys.readouterr().err


def test_beside_the_file_or_in_the_working_directory(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    file = tmp_path / "other" / "mine.toml"
    file.write_text(tomli_w.dumps(with_recipe(aggregator="steady:Steady")))
    words = ["run", str(file), "--no-save"]
    assert main(words) == 2
    assert "No module named 'steady'" in capsys.readouterr().err
    (tmp_path / "other" / "steady.py").write_text(STEADY)
    assert main(words) == 0
    del sys.modules["steady"]
    (tmp_path / "other" / "steady.py").rename(tmp_path / "here" / "steady.py")
    assert main(words) == 0


def test_elsewhere_needs_trust(tmp_path, monkeypatch, capsys):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "steady.py").write_text(STEADY)
    monkeypatch.syspath_prepend(tmp_path / "far")
    file = tmp_path / "here" / "mine.toml"
    file.write_text(tomli_w.dumps(with_recipe(aggregator="steady:Steady")))
    assert main(["run", str(file), "--no-save"]) == 2
    told = capsys.readouterr().err
    assert "the module steady lies in" in told
    assert "add --trust" in told
    assert "steady" not in sys.modules
    assert main(["run", str(file), "--no-save", "--trust"]) == 0
    assert main(["run", str(file), "--no-save"]) == 0  # loaded by now


def test_installed_packages_need_trust_or_an_entry_point(tmp_path, monkeypatch):
    packages = tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "steady.py").write_text(STEADY)
    monkeypatch.syspath_prepend(packages)
    tables = with_recipe(aggregator="steady:Steady")
    with pytest.raises(BadInput, match=r"the module steady lies in .*site-packages"):
        Experiment.from_tables(tables)
    assert "steady" not in sys.modules
    points = [SimpleNamespace(value="steady:Steady")]
    monkeypatch.setattr(
        user_code, "entry_points", lambda group: points if group == "flrce.pieces" else []
    )
    assert type(Experiment.from_tables(tables).build_recipe().aggregator).__name__ == "Steady"
    monkeypatch.undo()


def test_from_python(tmp_path, monkeypatch):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "steady.py").write_text(STEADY)
    tables = with_recipe(aggregator="steady:Steady")
    (tmp_path / "here" / "mine.toml").write_text(tomli_w.dumps(tables))
    monkeypatch.syspath_prepend(tmp_path / "far")
    with pytest.raises(BadInput, match=r"in Python: trust=True"):
        Experiment.load("mine.toml")
    loaded = Experiment.load("mine.toml", trust=True)
    assert loaded == Experiment.from_tables(
        tables
    )  # tables that Python code writes are the caller's


def test_a_file_cannot_trust_itself(tmp_path):
    (tmp_path / "mine.toml").write_text("trust = true\n")
    with pytest.raises(BadInput, match="trust is no known key"):
        Experiment.load(tmp_path / "mine.toml")
    with pytest.raises(BadInput, match="_trust is no known key"):
        Experiment.from_tables({"_trust": True})


def test_copies_and_other_processes_keep_what_was_trusted(tmp_path):
    experiment = Experiment.from_tables(SMALL, trust=NOTHING)
    copies = [
        pickle.loads(pickle.dumps(experiment)),
        experiment.with_seed(3),
        experiment.with_tables({"rounds": 3}),
    ]
    assert [copy.get_trust.kind for copy in copies] == ["nothing"] * 3


def test_a_run_directory_is_no_place_for_code(tmp_path, capsys):
    marker, run = tmp_path / "imported", tmp_path / "here" / "run"
    (tmp_path / "here" / "steady.py").write_text(STEADY)
    file = tmp_path / "here" / "mine.toml"
    file.write_text(tomli_w.dumps(with_recipe(aggregator="steady:Steady")))
    assert main(["run", str(file), "--out", str(run)]) == 0
    assert main(["run", "--out", str(run), "--resume", "--set", "rounds=2"]) == 0
    text = (run / "experiment.toml").read_text()
    (run / "experiment.toml").write_text(text.replace("steady:Steady", "noisy:Steady"))
    (run / "noisy.py").write_text(NOISY.format(marker=str(marker)))
    for more in ([], ["--trust"]):
        assert main(["run", "--out", str(run), "--resume", "--set", "rounds=3", *more]) == 2
    assert not marker.exists()
    told = capsys.readouterr().err
    assert "name the experiment file: flrce run FILE --out DIR --resume" in told
    assert "Traceback" not in told


ROLES = """
from pathlib import Path
from subprocess import run
from torch import nn

class NoRole:
    def __init__(self, **given):
        Path({marker!r}).touch()

def number() -> int:
    Path({marker!r}).touch()

def nothing() -> None:
    Path({marker!r}).touch()

class Net(nn.Sequential):
    def __init__(self, outputs):
        super().__init__(nn.Flatten(), nn.Linear(64, outputs))

def make(outputs) -> nn.Module:
    return Net(outputs)

def plain(outputs):
    return Net(outputs)
"""


@pytest.mark.parametrize("name", ["NoRole", "number", "nothing", "run", "nn", "Path"])
def test_the_role_is_looked_at_before_the_call(name, tmp_path):
    marker = tmp_path / "called"
    (tmp_path / "here" / "mine.py").write_text(ROLES.format(marker=str(marker)))
    for tables in (
        with_recipe(aggregator=f"mine:{name}"),
        SMALL | {"objective": f"mine:{name}"},
        SMALL | {"model": {"name": f"mine:{name}"}},
    ):
        for trust in (False, True):
            with pytest.raises(BadInput, match=r"so it is no|must subclass|does not say"):
                Experiment.from_tables(tables, trust=trust).build_network(load_source("digits"))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["Net", "make", "plain"])
def test_networks_by_class_or_function(name, tmp_path):
    (tmp_path / "here" / "mine.py").write_text(ROLES.format(marker=""))
    (tmp_path / "here" / "mine.toml").write_text(
        tomli_w.dumps(SMALL | {"model": {"name": f"mine:{name}"}})
    )
    assert Experiment.load("mine.toml").build_network(load_source("digits"))[1].out_features == 10


def test_a_class_of_a_script_is_named_as_such():
    """What a run directory of a script names, and another program resumes."""
    with pytest.raises(BadInput, match="was defined in a script; resume with that script"):
        import_object("__main__:NoSuchClassHere", "recipe.aggregator")
