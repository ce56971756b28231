"""Updates that stay on a device: the same results, the same gate, and few bytes that cross."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_gate import COMPRESSORS, honest
from test_gate import holdings as small_holdings
from test_gate import replies as hostile_replies
from test_gate import task as small_task
from torch.utils._python_dispatch import _disable_current_modes

from elsewhere import Mixed, elsewhere
from flrce import Aggregator
from flrce.config.experiment import Experiment
from flrce.core import linalg, loop, memory_limits, sketch, tensor_bytes
from flrce.core.gate import validate_replies
from flrce.core.payloads import ReplyContext
from flrce.core.pieces import Payload
from flrce.core.types import RepliesWithTable, Reply, Updates
from flrce.errors import BadInput
from flrce.methods.aggregation import robust
from flrce.methods.aggregation.related_mean import RelatedMean
from flrce.methods.aggregation.robust import ClippedMean, CoordinateMedian, Krum, TrimmedMean
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.methods.selection.relationship import RelationshipSelector
from flrce.methods.selection.turns import RoundRobinSelector
from flrce.rng import make_stream
from flrce.simulation import build, runs, update_placement
from flrce.simulation.run_slot import DeviceCopies, DeviceSchedulers, RunSlot
from stub_engine import StubEngine

D, TRAINED, P, CLIENTS = 3000, 2990, 4, 9
LAYOUT = (("w", TRAINED), ("bn.running_var", D - TRAINED))


class Clients(StubEngine):
    """Clients with updates of their own; `far`: they lie on a device, in one table where
    `tabled`.
    """

    trainable = TRAINED
    updates_on_device = True

    def __init__(self, far=False, tabled=True, hostile=None):
        self.far, self.tabled, self.hostile, self.twins = (
            far,
            tabled,
            hostile or {},
            DeviceCopies("far"),
        )

    def clients(self, t):
        return [f"c{i}" for i in range(CLIENTS)]

    def get_task_layout(self, task):
        return None, LAYOUT

    def update(self, task, w):
        rng = make_stream(task.seed, "update", task.t, task.client)
        u = torch.from_numpy(rng.normal(size=D)).float() * 0.1 + 0.02 * (task.k - 3)
        u[TRAINED:] = u[TRAINED:].abs()
        return self.hostile.get(task.client, lambda u: u)(u)

    def train(self, pending, client_states, keep=None):
        tasks, w = [one.task for one in pending], pending[0].w
        sent = [(task, self.update(task, w)) for task in tasks]
        replies = [Reply(task.client, task.t, Payload({"u": u}), n=10 + task.k) for task, u in sent]
        if not self.far:
            return replies
        there, table = self.twins.get_copy(w), None
        if self.tabled:
            order = sorted(range(len(tasks)), key=lambda i: tasks[i].k)
            table = there.new_empty(len(tasks), D)
            for row, i in enumerate(order):
                u = replies[i].payload.buffers["u"]
                if u.shape == (D,) and u.dtype == torch.float32:
                    table[row].copy_(u)
                    replies[i] = replace(replies[i], payload=Payload({"u": table[row]}))
        else:
            replies = [
                replace(
                    each,
                    payload=Payload(
                        {"u": tensor_bytes.to_device_of(each.payload.buffers["u"], there)}
                    ),
                )
                for each in replies
            ]
        return RepliesWithTable(replies, table, there)

    device_lock = nullcontext()

    def remember_device_copy(self, w, there):
        self.twins.remember_copy(w, there)


def played(recipe, engine, T=3):
    w = torch.from_numpy(np.random.default_rng(0).normal(size=D)).float()
    w[TRAINED:] = 1.0
    found = list(loop.rounds(recipe, engine, loop.make_initial_state(recipe, engine, w), T, seed=1))
    return found[-1], [done.record for done in found]


def may(recipe):
    return not (
        update_placement.explain_partial_replies(recipe, TRAINED)
        or update_placement.explain_host_only(recipe)
    )


def recipes():
    named = {
        name: make(P=P)
        for name, make in CATALOGUE.items()
        if name not in ("krum", "fedit", "ffa-lora")
    }
    named["krum"] = replace(named["fedavg"], aggregator=Krum(attackers=0, keep=2))
    named["sketched map"] = replace(
        named["fedavg"], selector=RelationshipSelector(sketch=256, warmup=1, decay=0.1)
    )
    named["anchored"] = replace(
        named["fedavg"], selector=RelationshipSelector(sketch=256, anchor="model", decay=0.1)
    )
    named["map on the wire"] = replace(
        named["fedavg"], selector=RelationshipSelector(sketch=5000, space="wire", decay=0.1)
    )
    named["agreement"] = replace(
        named["fedavg"], selector=RoundRobinSelector(by="agreement", sketch=128)
    )
    named["related"] = replace(named["fedavg"], aggregator=RelatedMean(sketch=128, kin=1))
    named["private"] = CATALOGUE["flrce"](preset="private", P=P)
    return {name: recipe for name, recipe in named.items() if may(recipe)}


RECIPES = recipes()


def test_what_may_stay_on_a_device():
    assert {
        "fedavg",
        "fedprox",
        "private",
        "fedadam",
        "fedavgm",
        "fednova",
        "fedexp",
        "related",
        "oort",
    } <= set(RECIPES)
    assert {
        "median",
        "trimmed-mean",
        "krum",
        "clipped-mean",
        "power-of-choice",
        "clustered-sampling",
    } <= set(RECIPES)
    refused = {
        name: may(CATALOGUE[name](P=P))
        for name in ("divfl", "fedcom", "scaffold", "fedbuff", "dropout", "fedbn")
    }
    assert not any(refused.values())
    assert not may(
        replace(RECIPES["fedavg"], selector=RelationshipSelector())
    )  # V holds whole updates


@pytest.mark.parametrize(
    ("name", "tabled"),
    [
        *((name, True) for name in RECIPES),
        ("private", False),
        ("median", False),
        ("fedadam", False),
    ],
)
def test_the_server_s_half_is_the_same_on_a_device(name, tabled, monkeypatch):
    recipe = RECIPES[name]
    expected, history = played(recipe, Clients())
    with elsewhere(monkeypatch) as mode:
        found, records = played(recipe, Clients(far=True, tabled=tabled))
        assert not mode.is_far(found.state.w)
        assert not mode.is_far(found.model)
        assert not any(mode.is_far(x) for x in _tensors(found.state.server_state))
    assert [h.chosen for h in records] == [h.chosen for h in history]
    exact = name != "fedexp"  # whose norms are summed in another order
    assert (
        torch.equal(found.state.w, expected.state.w)
        if exact
        else torch.allclose(found.state.w, expected.state.w)
    )
    for one, two in zip(
        _tensors(found.state.server_state), _tensors(expected.state.server_state), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    for one, two in zip(records, history, strict=True):
        assert one.conflicts == two.conflicts
        assert one.consensus == pytest.approx(two.consensus, rel=1e-9)
        assert one.flagged == two.flagged


def _tensors(memory):
    fields = (value for kept in memory.values() for value in vars(kept).values())
    return [x for x in fields if isinstance(x, torch.Tensor)]


HOSTILE = {
    "nan": lambda u: u.index_fill(0, torch.tensor([5]), math.nan),
    "infinite": lambda u: u.index_fill(0, torch.tensor([5]), -math.inf),
    "huge": lambda u: u.index_fill(0, torch.tensor([7]), 1e12),
    "short": lambda u: u[:-1],
    "integers": lambda u: u.long(),
    "a variance below 0": lambda u: u.index_fill(0, torch.tensor([D - 1]), -50.0),
    "far away": lambda u: torch.cat([u[:TRAINED] * 1e4, u[TRAINED:]]),
    "nothing": torch.zeros_like,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_gate_keeps_its_promises_there(kind, monkeypatch):
    """The same clients are refused or flagged for the same reason, and the rest makes the same
    model.
    """
    recipe = replace(RECIPES["sketched map"], selector=RoundRobinSelector(by="balance", sketch=128))
    hostile = {f"c{i}": HOSTILE[kind] for i in (0, 4, 8)}
    expected, history = played(recipe, Clients(hostile=hostile))
    with elsewhere(monkeypatch):
        found, records = played(recipe, Clients(far=True, hostile=hostile))
    assert [h.rejected for h in records] == [h.rejected for h in history]
    assert [h.flagged for h in records] == [h.flagged for h in history]
    assert any(h.rejected or h.flagged for h in history)
    assert torch.equal(found.state.w, expected.state.w)
    assert bool(torch.isfinite(found.state.w).all())


@given(st.lists(hostile_replies, max_size=5), st.sampled_from(COMPRESSORS))
def test_any_reply_whatsoever_beside_a_device(sent, compressor):
    """As test_gate's: nothing raises, and what passes is finite and lies there."""
    tasks = [
        small_task("x", 4, compressor=compressor),
        small_task("y", 2, compressor=compressor),
        small_task("z", 0),
    ]
    with pytest.MonkeyPatch.context() as patch, elsewhere(patch) as mode:
        w = mode.there(torch.ones(8))
        updates, rejected = validate_replies(
            tasks, [*sent, honest(tasks[2])], ReplyContext(small_holdings, 8, 8, w=w)
        )
        assert mode.is_far(updates.U)
        assert bool(torch.isfinite(updates.U).all())
    assert updates.k.tolist() == sorted(updates.k.tolist())
    assert set(rejected) | {task.client for task in tasks if task.k in updates.k.tolist()} == {
        "x",
        "y",
        "z",
    }


