"""The field's methods against their papers' algorithms in plain loops, client after client and step
after step.
"""

import math
from contextlib import closing
from dataclasses import replace
from functools import cache

import pytest
import torch
from sklearn.datasets import load_diabetes
from test_loop import Made, vec
from test_servers import Uneven
from torch import nn
from torch.nn import functional as F

from flrce.config.experiment import Experiment
from flrce.core.loop import make_initial_state, rounds
from flrce.core.types import ClientCost, LocalWork, RoundEvent, Task, Updates
from flrce.errors import BadInput
from flrce.methods.aggregation.fednova import FedNovaMean
from flrce.methods.aggregation.staleness import FedAsyncMixing
from flrce.methods.catalogue import recipes
from flrce.methods.catalogue.standard import STANDARD_RECIPES
from flrce.methods.client.scaffold import DELTA, C
from flrce.methods.pacing.pace import OverCommitment
from flrce.methods.server.averages import SWA, GrowingTailMean
from flrce.models.flat import make_layout, pack_model, unpack_model
from flrce.models.inputs import scale_inputs
from flrce.simulation import runs
from flrce.simulation.run_slot import DeviceSchedulers
from flrce.training.batches import draw_batches
from training import assert_resumes

LR, BATCH, EPOCHS, M = 0.1, 32, 2, 6


def experiment(recipe, **changes):
    tables = {
        "rounds": 4,
        "clients": M,
        "per_round": 3,
        "recipe": recipe,
        "model": {"name": "own_nets:Bare"},
        "train": {"lr": LR, "batch": BATCH, "epochs": EPOCHS},
        "engine": {"workers": 1, "kernel": "torch"},
    }
    return Experiment.from_tables(tables | changes)


class Loops:
    """Samples, batches and gradients of a run, and nothing else of the framework."""

    def __init__(self, exp):
        self.built = runs.build_simulation(exp)
        self.net, self.federation, self.runner = (
            self.built.net,
            self.built.federation,
            self.built.engine.runner,
        )
        self.seed, self.trainable = exp.seed, make_layout(self.net).trainable

    def indices(self, client, t, epochs=EPOCHS):
        """The samples of each batch."""
        own = self.federation.train[self.federation.client_indices[client]]
        order, sizes = draw_batches(
            Task(client, 0, t, self.seed, LocalWork(epochs, BATCH)),
            len(own),
            self.runner.normalised,
        )
        return torch.from_numpy(own[order]).split(sizes.tolist())

    def n(self, client):
        return len(self.federation.train[self.federation.client_indices[client]])

    def gradient(self, w, index):
        unpack_model(self.net, w)
        out = self.net(scale_inputs(self.runner.x[index], self.runner.scale, self.runner.shift))
        loss = F.cross_entropy(out, self.runner.y[index])
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(self.net.parameters()))]
        )

    def sgd(self, w, indices, bend=lambda g, w: g):
        """Plain steps along bent gradients."""
        for index in indices:
            w = w - LR * bend(self.gradient(w, index), w)
        return w


def played(recipe, method, **changes):
    """A run beside the same method in loops: (the run's last model, the loops')."""
    exp = experiment(recipe, **changes)
    loops = Loops(exp)
    with closing(loops.built.engine):
        done = list(loops.built.iterate_rounds(exp))
        w = pack_model(loops.net)
        memory = {}
        for r in done:
            w = method(loops, w, r.record.replied, r.record.t, memory)
    return done, done[-1].state.w, w


def mean(loops, w, replied, t, weights="samples"):
    """FedAvg's mean update."""
    n = {k: loops.n(k) if weights == "samples" else 1 for k in replied}
    return sum(n[k] * (loops.sgd(w, loops.indices(k, t)) - w) for k in replied) / sum(n.values())


def momentum(loops, w, replied, t, memory):
    memory["m"] = 0.8 * memory.get("m", 0) + mean(loops, w, replied, t)
    return w + 0.5 * memory["m"]


