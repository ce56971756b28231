"""A buffered pace on Flower: tasks go out as messages, replies count as they come, and the slow are
not asked again.
"""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flower_helpers import TARGET, plain_app, start
from flrce.errors import BadInput
from flrce.flower import LocalGrid, RecipeStrategy
from flrce.flower.engine import DISCONNECTED_ERROR
from flrce.flower.options import ServerContext
from flrce.methods.catalogue import recipes

NAMES = {"wait_for_nodes": 5.0, "ask_names": False}
SLOW = 3  # the partition that takes its time


class Hold:
    """Client 3 answers its first task only when it is let go; the others at once. Notes who was
    asked when.
    """

    def __init__(self) -> None:
        self.free, self.calls = threading.Event(), []

    def __call__(self, content, partition, t):
        if partition == SLOW and t == 1:
            self.free.wait(20)

    def grid(self, nodes=4):
        return LocalGrid(plain_app(self, self.calls), nodes, threads=nodes)

    def when(self, t):
        """Let it go once round t is done."""
        return lambda done: self.free.set() if done.record.t >= t else None


def fedbuff(**changes):
    return replace(recipes.fedbuff(size=2, P=4), **changes)


def strategy(recipe, watch=None, **settings):
    made = RecipeStrategy(recipe, **{**NAMES, "fraction_evaluate": 0.0, **settings})
    made.set_server_context(ServerContext(watch=watch))
    return made


def bits(result):
    return {name: array.data for name, array in result.arrays.items()}


def test_the_slow_are_not_asked_again_and_count_when_they_come(tmp_path):
    """Client 3 is sent its model in round 1 and answers after round 3: its reply is as many rounds
    old as it took.
    """
    hold = Hold()
    made = strategy(fedbuff(), hold.when(3), state=tmp_path, min_available_nodes=4)
    result = made.start(hold.grid(), start(), 9)
    history = result.history
    assert [record.outcome for record in history] == ["committed"] * 9
    assert all(len(record.replied) == 2 for record in history)
    landed = next(record for record in history if "node-1003" in record.replied)
    assert landed.t >= 4
    assert landed.ages["node-1003"] == landed.t - 1
    asked = [record.t for record in history if "node-1003" in record.chosen]
    assert asked[0] == 1
    assert all(t > landed.t for t in asked[1:])  # busy until then
    lines = [json.loads(line) for line in (tmp_path / "clients.jsonl").read_text().splitlines()]
    assert [
        line["age"] for line in lines if line["client"] == "node-1003" and line["t"] == landed.t
    ] == [landed.t - 1]
    kept = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert kept[landed.t - 1]["ages"] == dict(landed.ages)
    for record in history:  # each round's lines add up to it
        mine = [line for line in lines if line["t"] == record.t]
        assert sum(line["bytes_up"] for line in mine) == record.bytes_up
        assert sum(line["bytes_down"] for line in mine) == record.bytes_down
    weights = result.arrays["layer.weight"].numpy()
    assert np.abs(weights - TARGET).mean() < 0.5 * np.abs(TARGET).mean()


def test_a_reply_counts_by_its_age():
    """Worked by hand: one client a round, w + u / sqrt(1 + age); its update is of the model that it
    was sent.
    """
    hold = Hold()
    alone = strategy(recipes.fedbuff(size=1, P=2), hold.when(3), min_available_nodes=2)
    app = plain_app(
        lambda content, partition, t: hold(content, SLOW if partition else 0, t), hold.calls
    )
    result = alone.start(LocalGrid(app, 2, threads=2), start(), 5)
    bias, way = 0.0, 0.1  # each client adds 0.1 to the bias it was sent
    for record in result.history:
        (client,) = record.replied
        bias += way / np.sqrt(1 + record.ages.get(client, 0))
    assert max(max(record.ages.values(), default=0) for record in result.history) >= 3
    np.testing.assert_allclose(result.arrays["layer.bias"].numpy(), bias, rtol=1e-6)


