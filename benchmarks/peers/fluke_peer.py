"""fluke: its FedAvg with its fast loaders, one process; only accuracy is computed, on all
validation samples.
"""

import torch
from stand_in import stand_in
from work import BATCH, CHUNK, CLASSES, EPOCHS, LR, Meter, P, Work, options

stand_in("torchvision", "datasets", "opacus", "clearml", "wandb", "tensorboard", "seaborn")

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402
from fluke.evaluation import ClassificationEval  # noqa: E402
from torchmetrics import Accuracy  # noqa: E402


class Shares:
    """Stands where fluke expects its splitter: the samples are shared out already."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def assign(self, clients: int, batch_size: int):
        def loader(index, size: int, shuffle: bool) -> FastDataLoader:
            return FastDataLoader(
                *self.work.tensors(index), num_labels=CLASSES, batch_size=size, shuffle=shuffle
            )

        train = [loader(index, batch_size, True) for index in self.work.train]
        return (train, [None] * clients), loader(self.work.held.ravel(), CHUNK, False)


class Judge(ClassificationEval):
    """Marks the end of a round."""

    meter: Meter
    rounds: int

    def evaluate(self, *what, **how):
        found = super().evaluate(*what, **how)
        if self.meter.t < self.rounds:  # fluke evaluates once more at the end
            self.meter.round(found["accuracy"])
        return found


def main() -> None:
    given = options(__doc__)
    torch.set_num_threads(given.cores)
    env = FlukeENV()
    env.set_seed(given.seed)
    judge = Judge(
        1,
        CLASSES,
        accuracy=Accuracy(task="multiclass", num_classes=CLASSES, top_k=1, average="micro"),
    )
    env.set_evaluator(judge)
    env.set_eval_cfg(server=True, locals=False, pre_fit=False, post_fit=False)
    work = Work.load(given.data, given.seed)
    algorithm = FedAVG(
        len(work.train),
        Shares(work),
        DDict(
            client=DDict(
                batch_size=BATCH,
                local_epochs=EPOCHS,
                loss="CrossEntropyLoss",
                optimizer=DDict(name="SGD", lr=LR),
                scheduler=DDict(name="StepLR", step_size=1, gamma=1.0),
            ),
            server=DDict(weighted=True),
            model=work.net(),
        ),
    )
    judge.meter, judge.rounds = Meter(), given.rounds
    algorithm.run(given.rounds, P / len(work.train), finalize=False)


if __name__ == "__main__":
    main()
