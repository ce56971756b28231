"""A long Flower run in one process whose server is killed (SIGKILL) in every third segment.

    python benchmarks/soak.py --flower 500

A server process trains plain clients on the in-process grid and logs each committed round. In every
third segment of ten rounds it is killed at a random moment, then started again with the same state
folder. Nothing that was logged as committed may be lost: the lines of the ledger stay, no such
round is trained again, and costs and final model equal those of a run that nobody killed. That run
also shows whether resident memory grows.
"""

import json
import logging
import os
import resource
import shutil
import signal
import tempfile
import time
import traceback
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flrce.flower import LocalGrid, RecipeStrategy, introduce
from flrce.methods.catalogue import recipes
from flrce.rng import make_stream

FLOATS = 4_000
NODES, PER_ROUND = 12, 4
SEGMENT_ROUNDS, KILL_EVERY = 10, 3
POLL_SECONDS, STALL_SECONDS = 0.002, 120.0
COSTS = ("bytes_up", "bytes_down", "bytes_evaluation", "bytes_wasted", "joules")


@dataclass(frozen=True)
class SoakResult:
    """What a soak showed."""

    rounds: int
    kills: int
    logged: int  # commits in the log of the killed run
    problems: tuple[str, ...]
    slope: float  # bytes of resident memory a round, undisturbed, after the first quarter
    resident: tuple[float, float]  # bytes, after a quarter and at the end
    seconds: float


def make_app() -> ClientApp:
    """Plain clients that draw their updates and report joules."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        t = int(message.content["config"]["server-round"])
        w = message.content["arrays"]["w"].numpy()
        drawn = make_stream(0, "soak update", t, str(client)).normal(0, 0.1, w.shape)
        made = (0.9 * w + drawn).astype(np.float32)
        metrics = {"num-examples": 10 + client, "train_loss": 1 / t, "joules": 1e-6 * (1 + client)}
        content = {"arrays": ArrayRecord({"w": Array(made)}), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        gap = float(np.abs(message.content["arrays"]["w"].numpy()).mean())
        metrics = {"num-examples": 10, "eval_loss": gap, "eval_acc": 1 / (1 + gap)}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return introduce(app, compresses=False)


class CommitLog(logging.Handler):
    """Writes `round resident_bytes` of each commit that the server logs; a line is one write."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage().split()
        if "committed:" in words:
            t = words[words.index("committed:") - 1]
            os.write(self.descriptor, f"{t} {measure_resident()}\n".encode())


def measure_resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def serve(folder: Path, T: int) -> None:
    """The server: from wherever the folder stands to round T."""
    logger = logging.getLogger("flwr")
    logger.handlers, logger.propagate = [CommitLog(folder / "commits.log")], False
    logger.setLevel(logging.INFO)
    with closing(LocalGrid(make_app(), NODES)) as grid:
        strategy = RecipeStrategy(
            recipes.CATALOGUE["flrce-no-stop"](P=PER_ROUND),
            state=folder / "state",
            wait_for_nodes=30.0,
            min_available_nodes=NODES,
            eval_every=SEGMENT_ROUNDS,
        )
        strategy.start(grid, ArrayRecord({"w": Array(np.zeros(FLOATS, np.float32))}), T)


def start_server(folder: Path, T: int) -> int:
    """A process of its own that serves; its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        serve(folder, T)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def read_commits(folder: Path) -> list[tuple[int, int]]:
    """Each logged commit: its round, and the resident bytes of the server then."""
    path = folder / "commits.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(t), int(size)) for t, size in (line.split() for line in lines)]


def wait_for_commit(folder: Path, pid: int, t: int) -> None:
    """Until the log has round t, the server has ended, or nothing came for too long."""
    deadline, seen = time.monotonic() + STALL_SECONDS, -1
    while time.monotonic() < deadline:
        commits = read_commits(folder)
        if is_ended(pid) or (commits and commits[-1][0] >= t):
            return
        if len(commits) > seen:
            deadline, seen = time.monotonic() + STALL_SECONDS, len(commits)
        time.sleep(POLL_SECONDS)
    os.kill(pid, signal.SIGKILL)
    raise RuntimeError(f"the server committed nothing for {STALL_SECONDS:.0f} s")


def is_ended(pid: int) -> bool:
    """Whether a child has ended; it stays to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def finish_server(folder: Path, T: int) -> None:
    """Serve to the end."""
    code = os.waitstatus_to_exitcode(os.waitpid(start_server(folder, T), 0)[1])
    if code:
        raise RuntimeError(f"the server ended with exit code {code}")


