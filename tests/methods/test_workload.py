"""How much and how: uneven epochs, proximal terms, frozen blocks, deadlines, corrected
gradients.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flrce.config.experiment import Experiment
from flrce.core.pieces import NoCompression
from flrce.core.roles import RoundView
from flrce.core.types import ClientCost, LocalWork, Portion, RoundEvent, Task, Updates
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.client import fedcom
from flrce.methods.client.fedcom import CorrectedTraining
from flrce.methods.client.workload import (
    DeadlineTraining,
    FrozenBlocksTraining,
    ProximalTraining,
    find_first_trained_block,
    with_epochs,
)
from flrce.models.flat import pack_model, unpack_model
from flrce.simulation import runs
from flrce.training.batches import Samples, draw_batches
from flrce.training.client import ClientRunner
from flrce.training.update_chain import SGD, ProximalTerm, UpdateChain
from training import require_valid_fields


def tasks(P, t=1, epochs=5):
    return [
        Task(str(k), k, t, seed=0, work=LocalWork(epochs), compressor=NoCompression())
        for k in range(P)
    ]


def view(speed=None, blocks=1, flops=(1.0,)):
    """Clients take speed[client] = (seconds an epoch, seconds of transfer); block b on takes a
    share flops[b].
    """

    def estimate(task):
        compute, transfer = (speed or {}).get(task.client, (1.0, 0.0))
        share = flops[task.part.first]
        return ClientCost(
            flops=1e9 * share,
            compute_seconds=compute * task.work.epochs * share,
            transfer_seconds=transfer,
        )

    return RoundView(1, 4, tuple(range(4)), torch.ones(4), estimate, None, None, blocks=blocks)


def test_epochs_are_drawn_by_client_and_round():
    trainer = ProximalTraining(epochs_from=[3, 4, 5])
    seen = Counter(
        task.work.epochs
        for t in range(1, 61)
        for task in trainer.assign(tasks(10, t), None, view())
    )
    assert set(seen) == {3, 4, 5}
    assert all(abs(count - 200) < 60 for count in seen.values())  # 600 draws, sd 11.5
    alone = trainer.assign(tasks(10, 7)[4:5], None, view())[0]
    assert (
        alone.work == trainer.assign(tasks(10, 7), None, view())[4].work
    )  # whoever else is chosen
    assert trainer.links == (ProximalTerm(0.01, True),)


def test_an_exact_share_straggles():
    for t in range(1, 20):
        epochs = [
            task.work.epochs
            for task in ProximalTraining(stragglers=0.5).assign(tasks(10, t), None, view())
        ]
        assert sum(e < 5 for e in epochs) == 5
        assert min(epochs) >= 1
    assert {
        task.work.epochs
        for task in ProximalTraining(stragglers=0.9).assign(tasks(10, epochs=1), None, view())
    } == {1}


def test_the_proximal_recipe_draws_from_three_fifths_on():
    assert recipes.fedprox().trainer.epochs_from == (3, 4, 5)
    assert recipes.fedprox(epochs=1).trainer.epochs_from == (1,)
    assert recipes.fedprox(epochs_from=[]).trainer.epochs_from == ()
    authors = recipes.fedprox(preset="authors").trainer
    assert (authors.squared, authors.mu) == (False, 0.05)
    with pytest.raises(BadInput, match="preset"):
        recipes.fedprox(preset="theirs")


@pytest.mark.parametrize(
    "make",
    [
        lambda: ProximalTraining(mu=-1),
        lambda: ProximalTraining(epochs_from=[0, 2]),
        lambda: ProximalTraining(stragglers=2),
        lambda: FrozenBlocksTraining(first=-1),
        lambda: DeadlineTraining(share=0),
        lambda: DeadlineTraining(grace=-1),
    ],
)
def test_bad_settings_are_refused(make):
    with pytest.raises(BadInput):
        require_valid_fields(make())


@pytest.mark.parametrize("squared", [True, False])
def test_the_pull_is_the_penaltys_gradient(squared):
    """Three steps on mu/2 |w - w0|^2 or mu sum |w - w0| per tensor, by autograd."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x, y = torch.randn(6, 1, 2, 2), torch.tensor([0, 1, 0, 1, 1, 0])
    shop, w = ClientRunner(net, (1, 2, 2), Samples(x, y)), pack_model(net).clone()
    update = UpdateChain((ProximalTerm(0.7, squared), SGD(0.5)))
    one = Task(
        "a",
        0,
        1,
        seed=0,
        work=LocalWork(epochs=3, batch=6),
        update=update,
        compressor=NoCompression(),
    )
    u = shop.train(w, one, np.arange(6), {}).payload.buffers["u"]
    plain = unpack_model(
        nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), w
    )
    start = [p.detach().clone() for p in plain.parameters()]
    order, _ = draw_batches(one, 6, False)
    for step in range(3):
        now = order[6 * step : 6 * step + 6]
        loss = F.cross_entropy(plain(x[now]), y[now])
        for p, p0 in zip(plain.parameters(), start, strict=True):
            if step or squared:  # the norm has no gradient at 0
                loss = loss + (0.35 * (p - p0).square().sum() if squared else 0.7 * (p - p0).norm())
        for p, g in zip(
            plain.parameters(), torch.autograd.grad(loss, list(plain.parameters())), strict=True
        ):
            p.data -= 0.5 * g
    torch.testing.assert_close(w + u, pack_model(plain), rtol=1e-5, atol=1e-6)