def adaptive(kind):
    def method(loops, w, replied, t, memory):
        delta, beta1 = mean(loops, w, replied, t), 0.0 if kind == "adagrad" else 0.9
        m = beta1 * memory.get("m", 0) + (1 - beta1) * delta
        v, square = memory.get("v", torch.full_like(w, 1e-6)), delta**2
        if kind == "adam":
            v = 0.99 * v + 0.01 * square
        elif kind == "yogi":
            v = v - 0.01 * square * torch.sign(v - square)
        else:
            v = v + square
        memory |= {"m": m, "v": v}
        return w + 0.02 * m / (v.sqrt() + 1e-3)

    return method


def exp_(loops, w, replied, t, memory):
    us = [loops.sgd(w, loops.indices(k, t)) - w for k in replied]
    delta = sum(us) / len(us)
    eta = sum(float(u @ u) for u in us) / (2 * len(us) * (float(delta @ delta) + 1e-3))
    return w + max(1.0, eta) * delta


def scaffold(option, rate):
    """Algorithm 1 of the paper, with its letters: x, c, y_i, c_i."""

    def method(loops, x, replied, t, memory):
        c, variates = memory.setdefault("c", torch.zeros_like(x)), memory.setdefault("c_i", {})
        dx, dc = torch.zeros_like(x), torch.zeros_like(x)
        for i in replied:
            c_i = variates.get(i, torch.zeros_like(x))
            steps = loops.indices(i, t, EPOCHS + (option == "I"))
            one = len(steps) // (EPOCHS + 1)
            survey, steps = (steps[:one], steps[one:]) if option == "I" else ([], steps)
            y = loops.sgd(x, steps, lambda g, _, c_i=c_i, c=c: g - c_i + c)
            new = c_i - c + (x - y) / (len(steps) * LR)
            if option == "I":
                new = loops.gradient(x, torch.cat(survey))  # the whole of f_i at once
            dx += (y - x) / len(replied)
            dc += (new - c_i) / len(replied)
            variates[i] = new
        memory["c"] = c + len(replied) / M * dc
        return x + rate * dx

    return method


def feddyn(loops, theta, replied, t, memory):
    """Algorithm 1 of the paper: grad_k and h as they stand there."""
    alpha, grads, h = (
        0.2,
        memory.setdefault("grads", {}),
        memory.setdefault("h", torch.zeros_like(theta)),
    )
    local = {}
    for k in replied:
        grad = grads.get(k, torch.zeros_like(theta))
        local[k] = loops.sgd(
            theta, loops.indices(k, t), lambda g, w, grad=grad: g - grad + alpha * (w - theta)
        )
        grads[k] = grad - alpha * (local[k] - theta)
    h = memory["h"] = h - alpha / M * sum(local[k] - theta for k in replied)
    return sum(local.values()) / len(replied) - h / alpha


def fednova(rho, mu=0.0):
    """Eq. 6 and 7 of the paper: gradients weighted by a_i; d_i their normalised sum."""

    def method(loops, x, replied, t, memory):
        total, tau_eff, moved = sum(loops.n(k) for k in replied), 0.0, torch.zeros_like(x)
        for k in replied:
            steps, y, buffer, gradients = loops.indices(k, t), x, 0, []
            for index in steps:
                gradients.append(loops.gradient(y, index))
                buffer = rho * buffer + gradients[-1]
                y = y - LR * (buffer + mu * (y - x))
            tau, p = len(steps), loops.n(k) / total
            a = [
                sum(rho**j for j in range(tau - s)) * (1 - LR * mu) ** (tau - 1 - s)
                for s in range(tau)
            ]
            d = sum(weight * g for weight, g in zip(a, gradients, strict=True)) / sum(a)
            tau_eff += p * sum(a)
            moved += p * LR * d
        return x - tau_eff * moved

    return method


def feddc(loops, w, replied, t, memory):
    """The released code's letters: state_gadient_diffs (c, c_i), parameter_drifts (h_i)."""
    alpha, c = 0.2, memory.setdefault("c", torch.zeros_like(w))
    variates, drifts = memory.setdefault("c_i", {}), memory.setdefault("h", {})
    local, change = {}, torch.zeros_like(w)
    for k in replied:
        c_k, h = (table.get(k, torch.zeros_like(w)) for table in (variates, drifts))
        steps = loops.indices(k, t)
        local[k] = loops.sgd(
            w, steps, lambda g, v, c_k=c_k, h=h: g + alpha * (v - (w - h)) + (c - c_k)
        )
        drifts[k] = h + local[k] - w
        variates[k] = c_k - c - (local[k] - w) / (len(steps) * LR)
        change += variates[k] - c_k
    memory["c"] = c + change / M
    return sum(local.values()) / len(replied) + sum(drifts.values()) / M


