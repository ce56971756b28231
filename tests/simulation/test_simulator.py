"""The embedded engine: same bits whatever the workers, interrupted or not; odd clients; users' own
modules.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import flrce
from flrce.cli.cli import main
from flrce.config.experiment import Experiment
from flrce.core.pieces import NoCompression
from flrce.core.types import LocalWork, PendingTask, Task
from flrce.data.user import from_arrays
from flrce.errors import BadInput
from flrce.models.flat import pack_model
from flrce.models.nets import build_network
from flrce.simulation import runs
from flrce.simulation.workers import start_workers
from flrce.training.batches import Samples, compute_batch_sizes, draw_batches
from flrce.training.client import ClientRunner
from flrce.training.trainer import TorchTrainer
from training import train

SMALL = {
    "rounds": 6,
    "clients": 12,
    "per_round": 4,
    "recipe": {"name": "flrce", "preset": "default", "average": "ema"},
}
SAME = ("rounds.jsonl", "clients.jsonl", "model.safetensors", "relations.safetensors")


def run_with(tmp_path, workers, kernel):
    out = tmp_path / f"workers-{workers}"
    few = {"train": {"epochs": 1}, "engine": {"workers": workers, "kernel": kernel}}
    runs.run(Experiment.from_tables(SMALL | few), out)
    return out


def assert_same(one: Path, two: Path):
    for name in SAME:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.parametrize("kernel", ["torch", "auto"])
def test_one_two_and_four_workers_give_the_same_bits(tmp_path, kernel):
    one, two, four = (run_with(tmp_path, workers, kernel) for workers in (1, 2, 4))
    assert_same(one, two)
    assert_same(one, four)


def test_a_network_without_a_fused_kernel_trains_with_torch_and_one_line_says_why(caplog):
    net = nn.Sequential(nn.LPPool2d(2, 2), nn.Flatten(), nn.Linear(16, 3))
    shop = ClientRunner(
        net, (1, 8, 8), Samples(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))
    )
    crew = start_workers(shop, "auto", 1)
    crew.close()
    assert crew.name == "torch"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("using the PyTorch trainer: ")
    assert "LPPool2d" in line
    with pytest.raises(BadInput, match="LPPool2d"):
        start_workers(shop, "native", 1)


def test_an_objective_that_fast_kernels_never_support_is_no_warning(caplog):
    targets = {"objective": {"name": "multi-label"}, "data": {"name": "digits"}}
    objective = Experiment.from_tables(SMALL | targets).build_objective("labels")
    samples = Samples(torch.zeros(4, 1, 8, 8), torch.zeros(4, 3))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with caplog.at_level("INFO"):
        start_workers(ClientRunner(net, (1, 8, 8), samples, objective=objective), "auto", 1).close()
    (record,) = [each for each in caplog.records if "PyTorch trainer" in each.getMessage()]
    assert record.levelname == "INFO"


def test_a_recipe_without_a_fused_kernel_trains_with_torch_and_one_line_says_why(caplog):
    built = runs.build_simulation(Experiment.from_tables(SMALL | {"recipe": {"name": "fedsam"}}))
    built.engine.close()
    assert built.engine.workers.name == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "using the PyTorch trainer: the update has SharpnessAwareGradient"
    ]


#: what kernels do not know as a whole. Adam on a network without BatchNorm, before which a bias
#: moves by rounding alone
UPDATES = {
    "momentum": {"train": {"momentum": 0.9, "weight_decay": 0.01}},
    "adam": {"train": {"optimizer": "adam", "lr": 0.01, "clip": 1.0}, "model": {"name": "mlp"}},
    "noise": {"train": {"augment": ["noise"]}},
    "scaffold": {"recipe": {"name": "scaffold"}},
    "fedcomgate": {"recipe": {"name": "fedcomgate"}},
    "frozen": {"train": {"momentum": 0.9}, "recipe": {"name": "flrce-freeze"}},
    "narrow": {"train": {"momentum": 0.9}, "recipe": {"name": "dropout"}},
}


@pytest.mark.parametrize("name", UPDATES)
def test_any_update_of_a_gradient_has_its_gradients_from_the_kernel(name, caplog):
    """Close to what torch finds by itself, and no line that says there are no kernels."""
    found, own = {}, UPDATES[name]
    train = {"steps": 3} | own.get("train", {})
    for kernel in ("auto", "torch"):
        exp = Experiment.from_tables(
            SMALL | own | {"rounds": 2, "train": train, "engine": {"workers": 1, "kernel": kernel}}
        )
        built = runs.build_simulation(exp)
        with closing(built.engine):
            *_, last = built.iterate_rounds(exp)
        found[built.engine.workers.name] = last.state.w
    if list(found) == ["torch"]:
        pytest.skip("no C compiler")
    assert list(found) == ["gradients", "torch"]
    torch.testing.assert_close(found["gradients"], found["torch"], rtol=1e-4, atol=1e-5)
    assert not caplog.records


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    """SIGKILL a real process in the middle of a run, resume it, compare with one left alone."""
    command = [
        sys.executable,
        "-m",
        "flrce.cli.cli",
        "run",
        "--set",
        "rounds=12",
        "--set",
        "clients=12",
        "--set",
        "per_round=4",
        "--set",
        "recipe.average=ema",
        "--set",
        "recipe.preset=authors",
        "--out",
    ]
    victim, straight = tmp_path / "victim", tmp_path / "straight"
    process = subprocess.Popen(
        [*command, str(victim)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    ledger, deadline = victim / "rounds.jsonl", time.monotonic() + 60
    while not ledger.exists() or len(ledger.read_bytes().splitlines()) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(ledger.read_bytes().splitlines()) < 12
    assert main([*command[3:], str(victim), "--resume"]) == 0
    assert main([*command[3:], str(straight)]) == 0
    assert_same(victim, straight)


def test_workers_of_a_killed_run_go_away(tmp_path):
    code = """if True:
        import time, flrce
        from flrce.simulation import runs
        built = runs.build_simulation(flrce.Experiment(clients=10, per_round=2, engine={"kernel": "torch"}))
        print(*[worker[0].pid for worker in built.engine.workers.workers], flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.1)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_that_dies_is_replaced_and_its_job_done_again():
    built = runs.build_simulation(
        Experiment.from_tables(SMALL | {"engine": {"workers": 2, "kernel": "torch"}})
    )
    crew = built.engine.workers
    w = pack_model(built.net)
    task = Task("3", 3, 1, 0, compressor=NoCompression(), work=LocalWork(batch=16))
    before = built.engine.train([PendingTask(task, w)], {})[0]
    os.kill(crew.workers[0][0].pid, signal.SIGKILL)
    os.kill(crew.workers[1][0].pid, signal.SIGKILL)
    after = built.engine.train([PendingTask(task, w)], {})[0]
    assert torch.equal(before.payload.buffers["u"], after.payload.buffers["u"])
    built.engine.close()


