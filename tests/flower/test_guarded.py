"""Flower's own strategies behind our gate: same result on good clients, no harm from bad ones, stop
and resume.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower

from flower_helpers import plain_app, start
from flrce.errors import BadInput, UnfinishedRun
from flrce.flower import Guarded, introduce
from flrce.flower.grid import LocalGrid
from flrce.flower.guarded import restore_strategy, serialize_strategy
from flrce.methods.stopping.budget import Patience
from flrce.methods.stopping.conflict import UpdateConflicts

ALL = {"min_available_nodes": 5, "min_train_nodes": 5}
STRATEGIES = {
    "fedavg": lambda: flower.FedAvg(**ALL),
    "fedavgm": lambda: flower.FedAvgM(**ALL, server_momentum=0.9),
    "fedadam": lambda: flower.FedAdam(**ALL),
    "fedyogi": lambda: flower.FedYogi(**ALL),
    "fedadagrad": lambda: flower.FedAdagrad(**ALL),
    "fedmedian": lambda: flower.FedMedian(**ALL),
    "fedtrimmedavg": lambda: flower.FedTrimmedAvg(**ALL),
    "fedprox": lambda: flower.FedProx(**ALL, proximal_mu=0.1),
    "krum": lambda: flower.Krum(**ALL, num_malicious_nodes=1),
    "multikrum": lambda: flower.MultiKrum(**ALL, num_malicious_nodes=1, num_nodes_to_select=3),
}


def named_app(**options):
    return introduce(plain_app(**options), compresses=False)


def weights(result):
    return {name: array.numpy() for name, array in result.arrays.items()}


def floats():
    """A model without an integer counter: several of Flower's strategies cannot average one."""
    return ArrayRecord(
        {name: array for name, array in start().items() if "num_batches" not in name}
    )


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_good_clients_give_what_the_strategy_gives_alone(name):
    alone = STRATEGIES[name]().start(LocalGrid(named_app(), 5), floats(), num_rounds=3)
    guarded = Guarded(STRATEGIES[name]()).start(LocalGrid(named_app(), 5), floats(), num_rounds=3)
    for key, value in weights(alone).items():
        np.testing.assert_allclose(weights(guarded)[key], value, rtol=2e-5, atol=1e-6)
    for t in (1, 2, 3):
        theirs, ours = alone.evaluate_metrics_clientapp[t], guarded.evaluate_metrics_clientapp[t]
        assert ours["eval_acc"] == pytest.approx(theirs["eval_acc"], rel=1e-4)
        assert guarded.history[t - 1].accuracy == pytest.approx(ours["eval_acc"])


def spoil(content, partition, t):
    """Three of eight misbehave, each in its own way."""
    if partition == 1:
        content["arrays"]["layer.bias"] = Array(np.array([np.nan, 0, 0], np.float32))
    if partition == 2:
        content["arrays"]["layer.weight"] = Array(np.zeros(1, np.float32))
    if partition == 3:
        content["metrics"]["num-examples"] = -59
    if partition == 4:
        content["metrics"]["surprise"] = 1.0  # Flower would raise InconsistentMessageReplies


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "krum"])
def test_bad_clients_are_kept_from_the_strategy(name):
    guarded = Guarded(STRATEGIES[name]()).start(
        LocalGrid(named_app(spoil=spoil), 10), floats(), num_rounds=2
    )
    good = [{"partition-id": i} for i in (0, 5, 6, 7, 8, 9)]
    clean = Guarded(STRATEGIES[name]()).start(LocalGrid(named_app(), good), floats(), num_rounds=2)
    for key, value in weights(clean).items():
        assert np.array_equal(weights(guarded)[key], value)
    reasons = guarded.history[0].rejected
    assert set(reasons) == {"1", "2", "3", "4"}
    assert "not finite" in reasons["1"]
    assert "shape" in reasons["2"]
    assert "num_examples" in reasons["3"]
    assert "metrics unlike" in reasons["4"]


def test_flower_alone_is_harmed_by_the_same_clients():
    """Guards the test above: without the gate one NaN ends in the model."""
    alone = flower.FedAvg(**ALL)
    nan = lambda content, partition, t: partition == 1 and spoil(content, partition, t)  # noqa: E731
    assert np.isnan(
        weights(alone.start(LocalGrid(named_app(spoil=nan), 5), floats(), 1))["layer.bias"]
    ).any()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fedavgm", "fedyogi"])
