"""Rounds of flrce's simulator against its peers', all doing the same work: python
benchmarks/bench.py

    --passes 2 --rounds 3     each pass runs every peer for so many rounds, the first of them a warm-up
    --cores 1,2               one thread (compare CPU seconds) and both cores (compare wall time)
    --only native,pfl         some of them (names in peers/roster.py)
    --networks cnn,lstm       some of the networks (names in peers/work.py): the paper's, a residual, a recurrent one
    --report                  no runs: write the results again from what was measured last

Makes the peers' environments under .bench/, interleaves the runs, checks that all do the same work
(data, steps, samples, accuracy), and writes results/peers.{json,md,svg}, and for the other networks
results/peers-networks.{json,md}: one thread and CPU seconds only. Peers that cannot be installed or
run are listed with the reason. Real CIFAR-10 where it is prepared (`flrce data prepare cifar10`),
else random samples of its shape.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from flrce.data.federation import federate
from flrce.data.sources import Source, load_source
from flrce.errors import BadInput

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from nets import LENGTH, TOKENS, build  # noqa: E402
from roster import PEERS, CannotRun, Peer, python_of, version_of  # noqa: E402
from summary import write, write_networks  # noqa: E402
from work import SETTINGS  # noqa: E402

HOME = HERE.parent / ".bench"
PATIENCE = 600  # seconds that one run may take


def prepare(folder: Path, network: str) -> str:
    """Samples, shares and starting weights on disk, the same for everyone; returns the data's
    name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    setting, mark = SETTINGS[network], folder / "data"
    data = characters() if setting.tokens else samples()
    if mark.exists() and mark.read_text() == data.name:
        return data.name
    few = setting.clients * (setting.train + setting.held)
    if few < len(data.y):  # the first samples are as good as any
        data = replace(
            data, x=np.asarray(data.x)[:few], y=data.y[:few], group=None, groups=(), held=None
        )
    shared = federate(
        data, "iid", setting.clients, seed=0, holdout=setting.held / (setting.train + setting.held)
    )
    arrays = {
        "x": np.asarray(data.x),
        "y": data.y,
        "train": np.stack(shared.train),
        "held": np.stack(shared.held),
    }
    for name, value in arrays.items():
        np.save(folder / f"{name}.npy", value)
    start = build(network, setting.classes, 0).state_dict()
    np.savez(folder / "start.npz", **{name: value.numpy() for name, value in start.items()})
    mark.write_text(data.name)
    return data.name


