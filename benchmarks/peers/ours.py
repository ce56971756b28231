"""flrce's simulator: fused kernels in threads, PyTorch in processes (--kernel torch), or a GPU's
lanes.
"""

import torch
from work import BATCH, DEVICE, EPOCHS, LR, NOW, SCALE, SHIFT, Meter, P, Work, options, tally

from flrce.config.experiment import Experiment
from flrce.data.sources import Source
from flrce.simulation.runs import build_simulation
from flrce.training.cpu import Kernel
from flrce.training.gpu.batch_trainer import ClientBatchTrainer
from flrce.training.trainer import TorchTrainer


def counted(kind: type) -> None:
    """Make a trainer tally what it is given, as the network's hook does for the peers."""
    train, evaluate = kind.train, kind.evaluate

    def training(self, w, batches, *more, **options):
        for size in batches.sizes:
            tally(int(size), True)
        return train(self, w, batches, *more, **options)

    def judging(self, w, x, *more):
        tally(len(x), False)
        return evaluate(self, w, x, *more)

    kind.train, kind.evaluate = training, judging


def counted_lanes() -> None:
    """The same for a GPU's lanes."""
    train, evaluate = ClientBatchTrainer.train, ClientBatchTrainer.evaluate

    def training(self, w, orders, sizes, *more, **options):
        for size in (size for lane in sizes for size in lane):
            tally(int(size), True)
        return train(self, w, orders, sizes, *more, **options)

    def judging(self, w, index):
        tally(int(index.size) if index.ndim == 2 else len(w) * len(index), False)
        return evaluate(self, w, index)

    ClientBatchTrainer.train, ClientBatchTrainer.evaluate = training, judging


def main() -> None:
    given = options(__doc__, kernel="native")
    torch.set_num_threads(1)
    work = Work.load(given.data, given.seed)
    classes = tuple(map(str, range(NOW.classes)))
    scaling = {} if NOW.tokens else {"scale": float(SCALE), "shift": float(SHIFT)}
    source = Source("bench", work.x, work.y, classes, **scaling)
    experiment = Experiment.from_tables(
        {
            "seed": given.seed,
            "rounds": given.rounds,
            "clients": len(work.train),
            "per_round": P,
            "data": {"partition": "iid", "holdout": NOW.held / (NOW.train + NOW.held)},
            "train": {"batch": BATCH, "epochs": EPOCHS, "lr": LR},
            "recipe": {"name": "fedavg"},
            "engine": {"kernel": given.kernel, "workers": given.cores, "device": DEVICE},
        }
    )
    counted(Kernel)
    counted(TorchTrainer)
    counted_lanes()
    built = build_simulation(experiment, source, work.net(counted=False))
    assert [len(i) for i in built.federation.train] == [work.train.shape[1]] * len(work.train)
    meter = Meter()
    try:
        for done in built.iterate_rounds(experiment):
            meter.round(done.record.accuracy)
    finally:
        built.engine.close()


if __name__ == "__main__":
    main()
