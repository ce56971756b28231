"""Our stop rules for any strategy: a function for `Strategy.start(should_stop=...)`, which Flower has from 1.43 on."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result
from torch import Tensor

from flrce.errors import BadInput
from flrce.flower.arrays import Template
from flrce.flower.figures import ACCURACY, LOSSES, PERCENT, first
from flrce.pieces import StopRule
from flrce.servers.averages import EMA, Mean
from flrce.stops.budget import AnyOf, Budget
from flrce.stops.conflict import Conflicts
from flrce.stops.worth import Worth
from flrce.traits import MeasuresWay, Observes, Refuses, Remembers, holder
from flrce.types import Event, Record, Updates

GUARD = "wrap the strategy instead: flrce.flower.Guarded(strategy, stop=...)"
log = logging.getLogger("flwr")


def should_stop(rule: StopRule, metric: str = "") -> "ShouldStop":
    """A rule as `f(server_round, result) -> bool`, called after every round; one for each run.

    It sees the models and metrics of a Result: headway, `metric` (by default whatever is called accuracy, of the
    server or else of the clients; higher is better), rounds, and seconds on this machine's clock. Rules on single
    updates, bytes or joules cannot be asked so.
    """
    _check(rule)
    return ShouldStop(rule, (metric,) if metric else ACCURACY)


@dataclass
class ShouldStop:
    """What a rule has seen of a run."""

    rule: StopRule
    metric: tuple[str, ...]
    reason: str = ""  # why it said stop
    history: list[Record] = field(default_factory=list)
    template: Template | None = None
    w: Tensor | None = None  # the last model
    average: Mean | None = None
    memory: Any = None  # the rule's own, where it has one
    clock: float = field(default_factory=time.monotonic)

    def __call__(self, server_round: int, result: Result) -> bool:
        now = time.monotonic()
        figures = _figures(result, server_round)
        self.history.append(Record(
            t=server_round, exploit=True, headway=self._headway(server_round, result.arrays), way=self._way(),
            accuracy=first(figures, self.metric, PERCENT), loss=first(figures, LOSSES), seconds=now - self.clock,
        ))  # fmt: skip
        self.clock = now
        history = self._in_scale()
        refused = self.rule.before(history, []) if isinstance(self.rule, Refuses) else ""
        self.reason = self.rule(history) or refused
        if self.reason:
            log.info("Stopping after round %d: %s", server_round, self.reason)
        return bool(self.reason)

    def _in_scale(self) -> list[Record]:
        """What was seen, with accuracies from 0 to 1 where they are in percent."""
        if self.metric != ACCURACY or not any((h.accuracy or 0.0) > 1 for h in self.history):
            return self.history
        return [h if h.accuracy is None else replace(h, accuracy=h.accuracy / PERCENT) for h in self.history]

    def _headway(self, t: int, arrays: ArrayRecord) -> float | None:
        """Of the round's step: see servers/averages.py. None before there are two models."""
        if not arrays:
            return None
        if self.template is None:
            self.template = Template.of(arrays)
            self.average = EMA().init(0, self.template.layout.trainable, self.template.layout.size)
        w, before, average = self.template.pack(arrays), self.w, self.average
        assert average is not None
        nobody = Updates(torch.zeros(0, dtype=torch.long), w[None, :0], torch.zeros(0), self.template.layout.trainable)
        event = Event(t, w if before is None else before, w, nobody, 0)
        self.w, self.average = w, EMA().observe(average, event)
        rule = holder(self.rule)
        if isinstance(rule, Observes) and isinstance(rule, Remembers):  # from the first model that a Result has
            memory = self.memory or rule.init(0, self.template.layout.trainable, self.template.layout.size)
            self.memory = rule.observe(memory, event)
        return EMA().headway(self.average)

    def _way(self) -> float | None:
        """How far the model has come since the first round, where the rule asks for it."""
        rule = holder(self.rule)
        return rule.way(self.memory) if isinstance(rule, MeasuresWay) and self.memory is not None else None


def _figures(result: Result, t: int) -> Mapping[str, Any]:
    """The round's metrics: the server's own judgement counts before the clients'."""
    by_clients, by_server = result.evaluate_metrics_clientapp.get(t), result.evaluate_metrics_serverapp.get(t)
    return {**dict(by_clients or {}), **dict(by_server or {})}


def _check(rule: Any) -> None:
    """BadInput where a rule looks at what a Result does not have."""
    for part in rule.rules if isinstance(rule, AnyOf) else [rule]:
        if isinstance(part, Conflicts):
            raise BadInput(f"conflicts are between single updates, which should_stop does not see; {GUARD}")
        if isinstance(part, Budget) and (part.bytes is not None or part.joules is not None):
            raise BadInput(f"should_stop sees neither bytes nor joules; {GUARD.replace('stop=', 'budget=')}")
        if isinstance(part, Worth) and (part.bytes is not None or part.joules is not None):
            raise BadInput(f"should_stop sees neither bytes nor joules: give Worth(points=...) or seconds; {GUARD}")
        if not callable(part):
            raise BadInput(f"should_stop takes a stop rule, such as Worth() or Patience(10); got {part!r}")
