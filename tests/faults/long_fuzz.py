"""`make fuzz`: experiment files, run directories, payloads and .npz files, damaged by the thousand,
from a seed.

    python tests/faults/long_fuzz.py --seconds 60 --seed 0 [TARGET ...]

with TARGET one of experiments, files, toml, names, runs, sealed, payloads, codes, npz, beside, flower,
served.

Each target gets the seconds. A failure prints the target and the seed of the one case that shows
it, and ends the run.
"""

import argparse
import contextlib
import importlib.util
import io
import logging
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers"), str(HERE.parent / "core")]

from file_fuzz import FILES  # noqa: E402
from file_fuzz import case as file_case  # noqa: E402
from run_fuzz import damaged as damaged_run  # noqa: E402
from run_fuzz import mutated as mutated_run  # noqa: E402
from test_gate import COMPRESSORS, LAYOUT, D, holdings, honest, task  # noqa: E402

from experiment_fuzz import bytes_of, mutated, outcome  # noqa: E402
from flrce.cli.cli import main as command  # noqa: E402
from flrce.config.experiment import Experiment  # noqa: E402
from flrce.core.checked_replies import book_costs  # noqa: E402
from flrce.core.files import parse_toml  # noqa: E402
from flrce.core.gate import validate_replies  # noqa: E402
from flrce.core.payloads import MAX_COORDINATE, ReplyContext  # noqa: E402
from flrce.core.pending import DueTasks  # noqa: E402
from flrce.core.types import ClientCost, Payload, Reply  # noqa: E402
from flrce.data.sources import load_source  # noqa: E402
from flrce.errors import BadInput  # noqa: E402
from flrce.simulation import runs  # noqa: E402

Case = Callable[[random.Random], None]
ODD = (
    0,
    1,
    -1,
    10**5000,
    2**63,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "\x1b[2J",
    None,
    True,
    [],
    b"x",
    3.5,
    10**8,
)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float16,
)


def experiments(rng: random.Random) -> None:
    outcome(lambda: Experiment.from_tables(mutated(rng)), "tables")


def files(folder: Path) -> Case:
    def case(rng: random.Random) -> None:
        path = folder / "experiment.toml"
        path.write_bytes(bytes_of(rng))
        outcome(lambda: Experiment.load(path), "file")

    return case


def names(folder: Path) -> Case:
    """Experiments that name code of all kinds."""
    from name_fuzz import case as run

    def case(rng: random.Random) -> None:
        run(folder, rng)

    return case


def run_directories(folder: Path) -> Case:
    whole = folder / "whole"
    runs.run(
        Experiment.from_tables(
            {
                "rounds": 4,
                "clients": 8,
                "per_round": 3,
                "recipe": {"name": "flrce", "preset": "default"},
            }
        ),
        whole,
    )

    def case(rng: random.Random) -> None:
        run = str(mutated_run(whole, folder / "run", rng))
        words = rng.choice(
            [
                ["report", run, "--out", str(folder / "r.html")],
                ["why", run, "--stop"],
                ["why", run, "--round", "2"],
                ["whatif", run],
                ["runs", str(folder)],
                ["watch", run, "--once"],
                ["reach", run, "--target", "0.3"],
            ]
        )
        told, shown = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(shown):
            code = command(words)
        assert code in (0, 2), (words, code)
        assert told.getvalue().count("\n") == (1 if code else 0), told.getvalue()

    return case


def sealed_runs(folder: Path) -> Case:
    """Damage to a run that has ended: `verify` finds it, and whoever shows figures shows those that
    were written.
    """
    whole = folder / "sealed"
    runs.run(
        Experiment.from_tables(
            {
                "rounds": 4,
                "clients": 8,
                "per_round": 3,
                "recipe": {"name": "flrce", "preset": "default"},
            }
        ),
        whole,
    )
    asked = [
        ["why", "RUN", "--stop"],
        ["whatif", "RUN", "--json"],
        ["reach", "RUN", "--target", "0.3", "--json"],
        ["watch", "RUN", "--once"],
    ]

    def answer(words: list[str], run: Path) -> tuple[int, str, str]:
        told, shown = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(shown):
            code = command([str(run) if word == "RUN" else word for word in words])
        return code, shown.getvalue().replace(str(run), ""), told.getvalue()

    expected = {words[0]: answer(words, whole)[1] for words in asked}

    def case(rng: random.Random) -> None:
        run, what = damaged_run(whole, folder / "spoilt", rng)
        if what:
            assert answer(["verify", "RUN"], run)[0] in (1, 2), what
        words = rng.choice(asked)
        code, shown, told = answer(words, run)
        assert code in (0, 2), (what, code)
        assert told.count("\n") == (1 if code else 0), told
        if code == 0 and words[0] != "watch":
            assert shown == expected[words[0]], (what, words)

    return case


def payloads(rng: random.Random) -> None:
    """Replies with buffers, counts, costs and names that nobody would send; honest ones beside them
    still count.
    """
    compressor = rng.choice(COMPRESSORS)
    tasks = [task(f"c{i}", i, compressor=compressor) for i in range(4)]
    replies = [honest(tasks[0]), *(_spoilt(honest(each), rng) for each in tasks[1:])]
    updates, rejected = validate_replies(
        tasks, replies, ReplyContext(holdings, D, D, samples_before=torch.full((4,), 4.0))
    )
    assert 0 in updates.k.tolist()
    assert torch.isfinite(updates.U).all()
    assert float(updates.U.abs().max()) <= MAX_COORDINATE
    assert len(updates) + len(rejected) == 4
    assert all(why and why.isprintable() and len(why) < 400 for why in rejected.values())
    _, totals = book_costs(3, DueTasks(tuple(tasks)), replies, rejected)
    assert all(
        np.isfinite(getattr(totals, key)) and getattr(totals, key) >= 0
        for key in ("joules", "bytes_up", "seconds")
    )