def moon(loops, w, replied, t, memory):
    """Algorithm 1 of the paper, with z before the last layer and autograd over both losses at
    once.
    """
    last, mu, tau = memory.setdefault("last", {}), 2.0, 0.5

    def features(vector, x):
        unpack_model(loops.net, vector)
        return nn.Sequential(*list(loops.net)[:-1])(x)

    def gradient(v, index, k):
        x = scale_inputs(loops.runner.x[index], loops.runner.scale, loops.runner.shift)
        with torch.no_grad():
            z_glob, z_prev = (
                features(w, x).clone(),
                features(last[k], x).clone() if k in last else None,
            )
        z = features(v, x)
        loss = F.cross_entropy(loops.net[-1](z), loops.runner.y[index])
        if z_prev is not None:
            near, far = (
                torch.exp(F.cosine_similarity(z, other) / tau) for other in (z_glob, z_prev)
            )
            loss = loss + mu * -torch.log(near / (near + far)).mean()
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(loops.net.parameters()))]
        )

    local, total = {}, sum(loops.n(k) for k in replied)
    for k in replied:
        v = w
        for index in loops.indices(k, t):
            v = v - LR * gradient(v, index, k)
        local[k] = v
    last |= local
    return sum(loops.n(k) * local[k] for k in replied) / total


def fedsam(loops, w, replied, t, memory):
    def sharp(loops, v, index):
        g = loops.gradient(v, index)
        return loops.gradient(v + 0.1 * g / g.norm(), index)

    moved, total = torch.zeros_like(w), sum(loops.n(k) for k in replied)
    for k in replied:
        v = w
        for index in loops.indices(k, t):
            v = v - LR * sharp(loops, v, index)
        moved += loops.n(k) / total * (v - w)
    return w + moved


METHODS = {
    "fedavgm": ({"beta": 0.8, "rate": 0.5}, momentum, {}),
    "fedadam": ({"rate": 0.02}, adaptive("adam"), {}),
    "fedyogi": ({"rate": 0.02}, adaptive("yogi"), {}),
    "fedadagrad": ({"rate": 0.02}, adaptive("adagrad"), {}),
    "fedexp": ({}, exp_, {}),
    "scaffold": ({}, scaffold("II", 1.0), {}),
    "scaffold, a server rate": ({"rate": 0.7}, scaffold("II", 0.7), {}),
    "scaffold, option I": ({"option": "I"}, scaffold("I", 1.0), {}),
    "feddyn": ({"alpha": 0.2}, feddyn, {}),
    "feddc": ({"alpha": 0.2}, feddc, {"rounds": 6}),
    "moon": ({"mu": 2.0}, moon, {"rounds": 6}),
    "fedsam": ({"rho": 0.1}, fedsam, {}),
    "fednova": ({}, fednova(0.0), {}),
    "fednova, proximal": ({"mu": 0.5}, fednova(0.0, 0.5), {}),
    "fednova, momentum": (
        {},
        fednova(0.7),
        {"train": {"lr": LR, "batch": BATCH, "epochs": EPOCHS, "momentum": 0.7}},
    ),
}


@pytest.fixture(scope="module")
def fedavg():
    """FedAvg's model after so many of the same rounds, each asked for once."""

    @cache
    def after(count):
        *_, last = runs.rounds(experiment({"name": "fedavg"}, rounds=count))
        return last.state.w

    return after


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_its_paper_s(name, fedavg):
    settings, method, changes = METHODS[name]
    done, found, wanted = played({"name": name.partition(",")[0], **settings}, method, **changes)
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)
    assert not torch.allclose(found, fedavg(len(done)), rtol=1e-2, atol=1e-3)  # the test could tell


