"""The wheel as a stranger meets it: an empty environment outside the checkout, no pins, then no
compiler, then no home.

Only torch is lent by the environment that runs this, because an unpinned one is gigabytes; the rest
is what the wheel asks for, in today's newest versions.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["--set", "rounds=3", "--set", "clients=8", "--set", "per_round=3"]
NOBODY = 65534


def call(command: list[str | Path], folder: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """A command in a folder, with nothing in its environment but what is said here."""
    given = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        **env,
    }
    return subprocess.run(
        command, cwd=folder, env=given, capture_output=True, text=True, timeout=600
    )


def required(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """A distribution and all that it needs here."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key not in found:
        found[key] = distribution(name)
        for line in found[key].requires or ():
            needed, _, marker = line.partition(";")
            if "extra" not in marker:
                try:
                    required(re.match(r"[\w.-]+", needed.strip())[0], found)  # type: ignore[index]
                except Exception:  # another platform's
                    continue
    return found


def lend(site: Path, lent: Path) -> None:
    """Show an environment this one's torch, and nothing else of it."""
    lent.mkdir()
    for one in required("torch", {}).values():
        for top in {
            Path(str(file)).parts[0] for file in one.files or () if not str(file).startswith("..")
        }:
            source = Path(str(one.locate_file(top)))
            if source.exists() and not (lent / top).exists() and top != "__pycache__":
                (lent / top).symlink_to(source)
    (site / "lent.pth").write_text(f"{lent}\n")


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A folder that other users may enter."""
    folder = Path(tempfile.mkdtemp(prefix="flrce-newcomer-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def venv(place: Path) -> Path:
    """An empty environment with the wheel in it."""
    wheels = place / "wheels"
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", wheels, ROOT]
    built = subprocess.run(build, capture_output=True, text=True)
    if built.returncode and "No matching distribution" in built.stderr:
        pytest.skip("no package index within reach")
    assert built.returncode == 0, built.stderr
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    site = next((place / "venv" / "lib").glob("python*/site-packages"))
    lend(site, place / "lent")
    (wheel,) = wheels.glob("flrce-*.whl")
    pip = [place / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", wheel]
    done = subprocess.run(pip, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place / "venv"


@pytest.fixture
def folder(place: Path, request: pytest.FixtureRequest) -> Path:
    made = place / re.sub(r"\W", "-", request.node.name)
    made.mkdir()
    return made


def test_nothing_but_the_wheel_asks_for_is_there(venv, folder):
    listed = call(
        [venv / "bin" / "python", "-m", "pip", "list", "--format=freeze"], folder
    ).stdout.lower()
    assert "click==" in listed
    assert "typer==" not in listed
    assert "pytest==" not in listed
    where = call(
        [venv / "bin" / "python", "-c", "import flrce; print(flrce.__file__)"], folder
    ).stdout
    assert str(venv) in where


def test_help_version_and_a_usage_error(venv, folder):
    flrce = venv / "bin" / "flrce"
    helped = call([flrce, "--help"], folder)
    assert helped.returncode == 0
    assert "\\[" not in helped.stdout
    assert "..." not in helped.stdout.replace("[ARGS]...", "")  # no summary is cut
    assert "flrce " in call([flrce, "--version"], folder).stdout
    for wrong in (
        ["run", "--nonsense"],
        ["nonsense"],
        ["compare", "--seeds"],
        ["run", "--set", "rounds=0"],
        ["arena", "plan.toml", "--out", "o"],  # of the distribution that is not here
    ):
        said = call([flrce, *wrong], folder)
        assert said.returncode == 2, said
        assert len(said.stderr.splitlines()) == 1, said.stderr
        assert said.stderr.startswith("error: ")


def test_run_and_report(venv, folder):
    flrce = venv / "bin" / "flrce"
    ran = call([flrce, "run", *SMALL, "--out", "runs/a"], folder)
    assert ran.returncode == 0, ran.stderr
    told = call([flrce, "report", "runs/a", "--out", "page.html"], folder)
    assert told.returncode == 0, told.stderr
    assert (folder / "page.html").stat().st_size > 20_000
    compared = call(
        [flrce, "compare", *SMALL, "--recipes", "fedavg,flrce", "--out", "runs/b"], folder
    )
    assert compared.returncode == 0, compared.stderr
    assert (folder / "runs" / "b" / "report.html").exists()
    watched = call([flrce, "watch", "runs", "--once"], folder)
    assert watched.stdout.count("finished  3 of 3") == 3, watched.stdout + watched.stderr


OWN_DATA = """
import csv, json
import numpy as np

