"""What clients said with their replies: samples, metrics, batteries. Each is a client's own word."""

import math
from collections.abc import Mapping, Sequence

import torch
from flwr.app import MetricRecord
from torch import Tensor

from flrce.flower.figures import LOSSES, first, scale, summed
from flrce.flower.nodes import Client
from flrce.flower.options import Options
from flrce.round.gate import GROWTH, MOST_SAMPLES
from flrce.round.payloads import number
from flrce.types import Record


class Claims:
    """By client, what each said last; of metrics those of the round under way, or of the last one."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.samples: dict[str, int] = {}
        self.metrics: dict[str, MetricRecord] = {}
        self.batteries: dict[str, float] = {}  # levels from 0 to 1
        self.losses: dict[str, float] = {}  # on what each trained on
        self.summed: MetricRecord | None = None  # the round's training metrics, where somebody else made one of them

    def recall(self, samples: Mapping[str, int]) -> None:
        """What clients said to an earlier server: a run that goes on chooses by the same figures."""
        self.samples = {**samples, **self.samples}

    def hear(self, client: Client, metrics: MetricRecord) -> None:
        """The metrics of a reply; of these the loss and the battery's level are remembered for longer."""
        self.metrics[client.name] = metrics
        loss = first(metrics, ("train_loss", *LOSSES))
        if loss is not None:
            self.losses[client.name] = loss
        level = metrics.get("battery")
        if number(level, 0, 1):
            self.batteries[client.name] = float(level)  # type: ignore[arg-type]

    def count(self, client: Client, n: int) -> int:
        """The samples that a client is believed to have, now that it claims n; 0 where that is no number of them."""
        if type(n) is not int or not 0 < n <= MOST_SAMPLES:
            return 0
        before = client.n or self.samples.get(client.name, 0)
        self.samples[client.name] = min(n, GROWTH * before) if before else n
        return self.samples[client.name]

    def own(self, client: str) -> dict[str, object]:
        """The metrics of a client's reply but for its weight, which is the gate's to judge."""
        if client not in self.metrics:
            return {}
        return {name: value for name, value in self.metrics[client].items() if name != self.options.weight_key}

    def levels(self, clients: Sequence[str]) -> Tensor | None:
        """(clients,) batteries as last reported, the others' mean where one did not say; None: nobody did."""
        found = torch.tensor([self.batteries.get(client, math.nan) for client in clients], dtype=torch.float64)
        return None if bool(found.isnan().all()) else found.nan_to_num(float(found.nanmean()))

    def trained(self, record: Record) -> MetricRecord | None:
        """The training metrics of a round as one, from the replies that counted."""
        if self.summed is not None:
            return self.summed
        useful = [self.metrics[client] for client in record.replied if client in self.metrics]
        return summed(useful, self.options.weight_key, self.options.train_sum, scale(useful))