def test_a_deadline_by_hand():
    # E = 5: a 5 * 1 + 1 = 6 s, b 5 * 2 + 1 = 11, c 5 * 4 + 2 = 22, d 5 * 30 + 5 = 155; k = 2 of 4,
    # so T_k = 11
    speed = {"0": (1.0, 1.0), "1": (2.0, 1.0), "2": (4.0, 2.0), "3": (30.0, 5.0)}
    told = DeadlineTraining().assign(tasks(4), None, view(speed, blocks=3, flops=(1.0, 0.5, 0.3)))
    # c: floor((11 - 2) / 4) = 2; d: alpha = 11 / 35 = .31, so from the block with .3 of the FLOPs
    # on, for one epoch
    assert [(t.work.epochs, t.part.first) for t in told] == [(5, 0), (5, 0), (2, 0), (1, 2)]
    assert all(t.deadline == pytest.approx(11) for t in told)
    # the original plans with one epoch: 2, 3, 6, 35; T_k = 3: a has time for 2, c cannot finish one
    # (alpha = 1/2)
    told = DeadlineTraining(clip=False).assign(
        tasks(4, epochs=1), None, view(speed, blocks=3, flops=(1.0, 0.5, 0.3))
    )
    assert [(t.work.epochs, t.part.first) for t in told] == [(2, 0), (1, 0), (1, 1), (1, 2)]


def test_an_unknown_pace_is_no_pace_of_zero():
    """Nobody measured: no deadline. Some measured: T_k is theirs, and the others are left to be
    measured.
    """
    nobody = {str(k): (0.0, 0.0) for k in range(4)}
    assert DeadlineTraining().assign(tasks(4), None, view(nobody)) == tasks(4)
    # a 5 * 1 + 1 = 6 s, b 5 * 2 + 1 = 11 are known; k = 1 of 2: T_k = 6, in which b has time for
    # floor(5 / 2) epochs
    some = {"0": (1.0, 1.0), "1": (2.0, 1.0), "2": (0.0, 0.0), "3": (0.0, 0.0)}
    told = DeadlineTraining().assign(tasks(4), None, view(some))
    assert [task.work.epochs for task in told] == [5, 2, 5, 5]
    assert [task.deadline for task in told] == [pytest.approx(6), pytest.approx(6), np.inf, np.inf]
    assert DeadlineTraining(grace=0.5).assign(tasks(4), None, view(some))[
        0
    ].deadline == pytest.approx(9)


def test_equal_clients_keep_all_their_epochs_at_any_share():
    for compute, transfer in ((0.1, 0.7), (1 / 3, 1e-3), (1e-4, 12.7)):
        speed = {str(k): (compute, transfer) for k in range(4)}
        for share in (0.25, 0.5, 1.0):
            for told in DeadlineTraining(share=share).assign(
                tasks(4), None, view(speed, 3, (1.0, 0.5, 0.3))
            ):
                assert (told.work.epochs, told.part.first) == (5, 0)
                assert 5 * compute + transfer <= told.deadline


def test_the_last_block_always_trains():
    v = view(blocks=3, flops=(1.0, 0.5, 0.3))
    assert [
        find_first_trained_block(tasks(1)[0], alpha, v) for alpha in (1.0, 0.99, 0.5, 0.4, 0.01)
    ] == [0, 1, 1, 2, 2]
    assert find_first_trained_block(tasks(1)[0], 0.01, view()) == 0


