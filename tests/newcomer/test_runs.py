"""A run as somebody new meets it: kept unless told otherwise, listed, gone on with, extended,
interrupted.
"""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flrce.cli import run_folders
from flrce.cli.cli import main
from flrce.cli.run import format_entry
from flrce.cli.verify import compare_run_files
from flrce.config.experiment import Experiment
from flrce.data.sources import load_source
from flrce.errors import BadInput
from flrce.simulation import runs

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
FLRCE = [sys.executable, "-m", "flrce.cli.cli"]
SMALL = ("rounds=3", "clients=8", "per_round=3", "engine.workers=1", "train.epochs=1")


def sets(*more: str) -> list[str]:
    return [word for each in (*SMALL, *more) for word in ("--set", each)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_kept_and_listed(here, capsys):
    assert main(["runs"]) == 0
    assert "no runs" in capsys.readouterr().out
    assert main(["run", *sets()]) == 0
    assert main(["run", *sets("recipe.name=fedavg"), "--seeds", "0-1"]) == 0
    told = capsys.readouterr().out
    kept = sorted((here / "runs").iterdir())
    assert [folder.name.rsplit("-", 4)[0] for folder in kept] == ["fedavg", "frugal"]
    assert all(f"run directory: runs/{folder.name}" in told for folder in kept)
    assert main(["runs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == 3
    assert {row["state"] for row in listed} == {"finished"}
    assert {row["rounds"] for row in listed} == {"3 of 3"}
    assert main(["runs", "nowhere"]) == 2


def test_no_save_keeps_nothing_and_says_so(here, capsys):
    assert main(["run", *sets(), "--no-save"]) == 0
    assert "nothing was kept" in capsys.readouterr().out
    assert not (here / "runs").exists()
    assert main(["run", *sets(), "--no-save", "--out", "a"]) == 2
    assert main(["run", *sets(), "--no-save", "--seeds", "0-1"]) == 2


def test_two_runs_in_one_second(here):
    from datetime import datetime

    now = datetime(2026, 1, 2, 3, 4, 5)
    assert [run_folders.create_run_folder("a", now=now).name for _ in range(2)] == [
        "a-2026-01-02-030405",
        "a-2026-01-02-030405-2",
    ]


@pytest.mark.parametrize("recipe", ["flrce", "fedavg", "fedcomgate", "flrce-topk"])
def test_an_extended_run_is_the_longer_one(tmp_path, recipe):
    """Three rounds, then five by raising `rounds`: the same bits as five in one go."""
    short = Experiment.load(None, [*SMALL, f"recipe.name={recipe}"])
    longer = short.model_copy(update={"rounds": 5})
    runs.run(short, tmp_path / "a")
    runs.run(longer, tmp_path / "a", resume=True)
    runs.run(longer, tmp_path / "b")
    assert list(compare_run_files(tmp_path / "a", tmp_path / "b")) == []
    with pytest.raises(BadInput, match=r"rounds = 2: .* already has 5"):
        runs.run(short.model_copy(update={"rounds": 2}), tmp_path / "a", resume=True)


def test_a_run_of_version_0_1_goes_on(tmp_path, monkeypatch):
    """Its checkpoints carry another fingerprint."""
    from flrce.storage import ledger, settings

    short = Experiment.load(None, [*SMALL, "recipe.name=fedavg"])
    with monkeypatch.context() as old:
        old.setattr(ledger, "fingerprint_experiment", settings.fingerprint_experiment_text)
        runs.run(short, tmp_path / "a")
    longer = short.model_copy(update={"rounds": 5})
    assert runs.run(longer, tmp_path / "a", resume=True).summary["rounds"] == 5
    assert runs.run(longer, tmp_path / "a", resume=True).summary["rounds"] == 5


def test_resume_needs_no_file(here, capsys):
    assert main(["run", *sets("recipe.name=fedprox"), "--out", "a"]) == 0
    assert main(["run", "--out", "a", "--resume", "--set", "rounds=4"]) == 0
    assert main(["run", "--out", "a", "--resume"]) == 0
    [resumed] = run_folders.find_runs(Path("a"))
    assert resumed["t"] == 4
    assert resumed["recipe"] == "fedprox"
    assert main(["run", *sets(), "--seeds", "3,5", "--out", "b"]) == 0
    assert main(["run", "--out", "b", "--resume", "--set", "rounds=4"]) == 0
    assert [run["t"] for run in run_folders.find_runs(Path("b"))] == [4, 4]
    capsys.readouterr()
    assert main(["run", "--resume"]) == 2
    assert "flrce runs" in capsys.readouterr().err
    assert main(["run", "--resume", "--out", "c"]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_seeds_that_were_not_begun_are_gone_on_with_too(here):
    assert main(["run", *sets(), "--seeds", "3,5", "--out", "b"]) == 0
    shutil.rmtree("b/seed-5")  # as if Ctrl-C had come while seed 3 was trained
    assert main(["run", "--out", "b", "--resume"]) == 0
    assert [run["seed"] for run in run_folders.find_runs(Path("b"))] == [3, 5]


def last_round(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if " round " in line][-1]


def test_what_was_spent_before_a_resume_is_counted(here, capsys):
    assert main(["run", *sets(), "--out", "a"]) == 0
    assert main(["run", *sets("rounds=4"), "--out", "b"]) == 0
    straight = last_round(capsys)
    assert main(["run", "--out", "a", "--resume", "--set", "rounds=4"]) == 0
    resumed = last_round(capsys)
    assert "round   4/4" in straight
    assert resumed == straight  # at its end a run has no seconds left


def test_seeds_and_recipes_share_one_reading(here, monkeypatch):
    from flrce.config import sections

    read = []
    monkeypatch.setattr(
        sections,
        "load_source",
        lambda *given, **how: read.append(given) or load_source(*given, **how),
    )
    assert (
        main(
            [
                "compare",
                *sets("rounds=1"),
                "--recipes",
                "fedavg,flrce",
                "--seeds",
                "0-1",
                "--out",
                "c",
            ]
        )
        == 0
    )
    assert len(read) == 1


def test_a_note_of_every_seed_is_told_once(here, capsys):
    Path("far.csv").write_text("a,y\n" + "".join(f"{500 + i % 7},{i % 2}\n" for i in range(80)))
    more = sets("data.path=far.csv", "data.partition=iid", "clients=3")
    more += sets("recipe.preset=headway")[-2:]
    assert main(["run", *more, "--seeds", "0-1", "--out", "d"]) == 0
    said = capsys.readouterr().err
    assert said.count("data.standardise = true helps") == 1
    assert said.count("cannot end a run of 3") == 1


def test_a_stopped_run_says_that_it_is_over(here, capsys):
    assert main(["run", *sets("rounds=9", "stop.rounds=2"), "--out", "a"]) == 0
    capsys.readouterr()
    assert main(["run", "--out", "a", "--resume", "--set", "rounds=20"]) == 0
    assert "note: the run in a is over" in capsys.readouterr().err


def test_ctrl_c_says_what_is_kept(here):
    command = [*FLRCE, "run", *sets("rounds=4000")]
    for more, kept in (
        (["--out", "a"], "flrce run --out a --resume"),
        (["--no-save"], "nothing was kept"),
    ):
        process = subprocess.Popen(
            [*command, *more],
            env=ENV,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        for _ in range(2):
            process.stderr.readline()
        process.send_signal(signal.SIGINT)
        told = process.stderr.read().splitlines()[-1]
        assert process.wait() == 130
        assert told.startswith("interrupted after round ")
        assert kept in told


def on_a_terminal(command: list[str], until: bytes, then: int | None = None) -> tuple[int, str]:
    """A command on a terminal of its own; once it shows `until`, a signal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command,
        env={
            **ENV,
            "TERM": "xterm",
            "COLUMNS": "100",
            "FLRCE_CACHE": str(Path("cache").absolute()),
        },
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(slave)
    shown, ended = b"", time.monotonic() + 120
    while time.monotonic() < ended:
        try:
            part = os.read(master, 4096)
        except OSError:
            break
        shown += part
        if until in shown and then is not None:
            process.send_signal(then)
            then = None
        if not part:
            break
    os.close(master)
    return process.wait(), shown.decode(errors="replace")


def test_the_start_is_shown_and_can_be_left(here):
    """Before round 1: what is being prepared; Ctrl-C there is one line."""
    command = [*FLRCE, "run", *sets("model.name=logistic")]  # its kernels compile quickly
    code, shown = on_a_terminal(
        command, b"compiling", signal.SIGINT
    )  # preparing samples takes no time to be seen
    assert code in (
        130,
        -signal.SIGINT,
    )  # CPython may end by the signal itself; a shell says 130 of both
    assert "interrupted before the first round" in shown
    assert "Traceback" not in shown
    code, shown = on_a_terminal(command, b"never")
    assert code == 0, shown
    assert "compiling kernels" in shown


def test_few_seeds_are_shown_as_what_they_are():
    entry = {"mean": 93.5, "half": 82.6, "n": 2, "low": 87.0, "high": 100.0}
    assert format_entry(entry, 0) == "87 to 100"
    assert format_entry(entry | {"low": 100.0, "mean": 100.0, "half": 0.0}, 0) == "100"
    assert format_entry(entry | {"n": 3, "half": 1.5}, 1) == "93.5 ± 1.5"


def test_a_folder_that_cannot_be_made_is_told_of_without_a_round_to_keep(here, capsys):
    (here / "file").write_text("in the way")
    assert main(["run", *sets(), "--out", "file"]) == 2
    assert capsys.readouterr().err == "error: --out file is a file; name a folder for the run\n"
    assert main(["run", *sets(), "--out", "file/below"]) == 2
    told = capsys.readouterr().err
    assert "cannot be written" in told
    assert told.endswith("; name another folder, or make room\n")


def test_a_stop_of_ones_own_says_why_or_nothing(here, capsys):
    (here / "mystops.py").write_text(
        "from dataclasses import dataclass\n\nfrom flrce import StopRule\n\n\n"
        "@dataclass(frozen=True)\nclass Late(StopRule):\n    says: str\n\n    def __call__(self, history):\n        return {'nothing': None, 'bool':"
        " False}.get(self.says, self.says)\n"
    )
    stop = '{{piece="mystops:Late", says="{}"}}'
    sys.path.insert(0, str(here))
    try:
        assert main(["run", *sets("recipe.stop=" + stop.format("nothing")), "--out", "a"]) == 0
        assert len((here / "a" / "rounds.jsonl").read_text().splitlines()) == 3
        assert main(["run", *sets("recipe.stop=" + stop.format("enough")), "--out", "b"]) == 0
        assert len((here / "b" / "rounds.jsonl").read_text().splitlines()) == 1
        assert main(["run", *sets("recipe.stop=" + stop.format("bool")), "--no-save"]) == 2
    finally:
        sys.path.remove(str(here))
    assert 'Late returned False; return why the run ends as text, or ""' in capsys.readouterr().err


def test_an_experiment_alone_tells_of_its_data(here, capsys):
    (here / "mine.csv").write_text("a,y\n" + "1,0\n2,1\n" * 20)
    (here / "mine.toml").write_text(
        'clients = 2\nper_round = 2\n[data]\npath = "mine.csv"\npartition = "iid"\n'
    )
    assert main(["data", "info", "mine.toml", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(told["train"]) + sum(told["held"]) == 40
    assert main(["data", "info", "digits", "mine.toml"]) == 2
    assert "digits and data.path = 'mine.csv': leave one of them out" in capsys.readouterr().err
    assert main(["data", "info", "missing.toml"]) == 2
    assert "missing.toml" in capsys.readouterr().err


def test_a_file_is_no_name_of_data(here, capsys):
    (here / "mine.csv").write_text("a,y\n1,0\n")
    assert main(["data", "info", "mine.csv"]) == 2
    assert "a file goes by --set data.path=mine.csv" in capsys.readouterr().err
