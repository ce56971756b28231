"""One experiment, one or many seeds: drives the loop over its parts, keeps the run directory."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flrce.config.experiment import GIVEN_PREFIX, Experiment
from flrce.core import loop
from flrce.core.engine import Engine
from flrce.core.host import require_gpu
from flrce.core.pieces import Recipe
from flrce.core.types import Round, State
from flrce.data.sources import Source
from flrce.errors import BadInput, format_install_command
from flrce.models.flat import count_frozen_bytes, make_layout
from flrce.models.slicing import validate_recipe_network
from flrce.simulation import multiprocess
from flrce.simulation.baseline import describe_data
from flrce.simulation.build import (
    Simulation,
    add_untravelled_tensors,
    build_data_and_model,
    build_simulation,
    choose_device,
    get_final_model,
    get_personal_models,
    name_model_tensors,
    with_engine,
    with_given_clients,
)
from flrce.simulation.result import Result, require_training, summarize_seeds
from flrce.simulation.run_slot import DeviceSchedulers
from flrce.simulation.simulator import Simulator
from flrce.simulation.stop_memory import SEEDS_FILE, resolve_stop_memory
from flrce.storage.disk import make_folder, write_atomically
from flrce.storage.ledger import Ledger, refuse_unless_new
from flrce.storage.run_model import refuse_other_targets, write_model_card
from flrce.storage.run_notes import (
    compute_sweep_rounds,
    explain_small_fleet,
    explain_unreachable_rule,
    list_run_notes,
)
from flrce.storage.summary import summarize_run

__all__ = [
    "Result",
    "Simulation",
    "build_data_and_model",
    "build_simulation",
    "choose_device",
    "make_cached_reader",
    "rounds",
    "run",
    "run_in_process",
    "run_seeds",
    "run_together",
    "summarize_seeds",
]
RoundCallback = Callable[[Round], None]
FLOWER_ENGINE = "flrce.flower.server"  # a layer above this one, so it is loaded by name
log = logging.getLogger("flrce")


def rounds(
    experiment: Experiment, data: Any = None, model: nn.Module | None = None
) -> Iterator[Round]:
    """The rounds of an experiment, one by one; nothing is written.

    >>> quick = Experiment(rounds=2, clients=10, per_round=2)
    >>> [r.record.t for r in rounds(quick)]
    [1, 2]
    """
    if experiment.engine.name == "flower":
        raise BadInput(
            "engine.name = 'flower': rounds one by one are the simulator's; use flrce.run(...,"
            " watch=...)"
        )
    experiment, data = with_given_clients(experiment, data)
    built = build_simulation(experiment, data, model)
    with closing(built.engine):
        yield from built.iterate_rounds(experiment)


def run(
    experiment: Experiment | Recipe | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    data: Any = None,
    model: nn.Module | None = None,
    watch: RoundCallback | None = None,
    allow_divergence: bool = False,
    objective: Any = None,
    metrics: Any = None,
    engine: Engine | Callable[[Simulator], Engine] | None = None,
) -> Result:
    """Run one experiment to its end; with `out`, keep a run directory that can be resumed.

    A recipe stands for the usual experiment with that recipe. Raises `flrce.Diverged`, whose
    `result` is the partial Result, where training diverged; with `allow_divergence` that Result is
    returned, and its `diverged` says why.

    `data` replaces what the experiment names: a Source, (x, y), a torch or HuggingFace
    Dataset, a DataFrame, a path, or a list or dict with one of these per client.

    `objective` is an objective, a function of (outputs, targets) with or without a reduction, or a
    torch loss. `metrics` are names, functions of (outputs, targets), or objects with update and
    compute; a list of them or a dict by name. The first is the primary metric.

    `engine` trains the clients in place of the simulator: a `flrce.Engine`, or a function that is
    given the simulator and returns one, for instance around it.

    >>> result = run(Experiment(rounds=2, clients=10, per_round=2))
    >>> result.summary["rounds"]
    2
    """
    if isinstance(experiment, Recipe):
        experiment = Experiment(recipe=experiment)
    experiment = (experiment or Experiment()).with_objective(objective, metrics)
    choose_device(experiment)
    experiment, data = with_given_clients(experiment, data)
    experiment = resolve_stop_memory(experiment, out, resume)
    warn_about_experiment(experiment)
    if experiment.engine.name == "flower":
        if engine is not None:
            raise BadInput("engine.name = 'flower' and engine=... exclude each other; drop one")
        result = _run_on_flower(experiment, out, resume, data, model, watch)
    else:
        built = build_simulation(experiment, data, model)
        built = built if engine is None else with_engine(built, engine)
        result = _run_to_end(built, experiment, out, resume, watch)
    return result if allow_divergence else require_training(result)


def warn_about_experiment(experiment: Experiment) -> tuple[str, ...]:
    """What is known to come to nothing before a run is begun: a stop rule or an aggregator that
    cannot act.

    Said once and returned.
    """
    recipe = experiment.build_recipe()
    sweep = compute_sweep_rounds(recipe, experiment.clients)
    late = explain_unreachable_rule(
        recipe.stop, experiment.rounds, experiment.engine.eval_every, sweep
    )
    notes = tuple(note for note in (late, explain_small_fleet(recipe, experiment.clients)) if note)
    for note in notes:
        _warn_once(note)
    return notes


@cache
def _warn_once(line: str) -> None:
    log.warning("%s", line)


def _run_on_flower(
    experiment: Experiment,
    out: Path | str | None,
    resume: bool,
    data: Any,
    model: nn.Module | None,
    watch: RoundCallback | None,
) -> Result:
    """The experiment over Flower's messages within this process, one node per client; its folder is
    a run's.
    """
    try:
        server = import_module(FLOWER_ENGINE)
    except ImportError as why:
        raise BadInput(
            f"engine.name = 'flower' needs flwr ({why}); {format_install_command('flower')}"
        ) from why
    refuse_simulator_settings(experiment)
    if out is not None:
        refuse_unless_new(Path(out), resume)
    federation, net = build_data_and_model(experiment, data, model)
    if federation.trouble.drifting or federation.trouble.riding:
        raise BadInput(
            "data.trouble drift and free-riders are the simulator's; set engine.name = 'simulator'"
        )
    recipe = experiment.build_recipe()
    validate_recipe_network(recipe, net, federation.source.shape)
    if out is not None:
        make_folder(Path(out))
        given_network = "" if model is None else type(model).__name__
        write_model_card(Path(out), federation.source.spec.to_json(), given_network)
    result = server.run_on_local_grid(experiment, out, built=(federation, net), watch=watch)
    tensors = add_untravelled_tensors(dict(result.arrays.to_torch_state_dict()), net)
    where = make_layout(net, recipe.personal)
    summary = summarize_run(result.history, where.size, where.trainable, count_frozen_bytes(net))
    source = federation.source
    dealt = describe_data(federation, experiment.build_objective(source.kind, source.preprocessing))
    notes = list_run_notes(
        result.history,
        dealt,
        recipe.stop,
        experiment.rounds,
        experiment.engine.eval_every,
        compute_sweep_rounds(recipe, len(federation.clients)),
    )
    return Result(summary, result.history, tensors, None if out is None else Path(out), notes)


def refuse_simulator_settings(experiment: Experiment) -> None:
    """BadInput where an experiment on Flower sets what only the simulator has."""
    if experiment.objective is not None and str(experiment.objective).startswith(GIVEN_PREFIX):
        raise BadInput(
            "objective and metrics from Python are the simulator's; name them in the experiment as"
            ' "package.module:Class"'
        )
    for key in ("availability", "battery", "carbon", "interval"):
        if getattr(experiment.fleet, key) is not None:
            raise BadInput(
                f"fleet.{key} is the simulator's; on Flower clients are there while connected;"
                " drop it"
            )


def data_identity(experiment: Experiment) -> str:
    """What tells the samples of one experiment from another's, however they are shared out."""
    d = experiment.data
    return json.dumps([d.name, d.path, d.reader_options()], sort_keys=True, default=str)


