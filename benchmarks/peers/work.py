"""The work every peer does, and how it is measured. Needs numpy; torch only for the network, Linux
for /proc.

P = 10 of M equal clients a round, FedAvg of SGD, and after every round the model on all validation
samples. The paper's CNN: CIFAR-10, M = 100 with 350 training and 150 validation samples, batches of
128, 5 epochs. The other networks, named by $FLRCE_BENCH_NETWORK, do less: they take longer a
sample. `bench.py` writes the samples and the starting weights into one folder, so that all start
alike.
"""

import argparse
import json
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Setting:
    """What is trained: clients, samples of each to train on and to judge by, and how."""

    clients: int
    train: int
    held: int
    epochs: int
    batch: int
    lr: float
    classes: int = 10
    tokens: bool = False  # samples are characters, not images


SETTINGS = {
    "cnn": Setting(100, 350, 150, 5, 128, 0.1),
    "resnet-8": Setting(20, 64, 16, 2, 32, 0.1),
    "lstm": Setting(20, 32, 8, 1, 16, 0.5, 80, tokens=True),
    "gpt": Setting(20, 32, 8, 1, 16, 0.1, 80, tokens=True),
}
NETWORK = os.environ.get("FLRCE_BENCH_NETWORK", "cnn")
NOW = SETTINGS[NETWORK]
P, EPOCHS, BATCH, LR, CLASSES = 10, NOW.epochs, NOW.batch, NOW.lr, NOW.classes
SCALE, SHIFT = np.float32(1 / 127.5), np.float32(-1)
TICK = os.sysconf("SC_CLK_TCK")  # a second, in the units of /proc
# samples an evaluation looks at together: fastest for torch here, and given to every peer that
# takes it
CHUNK = 250
DEVICE = os.environ.get(
    "FLRCE_BENCH_DEVICE", "cpu"
)  # where every peer has its samples and its network
TALLY = "FLRCE_BENCH_TALLY"  # names the file of counts; worker processes inherit it


@dataclass(frozen=True)
class Work:
    """Samples shared out, as written by `bench.py`."""

    folder: Path
    seed: int
    x: np.ndarray  # (N, 3, 32, 32) uint8, or (N, 80) int64
    y: np.ndarray  # (N,) int64
    train: np.ndarray  # (M, 350) indices
    held: np.ndarray  # (M, 150) indices

    @classmethod
    def load(cls, folder: Path | str, seed: int, shared: bool = False) -> "Work":
        """`shared` maps the samples instead of reading them, for processes that need few."""
        folder, mode = Path(folder), "r" if shared else None
        arrays = (
            np.load(folder / f"{name}.npy", mmap_mode=mode) for name in ("x", "y", "train", "held")
        )
        return cls(folder, seed, *arrays)

    def floats(self, index: np.ndarray) -> np.ndarray:
        """Samples as every network here sees them: images as floats, characters by their
        numbers.
        """
        if NOW.tokens:
            return self.x[index]
        return self.x[index].astype(np.float32) * SCALE + SHIFT

    def weights(self) -> dict[str, np.ndarray]:
        """The starting model, by torch's names."""
        return dict(np.load(self.folder / "start.npz"))

    def choose(self, t: int) -> list[int]:
        """P clients at random, for peers that leave the choice to their user."""
        rng = np.random.default_rng((self.seed, t))
        return rng.permutation(len(self.train))[:P].tolist()

    def net(self, counted: bool = True):
        """The network, with the starting weights; where `counted`, each batch that it sees is
        tallied.
        """
        import torch
        from nets import build

        net = build(NETWORK, CLASSES, 0)
        net.load_state_dict(
            {name: torch.from_numpy(value) for name, value in self.weights().items()}
        )
        if counted:
            net.register_forward_pre_hook(_tally_batch)
        return net.to(DEVICE)

    def tensors(self, index: np.ndarray):
        import torch

        return torch.from_numpy(self.floats(index)).to(DEVICE), torch.from_numpy(self.y[index]).to(
            DEVICE
        )


def _tally_batch(net, batch) -> None:
    tally(len(batch[0]), net.training)


def tally(samples: int, training: bool) -> None:
    """Count one batch. Appends of a few bytes are atomic, so worker processes share the file."""
    where = os.open(os.environ[TALLY], os.O_WRONLY | os.O_APPEND)
    os.write(where, struct.pack("i", samples if training else -samples))
    os.close(where)


class Meter:
    """Prints one JSON line a round: seconds, CPU seconds of this process and its children, and the
    work done.
    """

    def __init__(self) -> None:
        self.t, self.mark, self.seen = 0, self._now(), 0
        self.start = self.mark[0]

    def round(self, accuracy: float) -> None:
        now = self._now()
        wall, cpu, busy = (b - a for a, b in zip(self.mark, now, strict=True))
        counts = np.fromfile(os.environ[TALLY], np.int32)
        new = counts[self.seen :].astype(int)
        self.t, self.seen = self.t + 1, len(counts)
        line = {
            "round": self.t,
            "seconds": wall,
            "cpu_seconds": cpu,
            "foreign": max(busy - cpu, 0) / wall,
            "accuracy": float(accuracy),
            "steps": int((new > 0).sum()),
            "trained": int(new[new > 0].sum()),
            "evaluated": int(-new[new < 0].sum()),
        }
        print(json.dumps(line), flush=True)
        self.mark = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Wall seconds; CPU seconds of this process and all below it; CPU seconds of the whole
        machine.
        """
        parent, used = {}, {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            parent[int(stat.parent.name)] = int(fields[1])
            used[int(stat.parent.name)] = sum(
                map(int, fields[11:15])
            )  # user, system; the same of ended children
        family, found = {os.getpid()}, 0
        while len(family) > found:
            found = len(family)
            family |= {pid for pid, above in parent.items() if above in family}
        machine = [
            int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        ]
        busy = sum(machine) - machine[3] - machine[4]  # all but idle and waiting for a disk
        return time.perf_counter(), sum(used[pid] for pid in family) / TICK, busy / TICK


def options(about: str | None, **more: str) -> argparse.Namespace:
    """rounds, cores and seed, with threads set accordingly, and `more` options with their
    defaults.
    """
    ask = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    ask.add_argument("--rounds", type=int, default=3)
    ask.add_argument("--cores", type=int, default=1)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--data", type=Path, default=Path(".bench/work"))
    for name, value in more.items():
        ask.add_argument(f"--{name}", default=value)
    given = ask.parse_args()
    given.data = given.data.resolve()
    os.environ.setdefault("OMP_NUM_THREADS", str(given.cores))
    os.environ[TALLY] = str(given.data / f"tally.{os.getpid()}")
    Path(os.environ[TALLY]).write_bytes(b"")
    return given
