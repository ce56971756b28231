"""One experiment, one or many seeds: builds the parts, drives the loop, keeps the run directory."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flrce import crowd, loop
from flrce.config import Experiment, build_net
from flrce.data.federation import Federation
from flrce.data.own import adopt
from flrce.data.sources import Source
from flrce.engines.choices import chosen, keep_ways
from flrce.engines.deck import Decks, Seat
from flrce.engines.simulator import Simulator
from flrce.engines.workers import Pooled, hire
from flrce.errors import BadInput
from flrce.fleet.costs import fleet, profile
from flrce.local.client import Runner
from flrce.local.precision import Precision, on_cpu
from flrce.models.adapters import accepted
from flrce.models.flat import Fixed, base_bytes, fix, layout, pack
from flrce.models.inputs import inputs, tried
from flrce.models.slicing import suits
from flrce.outcome import Result
from flrce.pieces import Recipe
from flrce.store.checkpoint import write_through
from flrce.store.ledger import Ledger, refuse_unless_new
from flrce.store.notes import notes
from flrce.store.summary import summarise
from flrce.types import Round, State, Task

Watch = Callable[[Round], None]
SEEDS = "seeds.json"  # in a folder of seeds: those that were asked for
log = logging.getLogger("flrce")


@dataclass(frozen=True)
class Parts:
    """An experiment's parts, built."""

    recipe: Recipe
    federation: Federation
    net: nn.Module
    engine: Simulator

    def initial(self) -> State:
        """Before the first round."""
        return loop.initial(self.recipe, self.engine, pack(self.net, self.engine.runner.layout))

    def describe(self) -> dict[str, Any]:
        """What was dealt to whom, and whose electricity each client has."""
        grid = None if self.engine.life is None else self.engine.life.grid
        where = {} if grid is None else {"regions": [grid.regions[i] for i in grid.of], "begins": grid.start}
        return {**self.federation.describe(), **where}

    def rounds(self, experiment: Experiment, state: State | None = None) -> Iterator[Round]:
        start = state or self.initial()
        return loop.rounds(self.recipe, self.engine, start, experiment.rounds, experiment.seed)


def parts(
    experiment: Experiment, data: Any = None, model: nn.Module | None = None, decks: Decks | None = None
) -> Parts:
    """Build recipe, federation, network and engine; `data` and `model` replace what the experiment names."""
    recipe = experiment.build_recipe()
    federation, net = materials(experiment, data, model)
    suits(recipe, net, federation.source.shape)
    devices = fleet(experiment.fleet.profile, federation.clients, experiment.seed, experiment.fleet.clients)
    devices |= {client: profile(name) for client, name in federation.trouble.slow.items()}
    workers = experiment.engine.workers
    count = (os.cpu_count() or 1) if workers == "auto" else workers

    precision: Precision = experiment.engine.precision or "float32"

    def pooled(runner: Runner) -> Pooled:
        runner.precision = on_cpu(precision)
        task = Task("", 0, 1, 0, recipe.work, update=recipe.chain, augment=recipe.augment, rounds=experiment.rounds)
        return hire(runner, experiment.engine.kernel, count, runner.unfused(task, steps=2))

    def seated(runner: Runner) -> Seat:
        return (decks or Decks("cuda")).hire(runner, precision)

    on_gpu = decks or device_of(experiment) == "cuda"
    engine = Simulator(
        federation, net, devices, seated if on_gpu else pooled, experiment.engine.eval_every,
        experiment.build_objective(federation.source.kind), recipe.kept, experiment.fleet.there(experiment.seed),
        experiment.fleet.live(experiment.seed, tuple(federation.clients), devices),
    )  # fmt: skip
    return Parts(recipe, federation, net, engine)


def materials(experiment: Experiment, data: Any = None, model: nn.Module | None = None) -> tuple[Federation, nn.Module]:
    """The samples of every client, and the network."""
    d = experiment.data
    log.info("preparing the samples of %d clients", experiment.clients)
    pool = d.read() if data is None else adopt(data, **d.how())
    federation = experiment.federate(pool)
    named = experiment.model
    net = build_net(named.name, pool, experiment.seed, named.options) if model is None else accepted(model)
    net = fix(net, experiment.build_recipe().fixed)
    told = experiment.objective is None and pool.kind in ("classes", "tokens")
    tried(net, inputs(torch.from_numpy(np.array(pool.x[:2])), pool.scale, pool.shift), pool.outputs if told else None)
    return federation, net


