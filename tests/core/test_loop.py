"""The round loop on a made-up engine whose updates are known: selection, stopping, abandoning,
rosters.
"""

from dataclasses import dataclass, field, replace

import by_the_book
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce import Aggregator, Selector
from flrce.core.engine import exclude_busy_clients
from flrce.core.evaluation import find_shadow_stops
from flrce.core.linalg import gram_matrix, mean_conflicts, update_consensus
from flrce.core.loop import make_initial_state, rounds
from flrce.core.relations import NEVER_SEEN
from flrce.core.roles import RoundView
from flrce.core.types import (
    ClientCost,
    Evaluation,
    Payload,
    Reply,
    RoundEvent,
    RoundRecord,
    Selection,
    Task,
    Updates,
)
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.pacing.pace import BufferedPace, OverCommitment
from flrce.methods.selection.relationship import RelationshipSelector
from flrce.methods.server.averages import EMA, RunningMeanState, TailMean
from flrce.methods.stopping.budget import AnyOf, CostBudget, Patience
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.no_headway import NoHeadway
from stub_engine import StubEngine
from training import require_valid_fields

COST = ClientCost(bytes_down=8, bytes_up=8, joules=1.0, compute_seconds=1.0)


@dataclass
class Made(StubEngine):
    """An engine whose clients send what a function says."""

    update: object
    ids: list[str]
    trainable: int = 2
    asked: list[tuple[str, ...]] = field(default_factory=list)
    spent: ClientCost = COST

    def clients(self, t):
        return self.ids

    def estimate(self, task):
        return self.spent

    def train(self, pending, client_states, keep=None):
        self.asked.append(tuple(one.task.client for one in pending))
        return super().train(pending, client_states, keep)

    def reply(self, task: Task, w):
        u = self.update(task.client, task.t, w)
        return Reply(task.client, task.t, Payload({"u": u}), n=10, spent=self.spent)

    def evaluate(self, w, t, last=False, client_states=None):
        return Evaluation(0.5, 0.5, 1.0)


def vec(*values):
    return torch.tensor(values, dtype=torch.float32)


def drive(recipe, engine, T, w=None, seed=0):
    w = torch.zeros(engine.trainable) if w is None else w
    return list(rounds(recipe, engine, make_initial_state(recipe, engine, w), T, seed))


def test_two_opposed_clients_stop_in_the_first_exploit_round():
    engine = Made(lambda c, t, w: vec(1, 0) if c == "0" else vec(-1, 0.5), ["0", "1"])
    done = drive(recipes.flrce(psi=1, preset="paper", P=2), engine, 100)
    exploits = [r for r in done if r.record.exploit]
    assert len(exploits) == 1
    assert exploits[0] is done[-1]
    assert done[-1].record.conflicts == 1
    assert "psi 1" in done[-1].record.stop
    assert len(engine.asked) == len(done)  # nobody is asked after the stop


def test_the_stopping_round_is_aggregated():
    engine = Made(lambda c, t, w: vec(1, 0) if c == "0" else vec(-0.5, 0), ["0", "1"])
    done = drive(recipes.flrce(psi=1, preset="paper", P=2), engine, 100)
    assert done[-1].state.w[0] == pytest.approx(0.25 * len(done), rel=1e-5)


def test_agreeing_clients_never_stop():
    done = drive(
        recipes.flrce(psi=1, preset="paper", P=2), Made(lambda c, t, w: vec(1, 0), ["0", "1"]), 60
    )
    assert len(done) == 60
    assert sum(r.record.exploit for r in done) > 10


