"""Several runs at one deck: the same choices as the CPU engine, weights within tolerance, same bits
each time.
"""

import subprocess
import sys
from threading import RLock, Thread, get_ident

import pytest
import torch

from flrce.config.experiment import Experiment
from flrce.core import loop
from flrce.errors import BadInput
from flrce.models.flat import pack_model
from flrce.simulation import gpu_scheduler, multiprocess, runs, workers
from flrce.simulation.gpu_scheduler import DEVICE_LOCK, GpuScheduler
from flrce.simulation.run_slot import RunSlot
from flrce.training.batches import Samples
from flrce.training.client import ClientRunner
from flrce.training.gpu.batch_trainer import ClientBatchTrainer
from flrce.training.trainer import TorchTrainer

BASE = {
    "rounds": 3,
    "clients": 12,
    "per_round": 4,
    "train": {"epochs": 1, "batch": 32},
    "engine": {"kernel": "torch", "workers": 1},
}


def together(experiments):
    """Every experiment's result, run as the seats of one deck on the CPU device."""
    return runs.run_together([(exp, None) for exp in experiments], device="cpu")


def weights(result):
    return torch.cat([x.flatten() for x in result.model.values()])


def experiments(names, seeds):
    return [
        Experiment.from_tables(BASE | {"seed": s, "recipe": {"name": name}})
        for name in names
        for s in seeds
    ]


NAMES = [("fedavg", "flrce"), ("fedprox", "dropout", "fedcom"), ("timelyfl", "pyramidfl")]


@pytest.mark.parametrize("names", NAMES)
def test_a_deck_asks_and_pays_as_the_cpu_engine_does(names):
    """Three rounds: whoever is chosen and whatever travels must not depend on the engine."""
    exps = experiments(names, (0, 1) if "flrce" in names else (0,))
    for exp, found in zip(exps, together(exps), strict=True):
        expected = runs.run(exp)
        assert [h.chosen for h in found.history] == [h.chosen for h in expected.history]
        assert [h.bytes_up for h in found.history] == [h.bytes_up for h in expected.history]


@pytest.mark.parametrize("names", NAMES)
def test_a_deck_takes_the_cpu_engine_s_step(names):
    """One local step on a smooth network: longer runs through pools and ReLUs let a last bit grow
    without bound.
    """
    short = {
        "rounds": 1,
        "model": {"name": "own_nets:Smooth"},
        "train": {"batch": 4096, "epochs": 1, "lr": 0.1},
    }
    for exp in experiments(names, (0,)):
        exp = Experiment.from_tables(exp.model_dump(exclude_none=True) | short)
        moved = weights(runs.run(exp)) - pack_model(runs.build_simulation(exp).net)
        found = weights(together([exp])[0]) - pack_model(runs.build_simulation(exp).net)
        error = (found - moved).norm() / moved.norm()
        assert error < 1e-4, (exp.recipe, float(error))


def test_the_same_runs_together_give_the_same_bits():
    exps = experiments(("flrce", "fedprox"), (0, 1))
    one, two = together(exps), together(exps)
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(one, two, strict=True))


def test_runs_of_different_length_share_a_deck():
    exps = [Experiment.from_tables(BASE | {"rounds": T, "seed": T}) for T in (1, 2, 4)]
    assert [len(found.history) for found in together(exps)] == [1, 2, 4]


class Turn:
    """A lock that knows who holds it."""

    def __init__(self):
        self.lock, self.holders = RLock(), []

    def __enter__(self):
        self.lock.acquire()
        self.holders.append(get_ident())

    def __exit__(self, *why):
        self.holders.pop()
        self.lock.release()


def test_schedulers_of_one_gpu_take_turns(monkeypatch):
    """Kept parameters make a deck of their own, MOON trains apart: whoever works on the device has
    it to himself.
    """
    turn, worked = Turn(), set()
    monkeypatch.setattr(gpu_scheduler, "DEVICE_LOCK", turn)

    def watch(owner, name):
        whole = getattr(owner, name)

        def watched(*args, **options):
            assert turn.holders == [get_ident()] * len(turn.holders) != []
            worked.add((owner.__name__, name))
            return whole(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (ClientBatchTrainer, "train"),
        (ClientBatchTrainer, "evaluate"),
        (ClientRunner, "train_and_reply"),
        (ClientRunner, "evaluate"),
    ):
        watch(owner, name)
    found = together(experiments(("fedavg", "fedper", "moon"), (0,)))
    assert len(found) == 3
    assert len(worked) == 4


