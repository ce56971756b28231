"""pfl-research: its simulated backend, one process a core, evaluation shared between them.

Its averages leave out BatchNorm's statistics (each process keeps those of the client it trained
last), and a client's batches are the same in every epoch.
"""

import logging
import os
import subprocess
import sys
import types

import numpy as np
import torch
from torch.nn import functional as F
from work import BATCH, CHUNK, EPOCHS, LR, TALLY, Meter, P, Work, options


def another_process(given) -> subprocess.Popen | None:
    """Make this process rank 0 of a torch.distributed group, and start rank 1 where two cores are
    asked for.
    """
    if given.cores == 1 or "RANK" in os.environ:
        return None
    port = str(20000 + os.getpid() % 20000)
    group = {
        "TORCHELASTIC_RUN_ID": "bench",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    os.environ.update(group)
    other = subprocess.Popen(
        [sys.executable, *sys.argv], env={**os.environ, "RANK": "1", "LOCAL_RANK": "1"}
    )
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0"})
    return other


def model(work: Work) -> torch.nn.Module:
    """The network, with the two methods that pfl asks for."""
    from pfl.metrics import Weighted

    def loss(self, x, y, is_eval=False):
        self.train(not is_eval)
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y, is_eval=True):
        self.eval()
        return {"accuracy": Weighted(int((self(x).argmax(1) == y).sum()), len(y))}

    net = work.net()
    net.loss, net.metrics = types.MethodType(loss, net), types.MethodType(metrics, net)
    return net


def federation(work: Work):
    """(what the clients train on, all validation samples)"""
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler

    parts = {k: Dataset(list(work.tensors(index))) for k, index in enumerate(work.train)}
    return FederatedDataset(parts.get, get_user_sampler("minimize_reuse", list(parts))), Dataset(
        list(work.tensors(work.held.ravel()))
    )


def simulate(work: Work, rounds: int) -> None:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Judge(CentralEvaluationCallback):
        """Also after the first round, and not before it."""

        def on_train_begin(self, *, model):
            model._allows_distributed_evaluation = True
            self.meter = Meter()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            found = self._eval(model)
            if os.environ.get("RANK", "0") == "0":
                values = found[1].to_simple_dict()
                self.meter.round(next(v for k, v in values.items() if "accuracy" in k))
            return found

    clients, judges = federation(work)
    net = model(work)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**6,
            train_cohort_size=P,
            val_cohort_size=None,
        ),
        SimulatedBackend(clients, None),
        PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0)),
        NNTrainHyperParams(local_num_epochs=EPOCHS, local_learning_rate=LR, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=CHUNK),
        callbacks=[Judge(judges, NNEvalHyperParams(local_batch_size=CHUNK))],
    )


def main() -> None:
    tally = os.environ.get(TALLY)
    given = options(__doc__)
    if tally and "RANK" in os.environ:
        os.environ[TALLY] = tally  # rank 1 counts where rank 0 does
    other = another_process(given)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    np.random.seed(given.seed)
    simulate(Work.load(given.data, given.seed), given.rounds)
    if other:
        other.wait()


if __name__ == "__main__":
    main()