def test_a_client_that_never_answers_is_given_up_and_free_again():
    """No reply within the timeout closes its task: it is booked, and the client may be asked
    again.
    """
    hold = Hold()
    everyone = replace(recipes.fedbuff(size=4, P=4), minimum=1)
    result = strategy(everyone, min_available_nodes=4).start(hold.grid(), start(), 3, timeout=1.5)
    hold.free.set()
    first = result.history[0]
    assert len(first.replied) == 3
    assert first.rejected == {"node-1003": "no reply within 1.5 s"}
    assert first.bytes_wasted == first.bytes_down // 4
    assert "node-1003" in result.history[1].chosen
    assert 1.5 <= first.seconds < 20  # the client is held for 20


def test_a_node_that_goes_away_closes_its_task():
    hold = Hold()
    grid = hold.grid()
    everyone = replace(recipes.fedbuff(size=3, P=4), minimum=1)

    def watch(done):
        if done.record.t == 1:
            grid.drop_node(1000)

    result = strategy(everyone, watch, min_available_nodes=1).start(grid, start(), 4, timeout=2)
    hold.free.set()
    assert [record.outcome for record in result.history] == ["committed"] * 4
    assert all("node-1000" not in record.chosen for record in result.history[1:])


class Killed(Exception):
    pass


def killed(hold, folder, t):
    def watch(done):
        if done.record.t == t:
            raise Killed

    with pytest.raises(Killed):
        strategy(fedbuff(), watch, state=folder, min_available_nodes=4).start(
            hold.grid(), start(), 8
        )
    hold.free.set()


def test_a_killed_server_sends_what_was_under_way_again(tmp_path):
    hold = Hold()
    killed(hold, tmp_path, 3)
    before = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert len(before) == 3
    again = Hold()
    again.free.set()
    result = strategy(fedbuff(), state=tmp_path, min_available_nodes=4).start(
        again.grid(), start(), 8
    )
    assert (tmp_path / "rounds.jsonl").read_text().splitlines()[:3] == before
    assert [record.t for record in result.history] == list(range(1, 9))
    assert (1, SLOW) in again.calls  # from the model of round 1
    landed = next(record for record in result.history if "node-1003" in record.replied)
    assert landed.ages["node-1003"] == landed.t - 1 >= 3


def test_what_was_under_way_with_a_client_that_is_gone_is_dropped(tmp_path):
    hold = Hold()
    killed(hold, tmp_path, 3)
    again = Hold()
    again.free.set()
    result = strategy(fedbuff(), state=tmp_path, min_available_nodes=3).start(
        again.grid(3), start(), 8
    )
    told = [record.rejected.get("node-1003") for record in result.history]
    assert told.count(DISCONNECTED_ERROR) == 1
    assert all(record.outcome == "committed" for record in result.history)


def test_who_trains_is_not_asked_to_judge():
    """An evaluation must not wait for a straggler, or the round would not be over with the first
    replies.
    """
    judged, hold = [], Hold()
    app = plain_app(
        hold, hold.calls, misjudge=lambda metrics: judged.append(metrics["num-examples"]) or metrics
    )
    grid = LocalGrid(app, 4, threads=4)
    made = strategy(fedbuff(), hold.when(3), min_available_nodes=4, fraction_evaluate=1.0)
    result = made.start(grid, start(), 3, timeout=10)
    assert 10 + SLOW not in judged  # its number of samples
    assert all(record.accuracy is not None for record in result.history)


def test_two_halves_of_a_round_cannot_leave_tasks_under_way():
    class Own(RecipeStrategy):
        def configure_train(self, server_round, arrays, config, grid):
            return super().configure_train(server_round, arrays, config, grid)

    with pytest.raises(BadInput, match="leaves tasks under way"):
        Own(fedbuff(), **NAMES).start(LocalGrid(plain_app(), 4), start(), 2)