def _spoilt(reply: Reply, rng: random.Random) -> Reply:
    values = dict(vars(reply))
    for _ in range(rng.randint(1, 3)):
        field = rng.choice(
            ("payload", "n", "loss", "loss_square", "t", "spent", "client_state", "error", "base")
        )
        if field == "payload":
            values[field] = Payload(
                {
                    rng.choice(("u", "values", "levels", "../u")): _tensor(rng)
                    for _ in range(rng.randint(0, 3))
                }
            )
        elif field == "spent":
            names = [rng.choice(tuple(vars(ClientCost()))) for _ in range(2)]
            values[field] = ClientCost(**{name: rng.choice(ODD) for name in names})
        else:
            values[field] = rng.choice(ODD)
    return Reply(**values)


def _tensor(rng: random.Random) -> object:
    shape = (
        [rng.randint(0, 9) for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.6
        else [sum(n for _, n in LAYOUT)]
    )
    made = torch.full(shape, rng.choice([0.0, 1.0, -3.0, 1e38, float("nan"), float("inf")])).to(
        rng.choice(DTYPES)
    )
    form = rng.random()
    if form < 0.1 and made.dim() == 1 and made.numel():
        return made[:1].expand(10**11)
    return rng.choice(ODD) if form < 0.2 else made


TOML_PARTS = (
    "a",
    ".",
    '"a,"',
    "[",
    "]",
    "{",
    "}",
    "=",
    "\n",
    '"""',
    "'''",
    "'",
    "\\",
    "# ",
    ",",
    " ",
    "1",
)


def toml(rng: random.Random) -> None:
    """Files of a few parts, each many times over: tables or an error, in little time."""
    parts = [
        rng.choice(TOML_PARTS) * rng.choice((1, 1, 2, 50)) * rng.choice((1, 1, 100))
        for _ in range(rng.randint(1, 8))
    ]
    text = "".join(parts) * rng.choice((1, 1, 10, 2000))
    began = time.process_time()
    with contextlib.suppress(ValueError):
        parse_toml(text[: 1 << 20])
    assert time.process_time() - began < 20, parts


def codes(rng: random.Random) -> None:
    """Damaged payloads of every compressor."""
    from payload_fuzz import case as run

    run(rng)


def npz(folder: Path) -> Case:
    path = folder / "mine.npz"
    np.savez_compressed(
        path,
        x=np.arange(60.0).reshape(20, 3),
        y=np.arange(20) % 4,
        group=np.array(["a", "bc"] * 10),
    )
    packed = path.read_bytes()
    np.savez(path, x=np.arange(60, dtype=np.uint8).reshape(20, 3), y=np.arange(20) % 4)
    plain = path.read_bytes()

    def case(rng: random.Random) -> None:
        data = bytearray(rng.choice([packed, plain]))
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            if rng.random() < 0.7:
                data[at] = rng.randrange(256)
            elif rng.random() < 0.5:
                del data[at : at + rng.randrange(60)]
            else:
                data[at:at] = rng.randbytes(rng.randrange(20))
        path.write_bytes(data)
        with contextlib.suppress(BadInput):
            load_source("digits", str(path))

    return case


def beside(folder: Path) -> Case:
    """Data, traces, carbon intensities, profiles and tokenizers; also what is no file in their
    place.
    """

    def case(rng: random.Random) -> None:
        file_case(folder, rng.choice(list(FILES)), rng)

    return case


def flower(folder: Path) -> Case:
    from flower_fuzz import case as run

    def case(rng: random.Random) -> None:
        run(folder / "flower", rng)

    return case


def served(folder: Path) -> Case:
    from served_fuzz import case as run

    def case(rng: random.Random) -> None:
        run(folder / "served", rng)

    return case


def main() -> int:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("targets", nargs="*")
    ask.add_argument("--seconds", type=float, default=60.0)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--only", type=int, help="The number of one case.")
    given = ask.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        targets: dict[str, Case] = {
            "experiments": experiments,
            "files": files(folder),
            "toml": toml,
            "names": names(folder),
            "runs": run_directories(folder),
            "sealed": sealed_runs(folder),
            "payloads": payloads,
            "codes": codes,
            "npz": npz(folder),
            "beside": beside(folder),
        }
        if importlib.util.find_spec("flwr"):
            targets |= {"flower": flower(folder), "served": served(folder)}
        for name in given.targets or targets:
            end, count = time.monotonic() + given.seconds, given.only or 0
            while time.monotonic() < end:
                try:
                    targets[name](random.Random(f"{given.seed} {name} {count}"))
                except Exception:
                    traceback.print_exc()
                    print(
                        f"{name}: case {count}; again with: {name} --seed {given.seed} --only"
                        f" {count}"
                    )
                    return 1
                count += 1
                if given.only is not None:
                    break
            print(
                f"{name}: {count} cases, seed {given.seed}, nothing but sound values and single"
                " lines",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