# --- what a client keeps when its reply does not count ------------------------------------------


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "feddc"])
def test_a_reply_that_did_not_count_leaves_no_trace(name):
    """With spares the slowest are refused every round; the loops know only those that counted."""
    settings, method, _ = METHODS[name]
    spares = {"pace": {"piece": "fastest", "spares": 0.3}}
    fleet = {"profile": {"jetson-nano": 0.5, "raspberry-pi-4": 0.5}}
    done, found, wanted = played(
        {"name": name, **settings, **spares}, method, fleet=fleet, rounds=8
    )
    assert any(r.record.rejected for r in done)
    refused = {client for r in done for client in r.record.rejected}
    assert refused & {client for r in done for client in r.record.replied}
    torch.testing.assert_close(found, wanted, rtol=5e-4, atol=5e-5)


def test_the_server_s_variate_is_the_clients_mean():
    exp = experiment({"name": "scaffold"}, rounds=5)
    *_, last = runs.rounds(exp)
    own = [kept[f"update.0.{C}.after"] for kept in last.state.client_states.values()]
    torch.testing.assert_close(
        last.state.server_state["trainer"].total, sum(own), rtol=1e-4, atol=1e-5
    )
    assert len(own) > 3


# --- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["own_nets:Bare", "own_nets:Layered"])
def test_scaffold_doubles_what_travels(model):
    """d trained floats more each way, statistics once; and the number of a round, 8 bytes down."""
    exp = experiment({"name": "scaffold"}, model={"name": model}, rounds=2)
    built = runs.build_simulation(exp)
    with closing(built.engine):
        where = built.engine.runner.layout
        for r in built.iterate_rounds(exp):
            assert r.record.bytes_up == 3 * 4 * (where.size + where.trainable)
            assert r.record.bytes_down == 3 * (4 * (where.size + where.trainable) + 8)
            estimate = built.engine.estimate(
                Task(
                    r.record.replied[0],
                    0,
                    1,
                    0,
                    LocalWork(EPOCHS, BATCH),
                    update=built.recipe.chain,
                )
            )
            assert estimate.bytes_up == 4 * (where.size + where.trainable)


def test_option_i_pays_for_its_pass():
    flops = {}
    for option in ("I", "II"):
        *_, last = runs.rounds(experiment({"name": "scaffold", "option": option}, rounds=1))
        flops[option] = sum(c.spent.flops for c in last.clients)
    assert flops["I"] == pytest.approx(flops["II"] * (EPOCHS + 1) / EPOCHS)


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ({"name": "fedbn"}, ["1.weight", "1.bias", "1.running_mean", "1.running_var"]),
        ({"name": "fedper"}, ["7.weight", "7.bias"]),
        ({"name": "fedper", "heads": ["5.*", "7.*"]}, ["5.weight", "5.bias", "7.weight", "7.bias"]),
    ],
)
def test_what_is_personal_does_not_travel(recipe, names):
    exp = experiment(recipe, model={"name": "own_nets:Layered"}, rounds=2)
    built = runs.build_simulation(exp)
    with closing(built.engine):
        where = built.engine.runner.layout
        assert sorted(s.name for s in where.personal) == sorted(names)
        done = list(built.iterate_rounds(exp))
    assert [r.record.bytes_up for r in done] == [3 * 4 * where.size] * 2


def test_personal_parts_train_with_the_rest():
    """FedPer in loops: every client goes on from its own head, the body is averaged."""
    exp = experiment({"name": "fedper"})
    loops = Loops(exp)
    with closing(loops.built.engine):
        done = list(loops.built.iterate_rounds(exp))
        whole = make_layout(loops.net)
        head = slice(whole["3.weight"].offset, whole.size)
        w, heads = pack_model(loops.net), {}
        for r in done:
            total, moved = sum(loops.n(k) for k in r.record.replied), torch.zeros_like(w)
            for k in r.record.replied:
                start = w.clone()
                start[head] = heads.get(k, w[head])
                local = loops.sgd(start, loops.indices(k, r.record.t))
                heads[k] = local[head]
                moved += loops.n(k) / total * (local - start)
            moved[head] = 0
            w = w + moved
    torch.testing.assert_close(done[-1].state.w, w[: head.start], rtol=2e-4, atol=2e-5)
    for client, kept in done[-1].state.client_states.items():
        torch.testing.assert_close(kept["kept"], heads[client], rtol=2e-4, atol=2e-5)