def make_cached_reader() -> Callable[[Experiment], Source]:
    """What experiments name as their data, read once however many of them ask."""
    sources: dict[str, Source] = {}

    def read_data(experiment: Experiment) -> Source:
        key = data_identity(experiment)
        if key not in sources:
            log.info("reading %s", experiment.data.path or experiment.data.name)
            sources[key] = experiment.data.read_source()
        return sources[key]

    return read_data


def run_together(
    jobs: Sequence[tuple[Experiment, Path | None]],
    resume: bool = False,
    data: Callable[[str], Source] | None = None,
    watch: Callable[[int, Round], None] | None = None,
    device: str = "cuda",
) -> list[Result]:
    """Run many experiments as stacks on one machine; the results in the order of the jobs.

    Each job's model and costs are what it gets alone, up to float tolerance; together they cost
    little more than one. Where they are many, several processes share them (crowd.py): a function
    of jobs and machine, so that the same call gives the same bits.
    """
    if device == "cuda":
        require_gpu("device = 'cuda'")
    count = multiprocess.count_processes(jobs, device)
    if count > 1 and multiprocess.is_picklable(jobs, data):
        return multiprocess.run_shared(run_in_process, jobs, resume, data, watch, device, count)
    return run_in_process(jobs, resume, data, watch, device)


