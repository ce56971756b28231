"""Row 11, in models with BatchNorm: statistics that no batch can have; and replies to another model
than was sent.
"""

from dataclasses import replace

import pytest
import torch
from harness import DATA, experiment

from flrce.core.gate import validate_replies, validate_reply
from flrce.core.payloads import (
    ReplyContext,
    SentModel,
    fingerprint_model,
    make_encoding_stream,
    validate_variances,
)
from flrce.core.pieces import NoCompression
from flrce.core.types import Payload, Reply, Task
from flrce.methods.catalogue.lora import LORA_RECIPES
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.simulation import runs

LAYOUT = (("a.weight", 3), ("a.running_mean", 2), ("a.running_var", 2))
D = 7
W = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 4.0])


def holdings(task):
    return None, LAYOUT


def task(**more):
    return Task("x", 0, 3, seed=1, **{"compressor": NoCompression(), **more})


def reply(*u, **more):
    return Reply("x", 3, Payload({"u": torch.tensor(u)}), n=4, **more)


def poison_variances(engine):
    """The engine's first client of every round sends variances of -1 wherever it sends any; the
    list of (round, client) where one did.
    """
    train, bad = engine.train, []

    def train_poisoned(pending, *more):
        replies = list(train(pending, *more))
        for i, (job, w) in enumerate((one.task, one.w) for one in pending):
            held, layout = engine.get_task_layout(job)
            spans = torch.split(torch.zeros(sum(n for _, n in layout)), [n for _, n in layout])
            marked = torch.cat(
                [
                    x + name.endswith("running_var")
                    for x, (name, _) in zip(spans, layout, strict=True)
                ]
            )
            if marked.any():
                before = w if held is None else w[held]
                u = marked * (-1 - before)
                payload, _ = job.compressor.encode(u, layout, make_encoding_stream(job), {})
                replies[i] = replace(replies[i], payload=payload)
                bad.append((job.t, job.client))
                break
        return replies

    engine.train = train_poisoned
    return bad


@pytest.mark.row(11, "BatchNorm variances below 0", "SKIP, model finite, every recipe")
@pytest.mark.parametrize(
    "name", [name for name in CATALOGUE if name not in LORA_RECIPES]
)  # those want adapters
def test_negative_variances(name):
    exp = experiment(rounds=3, recipe={"name": name}, clients=12, per_round=7, train={"epochs": 2})
    built = runs.build_simulation(exp, DATA)
    try:
        engine, bad = built.engine, poison_variances(built.engine)
        done = list(built.iterate_rounds(exp))
        # some arrive late: then they did no harm
        reasons = [done[t - 1].record.rejected.get(client, "") for t, client in bad]
        refused = any(reason.startswith("a variance of -1 in ") for reason in reasons)
        # these two keep their statistics at home
        sent = bool(bad) or name not in ("fedbn", "dp-fedavg")
        assert refused == (sent and type(built.recipe.compressor) is NoCompression), (
            reasons
        )  # others are cut at 0
        spans = [s.span for s in engine.runner.layout.slots if s.name.endswith("running_var")]
        assert all(r.state.w[span].min() >= 0 for r in done for span in spans)
        assert all(torch.isfinite(r.state.w).all() for r in done)
        assert all(
            r.record.loss is not None for r in done if r.record.outcome == "committed"
        )  # a NaN would be None
        if name == "fedavg":  # what would become of the model without the gate
            w = done[-1].state.w.clone()
            w[spans[0]] = -1.0
            assert engine.evaluate(w, 1).loss != engine.evaluate(w, 1).loss
    finally:
        built.engine.close()


def test_which_variances_pass():
    """Of 1 and 4: down to 0 is a batch of equal samples; below, what a compressor rounded comes out
    as 0.
    """
    whole = (None, LAYOUT)
    down = torch.tensor([9.0, 9.0, 9.0, -9.0, 9.0, -1.0, -4.0])  # other tensors may go anywhere
    assert validate_variances(down, W, *whole, exact=True) == ("", down)
    below = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -1.05, 1.0])
    why, u = validate_variances(below, W, *whole, exact=False)
    assert why == ""
    assert (W + u)[5:].tolist() == [0.0, 5.0]
    assert below[5] != u[5]  # a reply is not written to
    assert validate_variances(below, W, *whole, exact=True) == (
        "a variance of -0.05 in 'a.running_var'",
        None,
    )


def test_variances_of_a_part():
    """A client that holds coordinates 2 and 6: its one variance is W's last."""
    part = torch.tensor([2, 6]), (("a.weight", 1), ("a.running_var", 1))
    assert validate_variances(torch.tensor([0.0, -3.5]), W, *part, exact=True)[0] == ""
    assert (
        validate_variances(torch.tensor([0.0, -4.5]), W, *part, exact=True)[0]
        == "a variance of -0.5 in 'a.running_var'"
    )


@pytest.mark.row(7, "a reply to another model than was sent", "refused where the reply says so")
def test_another_model():
    zero, base = [0.0] * D, SentModel(W)
    assert len(fingerprint_model(W)) == 32
    assert validate_reply(task(), reply(*zero, base=fingerprint_model(W)), holdings, base)[0] == ""
    assert (
        validate_reply(task(), reply(*zero), holdings, base)[0] == ""
    )  # most engines match replies to messages themselves
    other = fingerprint_model(W + 1)
    assert (
        validate_reply(task(), reply(*zero, base=other), holdings, base)[0]
        == f"trained from another model: {other!r}"
    )
    for odd in (None, 5, b"", ["x"], torch.zeros(2)):
        assert validate_reply(task(), reply(*zero, base=odd), holdings, base)[0].startswith(
            "trained from another model"
        )
    updates, rejected = validate_replies(
        [task()], [reply(*zero, base=other)], ReplyContext(holdings, D, 3, None, W)
    )
    assert len(updates) == 0
    assert rejected["x"].startswith("trained from another model")


def test_the_model_is_hashed_once(monkeypatch):
    import flrce.core.payloads

    count = []
    monkeypatch.setattr(
        flrce.core.payloads, "fingerprint_model", lambda w: count.append(1) or "same"
    )
    tasks = [replace(task(), client=f"c{k}", k=k) for k in range(5)]
    sent = [replace(reply(*[0.0] * D, base="same"), client=f"c{k}") for k in range(5)]
    assert len(validate_replies(tasks, sent, ReplyContext(holdings, D, 3, None, W))[0]) == 5
    assert len(count) == 1
    validate_replies(
        tasks, [replace(r, base="") for r in sent], ReplyContext(holdings, D, 3, None, W)
    )
    assert len(count) == 1  # nobody asked for it
