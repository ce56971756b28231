"""The server's step apart from aggregation, against loops; and replies that outlive a round."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from test_loop import Made, vec

from flrce import Aggregator, Pace, ServerStep
from flrce.config.experiment import Experiment
from flrce.core.loop import make_initial_state, rounds
from flrce.core.pieces import ServerSGD
from flrce.core.types import Updates
from flrce.errors import BadInput
from flrce.methods.aggregation.robust import CoordinateMedian
from flrce.methods.catalogue import recipes
from flrce.methods.pacing.pace import BufferedPace, OverCommitment, ReplyDeadline
from flrce.methods.server.optimizers import (
    FedExPStep,
    ServerAdagrad,
    ServerAdam,
    ServerMomentum,
    ServerYogi,
)
from flrce.simulation import runs
from training import assert_resumes

D, STATISTICS = 5, 2


def some(rng, P=3):
    U = torch.from_numpy(rng.normal(size=(P, D + STATISTICS)).astype(np.float32))
    return Updates(torch.arange(P), U, torch.ones(P).double(), D)


def by_hand(piece, deltas, updates):
    """Reddi et al. 2021, algorithm 2, coordinate by coordinate; Hsu et al. 2019; Jhunjhunwala et
    al. 2023.
    """
    w = [0.0] * D
    m, v = [0.0] * D, [getattr(piece, "tau", 0.0) ** 2] * D
    for delta, each in zip(deltas, updates, strict=True):
        if isinstance(piece, FedExPStep):
            total = sum(float(u.double() @ u.double()) for u in each.u)
            eta = max(1.0, total / (2 * len(each) * (sum(x * x for x in delta) + piece.eps)))
        for i in range(D):
            if isinstance(piece, ServerMomentum):
                m[i] = piece.beta * m[i] + delta[i]
                w[i] += piece.rate * m[i]
            elif isinstance(piece, FedExPStep):
                w[i] += eta * delta[i]
            else:
                m[i] = piece.beta1 * m[i] + (1 - piece.beta1) * delta[i]
                square = delta[i] ** 2
                if isinstance(piece, ServerAdam):
                    v[i] = piece.beta2 * v[i] + (1 - piece.beta2) * square
                elif isinstance(piece, ServerYogi):
                    v[i] -= (1 - piece.beta2) * square * math.copysign(1.0, v[i] - square)
                else:
                    v[i] += square
                w[i] += piece.rate * m[i] / (math.sqrt(v[i]) + piece.tau)
    return w


@pytest.mark.parametrize(
    "piece",
    [
        ServerMomentum(0.7, 0.5),
        ServerAdam(0.1),
        ServerYogi(0.1),
        ServerAdagrad(0.1, 0.3),
        FedExPStep(1e-3),
    ],
)
def test_a_server_step_is_its_paper_s(piece):
    rng = np.random.default_rng(0)
    memory = piece.initial_state(3, D, D + STATISTICS) if hasattr(piece, "initial_state") else None
    w, deltas, seen = torch.zeros(D + STATISTICS), [], []
    for _ in range(4):
        updates = some(rng)
        target = w + updates.U.mean(0)
        deltas.append((target - w)[:D].double().tolist())
        seen.append(updates)
        w, memory = piece.step(w, target, updates, memory)
        assert torch.equal(w[D:], target[D:])  # statistics go where the replies say
    assert w[:D].tolist() == pytest.approx(by_hand(piece, deltas, seen), rel=1e-4, abs=1e-6)


def test_a_part_of_the_way():
    updates = some(np.random.default_rng(1))
    w, target = torch.zeros(D + STATISTICS), torch.ones(D + STATISTICS)
    assert (
        ServerSGD(0.25).step(w, target, updates, None)[0].tolist()
        == [0.25] * D + [1.0] * STATISTICS
    )
    assert ServerSGD().step(w, target, updates, None)[0] is target


SMALL = {"rounds": 5, "clients": 10, "per_round": 4, "engine": {"workers": 1}}


@pytest.mark.parametrize(
    "server", ["momentum", {"piece": "adam", "rate": 0.05}, "yogi", "adagrad", "exp"]
)
def test_any_aggregator_goes_with_any_server(server, tmp_path):
    tables = SMALL | {"recipe": {"name": "median", "server": server}}
    assert isinstance(Experiment.from_tables(tables).build_recipe().aggregator, CoordinateMedian)
    found = assert_resumes(Experiment.from_tables(tables), tmp_path)
    plain = runs.run(Experiment.from_tables(SMALL | {"recipe": {"name": "median"}}))
    assert [h.bytes_up for h in found.history] == [
        h.bytes_up for h in plain.history
    ]  # it costs clients nothing
    assert found.history[-1].accuracy != plain.history[-1].accuracy


# --- pace ---------------------------------------------------------------------------------------


class Uneven(Made):
    """Client k takes 2^k seconds."""

    def estimate(self, task):
        return replace(self.spent, compute_seconds=2.0 ** int(task.client))

    def reply(self, task, w):
        return replace(super().reply(task, w), spent=self.estimate(task))


def test_a_buffered_round_by_hand():
    """Three clients of 1, 2 and 4 seconds, two replies a round."""
    seen = []

    def update(client, t, w):
        seen.append((client, t, w.tolist()))
        return vec(1, 0)

    engine = Uneven(update, ["0", "1", "2"])
    recipe = replace(recipes.fedavg(P=3), pace=BufferedPace(2), minimum=1)
    done = list(rounds(recipe, engine, make_initial_state(recipe, engine, vec(0, 0)), 3, 0))
    # round 1: all three start at 0 s; 0 is back at 1 s and 1 at 2 s: the round ends there
    assert done[0].record.replied == ("0", "1")
    assert done[0].record.seconds == 2.0
    assert set(done[0].record.chosen) == {"0", "1", "2"}
    # round 2: 0 and 1 start anew at 2 s, from w = (1, 0); 0 is back at 3 s; 1 and 2 both at 4 s, 1
    # goes first by name
    assert done[1].record.replied == ("0", "1")
    assert done[1].record.seconds == 2.0
    # round 3: 2 comes back at 4 s, two rounds old, with an update from the first model; 0 is back
    # at 5 s
    assert done[2].record.replied == ("0", "2")
    assert ("2", 1, [0.0, 0.0]) in seen
    assert ("0", 3, [2.0, 0.0]) in seen
    assert done[2].record.seconds == 1.0
    assert sorted(c.client for c in done[2].clients) == ["0", "2"]


def test_ages_reach_the_aggregator():
    ages = []

    @dataclass(frozen=True)
    class Noting(Aggregator):
        def __call__(self, w, updates, memory):
            ages.append(None if updates.age is None else updates.age.tolist())
            return w + updates.U.mean(0)

    engine = Uneven(lambda c, t, w: vec(1, 0), ["0", "1", "2"])
    recipe = replace(recipes.fedavg(P=3), pace=BufferedPace(2), aggregator=Noting())
    list(rounds(recipe, engine, make_initial_state(recipe, engine, vec(0, 0)), 3, 0))
    assert ages == [None, None, [0, 2]]


def test_replies_that_are_too_old_do_not_count():
    engine = Uneven(lambda c, t, w: vec(1, 0), ["0", "1", "2"])
    recipe = replace(recipes.fedavg(P=3), pace=BufferedPace(2, oldest=1))
    done = list(rounds(recipe, engine, make_initial_state(recipe, engine, vec(0, 0)), 3, 0))
    assert done[2].record.rejected == {"2": "late: 2 rounds old"}


FLEET = {"profile": {"jetson-nano": 0.5, "raspberry-pi-4": 0.5}}


@pytest.mark.parametrize(
    "recipe",
    [
        {"name": "fedavg"},
        {"name": "flrce", "preset": "default"},
        {"name": "fedcom", "feedback": True},
    ],
)
def test_a_buffered_run_learns_resumes_and_adds_up(recipe, tmp_path):
    pace = {"piece": "buffered", "size": 2}
    tables = SMALL | {"rounds": 12, "fleet": FLEET, "recipe": {**recipe, "pace": pace}}
    found = assert_resumes(Experiment.from_tables(tables), tmp_path, after=5)
    assert found.history[-1].accuracy > 0.3
    assert all(len(h.replied) == 2 for h in found.history)
    plain = runs.run(Experiment.from_tables(tables | {"recipe": recipe}))
    assert sum(h.seconds for h in found.history) < sum(h.seconds for h in plain.history)


def test_spares_and_deadlines_are_paces():
    engine = Uneven(lambda c, t, w: vec(1, 0), [str(k) for k in range(6)])
    fast = replace(recipes.fedavg(P=3), pace=OverCommitment(0.5))  # asks 3 + 2, counts 3
    done = list(rounds(fast, engine, make_initial_state(fast, engine, vec(0, 0)), 2, 0))
    assert all((len(r.record.chosen), len(r.record.replied)) == (5, 3) for r in done)
    timed = replace(recipes.fedavg(P=6), pace=ReplyDeadline(5.0))  # 1, 2 and 4 seconds are in time
    done = list(rounds(timed, engine, make_initial_state(timed, engine, vec(0, 0)), 1, 0))
    assert done[0].record.replied == ("0", "1", "2")
    assert all(why.startswith("late") for why in done[0].record.rejected.values())


def test_what_cannot_wait_is_refused():
    with pytest.raises(BadInput, match=r"at most per_round = 4"):
        Experiment.from_tables(
            SMALL | {"recipe": {"name": "fedavg", "pace": {"piece": "buffered", "size": 9}}}
        )
    tables = SMALL | {"recipe": {"name": "fedcomgate", "pace": {"piece": "buffered", "size": 2}}}
    with pytest.raises(BadInput, match="start from different ones"):
        Experiment.from_tables(tables).build_recipe()


@dataclass(frozen=True)
class Seen:
    rounds: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Watchful(ServerStep):
    """A server step that also learns from the round it made."""

    def initial_state(self, M, d, D):
        return Seen()

    def step(self, w, target, updates, memory):
        return target, replace(memory, steps=memory.steps + 1)

    def observe(self, memory, event):
        return replace(memory, rounds=event.t)


def test_a_server_step_may_observe_too():
    engine = Made(lambda c, t, w: vec(1, 0), ["0", "1"])
    recipe = replace(recipes.fedavg(P=2), server=Watchful())
    done = list(rounds(recipe, engine, make_initial_state(recipe, engine, vec(0, 0)), 3, 0))
    assert done[-1].state.server_state["server"] == Seen(3, 3)


@dataclass(frozen=True)
class Pairs(Pace):
    """A buffered pace of a user's own: two replies end a round."""

    buffer_size = 2
    max_age = 50

    def initial_state(self, M, d, D):
        return BufferedPace().initial_state(M, d, D)

    def cohort_size(self, P, busy):
        return P - busy

    def max_replies(self, P):
        return None


def test_a_buffered_pace_of_one_s_own():
    engine = Uneven(lambda c, t, w: vec(1, 0), ["0", "1", "2"])
    recipe = replace(recipes.fedavg(P=3), pace=Pairs())
    done = list(rounds(recipe, engine, make_initial_state(recipe, engine, vec(0, 0)), 3, 0))
    assert [r.record.replied for r in done] == [("0", "1"), ("0", "1"), ("0", "2")]