def run_in_process(
    jobs: Sequence[tuple[Experiment, Path | None]],
    resume: bool = False,
    data: Callable[[str], Source] | None = None,
    watch: Callable[[int, Round], None] | None = None,
    device: str = "cuda",
    beside: int = 1,
    read: Callable[[Experiment], Source] | None = None,
) -> list[Result]:
    """As `run_together`, in this process; `beside`: processes that share the device's memory;
    `read`: as `make_cached_reader`.
    """
    schedulers = DeviceSchedulers(device, beside, single=len(jobs) == 1)
    once = read or make_cached_reader()

    def find_samples(experiment: Experiment) -> Source:
        if data is not None and experiment.data.path is None:
            return data(experiment.data.name)
        return once(experiment)

    built: list[Simulation] = []
    with ExitStack() as slots:
        for experiment, _ in jobs:  # every slot is taken before the first run starts
            samples = find_samples(experiment)
            built.append(build_simulation(experiment, samples, schedulers=schedulers))
            slots.callback(built[-1].engine.close)

        def drive(i: int) -> Result:
            watch_run = partial(watch, i) if watch else None
            return _run_to_end(built[i], jobs[i][0], jobs[i][1], resume, watch_run)

        before = torch.get_num_threads()
        torch.set_num_threads(1)  # the runs are the threads
        try:
            with ThreadPoolExecutor(len(jobs)) as threads:
                return list(threads.map(drive, range(len(jobs))))
        finally:
            torch.set_num_threads(before)


def _run_to_end(
    built: Simulation,
    experiment: Experiment,
    out: Path | str | None,
    resume: bool,
    watch: RoundCallback | None,
) -> Result:
    with closing(built.engine):
        start = built.initial_state()
        if out is None:
            state = _drive_rounds(built, experiment, start, watch, None)
            return _build_result(built, state, experiment.rounds, None)
        kernel = built.engine.workers.name
        with Ledger(
            Path(out), experiment.to_toml(), built.describe_clients(), resume, kernel
        ) as ledger:
            spec = built.federation.source.spec
            refuse_other_targets(ledger.folder, spec.to_json())
            write_model_card(ledger.folder, spec.to_json(), built.given_network)
            state = ledger.restore(start)
            if loop.is_stopped(state) and state.t < experiment.rounds:
                log.warning(
                    "the run in %s is over: %s; its rule would end a longer one as well",
                    out,
                    explain_end(state),
                )
            try:
                state = _drive_rounds(built, experiment, state, watch, ledger)
            except BaseException:
                _salvage_results(built, ledger)
                raise
            _write_results(built, ledger, ledger.committed, ended=True)
            return _build_result(built, state, experiment.rounds, ledger)


