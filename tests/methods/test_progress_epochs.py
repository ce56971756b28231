"""Local epochs that follow the headway of the rounds."""

import json
from dataclasses import replace

import pytest

from flrce.config.experiment import Experiment
from flrce.core.types import RoundRecord
from flrce.errors import BadInput
from flrce.methods.catalogue.standard import fedavg, scaffold
from flrce.methods.client.progress_epochs import ProgressEpochs
from flrce.methods.server.averages import EMA
from training import assert_resumes, require_valid_fields


def follow(trainer, planned, headways):
    """Epochs of the rounds after each of these."""
    history, counts = [], []
    for t, headway in enumerate(headways, 1):
        history.append(RoundRecord(t, headway=headway))
        counts.append(trainer.count_epochs(planned, history))
    return counts


def test_epochs_by_hand():
    trainer = ProgressEpochs(2, 8, gain=0.5)
    # 4, 4 * 1.5 = 6, 6 * 1.25 = 7.5, 7.5 * 1.5 = 11.25: 8, 8 * 0.5 = 4, 4 * 0.5 = 2, 1: 2
    assert follow(trainer, 4, [None, 1.0, 0.5, 1.0, -1.0, -1.0, -1.0]) == [4, 6, 8, 8, 4, 2, 2]
    assert trainer.count_epochs(1, []) == 2
    assert trainer.count_epochs(20, []) == 8


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: ProgressEpochs(5, 4), "least"),
        (lambda: ProgressEpochs(gain=1.0), "gain"),
        (lambda: ProgressEpochs(inner=3), "trainer"),
        (lambda: ProgressEpochs(inner=ProgressEpochs()), "trainer"),
        (lambda: replace(fedavg(), trainer=ProgressEpochs()), "average = 'ema'"),
        (lambda: replace(fedavg(), average=EMA(), sums=True, trainer=ProgressEpochs()), "sums"),
    ],
)
def test_bad_settings_are_refused(make, word):
    with pytest.raises(BadInput, match=word):
        require_valid_fields(make())


def test_the_inner_trainer_is_in_the_recipe():
    inner = scaffold().trainer
    recipe = replace(scaffold(), average=EMA(), trainer=ProgressEpochs(inner=inner))
    assert recipe.chain.links == scaffold().chain.links
    assert type(recipe.initial_state(3, 4, 4)["trainer"]) is type(inner.initial_state(3, 4, 4))
    assert "trainer" not in replace(
        fedavg(), average=EMA(), trainer=ProgressEpochs()
    ).initial_state(3, 4, 4)


@pytest.mark.parametrize("inner", ["alike", "scaffold"])
def test_a_run_books_the_epochs_and_resumes(inner, tmp_path):
    """Batches in the ledger are those of the epochs that the record asks for."""
    trainer = {"piece": "progress", "least": 1, "most": 6, "gain": 0.9, "inner": inner}
    exp = Experiment.from_tables(
        {
            "rounds": 6,
            "clients": 8,
            "per_round": 3,
            "train": {"lr": 0.05, "epochs": 2, "batch": 16},
            "recipe": {"name": "fedavg", "trainer": trainer, "average": "ema"},
            "engine": {"workers": 1},
        }
    )
    assert_resumes(exp, tmp_path, after=4)
    folder = tmp_path / "straight"
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").open()]
    clients = [json.loads(line) for line in (folder / "clients.jsonl").open()]
    history = [RoundRecord(row["t"], headway=row["headway"]) for row in rounds]
    piece, seen = ProgressEpochs(1, 6, 0.9), set()
    for t in range(1, 7):
        epochs = piece.count_epochs(2, history[: t - 1])
        seen.add(epochs)
        for row in clients:
            if row["t"] == t:  # BatchNorm leaves out a last batch of one sample
                batches = row["n"] // 16 + (row["n"] % 16 > 1)
                assert row["batches"] == epochs * batches
    assert len(seen) > 1