def test_what_crosses_in_a_round(monkeypatch):
    """The model once a run to the device; back the new model, the round's products and P + 1
    sketches of k floats.
    """
    k = 256
    recipe = replace(RECIPES["fedavg"], selector=RelationshipSelector(sketch=k))
    seen = []
    with elsewhere(monkeypatch) as mode:
        engine = Clients(far=True)
        state = loop.make_initial_state(recipe, engine, torch.ones(D))
        for _ in loop.rounds(recipe, engine, state, 3, seed=1):
            seen.append((mode.up, mode.down))
    ups, downs = [np.diff([0, *each]).tolist() for each in zip(*seen, strict=True)]
    own = next(iter(sketch.make_sketch(TRAINED, k).there.values()), ())
    assert ups[1:] == [0, 0]
    assert ups[0] >= 4 * D
    small = 4 * (P + 1) * k + 8 * P * P + 8 * (P + 1)
    assert downs == [4 * D + small] * 3
    assert len(own) in (0, 2)


def test_a_server_that_remembers_works_on_the_host(monkeypatch):
    """Its moments are written every round: its step is made of the target there, and the next model
    goes up.
    """
    with elsewhere(monkeypatch) as mode:
        played(RECIPES["fedadam"], Clients(far=True), T=1)
        assert (mode.up, mode.down) == (4 * D, 4 * D + 8 * P * P)


