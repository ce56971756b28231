"""Where commands write: a file for a folder, a folder for a file, no place at all. One line, before
any work.
"""

import os

import pytest

from flrce.cli.cli import main
from flrce.config.experiment import Experiment
from flrce.simulation import runs
from flrce.storage.disk import write_atomically

SETS = [
    w
    for key in ("rounds=1", "clients=6", "per_round=2", "engine.workers=1")
    for w in ("--set", key)
]
NO_FOLDERS = (
    "taken",
    "taken/below",
    "nowhere",
    "x" * 300,
    f"new/{'x' * 300}",
    "/proc/none/here",
    "/dev/null",
)
NO_FILES = ("folder", "/", "taken/below", "x" * 300, "x" * 252, "/proc/none/here.html")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    runs.run(Experiment(rounds=1, clients=6, per_round=2, engine={"workers": 1}), folder)
    return str(folder)


def folders(run):
    """Commands that write into a folder, which comes last."""
    return [
        ["run", *SETS, "--out"],
        ["compare", *SETS, "--out"],
        ["deploy", "init"],
        ["export", run, "--out"],
    ]


def refused(words, capsys):
    code, told = main(words), capsys.readouterr()
    assert code == 2, words
    assert told.err.startswith("error: "), told.err
    assert told.err.count("\n") == 1, told.err


@pytest.mark.parametrize("i", range(4))
def test_a_folder_that_cannot_be_one(i, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "taken")
    for place in NO_FOLDERS:
        refused([*folders(run)[i], place], capsys)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_file_that_cannot_be_one(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "folder").mkdir()
    for place in NO_FILES:
        refused(["report", run, "--out", place], capsys)
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "--out"],
        ["runs"],
        ["doctor", "--tls"],
        ["run"],
        ["verify"],
        ["data", "prepare", "cifar10", "--from"],
        ["profile", "--model", "mlp", "--out"],
    ],
)
def test_names_that_are_too_long(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused([*words, "x" * 300], capsys)


def test_a_pipe_or_a_device_is_never_replaced(run, tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["report", run, "--out", str(pipe)]) == 2
    assert "is a device or a pipe" in capsys.readouterr().err
    with pytest.raises(OSError, match="device or a pipe"):
        write_atomically(pipe, b"text")
    assert pipe.is_fifo()
