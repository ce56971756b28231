"""Rows 3, 4, 5 and 25: signals, workers that die, fleets that vanish, clocks that jump."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from harness import DATA, contents, experiment, go, in_child, places, same

import flrce
from flrce.cli import cli
from flrce.core.types import Reply, Task
from flrce.simulation import runs
from flrce.simulation.simulator import Simulator
from flrce.simulation.workers import PooledWorkers

FLRCE = [sys.executable, "-m", "flrce.cli.cli"]
LONG = experiment(rounds=60)  # takes seconds, so that a signal finds it at work


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    go(folder / "short")
    go(folder / "long", what=LONG)
    return contents(folder / "short"), contents(folder / "long")


def _heed_interrupts() -> None:
    """A shell's background jobs ignore Ctrl-C and hand that down to their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(
    folder: Path, file: Path, more: dict[str, str] | None = None, lines: int = 2
) -> subprocess.Popen[str]:
    """A run from the command line that has committed some rounds."""
    file.write_text(LONG.to_toml())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(more or {})}
    process = subprocess.Popen(
        [*FLRCE, "run", str(file), "--out", str(folder)],
        env=environment,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=_heed_interrupts,
    )
    ledger, deadline = folder / "rounds.jsonl", time.monotonic() + 120
    while not ledger.exists() or ledger.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


@pytest.mark.row(3, "SIGTERM, Ctrl-C", "summary written, exit 143/130, then BIT")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals(reference, tmp_path, sent, code, seen):
    process = started(tmp_path / "run", tmp_path / "long.toml")
    process.send_signal(sent)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert time.monotonic() - began < 30  # most of it the interpreter taking torch apart
    assert re.search(
        r"after round \d+ of 60; go on with: flrce run --out .* --resume$", errors.strip()
    )
    done = json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"]
    assert 1 <= done < LONG.rounds
    go(tmp_path / "run", True, LONG)
    same(tmp_path / "run", reference[1])
    seen(f"exit {code} after {done} rounds, then BIT")


@pytest.mark.row(3, "SIGTERM at journal steps", "summary of the last commit, exit 143, then BIT")
def test_terminated_between_steps(reference, tmp_path, seen):
    """Every fifth step, and all around the commit; the files handed back belong to the round that
    is committed.
    """
    (tmp_path / "short.toml").write_text(experiment().to_toml())

    def command(folder, *more):
        code = cli.main(["run", str(tmp_path / "short.toml"), "--out", str(folder), *more])
        os._exit(code)

    record = tmp_path / "steps.txt"
    assert in_child(lambda: command(tmp_path / "once"), f"record:{record}") == 0
    steps = [s for i, s in enumerate(places(record)) if i % 5 == 0 or s.startswith("commit")]
    for step in steps:
        folder = tmp_path / step.replace(":", "-")
        assert in_child(lambda f=folder: command(f), f"{step}:SIGTERM", tmp_path / "log") == 143, (
            step
        )
        if (folder / "summary.json").exists():
            lines = (folder / "rounds.jsonl").read_bytes().splitlines()
            assert json.loads((folder / "summary.json").read_text())["rounds"] in (
                len(lines),
                len(lines) - 1,
            )
        go(folder, resume=True)
        same(folder, reference[0])
    seen(f"{len(steps)} steps, all exit 143, then BIT")


@pytest.fixture
def deadly(monkeypatch, tmp_path, reference):
    """Makes workers kill themselves by their own pid when they train the victim in round 2, as
    often as told.
    """
    victim, count, work = (
        json.loads(reference[0]["rounds.jsonl"].splitlines()[1])["chosen"][1],
        tmp_path / "count",
        [],
    )

    def times(number):
        def job(self, what, *rest):
            task = next((each for each in rest if isinstance(each, Task)), None)
            if what == "train" and (task.client, task.t) == (victim, 2):
                with open(count, "a") as f:
                    f.write("x")
                if count.stat().st_size <= number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return work[0](self, what, *rest)

        work.append(PooledWorkers._run_job)
        monkeypatch.setattr(PooledWorkers, "_run_job", job)
        return victim, count

    return times


@pytest.mark.row(
    4, "kill -9 a client's worker while it trains, once", "retried on a fresh worker, BIT"
)
def test_a_worker_dies_once(reference, tmp_path, deadly):
    _, count = deadly(1)
    go(tmp_path / "run")
    assert count.read_text() == "xx"
    same(tmp_path / "run", reference[0])


@pytest.mark.row(4, "the same, twice", "SKIP with the reason; selectable again")
def test_a_worker_dies_twice(tmp_path, deadly, seen):
    victim, _ = deadly(2)
    result = go(tmp_path / "run", what=experiment(rounds=20))
    second = result.history[1]
    assert second.rejected == {victim: "its worker died twice (exit code -9)"}
    assert second.outcome == "committed"
    assert second.bytes_wasted > 0
    assert any(victim in h.replied for h in result.history[2:])
    seen(second.rejected[victim])