def test_fedrep_s_phases():
    """The head for one epoch, then the body for one; momentum does not move what is not trained."""
    changes = {"train": {"lr": LR, "batch": BATCH, "epochs": EPOCHS, "momentum": 0.5}}
    exp = experiment({"name": "fedrep"}, **changes)
    loops = Loops(exp)
    with closing(loops.built.engine):
        done = list(loops.built.iterate_rounds(exp))
        whole = make_layout(loops.net)
        head = torch.arange(whole.size) >= whole["3.weight"].offset
        w, heads = pack_model(loops.net), {}
        for r in done:
            total, moved = sum(loops.n(k) for k in r.record.replied), torch.zeros_like(w)
            for k in r.record.replied:
                start = torch.where(head, heads.get(k, w), w)
                local, buffer = start, torch.zeros_like(w)
                steps = loops.indices(k, r.record.t)
                for s, index in enumerate(steps):
                    trained = head if s < len(steps) // 2 else ~head
                    buffer = 0.5 * buffer + loops.gradient(local, index) * trained
                    local = local - LR * buffer * trained
                heads[k] = local
                moved += loops.n(k) / total * (local - start)
            w = w + moved * ~head
    torch.testing.assert_close(done[-1].state.w, w[~head], rtol=2e-4, atol=2e-5)
    for client, kept in done[-1].state.client_states.items():
        torch.testing.assert_close(kept["kept"], heads[client][head], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "ditto", "strength": 0.3},
        {"name": "apfl", "alpha": 0.7},
        {"name": "apfl", "alpha": 0.4, "adaptive": True},
    ],
    ids=["ditto", "apfl", "apfl, adaptive"],
)
def test_a_model_of_one_s_own(settings):
    """Clients' own models in loops; the shared one is FedAvg's, and each client is judged by its
    own.
    """
    exp = experiment(settings, rounds=5)
    loops = Loops(exp)
    with closing(loops.built.engine):
        done = list(loops.built.iterate_rounds(exp))
        w, own, alphas, judged = pack_model(loops.net), {}, {}, {}
        for r in done:
            local = {}
            for k in r.record.replied:
                v, x, alpha = own.get(k, w), w, alphas.get(k, settings.get("alpha"))
                for s, index in enumerate(loops.indices(k, r.record.t)):
                    if settings["name"] == "ditto":
                        v = v - LR * (loops.gradient(v, index) + 0.3 * (v - w))
                    else:
                        mixed = alpha * v + (1 - alpha) * x
                        g, before = loops.gradient(mixed, index), v
                        v = v - LR * alpha * g
                        if settings.get("adaptive") and s == 0:
                            alpha = min(max(alpha - LR * float((before - x) @ g), 0.0), 1.0)
                    x = x - LR * loops.gradient(x, index)
                own[k], alphas[k], local[k] = v, alpha, x
                judged[k] = v if settings["name"] == "ditto" else alpha * v + (1 - alpha) * x
            w = sum(loops.n(k) * local[k] for k in r.record.replied) / sum(
                loops.n(k) for k in r.record.replied
            )
        torch.testing.assert_close(done[-1].state.w, w, rtol=2e-4, atol=2e-5)
        for client, kept in done[-1].state.client_states.items():
            torch.testing.assert_close(
                kept["update.0.personal"], judged[client], rtol=2e-4, atol=2e-5
            )
        right = []
        for client, row in loops.federation.client_indices.items():
            index = loops.federation.holdout_index[0][loops.federation.holdout_index[1] == row]
            unpack_model(loops.net, judged.get(client, w))
            out = loops.net(
                scale_inputs(loops.runner.x[index], loops.runner.scale, loops.runner.shift)
            )
            right.append(float((out.argmax(1) == loops.runner.y[index]).float().mean()))
        assert done[-1].record.last_model_metric == pytest.approx(sum(right) / len(right), abs=1e-6)
    if settings.get("adaptive"):
        assert len(set(alphas.values())) > 2


