"""What clients said with their replies: samples, metrics, batteries. Each is a client's own
word.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from flwr.app import MetricRecord
from torch import Tensor

from flrce.core.gate import MAX_SAMPLE_RATIO, MAX_SAMPLES_PER_CLIENT
from flrce.core.payloads import is_finite_number
from flrce.core.types import RoundRecord
from flrce.flower.client_metrics import (
    LOSS_KEYS,
    aggregate_metrics,
    find_accuracy_scale,
    find_metric,
)
from flrce.flower.nodes import ConnectedClient
from flrce.flower.options import FlowerOptions


class ClientReports:
    """By client, what each said last; of metrics those of the round under way, or of the last
    one.
    """

    def __init__(self, options: FlowerOptions) -> None:
        self.options = options
        self.samples: dict[str, int] = {}
        self.metrics: dict[str, MetricRecord] = {}
        self.batteries: dict[str, float] = {}  # levels from 0 to 1
        self.losses: dict[str, float] = {}  # on what each trained on
        # the round's training metrics, where somebody else made one of them
        self.summed: MetricRecord | None = None

    def restore_sample_counts(self, samples: Mapping[str, int]) -> None:
        """What clients said to an earlier server: a run that goes on chooses by the same
        figures.
        """
        self.samples = {**samples, **self.samples}

    def record_metrics(self, client: ConnectedClient, metrics: MetricRecord) -> None:
        """The metrics of a reply; of these the loss and the battery's level are remembered for
        longer.
        """
        self.metrics[client.name] = metrics
        loss = find_metric(metrics, ("train_loss", *LOSS_KEYS))
        if loss is not None:
            self.losses[client.name] = loss
        level = metrics.get("battery")
        if is_finite_number(level, 0, 1):
            self.batteries[client.name] = float(level)  # type: ignore[arg-type]

    def accept_sample_count(self, client: ConnectedClient, n: int) -> int:
        """The samples that a client is believed to have, now that it claims n; 0 where that is no
        number of them.
        """
        if type(n) is not int or not 0 < n <= MAX_SAMPLES_PER_CLIENT:
            return 0
        before = client.n or self.samples.get(client.name, 0)
        self.samples[client.name] = min(n, MAX_SAMPLE_RATIO * before) if before else n
        return self.samples[client.name]

    def get_client_metrics(self, client: str) -> dict[str, object]:
        """The metrics of a client's reply but for its weight, which is the gate's to judge."""
        if client not in self.metrics:
            return {}
        return {
            name: value
            for name, value in self.metrics[client].items()
            if name != self.options.weight_key
        }

    def battery_levels(self, clients: Sequence[str]) -> Tensor | None:
        """(clients,) batteries as last reported, the others' mean where one did not say; None:
        nobody did.
        """
        found = torch.tensor(
            [self.batteries.get(client, math.nan) for client in clients], dtype=torch.float64
        )
        return None if bool(found.isnan().all()) else found.nan_to_num(float(found.nanmean()))

    def aggregate_training_metrics(self, record: RoundRecord) -> MetricRecord | None:
        """The training metrics of a round as one, from the replies that counted."""
        if self.summed is not None:
            return self.summed
        useful = [self.metrics[client] for client in record.replied if client in self.metrics]
        return aggregate_metrics(
            useful, self.options.weight_key, self.options.train_sum, find_accuracy_scale(useful)
        )
