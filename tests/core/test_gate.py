"""The gate: any reply whatsoever never raises, and what passes is finite, whole and in order."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce.core.checked_replies import book_costs, collect_client_states
from flrce.core.gate import MAX_SAMPLES_PER_CLIENT, match_replies, validate_replies, validate_reply
from flrce.core.payloads import (
    MAX_COORDINATE,
    ReplyContext,
    is_plausible_cost,
    make_encoding_stream,
)
from flrce.core.pending import DueTasks
from flrce.core.pieces import NoCompression
from flrce.core.types import ClientCost, Payload, Reply, Task
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.compression.sparsify import RandomK, TopK

LAYOUT = (("a", 5), ("b", 3))
D = 8
COMPRESSORS = [NoCompression(), TopK(0.5), RandomK(0.5), Quantizer(8), Quantizer(3)]


def holdings(task):
    return None, LAYOUT


def task(client="x", k=0, t=3, compressor=None, **more):
    return Task(client, k, t, seed=1, compressor=compressor or NoCompression(), **more)


def honest(job, u=None, **more):
    u = torch.arange(1.0, 9.0) if u is None else u
    payload, _ = job.compressor.encode(u, LAYOUT, make_encoding_stream(job), {})
    return replace(Reply(job.client, job.t, payload, n=4, loss=1.0), **more)


odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64]
)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    tensor = torch.full(
        shape, draw(st.sampled_from([0.0, 1.0, -3.0, 1e38, math.nan, math.inf]))
    ).to(draw(dtypes))
    form = draw(st.sampled_from(["plain", "expanded", "sparse", "meta", "grad"]))
    if form == "expanded" and tensor.numel() and tensor.dim() == 1:
        return tensor[:1].expand(10**11)
    if form == "sparse" and tensor.dim():
        return tensor.to_sparse()
    if form == "grad" and tensor.is_floating_point():
        return tensor.requires_grad_()
    return tensor.to("meta") if form == "meta" else tensor


names = st.one_of(
    st.sampled_from(["u", "values", "index", "bitmap", "levels", "../u", ""]), st.text(max_size=5)
)
payloads = st.one_of(
    st.builds(Payload, st.dictionaries(names, st.one_of(tensors(), odd), max_size=4)),
    st.builds(Payload, odd),
    odd,
)
replies = st.one_of(
    st.builds(
        Reply,
        client=st.one_of(st.sampled_from(["x", "y", "z"]), odd),
        t=st.one_of(st.just(3), odd),
        payload=payloads,
        n=st.one_of(st.just(4), odd),
        loss=odd,
        loss_square=odd,
        client_state=odd,
        spent=st.one_of(
            st.just(ClientCost()), odd, st.builds(ClientCost, joules=odd, bytes_up=odd)
        ),
        error=odd,
    ),
    odd,
)


@given(st.lists(replies, max_size=5), st.sampled_from(COMPRESSORS), st.sampled_from([None, 1]))
def test_any_reply_whatsoever(sent, compressor, keep):
    tasks = [task("x", 4, compressor=compressor), task("y", 2, compressor=compressor), task("z", 0)]
    good = honest(tasks[2])
    updates, rejected = validate_replies(tasks, [*sent, good], ReplyContext(holdings, D, D, keep))
    assert torch.isfinite(updates.U).all()
    assert float(updates.U.abs().max() if len(updates) else 0) <= MAX_COORDINATE
    assert updates.k.tolist() == sorted(updates.k.tolist())
    assert len(updates) + len(rejected) == 3
    assert all(
        isinstance(reason, str) and reason and len(reason) < 400 for reason in rejected.values()
    )
    lines, totals = book_costs(3, DueTasks(tuple(tasks)), [*sent, good], rejected)
    assert all(
        math.isfinite(getattr(totals, key)) and getattr(totals, key) >= 0
        for key in ("joules", "bytes_up", "seconds")
    )
    assert {line.client for line in lines} >= {"x", "y", "z"}
    assert set(collect_client_states(tasks, [*sent, good])) <= {"x", "y", "z"}


@given(st.permutations(range(4)))
def test_order_does_not_matter(order):
    tasks = [task(f"c{i}", 3 - i) for i in range(4)]
    sent = [honest(job, torch.full((D,), float(i))) for i, job in enumerate(tasks)]
    plain, _ = validate_replies(tasks, sent, ReplyContext(holdings, D, D))
    mixed, _ = validate_replies(tasks, [sent[i] for i in order], ReplyContext(holdings, D, D))
    assert torch.equal(plain.U, mixed.U)
    assert plain.k.tolist() == mixed.k.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_what_is_honest_passes(compressor):
    job = task(compressor=compressor)
    why, u = validate_reply(job, honest(job), holdings)
    assert why == ""
    assert u is not None
    assert u.shape == (D,)
    assert u.dtype == torch.float32


def test_a_late_reply_does_not_hide_the_proper_one():
    job = task()
    late = honest(replace(job, t=2))
    updates, rejected = validate_replies([job], [late, honest(job)], ReplyContext(holdings, D, D))
    assert len(updates) == 1
    assert not rejected
    first, strays = match_replies([job], [late, honest(job), honest(job), honest(task("stranger"))])
    assert list(first) == ["x"]
    assert [why for _, why in strays] == [
        "late: reply to round 2 in round 3",
        "duplicate",
        "nobody asked",
    ]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("n", 0, "num_examples '0' is not an integer from 1"),
        ("n", MAX_SAMPLES_PER_CLIENT + 1, "num_examples"),
        ("n", True, "num_examples 'True'"),
        ("loss", math.nan, "malformed: loss nan"),
        ("t", 2, "no reply|late"),
        ("spent", ClientCost(joules=-1.0), "costs must be finite"),
        ("payload", None, "empty reply"),
        ("error", "on fire", "on fire"),
    ],
)
def test_reasons(field, value, reason):
    _, rejected = validate_replies(
        [task()], [replace(honest(task()), **{field: value})], ReplyContext(holdings, D, D)
    )
    assert any(part in rejected["x"] for part in reason.split("|"))


def test_the_deadline():
    slow = replace(honest(task()), spent=ClientCost(compute_seconds=9.0))
    assert validate_reply(task(deadline=10.0), slow, holdings)[1] is not None
    assert (
        validate_reply(task(deadline=8.0), slow, holdings)[0]
        == "late: 9 s, past the deadline of 8 s"
    )


def test_too_large_a_value():
    big = torch.zeros(D)
    big[3] = 2e9
    assert (
        validate_reply(task(), honest(task(), big), holdings)[0]
        == "a value of 2e+09 is beyond 1e+09"
    )


def test_only_the_fastest_count():
    tasks = [task(f"c{i}", i) for i in range(3)]
    sent = [
        replace(honest(job), spent=ClientCost(compute_seconds=s))
        for job, s in zip(tasks, (3, 1, 2), strict=True)
    ]
    updates, rejected = validate_replies(tasks, sent, ReplyContext(holdings, D, D, keep=2))
    assert updates.k.tolist() == [1, 2]
    assert rejected == {"c0": "slower than the replies that were waited for"}


def test_sound():
    assert is_plausible_cost(ClientCost(1, 2, compute_seconds=1.0, joules=3.0, measured=True))
    assert not is_plausible_cost(ClientCost(joules=math.inf))
    assert not is_plausible_cost(ClientCost(bytes_up="9"))
    assert not is_plausible_cost({})


def test_strays_are_booked_as_waste():
    job = task()
    extra = replace(honest(job), spent=ClientCost(bytes_up=7, joules=0.5))
    lines, totals = book_costs(3, DueTasks((job,)), [honest(job), extra], {})
    assert [line.outcome for line in lines] == ["useful", "duplicate"]
    assert totals.bytes_wasted == 7
    assert totals.joules_wasted == 0.5