@dataclass(frozen=True)
class Mixing(Aggregator):
    """Declares itself device-agnostic, and combines updates with a tensor on the host."""

    device_agnostic: ClassVar[bool] = True

    def __call__(self, w, updates, memory):
        return w + (updates.U * torch.ones(len(updates), 1)).mean(0)


def test_a_piece_that_mixes_device_and_host_is_named(monkeypatch):
    recipe = replace(RECIPES["fedavg"], aggregator=Mixing())
    with (
        elsewhere(monkeypatch),
        pytest.raises(BadInput, match=r"set engine\.updates = 'host'") as why,
    ):
        played(recipe, Clients(far=True))
    assert "a piece combines updates on the device with tensors on the host" in str(why.value)
    assert played(recipe, Clients())  # on the host alone it works


def test_mixing_both_is_noticed(monkeypatch):
    """The device that is not there is as strict as one that is."""
    with elsewhere(monkeypatch) as mode:
        far, here = mode.there(torch.ones(3)), torch.ones(3)
        with pytest.raises(Mixed):
            far + here
        with pytest.raises(Mixed):
            here.add_(far.sum())
        assert mode.is_far(far * torch.tensor(2.0))
        assert mode.is_far(far[torch.tensor([0])])
        assert not mode.is_far(here.copy_(far))