def explain_end(state: State) -> str:
    return f"stopped after round {state.t} ({state.history[-1].stop})"


def _drive_rounds(
    built: Simulation,
    experiment: Experiment,
    state: State,
    watch: RoundCallback | None,
    ledger: Ledger | None,
) -> State:
    for done in built.iterate_rounds(experiment, state):
        if ledger:
            ledger.append(done)
        if watch:
            watch(done)
        state = done.state
    return state


def _write_results(
    built: Simulation, ledger: Ledger, state: State | None, ended: bool = False
) -> None:
    if state is not None:
        model = get_final_model(built.recipe, state)
        last = None if model is state.w else name_model_tensors(built, state.w)
        final = built.engine.break_down_metric(model, state.client_states) if ended else None
        ledger.write_results(
            state,
            built.engine.trainable,
            name_model_tensors(built, model),
            last,
            final,
            count_frozen_bytes(built.net),
            built.recipe.stop,
        )


def _salvage_results(built: Simulation, ledger: Ledger) -> None:
    """After a failure, make what is committed readable. It comes from the disk: the tables in
    memory are a round on.
    """
    with suppress(
        BadInput, OSError
    ):  # a full disk, or another owner: why the run ended matters more
        _write_results(built, ledger, ledger.read_committed(built.initial_state()))


def _build_result(built: Simulation, state: State, T: int, ledger: Ledger | None) -> Result:
    summary = summarize_run(
        state.history, built.engine.size, built.engine.trainable, count_frozen_bytes(built.net)
    )
    sweep = compute_sweep_rounds(built.recipe, len(built.federation.clients))
    notes = list_run_notes(
        state.history,
        built.describe_clients(),
        built.recipe.stop,
        T,
        built.engine.eval_every,
        sweep,
    )
    model = name_model_tensors(built, get_final_model(built.recipe, state))
    return Result(
        summary,
        state.history,
        model,
        ledger.folder if ledger else None,
        notes,
        get_personal_models(built, state),
    )


def run_seeds(
    experiment: Experiment,
    seeds: Sequence[int],
    out: Path,
    resume: bool = False,
    watch: Callable[[int, Round], None] | None = None,
    read: Callable[[Experiment], Source] | None = None,
) -> dict[str, Any]:
    """One run per seed in `out/seed-N`, and their means with 95 % intervals in `out/summary.json`.

    `read` lends the data to several calls; `out/seeds.json` says which seeds were asked for, should
    it be resumed.
    """
    make_folder(out)
    write_atomically(out / SEEDS_FILE, json.dumps(list(seeds)).encode())
    read = read or make_cached_reader()
    experiment, _ = with_given_clients(experiment, None, read)
    experiment = resolve_stop_memory(experiment, out, resume)
    jobs: list[tuple[Experiment, Path | None]] = [
        (experiment.with_seed(s), out / f"seed-{s}") for s in seeds
    ]
    if choose_device(experiment) == "cuda" and experiment.engine.name != "flower":
        results = run_together(
            jobs, resume, watch=(lambda i, done: watch(seeds[i], done)) if watch else None
        )
    else:
        results = []
        for job, where in jobs:
            watch_seed = partial(watch, job.seed) if watch else None
            results.append(
                run(job, where, resume, read(job), watch=watch_seed, allow_divergence=True)
            )
    summaries = [result.summary for result in results]
    for note in dict.fromkeys(note for result in results for note in result.notes):
        having = [seed for seed, result in zip(seeds, results, strict=True) if note in result.notes]
        which = f"seed {having[0]}" if len(having) == 1 else f"{len(having)} of {len(seeds)} seeds"
        log.warning("%s", note if len(having) == len(seeds) else f"{which}: {note}")
    table = {"seeds": list(seeds), **summarize_seeds(summaries)}
    if lost := {
        str(seed): result.diverged
        for seed, result in zip(seeds, results, strict=True)
        if result.diverged
    }:
        table["diverged"] = lost
    write_atomically(out / "summary.json", json.dumps(table, indent=1).encode())
    return table
