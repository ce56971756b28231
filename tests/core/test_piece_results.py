"""Pieces of one's own that return something else than they should: one line names each."""

import sys
from types import SimpleNamespace

import pytest

from flrce import Experiment, run
from flrce.core.roles import ROLE_CLASSES
from flrce.errors import BadInput


def piece(**methods):
    """A class with these methods, each returning what its function makes of the arguments."""
    return type(
        "Own",
        (),
        {name: lambda self, *given, call=call: call(*given) for name, call in methods.items()},
    )


NOTHING = piece(
    assign=lambda *_: None, model=lambda *_: None, encode=lambda *_: None, decode=lambda *_: None
)
ROWS = [
    (
        "average",
        NOTHING,
        r"Own returned NoneType; return the new model, a tensor of shape \(\d+,\)",
    ),
    ("average", piece(model=lambda memory, w: w[:3]), r"Own returned \(3,\); return the new model"),
    (
        "server",
        piece(step=lambda w, target, *_: target),
        r"Own\.step returned a Tensor; return a pair",
    ),
    (
        "server",
        piece(step=lambda w, target, u, m: (w / 0, m)),
        "Own returned a model that is not finite",
    ),
    ("server", piece(step=lambda w, target, u, m: (w[1:], m)), "return the new model"),
    (
        "compressor",
        piece(encode=lambda *_: None, decode=lambda *_: None),
        r"Own\.encode returned a NoneType; return a pair: a Payload, and what stays",
    ),
    ("trainer", NOTHING, r"Own\.assign returned a NoneType; return the list of tasks"),
    ("trainer", piece(assign=lambda tasks, *_: [1]), "returned something else than tasks"),
    ("submodel", NOTHING, r"Own\.assign returned a NoneType; return the list of tasks"),
    (
        "pace",
        piece(cohort_size=lambda P, busy: -1, max_replies=lambda P: None),
        r"Own\.cohort_size returned -1; return how many to ask",
    ),
]


@pytest.mark.parametrize(("role", "made", "line"), ROWS)
def test_what_a_piece_returns_is_looked_at(role, made, line, monkeypatch):
    own = type("Own", (made, ROLE_CLASSES[role]), {})
    monkeypatch.setitem(sys.modules, "owned", SimpleNamespace(Own=own))
    with pytest.raises(BadInput, match=line):
        run(tables(recipe={"name": "fedavg", role: "owned:Own"}))


@pytest.mark.parametrize("factor", [None, float("nan")])
def test_a_schedule_gives_factors(factor, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "owned", SimpleNamespace(Own=piece(__call__=lambda *_: factor))
    )
    with pytest.raises(
        BadInput, match=f"Own gave {factor} for step 0 of round 1; return a factor of lr"
    ):
        run(tables(train={"epochs": 1, "schedule": "owned:Own"}))


def tables(**more):
    usual = {
        "rounds": 1,
        "clients": 4,
        "per_round": 2,
        "recipe": {"name": "fedavg"},
        "engine": {"workers": 1},
    }
    return Experiment(**{**usual, "train": {"epochs": 1}, **more})