def test_the_loop_is_algorithm_4():
    """The fast loop against the book: same draws, same updates, so the same choices, map and
    model.
    """
    M, P, T = 6, 3, 40

    def update(client, t, w):
        rng = np.random.default_rng(1000 * t + int(client))
        return torch.tensor(rng.normal(size=4) - 0.3 * w.double().numpy(), dtype=torch.float32)

    recipe = recipes.flrce(psi=2.0, preset="paper", P=P)
    engine = Made(update, [str(k) for k in range(M)], trainable=4)
    engine.spent = ClientCost()
    start = vec(0.3, -0.2, 0.5, 0.1)
    done = drive(recipe, engine, T, start, seed=3)

    class Draws:
        """The book's random source, fed from the same streams."""

        t = 0

        def random(self):
            from flrce.rng import make_stream

            self.t += 1
            self.rng = make_stream(3, "select", self.t)
            return self.rng.random()

        def sample(self, population, size):
            from flrce.rng import make_stream

            rng = make_stream(3, "select", self.t)
            rng.random()
            return rng.permutation(len(population)).tolist()

    def train(k, w, t):
        return update(str(k), t, torch.tensor(w, dtype=torch.float32)).double().tolist()

    book = list(by_the_book.flrce(train, start.double().tolist(), [10] * M, M, P, T, 2.0, Draws()))
    assert len(book) == len(done)
    for (t, chosen, exploit, conflict, w, *_), found in zip(book, done, strict=True):
        assert [str(k) for k in chosen] == list(found.record.chosen), t
        assert exploit == found.record.exploit
        assert conflict == pytest.approx(found.record.conflicts)
        assert found.state.w.tolist() == pytest.approx(w, abs=1e-4)
    memory = done[-1].state.server_state["selector"]
    *_, Omega, H = book[-1]
    assert np.allclose(memory.Omega, Omega, atol=1e-3)
    assert np.allclose(memory.H, H, atol=5e-3)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [(0.98, [14.6, 16.3, 19.5, 27.0, 56.6]), (0.99, [8.3, 9.4, 11.3, 16.1, 36.6])],
)
def test_expected_exploit_rounds(decay, expected):
    phi = RelationshipSelector(decay=decay).exploration_probability
    for T, count in zip([44, 47, 52, 63, 100], expected, strict=True):
        assert sum(1 - phi(t) for t in range(1, T + 1)) == pytest.approx(count, abs=0.05)


def test_exploit_rounds_follow_phi():
    """Counted over seeds: within four standard errors of the expectation of 27.0 by round 63."""
    engine = Made(lambda c, t, w: vec(1, 0), ["0", "1", "2"])
    counts = [
        sum(
            r.record.exploit for r in drive(recipes.flrce_no_stop("paper", P=2), engine, 63, seed=s)
        )
        for s in range(12)
    ]
    assert abs(np.mean(counts) - 27.0) < 4 * np.std(counts) / len(counts) ** 0.5


def test_warm_up_always_explores():
    recipe = replace(
        recipes.flrce_no_stop("paper", P=2), selector=RelationshipSelector(warmup=30, decay=0.5)
    )
    done = drive(recipe, Made(lambda c, t, w: vec(1, 0), ["0", "1", "2"]), 40)
    assert not any(r.record.exploit for r in done[:30])
    assert all(r.record.exploit for r in done[30:])


def test_exploit_takes_the_largest_h_of_those_reachable():
    m = RelationshipSelector().initial_state(5, 2, 2)
    m.H[:] = torch.tensor([0.5, 3.0, 3.0, -1.0, 0.0])
    m.R[:4] = 1
    view = RoundView(500, 2, (0, 2, 1, 3, 4), torch.ones(5), None, None, None)
    rng = np.random.default_rng(0)
    assert RelationshipSelector().select(m, view, rng).k == (
        2,
        1,
    )  # ties: as listed, here 2 before 1
    view = replace(view, pool=(0, 3, 4))
    assert RelationshipSelector().select(m, view, rng).k == (0, 4)  # unseen (H = 0) outranks H < 0
    assert RelationshipSelector(pessimistic=True).select(m, view, rng).k == (0, 3)


def test_clients_may_appear_and_vanish():
    engine = Made(lambda c, t, w: vec(1, float(ord(c[0]) - 100)), ["amy", "bob", "cyd"])
    recipe = recipes.flrce_no_stop("paper", P=2)
    state = make_initial_state(recipe, engine, torch.zeros(2))
    seen = []
    for done in rounds(recipe, engine, state, 12, 0):
        seen.append(set(done.record.chosen))
        if done.record.t == 4:
            engine.ids = ["bob", "dan", "eve"]
        if done.record.t == 8:
            engine.ids = ["amy", "eve", "fay"]
    assert all(s <= {"bob", "dan", "eve"} for s in seen[4:8])
    assert all(s <= {"amy", "eve", "fay"} for s in seen[8:])
    assert set(done.state.roster) == {"amy", "bob", "cyd", "dan", "eve", "fay"}
    assert done.state.server_state["selector"].V.shape[0] == 6
    never = [
        done.state.roster[k]
        for k in range(6)
        if done.state.server_state["selector"].R[k] == NEVER_SEEN
    ]
    assert set().union(*seen) == set(done.state.roster) - set(never)