def rounds(experiment: Experiment, data: Any = None, model: nn.Module | None = None) -> Iterator[Round]:
    """The rounds of an experiment, one by one; nothing is written.

    >>> quick = Experiment(rounds=2, clients=10, per_round=2)
    >>> [r.record.t for r in rounds(quick)]
    [1, 2]
    """
    if experiment.engine.name == "flower":
        raise BadInput("engine.name = 'flower': rounds one by one are the simulator's; use flrce.run(..., watch=...)")
    built = parts(experiment, data, model)
    with closing(built.engine):
        yield from built.rounds(experiment)


def run(
    experiment: Experiment | Recipe | None = None, out: Path | str | None = None, resume: bool = False,
    data: Any = None, model: nn.Module | None = None, watch: Watch | None = None,
) -> Result:  # fmt: skip
    """Run one experiment to its end; with `out`, keep a run directory that can be resumed.

    A recipe stands for the usual experiment with that recipe.

    `data` replaces what the experiment names: a Source, (x, y), a torch or HuggingFace Dataset, a DataFrame, a path.

    >>> result = run(Experiment(rounds=2, clients=10, per_round=2))
    >>> result.summary["rounds"]
    2
    """
    experiment = Experiment(recipe=experiment) if isinstance(experiment, Recipe) else experiment or Experiment()
    if experiment.engine.name == "flower":
        return _on_flower(experiment, out, resume, data, model, watch)
    return _complete(parts(experiment, data, model), experiment, out, resume, watch)


def _on_flower(
    experiment: Experiment, out: Path | str | None, resume: bool, data: Any, model: nn.Module | None,
    watch: Watch | None,
) -> Result:  # fmt: skip
    """The experiment over Flower's messages within this process, one node per client; its folder is a run's."""
    try:
        from flrce.flower import server
    except ImportError as why:
        raise BadInput(f"engine.name = 'flower' needs flwr ({why}); pip install 'flrce[flower]'") from why
    if experiment.fleet.availability is not None:
        raise BadInput("fleet.availability is the simulator's; on Flower clients are there while connected; drop it")
    for key in ("presence", "battery", "carbon"):
        if getattr(experiment.fleet, key) is not None:
            raise BadInput(f"fleet.{key} is the simulator's; on Flower clients are there while connected; drop it")
    if out is not None:
        refuse_unless_new(Path(out), resume)
    built = materials(experiment, data, model)
    if built[0].trouble.drifting or built[0].trouble.riding:
        raise BadInput("data.trouble drift and free-riders are the simulator's; set engine.name = 'simulator'")
    recipe = experiment.build_recipe()
    suits(recipe, built[1], built[0].source.shape)
    found, where = server.run(experiment, out, built=built, watch=watch), layout(built[1], recipe.kept)
    tensors = with_rest(dict(found.arrays.to_torch_state_dict()), built[1])
    summary = summarise(found.history, where.size, where.trainable, base_bytes(built[1]))
    told = notes(found.history, built[0].describe(), recipe.stop, experiment.rounds, experiment.engine.eval_every)
    return Result(summary, found.history, tensors, None if out is None else Path(out), told)


def pool_of(experiment: Experiment) -> str:
    """What tells the samples of one experiment from another's, however they are shared out."""
    d = experiment.data
    return json.dumps([d.name, d.path, d.how()], sort_keys=True, default=str)


def reader() -> Callable[[Experiment], Source]:
    """What experiments name as their data, read once however many of them ask."""
    known: dict[str, Source] = {}

    def read(experiment: Experiment) -> Source:
        key = pool_of(experiment)
        if key not in known:
            log.info("reading %s", experiment.data.path or experiment.data.name)
            known[key] = experiment.data.read()
        return known[key]

    return read


