"""One experiment, one or many seeds: drives the loop over its parts, keeps the run directory."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flrce import crowd, loop
from flrce.config import Experiment
from flrce.data.sources import Source
from flrce.engines.baseline import describe_data
from flrce.engines.choices import chosen, keep_ways
from flrce.engines.seat import Decks, Seat
from flrce.errors import BadInput, installs
from flrce.host import require_gpu
from flrce.models.flat import base_bytes, layout
from flrce.models.slicing import suits
from flrce.outcome import Result, intervals, require_training
from flrce.parts import Parts, device_of, handed_back, materials, named, parts, personal, with_given_clients, with_rest
from flrce.pieces import Recipe
from flrce.store.disk import make_folder, write_through
from flrce.store.ledger import Ledger, refuse_unless_new
from flrce.store.notes import notes, sweep_of, unjudged, unreachable
from flrce.store.summary import summarise
from flrce.types import Round, State

__all__ = [
    "Parts", "Result", "device_of", "intervals", "materials", "parts", "reader", "rounds", "run", "run_here",
    "run_seeds", "run_together",
]  # fmt: skip
Watch = Callable[[Round], None]
SEEDS = "seeds.json"  # in a folder of seeds: those that were asked for
log = logging.getLogger("flrce")


def rounds(experiment: Experiment, data: Any = None, model: nn.Module | None = None) -> Iterator[Round]:
    """The rounds of an experiment, one by one; nothing is written.

    >>> quick = Experiment(rounds=2, clients=10, per_round=2)
    >>> [r.record.t for r in rounds(quick)]
    [1, 2]
    """
    if experiment.engine.name == "flower":
        raise BadInput("engine.name = 'flower': rounds one by one are the simulator's; use flrce.run(..., watch=...)")
    experiment = with_given_clients(experiment, data)
    built = parts(experiment, data, model)
    with closing(built.engine):
        yield from built.rounds(experiment)


def run(
    experiment: Experiment | Recipe | None = None, out: Path | str | None = None, resume: bool = False,
    data: Any = None, model: nn.Module | None = None, watch: Watch | None = None, allow_divergence: bool = False,
) -> Result:  # fmt: skip
    """Run one experiment to its end; with `out`, keep a run directory that can be resumed.

    A recipe stands for the usual experiment with that recipe. Raises `flrce.Diverged`, whose `result` is the partial
    Result, where training diverged; with `allow_divergence` that Result is returned, and its `diverged` says why.

    `data` replaces what the experiment names: a Source, (x, y), a list or dict of each client's (x, y), a torch
    or HuggingFace Dataset, a DataFrame, a path.

    >>> result = run(Experiment(rounds=2, clients=10, per_round=2))
    >>> result.summary["rounds"]
    2
    """
    if isinstance(experiment, Recipe):
        experiment = Experiment(recipe=experiment)
    experiment = experiment or Experiment()
    device_of(experiment)
    experiment = with_given_clients(experiment, data)
    warn(experiment)
    if experiment.engine.name == "flower":
        result = _on_flower(experiment, out, resume, data, model, watch)
    else:
        result = _complete(parts(experiment, data, model), experiment, out, resume, watch)
    return result if allow_divergence else require_training(result)


def warn(experiment: Experiment) -> tuple[str, ...]:
    """What is known to come to nothing before a run is begun: a stop rule or an aggregator that cannot act.

    Said once and returned.
    """
    recipe = experiment.build_recipe()
    sweep = sweep_of(recipe, experiment.clients)
    late = unreachable(recipe.stop, experiment.rounds, experiment.engine.eval_every, sweep)
    found = tuple(note for note in (late, unjudged(recipe, experiment.clients)) if note)
    for note in found:
        _said(note)
    return found


@cache
def _said(line: str) -> None:
    log.warning("%s", line)


def _on_flower(
    experiment: Experiment, out: Path | str | None, resume: bool, data: Any, model: nn.Module | None,
    watch: Watch | None,
) -> Result:  # fmt: skip
    """The experiment over Flower's messages within this process, one node per client; its folder is a run's."""
    try:
        from flrce.flower import server
    except ImportError as why:
        raise BadInput(f"engine.name = 'flower' needs flwr ({why}); {installs('flower')}") from why
    if experiment.fleet.availability is not None:
        raise BadInput("fleet.availability is the simulator's; on Flower clients are there while connected; drop it")
    for key in ("presence", "battery", "carbon"):
        if getattr(experiment.fleet, key) is not None:
            raise BadInput(f"fleet.{key} is the simulator's; on Flower clients are there while connected; drop it")
    if out is not None:
        refuse_unless_new(Path(out), resume)
    federation, net = materials(experiment, data, model)
    if federation.trouble.drifting or federation.trouble.riding:
        raise BadInput("data.trouble drift and free-riders are the simulator's; set engine.name = 'simulator'")
    recipe = experiment.build_recipe()
    suits(recipe, net, federation.source.shape)
    found = server.run(experiment, out, built=(federation, net), watch=watch)
    tensors = with_rest(dict(found.arrays.to_torch_state_dict()), net)
    where = layout(net, recipe.kept)
    summary = summarise(found.history, where.size, where.trainable, base_bytes(net))
    sweep, every = sweep_of(recipe, len(federation.clients)), experiment.engine.eval_every
    dealt = describe_data(federation, experiment.build_objective(federation.source.kind))
    told = notes(found.history, dealt, recipe.stop, experiment.rounds, every, sweep)
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
    if device == "cuda":
        require_gpu("device = 'cuda'")
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
    decks = Decks(device, beside, single=len(jobs) == 1)
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


def _result(built: Parts, state: State, T: int, ledger: Ledger | None) -> Result:
    summary = summarise(state.history, built.engine.size, built.engine.trainable, base_bytes(built.net))
    sweep = sweep_of(built.recipe, len(built.federation.clients))
    found = notes(state.history, built.describe(), built.recipe.stop, T, built.engine.eval_every, sweep)
    model = named(built, handed_back(built.recipe, state))
    return Result(summary, state.history, model, ledger.folder if ledger else None, found, personal(built, state))


def run_seeds(
    experiment: Experiment, seeds: Sequence[int], out: Path, resume: bool = False,
    watch: Callable[[int, Round], None] | None = None, read: Callable[[Experiment], Source] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One run per seed in `out/seed-N`, and their means with 95 % intervals in `out/summary.json`.

    `read` lends the data to several calls; `out/seeds.json` says which seeds were asked for, should it be resumed.
    """
    make_folder(out)
    write_through(out / SEEDS, json.dumps(list(seeds)).encode())
    read = read or reader()
    jobs: list[tuple[Experiment, Path | None]] = [(experiment.with_seed(s), out / f"seed-{s}") for s in seeds]
    if device_of(experiment) == "cuda" and experiment.engine.name != "flower":
        found = run_together(jobs, resume, watch=(lambda i, done: watch(seeds[i], done)) if watch else None)
    else:
        found = []
        for job, where in jobs:
            each = partial(watch, job.seed) if watch else None
            found.append(run(job, where, resume, read(job), watch=each, allow_divergence=True))
    summaries = [result.summary for result in found]
    for note in dict.fromkeys(note for result in found for note in result.notes):
        having = [seed for seed, result in zip(seeds, found, strict=True) if note in result.notes]
        which = f"seed {having[0]}" if len(having) == 1 else f"{len(having)} of {len(seeds)} seeds"
        log.warning("%s", note if len(having) == len(seeds) else f"{which}: {note}")
    table = {"seeds": list(seeds), **intervals(summaries)}
    if lost := {str(seed): result.diverged for seed, result in zip(seeds, found, strict=True) if result.diverged}:
        table["diverged"] = lost
    write_through(out / "summary.json", json.dumps(table, indent=1).encode())
    return table
