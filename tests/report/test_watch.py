"""Runs under way, watched from outside: files that grow, are cut back or vanish; who holds a
folder.
"""

import io
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from flrce.cli.cli import main
from flrce.cli.watch import build_watch_board, format_energy_spent, format_point_price
from flrce.config.experiment import Experiment
from flrce.core.record import RoundRecord, flatten_record
from flrce.report import live
from flrce.report.live import RecordTail, RunWatcher, find_lock_holder
from flrce.simulation import runs
from flrce.storage.disk import FolderLock
from flrce.storage.read import read_run
from flrce.storage.summary import name_energy_origin
from report_helpers import compared, hostile

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}


def line(t: int, **more) -> bytes:
    return json.dumps(flatten_record(RoundRecord(t, **more))).encode() + b"\n"


def test_a_file_that_grows_is_read_once(tmp_path):
    path = tmp_path / "rounds.jsonl"
    tail = RecordTail(path)
    assert not tail.read_new_lines()  # not there yet
    path.write_bytes(line(1) + line(2)[:20])
    assert tail.read_new_lines()
    assert [r.t for r in tail.records] == [1]
    with path.open("ab") as file:
        file.write(line(2)[20:] + line(3))
    assert tail.read_new_lines()
    assert [r.t for r in tail.records] == [1, 2, 3]
    assert not tail.read_new_lines()


def test_a_file_that_a_resume_cut_back_is_read_anew(tmp_path):
    """Killed after line 3, resumed from round 2, and already longer than before when it is looked
    at again.
    """
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(line(1) + line(2) + line(3, joules=1.0))
    tail = RecordTail(path)
    tail.read_new_lines()
    path.write_bytes(line(1) + line(2) + line(3, joules=2.0) + line(4) + line(5))
    assert tail.read_new_lines()
    assert [(r.t, r.joules) for r in tail.records[2:]] == [(3, 2.0), (4, 0.0), (5, 0.0)]
    path.unlink()
    assert tail.read_new_lines()
    assert tail.records == []


def test_the_price_of_a_point_by_hand():
    # 50 to 54 % in two rounds that cost 6 and 10 J: 16 J for 4 points; the first round's joules
    # bought the 50
    history = [
        RoundRecord(1, accuracy=0.5, joules=99.0),
        RoundRecord(2, accuracy=0.53, joules=6.0, bytes_up=600),
        RoundRecord(3, accuracy=0.54, joules=10.0, bytes_down=200),
    ]
    found = live.compute_recent_price(history, "accuracy")
    assert found["joules"] == pytest.approx(4.0)
    assert found["bytes"] == pytest.approx(200.0)
    assert live.compute_recent_price(history[:1], "accuracy") is None
    assert (
        live.compute_recent_price([*history, RoundRecord(4, accuracy=0.5)], "accuracy")["joules"]
        is None
    )  # nothing was gained
    errors = [
        RoundRecord(1, metric="mae", metrics={"mae": 3.0}, lower=True),
        RoundRecord(2, metric="mae", metrics={"mae": 1.0}, lower=True, joules=5.0),
    ]
    assert live.compute_recent_price(errors, "mae")["joules"] == pytest.approx(
        2.5
    )  # less is better: 2 units for 5 J


def test_the_price_is_of_the_last_ten_evaluations():
    history = [RoundRecord(t, accuracy=0.01 * t, joules=float(t)) for t in range(1, 31)]
    # rounds 21 to 30: 255 J for 10 points
    assert live.compute_recent_price(history, "accuracy")["joules"] == pytest.approx(25.5)


def test_what_is_left_of_a_budget(tmp_path):
    asked = Experiment(
        rounds=4, clients=8, per_round=3, engine={"workers": 1}, stop={"joules": 1e6, "rounds": 3}
    )
    runs.run(asked, tmp_path / "a")
    found = read_run(tmp_path / "a")
    left = {each["name"]: each for each in live.compute_remaining_budgets(found)}
    used = sum(h.joules for h in found.rounds)
    assert left["joules"]["left"] == pytest.approx(1e6 - used)
    assert left["joules"]["lasts"] == int((1e6 - used) / (used / 3))  # three rounds were run
    assert (left["rounds"]["left"], left["rounds"]["lasts"]) == (0.0, 0)


def test_curves_are_the_newest_points():
    records = [RoundRecord(t, accuracy=t / 1e4) for t in range(1, 1001)]
    points = live.list_newest_points(records, lambda h: h.accuracy)
    assert len(points) == live.MAX_CURVE_POINTS
    assert points[-1] == [1000, 0.1]
    assert points[0] == [1001 - live.MAX_CURVE_POINTS, pytest.approx(0.0961)]
    assert live.list_newest_points([], lambda h: h.accuracy) == []


def test_who_holds_a_folder(tmp_path):
    path = tmp_path / "lock"
    assert find_lock_holder(path) == ""
    lock = FolderLock(path)
    assert find_lock_holder(path) == "here"
    lock.close()
    assert find_lock_holder(path) == ""  # this process lives on, but let go
    path.write_text("process 1 on elsewhere\x1b[31m")
    assert find_lock_holder(path) == "elsewhere?[31m"
    path.write_text(f"process 999999999 on {platform.node()}")
    assert find_lock_holder(path) == ""
    path.write_text("rubbish")
    assert find_lock_holder(path) == ""


