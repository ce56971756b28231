"""A run over a Grid from first round to last: the loop, the state folder, and what Flower's Result
wants to know.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result as FlowerResult
from torch import Tensor

from flrce.core import loop
from flrce.core.cost_table import COSTS, is_energy_known, list_booked_amounts
from flrce.core.engine import Engine
from flrce.core.pieces import Recipe
from flrce.core.types import Round, RoundRecord, State
from flrce.errors import BadInput, UnfinishedRun
from flrce.flower.engine import FlowerEngine
from flrce.flower.folder import open_ledger, read_sample_counts, translate_errors
from flrce.storage.ledger import Ledger

SHOULD_STOP_REASON = "should_stop said so"
log = logging.getLogger("flwr")


@dataclass
class StrategyResult(FlowerResult):
    """Flower's Result, and why the run ended before its last round ("" if it did not)."""

    stopped: str = ""
    history: tuple[RoundRecord, ...] = field(default=(), repr=False)

    __repr__ = FlowerResult.__repr__


Result = StrategyResult  # the name of flrce.flower, as in Flower


@dataclass
class Session:
    """One recipe on one engine; with a `folder`, every round is committed there and a later start
    goes on from it.

    A round is committed (written and fsynced) before the log calls it committed and before anything
    waits for nodes: whoever kills the server loses nothing that was logged.
    """

    recipe: Recipe
    engine: FlowerEngine
    w: Tensor
    T: int
    folder: Path | None = None
    experiment: str = ""  # settings as TOML, for the state folder
    partition: Mapping[str, Any] | None = None  # who holds which samples, likewise
    watch: Callable[[Round], None] | None = None  # is shown every round
    # number of connected clients -> the recipe, where P depends on it
    resized: Callable[[int], Recipe] | None = None
    sized_for: int = 0  # connected clients that the recipe's P follows from; 0: none yet
    should_stop: Callable[[int, Result], bool] | None = None  # asked after every round
    run_hooked_round: Callable[["Session", State], Round] | None = (
        None  # through a subclass's own methods
    )
    result: Result = field(default_factory=Result)
    ledger: Ledger | None = None

    def run(self) -> Result:
        """All rounds until T or a stop; no message is sent after either."""
        result, begun = self.result, time.monotonic()
        with ExitStack() as stack:
            if self.engine.costs is None:
                stack.enter_context(translate_errors())
            if self.folder:
                self.ledger = stack.enter_context(
                    open_ledger(self.folder, self.experiment, self.partition, self.engine)
                )
            start = loop.make_initial_state(self.recipe, self.engine, self.w)
            state = self._restore_state(start)
            try:
                seed = self.engine.options.seed
                for done in loop.rounds(
                    self.recipe, self.engine, state, self.T, seed, self._run_round
                ):
                    state = done.state
                    if self.watch:
                        self.watch(done)
                    del done
            except BaseException:
                self._salvage_results(start.roster)
                raise
            if self.ledger and self.ledger.committed is not None:
                self._write_results(self.ledger, self.ledger.committed, ended=True)
            result.history, result.arrays = (
                state.history,
                self.engine.template.unpack(self._get_final_model(state)),
            )
        result.stopped = state.history[-1].stop if state.history else ""
        self._log_summary(result, time.monotonic() - begun)
        self._require_training(state)
        return result

    def _require_training(self, state: State) -> None:
        """Unfinished where no round made a model: the initial one is not returned as if it were
        trained.
        """
        if not self.T or self.engine.made_model(self.w, state.w, state.history):
            return
        again = (
            "start again with the same state folder"
            if self.engine.costs is None
            else "use --resume"
        )
        remedy = f"; once clients reply, {again} ({self.folder})" if self.folder else ""
        reason = self.result.stopped or "no round changed the model"
        raise UnfinishedRun(
            f"no round was completed, the model is still the initial one: {reason}{remedy}"
        )

    def _restore_state(self, start: State) -> State:
        """Where the run goes on; what is known of its rounds so far is in the result again."""
        state = self.ledger.restore(start) if self.ledger else start
        log.info("Evaluated as the final model: %s", _describe_final_model(self.recipe))
        if state.history:
            log.info("Resuming %s after round %d", self.folder, state.t)
            if own := list_client_state(self.recipe):
                log.warning(
                    "What clients keep from round to round (%s) lies with Flower's nodes: those"
                    " that have been started anew begin without it",
                    ", ".join(own),
                )
            self.engine.reports.restore_sample_counts(
                read_sample_counts(self.folder) if self.folder else {}
            )
        self.result.history = state.history
        for record in state.history:
            self._store_metrics(record, record.why.get("metrics", {}))
        return state

    def _run_round(self, recipe: Recipe, engine: Engine, state: State, T: int, seed: int) -> Round:
        """One round of the loop with as many clients as are connected now: complete, then on disk,
        then in the log.
        """
        done = (
            self.run_hooked_round(self, state)
            if self.run_hooked_round
            else loop.run_round(self.resize_recipe(), engine, state, T, seed)
        )
        done = self._complete_round(done)
        if self.ledger:
            self.ledger.append(done)
        self._log_round(done.record)
        return done

    def _log_summary(self, result: Result, seconds: float) -> None:
        """The run in a few lines."""
        done = [record for record in result.history if record.outcome == "committed"]
        log.info("")
        log.info(
            "%d of %d rounds in %.1f s: %s",
            len(done),
            self.T,
            seconds,
            result.stopped or "all that were asked for",
        )
        seen = [record for record in done if record.last_model_metric is not None]
        if seen:
            log.info(
                "\t%s (round %d) of %s",
                describe_headline(seen[-1]),
                seen[-1].t,
                _describe_final_model(self.recipe),
            )
        total = COSTS["bytes"].summarize(result.history)
        log.info(
            "\t%.3f MB up, %.3f MB down (%.3f MB of it in vain), %.3f MB for evaluations; %s;"
            " %d replies did not count",
            total["bytes_up"] / 1e6,
            total["bytes_down"] / 1e6,
            total["bytes_wasted"] / 1e6,
            total["bytes_evaluation"] / 1e6,
            format_energy(result.history),
            sum(len(record.rejected) for record in result.history),
        )
        if self.folder:
            log.info("\tkept in %s: flrce report %s --out report.html", self.folder, self.folder)

    def run_evaluation_only(self) -> Result:
        """Rounds in which nobody trains, as FedAvg has them with fraction_train = 0: the model is
        evaluated.
        """
        result, engine = self.result, self.engine
        result.arrays = engine.template.unpack(self.w)
        for t in range(1, self.T + 1):
            engine.clients()
            engine.evaluate(self.w, t)
            self._store_metrics(
                RoundRecord(t, "not trained"), self._collect_metrics(RoundRecord(t))
            )
            if self.should_stop and self.should_stop(t, result):
                result.stopped = SHOULD_STOP_REASON
                break
        return result

    def resize_recipe(self) -> Recipe:
        """The recipe with P as now many clients are connected."""
        connected = len(self.engine.clients()) if self.resized else 0
        if self.resized and connected and connected != self.sized_for:
            self.sized_for = connected
            with suppress(BadInput):  # what does not go with so few clients stays as it was
                made = self.resized(connected)
                self.recipe = self.recipe if made.P == self.recipe.P else made
        return self.recipe

    def _write_results(self, ledger: Ledger, state: State, ended: bool = False) -> None:
        model = self._get_final_model(state)
        last = None if model is state.w else self.engine.template.to_named_tensors(state.w)
        final = self.engine.break_down_metric(state.t, state.roster) if ended else None
        ledger.write_results(
            state,
            self.engine.trainable,
            self.engine.template.to_named_tensors(model),
            last,
            final,
            stop=self.recipe.stop,
        )

    def _salvage_results(self, roster: tuple[str, ...]) -> None:
        """After a failure, make what is committed readable. It comes from the disk: tables in
        memory are a round on.
        """
        ledger = self.ledger
        if ledger is None:
            return
        server_state = self.recipe.initial_state(len(roster), self.engine.trainable, len(self.w))
        with suppress(BadInput, OSError):  # why the run ended matters more
            state = ledger.read_committed(State(0, self.w, server_state, roster))
            if state is not None:
                self._write_results(ledger, state)

    def _get_final_model(self, state: State) -> Tensor:
        return self.recipe.average.model(state.server_state.get("average"), state.w)

    def _complete_round(self, done: Round) -> Round:
        """A round with its Flower metrics, which are kept with it, and whether it was to be the
        last.
        """
        record, engine, result = done.record, self.engine, self.result
        if engine.costs is None:
            costs = replace(record.costs, bytes_evaluation=engine.evaluator.take_sent_bytes())
            record = replace(record, costs=costs)
        metrics = self._collect_metrics(record)
        self._store_metrics(record, metrics)
        if self.should_stop and done.model is not None and not record.stop:
            result.history, result.arrays = done.state.history, engine.get_model_arrays(done.model)
            if self.should_stop(record.t, result):
                record = replace(record, stop=SHOULD_STOP_REASON)
                self._store_metrics(record, metrics)
        if engine.costs is None and metrics:
            record = replace(record, why={**record.why, "metrics": metrics})
        history = (*done.state.history[:-1], record)
        return replace(done, record=record, state=replace(done.state, history=history))

    def _log_round(self, record: RoundRecord) -> None:
        """One round in the log; accuracy, or whatever the metric is, as in Result."""
        for client, reason in sorted(record.rejected.items()):
            log.info("\t> %s did not count: %s", client, reason)
        log.info(
            "\t└──> round %d %s: %d of %d replies, conflicts %.2f, %s, %.3f MB up, %.3f MB down",
            record.t,
            record.outcome,
            len(record.replied),
            len(record.chosen),
            record.diagnostics.conflicts,
            describe_headline(record),
            record.costs.bytes_up / 1e6,
            record.costs.bytes_down / 1e6,
        )
        if record.stop:
            log.info("Stopping after round %d: %s", record.t, record.stop)

    def _collect_metrics(self, record: RoundRecord) -> dict[str, Any]:
        """What is known of a round besides our own figures, as plain data."""
        ours, reported = to_flower_metrics(record), self.engine.collect_round_metrics(record)
        plain = {name: dict(metrics) for name, metrics in reported.items()}
        trained = {key: value for key, value in plain.pop("train", {}).items() if key not in ours}
        return {**({"train": trained} if trained else {}), **plain}

    def _store_metrics(self, record: RoundRecord, metrics: Mapping[str, Mapping[str, Any]]) -> None:
        result = self.result
        noted = result.train_metrics_clientapp
        if record.outcome == "committed":
            noted[record.t] = MetricRecord(
                {**metrics.get("train", {}), **to_flower_metrics(record)}
            )
        elif record.stop and noted:  # a round that was not even started ended the run
            noted[max(noted)]["stopped"] = 1
        places = {
            "evaluate": result.evaluate_metrics_clientapp,
            "server": result.evaluate_metrics_serverapp,
        }
        for name, place in places.items():
            if name in metrics:
                place[record.t] = MetricRecord(dict(metrics[name]))


