"""A client's round by released training functions and by flrce, on the same model and batches."""

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from released import Check, load_definitions
from torch import Tensor, nn, optim

from flrce.core.pieces import NoCompression
from flrce.core.types import ClientCost, LocalWork, Reply, Task, Updates
from flrce.methods.aggregation.fednova import FedNovaMean
from flrce.methods.client.feddyn import DynamicRegularizer
from flrce.methods.client.moon import ContrastiveTerm
from flrce.methods.client.personalization import FedRepPhases
from flrce.methods.client.scaffold import DELTA, C, ControlVariate
from flrce.methods.client.step_counts import ROUND
from flrce.models.flat import make_layout, pack_model, unpack_model
from flrce.training.batches import Samples, draw_batches
from flrce.training.client import LINK_STATE_PREFIX, ClientRunner
from flrce.training.update_chain import SGD, Momentum, UpdateChain

SAMPLES, FEATURES, HIDDEN, CLASSES = 23, 12, 8, 3
RATE, EPOCHS, BATCH = 0.1, 3, 5
SEEDS = range(5)
# torch no longer takes the factor of `add_` first
ALPHA_LAST = {
    "add_(self.mu, p.data - param_state['old_init'])": (
        "add_(p.data - param_state['old_init'], alpha=self.mu)"
    ),
    "add_(local_lr, d_p)": "add_(d_p, alpha=local_lr)",
    "add_(-local_lr, d_p)": "add_(d_p, alpha=-local_lr)",
}
LIMIT = 3e-6  # float32, fifteen steps


