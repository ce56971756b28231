"""FedLab: its serial trainer and synchronous server, one process.

It averages parameters, not BatchNorm's statistics, so an evaluation uses those of the client
trained last.
"""

import random

import torch
from stand_in import stand_in
from torch.utils.data import DataLoader, TensorDataset
from work import BATCH, CHUNK, EPOCHS, LR, Meter, P, Work, options

stand_in("torchvision", "pynvml", "spacy", "torchtext")

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402


class Shares:
    def __init__(self, work: Work) -> None:
        self.parts = [TensorDataset(*work.tensors(index)) for index in work.train]

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
        return DataLoader(self.parts[client], batch_size, shuffle=True)


class Quiet:
    def info(self, *what) -> None:
        pass


class Pipeline(StandalonePipeline):
    def __init__(self, handler, trainer, judges: DataLoader) -> None:
        super().__init__(handler, trainer)
        self.judges, self.meter = judges, Meter()

    def evaluate(self) -> None:
        net = self.handler.model
        statistics = {k: v for k, v in self.trainer.model.state_dict().items() if "running" in k}
        net.load_state_dict(statistics, strict=False)
        net.eval()
        with torch.no_grad():
            right = sum(int((net(x).argmax(1) == y).sum()) for x, y in self.judges)
        self.meter.round(right / len(self.judges.dataset))


def main() -> None:
    given = options(__doc__)
    torch.set_num_threads(given.cores)
    torch.manual_seed(given.seed)
    random.seed(given.seed)
    work = Work.load(given.data, given.seed)
    trainer = SGDSerialClientTrainer(work.net(), len(work.train), cuda=False, logger=Quiet())
    trainer.setup_dataset(Shares(work))
    trainer.setup_optim(EPOCHS, BATCH, LR)
    handler = SyncServerHandler(
        work.net(), given.rounds, P / len(work.train), cuda=False, logger=Quiet()
    )
    judges = DataLoader(TensorDataset(*work.tensors(work.held.ravel())), CHUNK)
    Pipeline(handler, trainer, judges).main()


if __name__ == "__main__":
    main()