@pytest.mark.parametrize(("d", "k"), [(1000, 64), (1000, 1000), (70_001, 512), (5, 3)])
def test_a_device_s_sketch_is_the_host_s(d, k, monkeypatch):
    monkeypatch.setattr(sketch, "MAX_SHUFFLED_FLOATS", 0)
    monkeypatch.setattr(sketch, "FLOATS", 3 * k * 4)  # four blocks at a time
    S = sketch.make_sketch.__wrapped__(d, k, 3)
    X = torch.from_numpy(np.random.default_rng(d).normal(size=(3, d))).float()
    args = (S.offsets, S.signs, torch.arange(k))
    found = sketch.sketch_on_device(X, k, *args)
    exact = sketch.sketch_on_device(X.double(), k, *args)
    torch.testing.assert_close(found, S(X), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, exact.float(), rtol=0, atol=0)
    assert torch.equal(found, sketch.sketch_on_device(X, k, *args))


def test_the_device_s_products_are_the_host_s(monkeypatch):
    U = torch.from_numpy(np.random.default_rng(1).normal(size=(5, 5000))).float()
    expected = linalg.gram_matrix(U)
    monkeypatch.setattr(linalg, "DEVICE_CHUNK_COLUMNS", 999)
    with elsewhere(monkeypatch) as mode:
        found = linalg.gram_matrix(mode.there(U))
        assert not mode.is_far(found)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("covered", [False, True])
@pytest.mark.parametrize(
    "piece",
    [
        CoordinateMedian(),
        TrimmedMean(0.3),
        ClippedMean(),
        ClippedMean(norm=1.5, cap=2.0),
        Krum(1, 3),
    ],
)
def test_large_models_are_gone_through_by_parts(piece, covered, monkeypatch):
    rng = np.random.default_rng(2)
    U, w = (
        torch.from_numpy(rng.normal(size=(6, 301))).float(),
        torch.from_numpy(rng.normal(size=301)).float(),
    )
    held = (
        torch.from_numpy(rng.random((6, 301)) < 0.7)
        if covered and not isinstance(piece, Krum)
        else None
    )
    updates = Updates(
        torch.arange(6), U, torch.tensor([3.0, 1, 4, 1, 5, 9]).double(), 290, covered=held
    )
    expected = piece(w, updates, None)
    monkeypatch.setattr(linalg, "LARGE_MODEL_FLOATS", 100)
    monkeypatch.setattr(robust, "CHUNK_COLUMNS", 64)
    torch.testing.assert_close(piece(w, updates, None), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 64, 1001])
def test_copies_through_two_buffers(n, monkeypatch):
    monkeypatch.setattr(tensor_bytes, "PINNED_BUFFER_BYTES", 32)  # eight floats
    x = torch.arange(float(n))
    into = torch.full((n,), -1.0)
    tensor_bytes.copy_in_stages(x, into, pinned=False)
    assert torch.equal(into, x)


def test_twins_remember_two_models_while_they_are_held(monkeypatch):
    sent = []
    monkeypatch.setattr(
        tensor_bytes, "to_device", lambda w, device: sent.append(len(w)) or w.clone()
    )
    twins, a, b = DeviceCopies("far"), torch.ones(1), torch.ones(2)
    assert twins.get_copy(a) is twins.get_copy(a)
    twins.get_copy(b)
    twins.get_copy(a)
    assert sent == [1, 2]
    held = torch.zeros(2)
    twins.remember_copy(b, held)
    assert twins.get_copy(b) is held
    twins.get_copy(torch.ones(3))  # nobody holds it: forgotten as soon as another comes
    twins.get_copy(b)
    assert twins.get_copy(b) is held
    assert sent == [1, 2, 3]