def kill_server(folder: Path, T: int, t: int, pause: float) -> list[str]:
    """Serve until round t is logged and `pause` seconds more, then SIGKILL; what was lost."""
    pid = start_server(folder, T)
    wait_for_commit(folder, pid, t)
    time.sleep(pause)
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != -signal.SIGKILL:
        raise RuntimeError(f"the server ended before its kill after round {t}: exit code {code}")
    logged = read_commits(folder)[-1][0]
    rows = read_lines(folder / "state" / "rounds.jsonl")
    kept = [row for row in rows if row["t"] <= logged]  # a later line may not be committed
    (folder / f"ledger-{t}").write_text("".join(json.dumps(row) + "\n" for row in kept))
    lost = [row["t"] for row in kept] != list(range(1, logged + 1))
    return [f"round {logged} was logged as committed, but not every line is there"] if lost else []


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The ledger's whole lines; the last one may be cut off."""
    return [json.loads(line) for line in path.read_bytes().splitlines(True) if line[-1:] == b"\n"]


def compare_ledgers(folder: Path, calm: Path, T: int) -> list[str]:
    """What differs from the undisturbed run, and from what was on disk at each kill."""
    ledger = folder / "state" / "rounds.jsonl"
    rows, wanted = read_lines(ledger), read_lines(calm / "state" / "rounds.jsonl")
    logged = [t for t, _ in read_commits(folder)]
    problems = []
    if [row["t"] for row in rows] != list(range(1, T + 1)):
        problems.append("the ledger has not each round once")
    if sorted(set(logged)) != logged:
        problems.append("a round that was logged as committed was trained again")
    for name in ("chosen", *COSTS):
        if [row[name] for row in rows] != [row[name] for row in wanted]:
            problems.append(f"{name} differs from the undisturbed run")
    for snapshot in folder.glob("ledger-*"):
        kept = read_lines(snapshot)
        if kept != rows[: len(kept)]:
            problems.append(f"{snapshot.name}: committed lines changed after the kill")
    summary = json.loads((folder / "state" / "summary.json").read_text())
    problems += [
        f"summary.json says {summary[name]} {name}, the rounds add up to {total}"
        for name in COSTS
        if abs(summary[name] - (total := sum(row[name] for row in rows))) > 1e-9 * total
    ]
    models = [(run / "state" / "model.safetensors").read_bytes() for run in (folder, calm)]
    return problems + ([] if models[0] == models[1] else ["the final model differs"])


def soak(T: int, folder: Path, seed: int = 0) -> SoakResult:
    """T rounds undisturbed, and T rounds with a kill in every third segment."""
    began, rng = time.monotonic(), make_stream(seed, "soak kills")
    calm, killed = folder / "calm", folder / "killed"
    for run in (calm, killed):
        run.mkdir(parents=True)
    finish_server(calm, T)
    round_seconds = (time.monotonic() - began) / T
    problems: list[str] = []
    ends = range(KILL_EVERY * SEGMENT_ROUNDS, T + 1, KILL_EVERY * SEGMENT_ROUNDS)
    for end in ends:
        t = end - int(rng.integers(3, SEGMENT_ROUNDS))
        problems += kill_server(killed, T, t, float(rng.uniform(0, 2 * round_seconds)))
    finish_server(killed, T)
    problems += compare_ledgers(killed, calm, T)
    sizes = np.array([size for _, size in read_commits(calm)][T // 4 :], float)
    slope = float(np.polyfit(np.arange(len(sizes)), sizes, 1)[0])
    return SoakResult(
        T,
        len(ends),
        len(read_commits(killed)),
        tuple(problems),
        slope,
        (float(sizes[0]), float(sizes[-1])),
        time.monotonic() - began,
    )


def main(T: int) -> int:
    """Print one soak; the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        result = soak(T, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for problem in result.problems:
        print(problem)
    first, last = result.resident
    print(
        f"{result.rounds} rounds of {PER_ROUND} of {NODES} clients, {FLOATS} floats:"
        f" {result.kills} kills, {result.logged} commits logged, {len(result.problems)} problems;"
        f" undisturbed, resident memory {first / 1e6:.1f} to {last / 1e6:.1f} MB,"
        f" {result.slope / 1e3:.2f} kB a round; {result.seconds:.0f} s"
    )
    return 1 if result.problems else 0