rng = np.random.default_rng(0)
area = rng.normal(110, 30, 200)
with open("houses.csv", "w", newline="") as file:
    rows = [[f"H{i}", f"2020-0{1 + i % 9}-11", round(a, 1), round(2500 * a)] for i, a in enumerate(area)]
    csv.writer(file).writerows([["house_id", "sold", "area", "price"], *rows])
with open("reviews.jsonl", "w") as file:
    for i in range(120):
        words = ["a warm lovely film", "a dull cold film"][i % 2]
        print(json.dumps({"review": f"{words} {i}", "label": ["good", "bad"][i % 2], "client": i % 4}), file=file)
np.savez("tiles.npz", x=rng.integers(0, 255, (80, 16, 16, 3)).astype(np.uint8), y=np.arange(80) % 2)
"""
BY_CLIENT = """
import numpy as np, torch, flrce
rng = np.random.default_rng(0)
x = rng.normal(size=(90, 4)).astype(np.float32)
sites = {f"site {k}": (x[30 * k : 30 * k + 30], x[30 * k : 30 * k + 30, 0] > 0) for k in range(3)}
def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets)
def share_right(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
flrce.run(flrce.Experiment(rounds=2), "runs/sites", data=sites, objective=loss, metrics=share_right)
result = flrce.run(flrce.Experiment(rounds=2), "runs/plain", data=sites, model=torch.nn.Linear(4, 2))
print(flrce.load("runs/plain", model=torch.nn.Linear(4, 2)).predict(x[:3]).values)
"""


def test_data_of_ones_own_from_file_to_prediction(venv, folder):
    flrce, python = venv / "bin" / "flrce", venv / "bin" / "python"
    made = call([python, "-c", OWN_DATA], folder)
    assert made.returncode == 0, made.stderr
    for name, settings in {
        "houses.csv": ["data.target=price", "data.standardise=true", "clients=5"],
        "reviews.jsonl": [],
        "tiles.npz": ["clients=4"],
    }.items():
        sets = [
            part for key in [f"data.path={name}", "rounds=3", *settings] for part in ("--set", key)
        ]
        grouped = ["--set", "data.group=client"] if name == "reviews.jsonl" else []
        for command in (
            ["data", "info", *sets, *grouped],
            ["run", *sets, *grouped, "--out", f"runs/{name}"],
            ["predict", f"runs/{name}", name, "--out", f"{name}.predictions.csv"],
            ["export", f"runs/{name}", "--out", f"{name}.pt2"],
            ["report", f"runs/{name}", "--out", f"{name}.html"],
        ):
            done = call([flrce, *command], folder)
            assert done.returncode == 0, done.stderr
    (folder / "new.txt").write_text("a lovely film\na cold film\n")
    told = call([flrce, "predict", "runs/reviews.jsonl", "new.txt"], folder)
    assert told.stdout.index("good") < told.stdout.rindex("bad"), told.stdout + told.stderr
    done = call([python, "-c", BY_CLIENT], folder)
    assert done.returncode == 0, done.stderr


def test_a_network_beside_the_experiment(venv, folder):
    """`module:Class` finds a file of the working directory."""
    (folder / "mine.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    ran = call(
        [venv / "bin" / "flrce", "run", *SMALL, "--set", "model.name=mine:Net", "--out", "a"],
        folder,
    )
    assert ran.returncode == 0, ran.stderr


def test_without_a_compiler(venv, folder):
    ran = call(
        [venv / "bin" / "flrce", "run", *SMALL, "--out", "a"], folder, PATH=str(venv / "bin")
    )
    assert ran.returncode == 0, ran.stderr
    assert "no C compiler" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert (folder / "a" / "summary.json").exists()


def readable_python(version: tuple[int, int], prefix: list[str]) -> str | None:
    """An interpreter of this version that the other user may start."""
    names = [
        sys.executable,
        *(shutil.which(f"python{v}", path="/usr/bin:/usr/local/bin") for v in ("3.11", "3")),
    ]
    for name in filter(None, names):
        asked = subprocess.run(
            [*prefix, name, "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            cwd="/",
        )
        if asked.stdout.split() == [str(v) for v in version]:
            return str(name)
    return None


def test_an_ordinary_user_with_a_read_only_home(venv, folder):
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root, and no setpriv to become somebody else")
    prefix = (
        ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        if os.geteuid() == 0
        else []
    )
    python = readable_python(sys.version_info[:2], prefix)
    if python is None:
        pytest.skip("no interpreter of this version that an ordinary user may start")
    site = next((venv / "lib").glob("python*/site-packages"))
    if subprocess.run(
        [*prefix, "test", "-r", site.parents[3] / "lent" / "torch" / "__init__.py"]
    ).returncode:
        pytest.skip("this environment's torch is for its owner's eyes only")
    home, work = folder / "home", folder / "work"
    home.mkdir(mode=0o555)
    work.mkdir()
    work.chmod(0o777)
    paths = os.pathsep.join([str(site), str(site.parents[3] / "lent")])
    flrce: list[str | Path] = [*prefix, python, "-m", "flrce.cli.cli"]
    env = {"HOME": str(home), "PYTHONPATH": paths}
    ran = call([*flrce, "run", *SMALL, "--out", "a"], work, **env)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    assert call([*flrce, "report", "a"], work, **env).returncode == 0
    assert list(home.iterdir()) == []
    said = call([*flrce, "run", *SMALL, "--out", str(home / "runs")], work, **env)
    assert said.returncode == 2, said.stderr
    assert said.stderr.splitlines()[-1].startswith("error: ")


def test_the_client_wheel_alone(place):
    """Without torch, flrce or a package index: numpy is all that it needs, and its codes work."""
    wheels = place / "client"
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", wheels]
    built = subprocess.run([*build, ROOT / "client"], capture_output=True, text=True)
    if built.returncode and "No matching distribution" in built.stderr:
        pytest.skip("no package index within reach")
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.glob("flrce_client-*.whl")
    bare = place / "bare"
    subprocess.run([sys.executable, "-m", "venv", bare], check=True)
    pip = [bare / "bin" / "python", "-m", "pip", "install", "--quiet", wheel]
    done = subprocess.run(pip, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = call([bare / "bin" / "python", "-m", "pip", "list", "--format=freeze"], place).stdout
    assert {line.split("==")[0].lower() for line in names.split()} <= {
        *("flrce-client", "numpy", "pip", "setuptools", "wheel")
    }
    code = """
import numpy as np
from flrce_client.codecs import CODECS
from flrce_client.streams import make_stream
u, layout = np.arange(100, dtype=np.float32), (("w", 100),)
for name, make in CODECS.items():
    code = make()
    buffers, _ = code.encode(u, layout, make_stream(0, "encode"), {})
    assert code.decode(buffers, layout, make_stream(0, "encode")).shape == (100,), name
print(len(CODECS), "codes")
"""
    ran = call([bare / "bin" / "python", "-c", code], place)
    assert ran.stdout.strip() == "14 codes", ran.stderr