def test_networks_are_taken_apart_one_at_a_time(monkeypatch):
    """torch.fx takes a module that another thread calls meanwhile for one of the network's own, and
    fails.
    """
    held = []
    whole = ClientBatchTrainer.__init__

    def watched(*args, **options):
        threads = [Thread(target=lambda: held.append(DEVICE_LOCK.acquire(blocking=False)))]
        threads[0].start()
        threads[0].join()
        whole(*args, **options)

    monkeypatch.setattr(ClientBatchTrainer, "__init__", watched)
    together(experiments(("fedavg", "fedper"), (0,)))
    assert held
    assert not any(held)


def test_a_failure_reaches_every_run():
    """What breaks the device ends each run with the reason; none hangs."""
    exps = experiments(("fedavg",), (0, 1))
    built = [runs.build_simulation(exp) for exp in exps]
    deck = GpuScheduler(built[0].engine.runner, "cpu")
    deck._train_requests = lambda requests: 1 / 0
    seats = [RunSlot(deck, each.engine.runner) for each in built]
    failures = []

    def drive(i):
        each = built[i]
        each.engine.workers.close()
        each.engine.workers = seats[i]
        try:
            state = loop.make_initial_state(each.recipe, each.engine, pack_model(each.net))
            list(each.iterate_rounds(exps[i], state))
        except ZeroDivisionError as why:
            failures.append(why)
        finally:
            each.engine.close()

    threads = [Thread(target=drive, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(failures) == 2


EXTENDED = {
    "scaffold": {"recipe": {"name": "scaffold"}},
    "feddyn": {"recipe": {"name": "feddyn"}},
    "feddc": {"recipe": {"name": "feddc"}},
    "fedcomgate": {"recipe": {"name": "fedcomgate"}},
    "carried momentum": {"train": {"momentum": 0.9, "carry": True}},
    "kept": {"model": {"name": "own_nets:Smooth", "kept": "norms"}},
}


@pytest.mark.parametrize("name", EXTENDED)
def test_states_and_kept_parameters_go_with_a_lane(name, caplog):
    """Three rounds, so that what clients keep comes back; whole batches on a smooth network keep
    rounding small.
    """
    more = EXTENDED[name]
    base = {
        "rounds": 3,
        "clients": 6,
        "per_round": 4,
        "engine": {"kernel": "torch"},
        "recipe": {"name": "fedavg"},
    }
    table = base | {"model": {"name": "own_nets:Smooth"}} | more
    table["train"] = {"batch": 4096, "epochs": 2, "lr": 0.05} | more.get("train", {})
    exp = Experiment.from_tables(table)
    found, expected = together([exp])[0], runs.run(exp)
    assert "one after another" not in caplog.text
    moved = weights(expected) - pack_model(runs.build_simulation(exp).net)[: len(weights(expected))]
    assert (weights(found) - weights(expected)).norm() < 2e-3 * moved.norm()
    assert [h.accuracy for h in found.history] == pytest.approx(
        [h.accuracy for h in expected.history], abs=0.03
    )


@pytest.mark.parametrize("name", ["own_nets:Dropped"])
def test_random_layers_train_in_a_stack(name, caplog):
    tables = BASE | {"rounds": 10, "model": {"name": name}}
    exps = [Experiment.from_tables(tables | {"seed": s}) for s in (0, 1)]
    one, two = together(exps), together(exps)
    assert "one after another" not in caplog.text
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(one, two, strict=True))
    assert one[0].history[-1].loss < one[0].history[0].loss


@pytest.mark.slow
def test_processes_share_many_runs(tmp_path):
    """Two processes with every other job each: what each gives is what its share gives in one
    process.
    """
    few = BASE | {"rounds": 2, "clients": 6, "per_round": 2, "engine": {"workers": 2}}
    jobs = [(Experiment.from_tables(few | {"seed": s}), tmp_path / str(s)) for s in range(3)]
    seen = []
    found = runs.run_together(
        jobs, watch=lambda i, done: seen.append((i, done.record.t)), device="cpu"
    )
    alone = runs.run_in_process([(exp, None) for exp, _ in jobs[::2]], device="cpu")
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(found[::2], alone, strict=True))
    assert [result.folder.name for result in found] == ["0", "1", "2"]
    assert sorted(seen) == [(i, t) for i in range(3) for t in (1, 2)]
    with pytest.raises(BadInput, match="already has a run"):
        runs.run_together(jobs, device="cpu")