def test_only_slow_devices_freeze():
    speed = {"0": (1.0, 0.0), "1": (9.0, 0.0)}
    v = view(speed, 2, (1.0, 0.5))
    assert [t.part.first for t in FrozenBlocksTraining(first=1).assign(tasks(2), None, v)] == [1, 1]
    assert [
        t.part.first
        for t in FrozenBlocksTraining(first=1, seconds=20.0).assign(tasks(2, epochs=5), None, v)
    ] == [0, 1]


def gradient(net, w, x, y):
    unpack_model(net, w)
    loss = F.cross_entropy(net(x), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def test_the_correction_is_fedcomgates():
    """Three rounds of two clients against the algorithm in plain loops; the second client misses
    round 2.
    """
    net, lr, rate = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), 0.2, 0.5
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(7, 1, 2, 2, generator=g), torch.tensor([0, 1, 0, 1, 1, 0, 1])
    shop, trainer = ClientRunner(net, (1, 2, 2), Samples(x, y)), CorrectedTraining(lr, rate)
    mine = {0: np.arange(3), 1: np.arange(3, 7)}
    w = v = pack_model(net).clone()
    memory, carry = trainer.initial_state(2, 10, 10), {0: {}, 1: {}}
    delta = {0: torch.zeros(10), 1: torch.zeros(10)}
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    for t, chosen in ((1, [0, 1]), (2, [0]), (3, [0, 1])):
        update = UpdateChain((*trainer.links, SGD(lr)))
        drafts = [
            Task(str(k), k, t, 0, LocalWork(2, 2), update=update, compressor=NoCompression())
            for k in chosen
        ]
        told = trainer.assign(drafts, memory, view())
        U, own = [], {}
        for task in told:
            reply = shop.train(w, task, mine[task.k], carry[task.k])
            carry[task.k] = reply.client_state
            U.append(reply.payload.buffers["u"])
            order, sizes = draw_batches(task, len(mine[task.k]), False)
            z = v.clone()
            for now in np.split(mine[task.k][order], np.cumsum(sizes)[:-1]):
                z = z - lr * (gradient(plain, z, x[now], y[now]) - delta[task.k])
            own[task.k] = ((v - z) / lr, len(sizes))
        mean = torch.stack([q for q, _ in own.values()]).mean(0)
        for k, (q, tau) in own.items():
            delta[k] = delta[k] + (q - mean) / tau
        v = v - rate * lr * mean
        after = w + rate * torch.stack(U).mean(0)
        updates = Updates(
            torch.tensor(chosen), torch.stack(U), torch.ones(len(chosen)).double(), 10
        )
        memory, w = trainer.observe(memory, RoundEvent(t, w, after, updates, 2)), after
        torch.testing.assert_close(w, v, rtol=1e-4, atol=1e-5)
    assert set(memory.means) == {3}  # nobody waits for rounds 1 and 2 any more
    assert delta[0].abs().max() > 0.01


def test_what_was_kept_of_a_round_that_did_not_count_lapses():
    task = Task(
        "a", 0, 5, seed=0, tensors={fedcom.ROUND: torch.tensor([2]), fedcom.MEAN: torch.ones(3)}
    )

    def kept(t):
        state = {
            fedcom.DELTA: torch.full((3,), 4.0),
            "start": torch.zeros(3),
            fedcom.ROUND: torch.tensor([t]),
            "length": torch.tensor([0.1 * 2, 2.0]),
        }
        return fedcom.GradientCorrection().end_round(torch.ones(3), state)[0]

    # lr .1, 2 steps: own = -1 / (.1 * 2) = -5, and the mean's part 1 / 2: 4 - 5 - .5
    assert fedcom.resolve_gradient_correction(task, kept(2), 3).tolist() == pytest.approx(
        [-1.5] * 3
    )
    assert fedcom.resolve_gradient_correction(task, kept(4), 3).tolist() == [4.0] * 3
    assert (
        fedcom.resolve_gradient_correction(replace(task, tensors={}), kept(2), 3).tolist()
        == [4.0] * 3
    )


def test_corrections_object_to_parts_and_other_rates():
    with pytest.raises(BadInput, match="RandomUnits"):
        Experiment.from_tables({"recipe": {"name": "fedcomgate", "submodel": "random-units"}})
    with pytest.raises(BadInput, match="rate"):
        Experiment.from_tables(
            {"recipe": {"name": "fedcomgate", "aggregator": {"piece": "mean", "rate": 0.5}}}
        )
    for other in ("median", "krum", "trimmed", "clipped"):
        with pytest.raises(BadInput, match=r'needs a plain mean .* set aggregator = "mean"'):
            Experiment.from_tables({"recipe": {"name": "fedcomgate", "aggregator": other}})