class FeatureNetwork(nn.Module):
    """Returns (features, projection, output) as MOON's networks do; nothing is projected."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.net[:-1](x)
        return features, features, self.net[-1](features)


class EpochBatches:
    """Batches that flrce draws for a task; every iteration is the next epoch."""

    def __init__(self, x: Tensor, y: Tensor, task: Task) -> None:
        order, sizes = draw_batches(task, len(x), False)
        index = torch.from_numpy(order).split(sizes.tolist())
        per_epoch = len(index) // task.work.epochs
        self.epochs = [index[i : i + per_epoch] for i in range(0, len(index), per_epoch)]
        self.x, self.y, self.next = x, y, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self.epochs[self.next]
        self.next += 1
        return iter([(self.x[b].clone(), self.y[b].clone()) for b in batches])

    def __len__(self) -> int:
        return len(self.epochs[0])


class Case:
    """A network, samples and a task, drawn from a seed."""

    def __init__(self, seed: int, links: tuple[Any, ...], **task: Any) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
        self.x = torch.randn(SAMPLES, FEATURES)
        self.y = torch.randint(0, CLASSES, (SAMPLES,))
        self.w = pack_model(self.net).clone()
        self.task = Task(
            "a",
            0,
            3,
            seed,
            LocalWork(EPOCHS, BATCH),
            update=UpdateChain((*links, SGD(RATE))),
            compressor=NoCompression(),
            **task,
        )

    def draw_vector(self, scale: float = 0.05) -> Tensor:
        return scale * torch.randn(len(self.w))

    def copy_network(self, w: Tensor) -> nn.Sequential:
        net = copy.deepcopy(self.net)
        unpack_model(net, w)
        return net

    def make_batches(self) -> EpochBatches:
        return EpochBatches(self.x, self.y, self.task)

    def train(self, client_state: dict[str, Tensor], kept: tuple[str, ...] = ()) -> Reply:
        runner = ClientRunner(self.net, (FEATURES,), Samples(self.x, self.y), kept=kept)
        w = pack_model(self.net, runner.layout) if kept else self.w
        named = {LINK_STATE_PREFIX + name: value for name, value in client_state.items()}
        return runner.train(w, self.task, np.arange(SAMPLES), named)


def verify_client_training(code: Path) -> list[Check]:
    return [
        verify_scaffold(code),
        verify_fednova(code),
        verify_fednova_steps(code),
        verify_feddyn(code),
        verify_feddc(code),
        verify_moon(code),
        verify_niid_moon(code),
        verify_fedrep(code),
    ]


def measure_distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two vectors, over the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))


def get_update(reply: Reply) -> Tensor:
    assert reply.payload is not None, reply.error
    return reply.payload.buffers["u"]


def build_niid_namespace(**args: Any) -> dict[str, Any]:
    """What the functions of NIID-Bench read of their module."""

    def compute_accuracy(*_: Any, get_confusion_matrix: bool = False, **__: Any) -> Any:
        return (0.0, None) if get_confusion_matrix else 0.0

    return {
        "torch": torch,
        "nn": nn,
        "optim": optim,
        "copy": copy,
        "logger": logging.getLogger("released"),
        "compute_accuracy": compute_accuracy,
        "args": SimpleNamespace(**{"lr": RATE, "reg": 0.0, "rho": 0.0, **args}),
    }


def verify_scaffold(code: Path) -> Check:
    name = "train_net_scaffold"
    scope = load_definitions(code, "niid-bench", "experiments.py", [name], build_niid_namespace())
    worst = 0.0
    for seed in SEEDS:
        case = Case(seed, (ControlVariate("II"),))
        c, own = case.draw_vector(), case.draw_vector()
        case.task.tensors.update({C: c, ROUND: torch.tensor([2])})  # type: ignore[attr-defined]
        kept = {f"0.{C}": own, f"0.{C}.after": own, f"0.{ROUND}": torch.tensor([2])}
        net = case.copy_network(case.w)
        start, c_own, c_all = (case.copy_network(v) for v in (case.w, own, c))
        batches = case.make_batches()
        *_, delta = scope[name](0, net, start, c_own, c_all, batches, None, EPOCHS, RATE, "sgd")
        reply = case.train(kept)
        released_delta = torch.cat([each.flatten() for each in delta.values()])
        worst = max(
            worst,
            measure_distance(case.w + get_update(reply), pack_model(net)),
            measure_distance(reply.extras[DELTA], released_delta),
        )
    return Check("SCAFFOLD", f"NIID-Bench {name}", len(SEEDS), worst, LIMIT)


def verify_fednova(code: Path) -> Check:
    """The normaliser and the normalised gradient of a client with momentum."""
    name = "train_net_fednova"
    namespace = build_niid_namespace(rho=0.7)
    scope = load_definitions(code, "niid-bench", "experiments.py", [name], namespace)
    worst = 0.0
    for seed in SEEDS:
        case = Case(seed, (Momentum(0.7),))
        net, start = case.copy_network(case.w), case.copy_network(case.w)
        *_, a, gradient = scope[name](0, net, start, case.make_batches(), None, EPOCHS, RATE, "sgd")
        u = get_update(case.train({}))
        tau = sum(len(epoch) for epoch in case.make_batches().epochs)
        mine = count_effective_steps(tau, momentum=0.7)
        released = torch.cat([each.flatten() for each in gradient.values()])
        worst = max(worst, abs(mine - a) / a, measure_distance(-u / mine, released))
    return Check("FedNova, momentum", f"NIID-Bench {name}", len(SEEDS), worst, LIMIT)


def count_effective_steps(tau: int, momentum: float = 0.0, prox: float = 0.0) -> float:
    spent = (ClientCost(batches=tau),)
    one = torch.ones(1)
    updates = Updates(torch.zeros(1, dtype=torch.long), torch.zeros(1, 1), one, 1, spent=spent)
    return float(FedNovaMean(momentum, prox).effective_steps(updates)[0])


def verify_fednova_steps(code: Path) -> Check:
    """The authors' optimiser with a proximal term: its normalising vector after tau steps."""
    namespace = {"torch": torch, "Optimizer": optim.Optimizer, "required": object()}
    file = "distoptim/FedNova.py"
    scope = load_definitions(code, "fednova", file, ["FedNova"], namespace, ALPHA_LAST)
    worst, mu = 0.0, 0.5
    for tau in range(1, 21):
        parameter = nn.Parameter(torch.ones(1))
        optimiser = scope["FedNova"]([parameter], ratio=1.0, gmf=0, mu=mu, lr=RATE)
        for _ in range(tau):
            parameter.grad = torch.ones(1)
            optimiser.step()
        a = optimiser.local_normalizing_vec
        mine = count_effective_steps(tau, prox=RATE * mu)
        worst = max(worst, abs(mine - a) / a)
    return Check("FedNova, proximal", "FedNova.step", 20, worst, LIMIT)