def test_how_many_processes_depends_on_jobs_and_wishes():
    exp = Experiment.from_tables(BASE | {"engine": {}})
    one = Experiment.from_tables(BASE | {"engine": {"workers": 3}})
    assert multiprocess.count_processes([(exp, None)] * 40, "cpu") == 1
    assert multiprocess.count_processes([(one, None)] * 2, "cpu") == 2
    assert multiprocess.count_processes([(one, None)] * 40, "cpu") == 3
    assert not multiprocess.is_picklable(lambda: 0)


def test_short_memory_costs_speed_and_nothing_else(monkeypatch, caplog):
    """The stack halves what it asks for until lanes fit; where none does, clients train one after
    another.
    """
    exp = Experiment.from_tables(BASE | {"rounds": 1, "model": {"name": "own_nets:Smooth"}})
    plain = together([exp])[0]
    train, room = ClientBatchTrainer.train, [3]

    def short(self, *args, **more):
        if self.memory > room[0]:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
        return train(self, *args, **more)

    monkeypatch.setattr(ClientBatchTrainer, "train", short)
    room[0] = (4 << 30) // 4 // 4  # fits after two halvings
    assert torch.allclose(weights(together([exp])[0]), weights(plain), atol=1e-5)
    assert "memory is short" in caplog.text
    room[0] = -1
    alone = weights(together([exp])[0])
    assert torch.isfinite(alone).all()
    assert (alone - weights(plain)).norm() < 0.05 * weights(plain).norm()


@pytest.mark.parametrize("short", [False, True])
def test_clients_by_themselves_train_on_the_device_s_samples(monkeypatch, short):
    """As the network is there, and the host's samples would not go through it."""
    exp = Experiment.from_tables(BASE | {"rounds": 1, "model": {"name": "own_nets:Smooth"}})
    schedulers, seen = [], []
    create, train = GpuScheduler.__init__, TorchTrainer.train

    def keep_scheduler(self, *args, **more):
        create(self, *args, **more)
        schedulers.append(self)

    def keep_samples(self, w, batches, *args):
        seen.append(batches.samples)
        return train(self, w, batches, *args)

    monkeypatch.setattr(GpuScheduler, "__init__", keep_scheduler)
    monkeypatch.setattr(TorchTrainer, "train", keep_samples)
    if short:  # of memory for a client batch
        monkeypatch.setattr(GpuScheduler, "_retry_with_less_memory", lambda *_: None)
    else:
        monkeypatch.setattr(GpuScheduler, "get_batch_trainer", lambda *_: "no client batch")
    together([exp])
    assert len(seen) == 4
    assert all(samples is schedulers[0].runner.samples for samples in seen)


def test_memory_too_short_to_try_a_stack(monkeypatch, caplog):
    """Then clients train one after another, and a line says why."""
    exp = Experiment.from_tables(BASE | {"rounds": 1, "model": {"name": "own_nets:Smooth"}})
    plain = weights(together([exp])[0])

    def short(self, variant):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(ClientBatchTrainer, "get_network", short)
    found = weights(together([exp])[0])
    assert "memory is short" in caplog.text
    assert (found - plain).norm() < 0.05 * plain.norm()


def test_workers_need_not_be_forked(monkeypatch):
    """A process that has used a GPU cannot fork its workers; spawned ones give the same bits."""
    exp = Experiment.from_tables(
        BASE
        | {"rounds": 1, "clients": 4, "per_round": 2, "engine": {"kernel": "torch", "workers": 1}}
    )
    forked = weights(runs.run(exp))
    monkeypatch.setattr(workers, "choose_start_method", lambda: "spawn")
    assert torch.equal(weights(runs.run(exp)), forked)


def test_the_last_to_leave_a_deck_gives_its_memory_back():
    built = runs.build_simulation(Experiment.from_tables(BASE))
    at = GpuScheduler(
        ClientRunner(
            built.net,
            built.federation.source.shape,
            Samples(built.federation.x, built.federation.y),
        ),
        "cpu",
    )
    first, second = at.add_slot(), at.add_slot()
    at.get_batch_trainer(at.runner.all)
    at.release_slot(first)
    assert at.trainers
    at.release_slot(second)
    assert not at.trainers


@pytest.mark.slow
def test_processes_need_no_guard_in_a_script():
    """A script that comes from standard input and guards nothing: no process reads it again."""
    script = (
        "from flrce import Experiment\nfrom flrce.simulation import runs\nfew = [Experiment.from_tables({'rounds': 1, 'clients': 4,"
        " 'per_round': 2, 'seed': s, 'engine': {'workers': 2}}) for s in"
        " range(2)]\nprint([len(r.history) for r in runs.run_together([(exp, None) for exp in few],"
        " device='cpu')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "[1, 1]", done.stderr
