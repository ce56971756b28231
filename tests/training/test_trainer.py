"""Links, schedules, objectives, roles: the torch trainer against loops written by hand, the stack
against it.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flrce import Link
from flrce.config.experiment import Experiment
from flrce.core.types import LocalWork, Task
from flrce.errors import BadInput
from flrce.models.flat import make_layout, pack_model
from flrce.simulation import runs
from flrce.training.augment import Cutout, GaussianNoise, RandomCrop, RandomFlip
from flrce.training.batches import SampleBatches, Samples
from flrce.training.gpu.batch_trainer import ClientBatchTrainer
from flrce.training.metrics import METRICS, macro_f1, roc_auc
from flrce.training.objectives import Classification, MultiLabel, NextToken, Regression
from flrce.training.schedules import CosineDecay, RoundDecay, StepDecay, WarmUp
from flrce.training.trainer import TorchTrainer
from flrce.training.update_chain import (
    SGD,
    Adam,
    GradientClip,
    GradientShift,
    Momentum,
    PersistentLink,
    ProximalTerm,
    UpdateChain,
    WeightDecay,
    match_plain_sgd,
)
from training import assert_resumes, local

ORDER, SIZES = np.array([0, 1, 2, 3, 4, 5, 6, 7, 1, 3, 5, 7]), np.array([4, 4, 4])


def net(outputs=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs))


def samples(classes=3):
    g = torch.Generator().manual_seed(2)
    return torch.randn(8, 5, generator=g), torch.randint(classes, (8,), generator=g)


def trained(chain, objective=Classification(), y=None, outputs=3, t=1, carry=None, **tensors):
    module, (x, labels) = net(outputs), samples()
    trainer = TorchTrainer(module, (5,), objective)
    job = local(trainer, SIZES, chain=chain, t=t, **tensors)
    y = labels if y is None else y
    return trainer.train(
        pack_model(module), SampleBatches(Samples(x, y), ORDER, SIZES), chain, job, carry or {}
    )


def by_hand(
    make, clip=None, penalty=None, rates=(1.0, 1.0, 1.0), loss=F.cross_entropy, y=None, outputs=3
):
    """The same batches with torch.optim."""
    module, (x, labels) = net(outputs), samples()
    y, optimiser = labels if y is None else y, make(module.parameters())
    start, base = [p.detach().clone() for p in module.parameters()], optimiser.param_groups[0]["lr"]
    for step in range(3):
        index = ORDER[4 * step : 4 * step + 4]
        optimiser.param_groups[0]["lr"] = base * rates[step]
        optimiser.zero_grad()
        value = loss(module(x[index]), y[index])
        (value + (penalty(module.parameters(), start) if penalty else 0)).backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimiser.step()
    return pack_model(module)


SAME = {
    "sgd": (UpdateChain((SGD(0.3),)), lambda p: torch.optim.SGD(p, 0.3), {}),
    "momentum": (
        UpdateChain((Momentum(0.8), SGD(0.3))),
        lambda p: torch.optim.SGD(p, 0.3, 0.8),
        {},
    ),
    "nesterov": (
        UpdateChain((Momentum(0.8, True), SGD(0.3))),
        lambda p: torch.optim.SGD(p, 0.3, 0.8, nesterov=True),
        {},
    ),
    "decay": (
        UpdateChain((WeightDecay(0.2), SGD(0.3))),
        lambda p: torch.optim.SGD(p, 0.3, weight_decay=0.2),
        {},
    ),
    "clip": (
        UpdateChain((GradientClip(0.05), SGD(0.3))),
        lambda p: torch.optim.SGD(p, 0.3),
        {"clip": 0.05},
    ),
    "adam": (UpdateChain((Adam(0.03),)), lambda p: torch.optim.Adam(p, 0.03), {}),
    "adamw": (
        UpdateChain((Adam(0.03, decay=0.1),)),
        lambda p: torch.optim.AdamW(p, 0.03, weight_decay=0.1),
        {},
    ),
    "prox": (
        UpdateChain((ProximalTerm(0.7), SGD(0.3))),
        lambda p: torch.optim.SGD(p, 0.3),
        {
            "penalty": lambda now, start: (
                0.35 * sum((a - b).square().sum() for a, b in zip(now, start, strict=True))
            )
        },
    ),
    "cosine": (
        UpdateChain((SGD(0.3, CosineDecay(0.1, "round")),)),
        lambda p: torch.optim.SGD(p, 0.3),
        {"rates": [0.1 + 0.9 * (1 + math.cos(math.pi * s / 3)) / 2 for s in range(3)]},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_a_chain_is_torch_s_optimiser(name):
    chain, make, options = SAME[name]
    torch.testing.assert_close(trained(chain).w, by_hand(make, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(SAME))
def test_the_stack_runs_every_shipped_chain_as_torch_does(name):
    """Three clients with batches of their own, of different length, at once."""
    chain = SAME[name][0]
    module, (x, y) = net(), samples()
    plans = [(ORDER, SIZES), (ORDER[:7], np.array([4, 3])), (ORDER[2:7], np.array([5]))]
    trainer = TorchTrainer(module, (5,))
    expected, rates, jobs = [], [], []
    for order, sizes in plans:
        jobs.append(job := local(trainer, sizes, chain=chain))
        expected.append(
            trainer.train(
                pack_model(module), SampleBatches(Samples(x, y), order, sizes), chain, job
            )
        )
        rates.append(np.array([chain.compute_step_rate(s, job) for s in range(len(sizes))]))
    stack = ClientBatchTrainer(module, (5,), x, y, 1.0, 0.0, "cpu")
    w, losses, _ = stack.train(
        pack_model(module).repeat(3, 1),
        [o for o, _ in plans],
        [s for _, s in plans],
        rates,
        update=chain,
        locals=jobs,
    )
    for lane, done in enumerate(expected):
        torch.testing.assert_close(w[lane], done.w, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(losses[lane], done.losses, rtol=1e-5, atol=1e-6)


def test_schedules_by_hand():
    assert [StepDecay(2, 0.5)(0, 9, t, 0) for t in (1, 2, 3, 4, 5)] == [1, 1, 0.5, 0.5, 0.25]
    assert [StepDecay(2, 0.5, "round")(s, 9, 1, 0) for s in range(5)] == [1, 1, 0.5, 0.5, 0.25]
    assert RoundDecay(0.9)(3, 9, 3, 0) == pytest.approx(0.81)
    assert [CosineDecay()(0, 9, t, 4) for t in (1, 3)] == pytest.approx(
        [1.0, 0.5]
    )  # half way after two of four rounds
    assert [WarmUp(4, RoundDecay(0.5))(0, 9, t, 0) for t in (1, 4, 5)] == pytest.approx(
        [0.25, 0.125, 0.0625]
    )
    with pytest.raises(BadInput, match="how many rounds"):
        CosineDecay()(0, 9, 1, 0)


def test_what_is_carried_goes_on_where_it_was():
    """Two rounds with carried momentum are six steps of one optimiser; without, the buffer starts
    anew.
    """
    chain = UpdateChain((PersistentLink(Momentum(0.8)), SGD(0.3)))
    one = trained(chain)
    assert set(one.client_state) == {"0.b"}
    module, (x, y) = net(), samples()
    trainer = TorchTrainer(module, (5,))
    two = trainer.train(
        one.w,
        SampleBatches(Samples(x, y), ORDER, SIZES),
        chain,
        local(trainer, SIZES, chain=chain),
        one.client_state,
    )
    optimiser = torch.optim.SGD(module.parameters(), 0.3, 0.8)
    for step in range(6):
        index = ORDER[4 * (step % 3) : 4 * (step % 3) + 4]
        optimiser.zero_grad()
        F.cross_entropy(module(x[index]), y[index]).backward()
        optimiser.step()
    torch.testing.assert_close(two.w, pack_model(module), rtol=1e-5, atol=1e-6)


def test_drift_shifts_every_gradient():
    shift, own = torch.full((39,), 0.02), torch.full((39,), 0.05)
    chain = UpdateChain((GradientShift("c"), SGD(0.3)))
    plain = UpdateChain((SGD(0.3),))
    moved = trained(chain, carry={"0.c": own}, c=shift).w - pack_model(net())
    # on a linear loss the shift would add exactly 3 * .3 * .03; here it does so up to curvature
    assert float((moved - (trained(plain).w - pack_model(net()))).mean()) == pytest.approx(
        3 * 0.3 * 0.03, rel=0.3
    )


def test_the_last_link_has_a_rate():
    with pytest.raises(BadInput, match="rate lr"):
        UpdateChain((SGD(0.1), GradientClip(1.0)))
    with pytest.raises(BadInput, match=r"must subclass flrce\.Link"):
        UpdateChain((object(), SGD(0.1)))


def test_only_plain_chains_are_simple():
    job = local(TorchTrainer(net(), (5,)), SIZES, chain=UpdateChain())
    assert match_plain_sgd(UpdateChain((ProximalTerm(0.2, False), SGD(0.3))), job).mu == 0.2
    assert (
        match_plain_sgd(
            UpdateChain((SGD(0.3, RoundDecay(0.5)),)), replace(job, task=replace(job.task, t=3))
        ).lr
        == 0.075
    )
    assert "Momentum" in match_plain_sgd(UpdateChain((Momentum(), SGD())), job)
    assert "within a round" in match_plain_sgd(
        UpdateChain((SGD(0.3, CosineDecay(0, "round")),)), job
    )


# --- objectives and metrics ---------------------------------------------------------------------

VALUES = torch.linspace(-1, 1, 8)
TASKS = {
    "smoothing": (
        Classification(smoothing=0.2),
        lambda out, y: F.cross_entropy(out, y, label_smoothing=0.2),
        samples()[1],
        3,
    ),
    "weights": (
        Classification(weights=(1, 2, 3)),
        lambda out, y: (
            F.cross_entropy(out, y, reduction="none") * torch.tensor([1.0, 2, 3])[y]
        ).mean(),
        samples()[1],
        3,
    ),
    "mse": (Regression(), lambda out, y: F.mse_loss(out[:, 0], y), VALUES, 1),
    "huber": (
        Regression("huber", 0.2),
        lambda out, y: F.huber_loss(out[:, 0], y, delta=0.2),
        VALUES,
        1,
    ),
    "quantile": (
        Regression("quantile", quantile=0.9),
        lambda out, y: torch.where(
            y > out[:, 0], 0.9 * (y - out[:, 0]), 0.1 * (out[:, 0] - y)
        ).mean(),
        VALUES,
        1,
    ),
    "labels": (
        MultiLabel(),
        lambda out, y: F.binary_cross_entropy_with_logits(out, y),
        (torch.arange(24).reshape(8, 3) % 2).float(),
        3,
    ),
    "token": (NextToken(), F.cross_entropy, samples()[1], 3),
}


@pytest.mark.parametrize("name", TASKS)
def test_an_objective_is_its_loss(name):
    objective, loss, y, outputs = TASKS[name]
    found = trained(UpdateChain((SGD(0.3),)), objective, y, outputs).w
    torch.testing.assert_close(
        found,
        by_hand(lambda p: torch.optim.SGD(p, 0.3), loss=loss, y=y, outputs=outputs),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("name", TASKS)
def test_the_stack_knows_every_objective(name):
    objective, _, y, outputs = TASKS[name]
    module, (x, _) = net(outputs), samples()
    done = trained(UpdateChain((SGD(0.3),)), objective, y, outputs)
    stack = ClientBatchTrainer(module, (5,), x, y, 1.0, 0.0, "cpu", objective=objective)
    w, _, _ = stack.train(pack_model(module).repeat(2, 1), [ORDER, ORDER], [SIZES, SIZES], 0.3)
    torch.testing.assert_close(w[1], done.w, rtol=1e-5, atol=1e-6)
    here, there = (
        TorchTrainer(module, (5,), objective).evaluate(w[1], x, y, 1, 0),
        stack.evaluate(w, np.arange(8)),
    )
    for key, value in here.items():
        torch.testing.assert_close(there[key][1].double(), value.double(), rtol=1e-4, atol=1e-5)


def test_tokens_count_alike_and_ignored_ones_not():
    out, y = torch.randn(2, 3, 4), torch.tensor([[1, 2, -100], [3, -100, -100]])
    loss = NextToken().losses(out, y)
    assert float(loss[0]) == pytest.approx(float(F.cross_entropy(out[0, :2], y[0, :2])))
    assert float(loss[1]) == pytest.approx(float(F.cross_entropy(out[1, :1], y[1, :1])))
    right, perplexity = NextToken().evaluation_metrics
    nats = F.cross_entropy(
        out.reshape(6, 4), y.reshape(6), ignore_index=-100
    )  # the mean over three tokens
    assert perplexity.value(perplexity.of(out, y).double().numpy()) == pytest.approx(
        math.exp(float(nats)), rel=1e-5
    )
    assert right.of(torch.eye(4)[y.clamp(min=0)], y).tolist() == [[2, 2], [1, 1]]


def test_metrics_by_hand():
    # class 0: tp 1, fp 1, fn 0 -> 2/3; class 1: tp 1, fp 0, fn 1 -> 2/3; class 2: tp 0, fp 1, fn 1
    # -> 0
    pairs = np.array([[0, 0], [0, 2], [1, 1], [2, 1]])
    assert macro_f1(pairs) == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)
    # positives score .9 and .4, negatives .4 and .1: 1 + 1 + 1/2 + 1 of 4 pairs in order
    rows = np.array([[0.1, 0.9, 1], [0.6, 0.4, 1], [0.6, 0.4, 0], [0.9, 0.1, 0]])
    assert roc_auc(rows) == pytest.approx(3.5 / 4)
    assert math.isnan(roc_auc(rows[:2]))
    r2 = METRICS["r2"]
    out, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 2.0, 4.0])
    # errors 0, 0, 1; variance around 7/3: 16/9 + 1/9 + 25/9 = 42/9
    assert r2.value(r2.of(out, y).numpy()) == pytest.approx(1 - 1 / (42 / 9))


def test_metrics_agree_with_scikit_learn():
    from sklearn.metrics import f1_score, roc_auc_score

    rng = np.random.default_rng(0)
    out, y = torch.from_numpy(rng.normal(size=(60, 3))), torch.from_numpy(rng.integers(0, 3, 60))
    p = out.softmax(1).numpy()
    f1, area = METRICS["macro-f1"], METRICS["auc"]
    assert f1.value(f1.of(out, y).numpy()) == pytest.approx(
        f1_score(y, out.argmax(1), average="macro")
    )
    assert area.value(area.of(out, y).double().numpy()) == pytest.approx(
        roc_auc_score(y, p, multi_class="ovr", average="macro"), abs=1e-4
    )


# --- roles --------------------------------------------------------------------------------------


def test_what_is_kept_is_no_part_of_w():
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    all_, where = make_layout(module), make_layout(module, ("2.*", "norms"))
    assert [s.name for s in where.slots] == ["0.weight", "0.bias"]
    assert where.size == 24
    assert where.size + where.personal_layout.size == all_.size
    w, own = torch.arange(24.0), torch.arange(100.0, 100 + where.personal_layout.size)
    whole = where.join(w, own)
    back, mine = where.split(whole)
    assert torch.equal(back, w)
    assert torch.equal(mine, own)
    views = where.local_layout.view_tensors(whole)
    assert views["0.weight"].flatten().tolist() == list(range(20))
    assert torch.equal(views["2.bias"], own[where.personal_layout["2.bias"].span])
    assert torch.equal(views["1.running_var"], own[where.personal_layout["1.running_var"].span])


def test_fixed_parameters_never_travel_and_never_move():
    module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    module[0].requires_grad_(False)
    assert [s.name for s in make_layout(module).slots] == ["1.weight", "1.bias"]
    (x, y), base = samples(), module[0].weight.clone()
    trainer = TorchTrainer(module, (5,))
    done = trainer.train(
        pack_model(module),
        SampleBatches(Samples(x, y), ORDER, SIZES),
        UpdateChain(),
        local(trainer, SIZES, chain=UpdateChain()),
    )
    assert len(done.w) == 15
    assert torch.equal(trainer.net[0].weight, base)
    stack = ClientBatchTrainer(module, (5,), x, y, 1.0, 0.0, "cpu")
    w, _, _ = stack.train(pack_model(module).repeat(2, 1), [ORDER, ORDER], [SIZES, SIZES], 0.1)
    torch.testing.assert_close(w[0], done.w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "piece"),
    [("dropout", "RandomUnits"), ("timelyfl", "DeadlineTraining"), ("heterofl", "")],
)
def test_a_state_of_other_coordinates_is_not_carried(name, piece):
    """Momentum of one unit would move another; a width that a client keeps has the same units each
    time.
    """
    told = {"recipe": {"name": name}, "train": {"momentum": 0.9, "carry": True}}
    if not piece:
        assert Experiment.from_tables(told).build_recipe().submodel.partial
        return
    with pytest.raises(BadInput, match=f"{piece} gives it others in every round; drop"):
        Experiment.from_tables(told).build_recipe()


def test_patterns_that_match_nothing_or_all_are_refused():
    with pytest.raises(BadInput, match="matches no tensor"):
        make_layout(net(), ("head.*",))
    with pytest.raises(BadInput, match="nothing would travel"):
        make_layout(net(), ("*",))


SMALL = {
    "rounds": 3,
    "clients": 8,
    "per_round": 4,
    "train": {"epochs": 1, "batch": 32},
    "engine": {"workers": 1},
}


@pytest.mark.parametrize("kept", ["7.*", "norms", ["1.*", "7.*"]])
def test_kept_parameters_stay_with_their_clients(kept, tmp_path):
    """The bytes of what is kept are not booked; the run resumes to the same bits."""
    tables = SMALL | {
        "recipe": {"name": "fedavg"},
        "model": {"name": "own_nets:Layered", "kept": kept},
    }
    whole = runs.run(Experiment.from_tables(tables | {"model": {"name": "own_nets:Layered"}}))
    found = assert_resumes(Experiment.from_tables(tables), tmp_path)
    built = runs.build_simulation(Experiment.from_tables(tables))
    built.engine.close()
    where = built.engine.runner.layout
    assert [h.bytes_up for h in found.history] == [4 * 4 * where.size] * 3
    assert [h.bytes_up for h in whole.history] == [
        4 * 4 * (where.size + where.personal_layout.size)
    ] * 3


# --- random layers and augmentation -------------------------------------------------------------


@pytest.mark.parametrize("model", ["own_nets:Dropped", "own_nets:Functional"])
def test_random_layers_draw_by_seed_round_and_client(model):
    tables = SMALL | {"model": {"name": model}, "recipe": {"name": "fedavg"}}
    found = [
        runs.run(Experiment.from_tables(tables | {"engine": {"workers": n, "kernel": "torch"}}))
        for n in (1, 2, 1)
    ]
    first = torch.cat([x.flatten() for x in found[0].model.values()])
    for other in found[1:]:
        assert torch.equal(first, torch.cat([x.flatten() for x in other.model.values()]))
    torch.manual_seed(123)  # what was drawn before does not matter
    torch.rand(7)
    again = runs.run(Experiment.from_tables(tables))
    assert torch.equal(first, torch.cat([x.flatten() for x in again.model.values()]))
    other = runs.run(Experiment.from_tables(tables | {"seed": 1}))
    assert not torch.equal(first, torch.cat([x.flatten() for x in other.model.values()]))


def test_transforms_keep_shapes_and_do_what_they_say():
    x = torch.arange(2 * 1 * 4 * 4, dtype=torch.float32).reshape(2, 1, 4, 4) + 1
    rng = torch.Generator().manual_seed(0)
    assert torch.equal(RandomFlip(1.0)(x, rng), x.flip(-1))
    assert torch.equal(RandomFlip(0.0)(x, rng), x)
    assert RandomCrop(1)(x, rng).shape == x.shape
    cut = Cutout(2)(x, rng)
    assert ((cut == x) | (cut == 0)).all()
    assert 1 <= int((cut[0] == 0).sum()) <= 4
    assert 0.05 < float((GaussianNoise(0.1)(x, rng) - x).std()) < 0.2
    one, two = (RandomCrop(2)(x, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)


def test_augmented_runs_are_the_same_for_any_workers():
    few = SMALL | {"recipe": {"name": "fedavg"}}
    tables = few | {"train": {**few["train"], "augment": ["flip", {"piece": "crop", "pad": 1}]}}
    found = [runs.run(Experiment.from_tables(tables | {"engine": {"workers": n}})) for n in (1, 2)]
    models = [torch.cat([x.flatten() for x in each.model.values()]) for each in found]
    assert torch.equal(*models)
    plain = runs.run(Experiment.from_tables(few | {"engine": {"kernel": "torch", "workers": 1}}))
    assert not torch.equal(models[0], torch.cat([x.flatten() for x in plain.model.values()]))


# --- as a user writes them ----------------------------------------------------------------------


@dataclass(frozen=True)
class Signs(Link):
    """A link of a user's own: only the gradient's signs count."""

    def step(self, g, w, state):
        return g.sign(), state


TRAINS = {
    "adamw": {"optimizer": "adamw", "lr": 0.01, "clip": 1.0, "schedule": "cosine"},
    "momentum": {
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 1e-4,
        "carry": True,
        "lr": 0.05,
    },
    "own": {"update": [{"piece": "test_trainer:Signs"}, {"piece": "sgd", "lr": 0.002}]},
    "schedule": {
        "schedule": {
            "piece": "warm-up",
            "rounds": 2,
            "then": {"piece": "round-decay", "factor": 0.9},
        }
    },
    "steps": {"steps": 7},
}


@pytest.mark.parametrize(
    ("recipe", "train"),
    [
        *(("fedavg", each) for each in TRAINS),
        ("flrce", "adamw"),
        ("flrce", "steps"),
        ("fedprox", "momentum"),
        ("fedprox", "own"),
    ],
)
def test_experiment_files_name_any_update(recipe, train, tmp_path):
    """Each with a plain recipe; with one that compares updates and one that bends them, two
    each.
    """
    tables = {
        "rounds": 6,
        "clients": 10,
        "per_round": 5,
        "recipe": {"name": recipe},
        "engine": {"workers": 1},
    }
    tables["train"] = {"epochs": 2, **TRAINS[train]}
    found = runs.run(Experiment.from_tables(tables), tmp_path / "run")
    assert found.summary["accuracy_last"] > 0.3
    assert (
        Experiment.load(tmp_path / "run" / "experiment.toml").build_recipe().update
        == Experiment.from_tables(tables).build_recipe().update
    )


def test_old_files_may_say_in_the_trainer_how_much_clients_train():
    recipe = Experiment.from_tables(
        {"recipe": {"trainer": {"piece": "freeze", "first": 1, "epochs": 2, "lr": 0.3}}}
    ).build_recipe()
    assert recipe.work == LocalWork(2, 16)
    assert recipe.update == UpdateChain((SGD(0.3),))


def test_a_task_without_an_update_is_plain_sgd():
    assert Task("a", 0, 1, 0).update is None


class PartlyUsed(nn.Module):
    """An embedding with sparse gradients, a linear layer, and one that no output depends on."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(6, 2, sparse=True), nn.Linear(2, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, ids):
        return self.head(self.tokens(ids).mean(1))


def test_a_step_uses_the_gradients_of_its_own_batch_only():
    """Two steps on different ids, beside torch.optim.SGD: rows of the embedding that only the first
    batch uses move once, and parameters without a gradient stay.
    """
    module, ids = PartlyUsed(), torch.tensor([[0, 1], [1, 2], [3, 4], [4, 5]])
    y, order, sizes = torch.tensor([0, 1, 2, 0]), np.arange(4), np.array([2, 2])
    trainer, chain = TorchTrainer(module, (2,)), UpdateChain((SGD(0.5),))
    batches = SampleBatches(Samples(ids, y), order, sizes)
    done = trainer.train(pack_model(module), batches, chain, local(trainer, sizes, chain=chain))
    optimiser = torch.optim.SGD(module.parameters(), 0.5)
    for some in (slice(0, 2), slice(2, 4)):
        optimiser.zero_grad()
        F.cross_entropy(module(ids[some]), y[some]).backward()
        optimiser.step()
    torch.testing.assert_close(done.w, pack_model(module))
    assert all(p.grad is None for p in trainer.net.parameters())