SMALL = {"rounds": 3, "clients": 8, "per_round": 3, "train": {"epochs": 1, "batch": 32}}


def made(updates=None, **more):
    engine = {"kernel": "torch", "workers": 1} | ({"updates": updates} if updates else {})
    return Experiment.from_tables(SMALL | {"recipe": {"name": "fedavg"}, "engine": engine} | more)


def on_a_deck(exp, out=None, resume=False):
    return runs.run_in_process([(exp, out)], resume=resume, device="cpu")[0]


def weights(result):
    return torch.cat([x.flatten() for x in result.model.values()])


@pytest.mark.parametrize(
    "recipe",
    [
        {"name": "fedavg"},
        {"name": "flrce", "preset": "default"},
        {"name": "fedadam"},
        {"name": "moon"},
    ],
    ids=lambda recipe: recipe["name"],
)
def test_a_deck_leaves_updates_on_its_device(recipe, monkeypatch):
    """Updates made there in one table; the same bits as those that come home one by one, and as
    those in a table.
    """
    exp = made("device", recipe=recipe)
    laid = []
    before = RunSlot._train_into_table
    monkeypatch.setattr(
        RunSlot,
        "_train_into_table",
        lambda self, *rest: laid.append(before(self, *rest)) or laid[-1],
    )
    found = on_a_deck(exp)
    assert len(laid) == 3
    assert all(each.sent is not None and each.table.shape[0] == 3 for each in laid)
    home = on_a_deck(made("host", recipe=recipe))
    assert len(laid) == 6
    assert all(each.sent is None for each in laid[3:])
    monkeypatch.setattr(build, "choose_placement", lambda *_: update_placement.HOST_PLACEMENT)
    plain = on_a_deck(made(recipe=recipe))
    assert len(laid) == 6
    assert torch.equal(weights(found), weights(plain))
    assert torch.equal(weights(home), weights(plain))
    assert [h.loss for h in found.history] == [h.loss for h in plain.history]


def test_a_deck_far_away(monkeypatch):
    """The whole of a run, its training apart, with a device that is not there."""
    exp = made("device", recipe={"name": "flrce", "preset": "default"})
    expected = on_a_deck(exp)
    trained, judged = RunSlot._train_clients, RunSlot.score_samples

    def apart(call):
        def inner(*args):
            with _disable_current_modes():
                return call(*args)

        return inner

    built = runs.build_simulation(exp, schedulers=DeviceSchedulers("cpu", single=True))
    with elsewhere(monkeypatch) as mode:
        monkeypatch.setattr(RunSlot, "_train_clients", apart(trained))
        monkeypatch.setattr(
            RunSlot,
            "score_samples",
            lambda self, w, *rest: apart(judged)(self, mode.there(w), *rest),
        )
        states = [done.state for done in built.iterate_rounds(exp)]
    built.engine.close()
    final = built.recipe.average.model(states[-1].server_state["average"], states[-1].w)
    assert torch.equal(final, weights(expected)[: len(final)])


def test_a_run_cut_and_resumed_has_the_same_bits(tmp_path):
    exp = made("device", recipe={"name": "flrce", "preset": "default"})
    straight = on_a_deck(exp, tmp_path / "straight")
    on_a_deck(
        made("device", recipe={"name": "flrce", "preset": "default"}, rounds=2), tmp_path / "cut"
    )
    resumed = on_a_deck(exp, tmp_path / "cut", resume=True)
    assert torch.equal(weights(straight), weights(resumed))
    assert [h.chosen for h in straight.history] == [h.chosen for h in resumed.history]
    kept = on_a_deck(made("host", recipe={"name": "flrce", "preset": "default"}), tmp_path / "host")
    assert torch.equal(weights(straight), weights(kept))