def build_feddyn_namespace(case: Case) -> dict[str, Any]:
    """What the functions of FedDyn and FedDC read of their modules; clipping is out of reach."""
    batches = case.make_batches()
    return {
        "torch": torch,
        "np": np,
        "device": "cpu",
        "max_norm": 1e9,
        "Dataset": lambda *_, **__: None,
        "data": SimpleNamespace(DataLoader=lambda *_, **__: batches),
        "get_mdl_params": lambda models, *_: np.zeros((1, len(case.w))),
    }


def verify_feddyn(code: Path) -> Check:
    name, alpha, worst = "train_feddyn_mdl", 0.2, 0.0
    for seed in SEEDS:
        case = Case(seed, (DynamicRegularizer(alpha),))
        way = case.draw_vector()
        case.task.tensors.update({ROUND: torch.tensor([2])})  # type: ignore[attr-defined]
        kept = {"0.feddyn.way": way, "0.feddyn.way.after": way, f"0.{ROUND}": torch.tensor([2])}
        namespace = build_feddyn_namespace(case)
        scope = load_definitions(code, "feddyn", "utils_general.py", [name], namespace)
        net = scope[name](
            case.copy_network(case.w),
            lambda case=case: case.net,
            alpha,
            case.w,
            way,
            case.x,
            case.y,
            RATE,
            BATCH,
            EPOCHS,
            1000,
            0.0,
            "",
        )
        trained = case.w + get_update(case.train(kept))
        worst = max(worst, measure_distance(trained, pack_model(net.requires_grad_(True))))
    return Check("FedDyn", name, len(SEEDS), worst, LIMIT)


def verify_feddc(code: Path) -> Check:
    name, alpha, worst = "train_model_FedDC", 0.2, 0.0
    for seed in SEEDS:
        links = (ControlVariate("II"), DynamicRegularizer(alpha))
        case = Case(seed, links)
        c, own, drift = case.draw_vector(), case.draw_vector(), case.draw_vector()
        counted = torch.tensor([2])
        case.task.tensors.update({C: c, ROUND: counted})  # type: ignore[attr-defined]
        kept = {
            f"0.{C}": own,
            f"0.{C}.after": own,
            f"0.{ROUND}": counted,
            "1.feddyn.way": drift,
            "1.feddyn.way.after": drift,
            f"1.{ROUND}": counted,
        }
        namespace = build_feddyn_namespace(case)
        scope = load_definitions(code, "feddc", "utils_general.py", [name], namespace)
        net = scope[name](
            case.copy_network(case.w),
            lambda case=case: case.net,
            alpha,
            own,
            c,
            case.w,
            drift,
            case.x,
            case.y,
            RATE,
            BATCH,
            EPOCHS,
            1000,
            0.0,
            "",
            1,
            1.0,
        )
        trained = case.w + get_update(case.train(kept))
        worst = max(worst, measure_distance(trained, pack_model(net.requires_grad_(True))))
    return Check("FedDC", name, len(SEEDS), worst, LIMIT)


def prepare_moon(seed: int, momentum: float) -> tuple[Case, Tensor, dict[str, Tensor]]:
    case = Case(seed, (ContrastiveTerm(1.0, 0.5), Momentum(momentum)))
    last = case.w + case.draw_vector(0.3)
    return case, last, {"0.last": last}


