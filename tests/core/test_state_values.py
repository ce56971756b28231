"""Values of a state become plain data and tensors, and the same again: bits, types and order."""

import enum
import json
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from flrce.config.experiment import Experiment
from flrce.core.loop import rounds
from flrce.core.state_values import UnsupportedState, decode_value, encode_value, validate_state
from flrce.core.types import Round, RoundRecord, State
from flrce.errors import BadInput
from flrce.methods.catalogue.lora import LORA_RECIPES
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.methods.selection.uniform import UniformSelector
from flrce.simulation.runs import build_simulation
from flrce.storage import snapshot, table_rows
from flrce.storage.checkpoint import Journal
from flrce.storage.table_rows import TableWatch

Point = namedtuple("Point", "x y")


class Pair(NamedTuple):
    first: Any = 1
    second: Any = 2


@dataclass(frozen=True)
class Node:
    value: Any = None
    made: int = field(default=3, init=False)

    @cached_property
    def double(self):
        return 2 * self.made


@dataclass(frozen=True, slots=True)
class Slim:
    value: Any = None


@dataclass
class Checked:
    """Its constructor must not be called to read it back."""

    value: int

    def __post_init__(self):
        if self.value > 3:
            raise ValueError("too large")


@dataclass(frozen=True)
class Tabled:
    table: torch.Tensor = field(metadata={"rows": True})


class Colour(enum.IntEnum):
    RED = 1


def grown_up(value):
    made = Checked(1)
    made.value = value
    return made


def through_a_file(value):
    kept = {}

    def put(x):
        kept[str(len(kept))] = (
            x
            if x.dtype in snapshot.SAFETENSORS_DTYPES
            else x.contiguous().reshape(-1).view(torch.uint8)
        )
        return str(len(kept) - 1)

    node = json.loads(json.dumps(encode_value(value, put)))
    return decode_value(node, lambda name: kept[name].clone())


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        assert torch.equal(*bits)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.strides == b.strides or not a.size
        assert a.tobytes() == b.tobytes()
        assert b.flags.writeable
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert [(type(k), k) for k in a] == [(type(k), k) for k in b]
        for k in a:
            same(a[k], b[k])
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif hasattr(a, "__dataclass_fields__"):
        for f in fields(a):
            same(getattr(a, f.name), getattr(b, f.name))
    else:
        assert repr(a) == repr(b)


VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**62,
    7**900,
    -(7**900),
    0.1,
    -0.0,
    float("nan"),
    float("-inf"),
    5e-324,
    1e308,
    "",
    "text",
    "\ud800 \u2028 \x00",
    b"",
    b"\x00\xff",
    1j,
    complex(-0.0, float("inf")),
    (),
    [],
    {},
    (1,),
    [1],
    ((), [(), {}]),
    {"a": 1.5, "b": 2},
    {1: "a", "1": "b", -3: None},
    {2: 1, 1: 2},
    [{"a": (1, [2])}, {"list": ["tuple", 1]}],
    ["tuple", 1],
    ("dict",),
    {"$value": 1},
    {"$table": 3},
    Node(),
    Node(Node((Node(), Slim([Pair()])))),
    Slim({1: torch.ones(2)}),
    Pair(Pair(), [1]),
    Point(1.0, (2,)),
    torch.tensor(1.5),
    torch.zeros(0),
    torch.zeros(0, 3),
    torch.zeros(3, 0),
    torch.arange(6).reshape(2, 3).t(),
    torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.tensor([float("nan"), -0.0]),
    torch.ones(3, dtype=torch.complex64) * 1j,
    torch.tensor(1j),
    torch.tensor([2**16 - 1], dtype=torch.uint16),
    torch.tensor([True, False]),
    torch.tensor([1.5], dtype=torch.bfloat16),
    torch.ones(4).to(torch.float8_e5m2),
    np.zeros(()),
    np.zeros((0, 2)),
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.array(["a", "bcd"]),
    np.array([b"x"]),
    np.array([1], ">i2"),
    np.array(["2020-01-01"], "M8[D]"),
    np.float64(0.1),
    np.float32(0.1),
    np.bool_(True),
    np.int8(-3),
    np.complex64(1j),
    np.datetime64("2020-01-01"),
    [torch.ones(1), (np.ones(1), {"k": torch.zeros(1)})],
    grown_up(9),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:40])
def test_a_value_comes_back_as_it_was(value):
    same(value, through_a_file(value))


def cyclic():
    found: list = []
    found.append(found)
    return found


def local():
    @dataclass(frozen=True)
    class Local:
        value: int = 1

    return Local()


def stray():
    made = Checked(1)
    made.other = 3
    return made


REFUSED = [
    {1, 2},
    frozenset(),
    deque(),
    defaultdict(int),
    OrderedDict(),
    Colour.RED,
    Path("a"),
    object(),
    len,
    int,
    range(3),
    np.random.default_rng(0),
    torch.Generator(),
    nn.Parameter(torch.ones(1)),
    torch.ones(1, requires_grad=True),
    torch.ones(2).to_sparse(),
    np.array([object()]),
    np.array([(1, 2)], "i4,i4"),
    np.ma.array([1]),
    {(1, 2): 3},
    {None: 1},
    {True: 1},
    {1.5: 1},
    cyclic(),
    local(),
    stray(),
    bytearray(b"a"),
    np.str_("a"),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: f"{type(value).__name__}")
