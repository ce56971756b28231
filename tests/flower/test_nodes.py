"""Who is who on Flower: hellos that fail, hang or lie, names that are taken, and skills that are
claimed.
"""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod

from flower_helpers import plain_app, start
from flrce.errors import UnfinishedRun
from flrce.flower import FLrce, RecipeStrategy, compressing, introduce
from flrce.flower.grid import LocalGrid
from flrce.flower.nodes import HELLO_QUERY, NodeRegistry
from flrce.methods.catalogue import recipes
from flrce.methods.compression.sparsify import TopK

NAMES = {"wait_for_nodes": 5.0, "fraction_evaluate": 0.0}


def named(**options):
    return introduce(plain_app(**options))


def watched(grid, change):
    """The grid, with each client's messages going through `change(message, context, reply)` too."""
    through = grid.app
    grid.app = lambda message, context: change(message, context, through)
    return grid


# --- skills -------------------------------------------------------------------------------------


def test_introduce_claims_no_compression_that_is_not_there():
    """A recipe that compresses, plain clients with a name: they are sent plain tasks and all
    count.
    """
    result = FLrce(compressor=TopK(0.5), **NAMES).start(LocalGrid(named(), 3), start(), 2)
    assert [record.replied for record in result.history] == [("0", "1", "2")] * 2
    assert result.history[0].bytes_up == 3 * 72


@pytest.mark.parametrize("form", ["app", "train"])
def test_the_mod_says_that_it_compresses(form):
    """App-wide it speaks for itself; on `train` alone hellos do not pass it, so the app's author
    says so.
    """
    if form == "app":
        app = introduce(plain_app(mods=[compressing]))
    else:
        app = introduce(plain_app(train_mods=[compressing]), compresses=True)
    result = FLrce(compressor=TopK(0.5), **NAMES).start(LocalGrid(app, 3), start(), 2)
    assert [record.replied for record in result.history] == [("0", "1", "2")] * 2
    assert result.history[0].bytes_up < 3 * 72


def test_a_false_claim_is_refused_with_the_remedy():
    with pytest.raises(UnfinishedRun, match=r"0: malformed: .*add the mod to it: compressing"):
        FLrce(compressor=TopK(0.5), **NAMES).start(
            LocalGrid(introduce(plain_app(), compresses=True), 2), start(), 1
        )


# --- hellos that fail or hang -------------------------------------------------------------------


@pytest.mark.parametrize(
    "mod", [LocalDpMod(1.0, 0.1, 1.0, 1e-5), fixedclipping_mod], ids=["LocalDpMod", "clipping"]
)
def test_app_wide_mods_of_flower_lock_nobody_out(mod):
    """They answer a hello with an error, since it carries no arrays: such clients go by their node
    ids.
    """
    config = {"clipping_norm": 1.0}  # which one of them wants
    result = FLrce(**NAMES).start(LocalGrid(named(mods=[mod]), 3), start(), 2, train_config=config)
    assert {client for record in result.history for client in record.chosen} == {
        "node-1000",
        "node-1001",
        "node-1002",
    }
    assert [len(record.replied) for record in result.history] == [3, 3]


def test_a_node_that_never_answers_is_asked_once_and_costs_no_round():
    release, hellos = threading.Event(), []

    def hang(message, context, through):
        if message.metadata.message_type == HELLO_QUERY:
            hellos.append(context.node_id)
            if context.node_id == 1001:
                release.wait(60)
        return through(message, context)

    grid = watched(LocalGrid(named(), 3, threads=4), hang)
    begun = time.monotonic()
    try:
        result = FLrce(**NAMES).start(grid, start(), 6)
    finally:
        release.set()
    assert time.monotonic() - begun < 15
    assert sorted(hellos) == [1000, 1001, 1002]
    assert all(set(record.chosen) == {"0", "2"} for record in result.history)


def test_a_slow_hello_joins_when_it_has_come():
    release = threading.Event()

    def slow(message, context, through):
        if message.metadata.message_type == HELLO_QUERY and context.node_id == 1001:
            release.wait(60)
        return through(message, context)

    grid = watched(LocalGrid(named(), 3, threads=4), slow)
    nodes = NodeRegistry(grid)
    assert list(nodes.get_connected_clients()) == ["0", "2"]
    release.set()
    nodes.wait_for_clients(3, 10)
    assert list(nodes.get_connected_clients()) == ["0", "1", "2"]


def test_with_nobody_to_answer_the_first_are_waited_for():
    """Every hello takes longer than the grace: as nobody is known yet, they are waited for, up to
    the patience.
    """

    release = threading.Event()

    def slow(message, context, through):
        if message.metadata.message_type == HELLO_QUERY:
            release.wait(2.5)
        return through(message, context)

    def hang(message, context, through):
        if message.metadata.message_type == HELLO_QUERY:
            release.wait(60)
        return through(message, context)

    assert list(NodeRegistry(watched(LocalGrid(named(), 2), slow)).get_connected_clients()) == [
        "0",
        "1",
    ]
    begun = time.monotonic()
    assert not NodeRegistry(
        watched(LocalGrid(named(), 2), hang), patience=0.3
    ).get_connected_clients()
    release.set()
    assert time.monotonic() - begun < 30