@pytest.mark.parametrize(
    ("name", "times"), [("moon", 5 / 3), ("fedsam", 2), ("ditto", 2), ("apfl", 2), ("fedrep", 1)]
)
def test_further_passes_are_paid_for_and_nothing_more_travels(name, times):
    (*_, plain), (*_, more) = (
        runs.rounds(experiment({"name": each}, rounds=2)) for each in ("fedavg", name)
    )
    flops = [sum(c.spent.flops for c in last.clients) for last in (plain, more)]
    assert flops[1] == pytest.approx(times * flops[0])
    assert more.record.bytes_down == more.record.bytes_up
    assert (
        (more.record.bytes_up < plain.record.bytes_up)
        if name == "fedrep"
        else (more.record.bytes_up == plain.record.bytes_up)
    )


# --- asynchronous -------------------------------------------------------------------------------

SECONDS = {"0": 1.0, "1": 2.0, "2": 4.0}


def pulled(client, t, w):
    return 0.3 * (vec(1.0 + int(client), -int(client)) - w)


def asynchronous(T, size, absorb):
    """Clients start anew as soon as a step was taken; `absorb(w, [(start, update, age)])` is the
    server.
    """
    w, t = vec(0, 0), 1
    under_way = {
        client: (seconds, w, 1) for client, seconds in SECONDS.items()
    }  # due, start, round
    for t in range(1, T + 1):
        back = sorted(under_way, key=lambda client: (under_way[client][0], client))[:size]
        clock = max(under_way[client][0] for client in back)
        w = absorb(
            w,
            [
                (start, pulled(c, sent, start), t - sent)
                for c in back
                for _, start, sent in [under_way[c]]
            ],
        )
        under_way |= {client: (clock + SECONDS[client], w, t + 1) for client in back}
    return w


def ran(recipe, T):
    engine = Uneven(pulled, sorted(SECONDS))
    return list(rounds(recipe, engine, make_initial_state(recipe, engine, vec(0, 0)), T, 0))


def test_fedbuff_is_its_paper_s():
    def absorb(w, replies):
        return w + 0.8 * sum(u / math.sqrt(1 + age) for _, u, age in replies) / len(replies)

    done = ran(replace(recipes.fedbuff(size=2, rate=0.8, P=3), minimum=1), 12)
    torch.testing.assert_close(done[-1].state.w, asynchronous(12, 2, absorb), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("staleness", "settings", "weight"),
    [
        ("constant", {}, lambda age: 1.0),
        ("polynomial", {"a": 0.7}, lambda age: (1 + age) ** -0.7),
        ("hinge", {"a": 2.0, "b": 1}, lambda age: 1.0 if age <= 1 else 1 / (2.0 * (age - 1) + 1)),
    ],
)
def test_fedasync_is_its_paper_s(staleness, settings, weight):
    """x = (1 - a_t) x + a_t x_new: what is mixed in is the client's model, which started from an
    older x.
    """

    def absorb(x, replies):
        for start, u, age in replies:
            share = 0.5 * weight(age)
            x = (1 - share) * x + share * (start + u)
        return x

    done = ran(recipes.fedasync(alpha=0.5, staleness=staleness, P=3, **settings), 14)
    torch.testing.assert_close(done[-1].state.w, asynchronous(14, 1, absorb), rtol=1e-5, atol=1e-6)


def test_fedasync_mixes_less_later():
    t = iter(range(1, 99))

    def absorb(x, replies):
        share = 0.5 * (0.4 if next(t) >= 6 else 1.0)
        for start, u, age in replies:
            now = share / (1 + age) ** 0.5
            x = (1 - now) * x + now * (start + u)
        return x

    done = ran(recipes.fedasync(alpha=0.5, decay=0.4, after=6, P=3), 14)
    torch.testing.assert_close(done[-1].state.w, asynchronous(14, 1, absorb), rtol=1e-5, atol=1e-6)


def test_fedasync_clients_are_pulled_back():
    assert [type(link).__name__ for link in recipes.fedasync(mu=0.005).chain.links] == [
        "ProximalTerm",
        "SGD",
    ]
    assert recipes.fedasync(staleness="hinge").aggregator == FedAsyncMixing(0.6, "hinge", 10.0, 4)