#: what of a method outlives a round: a client's residual, its drift and the server's means, its
#: units, its blocks
MINE = {"fedcom": {"feedback": True}, "fedcomgate": {}, "flrce-dropout": {}, "timelyfl": {}}


@pytest.mark.parametrize("name", MINE)
def test_a_resumed_run_is_the_same_run(name, tmp_path):
    """What clients keep and what trainers remember survive; every byte of model and ledger is the
    same.
    """
    tables = {
        "clients": 12,
        "per_round": 4,
        "recipe": {"name": name, **MINE[name]},
        "engine": {"workers": 1},
    }
    tables["train"] = {"epochs": 1}
    tables["fleet"] = {"profile": {"jetson-nano": 0.5, "raspberry-pi-4": 0.5}}
    whole = Experiment(rounds=5, **tables)
    runs.run(whole, tmp_path / "straight")

    class Enough(Exception):
        pass

    def stop(done):
        if done.record.t == 3:
            raise Enough

    with pytest.raises(Enough):
        runs.run(whole, tmp_path / "resumed", watch=stop)
    runs.run(whole, tmp_path / "resumed", resume=True)
    for file in ("model.safetensors", "rounds.jsonl", "clients.jsonl"):
        assert (tmp_path / "straight" / file).read_bytes() == (
            tmp_path / "resumed" / file
        ).read_bytes()


def test_timelyfl_freezes_what_does_not_fit_and_refuses_what_is_late():
    """The reproduction's setting in small: one kind of device, large clients that cannot finish an
    epoch by T_k. What they freeze does not move; a reply counts if it keeps the deadline.
    """
    experiment = Experiment(
        rounds=1,
        clients=20,
        per_round=10,
        data={"partition": "quantity"},
        train={"epochs": 5, "batch": 16},
        recipe={"name": "timelyfl"},
        fleet={"profile": "jetson-nano"},
        engine={"workers": 1},
    )
    built = runs.build_simulation(experiment)
    w = pack_model(built.net)
    with runs.closing(built.engine):
        (done,) = built.iterate_rounds(experiment)
        shares = {0: 1.0}
        one = {}
        for client in done.clients:
            k = done.state.roster.index(client.client)
            plain = Task(client.client, k, 1, seed=0, work=built.recipe.work)
            one[client.client] = built.engine.estimate(with_epochs(plain, 1))
            for first in range(1, built.engine.blocks):
                part = replace(with_epochs(plain, 1), part=Portion(first=first))
                shares[first] = built.engine.estimate(part).flops / one[client.client].flops
    totals = sorted(5 * x.compute_seconds + x.transfer_seconds for x in one.values())
    T_k = totals[len(totals) // 2 - 1]
    late = []
    for client in done.clients:
        x = one[client.client]
        alpha = T_k / x.seconds
        fitting = [first for first, share in shares.items() if share <= alpha]
        first = min(fitting, default=max(shares)) if alpha < 1 else 0
        if first:
            assert client.spent.bytes_up < client.spent.bytes_down
        else:
            fits = int((T_k - x.transfer_seconds) / x.compute_seconds + 1e-9)
            assert client.spent.batches == x.batches * max(min(fits, 5), 1)
        assert client.outcome.startswith("late") == (client.spent.seconds > T_k * (1 + 1e-9))
        late.append(client.n) if client.outcome.startswith("late") else None
    # a batch's fixed cost is not frozen: the large clients are late all the same, and are refused
    assert late
    assert min(late) > max(c.n for c in done.clients if c.n not in late)
    assert not torch.equal(done.state.w, w)


def test_slow_devices_train_less_under_a_deadline():
    tables = {"rounds": 4, "clients": 12, "per_round": 6, "engine": {"workers": 1}}
    tables["fleet"] = {"profile": {"jetson-nano": 0.5, "raspberry-pi-4": 0.5}}
    spent = {
        name: runs.run(Experiment(**tables, recipe={"name": name})).summary
        for name in ("fedavg", "timelyfl")
    }
    assert spent["timelyfl"]["seconds"] < spent["fedavg"]["seconds"]
    assert spent["timelyfl"]["joules"] < spent["fedavg"]["joules"]