def to_flower_metrics(record: RoundRecord) -> dict[str, Any]:
    """A round's books as Flower metrics, without energy that nobody knows; `stopped` is 1 in the
    round that ended the run.
    """
    booked = list_booked_amounts(record)
    if not is_energy_known([record]):
        energy = COSTS["joules"]
        booked = {
            name: amount
            for name, amount in booked.items()
            if name not in (*energy.booked_fields, *energy.details)
        }
    return {
        "conflicts": record.diagnostics.conflicts,
        "consensus": record.diagnostics.consensus,
        **booked,
        "exploit": int(record.exploit),
        "replied": len(record.replied),
        "rejected": len(record.rejected),
        "stopped": int(bool(record.stop)),
    }


def describe_headline(record: RoundRecord) -> str:
    """The primary metric: over all samples, as Result has it, and where another, its mean over
    clients.
    """
    name, by_client = record.evaluation.metric, record.last_model_metric
    by_sample = (
        record.evaluation.accuracy_weighted
        if name == "accuracy"
        else record.evaluation.pooled.get(name)
    )
    if by_client is None:
        return describe_holdouts(record)
    if by_sample is None:
        return f"{name} {by_client:.4f} (mean over clients)"
    if f"{by_sample:.4f}" == f"{by_client:.4f}":
        return f"{name} {by_sample:.4f}"
    return f"{name} {by_sample:.4f} over all samples ({by_client:.4f} is the mean over clients)"


