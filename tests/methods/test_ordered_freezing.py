"""FedOLF: slower devices freeze more of the first blocks."""

import json

import pytest
import torch

from flrce.config.experiment import Experiment
from flrce.core.roles import RoundView
from flrce.core.types import ClientCost, RoundEvent, Task, Updates
from flrce.errors import BadInput
from flrce.methods.client.ordered_freezing import DeviceSpeedState, OrderedFreezing
from flrce.simulation import runs
from training import assert_resumes


def frozen_blocks(trainer, speeds, known=(), blocks=4):
    """First trained block of tasks whose devices have these FLOP/s; 0: not known."""

    def estimate(task):
        speed = speeds[task.k]
        return ClientCost(flops=6.0 * speed, compute_seconds=6.0 if speed else 0.0)

    state = DeviceSpeedState(torch.tensor(known or [0.0] * len(speeds), dtype=torch.float64))
    view = RoundView(1, 9, (), torch.ones(9), estimate, None, None, blocks=blocks)
    tasks = [Task(str(k), k, 1, 0) for k in range(len(speeds))]
    return [task.part.first for task in trainer.assign(tasks, state, view)]


def test_groups_by_speed():
    trainer = OrderedFreezing((0, 1, 3))
    assert frozen_blocks(trainer, [9.0, 1.0, 5.0]) == [0, 3, 1]
    assert frozen_blocks(trainer, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == [0, 0, 1, 1, 3, 3]
    assert frozen_blocks(trainer, [7.0, 7.0, 7.0]) == [0, 0, 0]  # alike: all are the fastest
    assert frozen_blocks(trainer, [9.0, 0.0, 1.0]) == [0, 0, 1]  # the second is not known


def test_groups_are_those_of_the_fleet():
    """Two slow devices alone in a round are still the slow ones of all that have trained."""
    trainer = OrderedFreezing((0, 1))
    assert frozen_blocks(trainer, [2.0, 1.0], known=[2.0, 1.0, 8.0, 9.0]) == [1, 1]
    assert frozen_blocks(trainer, [9.0, 1.0], known=[2.0, 1.0, 8.0, 0.0]) == [0, 1]


def test_the_last_block_trains():
    assert frozen_blocks(OrderedFreezing((0, 9)), [2.0, 1.0], blocks=3) == [0, 2]
    assert frozen_blocks(OrderedFreezing((0, 9)), [2.0, 1.0], blocks=1) == [0, 0]  # no chain


def test_speeds_are_remembered():
    updates = Updates(
        k=torch.tensor([2, 0]),
        U=torch.zeros(2, 1),
        n=torch.ones(2),
        trainable=1,
        spent=(ClientCost(flops=8.0, compute_seconds=2.0), ClientCost()),
    )
    trainer = OrderedFreezing()
    state = trainer.observe(
        DeviceSpeedState(torch.tensor([7.0, 0.0, 0.0])),
        RoundEvent(1, torch.zeros(1), torch.zeros(1), updates, 3),
    )
    assert state.speed.tolist() == [7.0, 0.0, 4.0]


@pytest.mark.parametrize("frozen", [(), (-1,), (0.5,), (True,)])
def test_bad_settings_are_refused(frozen):
    with pytest.raises(BadInput, match="frozen"):
        OrderedFreezing(frozen)


def experiment(name="fedolf", per_round=6, **recipe):
    return Experiment.from_tables(
        {
            "rounds": 3,
            "clients": 6,
            "per_round": per_round,
            "train": {"lr": 0.05, "epochs": 1, "batch": 16},
            "recipe": {"name": name, **recipe},
            "engine": {"workers": 1},
        }
    )


def read_clients(folder):
    rows = [json.loads(line) for line in (folder / "clients.jsonl").open()]
    return {(row["t"], row["client"]): row for row in rows}


def test_frozen_blocks_cost_nothing(tmp_path):
    """Bytes by hand. The digits' CNN has 96 + 16 floats before its second convolution (72 + 8, a
    BatchNorm of 8 + 8 and its 16 statistics) and 1,994 in all. Frozen statistics stay, too.
    """
    runs.run(experiment(frozen=[0, 1]), tmp_path / "olf")
    runs.run(experiment("fedavg"), tmp_path / "avg")
    olf, avg = read_clients(tmp_path / "olf"), read_clients(tmp_path / "avg")
    whole, part = 4 * 1994, 4 * (1994 - 96 - 16)
    assert {row["bytes_up"] for row in avg.values()} == {whole}
    assert {row["bytes_up"] for row in olf.values()} == {whole, part}
    for key, row in olf.items():
        plain = avg[key]
        assert row["bytes_down"] == plain["bytes_down"]
        if row["bytes_up"] == whole:
            assert row["joules"] == plain["joules"]
        else:
            assert row["flops"] < plain["flops"]
            assert row["joules"] < plain["joules"]
    speeds = {key: row["flops"] / row["compute_seconds"] for key, row in avg.items()}
    slowest = min(speed for key, speed in speeds.items() if olf[key]["bytes_up"] == whole)
    assert all(speeds[key] < slowest for key, row in olf.items() if row["bytes_up"] == part)


def test_a_run_resumes(tmp_path):
    assert_resumes(experiment(per_round=2), tmp_path)
