"""Links that ask more of a batch than one gradient: further gradients, one for each sample, terms,
features.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flrce import Link
from flrce.config.experiment import Experiment
from flrce.core.types import Task
from flrce.errors import BadInput
from flrce.models.flat import pack_model, unpack_model
from flrce.simulation import runs
from flrce.training.batches import SampleBatches, Samples
from flrce.training.links import ClientContext
from flrce.training.trainer import TorchTrainer
from flrce.training.update_chain import (
    SGD,
    Momentum,
    PersistentLink,
    ProximalTerm,
    UpdateChain,
    WeightDecay,
)
from training import assert_resumes, local

ORDER, SIZES = np.array([0, 1, 2, 3, 4, 5, 6, 7, 1, 3, 5, 7]), np.array([4, 4, 4])


def plain():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def normed():
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


def random():
    return nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3))


def trained(make, *links, steps=3, order=ORDER):
    torch.manual_seed(1)
    module = make()
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(8, 5, generator=g), torch.randint(3, (8,), generator=g)
    chain, sizes = UpdateChain((*links, SGD(0.3))), SIZES[:steps]
    trainer = TorchTrainer(module, (5,))
    job = local(trainer, sizes, chain=chain)
    return (
        trainer.train(
            pack_model(module),
            SampleBatches(Samples(x, y), order[: sizes.sum()], sizes),
            chain,
            job,
        ),
        module,
        x,
        y,
    )


def seen_by(look):
    """A link that looks and changes nothing; what it saw, step by step."""
    found = []

    @dataclass(frozen=True)
    class Looks(Link):
        def probe(self, g, w, state, batch):
            found.append(look(g, w, batch))
            return g, state

    return Looks(), found


@pytest.mark.parametrize("make", [plain, normed, random])
def test_looking_changes_nothing(make):
    """w, statistics and draws of random layers are as if nobody had asked; here and now has the
    step's own gradient.
    """

    def look(g, w, batch):
        batch.forward_at(torch.ones_like(w))
        batch.gradient_at(w + 1)
        return batch.gradient_at(w.clone()), g.clone()

    link, found = seen_by(look)
    (asked, *_), (alone, *_) = trained(make, link), trained(make)
    torch.testing.assert_close(asked.w, alone.w, rtol=0, atol=0)
    torch.testing.assert_close(asked.losses, alone.losses, rtol=0, atol=0)
    for again, own in found:
        torch.testing.assert_close(again, own, rtol=0, atol=0)


def test_a_gradient_elsewhere_is_autograd_s():
    link, found = seen_by(lambda g, w, batch: (w.clone(), batch.gradient_at(2 * w)))
    _, module, x, y = trained(plain, link)
    for step, (w, there) in enumerate(found):
        index = ORDER[4 * step : 4 * step + 4]
        unpack_model(module, 2 * w)
        loss = F.cross_entropy(module(x[index]), y[index])
        wanted = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]
        )
        torch.testing.assert_close(there, wanted, rtol=1e-6, atol=1e-7)


def test_gradients_of_each_sample():
    link, found = seen_by(
        lambda g, w, batch: (
            g.clone(),
            batch.sample_gradients(),
            batch.sample_gradients(2 * w),
            batch.gradient_at(2 * w),
        )
    )
    trained(plain, link)
    for g, each, there, mean in found:
        assert each.shape == (4, len(g))
        torch.testing.assert_close(each.mean(0), g, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(there.mean(0), mean, rtol=1e-5, atol=1e-7)
        assert not torch.allclose(each[0], each[1])
    with pytest.raises(BadInput, match="BatchNorm mixes samples"):
        trained(normed, link)


def test_features_and_outputs_under_another_model():
    link, found = seen_by(
        lambda g, w, batch: (batch.features, batch.out, *batch.forward_at(3 * w), w.clone())
    )
    _, module, x, _ = trained(plain, link)
    for step, (features, out, far, near, w) in enumerate(found):
        index = ORDER[4 * step : 4 * step + 4]
        unpack_model(module, w)
        torch.testing.assert_close(module[1](module[0](x[index])), features)
        torch.testing.assert_close(module(x[index]), out)
        unpack_model(module, 3 * w)
        torch.testing.assert_close(module(x[index]), far)
        torch.testing.assert_close(module[1](module[0](x[index])), near)


@dataclass(frozen=True)
class Decay(Link):
    """Weight decay as a term, a share of it for each sample."""

    decay: float = 0.2

    def loss_term(self, batch, state):
        spread = sum(p.square().sum() for p in batch.scene.net.parameters())
        return self.decay / 2 * spread * torch.ones(len(batch.y))


def test_a_term_is_part_of_the_loss_but_not_of_what_is_reported():
    (termed, *_), (decayed, *_) = trained(plain, Decay(0.2)), trained(plain, WeightDecay(0.2))
    torch.testing.assert_close(termed.w, decayed.w, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(termed.losses, decayed.losses, rtol=1e-5, atol=1e-6)


def test_gradients_elsewhere_have_the_terms_too():
    link, found = seen_by(lambda g, w, batch: (batch.gradient_at(w.clone()), g.clone()))
    trained(plain, Decay(0.2), link)
    for again, own in found:
        torch.testing.assert_close(again, own)


@dataclass(frozen=True)
class Wrong(Link):
    def loss_term(self, batch, state):
        return torch.zeros(1)


def test_a_term_is_one_value_for_each_sample():
    with pytest.raises(
        BadInput, match=r"Wrong\.loss_term gave a tensor of \(1,\), not one value for each sample"
    ):
        trained(plain, Wrong())


@dataclass(frozen=True)
class Fixed(Link):
    """The first three coordinates stay where they are."""

    def step(self, g, w, state):
        return g, state

    def frozen_coordinates(self, state):
        return torch.arange(39) < 3


def test_what_is_held_does_not_move_whatever_comes_behind():
    done, *_ = trained(plain, Fixed(), Momentum(0.9), ProximalTerm(0.1))
    torch.manual_seed(1)
    start = pack_model(plain())
    assert torch.equal(done.w[:3], start[:3])
    assert (done.w[3:] != start[3:]).all()


def test_randomness_is_the_client_s():
    link, found = seen_by(lambda g, w, batch: torch.randn(2, generator=batch.rng).tolist())
    trained(plain, link)
    first = list(found)
    found.clear()
    trained(plain, link)
    assert found == first
    assert found[0] != found[1]


@dataclass(frozen=True)
class Private(Link):
    """DP-SGD's gradient: each sample's own, clipped, with noise."""

    norm: float = 0.5
    noise: float = 0.1

    def probe(self, g, w, state, batch):
        each = batch.sample_gradients()
        each = each * (self.norm / each.norm(dim=1, keepdim=True)).clamp(max=1)
        drawn = torch.randn(len(w), generator=batch.rng)
        return (each.sum(0) + self.noise * self.norm * drawn) / len(each), state


def test_a_link_of_one_s_own_runs_resumes_and_says_why_it_is_not_fused(tmp_path, caplog):
    exp = Experiment.from_tables(
        {
            "rounds": 4,
            "clients": 6,
            "per_round": 3,
            "recipe": {"name": "fedavg"},
            "model": {"name": "own_nets:Bare"},
            "train": {
                "batch": 32,
                "epochs": 1,
                "update": [{"piece": "test_links:Private"}, {"piece": "sgd", "lr": 0.1}],
            },
            "engine": {"workers": 1},
        }
    )
    assert_resumes(exp, tmp_path)
    assert any("the update has Private" in message for message in caplog.messages)


def test_the_last_layer_of_a_network_is_found():
    with pytest.raises(BadInput, match="what the last layer is given"):
        runs.run(
            Experiment.from_tables(
                {
                    "rounds": 1,
                    "clients": 4,
                    "per_round": 2,
                    "recipe": {"name": "moon"},
                    "model": {"name": "logistic"},
                    "engine": {"workers": 1},
                }
            )
        )


def test_what_is_no_link_is_refused():
    with pytest.raises(BadInput, match=r"class object must subclass flrce\.Link"):
        UpdateChain((object(), SGD()))
    with pytest.raises(BadInput, match="Wrong has no step"):
        PersistentLink(Wrong())


@dataclass(frozen=True)
class Plain(Link):
    """The least that can end a chain: a rate, without a schedule and without a word about
    stacks.
    """

    lr: float = 0.25

    def step(self, g, w, state):
        return g, state


def test_a_chain_ends_with_a_rate_of_its_own_or_inside_what_is_carried():
    local = ClientContext(Task("a", 0, 1, 0), 3, 8, None)
    assert UpdateChain((Plain(),)).compute_step_rate(2, local) == 0.25
    carried = PersistentLink(Plain())
    assert UpdateChain((carried,)).compute_step_rate(2, local) == 0.25
    assert not carried.supports_client_batches
    assert PersistentLink(Momentum()).supports_client_batches
    with pytest.raises(BadInput, match="rate lr"):
        UpdateChain((PersistentLink(Momentum()),))


@pytest.mark.parametrize(
    ("gives", "why"),
    [
        (lambda g, state: g, "Own.step gave Tensor; it is to return a pair"),
        (lambda g, state: None, "Own.step gave NoneType"),
        (lambda g, state: (g, [1]), "Own.step gave Tensor, list"),
        (lambda g, state: (g[:1], state), r"Own.step gave a gradient of \(1,\) for \(2,\)"),
    ],
)
def test_a_link_of_ones_own_that_gives_something_else_is_named(gives, why):
    class Own(Link):
        def step(self, g, w, state):
            return gives(g, state)

    with pytest.raises(BadInput, match=why):
        UpdateChain((Own(), SGD())).step(torch.ones(2), torch.zeros(2), ({}, {}))