def test_counts_given_as_a_whole_are_what_the_selector_sees():
    class Counting(Made):
        def count_all_samples(self, clients):
            return torch.tensor([10.0 * int(client) for client in clients], dtype=torch.float64)

    class Watching(Selector):
        def select(self, memory, view, rng):
            seen.append((view.n.tolist(), view.pool))
            return Selection(view.pool[:1])

    seen: list[object] = []
    for made, ids in ((Counting, ["1", "2"]), (Made, ["1", "2"]), (Counting, ["2", "1"])):
        engine = made(lambda c, t, w: vec(1, 1), ["1", "2"])
        recipe = replace(recipes.fedavg(P=1), selector=Watching())
        state = make_initial_state(recipe, engine, torch.zeros(2))
        engine.ids = ids
        next(rounds(recipe, engine, state, 1, 0))
    assert seen == [([10.0, 20.0], (0, 1)), ([10.0, 10.0], (0, 1)), ([10.0, 20.0], (0, 1))]


def test_too_few_replies_abandon_the_round():
    engine = Made(lambda c, t, w: vec(1, float("nan")), ["0", "1", "2"])
    done = drive(recipes.fedavg(P=2), engine, 10)
    assert [r.record.outcome for r in done] == ["abandoned"] * 3
    assert done[-1].record.stop.startswith("abandoned 3 times")
    assert done[-1].state.t == 0
    assert done[-1].state.w.tolist() == [0, 0]
    assert done[-1].record.bytes_wasted == 32
    assert len(set(engine.asked)) > 1  # a new try asks others


def test_a_failing_client_leaves_both_sums():
    engine = Made(lambda c, t, w: vec(1, 0) if c != "1" else vec(float("inf"), 0), ["0", "1", "2"])
    done = drive(recipes.fedavg(P=3), engine, 1)
    assert done[0].state.w.tolist() == [1, 0]
    assert list(done[0].record.rejected) == ["1"]


@given(st.permutations(range(5)))
def test_the_order_of_replies_never_matters(order):
    recipe, rng = recipes.flrce_no_stop("paper", P=5), np.random.default_rng(0)
    table = {str(k): torch.tensor(rng.normal(size=2), dtype=torch.float32) for k in range(5)}

    class Shuffled(Made):
        def train(self, pending, client_states, keep=None):
            replies = super().train(pending, client_states, keep)
            return [replies[i] for i in order]

    engines = [
        kind(lambda c, t, w: table[c] * t, [str(k) for k in range(5)]) for kind in (Made, Shuffled)
    ]
    one, two = (drive(recipe, engine, 3)[-1].state for engine in engines)
    assert torch.equal(one.w, two.w)
    assert torch.equal(one.server_state["selector"].Omega, two.server_state["selector"].Omega)


def test_a_budget_is_never_passed():
    engine = Made(lambda c, t, w: vec(1, 0), [str(k) for k in range(4)])
    recipe = replace(recipes.fedavg(P=2), stop=AnyOf((CostBudget(joules=7.5),)))
    done = drive(recipe, engine, 100)
    assert [r.record.outcome for r in done] == ["committed"] * 3 + ["not started"]  # 2 J a round
    assert "budget of 7.5 joules" in done[-1].record.stop
    assert len(engine.asked) == 3


def test_budgets_of_each_kind():
    history = [
        RoundRecord(t, bytes_up=10, bytes_down=10, joules=1.0, seconds=2.0, accuracy=0.5)
        for t in range(1, 5)
    ]
    assert CostBudget(bytes=80)(history)
    assert not CostBudget(bytes=81)(history)
    assert CostBudget(joules=4)(history)
    assert CostBudget(seconds=8)(history)
    assert CostBudget(rounds=4).check_next_round(history, [])
    assert not CostBudget(rounds=5).check_next_round(history, [])
    assert Patience(3)(history)
    assert not Patience(4)(history)


def test_conflicts_by_hand():
    # (1, 0) against (-1, .1): yes; (0, 1) against neither of them ((-1, .1) . (0, 1) > 0): 2
    # ordered pairs of 3
    assert mean_conflicts(gram_matrix(torch.tensor([[1, 0], [-1, 0.1], [0, 1]]))) == pytest.approx(
        2 / 3
    )
    assert mean_conflicts(gram_matrix(torch.zeros(3, 2))) == 0
    assert mean_conflicts(gram_matrix(torch.ones(1, 2))) == 0