def test_a_killed_run_goes_on_with_the_strategys_own_state(name, tmp_path):
    def run(folder, kill_at=0):
        def kill(content, partition, t):
            if t == kill_at:
                raise Killed

        strategy = STRATEGIES[name]()
        strategy.fraction_train, strategy.min_train_nodes = 0.5, 2  # so that choices matter
        grid = LocalGrid(named_app(spoil=kill), 8)
        return Guarded(strategy, state=folder, seed=2).start(grid, floats(), num_rounds=6)

    calm = run(tmp_path / "calm")
    with pytest.raises(Killed):
        run(tmp_path / "killed", kill_at=4)
    resumed = run(tmp_path / "killed")
    assert [r.chosen for r in resumed.history] == [r.chosen for r in calm.history]
    assert len({r.chosen for r in calm.history}) > 1
    for key, value in weights(calm).items():
        assert np.array_equal(weights(resumed)[key], value)


def test_state_survives_freezing():
    one, other = flower.FedAdam(eta=0.3), flower.FedAdam(eta=0.1)
    one.m_t, one.v_t = {"a": np.arange(3.0)}, {"a": np.float32([[1, 2]])}
    restore_strategy(other, serialize_strategy(one))
    assert other.eta == 0.3
    assert other.m_t["a"].tolist() == [0, 1, 2]
    assert other.v_t["a"].dtype == np.float32
    assert torch.equal(serialize_strategy(other), serialize_strategy(one))


def test_a_budget_and_a_stop_rule_end_it():
    grid = LocalGrid(named_app(), 5)
    result = Guarded(STRATEGIES["fedavg"](), budget={"rounds": 2}).start(
        grid, floats(), num_rounds=50
    )
    assert result.stopped == "budget of 2 rounds"
    assert grid.sent == 5 + 2 * (5 + 5)

    def apart(content, partition, t):
        content["arrays"]["layer.weight"] = Array(
            np.full((4, 3), (-1.0) ** partition * 9, np.float32)
        )

    strategy = Guarded(STRATEGIES["fedavg"](), stop=UpdateConflicts(2.0))
    result = strategy.start(LocalGrid(named_app(spoil=apart), 5), floats(), num_rounds=50)
    assert result.stopped.startswith(
        "conflicts 2.4 >= psi 2"
    )  # 3 clients against 2: (3 * 2 + 2 * 3) / 5 peers
    assert len(result.history) == 1
    still = Guarded(STRATEGIES["fedavg"](), stop=Patience(2)).start(
        LocalGrid(named_app(spoil=frozen), 5), floats(), num_rounds=50
    )
    assert "no gain" in still.stopped


def frozen(content, partition, t):
    for name, array in floats().items():
        content["arrays"][name] = array


def test_a_strategy_that_wants_more_nodes_than_there_are_does_not_wait_for_ever():
    guarded = Guarded(flower.FedAvg(min_available_nodes=9), wait_for_nodes=0.2)
    with pytest.raises(UnfinishedRun, match="abandoned 3 times in a row"):
        guarded.start(LocalGrid(named_app(), 3), floats(), num_rounds=5)


def test_a_strategy_that_fails_keeps_the_last_model():
    class Broken(flower.FedAvg):
        def aggregate_train(self, server_round, replies):
            if server_round == 2:
                raise ValueError("too few")
            return super().aggregate_train(server_round, replies)

    result = Guarded(Broken(**ALL)).start(LocalGrid(named_app(), 5), floats(), num_rounds=2)
    one = Guarded(flower.FedAvg(**ALL)).start(LocalGrid(named_app(), 5), floats(), num_rounds=1)
    for key, value in weights(one).items():
        assert np.array_equal(weights(result)[key], value)


def test_a_folder_of_another_strategy_is_refused(tmp_path):
    Guarded(STRATEGIES["fedavg"](), state=tmp_path).start(
        LocalGrid(named_app(), 5), floats(), num_rounds=1
    )
    with pytest.raises(BadInput, match="differs"):
        Guarded(STRATEGIES["krum"](), state=tmp_path).start(
            LocalGrid(named_app(), 5), floats(), num_rounds=1
        )
