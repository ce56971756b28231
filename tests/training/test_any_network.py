"""Networks that a user may bring, whatever their code does: on every trainer what a plain loop of
PyTorch gives.
"""

import copy
import random
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flrce import Experiment
from flrce.core.types import LocalWork, Task
from flrce.data.sources import Source
from flrce.errors import BadInput
from flrce.models.flat import list_model_tensors, make_layout, pack_model
from flrce.models.nets import build_network
from flrce.simulation import runs
from flrce.simulation.run_slot import DeviceSchedulers, fingerprint_network
from flrce.training.batches import draw_batches
from flrce.training.trainer import TorchTrainer, derive_layer_seed

rng = np.random.default_rng(0)
X = rng.normal(size=(72, 1, 4, 4)).astype(np.float32)
DATA = Source("made", X, (X[:, 0, 0, 0] > 0).astype(np.int64) + (X[:, 0, 1, 1] > 0), tuple("abc"))
EXPERIMENT = Experiment(
    rounds=2,
    clients=4,
    per_round=2,
    recipe={"name": "fedavg"},
    data={"partition": "iid"},
    train={"epochs": 2, "batch": 5, "lr": 0.2},
    engine={"workers": 1},
)


class Net(nn.Module):
    """Layers by name, and a function of the network and x that uses them."""

    def __init__(self, code, **layers):
        super().__init__()
        self.code = code
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.code(self, x)


def plain_loop(net, federation, chosen):
    """FedAvg by torch's own optimiser, on the same batches; the model by name, and its mean loss on
    every hold-out.
    """
    experiment, source = EXPERIMENT, federation.source
    x, y = torch.from_numpy(source.x), torch.from_numpy(source.y)
    w = {name: value.clone() for name, value, _ in list_model_tensors(net)}
    for t, clients in enumerate(chosen, 1):
        sums, total = dict.fromkeys(w, 0), 0
        for client in clients:
            own = copy.deepcopy(net).train()
            for name, value, _ in list_model_tensors(own):
                value.copy_(w[name])
            task = Task(
                client,
                0,
                t,
                experiment.seed,
                LocalWork(experiment.train.epochs, experiment.train.batch),
            )
            index = federation.get_client_samples(client, t)
            normalised = any(isinstance(layer, nn.BatchNorm2d) for layer in net.modules())
            order, sizes = draw_batches(task, len(index), normalised)
            seed(derive_layer_seed(task))
            step = torch.optim.SGD(own.parameters(), experiment.train.lr)
            for here in np.split(index[order], np.cumsum(sizes)[:-1]):
                step.zero_grad()
                F.cross_entropy(own(x[here]), y[here]).backward()
                step.step()
            sums = {
                name: sums[name] + len(index) * value.double()
                for name, value, _ in list_model_tensors(own)
            }
            total += len(index)
        w = {name: (value / total).float() for name, value in sums.items()}
    return w


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def trained(net, kernel, schedulers=None):
    """(the model by name, the mean losses of its rounds' evaluations, who trained)."""
    engine = {**EXPERIMENT.engine.model_dump(exclude_none=True), "kernel": kernel}
    experiment = Experiment(**{**EXPERIMENT.model_dump(exclude_none=True), "engine": engine})
    built = runs.build_simulation(experiment, DATA, net, schedulers)
    with closing(built.engine):
        done = list(built.iterate_rounds(experiment))
    losses = [round.record.loss for round in done]
    views = built.engine.runner.layout.view_tensors(done[-1].state.w)
    return views, losses, built.federation, [round.record.chosen for round in done]


