"""Rows 6 to 14 and 20: whatever a client sends, for every recipe of the catalogue."""

import pickle
import resource
from dataclasses import replace

import pytest
import torch
from clients import SIZES, Fleet, spoil
from harness import in_child

from flrce.core.loop import make_initial_state, rounds
from flrce.core.record import flatten_record
from flrce.core.types import ClientCost, Payload, Reply
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.methods.compression.nonzero import NonzeroCoordinates

T, SEED, D = 4, 7, sum(size for _, size in SIZES)


# ifca needs a network of several models, which this fleet does not have: test_model_groups.py
RECIPES = {name: make(P=6) for name, make in CATALOGUE.items() if name != "ifca"}
WAITING = [name for name, recipe in RECIPES.items() if recipe.pace.buffer_size is None]
each_recipe = pytest.mark.parametrize("name", WAITING)  # those that wait for nobody: at the end


def run(name, T=T, **engine):
    fleet = Fleet(**engine)
    recipe = replace(RECIPES[name], minimum=min(RECIPES[name].minimum, 1))
    return list(rounds(recipe, fleet, make_initial_state(recipe, fleet, torch.zeros(D)), T, SEED))


def bad(change, t=2, count=1):
    """The first `count` clients of round t that send any floats misbehave."""
    picked: list[str] = []

    def apply(reply, task):
        floats = any(b.is_floating_point() and b.numel() for b in reply.payload.buffers.values())
        if task.t == t and floats and (task.client in picked or len(picked) < count):
            picked.append(task.client)
            return change(reply, task)
        return reply

    return apply, picked


def skipped(done, picked):
    """Every round commits, the model stays finite, the culprit is refused in its round with a
    reason.
    """
    assert [r.record.outcome for r in done] == ["committed"] * T
    assert all(torch.isfinite(r.state.w).all() for r in done)
    assert picked
    assert set(picked) <= set(done[1].record.rejected)
    assert all(reason for reason in done[1].record.rejected.values())
    lines = {c.client: c.outcome for c in done[1].clients}
    assert all(lines[client] != "useful" for client in picked)
    return done[1].record.rejected[picked[0]]


def buffers(reply, **new):
    return replace(reply, payload=Payload({**reply.payload.buffers, **new}))


def mapped(reply, edit):
    return replace(
        reply, payload=Payload(dict(edit(n, b) for n, b in reply.payload.buffers.items()))
    )


def element(value):
    def edit(b):
        if b.is_floating_point() and b.numel():
            b[0] = value
        return b

    return edit


@pytest.mark.row(10, "NaN or Inf, one element or all", "SKIP, model finite, every recipe")
@each_recipe
def test_not_finite(name):
    for value in (float("nan"), float("inf"), -float("inf")):
        for edit in (
            element(value),
            lambda b, v=value: torch.full_like(b, v) if b.is_floating_point() else b,
        ):
            change, picked = bad(lambda reply, task, e=edit: spoil(reply, e))
            reason = skipped(run(name, change=change), picked)
            assert "not finite" in reason or "malformed" in reason


WRONG = {
    "shape": lambda reply, task: spoil(reply, lambda b: b[:-1]),
    "broadcastable": lambda reply, task: spoil(reply, lambda b: b[:1]),
    "two dimensions": lambda reply, task: spoil(reply, lambda b: b[None]),
    "empty": lambda reply, task: spoil(reply, lambda b: b[:0]),
    "longer": lambda reply, task: spoil(reply, lambda b: torch.cat([b, b])),
    "dtype": lambda reply, task: spoil(reply, lambda b: b.to(torch.complex64)),
    "renamed": lambda reply, task: mapped(reply, lambda n, b: (n + "x", b)),
    "missing": lambda reply, task: replace(reply, payload=Payload({})),
    "extra": lambda reply, task: buffers(reply, more=torch.zeros(3)),
    "no payload": lambda reply, task: replace(reply, payload=None),
    "no tensors": lambda reply, task: mapped(reply, lambda n, b: (n, b.tolist())),
    "sparse": lambda reply, task: spoil(reply, lambda b: b.to_sparse()),
    "a list": lambda reply, task: replace(reply, payload=[1, 2, 3]),
    "no reply": lambda reply, task: None,
    "not even a reply": lambda reply, task: {"client": task.client},
}


