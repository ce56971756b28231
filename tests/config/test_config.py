"""Every key of the experiment file refuses bad values: exit code 2, one line that names key, value,
rule, remedy.
"""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flrce.cli.cli import main
from flrce.config.compose import list_recipe_settings
from flrce.config.experiment import Experiment
from flrce.errors import BadInput, format_install_command
from flrce.methods.catalogue.recipes import CATALOGUE

#: key=value, and what the one line must say
BAD = [
    ("seed=-1", "seed = -1: should be greater than or equal to 0"),
    ("seed=1.5", "seed = 1.5: should be a valid integer"),
    ("rounds=0", "rounds = 0: should be greater than or equal to 1"),
    ("rounds=ten", "rounds = 'ten': should be a valid integer"),
    ("clients=0", "clients = 0: should be"),
    ("per_round=0", "per_round = 0: should be"),
    ("per_round=101", "per_round must be at most clients = 100, got 101; lower it"),
    ("data.name=digit", "data.name = 'digit': did you mean 'digits'?"),
    ("data.path=3", "data.path = 3: should be a valid string"),
    ("data.partition=dirichlt", "data.partition = 'dirichlt': did you mean 'dirichlet'?"),
    ("data.alpha=0", "data.alpha = 0: should be greater than 0"),
    ("data.alpha=nan", "data.alpha = nan: should be a finite number"),
    ("data.holdout=1.0", "data.holdout = 1.0: should be less than 1"),
    ("data.holdout=-0.1", "data.holdout = -0.1: should be greater than or equal to 0"),
    ("data.target=3", "data.target = 3: should be a valid string"),
    ("data.target=y", "data.target is about data of your own; give data.path, or drop it"),
    ("data.group=3", "data.group = 3: should be a valid string"),
    ("data.test=3", "data.test = 3: should be a valid string"),
    (
        "data.kind=numbers",
        "data.kind = 'numbers': should be 'classes', 'values', 'tokens' or 'labels'",
    ),
    ("data.layout=hwc", "data.layout = 'hwc': should be 'images', 'series', 'table' or 'tokens'"),
    ("data.fill=median", "data.fill = 'median': use a number, 'mean' or 'drop'"),
    ("data.standardise=3", "data.standardise = 3: should be a valid boolean"),
    ("data.ignore=3", "data.ignore = 3: should be a valid string"),
    ("data.features=5", "data.features = 5"),
    ("data.text=5", "data.text = 5"),
    ("data.buckets=3", "data.buckets = 3: should be greater than or equal to 16"),
    (
        "recipe={name='fedit', points=0.1}",
        "recipe.fedit: points = 0.1 is the price of FLrce's stop: set guided = true",
    ),
    (
        "recipe={name='flrce', psi=5.0, preset='frugal'}",
        "recipe.psi and recipe.preset = 'frugal' set two stop rules; drop one",
    ),
    (
        "recipe={name='fedasync', b=3}",
        "recipe.b needs recipe.staleness = 'hinge'; set that, or drop b",
    ),
    (
        "recipe={name='tifl', every=5}",
        "recipe.every and recipe.credits need recipe.policy = 'adaptive'",
    ),
    ("recipe={name='flexlora', rates=0.5}", "recipe.rates = 0.5: should be a list"),
    ("train={nesterov=true}", "train.nesterov = true is about momentum"),
    ("train={carry=true}", "train.carry = true keeps momentum or Adam's state, plain SGD has none"),
    ("data.size=0", "data.size = 0: should be greater than or equal to 1"),
    ("data.minimum=1", "data.minimum = 1: should be greater than or equal to 2"),
    ("model.name=cnn-cifra", "model.name = 'cnn-cifra': did you mean 'cnn-cifar'?"),
    ("model.name=':'", "model.name = ':': write"),
    ("model.options=3", "model.options = 3: should be a valid dictionary"),
    (
        "model.options={alpha=nan}",
        "model.options.alpha = nan: should be a valid boolean or a valid integer or a",
    ),
    (
        "seed=18446744073709551616",
        "seed = an integer of 65 bits: should be less than or equal to 9223372036854775807",
    ),
    ("train.epochs=1000000000", "train.epochs = 1000000000: should be less than or equal to 10000"),
    ("engine.workers=1000000", "engine.workers = 1000000: should be less than or equal to 1024"),
    ("recipe.name=[1]", "recipe.name = [1]: use one of"),
    ("fleet.profile={jetson-nano=1e308}", "fleet.profile"),
    ("recipe.psi=" + "9" * 5000, "--set recipe.psi: Exceeds the limit"),
    ("recipe.psi=" + "[" * 3000, "--set recipe.psi: brackets are nested too deep"),
    ("model.name=no.such:Net", "model.name = 'no.such:Net' cannot be imported"),
    (
        "model.name=cnn-cifar",
        "model.name 'cnn-cifar' wants samples of shape (3, 32, 32), the data has (1, 8, 8)",
    ),
    ("model.options=3", "model.options = 3: should be a valid dictionary"),
    ("model.options={hidden=3}", "model.options.hidden is no option of cnn-digits; it has none"),
    ("train.batch=0", "train.batch = 0: should be"),
    ("train.epochs=0", "train.epochs = 0: should be"),
    ("train.lr=0", "train.lr = 0: should be greater than 0"),
    ("train.lr=inf", "train.lr = inf: should be a finite number"),
    ("recipe.name=flcre", "recipe.name = 'flcre': did you mean 'flrce'?"),
    (
        "recipe={name='flrce', psi=12}",
        "psi must be above 0 and at most P - 1 = 9, got 12: a client has only 9 peers",
    ),
    ("recipe={name='flrce', psi=0}", "psi must be above 0"),
    (
        "recipe={name='flrce', psi='half'}",
        "psi must be a number or a percentage of P such as '50%', got 'half'",
    ),
    (
        "recipe={name='flrce', psi=true}",
        "recipe.psi = True: should be a valid number or a valid string",
    ),
    ("recipe={name='flrce', preset='papr'}", "recipe.preset = 'papr': did you mean 'paper'?"),
    ("recipe={name='flrce', pis=5}", "recipe.pis is no setting of flrce; did you mean 'psi'?"),
    ("recipe.sums=1", "recipe.sums = 1: must be true or false"),
    ("recipe.minimum=11", "recipe.minimum = 11: must be an integer from 1 to per_round = 10"),
    ("recipe.selector=unifrom", "recipe.selector = 'unifrom': did you mean 'uniform'?"),
    ("recipe.selector=os:path", "recipe.selector = 'os:path'"),
    ("recipe.average={piece='ema', dacay=1}", "recipe.average = 'ema'"),
    ("recipe.stop=3", "recipe.stop = 3: give a name, or a table"),
    ("engine.name=flour", "engine.name = 'flour': should be 'simulator' or 'flower'"),
    ("engine.device=gpu", "engine.device = 'gpu': should be 'auto', 'cpu' or 'cuda'"),
    ("engine.workers=0", "engine.workers = 0: should be greater than or equal to 1"),
    ("engine.kernel=fast", "engine.kernel = 'fast': should be 'auto', 'native' or 'torch'"),
    ("engine.precision=fp8", "engine.precision = 'fp8': should be 'float32', 'tf32' or 'bf16'"),
    ("engine.updates=gpu", "engine.updates = 'gpu': should be 'device' or 'host'"),
    ("engine.eval_every=0", "engine.eval_every = 0: should be"),
    ("fleet.profile=jetson-nona", "'jetson-nona' is unknown; did you mean 'jetson-nano'?"),
    ("fleet.profile={jetson-nano=0}", "fleet.profile"),
    ("fleet.profile={}", "an empty mix has no devices"),
    ("fleet.clients=3", "fleet.clients = 3: should be a valid string"),
    ("fleet.clients={a='phnoe'}", "'phnoe' is unknown; did you mean 'phone'?"),
    ("fleet.clients=none.csv", "fleet.clients 'none.csv' cannot be read"),
    ('fleet.availability="dayly"', "did you mean 'daily'"),
    ('data.trouble=["wrong-label"]', "did you mean 'wrong-labels'"),
    (
        "data.tokenizer=none.gguf",
        "data.tokenizer is about data of your own; give data.path, or drop it",
    ),
    ("data.length=1", "data.length = 1: should be greater than or equal to 2"),
    ("data.most=0", "data.most = 0: should be greater than or equal to 1"),
    ("data.least=0", "data.least = 0: should be greater than or equal to 1"),
    ("model.lowrank=2", "model.lowrank = 2: should be less than or equal to 1"),
    ("model.fixed=3", "model.fixed = 3: should be a valid string"),
    ("fleet.presence=diurnl", "fleet.availability = 'diurnl': did you mean 'diurnal'?"),
    ("fleet.battery=phon", "fleet.battery = 'phon': did you mean 'phone'?"),
    ("fleet.carbon=none.csv", "fleet.carbon 'none.csv' cannot be read"),
    ("fleet.regions=DE", "fleet.regions and fleet.start are about carbon; give fleet.carbon"),
    ("fleet.interval=0", "greater than 0"),
    ("fleet.network='x'", "fleet.network = 'x': should be 'device', 'fixed' or 'mobile'"),
    ("fleet.costs=3", "fleet.costs = 3: should be a valid string"),
    ("fleet.start=2021-01-01", "fleet.start = 2021-01-01: should be a valid string"),
    ("stop.grams=0", "stop.grams = 0: should be greater than 0"),
    ("stop.rounds=0", "stop.rounds = 0: should be"),
    ("stop.bytes=-1", "stop.bytes = -1: should be greater than 0"),
    ("stop.joules=0", "stop.joules = 0: should be greater than 0"),
    ("train.steps=0", "train.steps = 0: should be greater than or equal to 1"),
    ("train.optimizer=adma", "train.optimizer = 'adma': should be 'sgd', 'adam' or 'adamw'"),
    ("train.momentum=1", "train.momentum = 1: should be less than 1"),
    ("train.nesterov=2", "train.nesterov = 2: should be a valid boolean"),
    ("train.weight_decay=-1", "train.weight_decay = -1: should be greater than or equal to 0"),
    ("train.clip=0", "train.clip = 0: should be greater than 0"),
    ("train.schedule=cosin", "train.schedule = 'cosin': did you mean 'cosine'?"),
    ("train.carry=x", "train.carry = 'x': should be a valid boolean"),
    ("train.update=['sgd', 'clip']", "update: the last link must have a rate lr"),
    ("train.augment=['flop']", "train.augment = 'flop': did you mean 'flip'?"),
    ("model.kept=3", "model.kept = 3: should be a valid string"),
    ("objective.metrics=5", "objective.metrics = 5: give a list of them"),
    ("objective.metrics=accuracy", "objective.metrics = 'accuracy': give a list of them"),
    ("objective=clasification", "objective.name = 'clasification': did you mean 'classification'?"),
    ("stop.seconds=x", "stop.seconds = 'x': should be a valid number"),
    ("round=10", "round is no known key; did you mean 'rounds'?"),
    ("lr=0.1", "lr is no known key; did you mean 'train.lr'?"),
    ("recipe=fedavg", "recipe = 'fedavg': is a table; set one of its keys, such as recipe.name"),
    ("model=mlp", "model = 'mlp': is a table; set one of its keys, such as model.name"),
    ("stop=5", "stop = 5: is a table; set one of its keys, such as stop.rounds"),
    ("recipe.nam=fedavg", "recipe.nam is no setting of frugal; did you mean 'name'?"),
    ("trian.lr=1", "trian is no known key; did you mean 'train'?"),
    ("train.rl=1", "train.rl is no known key"),
    ("rounds.x=1", "rounds = {'x': 1}: should be a valid integer"),
    ("nonsense", "--set 'nonsense' is no key=value"),
]


