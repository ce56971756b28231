"""What came of a run, for somebody at a Python prompt; and of the same run under several seeds."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from flrce.core.cost_table import COSTS, format_joules
from flrce.core.intervals import confidence_interval
from flrce.core.metric_format import format_metric_heading, format_metric_value, metric_unit
from flrce.core.record import RoundRecord, flatten_record
from flrce.errors import BadInput, Diverged, format_install_command
from flrce.models.flat import ModelLayout
from flrce.storage.run_notes import ended_diverged

log = logging.getLogger("flrce")


@dataclass(frozen=True, eq=False, repr=False)
class PersonalModels(Mapping[str, dict[str, Tensor]]):
    """The models of clients that have one of their own, or keep some of its tensors: client -> name
    -> tensor.

    Each is put together when it is asked for.
    """

    where: ModelLayout
    w: Tensor  # (size,) what travels, of the final model
    # of each such client: a whole local vector, or the floats that it keeps
    owns: Mapping[str, Tensor]
    rest: Mapping[str, Tensor]  # fixed tensors that lie in no file

    def __getitem__(self, client: str) -> dict[str, Tensor]:
        own, local = self.owns[client], self.where.local_layout
        whole = own if len(own) == local.size else self.where.join(self.w, own)
        return {
            **self.rest,
            **{name: view.clone() for name, view in local.view_tensors(whole).items()},
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self.owns)

    def __len__(self) -> int:
        return len(self.owns)


@dataclass(frozen=True, repr=False)
class Result:
    """What came of a run. `notes` are what one should know of it beyond the figures.

    `personal` are the models of clients that have one of their own (Ditto, FedPer, FedBN); of a run
    on Flower they stay with the nodes, and of several runs in several processes in their folders.
    """

    summary: dict[str, Any]
    history: tuple[RoundRecord, ...]
    model: dict[str, Tensor]  # name -> tensor, of the final model
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    personal: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def diverged(self) -> str:
        """How training diverged, and what to do; "" where the run did not end that way."""
        return ended_diverged(self.history)

    def __repr__(self) -> str:
        """One line, and the notes."""
        s = self.summary
        metric, value, last = s["metric"], s["value"], s["value_last"]
        judged = (
            "not evaluated" if value is None else f"{metric} {format_metric_value(metric, value)}"
        )
        if last is not None and last != value:
            judged += f" (last model {format_metric_value(metric, last)})"
        ended = f", stopped: {s['stopped']}" if s["stopped"] else ""
        spent = f"{COSTS['bytes'].of_summary(s) / 1e6:.4g} MB, {format_joules(s)}"
        kept = "not kept" if self.folder is None else str(self.folder)
        line = f"Result({judged}, {s['rounds']} rounds{ended}, {spent}, {kept})"
        return "\n".join([line, *(f"note: {note}" for note in self.notes)])

    def to_pandas(self) -> Any:
        """One row per round, indexed by its number; figures of pieces are columns of their own."""
        try:
            import pandas
        except ImportError as why:
            raise BadInput("Result.to_pandas() needs pandas; pip install pandas") from why
        rows = [flatten_record(record) for record in self.history]
        return pandas.DataFrame([row | row.pop("figures") for row in rows]).set_index("t")

    def plot(self, axes: Any = None) -> Any:
        """The primary metric by round, of the last and of the averaged model, and where a rule
        ended it; the axes.

        `result.plot().figure.savefig("run.png")` keeps it.
        """
        try:
            from matplotlib import pyplot
        except ImportError as why:
            raise BadInput(
                f"Result.plot() needs matplotlib; {format_install_command('report')}"
            ) from why
        axes = axes or pyplot.subplots(figsize=(6, 3.5), layout="constrained")[1]
        metric = self.summary["metric"]
        last = [
            (r.t, r.last_model_metric / metric_unit(metric))
            for r in self.history
            if r.last_model_metric is not None
        ]
        averaged = [
            (r.t, r.evaluation.averaged / metric_unit(metric))
            for r in self.history
            if r.evaluation.averaged is not None
        ]
        if last:
            axes.plot(*zip(*last, strict=True), label="last model", linewidth=1.2)
        if averaged:
            axes.plot(*zip(*averaged, strict=True), label="averaged model (final)", linewidth=1.8)
        if self.history and self.history[-1].stop:
            axes.axvline(
                self.history[-1].t, color="black", linewidth=1, linestyle="--", label="stopped"
            )
        axes.set(xlabel="round", ylabel=format_metric_heading(metric))
        if last or averaged:
            axes.legend()
        return axes


def require_training(result: Result) -> Result:
    """The result; Diverged where training diverged, and a warning where its rounds were given up
    for other reasons.
    """
    if result.diverged:
        raise Diverged(result.diverged, result)
    if result.history and result.history[-1].outcome == "abandoned" and result.history[-1].stop:
        done = result.summary["rounds"]
        log.warning(
            "the run ended after %d rounds without enough replies: %s",
            done,
            result.summary["stopped"],
        )
    return result


def list_seed_figures() -> list[str]:
    """The figures of a summary that are averaged over seeds."""
    metrics = ("value", "value_last", "accuracy", "accuracy_last")
    fields = [field for cost in COSTS.values() for field in cost.booked_fields]
    gains = ("computation_efficiency", "communication_efficiency")
    return list(dict.fromkeys((*metrics, *COSTS, *fields, *gains)))


def summarize_seeds(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, half-width of the 95 % interval (Student's t), least and largest of each figure over
    the seeds.
    """
    table: dict[str, Any] = {
        "metric": summaries[0].get("metric", "accuracy") if summaries else "accuracy"
    }
    totals = [{name: cost.of_summary(s) for name, cost in COSTS.items()} for s in summaries]
    summaries = [{**s, **spent} for s, spent in zip(summaries, totals, strict=True)]
    for name in list_seed_figures():
        table[name] = asdict(
            confidence_interval([float(s[name]) for s in summaries if s.get(name) is not None])
        )
    reported = [s.get("figures", {}) for s in summaries]
    names = dict.fromkeys(name for figures in reported for name in figures)
    if names:
        table["figures"] = {
            name: asdict(
                confidence_interval([figures[name] for figures in reported if name in figures])
            )
            for name in names
        }
    return table