@pytest.mark.row(
    11, "wrong, broadcastable, missing, extra shape, dtype, key", "SKIP, never an exception"
)
@each_recipe
def test_malformed(name):
    sparse = isinstance(
        RECIPES[name].compressor, NonzeroCoordinates
    )  # fewer coordinates are a whole message there
    for case, make in WRONG.items():
        if sparse and case in ("shape", "broadcastable", "empty"):
            continue
        change, picked = bad(make)
        assert skipped(run(name, change=change), picked), case


@pytest.mark.row(
    12, "header that claims 1e12 items; 100,000 keys", "refused before allocation, RSS < 50 MB"
)
@pytest.mark.parametrize("name", ["fedavg", "flrce", "fedcom", "fedcom-quantised"])
def test_absurd_sizes(name, seen, tmp_path):
    one = torch.zeros(1)
    cases = {
        "1e12 items": lambda reply, task: spoil(reply, lambda b: b[:1].expand(10**12)),
        "100,000 keys": lambda reply, task: replace(
            reply, payload=Payload({f"k{i}": one for i in range(100_000)})
        ),
        "one large buffer more": lambda reply, task: buffers(reply, more=one.expand(10**9)),
    }

    def child():
        """The peak of a fresh process starts at what it has at its fork."""
        run(name)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for make in cases.values():
            change, picked = bad(make)
            assert skipped(run(name, change=change), picked).startswith("malformed")
        (tmp_path / "grown").write_text(
            str(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
        )

    assert in_child(child) == 0
    grown = int((tmp_path / "grown").read_text())
    assert grown < 50e6
    seen(f"RSS +{grown / 1e6:.0f} MB")


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.row(13, "pickle, object array, path traversal in a name", "refused, canary untouched")
def test_no_code_from_clients(tmp_path):
    import numpy as np

    canary = tmp_path / "canary"
    code = pickle.dumps(Canary(str(canary)))
    for content in (
        {"u": code},
        {"u": Canary(str(canary))},
        {"u": np.array([Canary(str(canary))], dtype=object)},
        {f"../../{canary}": torch.zeros(D)},
        {str(canary): torch.frombuffer(bytearray(code), dtype=torch.uint8)},
    ):
        change, picked = bad(lambda reply, task, c=content: replace(reply, payload=Payload(c)))
        skipped(run("flrce", change=change), picked)
    assert not canary.exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.row(14, "num_examples 0, -1, NaN, 1e12, text", "SKIP")
@each_recipe
def test_num_examples(name):
    for n in (0, -1, -59, float("nan"), 10**12, 10**400, "many", None, True, 3.5, [3]):
        change, picked = bad(lambda reply, task, n=n: replace(reply, n=n))
        assert "num_examples" in skipped(run(name, change=change), picked)


@pytest.mark.row(14, "costs and losses that are no numbers", "SKIP, books stay sound")
def test_absurd_costs():
    for spent in (
        ClientCost(bytes_up=-5),
        ClientCost(joules=float("nan")),
        ClientCost(compute_seconds=float("inf")),
        None,
        "cheap",
    ):
        change, picked = bad(lambda reply, task, s=spent: replace(reply, spent=s))
        done = run("oort", change=change)
        skipped(done, picked)
        assert 0 <= done[1].record.joules < 1e6
        assert done[1].record.bytes_up >= 0
    for loss in (float("nan"), float("inf"), "low"):
        change, picked = bad(lambda reply, task, x=loss: replace(reply, loss=x))
        skipped(run("oort", change=change), picked)


def ledger(done, *without):
    rows = [flatten_record(r.record) for r in done]
    return [{key: value for key, value in row.items() if key not in without} for row in rows]


def same(a, b, *without):
    assert torch.equal(a[-1].state.w, b[-1].state.w)
    ours, theirs = (
        a[-1].state.server_state.get("selector"),
        b[-1].state.server_state.get("selector"),
    )
    if getattr(ours, "Omega", None) is not None:
        assert torch.equal(ours.Omega, theirs.Omega)
        assert torch.equal(ours.H, theirs.H)
    assert ledger(a, *without) == ledger(b, *without)


@pytest.mark.row(9, "replies in any order", "BIT")
@each_recipe
def test_any_order(name):
    plain = run(name)
    for order in (1, 2, 3):
        same(plain, run(name, shuffle=order))


PAID = ("bytes_up", "bytes_down", "bytes_framing", "bytes_wasted", "joules", "joules_wasted")


@pytest.mark.row(
    8, "duplicate reply, even a different one", "first wins, BIT but for the waste booked"
)
@each_recipe
def test_duplicates(name):
    def twice(tasks):
        return [
            Reply(t.client, t.t, Payload({"u": torch.ones(D)}), 5, spent=ClientCost(bytes_up=120))
            for t in tasks
        ]

    plain, doubled = run(name), run(name, extra=twice)
    same(plain, doubled, *PAID)
    more = doubled[0].record.bytes_wasted - plain[0].record.bytes_wasted
    assert more == 120 * len(plain[0].record.chosen)
    assert [c.outcome for c in doubled[0].clients].count("duplicate") == len(plain[0].record.chosen)


@pytest.mark.row(
    7, "late reply of round t in t + 1", "refused, booked as waste; the proper reply counts"
)
@each_recipe
def test_late_replies(name):
    def stale(tasks):
        return [
            Reply(
                t.client, t.t - 1, Payload({"u": torch.ones(D)}), 5, spent=ClientCost(bytes_up=120)
            )
            for t in tasks
        ]

    plain = run(name)
    for order in (0, 1, 2):  # before and after the proper reply of the same client
        late = run(name, extra=stale, shuffle=order)
        same(plain, late, *PAID)
        assert late[1].record.bytes_wasted - plain[1].record.bytes_wasted == 120 * len(
            plain[1].record.chosen
        )


@pytest.mark.row(7, "a reply nobody asked for", "refused, booked as waste")
def test_unasked():
    stranger = Reply(
        "stranger", 2, Payload({"u": torch.ones(D)}), 5, spent=ClientCost(bytes_up=120)
    )
    plain, more = run("flrce"), run("flrce", extra=lambda tasks: [stranger])
    same(plain, more, *PAID)
    assert more[0].record.bytes_wasted == 120
    assert "stranger" not in more[-1].state.roster


@pytest.mark.row(6, "straggler past the deadline", "aggregated without it")
def test_stragglers(seen):
    recipe = CATALOGUE["timelyfl"](P=6)
    change, picked = bad(
        lambda reply, task: replace(reply, spent=replace(reply.spent, compute_seconds=1e4))
    )
    fleet = Fleet(change=change)
    done = list(rounds(recipe, fleet, make_initial_state(recipe, fleet, torch.zeros(D)), T, SEED))
    assert "past the deadline" in skipped(done, picked)
    assert done[1].record.seconds < 1e4
    assert done[1].record.bytes_wasted > 0
    seen("SKIP, waste booked, the round ends at the deadline")


@pytest.mark.row(5, "all clients fail", "ABANDONED; after 3 in a row the run ends, resumable")
@each_recipe
def test_all_fail(name):
    from flrce.core.loop import is_stopped
    from flrce.core.unfinished_rounds import MAX_ABANDONED_ROUNDS

    def dead(reply, task):
        return replace(reply, payload=None, error="it died") if task.t >= 2 else reply

    done = run(name, change=dead)
    if not RECIPES[name].minimum:  # a private round commits its noise, whoever was there
        assert {r.record.outcome for r in done} == {"committed"}
        assert torch.isfinite(done[-1].state.w).all()
        return
    assert [r.record.outcome for r in done] == ["committed"] + ["abandoned"] * MAX_ABANDONED_ROUNDS
    assert torch.equal(done[-1].state.w, done[0].state.w)
    assert done[-1].state.t == 1
    assert done[-1].record.stop.startswith("abandoned 3 times in a row: c")
    assert "it died" in done[-1].record.stop
    assert not is_stopped(done[-1].state)
    recipe = replace(RECIPES[name], minimum=1)
    more = list(rounds(recipe, Fleet(), done[-1].state, T, SEED))
    assert [r.record.outcome for r in more] == ["committed"] * (T - 1)


@pytest.mark.row(20, "free-rider (zero update)", "relation 0, not NaN; flagged")
@pytest.mark.parametrize(
    "name", ["flrce", "flrce-no-stop", "divfl", "krum", "trimmed-mean", "fedavg"]
)
def test_free_riders(name):
    zero = Payload({"u": torch.zeros(D)})
    change, picked = bad(lambda reply, task: replace(reply, payload=zero))
    done = run(name, T=2, change=change)  # the maps are written in place: later rounds would show
    assert done[1].record.flagged[picked[0]] == "zero update"
    assert torch.isfinite(done[-1].state.w).all()
    memory = done[1].state.server_state.get("selector")
    if hasattr(memory, "Omega"):
        row = int(picked[0][1:])
        assert not memory.Omega[row].any()
        # of others the row is as old as their last update, which may have met an honest one
        others = [int(client[1:]) for client in done[1].record.replied]
        assert not memory.Omega[others, row].any()
        assert memory.H[row] == 0


@pytest.mark.row(
    10,
    "a bad reply that is rounds old, asynchronous recipes",
    "SKIP when it lands; later ones count",
)
@pytest.mark.parametrize("name", sorted(set(RECIPES) - set(WAITING)))
def test_bad_replies_that_were_under_way(name):
    """The last of the first round's clients to come back: with one reply a round, that round is
    abandoned.

    A client that says it died fills no place: the next one's reply is waited for.
    """
    cases = [
        lambda reply, task: spoil(reply, element(float("nan"))),
        lambda reply, task: buffers(reply, u=torch.zeros(D + 1)),
        lambda reply, task: replace(reply, n=-1),
        lambda reply, task: replace(reply, payload=None, error="it died"),
    ]
    first = run(name, T=1)[0].record
    culprit = max(set(first.chosen) - set(first.replied))
    for case in cases:
        done = run(
            name,
            T=8,
            change=lambda reply, task, c=case: (
                c(reply, task) if (task.client, task.t) == (culprit, 1) else reply
            ),
        )
        landed = [r for r in done if culprit in r.record.rejected]
        assert len(landed) == 1
        assert landed[0].record.t > 1
        assert landed[0].record.bytes_wasted > 0 or "died" in landed[0].record.rejected[culprit]
        alone = RECIPES[name].pace.size == 1 and "died" not in landed[0].record.rejected[culprit]
        assert landed[0].record.outcome == ("abandoned" if alone else "committed")
        assert done[-1].state.t == 8
        assert all(torch.isfinite(r.state.w).all() for r in done)


@pytest.mark.row(
    5,
    "all clients fail, asynchronous recipes",
    "ABANDONED; after 3 in a row the run ends, resumable",
)
@pytest.mark.parametrize("name", sorted(set(RECIPES) - set(WAITING)))
def test_all_under_way_fail(name):
    done = run(name, change=lambda reply, task: replace(reply, payload=None, error="it died"))
    assert [r.record.outcome for r in done] == ["abandoned"] * 3
    assert "it died" in done[-1].record.stop
    more = list(rounds(replace(RECIPES[name], minimum=1), Fleet(), done[-1].state, T, SEED))
    assert [r.record.outcome for r in more] == ["committed"] * T
