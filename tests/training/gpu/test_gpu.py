"""A deck on a GPU against the same deck on the CPU; skipped where there is none.

FLRCE_TEST_DEVICE=cpu runs all but the shortage of memory without one, to see that the tests
themselves are sound.
"""

import copy
import gc
import os

import pytest
import torch

import flrce
from flrce.config.experiment import Experiment
from flrce.core import tensor_bytes
from flrce.models.flat import pack_model
from flrce.simulation import runs

DEVICE = os.environ.get("FLRCE_TEST_DEVICE", "cuda" if torch.cuda.is_available() else "")
pytestmark = pytest.mark.skipif(not DEVICE, reason="needs a CUDA device")
BASE = {"rounds": 3, "clients": 12, "per_round": 6, "model": {"name": "own_nets:Smooth"}}
TRAIN = {
    "batch": 4096,
    "epochs": 2,
    "lr": 0.05,
}  # whole batches on a smooth network: rounding stays small


def made(train=None, **more):
    return Experiment.from_tables(
        BASE | {"train": TRAIN | (train or {}), "recipe": {"name": "fedavg"}} | more
    )


def deck(experiments, device=DEVICE):
    return runs.run_in_process([(exp, None) for exp in experiments], device=device)


def weights(result):
    return torch.cat([x.flatten() for x in result.model.values()])


def apart(exp, found, expected):
    """How far two results are, over the way that the second went."""
    start = pack_model(runs.build_simulation(exp).net)[: len(expected)]
    return float((found - expected).norm() / (expected - start).norm())


SETTINGS = {
    **{
        name: {"recipe": {"name": name}}
        for name in ("fedavg", "fedprox", "scaffold", "feddyn", "feddc", "moon")
    },
    **{
        name: {"recipe": {"name": name}}
        for name in ("fednova", "fedsam", "ditto", "apfl", "fedper", "fedcom")
    },
    "momentum": {"train": {"momentum": 0.9}},
    "carried momentum": {"train": {"momentum": 0.9, "carry": True}},
    "clip": {"train": {"clip": 1.0}},
    "cosine": {"train": {"schedule": "cosine"}},
    "kept": {"model": {"name": "own_nets:Smooth", "kept": "norms"}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_recipes_and_links_under_a_recording(name):
    exp = made(**SETTINGS[name])
    one, two, expected = (weights(deck([exp], device)[0]) for device in (DEVICE, DEVICE, "cpu"))
    assert torch.equal(one, two)
    assert apart(exp, one, expected) < 1e-3


def test_a_step_that_cannot_be_recorded_runs_as_it_is():
    exp = made(model={"name": "own_nets:Asking"})
    found, expected = weights(deck([exp])[0]), weights(deck([exp], "cpu")[0])
    assert apart(exp, found, expected) < 1e-3


def test_processes_share_a_gpu():
    """Three processes with a run each: the same bits twice, and what one process gives up to
    rounding.
    """
    few = [(made(seed=s, engine={"workers": 3}), None) for s in range(3)]
    one, two = (runs.run_together(few, device=DEVICE) for _ in range(2))
    alone = deck([exp for exp, _ in few])
    for a, b, c, (exp, _) in zip(one, two, alone, few, strict=True):
        assert torch.equal(weights(a), weights(b))
        assert apart(exp, weights(a), weights(c)) < 1e-3


@pytest.mark.skipif(DEVICE != "cuda", reason="the memory of a GPU")
def test_short_memory_costs_lanes(caplog):
    """Half of what the run takes; its second time, for the first tries every way and takes more."""
    exp = made(
        model={"name": "resnet-18"}, train={"batch": 64, "epochs": 1}
    )  # large beside its process
    deck([exp])
    _emptied()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plain = weights(deck([exp])[0])
    took = torch.cuda.max_memory_allocated() - before
    _emptied()
    share = torch.cuda.memory_allocated() + took // 2
    torch.cuda.set_per_process_memory_fraction(
        share / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        assert apart(exp, weights(deck([exp])[0]), plain) < 0.05
        assert "memory is short" in caplog.text
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_network_that_lies_on_the_gpu():
    """It trains as one on the host does, and stays where it is."""
    net = runs.build_simulation(made()).net.to(DEVICE)
    before = pack_model(net).clone()
    found, expected = (flrce.run(made(), model=each) for each in (net, copy.deepcopy(net).cpu()))
    assert torch.equal(weights(found), weights(expected))
    assert torch.equal(pack_model(net), before)
    assert next(net.parameters()).device.type == DEVICE


def _emptied():
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("recipe", ["fedavg", "flrce", "fedadam", "median", "moon"])
def test_updates_that_stay_on_the_gpu(recipe):
    """The same bits twice, and those of updates that come to the host, as far as order decides
    nothing.
    """
    here, home = (
        made(recipe={"name": recipe}, engine={"updates": where}) for where in ("device", "host")
    )
    one, two, expected = (deck([exp])[0] for exp in (here, here, home))
    assert torch.equal(weights(one), weights(two))
    assert [h.chosen for h in one.history] == [h.chosen for h in expected.history]
    assert apart(here, weights(one), weights(expected)) < 1e-6


def test_what_crosses_to_a_gpu(monkeypatch):
    """In a round one model comes home, with sketches of its updates; an average that is judged goes
    up.
    """
    if DEVICE == "cpu":
        pytest.skip("nothing crosses")

    def crossed(rounds):
        monkeypatch.setattr(tensor_bytes, "transferred_bytes", tensor_bytes.TransferBytes())
        deck(
            [
                made(
                    recipe={"name": "flrce", "preset": "default"},
                    engine={"updates": "device"},
                    rounds=rounds,
                )
            ]
        )
        return tensor_bytes.transferred_bytes

    size = 4 * len(pack_model(runs.build_simulation(made()).net))
    crossed(4)
    few, many = crossed(4), crossed(8)  # what is tried before the first round crosses in both
    small = 4 * (7 * 2048 + 64)
    assert 4 * size <= many.down - few.down <= 4 * (size + small)
    assert many.up - few.up <= 4 * size
