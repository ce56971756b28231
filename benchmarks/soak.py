"""Random fault schedules over loop, gate, ledger and checkpoint, replayable by number; and memory
over a long run.

    python benchmarks/soak.py --schedules 1000          all of them; prints what failed, exit code 1 if any did
    python benchmarks/soak.py --only 417                one again
    python benchmarks/soak.py --memory 2000             slope of resident memory over so many rounds
    python benchmarks/soak.py --flower 500              a Flower server killed in every third segment

Clients do not train: their updates are drawn, so that a schedule takes milliseconds. A schedule is
a recipe, what goes wrong with replies, and where the process dies, or finds the disk full or a file
damaged. After every disturbance the run is resumed; its ledger and state must equal the undisturbed
run's, bit for bit.
"""

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flrce.core.loop import make_initial_state, rounds
from flrce.core.payloads import make_encoding_stream
from flrce.core.pieces import Recipe
from flrce.core.types import ClientCost, Evaluation, Payload, PendingTask, Reply, State, Task
from flrce.errors import BadInput
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.rng import make_stream
from flrce.storage import failpoint
from flrce.storage.checkpoint import read_manifests
from flrce.storage.ledger import LEDGER_FILES, Ledger

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from stub_engine import StubEngine

LAYOUT = (("weight", 40), ("bias", 8))
D = sum(size for _, size in LAYOUT)
RECIPES = (
    "fedavg",
    "flrce",
    "flrce-no-stop",
    "flrce-topk",
    "fedcom",
    "oort",
    "divfl",
    "krum",
    "clipped-mean",
    "timelyfl",
)
PLACES = (
    "aside.opened",
    "aside.written",
    "aside.synced",
    "aside.renamed",
    "lines.opened",
    "lines.cut",
    "lines.written",
    "lines.synced",
    "round.done",
    "round.committed",
    "commit.ready",
    "commit.done",
    "commit.swept",
)
WRITES = PLACES[:8]
SPOILS = ("nan", "shape", "late", "twice", "silent", "n", "huge", "all silent")


@dataclass(frozen=True)
class Schedule:
    """One number's worth of trouble."""

    number: int
    recipe: str
    T: int
    M: int
    P: int
    spoilt: float  # probability that a reply goes wrong
    faults: tuple[
        tuple[str, ...], ...
    ]  # ("die", failpoint) | ("fail", failpoint) | ("damage", file kind)


def schedule(number: int) -> Schedule:
    """The same trouble for the same number."""
    rng = make_stream(number, "soak")
    faults: list[tuple[str, ...]] = []
    for _ in range(rng.integers(1, 5)):
        kind = rng.choice(["die", "die", "fail", "damage"])
        place = f"{rng.choice(WRITES if kind == 'fail' else PLACES)}:{rng.integers(1, 30)}"
        if kind == "fail":
            place += f":{rng.choice(['ENOSPC', 'EIO', 'EDQUOT'])}"
        faults.append(
            (
                str(kind),
                (
                    str(rng.choice(["state", "rows", "manifest", "ledger"]))
                    if kind == "damage"
                    else place
                ),
            )
        )
    return Schedule(
        number,
        str(rng.choice(RECIPES)),
        int(rng.integers(3, 9)),
        int(rng.integers(8, 16)),
        int(rng.integers(5, 8)),
        float(rng.choice([0.0, 0.1, 0.4])),
        tuple(faults),
    )


@dataclass(frozen=True)
class Drawn(StubEngine):
    """Clients that draw their updates; a share of the replies goes wrong, decided by (number,
    round, client) alone.
    """

    plan: Schedule
    trainable: int = D

    def clients(self, t: int) -> Sequence[str]:
        return [f"c{k}" for k in range(self.plan.M)]

    def count_samples(self, client: str) -> int:
        return 10 + int(client[1:])

    def estimate(self, task: Task) -> ClientCost:
        return ClientCost(4 * D, 4 * D, compute_seconds=1.0 + int(task.client[1:]) % 3, joules=1.0)

    def get_task_layout(self, task: Task) -> tuple[None, tuple[tuple[str, int], ...]]:
        return None, LAYOUT

    def evaluate(
        self, w: Tensor, t: int, last: bool = False, client_states: object = None
    ) -> Evaluation:
        return Evaluation(1 / (1 + float(w.norm())), 0.5, float(w.norm()))

    def train(
        self,
        pending: Sequence[PendingTask],
        client_states: Mapping[str, Mapping[str, Tensor]],
        keep: int | None = None,
    ) -> list[Reply]:
        replies: list[Reply] = []
        for task, w in ((one.task, one.w) for one in pending):
            rng = make_stream(self.plan.number, "reply", task.t, task.client)
            u = torch.from_numpy(rng.normal(0, 0.1, D)).float() - 0.1 * w
            payload, kept = task.compressor.encode(
                u, LAYOUT, make_encoding_stream(task), client_states.get(task.client, {})
            )
            good = Reply(
                task.client,
                task.t,
                payload,
                self.count_samples(task.client),
                1.0,
                1.0,
                replace(self.estimate(task), bytes_up=payload.nbytes),
                kept,
            )
            wrong = str(rng.choice(SPOILS)) if rng.random() < self.plan.spoilt else ""
            replies += spoil(good, wrong)
        return replies