def test_two_runs_in_threads_take_turns():
    """Each alone on its deck, both on one device: while one works there, the other waits, and
    neither for ever.
    """
    exps = [
        made("device", recipe={"name": "flrce", "preset": "default"}, seed=seed) for seed in (0, 1)
    ]
    built = [
        runs.build_simulation(exp, schedulers=DeviceSchedulers("cpu", single=True))
        for exp in (*exps, *exps)
    ]

    def last(i):
        return list(built[i].iterate_rounds(exps[i % 2]))[-1].state.w

    with ThreadPoolExecutor(2) as threads:
        found = [each.result(timeout=120) for each in [threads.submit(last, i) for i in (0, 1)]]
    assert all(torch.equal(one, last(i)) for i, one in enumerate(found, 2))
    for each in built:
        each.engine.close()


def test_a_device_without_room_for_the_updates(monkeypatch, caplog):
    """They come home from then on, and the run goes on."""

    def short(*_):
        raise torch.OutOfMemoryError("no room")

    expected = on_a_deck(made())
    monkeypatch.setattr(RunSlot, "_allocate_table", short)
    found = on_a_deck(made("device"))
    assert torch.equal(weights(found), weights(expected))
    assert caplog.text.count("come to the host one by one: no room") == 1


@pytest.mark.parametrize("sends", ["stale", "noise"])
def test_free_riders_beside_clients_on_a_device(sends):
    riders = {
        "data": {"trouble": [{"piece": "free-riders", "share": 0.5, "sends": sends}]},
        "per_round": 6,
    }
    one, two = (on_a_deck(made(where, **riders)) for where in ("device", None))
    assert torch.equal(weights(one), weights(two))


def test_why_updates_come_to_the_host():
    fedavg, many = RECIPES["fedavg"], 2**23

    def why(recipe, D=many, room=1 << 40, alone=True, wanted=None):
        return update_placement.choose_placement(recipe, D, D, room, alone, wanted)

    assert why(fedavg) == update_placement.UpdatePlacement(on_device=True, in_table=True)
    assert "several runs" in why(fedavg, alone=False).why
    assert "quarter" in why(fedavg, room=1 << 20).why
    assert not why(fedavg, room=1 << 20).in_table
    assert why(fedavg, wanted="host") == update_placement.UpdatePlacement(
        False, True, "engine.updates = 'host'"
    )
    mapped = why(replace(fedavg, selector=RelationshipSelector()))
    assert mapped == update_placement.UpdatePlacement(
        False, True, "RelationshipSelector (selector) takes them there"
    )
    with pytest.raises(BadInput, match=r"engine\.updates = 'device': DivFL"):
        why(CATALOGUE["divfl"](P=P), wanted="device")
    assert "0.03 GB a round to the host" in update_placement.describe_placement(
        why(fedavg), P, many, "cuda"
    )
    assert update_placement.describe_placement(mapped, P, many, "cuda").startswith(
        "updates come to the host, 0.13 GB a round: RelationshipSelector"
    )


def test_the_host_s_memory_is_said_without_updates_that_are_elsewhere():
    D = 135_000_000
    assert memory_limits.estimate_server_bytes(
        RECIPES["fedavg"], 100, D, D, on_device=True
    ) == pytest.approx(4 * D * 8, rel=0.01)
    assert Clients(far=True).updates_on_device
    assert not StubEngine().updates_on_device


def test_without_a_gpu_one_line_says_that_there_is_no_device(caplog):
    exp = Experiment.from_tables(
        {
            "rounds": 1,
            "clients": 4,
            "per_round": 2,
            "engine": {"updates": "device", "device": "cpu"},
        }
    )
    runs.build_simulation(exp).engine.close()
    assert [line.getMessage() for line in caplog.records if "engine.updates" in line.getMessage()]
