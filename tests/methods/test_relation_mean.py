"""A mean that believes clients to whom someone relates: worked by hand, as properties, and on
fleets with trouble.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce import Experiment
from flrce.core.types import RoundEvent, Updates
from flrce.errors import BadInput
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.aggregation.related_mean import RelatedMean
from flrce.report.why import explain_client, explain_round
from flrce.simulation import runs
from flrce.storage import read


def updates(U, n=None, k=None):
    U = torch.as_tensor(U, dtype=torch.float32)
    n = torch.ones(len(U)) if n is None else torch.as_tensor(n)
    return Updates(
        torch.arange(len(U)) if k is None else torch.as_tensor(k), U, n.double(), U.shape[1]
    )


def after(piece, *rounds):
    """Memory after these rounds, in which the model did not move."""
    memory = piece.initial_state(len(rounds[0]), 2, 2)
    for t, U in enumerate(rounds, 1):
        memory = piece.observe(
            memory, RoundEvent(t, torch.zeros(2), torch.zeros(2), updates(U), len(U))
        )
    return memory


def test_kin_is_the_nearest_others():
    """Two along x and two along y are each other's kin, however few they are; one in between is
    half of both.
    """
    piece = RelatedMean(kin=1, sketch=2, blend=1.0)
    memory = after(piece, [[1.0, 0], [5, 0], [0, 1], [0, 2], [-1, -1]])
    torch.testing.assert_close(memory.kin, torch.tensor([1.0, 1, 1, 1, -(0.5**0.5)]))
    trust = piece.compute_trust(
        torch.zeros(2), updates([[1.0, 0], [5, 0], [0, 1], [0, 2], [-1, -1]]), memory
    )
    assert trust.tolist() == [1, 1, 1, 1, 0]
    some = RelatedMean(kin=1, sketch=2, blend=1.0, level=1.0, power=2.0)
    sent = [[1.0, 0], [1, 0], [0, 1], [0, 1], [-0.8, 0.6]]  # cosine .6 with its nearest
    torch.testing.assert_close(
        some.compute_trust(torch.zeros(2), updates(sent), memory)[4], torch.tensor(0.36).double()
    )


def test_nothing_and_copies_do_not_count():
    """The model went along (1, 1) since they were last asked: who sends that again, or nothing, is
    left out.
    """
    piece = RelatedMean(sketch=2)
    memory = after(piece, [[1.0, 0], [0, 1], [1, 0], [1, 0]])
    sent = [[1.0, 0], [0.5, 0.5], [0, 0], [1, 0.1]]
    w = torch.tensor([1.0, 1.0])
    assert piece.compute_trust(w, updates(sent), memory).tolist() == [
        1,
        0,
        0,
        1,
    ]  # too few to judge kin
    torch.testing.assert_close(piece(w, updates(sent), memory), torch.tensor([2.0, 1.05]))
    assert (
        piece.compute_trust(w, updates([[2.0, 2]] * 4), memory).tolist() == [1] * 4
    )  # a round of copies alone still counts


@given(st.integers(0, 10**6), st.floats(1e-6, 1e6))
def test_in_the_first_round_it_is_the_mean(seed, scale):
    U = np.random.default_rng(seed).normal(size=(4, 6)) * scale
    n = [1, 2, 3, 4]
    piece, w = RelatedMean(cap=0.0), torch.zeros(6)
    torch.testing.assert_close(
        piece(w, updates(U, n), piece.initial_state(4, 6, 6)),
        WeightedMean()(w, updates(U, n), None),
    )


@given(st.integers(0, 10**6), st.sampled_from([1e-9, 1e9]))
def test_trust_is_a_share_and_no_number_breaks_it(seed, scale):
    rng = np.random.default_rng(seed)
    piece = RelatedMean(sketch=4)
    memory = piece.initial_state(5, 6, 6)
    for t in range(1, 5):
        sent = updates(rng.normal(size=(5, 6)) * scale * rng.choice([0, 1, 1e6], (5, 1)))
        trust = piece.compute_trust(torch.zeros(6), sent, memory)
        assert bool(((trust >= 0) & (trust <= 1)).all())
        assert bool(trust.any())
        memory = piece.observe(memory, RoundEvent(t, torch.zeros(6), torch.zeros(6), sent, 5))


def fleet(trouble, aggregator, seed=0):
    exp = Experiment(
        seed=seed,
        rounds=40,
        clients=40,
        per_round=10,
        train={"lr": 0.05},
        engine={"workers": 1},
        data={"alpha": 0.5, "trouble": trouble},
        recipe={
            "name": "fedavg",
            "selector": {"piece": "in-turn", "by": "chance"},
            "aggregator": aggregator,
        },
    )
    built, seen = runs.build_simulation(exp), {}

    def watched(piece):
        class Watched(type(piece)):
            def compute_trust(self, w, updates, memory):
                found = super().compute_trust(w, updates, memory)
                for k, each in zip(updates.k.tolist(), found.tolist(), strict=True):
                    seen.setdefault(built.federation.clients[k], []).append(each)
                return found

        return Watched()

    if aggregator == "related":
        built = replace(
            built, recipe=replace(built.recipe, aggregator=watched(built.recipe.aggregator))
        )
    last = [done.record.accuracy for done in built.iterate_rounds(exp)][-4:]
    built.engine.close()
    who = built.federation.trouble.who
    late = {client: float(np.mean(each[1:])) for client, each in seen.items()}
    return (
        np.mean(last),
        {kind: np.mean([late[c] for c in clients if c in late]) for kind, clients in who.items()},
        late,
    )


@pytest.mark.parametrize("sends", ["stale", "noise"])
def test_free_riders_are_found(sends):
    _, trust, late = fleet([{"piece": "free-riders", "share": 0.25, "sends": sends}], "related")
    assert trust["free-riders"] < 0.5 * np.mean(list(late.values()))
    assert (trust["free-riders"] == 0) == (sends == "stale")


def test_wrong_labels_weigh_less_and_rare_classes_do_not():
    trouble = [
        {"piece": "wrong-labels", "share": 0.2, "wrong": 0.5},
        {"piece": "rare-classes", "share": 0.1},
    ]
    _, trust, _ = fleet(trouble, "related")
    assert trust["wrong-labels"] < 0.4
    assert trust["rare-classes"] > 0.9


def test_partial_updates_are_refused():
    with pytest.raises(BadInput, match="related compares whole updates"):
        Experiment(recipe={"name": "dropout", "aggregator": "related"})


def test_the_record_tells_whose_replies_counted_less(tmp_path):
    """Whoever copies the model's way counts nothing, the ledger says so, and so does `flrce
    why`.
    """
    trouble = [{"piece": "free-riders", "share": 0.25, "sends": "stale"}]
    exp = Experiment(
        rounds=6,
        clients=16,
        per_round=8,
        model={"name": "mlp"},
        engine={"workers": 1, "eval_every": 6},
        data={"alpha": 0.5, "trouble": trouble},
        recipe={"name": "flrce-no-stop", "preset": "wary"},
    )
    riders = runs.build_simulation(exp).federation.trouble.who["free-riders"]
    history = runs.run(exp, tmp_path / "run").history
    for h in history[2:]:  # everybody was asked before
        assert {client for client, share in h.doubted.items() if share == 0} >= set(riders) & set(
            h.replied
        )
        assert all(0 <= share < 1 for share in h.doubted.values())
    run = read.read_single_run(tmp_path / "run")
    assert [dict(h.doubted) for h in run.committed_rounds] == [dict(h.doubted) for h in history]
    rider = next(client for client in riders if client in history[-1].replied)
    facts = explain_client(run, rider).facts["doubted"]
    assert facts == [(h.t, h.doubted[rider]) for h in history if rider in h.doubted]
    assert f"{rider} (0)" in explain_round(run, 6).sentences[2]
    assert "Its reply kept 0 of its weight." in explain_client(run, rider, 6).sentences
    believed = next(
        client for client in run.roster if not any(client in h.doubted for h in history)
    )
    assert "doubted" not in explain_client(run, believed).facts


def test_what_is_left_is_what_the_mean_took():
    piece, rng = RelatedMean(kin=1, sketch=3), np.random.default_rng(0)
    memory = piece.initial_state(8, 6, 6)
    for t in range(1, 6):
        w, sent = torch.from_numpy(rng.normal(size=6)).float(), updates(rng.normal(size=(8, 6)))
        trust = piece.compute_trust(w, sent, memory)
        memory = piece.observe(memory, RoundEvent(t, w, w, sent, 8))
        assert piece.downweights(memory) == pytest.approx(trust.tolist(), abs=1e-4)
    assert min(piece.downweights(memory)) < 1


@pytest.mark.parametrize(
    ("clients", "kin", "says"), [(12, 3, True), (13, 3, False), (12, 2, False)]
)
def test_a_fleet_too_small_to_have_kin_is_told(clients, kin, says):
    recipe = {"name": "fedavg", "aggregator": {"piece": "related", "kin": kin}}
    said = runs.warn_about_experiment(Experiment(clients=clients, per_round=4, recipe=recipe))
    assert [note[-13:] for note in said] == ["lower its kin"] * says