def test_odd_sizes_train():
    """A last batch of one sample, fewer samples than a batch, no hold-out at all."""
    assert compute_batch_sizes(33, 16, normalised=True).tolist() == [16, 16]
    assert compute_batch_sizes(33, 16, normalised=False).tolist() == [16, 16, 1]
    assert compute_batch_sizes(5, 16, normalised=True).tolist() == [5]
    assert compute_batch_sizes(1, 16, normalised=True).tolist() == []
    rng = np.random.default_rng(0)
    mine = from_arrays(rng.random((60, 1, 8, 8), dtype=np.float32), rng.integers(0, 3, 60))
    exp = Experiment.from_tables(
        SMALL | {"rounds": 2, "train": {"batch": 4}, "data": {"holdout": 0.0, "partition": "iid"}}
    )
    result = runs.run(exp, data=mine)
    assert result.summary["accuracy"] is None
    assert result.summary["rounds"] == 2


def test_batches_are_a_shuffle_per_epoch():
    task = Task("a", 0, 1, 0, work=LocalWork(epochs=3, batch=4))
    order, sizes = draw_batches(task, 10, normalised=True)
    assert sizes.tolist() == [4, 4, 2] * 3
    for epoch in np.split(order, 3):
        assert sorted(epoch.tolist()) == list(range(10))
    again, _ = draw_batches(task, 10, normalised=True)
    assert np.array_equal(order, again)
    steps = draw_batches(Task("a", 0, 1, 0, work=LocalWork(epochs=3, batch=4, steps=5)), 10, True)[
        1
    ]
    assert steps.tolist() == [4, 4, 2, 4, 4]


def test_local_sgd_is_plain_sgd():
    """The bound network against torch.optim.SGD on the same batches."""
    net, x, y = (
        build_network("cnn-digits", (1, 8, 8), 10, 0),
        torch.rand(40, 1, 8, 8),
        torch.randint(10, (40,)),
    )
    order, sizes = draw_batches(Task("a", 0, 1, 0, work=LocalWork(epochs=2, batch=16)), 40, True)
    plain = build_network("cnn-digits", (1, 8, 8), 10, 0).train()
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.1)
    for index in np.split(order, np.cumsum(sizes)[:-1]):
        optimiser.zero_grad()
        nn.functional.cross_entropy(plain(x[index] * 2 - 1), y[index]).backward()
        optimiser.step()
    w, losses, squares = train(
        TorchTrainer(net, (1, 8, 8)), pack_model(net), x, y, 2.0, -1.0, order, sizes, lr=0.1
    )
    assert torch.allclose(w, pack_model(plain), atol=1e-6)
    assert len(losses) == len(sizes)
    assert (squares >= losses.square() - 1e-6).all()


