"""Tasks that outlive a round: whatever they carry is kept with them, and a resumed run has the same
bits.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce import LocalTrainer
from flrce.config.experiment import Experiment
from flrce.core import loop
from flrce.core.pending import (
    AsyncState,
    IncompatiblePiece,
    apply_changes,
    find_changes,
    pack_pending_tasks,
    unpack_pending_tasks,
)
from flrce.core.pieces import NoCompression
from flrce.core.types import LocalWork, PendingTask, Portion, Task
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.client.scaffold import C
from flrce.methods.client.step_counts import AFTER, ROUND
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.sparsify import RandomK, TopK
from flrce.methods.pacing.pace import BufferedPace
from flrce.simulation import runs
from flrce.training.update_chain import SGD, GradientClip, ProximalTerm, UpdateChain
from training import assert_resumes

FLEET = {"profile": {"jetson-nano": 0.5, "raspberry-pi-4": 0.5}}
SMALL = {
    "rounds": 8,
    "clients": 8,
    "per_round": 4,
    "train": {"epochs": 1, "lr": 0.1},
    "engine": {"workers": 1, "kernel": "torch"},
    "fleet": FLEET,
}


def buffered(recipe, size=2, **changes):
    pace = {"piece": "buffered", "size": size}
    return Experiment.from_tables(SMALL | changes | {"recipe": {**recipe, "pace": pace}})


@pytest.mark.parametrize(
    "recipe", [{"name": "scaffold"}, {"name": "feddyn"}, {"name": "pyramidfl"}]
)
def test_tasks_with_tensors_and_compressors_of_their_own_wait_and_resume(recipe, tmp_path):
    """SCAFFOLD sends c along, FedDyn the round that counted, PyramidFL tunes each client's
    compressor.
    """
    found = assert_resumes(buffered(recipe), tmp_path, after=5)
    assert any(record.ages for record in found.history)
    assert found.history[-1].accuracy > 0.2


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_without_stragglers_it_is_the_synchronous_method(name):
    """As many replies as clients under way: nothing is ever old, and a client's c is of the same
    rounds.
    """
    wait = buffered({"name": name}, size=4, rounds=4)
    plain = Experiment.from_tables(SMALL | {"rounds": 4, "recipe": {"name": name}})
    ours, theirs = runs.run(wait).model, runs.run(plain).model
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_the_servers_c_is_the_sum_of_the_clients_however_old_their_replies():
    """What SCAFFOLD rests on: c = sum of c_k / M. A c_k that its client takes back, or counts
    twice, would break it.
    """
    experiment = buffered({"name": "scaffold"}, rounds=14)
    built, old = runs.build_simulation(experiment), 0
    for done in built.iterate_rounds(experiment):
        state, old = done.state, old + len(done.record.ages)
        memory = state.server_state["trainer"]
        total = torch.zeros_like(memory.total)
        for client, carry in state.client_states.items():
            k = state.roster.index(client)
            own = {name.removeprefix("update.0."): x for name, x in carry.items()}
            total += own[C + AFTER if int(own[ROUND]) == int(memory.last[k]) else C]
        torch.testing.assert_close(memory.total, total, rtol=1e-4, atol=1e-5)
    built.engine.close()
    assert old > 3


def test_a_flight_comes_back_as_it_was():
    recipe = replace(recipes.fedcom(P=3), pace=BufferedPace(2))
    w, c = torch.arange(4.0), torch.randn(4)
    tasks = [
        Task(
            "a",
            0,
            3,
            7,
            LocalWork(2, 16, 5),
            Portion(0.5),
            update=recipe.chain,
            compressor=recipe.compressor,
            rounds=9,
            tensors={"c": c, "round": torch.tensor([2])},
        ),
        Task(
            "b",
            1,
            3,
            7,
            update=recipe.chain,
            compressor=NoCompression(),
            deadline=1.5,
            rounds=9,
            tensors={"c": c},
        ),
        Task("d", 2, 4, 7, update=recipe.chain, compressor=recipe.compressor, rounds=9, judge=True),
    ]
    pending = [PendingTask(task, w, 1.0, 2.5) for task in tasks]
    async_state = pack_pending_tasks(recipe, AsyncState(), pending, 4.0)
    assert sorted(async_state.tensors) == [1, 2]  # c is kept once
    assert async_state.tensors[1] is c
    back = unpack_pending_tasks(recipe, async_state)
    assert [one.task for one in back] == tasks
    assert [(one.sent, one.due) for one in back] == [(1.0, 2.5)] * 3
    more = Task(
        "e",
        3,
        5,
        7,
        update=recipe.chain,
        compressor=recipe.compressor,
        tensors={"c": torch.zeros(4)},
    )
    later = pack_pending_tasks(recipe, async_state, [back[1], PendingTask(more, w)], 5.0)
    assert sorted(later.tensors) == [
        1,
        3,
    ]  # numbers are not given twice: what is on disk under them never changes


rates = st.floats(0.01, 1.0)


@given(rates, rates, rates, rates)
def test_a_piece_is_rebuilt_from_what_differs(a, b, mu, lr):
    like = ErrorFeedback(TopK(a))
    piece = ErrorFeedback(TopK(b))
    assert apply_changes(like, find_changes(piece, like)) == piece
    chain, other = (
        UpdateChain((GradientClip(1.0), ProximalTerm(0.1), SGD(0.5))),
        UpdateChain((GradientClip(1.0), ProximalTerm(mu), SGD(lr))),
    )
    told = find_changes(other, chain)
    assert set(told) <= {"links.1.mu", "links.2.lr"}
    assert apply_changes(chain, told) == other


def test_a_piece_of_another_make_cannot_wait():
    with pytest.raises(IncompatiblePiece):
        find_changes(RandomK(0.1), TopK(0.1))

    @dataclass(frozen=True)
    class Odd(LocalTrainer):
        def assign(self, tasks, memory, view):
            return [replace(task, compressor=TopK(0.1)) for task in tasks]

    recipe = replace(recipes.fedavg(P=4), trainer=Odd(), pace=BufferedPace(2))
    built = runs.build_simulation(Experiment.from_tables(SMALL))
    with pytest.raises(BadInput, match="TopK is not its NoCompression"):
        next(loop.rounds(recipe, built.engine, built.initial_state(), 2, 0))
    built.engine.close()
