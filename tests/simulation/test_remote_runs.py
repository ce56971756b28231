"""Runs made elsewhere: the same folders and answers as here."""

import json
import os
import pickle
import shutil
import time
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
    assert "already has a run" in capsys.readouterr().err


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


def note_interval(folder: str, number: int) -> int:
    """When a call ran, for whoever counts how many ran at once."""
    began = time.time()
    time.sleep(0.3)
    Path(folder, f"{number}.json").write_text(json.dumps([began, time.time(), os.getpid()]))
    return number


def die_once(folder: str, number: int) -> int:
    """Call 1 kills its process the first time."""
    mark = Path(folder, "died")
    if number == 1 and not mark.exists():
        mark.write_text("")
        os._exit(9)
    return number


@pytest.fixture
def workers_see_this_file(monkeypatch):
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{path}")


def make_calls(function, folder: Path, count: int) -> list[executors.RemoteCall]:
    return [executors.RemoteCall(function, (str(folder), i)) for i in range(count)]


@pytest.mark.usefixtures("workers_see_this_file")
def test_processes_are_no_more_than_allowed_and_take_several_calls(tmp_path):
    send = executors.get_remote_executor("processes", {"parallel": 2, "timeout_min": 5})
    calls = make_calls(note_interval, tmp_path, 13)
    assert dict(send(calls, tmp_path / "work" / "logs")) == {i: i for i in range(13)}
    spans = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    at_once = [sum(a <= began < b for a, b, _ in spans) for began, _, _ in spans]
    assert max(at_once) == 2
    assert len({process for *_, process in spans}) == 2  # each is started once


@pytest.mark.usefixtures("workers_see_this_file")
def test_a_lost_process_is_reported_and_its_call_is_made_again(tmp_path, caplog):
    send = executors.get_remote_executor("processes", {"parallel": 1, "timeout_min": 5})
    calls = make_calls(die_once, tmp_path, 6)
    assert dict(send(calls, tmp_path / "work" / "logs")) == {i: i for i in range(6)}
    lost = [r.message for r in caplog.records if "was lost" in r.message]
    assert len(lost) == 1
    assert "its process ended (9)" in lost[0]
    assert "its call is made again" in lost[0]


def hang(folder: str, number: int) -> int:
    """Call 1 never ends."""
    while number == 1:
        time.sleep(0.1)
    return number


@pytest.mark.usefixtures("workers_see_this_file")
def test_a_call_that_takes_too_long_is_given_up_after_its_retries(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(executors, "MAX_RETRIES", 1)
    send = executors.get_remote_executor("processes", {"parallel": 2, "timeout_min": 0.05})
    found = dict(send(make_calls(hang, tmp_path, 3), tmp_path / "work" / "logs"))
    assert (found[0], found[2]) == (0, 2)
    assert found[1] == executors.LostCall("it took more than 0.05 minutes")
    assert sum("was lost" in r.message for r in caplog.records) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("workers_see_this_file")
def test_slurms_jobs_have_several_calls_and_lost_ones_are_sent_again(tmp_path, monkeypatch, caplog):
    """The jobs of an array, here as submitit's processes: the first call measures the others."""
    pytest.importorskip("submitit")
    monkeypatch.setattr(executors, "_group_calls", count_jobs(executors._group_calls, jobs := []))
    send = executors.JobExecutor({"parallel": 2}, "local")
    folder = tmp_path / "work" / "logs"
    calls = make_calls(die_once, tmp_path, 7)
    assert dict(send(calls, folder)) == {i: i for i in range(7)}
    # six calls of a moment for two jobs at once: three each, with the least time limit
    assert jobs == [((1, 2, 3), 6), ((4, 5, 6), 6)]
    (lost,) = [r.message for r in caplog.records if "was lost" in r.message]
    assert "3 calls are made again" in lost
    # the pilot, two jobs, and the lost one in halves
    assert len(list((folder / "jobs").glob("*_submitted.pkl"))) == 5


def count_jobs(group, jobs):
    def grouped(*asked):
        found = group(*asked)
        jobs.extend((one.numbers, one.minutes) for one in found)
        return found

    return grouped


def test_how_many_calls_a_slurm_job_has():
    """Calls of 50 s: 12 fill 600 s, but 100 calls for 32 jobs at once are 4 a job; 3 x 4 x 50 s are
    10 minutes, and 5 more.
    """
    groups = executors._group_calls(range(100), 32, 50.0)
    assert [len(g.numbers) for g in groups] == [4] * 25
    assert {g.minutes for g in groups} == {15}
    assert [len(g.numbers) for g in executors._group_calls(range(100), 2, 50.0)][:2] == [12, 12]
    halves = groups[0].split_after_loss()
    assert [(g.numbers, g.minutes, g.losses) for g in halves] == [((0, 1), 30, 1), ((2, 3), 30, 1)]


def test_parallel_must_be_a_number_of_jobs():
    with pytest.raises(BadInput, match="at least 1"):
        executors.get_remote_executor("processes", {"parallel": 0})