@pytest.mark.parametrize(("override", "line"), BAD, ids=[b[0][:40] for b in BAD])
def test_bad_values(override, line, capsys):
    code = main(["run", "--set", override])
    error = capsys.readouterr().err
    assert code == 2
    assert line in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def keys(section=Experiment, prefix=""):
    for name, f in section.model_fields.items():
        if hasattr(f.annotation, "model_fields"):
            yield from keys(f.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_key_has_a_bad_value_test():
    tested = {override.partition("=")[0] for override, _ in BAD}
    missing = {key for key in keys() if key not in tested and key != "recipe"}
    assert not missing


def test_malformed_files(tmp_path, capsys):
    for name, text, line in [
        ("no.toml", None, "cannot be read"),
        ("broken.toml", "rounds = = 3", "is not valid TOML"),
        ("latin.toml", b"\xff\xfe", "is not valid TOML"),
        ("wrong.toml", "[train]\nlr = 'fast'", "train.lr = 'fast': should be a valid number"),
    ]:
        path = tmp_path / name
        if text is not None:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert main(["run", str(path)]) == 2
        error = capsys.readouterr().err
        assert line in error
        assert str(path) in error
        assert error.count("\n") == 1


def test_overrides_and_round_trip(tmp_path):
    exp = Experiment.load(
        None, ['recipe.psi="40%"', "fleet.profile={jetson-nano=0.7}", "data.name=digits"]
    )
    assert exp.build_recipe().stop.psi == 4.0
    (tmp_path / "again.toml").write_text(exp.to_toml())
    assert Experiment.load(tmp_path / "again.toml") == exp
    assert tomllib.loads(exp.to_toml())["recipe"]["psi"] == "40%"


def test_a_piece_of_one_s_own(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "import flrce\n"
        "from flrce.core.types import Selection\n"
        "@dataclass(frozen=True)\n"
        "class FirstComers(flrce.Selector):\n"
        "    skip: int = 0\n"
        "    def select(self, memory, view, rng):\n"
        "        return Selection(view.pool[self.skip : self.skip + view.P])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    exp = Experiment.from_tables(
        {
            "rounds": 1,
            "clients": 8,
            "per_round": 2,
            "recipe": {"name": "fedavg", "selector": {"piece": "mine:FirstComers", "skip": 3}},
        }
    )
    from flrce.simulation import runs

    assert runs.run(exp).history[0].chosen == ("3", "4")


def test_an_existing_run_is_not_overwritten(tmp_path, capsys):
    small = [
        "--set",
        "rounds=1",
        "--set",
        "clients=6",
        "--set",
        "per_round=2",
        "--out",
        str(tmp_path / "a"),
    ]
    assert main(["run", *small]) == 0
    before = (tmp_path / "a" / "rounds.jsonl").read_bytes()
    assert main(["run", *small]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["run", *small, "--resume", "--set", "train.lr=0.5"]) == 2
    assert "train.lr 0.1 -> 0.5" in capsys.readouterr().err
    assert (tmp_path / "a" / "rounds.jsonl").read_bytes() == before
    assert main(["run", *small, "--resume", "--set", "engine.workers=1"]) == 0  # changes no result


def test_seed_lists():
    from flrce.cli.options import parse_seeds

    assert parse_seeds("0,1,2") == [0, 1, 2]
    assert parse_seeds("3-5,9") == [3, 4, 5, 9]
    for bad in (
        "",
        "a",
        "1,1",
        "3-1",
        "²",
        "0-9999999999",
        "9" * 30,
        "1" + ",1" * 9,
        "-1",
        "1-",
        "٣",
    ):
        with pytest.raises(BadInput):
            parse_seeds(bad)


def test_commands_print_json(capsys):
    import json

    for command in (
        ["recipes", "list"],
        ["recipes", "show", "flrce"],
        ["data", "list"],
        ["data", "info", "digits"],
    ):
        assert main([*command, "--json"]) == 0
        json.loads(capsys.readouterr().out)


def test_importing_flrce_stays_light():
    """Half a second beyond torch at most, and nothing heavy that a corner does not need."""
    code = (
        "import torch, time; t = time.perf_counter(); import flrce; print(time.perf_counter() - t)"
    )
    taken = (
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        for _ in range(3)
    )
    assert any(seconds < 0.5 for seconds in taken)  # a busy machine may need a second try


def test_a_run_loads_neither_torch_s_compiler_nor_scikit_learn():
    """Each takes a second or two: of every start of flrce, and of every process that shares many
    runs.
    """
    code = """if True:
        import sys, flrce
        flrce.run(flrce.Experiment(rounds=1, clients=4, per_round=2, engine={"workers": 1}))
        print({"torch._dynamo", "sklearn", "scipy.stats", "matplotlib", "flwr"} & set(sys.modules))
    """
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.stdout.splitlines()[-1:] == ["set()"], told.stderr


def test_the_command_for_an_extra_names_its_packages(monkeypatch):
    """An extra could only be asked for where the package came from; what it wants can be had
    anywhere.
    """
    lines = [
        "torch>=2",
        "flwr<2,>=1.38; extra == 'flower'",
        'pandas>=2; extra == "tables"',
        "a; extra == 'tables'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert format_install_command("flower") == "pip install 'flwr<2,>=1.38'"
    assert format_install_command("tables") == "pip install 'pandas>=2' a"

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert format_install_command("report") == "pip install '.[report]' in its checkout"


def test_every_extra_that_messages_speak_of_is_declared():
    root = Path(__file__).resolve().parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    text = "\n".join(path.read_text() for path in (root / "src").rglob("*.py"))
    assert set(re.findall(r"installs\('(\w+)'\)", text)) <= set(declared)
    assert "pip install 'flrce[" not in text


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_settings_that_are_felt_are_taken(name):
    """Each setting at another value: refused only where the recipe is the same as without it."""
    make = CATALOGUE[name]
    for key, p in list_recipe_settings(make).items():
        if type(p.default) is not float:
            continue
        value = p.default / 2 or 0.5
        if key == "overcommit":  # at least 1
            value = p.default + 0.5
        recipe = {"name": name, key: value}
        if make(**{key: value}) != make():
            Experiment.from_tables({"recipe": recipe}).build_recipe()
            continue
        with pytest.raises(BadInput, match="changes nothing"):
            Experiment.from_tables({"recipe": recipe}).build_recipe()


OWN_TRAINER = """
from dataclasses import dataclass

import flrce


@dataclass(frozen=True)
class T(flrce.LocalTrainer):
    lr: float = 0.01
    epochs: int = 3
    batch: int = 4

    def assign(self, tasks, memory, view):
        return tasks
"""


def trained(trainer, **train):
    recipe = {"name": "fedavg", "trainer": trainer}
    return Experiment.from_tables({"train": {"lr": 0.05, **train}, "recipe": recipe}).build_recipe()


def test_a_trainer_of_one_s_own_keeps_its_settings(tmp_path, monkeypatch):
    (tmp_path / "ownpace.py").write_text(OWN_TRAINER)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = trained({"piece": "ownpace:T", "lr": 0.7, "epochs": 9, "batch": 2}, epochs=2, batch=8)
    assert (recipe.trainer.lr, recipe.trainer.epochs, recipe.trainer.batch) == (0.7, 9, 2)
    assert (recipe.chain.lr, recipe.work.epochs, recipe.work.batch) == (0.05, 2, 8)


def test_only_trainers_of_version_0_1_say_how_much_clients_train():
    old = trained({"piece": "sgd", "lr": 0.7, "epochs": 9, "batch": 2})
    assert (old.chain.lr, old.work.epochs, old.work.batch) == (0.7, 9, 2)
    corrected = trained({"piece": "corrected", "lr": 0.05, "epochs": 9})  # has a rate of its own
    assert (corrected.trainer.lr, corrected.chain.lr, corrected.work.epochs) == (0.05, 0.05, 9)
    with pytest.raises(BadInput, match=r"trainer.lr = 0.7 must be the clients' rate 0.05"):
        trained({"piece": "corrected", "lr": 0.7})
    for piece in ("alike", "counting", "scaffold"):
        with pytest.raises(BadInput, match="lr is no setting of it"):
            trained({"piece": piece, "lr": 0.7})


def test_a_recipe_with_a_trainer_of_one_s_own_is_written_and_read(tmp_path, monkeypatch):
    from dataclasses import replace

    from flrce.methods.catalogue import recipes

    (tmp_path / "ownpace.py").write_text(OWN_TRAINER)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("ownpace", None)
    from ownpace import T

    recipe = replace(recipes.fedavg(P=2), trainer=T(lr=0.7))
    assert Experiment(recipe=recipe, clients=4).build_recipe().trainer.lr == 0.7


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("fleet.availability=[]", "fleet.availability = []: name at least one"),
        ('fleet.availability=""', "fleet.availability = ''"),
        ("fleet.availability={}", "fleet.availability = {}"),
    ],
)
def test_no_availability_model_is_an_error(setting, line, capsys):
    assert main(["run", "--no-save", "--set", setting]) == 2
    told = capsys.readouterr().err
    assert line in told
    assert told.count("\n") == 1


def test_settings_of_a_model_have_old_names():
    """`kept` and `fixed` mean `personal` and `frozen`, and run directories store the old names."""
    new, old = (
        Experiment(model={"name": "mlp", first: "norms", second: ["0.*"]})
        for first, second in (("personal", "frozen"), ("kept", "fixed"))
    )
    assert new.to_toml() == old.to_toml()
    recipe = new.build_recipe()
    assert (recipe.personal, recipe.frozen) == (("norms",), ("0.*",))
    with pytest.raises(BadInput, match=r"model.personal and its old name model.kept are given"):
        Experiment(model={"personal": "norms", "kept": "head"})