def describe_holdouts(record: RoundRecord) -> str:
    """The metric as the clients that trained reported it of the model that they were sent; "-"
    where nobody did.
    """
    reported = [
        (value, n)
        for value, n in zip(record.evaluation.holdouts, record.evaluation.held, strict=False)
        if value is not None and n
    ]
    metric = record.evaluation.metric
    if not reported:
        return f"{metric} -"
    mean = sum(value for value, _ in reported) / len(reported)
    return f"{metric} {mean:.4f} before the round (hold-outs of clients that trained)"


def format_energy(history: Sequence[RoundRecord]) -> str:
    """The joules of a run, or why there are none."""
    if is_energy_known(history):
        return f"{COSTS['joules'].of_run(history):.1f} J"
    return "energy unknown (no client measures it; device= models it)"


def _describe_final_model(recipe: Recipe) -> str:
    """The model of a run, in words."""
    average, name = recipe.average, type(recipe.average).__name__
    if name == "LastModel":
        return "the last model"
    figures = ", ".join(f"{f.name} {getattr(average, f.name):g}" for f in fields(average) if f.name)  # type: ignore[arg-type]
    return f"an average of the rounds' models ({name}, {figures})"


def list_client_state(recipe: Recipe) -> list[str]:
    """What clients keep with them between rounds, by the pieces that have them do so."""
    # under a strategy of others, clients' own affair
    steps = [] if recipe.chain is None else recipe.chain.links
    links = [link for link in steps if link.ends_rounds and not link.declares_extras]
    code = recipe.compressor
    pieces = [*links, *([code] if code.keeps_state else [])]
    return [*recipe.personal, *(type(piece).__name__ for piece in pieces)]