def run_together(
    jobs: Sequence[tuple[Experiment, Path | None]], resume: bool = False, data: Callable[[str], Source] | None = None,
    watch: Callable[[int, Round], None] | None = None, device: str = "cuda",
) -> list[Result]:  # fmt: skip
    """Run many experiments as stacks on one machine; the results in the order of the jobs.

    Each job's model and costs are what it gets alone, up to float tolerance; together they cost little more than one.
    Where they are many, several processes share them (crowd.py): a function of jobs and machine, so that the same call
    gives the same bits.
    """
    count = crowd.processes(jobs, device)
    if count > 1 and crowd.portable(jobs, data):
        return crowd.run_shared(run_here, jobs, resume, data, watch, device, count)
    return run_here(jobs, resume, data, watch, device)


def run_here(
    jobs: Sequence[tuple[Experiment, Path | None]], resume: bool = False, data: Callable[[str], Source] | None = None,
    watch: Callable[[int, Round], None] | None = None, device: str = "cuda", beside: int = 1,
    read: Callable[[Experiment], Source] | None = None,
) -> list[Result]:  # fmt: skip
    """As `run_together`, in this process; `beside`: processes that share the device's memory; `read`: as `reader`."""
    decks = Decks(device, beside)
    once = read or reader()

    def find(experiment: Experiment) -> Source:
        return data(experiment.data.name) if data and experiment.data.path is None else once(experiment)

    built: list[Parts] = []
    with ExitStack() as seats:
        for experiment, _ in jobs:  # every seat is taken before the first run starts
            built.append(parts(experiment, find(experiment), decks=decks))
            seats.callback(built[-1].engine.close)

        def drive(i: int) -> Result:
            each = partial(watch, i) if watch else None
            return _complete(built[i], jobs[i][0], jobs[i][1], resume, each)

        before = torch.get_num_threads()
        torch.set_num_threads(1)  # the runs are the threads
        try:
            with ThreadPoolExecutor(len(jobs)) as threads:
                return list(threads.map(drive, range(len(jobs))))
        finally:
            torch.set_num_threads(before)


def device_of(experiment: Experiment) -> str:
    """Where an experiment runs: a GPU where there is one and the experiment does not say otherwise."""
    wanted = experiment.engine.device
    if wanted == "cuda" and not torch.cuda.is_available():
        log.warning("engine.device = 'cuda', but torch sees no GPU: going on with the CPU engine")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def _complete(
    built: Parts, experiment: Experiment, out: Path | str | None, resume: bool, watch: Watch | None
) -> Result:
    with closing(built.engine):
        start = built.initial()
        if out is None:
            state = _drive(built, experiment, start, watch, None)
            return _result(built, state, experiment.rounds, None)
        kernel = built.engine.workers.name
        with Ledger(Path(out), experiment.toml(), built.describe(), resume, kernel) as ledger:
            state = ledger.restore(start)
            if loop.over(state) and state.t < experiment.rounds:
                log.warning("the run in %s is over: %s; its rule would end a longer one as well", out, why_over(state))
            if isinstance(built.engine.workers, Seat):
                built.engine.workers.adopt(chosen(ledger.folder))
            try:
                state = _drive(built, experiment, state, watch, ledger)
            except BaseException:
                _salvage(built, ledger)
                raise
            _keep(built, ledger, ledger.committed, ended=True)
            return _result(built, state, experiment.rounds, ledger)


def why_over(state: State) -> str:
    return f"stopped after round {state.t} ({state.history[-1].stop})"


def _drive(built: Parts, experiment: Experiment, state: State, watch: Watch | None, ledger: Ledger | None) -> State:
    for done in built.rounds(experiment, state):
        if ledger:
            if isinstance(built.engine.workers, Seat):
                keep_ways(ledger.folder, built.engine.workers.ways)
            ledger.append(done)
        if watch:
            watch(done)
        state = done.state
    return state


def _keep(built: Parts, ledger: Ledger, state: State | None, ended: bool = False) -> None:
    if state is not None:
        model = handed_back(built.recipe, state)
        last = None if model is state.w else named(built, state.w)
        final = built.engine.breakdown(model, state.carry) if ended else None
        ledger.finish(state, built.engine.trainable, named(built, model), last, final, base_bytes(built.net))


