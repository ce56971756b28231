"""flrce's simulator: fused kernels in threads, or (--kernel torch) PyTorch in processes of one thread."""

import torch
from work import BATCH, EPOCHS, LR, SCALE, SHIFT, Meter, P, Work, options, tally

from flrce.config import Experiment
from flrce.data.sources import Source
from flrce.local.client import Runner
from flrce.runs import parts


class Counted:
    """A bench that tallies what it is given, as the network's hook does for the peers."""

    def __init__(self, bench: object) -> None:
        self.bench = bench

    def train(self, w, x, y, scale, shift, order, sizes, **more):
        for size in sizes:
            tally(int(size), True)
        return self.bench.train(w, x, y, scale, shift, order, sizes, **more)

    def evaluate(self, w, x, y, scale, shift):
        tally(len(x), False)
        return self.bench.evaluate(w, x, y, scale, shift)


def main() -> None:
    given = options(__doc__, kernel="native")
    torch.set_num_threads(1)
    work = Work.load(given.data, given.seed)
    source = Source("bench", work.x, work.y, tuple("0123456789"), scale=float(SCALE), shift=float(SHIFT))
    experiment = Experiment.of(
        {
            "seed": given.seed, "rounds": given.rounds, "clients": len(work.train), "per_round": P,
            "data": {"partition": "iid", "holdout": 0.3}, "model": {"name": "cnn-cifar"},
            "train": {"batch": BATCH, "epochs": EPOCHS, "lr": LR}, "recipe": {"name": "fedavg"},
            "engine": {"kernel": given.kernel, "workers": given.cores, "device": "cpu"},
        }
    )  # fmt: skip
    bench = Runner.bench
    Runner.bench = lambda *a, **k: Counted(bench(*a, **k))
    built = parts(experiment, source, work.net(counted=False))
    assert [len(i) for i in built.federation.train] == [work.train.shape[1]] * len(work.train)
    meter = Meter()
    try:
        for done in built.rounds(experiment):
            meter.round(done.record.accuracy)
    finally:
        built.engine.close()


if __name__ == "__main__":
    main()