def test_consensus_by_hand():
    # p = (1/2, 1/2), u = (3, 0), (0, 4): |(1.5, 2)| = 2.5, mean length 3.5
    assert update_consensus(
        gram_matrix(torch.tensor([[3.0, 0], [0, 4]])), torch.ones(2)
    ) == pytest.approx(2.5 / 3.5)


def records(*rows):
    return [RoundRecord(t, exploit=exploit, conflicts=c) for t, (exploit, c) in enumerate(rows, 1)]


def test_the_stop_rule():
    rule = UpdateConflicts(5.0)
    assert rule(records((True, 5.0)))
    assert not rule(records((False, 9.0)))  # explore rounds never stop
    assert not rule(records((True, 4.9)))
    patient = UpdateConflicts(5.0, r=2, n=3, after=2)
    assert not patient(records((True, 6), (True, 6), (True, 6)))
    assert patient(records((True, 6), (True, 6), (True, 6), (True, 0), (True, 6)))
    (first, second), grid = records((True, 5.2), (False, 9)), (4.0, 4.5, 5.0)
    assert find_shadow_stops((), first, 10) == grid
    noted = (replace(first, shadow=grid), replace(second, outcome="abandoned"))
    assert (
        find_shadow_stops(noted, second, 10) == grid
    )  # not an exploiting round, and nothing is forgotten
    assert find_shadow_stops(noted, replace(first, conflicts=4.6), 10) == grid
    assert find_shadow_stops(noted, replace(first, conflicts=5.6), 10) == (*grid, 5.5)


def test_headway():
    """The average of w1 = (1, 0) and w2 = (2, 0) lies behind w2: on is 1, aside 0, back -1."""
    ema, m, w = EMA(0.5), EMA(0.5).initial_state(1, 2, 2), vec(0, 0)

    def event(w, w_next):
        return RoundEvent(
            1, w, w_next, Updates(torch.tensor([0]), torch.zeros(1, 2), torch.ones(1), 2), 1
        )

    for w_next in (vec(1, 0), vec(2, 0)):
        m, w = ema.observe(m, event(w, w_next)), w_next
        assert ema.get_headway(m) is None  # nothing lies behind yet
    ways = {vec(3, 0): 1, vec(2, 5): 0, vec(1, 0): -1}
    assert [ema.get_headway(ema.observe(m, event(w, to))) for to in ways] == pytest.approx(
        [*ways.values()]
    )
    assert ema.get_headway(ema.observe(m, event(w, w))) is None


def test_the_second_round_has_no_headway():
    """After one round the average is w up to its last bit: the cosine of what is left says
    nothing.
    """
    rng = torch.Generator().manual_seed(0)
    ema, m, w = EMA(), EMA().initial_state(1, 500, 500), torch.zeros(500)

    def event(w, w_next):
        return RoundEvent(
            1, w, w_next, Updates(torch.tensor([0]), torch.zeros(1, 500), torch.ones(1), 500), 1
        )

    seen = []
    for _ in range(4):
        w_next = w + torch.randn(500, generator=rng)
        m, w = ema.observe(m, event(w, w_next)), w_next
        seen.append(ema.get_headway(m))
    assert seen[:2] == [None, None]
    assert None not in seen[2:]


def test_an_eased_average_starts_at_the_last_model():
    """decay 1/2: after w1 = 1 the average is 1; after w2 = 4 it is (1/2 + 4) / (3/2) = 3, its
    weight 3/4.
    """
    w, eased = vec(4), EMA(0.5, ease=2.0)
    mean = RunningMeanState(torch.tensor([2.25], dtype=torch.float64), 0.75)
    assert EMA(0.5).model(mean, w).tolist() == [3.0]
    assert eased.model(mean, w).tolist() == [4 - 0.5625]  # (3/4)^2 of the way from 4 to 3
    with pytest.raises(ValueError, match="ease = -1: should be greater than or equal to 0"):
        require_valid_fields(EMA(ease=-1))


