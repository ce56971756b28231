"""A plain PyTorch loop: what one would write without a framework. On a CPU with DataLoaders, on a
GPU by indices.
"""

import copy
from collections.abc import Iterator

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from work import BATCH, CHUNK, DEVICE, EPOCHS, LR, Meter, Work, options


class Batches:
    """What a DataLoader gives, from tensors that lie on the GPU: no sample is fetched alone."""

    def __init__(self, dataset: TensorDataset, batch: int, shuffle: bool = False) -> None:
        self.dataset, self.batch, self.shuffle = dataset, batch, shuffle

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, y = self.dataset.tensors
        order = torch.randperm(len(y)) if self.shuffle else torch.arange(len(y))
        for index in order.to(x.device).split(self.batch):
            yield x[index], y[index]


def train(net: torch.nn.Module, loader: DataLoader | Batches) -> None:
    net.train()
    sgd = torch.optim.SGD(net.parameters(), LR)
    for _ in range(EPOCHS):
        for x, y in loader:
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            sgd.step()


def evaluate(net: torch.nn.Module, loader: DataLoader | Batches) -> float:
    net.eval()
    with torch.no_grad():
        right = sum(int((net(x).argmax(1) == y).sum()) for x, y in loader)
    return right / len(loader.dataset)


def average(models: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All clients hold equally many samples; BatchNorm's statistics are averaged like weights, its
    counter is not.
    """
    first = models[0]
    return {
        k: torch.stack([m[k] for m in models]).mean(0) if v.is_floating_point() else v
        for k, v in first.items()
    }


def main() -> None:
    given = options(__doc__)
    torch.set_num_threads(given.cores)
    torch.manual_seed(given.seed)
    work = Work.load(given.data, given.seed)
    load = DataLoader if DEVICE == "cpu" else Batches
    clients = [
        load(TensorDataset(*work.tensors(index)), BATCH, shuffle=True) for index in work.train
    ]
    judges = load(TensorDataset(*work.tensors(work.held.ravel())), CHUNK)
    net, meter = work.net(), Meter()
    for t in range(1, given.rounds + 1):
        models = []
        for k in work.choose(t):
            client = copy.deepcopy(net)
            train(client, clients[k])
            models.append(client.state_dict())
        net.load_state_dict(average(models))
        meter.round(evaluate(net, judges))


if __name__ == "__main__":
    main()