def verify_moon(code: Path) -> Check:
    name, worst = "train_net_fedcon", 0.0
    namespace = {**build_niid_namespace(), "compute_accuracy": return_accuracies}
    scope = load_definitions(code, "moon", "main.py", [name], namespace)
    for seed in SEEDS:
        case, last, kept = prepare_moon(seed, 0.9)
        nets = [FeatureNetwork(case.copy_network(w)) for w in (case.w, case.w, last)]
        with stay_on_cpu():
            scope[name](
                0,
                nets[0],
                nets[1],
                nets[2:],
                case.make_batches(),
                [],
                EPOCHS,
                RATE,
                "sgd",
                1.0,
                0.5,
                SimpleNamespace(reg=0.0),
                0,
            )
        u = get_update(case.train(kept))
        worst = max(worst, measure_distance(case.w + u, pack_model(nets[0].net)))
    return Check("MOON", name, len(SEEDS), worst, LIMIT)


def return_accuracies(*_: Any, get_confusion_matrix: bool = False, **__: Any) -> Any:
    return (0.0, None, 0.0) if get_confusion_matrix else (0.0, 0.0)


class stay_on_cpu:
    """`.cuda()` returns the module or tensor itself, while released code runs."""

    def __enter__(self) -> None:
        self.kept = (Tensor.cuda, nn.Module.cuda)
        Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign,assignment]
        nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign,assignment]

    def __exit__(self, *_: object) -> None:
        Tensor.cuda, nn.Module.cuda = self.kept  # type: ignore[method-assign]


def verify_niid_moon(code: Path) -> Check:
    name, worst = "train_net_moon", 0.0
    namespace = build_niid_namespace(loss="contrastive")
    scope = load_definitions(code, "niid-bench", "experiments.py", [name], namespace)
    for seed in SEEDS:
        case, last, kept = prepare_moon(seed, 0.9)
        nets = [FeatureNetwork(case.copy_network(w)) for w in (case.w, case.w, last)]
        scope[name](
            0,
            nets[0],
            nets[1],
            nets[2:],
            case.make_batches(),
            None,
            EPOCHS,
            RATE,
            "sgd",
            1.0,
            0.5,
            SimpleNamespace(reg=0.0, loss="contrastive"),
            0,
        )
        u = get_update(case.train(kept))
        worst = max(worst, measure_distance(case.w + u, pack_model(nets[0].net)))
    return Check("MOON", f"NIID-Bench {name}", len(SEEDS), worst, LIMIT)


def make_plain_sgd(groups: Any, lr: float, momentum: float) -> optim.SGD:
    """The authors' optimizer without its momentum and weight decay."""
    return optim.SGD([p for group in groups for p in group["params"]], lr=lr)


def verify_fedrep(code: Path) -> Check:
    """The body after both phases."""
    worst = 0.0
    for seed in SEEDS:
        case = Case(seed, (FedRepPhases(1),))
        batches = case.make_batches()
        namespace = {
            "torch": SimpleNamespace(optim=SimpleNamespace(SGD=make_plain_sgd)),
            "nn": nn,
            "DataLoader": lambda *_, **__: None,
            "DatasetSplit": lambda *_, **__: None,
        }
        scope = load_definitions(code, "fedrep", "models/Update.py", ["LocalUpdate"], namespace)
        args = SimpleNamespace(
            dataset="mnist",
            local_bs=BATCH,
            alg="fedrep",
            local_ep=EPOCHS,
            local_rep_ep=1,
            local_updates=10**9,
            device="cpu",
        )
        update = scope["LocalUpdate"](args, dataset=None, idxs=[])
        update.ldr_train = batches
        net = case.copy_network(case.w)
        update.train(net, ["0.weight", "0.bias"], lr=RATE)
        layout = make_layout(case.net, ("2.*",))
        start = pack_model(case.net, layout)
        body = start + get_update(case.train({}, ("2.*",)))
        worst = max(worst, measure_distance(body, pack_model(net, layout)))
    return Check("FedRep", "LocalUpdate.train", len(SEEDS), worst, LIMIT)
