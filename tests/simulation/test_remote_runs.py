"""Runs made elsewhere: the same folders and answers as here."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

from flrce.cli import cli, options
from flrce.config.experiment import Experiment
from flrce.errors import BadInput
from flrce.simulation import executors

SMALL = [
    "--set",
    "rounds=3",
    "--set",
    "clients=4",
    "--set",
    "per_round=2",
    "--set",
    "train.epochs=1",
]


def posted(calls, folder):
    """As other machines do it: what is sent and what comes back is bytes, and the last comes
    first.
    """
    for i, call in reversed(list(enumerate(pickle.loads(pickle.dumps(list(calls)))))):
        try:
            found = pickle.loads(pickle.dumps(executors.run_call(call).value))
        except BadInput as why:
            found = executors.LostCall(str(why))
        yield i, found


def rounds_of(folder: Path) -> dict[str, bytes]:
    names = ("rounds.jsonl", "clients.jsonl", "final.json")
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for name in names
        for p in sorted(folder.rglob(name))
    }


def test_compare_elsewhere_is_compare(tmp_path, capsys):
    pytest.importorskip("submitit")
    asked = ["compare", *SMALL, "--recipes", "fedavg,flrce", "--seeds", "0", "--json"]
    told = {}
    for where in ("here", "processes,timeout_min=5"):
        out = tmp_path / where.partition(",")[0]
        assert cli.main([*asked, "--out", str(out), "--on", where]) == 0
        told[where] = json.loads(capsys.readouterr().out)
    near, far = told.values()
    assert near == far
    assert rounds_of(tmp_path / "here") == rounds_of(tmp_path / "processes")
    assert len(rounds_of(tmp_path / "here")) == 2 * 3
    again = [*asked, "--out", str(tmp_path / "here"), "--on", "processes"]
    assert cli.main(again) == 2  # without --resume
    assert "holds a run already" in capsys.readouterr().err


def test_what_fails_elsewhere_is_told_and_the_others_are_kept(tmp_path):
    good = Experiment(rounds=1, clients=4, per_round=2, train={"epochs": 1})
    bad = good.model_copy(update={"clients": 5000})
    jobs = [(bad, tmp_path / "bad"), (good, tmp_path / "good")]
    ended = []
    with pytest.raises(BadInput, match=r"1 of 2 runs failed; first: .*bad: clients = 5000"):
        ended.extend(i for i, _ in executors.run_experiments_remotely(posted, jobs, tmp_path))
    assert (tmp_path / "good" / "rounds.jsonl").exists()
    with pytest.raises(BadInput, match="on a disk that all machines see"):
        executors.run_in_shared_folder(good, str(tmp_path / "x"), str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("where", ["moon", "slurm,partition", "here,num_cpus=2", "ray,=1"])
def test_bad_places_are_one_line(where, tmp_path, capsys):
    assert cli.main(["compare", *SMALL, "--out", str(tmp_path / "x"), "--on", where]) == 2
    told = capsys.readouterr().err
    assert "--on" in told
    assert not list(tmp_path.rglob("rounds.jsonl"))


@pytest.mark.parametrize(("where", "said"), [("slurm", "srun"), ("processes,nosuch=4", "nosuch")])
def test_places_that_cannot_be_used_are_one_line(where, said, tmp_path, capsys):
    pytest.importorskip("submitit")
    if said == "srun" and shutil.which("srun"):
        pytest.skip("this is a cluster")
    assert cli.main(["compare", *SMALL, "--out", str(tmp_path / "x"), "--on", where]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_settings_of_a_place():
    assert options.parse_on_option("ray,num_cpus=4") == ("ray", {"num_cpus": 4})
    assert options.parse_on_option("here") == ("here", {})
