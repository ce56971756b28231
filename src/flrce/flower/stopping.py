"""Our stop rules for any strategy: a function for `Strategy.start(should_stop=...)`, which Flower
has from 1.43 on.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result
from torch import Tensor

from flrce.core.roles import StopRule, explain_wrong_role
from flrce.core.types import RoundEvent, RoundRecord, Updates
from flrce.errors import BadInput
from flrce.flower.arrays import ArrayTemplate
from flrce.flower.metrics import ACCURACY_KEYS, LOSS_KEYS, PERCENT_SCALE, find_metric
from flrce.methods.server.averages import EMA, RunningMeanState

SEEN_FIELDS = ("headway", "seconds")  # of a record besides rounds and metrics
GUARD_REMEDY = "wrap the strategy instead: flrce.flower.Guarded(strategy, stop=...)"
log = logging.getLogger("flwr")


def should_stop(rule: StopRule, metric: str = "") -> "ShouldStop":
    """A rule as `f(server_round, result) -> bool`, called after every round; one for each run.

    It sees the models and metrics of a Result: headway, `metric` (by default whatever is called
    accuracy, of the server or else of the clients; higher is better), rounds, and seconds on this
    machine's clock. Rules on single updates, bytes or joules cannot be asked so.
    """
    _validate_rule(rule)
    return ShouldStop(rule, (metric,) if metric else ACCURACY_KEYS)


@dataclass
class ShouldStop:
    """What a rule has seen of a run."""

    rule: StopRule
    metric: tuple[str, ...]
    reason: str = ""  # why it said stop
    history: list[RoundRecord] = field(default_factory=list)
    template: ArrayTemplate | None = None
    w: Tensor | None = None  # the last model
    average: RunningMeanState | None = None
    clock: float = field(default_factory=time.monotonic)

    def __call__(self, server_round: int, result: Result) -> bool:
        now = time.monotonic()
        figures = _get_round_metrics(result, server_round)
        self.history.append(
            RoundRecord(
                t=server_round,
                exploit=True,
                headway=self._measure_headway(server_round, result.arrays),
                accuracy=find_metric(figures, self.metric, PERCENT_SCALE),
                loss=find_metric(figures, LOSS_KEYS),
                seconds=now - self.clock,
            )
        )
        self.clock = now
        history = self._rescale_accuracies()
        self.reason = self.rule(history) or self.rule.check_next_round(history, [])
        if self.reason:
            log.info("Stopping after round %d: %s", server_round, self.reason)
        return bool(self.reason)

    def _rescale_accuracies(self) -> list[RoundRecord]:
        """What was seen, with accuracies from 0 to 1 where they are in percent."""
        percent = any((h.evaluation.accuracy or 0.0) > 1 for h in self.history)
        if self.metric != ACCURACY_KEYS or not percent:
            return self.history
        return [_rescale_accuracy(h) for h in self.history]

    def _measure_headway(self, t: int, arrays: ArrayRecord) -> float | None:
        """Of the round's step: see methods/server/averages.py. None before there are two models."""
        if not arrays:
            return None
        if self.template is None:
            self.template = ArrayTemplate.from_arrays(arrays)
            self.average = EMA().initial_state(
                0, self.template.layout.trainable, self.template.layout.size
            )
        w, before, average = self.template.pack(arrays), self.w, self.average
        assert average is not None
        nobody = Updates(
            torch.zeros(0, dtype=torch.long),
            w[None, :0],
            torch.zeros(0),
            self.template.layout.trainable,
        )
        event = RoundEvent(t, w if before is None else before, w, nobody, 0)
        self.w, self.average = w, EMA().observe(average, event)
        return EMA().get_headway(self.average)


def _get_round_metrics(result: Result, t: int) -> Mapping[str, Any]:
    """The round's metrics: the server's own judgement counts before the clients'."""
    by_clients, by_server = (
        result.evaluate_metrics_clientapp.get(t),
        result.evaluate_metrics_serverapp.get(t),
    )
    return {**dict(by_clients or {}), **dict(by_server or {})}


def _validate_rule(rule: Any) -> None:
    """BadInput where a rule looks at what a Result does not have."""
    why = explain_wrong_role("stop", rule)
    if why:
        raise BadInput(
            f"should_stop takes a stop rule, such as MarginalGain() or Patience(10): {why}"
        )
    for part in rule.list_rules():
        unseen = [field for field in part.required_fields if field not in SEEN_FIELDS]
        if unseen:
            raise BadInput(
                f"should_stop does not see {' and '.join(unseen)}, which {type(part).__name__}"
                f" needs; {GUARD_REMEDY}"
            )


def _rescale_accuracy(record: RoundRecord) -> RoundRecord:
    seen = record.evaluation
    if seen.accuracy is None:
        return record
    return replace(record, evaluation=replace(seen, accuracy=seen.accuracy / PERCENT_SCALE))
