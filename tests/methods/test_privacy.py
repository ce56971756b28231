"""Differential privacy: noise by hand, epsilon by the library and by closed forms, and what is
refused.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from test_loop import Made, drive, vec

from flrce.core.pieces import NoCompression
from flrce.core.roles import RoundView
from flrce.core.types import RoundEvent, RoundRecord, Updates
from flrce.errors import BadInput
from flrce.methods.aggregation.private_mean import PrivateMean
from flrce.methods.catalogue import recipes
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.local_noise import LocalNoise
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.pacing.pace import BufferedPace, OverCommitment
from flrce.methods.privacy_accounting import ORDERS, account_rounds
from flrce.methods.selection.poisson import PoissonSelector
from flrce.methods.selection.turns import RoundRobinSelector
from flrce.methods.selection.uniform import UniformSelector
from flrce.methods.selection.utility import UtilitySelector
from flrce.methods.server.optimizers import FedExPStep, ServerAdam
from flrce.methods.stopping.budget import AnyOf, CostBudget
from flrce.methods.stopping.privacy_budget import PrivacyBudget
from flrce.rng import RoundStreams, make_stream

opacus = pytest.importorskip("opacus", reason="the extra `privacy` is not installed")

DELTA = 1e-5


def updates(U, rate=None, clients=0, seed=0, t=1):
    U = torch.tensor(U, dtype=torch.float32).reshape(-1, 2)
    return Updates(
        torch.arange(len(U)),
        U,
        torch.ones(len(U), dtype=torch.float64),
        2,
        streams=RoundStreams(seed, t),
        sampling_rate=rate,
        clients=clients,
    )


def exact_gaussian_epsilon(noise, rounds, delta):
    """Of the composition of Gaussian mechanisms, exactly (Balle and Wang 2018)."""
    mu = math.sqrt(rounds) / noise

    def excess(epsilon):
        return (
            norm.cdf(mu / 2 - epsilon / mu)
            - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
            - delta
        )

    return brentq(excess, 0, 200)


@pytest.mark.parametrize(("noise", "rounds"), [(4.0, 1), (1.0, 1), (1.0, 30), (0.7, 10)])
def test_epsilon_lies_between_the_exact_one_and_that_of_concentrated_privacy(noise, rounds):
    rho = rounds / (2 * noise**2)  # zCDP of the Gaussian mechanism (Bun and Steinke 2016)
    bound = rho + 2 * math.sqrt(rho * math.log(1 / DELTA))
    found = account_rounds(1.0, noise, rounds, DELTA)
    assert exact_gaussian_epsilon(noise, rounds, DELTA) <= found <= bound


def test_figures_are_those_of_the_librarys_accountant():
    engine = Made(lambda client, t, w: vec(3.0, 4.0), [f"c{i}" for i in range(20)])
    recipe = recipes.dp_fedavg(noise=1.1, P=5)
    accountant = opacus.accountants.RDPAccountant()
    for done in drive(recipe, engine, 6):
        accountant.step(noise_multiplier=1.1, sample_rate=5 / 20)
        epsilon = accountant.get_epsilon(delta=DELTA, alphas=list(ORDERS))
        assert done.record.figures["epsilon"] == pytest.approx(epsilon, rel=1e-9)
        assert done.record.figures["epsilon_next"] > epsilon


def test_a_round_is_the_clipped_sum_with_noise_over_the_expected_replies():
    piece = PrivateMean(noise=0.5, clip=2.0)
    sent = updates([[3.0, 4.0], [0.6, 0.8]], rate=0.1, clients=40, seed=7, t=3)
    made = piece(torch.tensor([1.0, 1.0]), sent, piece.initial_state(40, 2, 2))
    noise = 0.5 * 2.0 * RoundStreams(7, 3).make_rng("private-mean").standard_normal(2)
    clipped = np.array([3.0, 4.0]) * 2 / 5 + np.array([0.6, 0.8])
    np.testing.assert_allclose(made, 1.0 + (clipped + noise) / 4.0, rtol=1e-6)


def test_noise_differs_between_seeds():
    engine = Made(lambda client, t, w: vec(1.0, 0.0), ["a", "b"])
    recipe = replace(recipes.dp_fedavg(P=2), selector=UniformSelector())
    first, second = (drive(recipe, engine, 1, seed=seed)[0].state.w for seed in (0, 1))
    assert not torch.equal(first, second)


def test_a_round_without_replies_is_committed_with_noise_alone():
    engine = Made(lambda client, t, w: vec(1.0, 0.0), [f"c{i}" for i in range(50)])
    recipe = recipes.dp_fedavg(noise=1.0, P=1)
    done = drive(recipe, engine, 12)
    assert len(done) == 12
    assert all(d.record.outcome == "committed" for d in done)
    empty = [i for i, d in enumerate(done) if not d.record.chosen]
    assert 1 <= len(empty) <= 11  # each round is empty with chance 0.98^50 = 0.36
    i = empty[0]
    before = done[i - 1].state.w if i else torch.zeros(2)
    noise = RoundStreams(0, i + 1).make_rng("private-mean").standard_normal(2)
    np.testing.assert_allclose(done[i].state.w - before, noise, atol=1e-6)
    assert done[i].record.figures["epsilon"] == account_rounds(1 / 50, 1.0, i + 1, DELTA)


def test_other_recipes_still_need_a_reply():
    with pytest.raises(BadInput, match="needs a reply"):
        replace(recipes.fedavg(P=2), minimum=0)


def test_poisson_draws_each_client_on_its_own():
    view = RoundView(1, 10, tuple(range(100)), torch.ones(100), None, None, None)
    sizes, together = [], 0
    for t in range(600):
        chosen = PoissonSelector().select(None, view, make_stream(0, "select", t)).k
        sizes.append(len(chosen))
        together += 3 in chosen and 4 in chosen
    # 600 rounds of Binomial(100, 0.1): mean 10, variance 9; pairs with chance 0.01
    assert abs(np.mean(sizes) - 10) < 5 * 3 / math.sqrt(600)
    assert 6.5 < np.var(sizes) < 11.5
    assert together < 6 + 5 * math.sqrt(6)
    assert PoissonSelector().sampling_rate(10, 100) == 0.1
    assert PoissonSelector().sampling_rate(10, 5) == 1.0


@pytest.mark.parametrize("selector", [UniformSelector(), RoundRobinSelector(by="chance")])
def test_other_selections_are_accounted_without_amplification(selector):
    engine = Made(lambda client, t, w: vec(1.0, 0.0), [f"c{i}" for i in range(20)])
    recipe = replace(recipes.dp_fedavg(noise=2.0, P=2), selector=selector, minimum=1)
    last = drive(recipe, engine, 5)[-1].record.figures
    assert last["epsilon"] == pytest.approx(account_rounds(1.0, 2.0, 5, DELTA))
    assert last["epsilon"] > 3 * account_rounds(2 / 20, 2.0, 5, DELTA)


def test_adaptive_clipping_follows_a_quantile():
    """Lengths 1 to 5: with next to no noise the clipping length goes to their median."""
    piece = PrivateMean(noise=1e-6, clip=0.1, quantile=0.5, clip_rate=0.3)
    memory, w = piece.initial_state(5, 2, 2), torch.zeros(2)
    for t in range(1, 120):
        sent = updates([[float(length), 0.0] for length in range(1, 6)], t=t)
        memory = piece.observe(memory, RoundEvent(t, w, w, sent, 5))
    assert 2.5 < memory.clip < 3.5


def test_adaptive_clipping_by_hand_and_its_noise_adds_up():
    piece = PrivateMean(noise=1.5, clip=1.0, quantile=0.8, clip_rate=0.2)
    sent, w = updates([[0.5, 0.0], [9.0, 0.0]], rate=0.5, clients=8, seed=3, t=2), torch.zeros(2)
    memory = piece.observe(piece.initial_state(8, 2, 2), RoundEvent(2, w, w, sent, 8))
    noise = RoundStreams(3, 2).make_rng("private-mean/count").standard_normal()
    share = 0.5 + (0.5 - 0.5 + 1.5 * noise) / 4  # one within, one beyond, four expected
    assert memory.clip == pytest.approx(math.exp(-0.2 * (share - 0.8)))
    for expected in (4.0, 400.0):
        both = piece.compute_update_noise(expected) ** -2
        both += (2 * piece.compute_count_noise(expected)) ** -2
        assert both == pytest.approx(1.5**-2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"selector": UtilitySelector()}, "UtilitySelector"),
        ({"selector": RoundRobinSelector()}, "RoundRobinSelector"),
        ({"server": FedExPStep()}, "FedExPStep"),
        ({"trainer": recipes.scaffold().trainer, "personal": ()}, "ScaffoldTraining"),
        ({"sums": True}, "single updates"),
        ({"pace": BufferedPace(2), "minimum": 1}, "BufferedPace"),
        ({"pace": OverCommitment()}, "OverCommitment"),
        ({"stop": PrivacyBudget(8.0, delta=1e-6)}, "set both alike"),
    ],
)
def test_what_the_noise_does_not_cover_is_refused(change, says):
    with pytest.raises(BadInput, match=says):
        replace(recipes.dp_fedavg(P=2), **change)


def test_server_optimisers_are_postprocessing():
    assert replace(recipes.dp_fedavg(P=2), server=ServerAdam()).server == ServerAdam()


def test_a_network_with_statistics_is_refused_before_the_first_round():
    with pytest.raises(BadInput, match="BatchNorm"):
        recipes.dp_fedavg(P=2).check_fleet(4, 2, 3)


@pytest.mark.parametrize("wrap", [lambda rule: rule, lambda rule: AnyOf((CostBudget(), rule))])
def test_a_budget_ends_the_run_before_it_is_passed(wrap):
    engine = Made(lambda client, t, w: vec(1.0, 0.0), [f"c{i}" for i in range(20)])
    recipe = replace(recipes.dp_fedavg(noise=1.0, P=2), stop=wrap(PrivacyBudget(4.0)))
    records = [done.record for done in drive(recipe, engine, 200)]
    rounds = len(records)
    assert (
        account_rounds(0.1, 1.0, rounds, DELTA) <= 4.0 < account_rounds(0.1, 1.0, rounds + 1, DELTA)
    )
    assert records[-1].stop.startswith("privacy budget of epsilon 4 at delta 1e-05")
    tight = replace(recipes.dp_fedavg(noise=0.3, P=2), stop=wrap(PrivacyBudget(1.0)))
    with pytest.raises(BadInput, match="one round spends"):
        drive(tight, engine, 1)
    assert PrivacyBudget()([RoundRecord(1)]) == ""
    with pytest.raises(BadInput, match="private-mean"):
        replace(recipes.fedavg(P=2), stop=wrap(PrivacyBudget()))


def test_local_noise_by_hand():
    u, layout = torch.tensor([3.0, 4.0]), (("w", 2),)
    piece = LocalNoise(clip=1.0, noise=0.5)
    payload, carry = piece.encode(u, layout, make_stream(1, "encode"), {})
    draws = np.random.Generator(make_stream(1, "encode").bit_generator.jumped()).standard_normal(2)
    np.testing.assert_allclose(payload.buffers["u"], [0.6, 0.8] + 0.5 * draws, rtol=1e-6)
    assert carry == {}
    sent = piece.decode(payload, layout, make_stream(1, "encode"))
    assert torch.equal(sent, payload.buffers["u"])
    system = replace(piece, source="system")
    both = [system.encode(u, layout, make_stream(1, "encode"), {})[0] for _ in range(2)]
    assert not torch.equal(both[0].buffers["u"], both[1].buffers["u"])


def test_local_noise_is_coded_by_the_inner_compressor():
    layout, inner = (("w", 64),), Quantizer(bits=8)
    u = torch.from_numpy(make_stream(0, "u").standard_normal(64)).float()
    piece = LocalNoise(inner, clip=1.0, noise=0.1)
    noisy = LocalNoise(clip=1.0, noise=0.1).encode(u, layout, make_stream(2, "e"), {})[0]
    plain, _ = inner.encode(noisy.buffers["u"], layout, make_stream(2, "e"), {})
    coded, _ = piece.encode(u, layout, make_stream(2, "e"), {})
    assert all(torch.equal(coded.buffers[key], value) for key, value in plain.buffers.items())
    assert piece.estimate_bytes(layout, make_stream(2, "e")) == inner.estimate_bytes(
        layout, make_stream(2, "e")
    )
    assert LocalNoise().estimate_bytes(layout, make_stream(2, "e")) == 256


def test_local_epsilon_counts_each_clients_releases():
    engine = Made(lambda client, t, w: vec(1.0, 0.0), ["a", "b", "c"])
    recipe = replace(recipes.fedavg(P=2), compressor=LocalNoise(noise=4.0))
    assert isinstance(recipe.compressor.inner, NoCompression)
    seen = {}
    for done in drive(recipe, engine, 5):
        for line in done.clients:
            seen[line.client] = seen.get(line.client, 0) + 1
            spent = account_rounds(1.0, 2.0, seen[line.client], DELTA)
            assert line.figures["local_epsilon"] == spent
        most = account_rounds(1.0, 2.0, max(seen.values()), DELTA)
        assert done.record.figures["local_epsilon"] == most


def test_error_feedback_would_take_local_noise_off_again():
    with pytest.raises(BadInput, match="local-noise"):
        LocalNoise(ErrorFeedback())
    with pytest.raises(BadInput, match="remembers"):
        replace(recipes.fedavg(P=2), compressor=ErrorFeedback(LocalNoise()))
