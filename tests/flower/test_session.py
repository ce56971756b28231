"""What a Flower server keeps and lets go of: commits, residues, memory, late replies."""

import logging
import shutil
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.serverapp.strategy import FedAvg

from flower_helpers import plain_app, start
from flrce.core.gate import match_replies, validate_replies
from flrce.core.payloads import ReplyContext
from flrce.core.pieces import NoCompression
from flrce.core.types import Payload, Reply, Task
from flrce.errors import BadInput
from flrce.flower import FLrce, Guarded, RecipeStrategy, compressing, introduce, session
from flrce.flower.engine import OneTimeBuffers
from flrce.flower.grid import LocalGrid
from flrce.methods.catalogue import recipes
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.sparsify import TopK
from flrce.storage import failpoint

NAMES = {"wait_for_nodes": 5.0}


def recipe(P, **changes):
    return replace(recipes.fedavg(P), **changes)


def bits(result):
    return {name: array.data for name, array in result.arrays.items()}


def named_app(**options):
    return introduce(plain_app(**options), compresses=False)


def test_a_round_is_committed_before_the_next_one_is_sent(tmp_path):
    seen = []

    def look(content, partition, t):
        seen.append((t, len(list((tmp_path / "checkpoint").glob("manifest.*")))))

    strategy = RecipeStrategy(recipe(2), state=tmp_path, fraction_evaluate=0.0, **NAMES)
    strategy.start(LocalGrid(named_app(spoil=look), 2), start(), 2)
    assert sorted(seen) == [(1, 0), (1, 0), (2, 1), (2, 1)]


class DiskAtLog(logging.Handler):
    """Copies the state folder when a line with `word` is logged: what a SIGKILL at that moment
    would leave.
    """

    def __init__(self, folder, word):
        super().__init__()
        self.folder, self.word, self.copies = folder, word, []

    def emit(self, record):
        if self.word in record.getMessage():
            copy = self.folder.with_name(f"{self.folder.name}-{len(self.copies) + 1}")
            shutil.copytree(self.folder, copy)
            self.copies.append(copy)


@pytest.mark.parametrize("name", ["flrce", "recipe", "guarded", "subclass"])
def test_what_is_logged_as_committed_survives_a_kill(name, tmp_path, caplog):
    """The server is killed as soon as the line is out; it would wait for nodes next."""
    caplog.set_level(logging.INFO, "flwr")

    class Subclass(FLrce):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, replies)

    def strategy(folder):
        made = {
            "flrce": FLrce,
            "recipe": lambda **more: RecipeStrategy(recipe(2), **more),
            "guarded": lambda **more: Guarded(FedAvg(), **more),
            "subclass": Subclass,
        }
        return made[name](state=folder, wait_for_nodes=0.3)

    committed = DiskAtLog(tmp_path / "a", " committed")
    logging.getLogger("flwr").addHandler(committed)
    try:
        strategy(tmp_path / "a").start(LocalGrid(named_app(), 2), start(), 2)
    finally:
        logging.getLogger("flwr").removeHandler(committed)
    assert len(committed.copies) == 2
    for t, copy in enumerate(committed.copies, 1):
        trained = []
        resumed = strategy(copy).start(LocalGrid(named_app(calls=trained), 2), start(), t)
        assert not trained  # nothing was left to do
        assert [record.t for record in resumed.history] == list(range(1, t + 1))
        assert len((copy / "rounds.jsonl").read_text().splitlines()) == t


def test_residues_outlive_a_server_that_dies_between_two_rounds(tmp_path, monkeypatch):
    """The commit of round 2 fails: it is done again. Residues are the clients', in Flower's run:
    they are there as long as it is, and start from zero in another.
    """

    def run(folder, grid):
        sparse = recipe(3, compressor=ErrorFeedback(TopK(0.3)))
        strategy = RecipeStrategy(sparse, state=tmp_path / folder, seed=5, **NAMES)
        return strategy.start(grid, start(), 5)

    def grid():
        return LocalGrid(introduce(plain_app(mods=[compressing])), 4)

    def fails(folder, grid):
        monkeypatch.setenv("FLRCE_FAILPOINT", "commit.ready:2:ENOSPC")
        failpoint.call_counts.clear()
        with pytest.raises(BadInput, match="No space left"):
            run(folder, grid)
        monkeypatch.delenv("FLRCE_FAILPOINT")
        return grid

    calm = run("calm", grid())
    resumed = run("same", fails("same", grid()))
    assert [r.chosen for r in resumed.history] == [r.chosen for r in calm.history]
    assert bits(resumed) == bits(calm)
    fails("other", grid())
    assert bits(run("other", grid())) != bits(calm)


def test_a_resumed_run_tells_what_its_nodes_may_have_forgotten(tmp_path, monkeypatch):
    """Clients' own models lie in Flower's run, which has ended."""
    said = []
    monkeypatch.setattr(session.log, "warning", lambda text, *more: said.append(text % more))

    def run(name, recipe, rounds):
        RecipeStrategy(recipe, state=tmp_path / name, fraction_evaluate=0.0, **NAMES).start(
            LocalGrid(named_app(), 2), start(), rounds
        )

    for name, sort in (
        ("plain", recipe(2)),
        ("sparse", recipe(2, compressor=ErrorFeedback(TopK(0.3)))),
    ):
        run(name, sort, 1)
        assert not said
        run(name, sort, 2)
    (line,) = (line for line in said if "from round to round" in line)
    assert (
        "(ErrorFeedback) lies with Flower's nodes: those that have been started anew begin"
        " without it" in line
    )
    found = {
        name: session.list_client_state(recipes.CATALOGUE[name](P=2))
        for name in ("ditto", "fedper", "fedlecc")
    }
    assert found == {"ditto": ["DittoModel"], "fedper": ["head"], "fedlecc": []}


def test_a_reply_is_let_go_of_as_it_is_stacked():
    """Of P large models and their stack, at most P + 1 are in memory at any time."""
    arrays = [np.full(5, i, np.float32) for i in range(4)]
    alive = [weakref.ref(x) for x in arrays]  # a tensor keeps the array that it was made of
    replies = [
        Reply(str(i), 1, Payload(OneTimeBuffers({"u": torch.from_numpy(x)})), n=1)
        for i, x in enumerate(arrays)
    ]
    del arrays
    seen = []

    def holdings(task):
        seen.append(sum(x() is not None for x in alive))
        return None, (("a", 5),)

    updates, rejected = validate_replies(
        [Task(str(i), i, 1, 0, compressor=NoCompression()) for i in range(4)],
        replies,
        ReplyContext(holdings, 5, 5),
    )
    assert not rejected
    assert updates.U.tolist() == [[i] * 5 for i in range(4)]
    assert seen[-4:] == [4, 3, 2, 1]
    assert not any(x() is not None for x in alive)


def test_a_late_reply_of_a_client_that_is_not_asked_again_is_late_all_the_same():
    first, strays = match_replies([Task("a", 0, 3, 0)], [Reply("b", 2, error="late")])
    assert not first
    assert [why for _, why in strays] == ["late: reply to round 2"]