def test_what_could_not_come_back_is_refused_wherever_it_is(value):
    for state in (
        Node(value),
        Node([{"deep": (value,)}]),
        Slim(Node(value)),
        {"a": value},
        [value],
        Pair(value),
    ):
        with pytest.raises(UnsupportedState):
            encode_value(state, None)
        with pytest.raises(
            BadInput,
            match=r"selector UniformSelector cannot be resumed: its state.*; a state may hold None",
        ):
            validate_state("selector", UniformSelector(), state, 3)


def test_the_line_names_the_piece_the_place_and_the_value():
    with pytest.raises(
        BadInput,
        match=r"selector UniformSelector cannot be resumed: its state\.value\[0\]\['a'\] is a set;",
    ):
        validate_state("selector", UniformSelector(), Node([{"a": {1}}]), 3)
    with pytest.raises(BadInput, match=r"state\.table is a table of shape \(2,\) for 3 clients"):
        validate_state("selector", UniformSelector(), Tabled(torch.ones(2)), 3)
    validate_state("selector", UniformSelector(), Tabled(torch.ones(3)), 3)


def test_no_code_is_loaded_or_called_to_read_a_value():
    for name in (
        "os:system",
        "subprocess:Popen",
        "nowhere:Class",
        "test_state_values:grown_up",
        "builtins:tuple",
        3,
    ):
        for kind in ("dataclass", "namedtuple"):
            with pytest.raises(BadInput, match="no longer there"):
                decode_value([kind, name], lambda key: torch.ones(1))
    with pytest.raises(BadInput, match="other fields now"):
        decode_value(["dataclass", f"{__name__}:Slim", ["other", 1]], lambda key: torch.ones(1))
    with pytest.raises(ValueError, match="no kind of value"):
        decode_value(["eval", "1"], lambda key: torch.ones(1))


@pytest.mark.parametrize("large", [2**28, 1], ids=["copies", "digests"])
def test_rows_that_changed_are_found(monkeypatch, large):
    monkeypatch.setattr(table_rows, "MAX_COPIED_BYTES", large)
    watch, table = TableWatch(), torch.zeros(5, 3)
    assert watch.find_changed_rows("t", table) == (0, 1, 2, 3, 4)
    watch.remember_tables({"t": table})
    assert watch.find_changed_rows("t", table) == ()
    table[1, 2] = -0.0  # in place, and equal but for its bits
    table[3] = float("nan")
    assert watch.find_changed_rows("t", table) == (1, 3)
    watch.remember_tables({"t": table})
    assert watch.find_changed_rows("t", table) == ()
    assert watch.find_changed_rows("t", torch.cat([table, torch.ones(2, 3)])) == (5, 6)
    assert watch.find_changed_rows("t", table[:2]) == ()
    assert watch.find_changed_rows("t", table.double()) == (0, 1, 2, 3, 4)
    assert watch.find_changed_rows("t", table[:, :2]) == (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Wide:
    a: Any = field(metadata={"rows": True})
    b: Any = field(metadata={"rows": True})
    c: Any = None


def test_tables_may_change_type_and_length_and_come_and_go(tmp_path):
    """Of every commit the restored state is the saved one, also of one whose journal was itself
    restored.
    """
    begin = State(0, torch.zeros(2), {"stop": Wide(torch.arange(4.0), None)}, tuple("abcd"))
    steps = [
        Wide(torch.arange(4.0) + 1, torch.ones(4, 2)), Wide(torch.arange(4), torch.ones(4, 2)),
        Wide(None, torch.ones(4, 2) * 3), Wide(torch.arange(5) * 2, torch.zeros(5, 2)), Wide(torch.zeros(0), [1, 2]),
        Wide(torch.ones(4, 0), torch.ones(4, dtype=torch.complex64)), Wide(torch.zeros(4).half(), torch.eye(4).t()),
        None, Wide(torch.ones(4), torch.ones(4), {"x": 1}), {"no": "dataclass"}, Node(3), Wide(torch.ones(4), 0),
    ]  # fmt: skip
    journal, history = Journal(tmp_path, "same", {}), ()
    for t, memory in enumerate(steps, 1):
        history = (*history, RoundRecord(t))
        state = replace(begin, t=t, server_state={"stop": memory}, history=history)
        journal.save(Round(state, history[-1], (), (t % 4,)), {}, lambda: None)
        again = Journal(tmp_path, "same", {})
        same(memory, again.restore(begin, lambda marks: None).server_state["stop"])
        journal = again if t % 2 else journal


def tables_of(state):
    held = [
        (f"{role}.{f.name}", f, getattr(each, f.name))
        for role, each in state.server_state.items()
        for f in fields(each)
    ]
    return {
        key: value
        for key, f, value in held
        if f.metadata.get("rows") and isinstance(value, torch.Tensor)
    }


PROMISES = [
    name
    for name in CATALOGUE
    if name not in LORA_RECIPES
    and any(
        f.metadata.get("rows")
        for memory in CATALOGUE[name]().initial_state(3, 4, 5).values()
        for f in fields(memory)
    )
]


@pytest.mark.parametrize("name", PROMISES)
def test_pieces_keep_their_promise_that_only_rows_of_the_rounds_clients_change(name):
    built = build_simulation(
        Experiment(clients=9, per_round=3, rounds=3, train={"epochs": 1}, recipe={"name": name})
    )
    watch = TableWatch()
    try:
        for done in rounds(built.recipe, built.engine, built.initial_state(), 3, 0):
            tables = tables_of(done.state)
            for key, table in tables.items():
                rows = set(watch.find_changed_rows(key, table)) if key in watch.kinds else set()
                assert rows <= set(done.changed_rows), key
            watch.remember_tables(tables)
    finally:
        built.engine.close()