@pytest.fixture
def going(tmp_path):
    """A run under way in a process of its own."""
    asked = [
        "--set",
        "rounds=4000",
        "--set",
        "clients=8",
        "--set",
        "per_round=3",
        "--set",
        "train.epochs=1",
    ]
    command = [
        sys.executable,
        "-m",
        "flrce.cli.cli",
        "run",
        *asked,
        "--out",
        str(tmp_path / "runs" / "a"),
    ]
    process = subprocess.Popen(
        command, env=ENV, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    yield process, tmp_path / "runs"
    process.kill()
    process.wait()


def until(watcher: RunWatcher, good, seconds: float = 60) -> dict:
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        found = watcher.take_snapshot()
        if found and good(found[0]):
            return found[0]
        time.sleep(0.05)
    raise AssertionError(found)


def test_a_run_is_followed_killed_and_gone_on_with(going):
    process, place = going
    place.mkdir(exist_ok=True)
    watcher = RunWatcher([place])
    seen = until(watcher, lambda v: v["state"] == "running" and v["t"] >= 3)
    more = until(watcher, lambda v: v["t"] > seen["t"] and v["ends"] is not None)
    assert more["ends"] > time.time()  # 4000 rounds are far away
    assert more["round"]["count"] == 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    dead = until(watcher, lambda v: v["state"] == "interrupted")
    assert dead["ends"] is None
    T = dead["t"] + 2
    asked = Experiment.load(place / "a" / "experiment.toml", [f"rounds={T}"])
    runs.run(asked, place / "a", resume=True)
    done = until(watcher, lambda v: v["state"] == "finished")
    assert done["t"] == T
    records = read_run(place / "a").rounds
    assert done["spent"]["joules"] == pytest.approx(sum(h.joules for h in records))
    assert [t for t, _ in done["handed"]] == [h.t for h in records][-live.MAX_CURVE_POINTS :]


def test_runs_that_appear_later_and_go_away(tmp_path):
    watcher = RunWatcher([tmp_path])
    assert watcher.take_snapshot() == []
    asked = Experiment(rounds=1, clients=6, per_round=2, engine={"workers": 1})
    runs.run(asked, tmp_path / "deep" / "seed-0")
    assert [v["folder"] for v in watcher.take_snapshot()] == [str(tmp_path / "deep" / "seed-0")]
    (tmp_path / "deep").rename(tmp_path / "moved")
    assert [v["folder"] for v in watcher.take_snapshot()] == [str(tmp_path / "moved" / "seed-0")]


def test_damage_is_one_run_s_and_passes(tmp_path):
    asked = Experiment(rounds=1, clients=6, per_round=2, engine={"workers": 1})
    runs.run(asked, tmp_path / "a")
    rounds = tmp_path / "a" / "rounds.jsonl"
    whole = rounds.read_bytes()
    watcher = RunWatcher([tmp_path])
    for damage in (
        b"{]\n",
        b"[]\n",
        b'{"t": "x"}\n',
        b'{"t": 1, "joules": 1e999}\n',
        b"\xff\xfe\n",
    ):
        rounds.write_bytes(damage)
        assert watcher.take_snapshot()[0]["state"].startswith("unreadable")
    rounds.write_bytes(whole)
    assert watcher.take_snapshot()[0]["state"] == "finished"


def test_the_terminal_shows_every_run_and_obeys_no_name():
    console = Console(width=220, file=io.StringIO(), force_terminal=False)
    console.print(build_watch_board(RunWatcher([compared()]).take_snapshot()))
    told = console.file.getvalue()
    assert all(
        name in told
        for name in ("fedavg", "flrce-no-stop", "stopped early", "finished", "16 of 16")
    )
    console = Console(width=220, file=io.StringIO(), force_terminal=False)
    console.print(build_watch_board(RunWatcher([hostile()]).take_snapshot()))
    assert "\x1b" not in console.file.getvalue()


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", "--once"]) == 2
    assert "runs is no folder" in capsys.readouterr().err
    Path("runs").mkdir()
    assert main(["watch", "--once"]) == 0
    assert "no runs yet" in capsys.readouterr().out
    assert main(["watch", str(compared()), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 6
    assert {v["recipe"] for v in found} == {"fedavg", "flrce", "flrce-no-stop"}


def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path, capsys):
    folder = tmp_path / "later"
    made = threading.Timer(0.3, folder.mkdir)
    made.start()
    assert main(["watch", str(folder)]) == 0
    made.join()
    told = capsys.readouterr()
    assert f"waiting for {folder}" in told.err
    assert "no runs yet" in told.out


def test_unknown_energy_is_not_shown_as_zero():
    run = {"energy": "unknown", "spent": {"joules": 0.0}, "price": {"joules": 0.0}}
    assert format_energy_spent(run) == "unknown"
    assert format_point_price(run) == "--"
    assert format_energy_spent({**run, "energy": "modelled"}) == "0 J"
    trained = RoundRecord(1, replied=("a",))
    assert name_energy_origin((trained,)) == "unknown"
    assert name_energy_origin((trained, RoundRecord(2, joules=1.0))) == "modelled"
    assert name_energy_origin((RoundRecord(1, replied=("a",), measured=True),)) == "measured"
    assert name_energy_origin(()) == "modelled"  # nothing was trained yet


def test_flower_s_folders_are_watched_too(tmp_path):
    pytest.importorskip("flwr")
    asked = Experiment(rounds=2, clients=4, per_round=2, engine={"name": "flower"})
    runs.run(asked, tmp_path / "a")
    (seen,) = RunWatcher([tmp_path]).take_snapshot()
    assert (seen["state"], seen["t"]) == ("finished", 2)
    assert seen["value"] == read_run(tmp_path / "a").summary["value"]