def test_only_two_plain_clients_are_asked_what_they_do_not_know():
    """Each would log an error; all nodes of a run have the same app, so that the first answer says
    it of all.
    """
    asked = []

    class Listening(LocalGrid):
        def push_messages(self, messages):
            messages = list(messages)
            asked.extend(
                m.metadata.dst_node_id for m in messages if m.metadata.message_type == HELLO_QUERY
            )
            return super().push_messages(messages)

    grid = Listening(plain_app(), 12)
    nodes = NodeRegistry(grid)
    assert list(nodes.get_connected_clients()) == [f"node-{1000 + i}" for i in range(12)]
    assert asked == [1000, 1001]
    late = grid.add_node({"partition-id": 12})
    assert f"node-{late}" in nodes.get_connected_clients()
    assert len(asked) == 2
    knowing = Listening(introduce(plain_app()), 5)
    asked.clear()
    assert list(NodeRegistry(knowing).get_connected_clients()) == ["0", "1", "2", "3", "4"]
    assert sorted(asked) == list(range(1000, 1005))
    asked.clear()
    assert len(NodeRegistry(Listening(plain_app(), 5), ask="each").get_connected_clients()) == 5
    assert len(asked) == 5


# --- names that are taken -----------------------------------------------------------------------


def test_nobody_takes_a_connected_plain_clients_name(caplog):
    """A newcomer that calls itself node-1001 would replace a plain client and train in its
    place.
    """
    grid = LocalGrid(plain_app(), 3)
    nodes = NodeRegistry(grid, ask="each")
    assert nodes.get_connected_clients()["node-1001"].node == 1001
    grid.app = introduce(plain_app(), who=lambda context: ("node-1001", 10**6))
    thief = grid.add_node({"partition-id": 9})
    found = nodes.get_connected_clients()
    assert found["node-1001"].node == 1001
    assert found[f"node-{thief}"].node == thief
    assert "is another node's" in caplog.text


def test_a_poisoner_under_a_taken_name_does_not_train():
    def poison(content, partition, t):
        if partition == 9:
            content["arrays"]["layer.bias"].data = b""

    calls = []

    def join(message, context, through):
        if message.metadata.message_type == "train":
            calls.append(context.node_id)
            if len(calls) == 1:
                grid.add_node({"partition-id": 9, "client-id": "1"})
        return through(message, context)

    grid = watched(LocalGrid(named(spoil=poison), 3), join)
    result = FLrce(**NAMES).start(grid, start(), 3)
    assert set(calls) == {1000, 1001, 1002}
    assert all(not record.rejected for record in result.history)


def test_a_name_is_its_nodes_while_that_is_connected_and_then_its_heirs(caplog):
    grid = LocalGrid(named(), 2)
    nodes = NodeRegistry(grid, patience=0.5)
    assert nodes.get_connected_clients()["1"].node == 1001
    twin = grid.add_node({"partition-id": 1})
    assert nodes.get_connected_clients()["1"].node == 1001
    assert "give each its own client-id or partition-id" in caplog.text
    grid.drop_node(1001)  # it was a restart: the old node is gone
    assert nodes.get_connected_clients()["1"].node == twin
    other = grid.add_node({"partition-id": 1})
    nodes.get_connected_clients()
    time.sleep(0.6)  # and this one is not
    found = nodes.get_connected_clients()
    assert found["1"].node == twin
    assert found[f"node-{other}"].node == other


def test_a_node_that_flower_calls_unavailable_gives_its_name_to_the_restarted_one():
    grid = LocalGrid(named(), 2)
    nodes = NodeRegistry(grid)
    nodes.get_connected_clients()
    again = grid.add_node({"partition-id": 1})
    assert nodes.get_connected_clients()["1"].node == 1001
    nodes.mark_unavailable(1001)
    assert nodes.get_connected_clients()["1"].node == again


def test_two_nodes_with_one_partition_both_train(monkeypatch):
    """The second is held back for a while, then goes by its node id."""
    monkeypatch.setattr("flrce.flower.engine.NODE_WAIT_SECONDS", 0.2)
    grid = LocalGrid(named(), [{"partition-id": 0}, {"partition-id": 1}, {"partition-id": 1}])
    slow = watched(
        grid, lambda message, context, through: (time.sleep(0.2), through(message, context))[1]
    )
    result = FLrce(**NAMES).start(slow, start(), 5)
    assert {client for record in result.history for client in record.replied} == {
        "0",
        "1",
        "node-1002",
    }


def test_the_ledger_says_which_node_a_client_was():
    result = RecipeStrategy(replace(recipes.fedavg(2)), **NAMES).start(
        LocalGrid(named(), 2), start(), 1
    )
    assert result.history[0].why["nodes"] == {"0": 1000, "1": 1001}
    assert np.isfinite(result.arrays["layer.bias"].numpy()).all()