def spoil(reply: Reply, how: str) -> list[Reply]:
    """What arrives instead of an honest reply."""
    assert reply.payload is not None
    buffers = reply.payload.buffers
    made = {
        "nan": {n: b * float("nan") if b.is_floating_point() else b for n, b in buffers.items()},
        "shape": {n: b[:-1] for n, b in buffers.items()},
        "huge": {
            n: b.expand(10**9) if b.numel() == 1 else b.repeat(99) for n, b in buffers.items()
        },
    }
    if how in made:
        return [replace(reply, payload=Payload(made[how]))]
    late = replace(reply, t=reply.t - 1)
    return {
        "late": [late, reply],
        "twice": [reply, reply],
        "silent": [],
        "all silent": [],
        "n": [replace(reply, n=-59)],
    }.get(how, [reply])


def recipe_of(plan: Schedule) -> Recipe:
    return replace(CATALOGUE[plan.recipe](P=plan.P), minimum=2)


def run(plan: Schedule, folder: Path) -> State:
    """The schedule's run, from wherever the folder stands, without any disturbance of its own."""
    recipe, engine = recipe_of(plan), Drawn(plan)
    with Ledger(folder, f"number = {plan.number}\n", {"clients": plan.M}, resume=True) as ledger:
        state = ledger.restore(make_initial_state(recipe, engine, torch.zeros(D)))
        for done in rounds(recipe, engine, state, plan.T, plan.number):
            ledger.append(done)
            state = done.state
        return state


def disturbed(plan: Schedule, folder: Path, where: str) -> int:
    """The run in a child process under a failpoint; its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        os.environ[failpoint.FAILPOINT_VARIABLE] = where
        failpoint.call_counts.clear()
        run(plan, folder)
        code = 0
    except BadInput:
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def damage(folder: Path, kind: str, rng: np.random.Generator) -> None:
    """Flip one bit, or cut the end, of a file that only the newest commit needs."""
    found, broken = read_manifests(folder / "checkpoint")
    if len(found) < 2 or broken:
        return  # nothing to fall back on
    manifest, latest = found[0][0], found[0][1].latest
    path = {"manifest": manifest, "ledger": folder / "rounds.jsonl"}.get(
        kind, folder / "checkpoint" / f"{latest}.{kind}"
    )
    if not path.exists():
        return
    data = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        del data[-int(rng.integers(1, 9)) :]
    else:
        data[-int(rng.integers(1, 20))] ^= 1 << int(rng.integers(0, 7))
    path.write_bytes(data)


def problems(number: int, folder: Path) -> str:
    """What went wrong with one schedule; "" if nothing did."""
    plan, rng = schedule(number), make_stream(number, "damage")
    wanted = run(plan, folder / "straight")
    if not torch.isfinite(wanted.w).all():
        return "the model is not finite"
    for kind, what in plan.faults:
        if kind == "damage":
            damage(folder / "rough", what, rng)
        else:
            code = disturbed(plan, folder / "rough", what)
            if code not in ((0, -signal.SIGKILL) if kind == "die" else (0, 2)):
                return f"{kind} at {what}: exit code {code}"
    found = run(plan, folder / "rough")
    if len(found.history) != len(
        wanted.history
    ):  # a run that gave up is tried again at every resumption
        gave_up = [h for h in wanted.history if h.outcome == "abandoned" and h.stop]
        return "" if gave_up else f"{len(found.history)} rounds instead of {len(wanted.history)}"
    for name in LEDGER_FILES:
        if (folder / "rough" / name).read_bytes() != (folder / "straight" / name).read_bytes():
            return f"{name} differs"
    return "" if torch.equal(found.w, wanted.w) else "the model differs"


def soak(numbers: Sequence[int]) -> int:
    began, failed, counts = time.monotonic(), [], {"die": 0, "fail": 0, "damage": 0}
    for number in numbers:
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        try:
            why = problems(number, folder)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for kind, _ in schedule(number).faults:
            counts[kind] += 1
        if why:
            failed.append(number)
            print(f"schedule {number}: {why}", flush=True)
    print(
        f"{len(numbers)} schedules ({counts['die']} kills, {counts['fail']} failed writes,"
        f" {counts['damage']} damaged files), {len(failed)} failed,"
        f" {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory(T: int) -> None:
    """Resident memory over a long run, ledger and checkpoint included, and its slope after the
    first quarter.
    """
    plan = Schedule(0, "flrce-no-stop", T, 40, 8, 0.1, ())
    folder, seen = Path(tempfile.mkdtemp(prefix="soak-")), []
    recipe, engine = recipe_of(plan), Drawn(plan)
    with Ledger(folder, "memory = true\n", {}, resume=True) as ledger:
        for done in rounds(
            recipe, engine, ledger.restore(make_initial_state(recipe, engine, torch.zeros(D))), T, 0
        ):
            ledger.append(done)
            seen.append(resident())
    shutil.rmtree(folder)
    late = np.array(seen[T // 4 :])
    slope = np.polyfit(np.arange(len(late)), late, 1)[0]
    print(
        f"{T} rounds: {seen[0] / 1e6:.1f} MB after the first, {seen[-1] / 1e6:.1f} MB after the"
        f" last, slope {slope / 1e3:.2f} kB a round"
    )


def main() -> int:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("--schedules", type=int, default=0)
    ask.add_argument("--only", type=int)
    ask.add_argument("--memory", type=int, default=0)
    ask.add_argument("--flower", type=int, default=0)
    given = ask.parse_args()
    torch.set_num_threads(1)
    code = 0
    if given.only is not None:
        print(schedule(given.only))
        code = soak([given.only])
    elif given.schedules:
        code = soak(range(given.schedules))
    if given.memory:
        memory(given.memory)
    if given.flower:
        import soak_flower  # needs flwr

        code = max(code, soak_flower.main(given.flower))
    return code


if __name__ == "__main__":
    sys.exit(main())