def test_the_proximal_term_pulls_back():
    net, x, y = build_network("mlp", (4,), 3, 0), torch.rand(20, 4), torch.randint(3, (20,))
    w = pack_model(net)
    order, sizes = draw_batches(Task("a", 0, 1, 0, work=LocalWork(epochs=8, batch=10)), 20, False)
    trainer = TorchTrainer(net, (4,))
    moved = [
        float((train(trainer, w, x, y, 1, 0, order, sizes, lr=0.1, mu=mu)[0] - w).norm())
        for mu in (0, 1, 5)
    ]
    assert moved[0] > moved[1] > moved[2] > 0


def test_frozen_blocks_stay_bit_for_bit():
    net, x, y = (
        build_network("cnn-digits", (1, 8, 8), 10, 0),
        torch.rand(40, 1, 8, 8),
        torch.randint(10, (40,)),
    )
    w = pack_model(net)
    order, sizes = draw_batches(Task("a", 0, 1, 0, work=LocalWork(epochs=2, batch=16)), 40, True)
    trainer = TorchTrainer(net, (1, 8, 8))
    new = train(trainer, w, x, y, 1, 0, order, sizes, lr=0.1, first=1)[0]
    still = [s for s in trainer.layout.slots if s.name.split(".")[0] in ("0", "1")]
    assert len(still) == 6  # weight, bias, and BatchNorm's four
    assert all(torch.equal(new[s.span], w[s.span]) for s in still)
    again = train(trainer, w, x, y, 1, 0, order, sizes, lr=0.1)[0]
    assert not any(torch.equal(again[s.span], w[s.span]) for s in still)


class Plain(nn.Module):
    """A user's net: no BatchNorm, an integer buffer, a name of its own."""

    def __init__(self, shape, classes):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.long))
        self.head = nn.Linear(int(np.prod(shape)), classes)

    def forward(self, x):
        return self.head(x.flatten(1))


def test_a_user_s_own_module_learns():
    result = runs.run(
        Experiment.from_tables(
            SMALL
            | {"rounds": 30, "recipe": {"name": "fedavg"}, "model": {"name": f"{__name__}:Plain"}}
        )
    )
    assert result.summary["accuracy"] > 0.7
    assert set(result.model) == {"head.weight", "head.bias"}


def test_eval_every():
    history = runs.run(Experiment.from_tables(SMALL | {"engine": {"eval_every": 3}})).history
    assert [h.accuracy is not None for h in history] == [False, False, True] * 2


@pytest.mark.parametrize("average", ["last", "ema"])
@pytest.mark.parametrize(
    "stop", [{}, {"rounds": 4}, {"joules": 30.0}]
)  # the last one refuses its fifth round
def test_the_round_that_ends_a_run_is_judged(average, stop):
    """Whatever `eval_every` says: the summary's accuracy is that of the final model."""
    recipe = {"name": "fedavg", "average": average}
    plain = SMALL | {"rounds": 5, "recipe": recipe, "stop": stop}
    every = runs.run(Experiment.from_tables(plain))
    rare = runs.run(Experiment.from_tables(plain | {"engine": {"eval_every": 100}}))
    assert rare.summary["rounds"] == every.summary["rounds"]
    assert 0 < rare.summary["rounds"] <= 5
    assert rare.summary["accuracy"] == every.summary["accuracy"] is not None
    assert [h.accuracy is None for h in rare.history[:-1]] == [True] * (len(rare.history) - 1)


def test_seeds_have_intervals(tmp_path):
    table = runs.run_seeds(Experiment.from_tables(SMALL | {"rounds": 2}), [0, 1, 2], tmp_path)
    values = [
        json.loads((tmp_path / f"seed-{s}" / "summary.json").read_text())["accuracy"]
        for s in (0, 1, 2)
    ]
    assert table["accuracy"]["mean"] == pytest.approx(np.mean(values))
    half = 4.302653 * np.std(values, ddof=1) / 3**0.5  # Student's t, 2 degrees of freedom
    assert table["accuracy"]["half"] == pytest.approx(half)
    assert json.loads((tmp_path / "summary.json").read_text())["seeds"] == [0, 1, 2]


def test_a_workshop_replies_with_what_it_was_asked_for():
    x, y = torch.rand(20, 1, 8, 8), torch.randint(10, (20,))
    net = build_network("cnn-digits", (1, 8, 8), 10, 0)
    reply = ClientRunner(net, (1, 8, 8), Samples(x, y)).train(
        pack_model(net),
        Task("a", 0, 1, 0, compressor=NoCompression(), work=LocalWork(batch=8)),
        np.arange(20),
        {},
    )
    assert reply.payload.nbytes == 4 * len(pack_model(net))
    assert reply.n == 20
    assert reply.loss > 0


def test_the_public_names():
    assert set(flrce.__all__) <= set(dir(flrce))
    assert all(getattr(flrce, name) is not None for name in flrce.__all__)
    assert flrce.recipes.fedavg().name == "fedavg"
    with pytest.raises(AttributeError):
        _ = flrce.nonsense


@pytest.mark.parametrize("module", ["flrce", "flrce.simulation.runs"])
def test_examples_in_docstrings_run(module):
    import doctest
    import importlib

    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0