def test_an_average_is_not_handed_back_where_rounds_go_straight_on():
    """decay 1/2, w = 1, 2, 3, 4: headways 1, 1, then -1 for back to 2; their mean is (1/8 + 1/4 -
    1/2) / (7/8).
    """
    ema = EMA(0.5, level=0.25)

    def event(w, w_next):
        return RoundEvent(
            1, w, w_next, Updates(torch.tensor([0]), torch.zeros(1, 1), torch.ones(1), 1), 1
        )

    m, w = ema.initial_state(1, 1, 1), vec(0)
    for value in (1, 2, 3, 4):
        m, w = ema.observe(m, event(w, vec(value))), vec(value)
        assert ema.model(m, w) is w
    m, w = ema.observe(m, event(w, vec(2))), vec(2)
    assert m.straight / m.known == pytest.approx((1 / 4 + 1 / 8 - 1 / 2) / (7 / 8))
    assert torch.equal(ema.model(m, w), EMA(0.5).model(m, w))  # below the level: the average
    between = replace(m, straight=0.375 * m.known)  # one and a half levels: half the way
    assert ema.model(between, w).item() == pytest.approx((2 + EMA(0.5).model(m, w).item()) / 2)
    with pytest.raises(ValueError, match=r"level = -0\.1"):
        require_valid_fields(EMA(level=-0.1))


def test_standstill():
    """Headways 1, -.2, -.4: their mean over two rounds is below -.25 in the third, if the third may
    stop.
    """
    history = [
        RoundRecord(1),
        *(RoundRecord(t, headway=h) for t, h in enumerate((1.0, -0.2, -0.4), 2)),
    ]

    def rule(level, n=2, after=2, share=0.0, first=2):
        return NoHeadway(level, share, n, first, after)

    assert rule(-0.25)(history) == "headway -0.300 < -0.250 over 2 rounds"
    assert not rule(-0.25)(history[:-1])
    assert not rule(-0.35)(history)
    assert rule(-0.35, share=0.1)(history)  # the first rounds' headway was 1
    assert not rule(-0.35, share=0.1, first=4)(history)  # .13 on average
    assert not rule(-0.25, after=4)(history)
    assert not rule(0.5, n=4, after=0)(history)  # only three are known
    assert not rule(0.5, first=1)(history)  # the first round has none
    assert not rule(-0.25)([*history, RoundRecord(4, "abandoned")])
    with pytest.raises(BadInput, match="first two rounds have no headway"):
        replace(recipes.frugal(), stop=NoHeadway(first=2))
    for stop in (NoHeadway(), AnyOf((CostBudget(joules=1.0), NoHeadway()))):
        with pytest.raises(BadInput, match="ema"):
            replace(recipes.fedavg(), stop=stop)


def test_server_averages():
    def event(t, value):
        updates = Updates(torch.tensor([0]), torch.zeros(1, 1), torch.ones(1), 1)
        return RoundEvent(t, torch.zeros(1), vec(value), updates, 1)

    ema, m = EMA(0.5), EMA(0.5).initial_state(1, 1, 1)
    for t, value in enumerate([4.0, 8.0], 1):
        m = ema.observe(m, event(t, value))
    assert ema.model(m, vec(0)).tolist() == pytest.approx([20 / 3])  # (.25 * 4 + .5 * 8) / .75
    tail, m = TailMean(2), TailMean(2).initial_state(1, 1, 1)
    for t, value in enumerate([4.0, 8.0, 10.0], 1):
        m = tail.observe(m, event(t, value))
    assert tail.model(m, vec(0)).tolist() == [9]


def test_what_a_piece_may_do_has_a_default_on_its_base_class():
    """A field, a ClassVar or a property of the same name overrides it."""

    @dataclass(frozen=True)
    class Rated(Aggregator):
        rate: float  # no default: the base's property is not taken for one

        def __call__(self, w, updates, memory):
            return w

    assert Rated(0.5).rate == 0.5
    with pytest.raises(TypeError, match="rate"):
        Rated()
    assert BufferedPace(3).buffer_size == 3
    assert OverCommitment().buffer_size is None
    assert not Rated(1.0).has_state
    assert EMA().has_state
    assert EMA().observes_rounds
    assert EMA().measures_headway


def test_a_piece_must_subclass_the_base_of_its_role():
    class Mine:
        def select(self, memory, view, rng):
            return Selection(view.pool[: view.P])

    recipe = recipes.fedavg(P=2)
    with pytest.raises(BadInput, match=r"recipe.selector: class Mine must subclass flrce.Selector"):
        replace(recipe, selector=Mine())
    with pytest.raises(BadInput, match=r"must subclass flrce.StopRule"):
        replace(recipe, stop=lambda history: "")


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 35)))
def test_rows_without_those_that_are_busy(rows, busy):
    assert exclude_busy_clients(tuple(sorted(rows)), busy) == tuple(
        k for k in sorted(rows) if k not in busy
    )