def characters() -> Source:
    """Texts that repeat a few characters, and the next one of each: something to learn."""
    rng = np.random.default_rng(0)
    few = rng.integers(0, TOKENS, (4000, 8))
    x = np.tile(few, (1, LENGTH // 8 + 1))[:, : LENGTH + 1]
    return Source(
        "repeated characters",
        x[:, :LENGTH].copy(),
        x[:, LENGTH].copy(),
        tuple(map(str, range(TOKENS))),
    )


def samples() -> Source:
    try:
        return load_source("cifar10")
    except BadInput:
        rng = np.random.default_rng(0)
        y = rng.integers(0, 10, 50_000)
        bright = np.linspace(60, 190, 10)[y][:, None, None, None]  # something to learn
        x = (bright + rng.normal(0, 40, (50_000, 3, 32, 32))).clip(0, 255).astype(np.uint8)
        return Source("synthetic", x, y, tuple("0123456789"))


def sgemm() -> float:
    """GFLOP/s of torch's float32 product on one core: the best of a few."""
    torch.set_num_threads(1)
    a, best = torch.randn(1500, 1500), float("inf")
    for _ in range(5):
        start = time.thread_time()
        a @ a
        best = min(best, time.thread_time() - start)
    return 2 * 1.5**3 / best


def copying() -> float:
    """GB/s that one core reads and writes in memory: the best of a few."""
    a = torch.zeros(2**25)
    b, best = torch.empty_like(a), float("inf")
    for _ in range(4):
        start = time.thread_time()
        b.copy_(a)
        best = min(best, time.thread_time() - start)
    return 2 * a.nbytes / best / 1e9


def measure(
    peer: Peer, python: Path, cores: int, seed: int, options: argparse.Namespace, network: str
) -> list[dict]:
    """One run of one peer: a dictionary per round."""
    rounds = options.rounds
    command = [
        *options.under.split(),
        python,
        HERE / "peers" / peer.script,
        "--rounds",
        rounds,
        "--cores",
        cores,
        "--seed",
        seed,
        "--data",
        _work(network),
        *peer.args,
    ]
    threads = str(cores)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "FLRCE_BENCH_NETWORK": network,
    }
    try:
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise CannotRun(f"{rounds} rounds were not done after {PATIENCE} s") from None
    (HOME / f"{peer.name}.err").write_text(done.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"round"')]
    if done.returncode or len(lines) != rounds:
        raise CannotRun((done.stderr.strip().splitlines() or ["no output"])[-1][:200])
    return lines


def _work(network: str) -> Path:
    return HOME / ("work" if network == "cnn" else f"work-{network}")


def _log(network: str) -> Path:
    return HOME / ("lines.jsonl" if network == "cnn" else f"lines-{network}.jsonl")


def collect(options: argparse.Namespace, log: Path, network: str) -> None:
    """All runs, interleaved; every round goes to the log at once."""
    data = prepare(_work(network), network)
    named = [p for p in PEERS if not options.only or p.name in options.only.split(",")]
    chosen = [p for p in named if network in p.networks]
    ready, absent = [], {}
    for peer in chosen:
        try:
            python = python_of(peer, HOME)
            ready.append((peer, python, version_of(peer, python)))
        except CannotRun as why:
            absent[peer.name] = str(why)
    for number in range(options.passes):
        for cores in map(int, options.cores.split(",")) if network == "cnn" else (1,):
            turn = number % max(len(ready), 1)
            for peer, python, version in ready[turn:] + ready[:turn]:  # nobody always runs first
                if peer.name in absent or cores not in peer.cores:
                    continue
                common = {
                    "peer": peer.name,
                    "version": version,
                    "cores": cores,
                    "pass": number,
                    "data": data,
                    "network": network,
                }
                try:
                    lines = measure(peer, python, cores, number, options, network)
                except CannotRun as why:
                    absent[peer.name] = str(why)
                    continue
                ceilings = {"sgemm": sgemm(), "copy": copying()}
                with log.open("a") as out:
                    out.writelines(
                        json.dumps({**common, **line, **ceilings}) + "\n" for line in lines
                    )
                print(
                    f"{network}  pass {number}  {cores} cores  {peer.name:8s}",
                    *(f"{x['cpu_seconds']:.2f}" for x in lines[1:]),
                )
    with log.open("a") as out:
        out.writelines(
            json.dumps({"peer": name, "absent": why}) + "\n" for name, why in absent.items()
        )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--passes", type=int, default=2)
    ask.add_argument("--rounds", type=int, default=3)
    ask.add_argument("--cores", default="1,2")
    ask.add_argument("--only", default="")
    ask.add_argument("--networks", default="cnn,resnet-8,lstm,gpt")
    ask.add_argument(
        "--under", default="", help="a command to run each peer under, such as nice or taskset"
    )
    ask.add_argument("--report", action="store_true")
    options = ask.parse_args()
    HOME.mkdir(exist_ok=True)
    wanted = options.networks.split(",")
    for network in () if options.report else wanted:
        log = _log(network)
        log.unlink(missing_ok=True)  # a table comes from one run
        collect(options, log, network)
    if "cnn" in wanted:
        print(write(_log("cnn"), HERE / "results"))
    others = {
        network: _log(network)
        for network in SETTINGS
        if network != "cnn" and _log(network).exists()
    }
    if others:
        print(write_networks(others, HERE / "results"))


if __name__ == "__main__":
    main()