class Frozen(Net):
    """Its BatchNorm never trains."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


def counting(net, x):
    net.n += 1
    return net.out(torch.relu(net.a(x.flatten(1)))) / (1 + 0.1 * net.n)


def noting(net, x):
    net.calls += 1
    return net.out(torch.relu(net.a(x.flatten(1)))) / (1 + 0.1 * net.calls)


def deciding(net, x):
    x = net.a(x.flatten(1))
    return net.out(torch.tanh(x) if x.mean() > 0 else x)


def only_training(net, x):
    x = net.a(x.flatten(1))
    return net.out(torch.relu(x) if net.training else x)


def tied_only_training(net, x):
    x = F.linear(torch.tanh(net.a(x.flatten(1))), net.a.weight.t())
    return net.last(torch.relu(x) if net.training else x)


def still(net, x):
    with torch.no_grad():
        x = net.a(x.flatten(1))
    return net.out(torch.relu(x))


def noted():
    net = Net(noting, **two())
    net.calls = 0
    return net


def counted():
    net = Net(counting, **two())
    net.register_buffer("n", torch.tensor(0))
    return net


def stands():
    net = Frozen(
        lambda net, x: net.out(torch.relu(net.norm(net.c(x))).flatten(1)),
        c=nn.Conv2d(1, 3, 3),
        norm=nn.BatchNorm2d(3),
        out=nn.Linear(12, 3),
    )
    net.norm.running_mean.fill_(0.3)
    return net


def two():
    return {"a": nn.Linear(16, 6), "out": nn.Linear(6, 3)}


def chance(draw):
    def code(net, x):
        x = torch.relu(net.a(x.flatten(1)))
        return net.out(x * 0.5 if net.training and draw() < 0.5 else x)

    return code


NETS = {
    "Python's chance": lambda: Net(chance(random.random), **two()),
    "numpy's chance": lambda: Net(chance(np.random.rand), **two()),
    "plane again": lambda: Net(
        lambda net, x: net.out(torch.relu(net.c(x.view(-1, 1, 4, 4))).flatten(1)),
        c=nn.Conv2d(1, 2, 3),
        out=nn.Linear(8, 3),
    ),
    "rows": lambda: Net(lambda net, x: net.out(x.view(-1, 2, 8)).sum(1), out=nn.Linear(8, 3)),
    "mean of all": lambda: Net(
        lambda net, x: net.out((x + 0 * x.mean()).flatten(1)), out=nn.Linear(16, 3)
    ),
    "mean of pixels": lambda: Net(
        lambda net, x: net.out(torch.relu(net.c(x)).flatten(2).mean(2)),
        c=nn.Conv2d(1, 4, 3),
        out=nn.Linear(4, 3),
    ),
    "other in training": lambda: Net(only_training, **two()),
    "the same, tied": lambda: Net(tied_only_training, a=nn.Linear(16, 6), last=nn.Linear(16, 3)),
    "without gradient": lambda: Net(still, **two()),
    "frozen norm": stands,
    "counts": counted,
    "notes": noted,
    "decides": lambda: Net(deciding, **two()),
}


@pytest.mark.parametrize("name", NETS)
def test_every_trainer_gives_what_a_plain_loop_gives(name):
    torch.manual_seed(0)
    net = NETS[name]()
    losses = None
    for kernel, schedulers in (("torch", None), ("auto", None), ("auto", DeviceSchedulers("cpu"))):
        found, judged, federation, chosen = trained(net, kernel, schedulers)
        expected = plain_loop(net, federation, chosen)
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4)
        losses = losses or judged
        assert judged == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize(
    "flatten",
    [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.reshape(x.shape[0], -1),
        lambda x: x.view(-1, 8),
        lambda x: torch.reshape(x, (-1, 8)),
        lambda x: x.flatten(start_dim=1),
    ],
)
def test_usual_ways_to_flatten_have_fused_kernels(flatten):
    torch.manual_seed(0)
    net = Net(
        lambda net, x: net.out(flatten(torch.relu(net.c(x)))),
        c=nn.Conv2d(1, 2, 3),
        out=nn.Linear(8, 3),
    )
    built = runs.build_simulation(EXPERIMENT, DATA, net)
    with closing(built.engine):
        assert built.engine.workers.name == "native"


def test_draws_while_judging_hang_on_nothing(caplog):
    """F.dropout drops in evaluation too unless it is told: the same figures each time, and one
    line.
    """
    torch.manual_seed(0)
    net = Net(lambda net, x: net.out(F.dropout(torch.relu(net.a(x.flatten(1))), 0.5)), **two())
    first, again, stacked = (
        trained(net, "torch", schedulers)[1] for schedulers in (None, None, DeviceSchedulers("cpu"))
    )
    assert first == again == pytest.approx(stacked, rel=1e-3)
    assert "Net draws at random while it judges" in caplog.text


@pytest.mark.parametrize("make", [counted, noted])
def test_the_first_look_at_a_model_is_as_the_second(make):
    """A worker's first batch tells whether a network draws; what it counts on the way is
    forgotten.
    """
    net = make()
    trainer, w, y = TorchTrainer(net, (1, 4, 4)), pack_model(net), torch.from_numpy(DATA.y)
    first, again = (trainer.evaluate(w, torch.from_numpy(X), y, 1.0, 0.0)["loss"] for _ in range(2))
    assert torch.equal(first, again)


def test_lazy_norms_begin_with_fresh_statistics():
    net = nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(3))
    built = runs.build_simulation(EXPERIMENT, DATA, net)
    built.engine.close()
    assert built.net[1].running_mean.tolist() == [0.0] * 3
    assert built.net[1].running_var.tolist() == [1.0] * 3


def test_compiled_networks_train_as_what_they_were_made_of(caplog):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 6), nn.ReLU())
    net = nn.Sequential(nn.Flatten(), inner, nn.Linear(6, 3))
    parted = nn.Sequential(net[0], torch.compile(inner), net[2])
    expected = trained(net, "torch")[0]
    for other in (torch.compile(net), parted):
        found = trained(other, "torch")[0]
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "trains as the module that it was made of" in caplog.text


def test_a_network_without_values_says_so():
    with pytest.raises(BadInput, match="without values"):
        runs.run(EXPERIMENT, data=DATA, model=nn.Linear(16, 3, device="meta"))


def overwrites(net, x):
    x = net.a(x.flatten(1)).sigmoid()
    return net.out(x.mul_(0.5))


@pytest.mark.parametrize(
    ("net", "line"),
    [
        (
            lambda: torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(16, 3))),
            "torch.jit, whose copies do not train",
        ),
        (
            lambda: Net(
                lambda net, x: net.out(net.a(x.flatten(1).double())).float(),
                a=nn.Linear(16, 6).double(),
                out=nn.Linear(6, 3).double(),
            ),
            "cast to a layer's own dtype, as in x.to",
        ),
        (
            lambda: Net(overwrites, **two()),
            r"Net cannot be trained on a batch of shape \(5, 1, 4, 4\): .*inplace",
        ),
    ],
)
def test_what_cannot_train_is_told_in_one_line(net, line):
    with pytest.raises(BadInput, match=line):
        trained(net(), "torch")


class Leaning(nn.Sequential):
    """What its printed form does not show."""

    def __init__(self, shape, classes, factor):
        super().__init__(nn.Flatten(), nn.Linear(64, classes))
        self.factor = factor

    def forward(self, x):
        return self.factor * super().forward(x)


def test_networks_of_one_printed_form_have_a_deck_each():
    exps = [
        Experiment(
            rounds=1,
            clients=4,
            per_round=2,
            recipe={"name": "fedavg"},
            train={"epochs": 1},
            engine={"workers": 1, "kernel": "torch"},
            model={"name": "test_any_network:Leaning", "options": {"factor": factor}},
        )
        for factor in (1.0, 3.0)
    ]
    for exp, found in zip(
        exps, runs.run_together([(exp, None) for exp in exps], device="cpu"), strict=True
    ):
        expected = runs.run(exp).model
        for name, tensor in found.model.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


def test_seeds_of_a_network_share_a_deck():
    nets = [nn.Sequential(nn.Flatten(1, 2), nn.LSTM(4, 3)) for _ in range(2)]
    assert fingerprint_network(nets[0], ()) == fingerprint_network(nets[1], ())
    assert fingerprint_network(nn.TransformerEncoderLayer(4, 1), ()) != fingerprint_network(
        nn.TransformerEncoderLayer(4, 1, norm_first=True), ()
    )


@pytest.mark.parametrize("name", ["cnn-cifar", "resnet-8", "resnet-18", "lstm", "gru", "gpt"])
def test_seeds_of_a_shipped_network_share_a_deck(name):
    """Buffers such as BatchNorm's count are told apart by what they hold, not by where they lie."""
    shape, words = ((3, 32, 32), 0) if name.startswith(("cnn", "res")) else ((16,), 20)
    first, second = (build_network(name, shape, 20, seed, vocabulary=words) for seed in (0, 1))
    own = {slot.name for slot in make_layout(first).slots}
    assert fingerprint_network(first, own) == fingerprint_network(second, own)


def test_a_dict_of_other_keys_is_another_network():
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    nets[0].scales, nets[1].scales = {"a": 1.0}, {"b": 1.0}
    assert fingerprint_network(nets[0], ()) != fingerprint_network(nets[1], ())