# --- averages -----------------------------------------------------------------------------------


def test_a_tail_that_grows():
    """After t rounds the mean of the last ceil(t / 4) models, which are 1, 4, 9, ..."""
    piece, memory = GrowingTailMean(), GrowingTailMean().initial_state(1, 1, 1)
    updates = Updates(torch.zeros(0, dtype=torch.long), torch.zeros(0, 1), torch.zeros(0), 1)
    for t in range(1, 21):
        memory = piece.observe(memory, RoundEvent(t, vec(0), vec(t**2), updates, 1))
        last = range(t - math.ceil(t / 4) + 1, t + 1)
        assert piece.model(memory, vec(t**2)).item() == pytest.approx(
            sum(s**2 for s in last) / len(last)
        )


def test_weights_averaged_late():
    """Models 1, 4, 9, ...; after 4 rounds every third of them: those of rounds 7, 10, 13."""
    piece, memory = SWA(4, 3), SWA(4, 3).initial_state(1, 1, 1)
    updates = Updates(torch.zeros(0, dtype=torch.long), torch.zeros(0, 1), torch.zeros(0), 1)
    for t in range(1, 15):
        memory = piece.observe(memory, RoundEvent(t, vec(0), vec(t**2), updates, 1))
        taken = [s**2 for s in (7, 10, 13) if s <= t] or [t**2]
        assert piece.model(memory, vec(t**2)).item() == pytest.approx(sum(taken) / len(taken))


def test_a_growing_tail_resumes(tmp_path):
    assert_resumes(
        experiment({"name": "fedavg", "average": {"piece": "growing-tail", "share": 0.5}}), tmp_path
    )


# --- a task that is no image --------------------------------------------------------------------


#: on no regression: one wants layers with statistics, one counts labels, two have their own clock
NO_REGRESSION = ("fedbn", "fedlecc", "fedasync", "fedbuff")


@pytest.mark.parametrize("name", [name for name in STANDARD_RECIPES if name not in NO_REGRESSION])
def test_learns_a_regression(name):
    """Diabetes (442 patients), how it went on in standard deviations: the mean, as a guess, is off
    by .85.
    """
    x, y = load_diabetes(return_X_y=True)
    data = ((20 * x).astype("float32"), ((y - y.mean()) / y.std()).astype("float32"))
    exp = experiment(
        {"name": name},
        rounds=12,
        model={"name": "mlp", "options": {"hidden": 16}},
        data={"partition": "iid"},
        train={"lr": 0.02, "batch": 16, "epochs": 2},
        engine={"workers": 1, "eval_every": 12},
    )
    last = runs.run(exp, data=data).history[-1]
    assert (last.metric, last.lower) == ("mae", True)
    assert last.last_model_metric < 0.8


# --- the stack ----------------------------------------------------------------------------------

#: what is trained by itself on the stack's device, and why
APART = {
    "fedrep": "the update has FedRepPhases",
    "ditto": "the update has DittoModel",
    "apfl": "the update has APFLMixture",
    "moon": "the update has ContrastiveTerm",
    "fedsam": "the update has SharpnessAwareGradient",
    "fedlecc": "the update has LabelCensus",
    "ifca": "the update has LowestLossGroup",
}


@pytest.mark.parametrize("name", STANDARD_RECIPES)
def test_the_stack_runs_every_method_or_says_why_not(name, caplog):
    model = {"name": "own_nets:Layered" if name == "fedbn" else "own_nets:Bare"}
    exp = experiment({"name": name}, model=model, rounds=3)
    found = []
    for schedulers in (None, DeviceSchedulers("cpu")):
        built = runs.build_simulation(exp, schedulers=schedulers)
        with closing(built.engine):
            *_, last = built.iterate_rounds(exp)
            found.append(last)
    one, other = found
    torch.testing.assert_close(one.state.w, other.state.w, rtol=1e-3, atol=1e-4)
    assert one.record.bytes_up == other.record.bytes_up
    said = [m for m in caplog.messages if m.startswith("clients train one after another")]
    assert said == (
        [f"clients train one after another on cpu: {APART[name]}"] if name in APART else []
    )