@pytest.mark.row(
    4,
    "kill -9 a worker while it evaluates, twice or three times",
    "BIT; exit 130, one line, then BIT",
)
@pytest.mark.parametrize(("times", "code"), [(2, 0), (3, 130)])
def test_a_worker_dies_while_it_judges(reference, tmp_path, monkeypatch, capsys, times, code, seen):
    """A round judges two models, the last and the mean of the tail: its third job is the second
    round's first.
    """
    file, folder, jobs, work = (
        tmp_path / "short.toml",
        tmp_path / "run",
        tmp_path / "jobs",
        PooledWorkers._run_job,
    )
    file.write_text(experiment().to_toml())

    def job(self, what, *rest):
        if what != "train":
            with open(jobs, "a") as f:
                f.write("x")
            if 3 <= jobs.stat().st_size < 3 + times:
                os.kill(os.getpid(), signal.SIGKILL)
        return work(self, what, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(PooledWorkers, "_run_job", job)
        assert cli.main(["run", str(file), "--out", str(folder)]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    if code:
        why = "evaluation: its worker died 3 times (exit code -9); what is committed is kept"
        assert len(lines) == 2  # the first round's progress, and
        assert lines[1] == f"stopped: {why}, go on with --resume"
        assert json.loads((folder / "summary.json").read_text())["rounds"] == 1
        assert cli.main(["run", str(file), "--out", str(folder), "--resume"]) == 0
    same(folder, reference[0])
    seen(f"{times} deaths: exit {code}, then BIT")


@pytest.mark.row(4, "workers killed by pid at any moment", "BIT")
def test_workers_killed_from_outside(reference, tmp_path, monkeypatch, seen):
    """A few milliseconds into every tenth round; never the same job twice."""
    engines, killed = [], []

    class Watched(Simulator):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            engines.append(self)

    def kill():
        killed.append(engines[-1].workers.workers[0][0].pid)
        os.kill(killed[-1], signal.SIGKILL)

    def watch(done):
        if done.record.t % 10 == 5:
            timer = threading.Timer(0.003 * (done.record.t // 10), kill)
            timer.start()
            timers.append(timer)

    timers: list[threading.Timer] = []
    monkeypatch.setattr("flrce.simulation.build.Simulator", Watched)
    runs.run(LONG, tmp_path / "run", data=DATA, watch=watch)
    for timer in timers:
        timer.join()
    assert len(set(killed)) == 6
    same(tmp_path / "run", reference[1])
    seen(f"{len(killed)} kills, BIT")


@pytest.mark.row(5, "all clients die, from the command line", "3 ABANDONED, exit 130, resumable")
def test_everyone_dies(tmp_path, monkeypatch, capsys, seen):
    class Dying(Simulator):
        def train(self, pending, client_states, keep=None):
            if pending[0].task.t < 3:
                return super().train(pending, client_states)
            return [Reply(one.task.client, one.task.t, error="it died") for one in pending]

    file, folder = tmp_path / "long.toml", tmp_path / "run"
    file.write_text(experiment(rounds=6).to_toml())
    with monkeypatch.context() as patch:
        patch.setattr("flrce.simulation.build.Simulator", Dying)
        assert cli.main(["run", str(file), "--out", str(folder)]) == 130
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("stopped: abandoned 3 times in a row")
    assert line.endswith(f"go on with: flrce run --out {folder} --resume")
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 2
    assert cli.main(["run", str(file), "--out", str(folder), "--resume"]) == 0
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 6
    seen("exit 130, then completed")


def faketime() -> str:
    found = [
        *Path(sys.prefix).rglob("*faketime*.so*"),
        *Path("/usr/lib").glob("*/faketime/libfaketime.so.1"),
    ]
    if not found:
        pytest.skip("libfaketime is not installed")
    return str(found[0])


@pytest.mark.row(25, "clock stepped by an hour, both ways, during a run", "no effect, BIT")
def test_clock_steps(reference, tmp_path, seen):
    stamp = tmp_path / "now"
    stamp.write_text("+0")
    fake = {
        "LD_PRELOAD": faketime(),
        "FAKETIME_TIMESTAMP_FILE": str(stamp),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    shown = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"],
        env={**os.environ, **fake, "FAKETIME": "+3600"},
        text=True,
        capture_output=True,
    )
    process = started(tmp_path / "run", tmp_path / "long.toml", fake)
    stamp.write_text("+3600")
    time.sleep(0.2)
    stamp.write_text("-3600")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    same(tmp_path / "run", reference[1])
    seen(f"BIT; the child's clock read {shown.stdout.strip()[:10]}")


@pytest.mark.row(25, "which clock the source asks", "only the monotonic one")
def test_only_the_monotonic_clock():
    wall = []
    for path in Path(flrce.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if name in (
                "time.time",
                "time.time_ns",
                "datetime.now",
                "datetime.utcnow",
                "datetime.datetime.now",
            ):
                wall.append(f"{path.name}: {name}")
    assert not [
        w
        for w in wall
        if not w.startswith(("doctor.py", "run_folders.py", "live.py", "deploy_machines.py"))
    ]  # shown to people or written into certificates, decides nothing