def _salvage(built: Parts, ledger: Ledger) -> None:
    """After a failure, make what is committed readable. It comes from the disk: the tables in memory are a round on."""
    with suppress(BadInput, OSError):  # a full disk, or another owner: why the run ended matters more
        _keep(built, ledger, ledger.recover(built.initial()))


def handed_back(recipe: Recipe, state: State) -> Tensor:
    return recipe.average.model(state.memory.get("average"), state.w)


def named(built: Parts, w: Tensor) -> dict[str, Tensor]:
    """The model as named tensors: what travels, what is fixed, and what clients keep as it was at first."""
    found = {name: view.clone() for name, view in built.engine.runner.layout.views(w).items()}
    return with_rest(found, built.net)


def with_rest(found: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """What travelled, and what of the network did not: fixed parameters that lie in no file, and what clients keep."""
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if name not in found and tensor.is_floating_point() and not isinstance(tensor, Fixed):
            found[name] = tensor.detach().clone()
    return found


def _result(built: Parts, state: State, T: int, ledger: Ledger | None) -> Result:
    summary = summarise(state.history, built.engine.size, built.engine.trainable, base_bytes(built.net))
    found = notes(state.history, built.federation.describe(), built.recipe.stop, T, built.engine.eval_every)
    model = named(built, handed_back(built.recipe, state))
    return Result(summary, state.history, model, ledger.folder if ledger else None, found)


def run_seeds(
    experiment: Experiment, seeds: Sequence[int], out: Path, resume: bool = False,
    watch: Callable[[int, Round], None] | None = None, read: Callable[[Experiment], Source] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One run per seed in `out/seed-N`, and their means with 95 % intervals in `out/summary.json`.

    `read` lends the data to several calls; `out/seeds.json` says which seeds were asked for, should it be resumed.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_through(out / SEEDS, json.dumps(list(seeds)).encode())
    read = read or reader()
    jobs: list[tuple[Experiment, Path | None]] = [(experiment.with_seed(s), out / f"seed-{s}") for s in seeds]
    if device_of(experiment) == "cuda" and experiment.engine.name != "flower":
        found = run_together(jobs, resume, watch=(lambda i, done: watch(seeds[i], done)) if watch else None)
    else:
        found = [run(exp, o, resume, read(exp), watch=partial(watch, exp.seed) if watch else None) for exp, o in jobs]
    summaries = [result.summary for result in found]
    for note in dict.fromkeys(note for result in found for note in result.notes):
        having = [seed for seed, result in zip(seeds, found, strict=True) if note in result.notes]
        which = f"seed {having[0]}" if len(having) == 1 else f"{len(having)} of {len(seeds)} seeds"
        log.warning("%s", note if len(having) == len(seeds) else f"{which}: {note}")
    table = {"seeds": list(seeds), **intervals(summaries)}
    write_through(out / "summary.json", json.dumps(table, indent=1).encode())
    return table


FIGURES = (
    "value", "value_last",
    "accuracy", "accuracy_last", "rounds", "joules", "bytes", "bytes_up", "bytes_down", "seconds", "grams",
    "computation_efficiency", "communication_efficiency",
)  # fmt: skip


def intervals(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, half-width of the 95 % interval (Student's t), least and largest of each figure over the seeds."""
    from scipy.stats import t as student

    table: dict[str, Any] = {"metric": summaries[0].get("metric", "accuracy") if summaries else "accuracy"}
    summaries = [{**s, "bytes": (s["bytes_up"] or 0) + (s["bytes_down"] or 0)} for s in summaries]
    for name in FIGURES:
        values = torch.tensor([s[name] for s in summaries if s.get(name) is not None], dtype=torch.float64)
        n = len(values)
        ends = {"low": float(values.min()), "high": float(values.max())} if n else {"low": None, "high": None}
        half = float(student.ppf(0.975, n - 1) * values.std() / n**0.5) if n > 1 else None
        table[name] = {"mean": float(values.mean()) if n else None, "half": half, "n": n, **ends}
    return table