# --- what does not go together ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "changes", "why"),
    [
        ({"name": "scaffold", "submodel": "random-units"}, {}, "whole models"),
        ({"name": "scaffold"}, {"model": {"name": "own_nets:Bare", "kept": "3.*"}}, "whole models"),
        (
            {"name": "feddyn", "trainer": {"piece": "dynamic"}, "submodel": "prefix-units"},
            {},
            "whole models",
        ),
        (
            {"name": "fedcomgate"},
            {"model": {"name": "own_nets:Bare", "kept": "3.*"}},
            "whole models",
        ),
        ({"name": "scaffold", "option": "I"}, {"train": {"momentum": 0.9}}, "plain SGD"),
        ({"name": "moon", "submodel": "random-units"}, {}, "whole models"),
        (
            {"name": "ditto"},
            {"model": {"name": "own_nets:Bare", "kept": "3.*"}},
            "leaves clients with parts",
        ),
        ({"name": "apfl", "submodel": "prefix-units"}, {}, "leaves clients with parts"),
        ({"name": "apfl", "alpha": 1.5}, {}, "less than or equal to 1"),
        ({"name": "fedrep", "body": 2}, {}, "leave at least one for the head"),
        ({"name": "fedrep"}, {"train": {"steps": 4}}, r"train\.epochs"),
        ({"name": "fedavg"}, {"train": {"update": ["phases", "sgd"]}}, r"model\.personal"),
        ({"name": "scaffold", "option": "I"}, {"train": {"steps": 4}}, r"train\.epochs"),
        ({"name": "scaffold", "option": "III"}, {}, "'I' or 'II'"),
        ({"name": "fednova"}, {"train": {"optimizer": "adam"}}, "not of Adam"),
        ({"name": "fednova", "trainer": {"piece": "proximal", "mu": 0.1}}, {}, "lr times mu, 0.01"),
        ({"name": "fednova", "mu": 0.1}, {"train": {"momentum": 0.5}}, "plain steps at one rate"),
        ({"name": "fednova", "trainer": "proximal"}, {}, "lr times mu, 0.001"),
        ({"name": "fednova"}, {"train": {"momentum": 0.9, "nesterov": True}}, "nesterov"),
        (
            {"name": "fednova", "aggregator": {"piece": "normalised", "momentum": 0.5}},
            {},
            "must be the clients'",
        ),
        ({"name": "fedasync", "pace": "synchronous"}, {}, "one reply at a time"),
        ({"name": "fedasync", "alpha": 1.5}, {}, "less than or equal to 1"),
    ],
)
def test_what_does_not_fit_is_refused(recipe, changes, why):
    with pytest.raises(BadInput, match=why):
        experiment(recipe, **changes).build_recipe()


def test_a_client_that_does_not_say_its_steps_counts_as_the_others_do():
    updates = Updates(
        torch.arange(3),
        torch.eye(3),
        torch.ones(3, dtype=torch.float64),
        3,
        spent=(ClientCost(batches=2), ClientCost(batches=6), ClientCost()),
    )
    assert FedNovaMean().effective_steps(updates).tolist() == [2, 6, 4]
    assert FedNovaMean().effective_steps(replace(updates, spent=(ClientCost(),) * 3)).tolist() == [
        1,
        1,
        1,
    ]


def test_a_link_s_extras_pass_the_gate_or_the_reply_does_not_count():
    """What SCAFFOLD's server adds up is looked at as closely as an update."""
    recipe = replace(recipes.scaffold(P=2), pace=OverCommitment(0.0), minimum=1)

    class Sends(Made):
        def reply(self, task, w):
            bad = {"a": float("nan"), "b": 1.0}[task.client]
            return replace(super().reply(task, w), extras={DELTA: vec(bad, 0.5)})

    engine = Sends(lambda c, t, w: vec(1, 0), ["a", "b"])
    done = list(rounds(recipe, engine, make_initial_state(recipe, engine, vec(0, 0)), 1, 0))
    assert "not finite" in done[0].record.rejected["a"]
    assert done[0].state.server_state["trainer"].total.tolist() == [1.0, 0.5]
