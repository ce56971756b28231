"""A metric of one's own and a stop rule on it: training ends once the worst class does well.

    rounds = 40
    clients = 8
    per_round = 4
    data.alpha = 1.0
    [objective]
    name = "classification"
    metrics = ["accuracy", "stop_on_metric:WORST"]
    [recipe]
    name = "fedavg"
    stop = { piece = "stop_on_metric:Reached", metric = "worst-recall", value = 0.5 }

    $ PYTHONPATH=examples/extensions flrce run experiment.toml

From Python: `replace(recipes.fedavg(P=4), stop=Reached("worst-recall", 0.5))`. A stop reads nothing
but the records, so it can be asked about those of a finished run: `Reached()(result.history)`.
"""

from dataclasses import dataclass

import numpy as np

from flrce import StopRule
from flrce.training.metrics import Metric, class_pairs


def worst_recall(pairs):
    """The lowest recall of any class; pairs (n, 2): predicted and true class."""
    hits = pairs[:, 0] == pairs[:, 1]
    return float(min(hits[pairs[:, 1] == c].mean() for c in np.unique(pairs[:, 1])))


WORST = Metric("worst-recall", class_pairs, worst_recall, low=0, high=1)


@dataclass(frozen=True)
class Reached(StopRule):
    """Stop once a metric over all samples reaches `value`; "": the primary metric."""

    metric: str = ""
    value: float = 0.5

    def __call__(self, history):
        last = history[-1]
        found = last.pooled.get(self.metric) if self.metric else last.final_model_metric
        if found is None:  # not judged in this round
            return ""
        down = last.lower and not self.metric
        good = found <= self.value if down else found >= self.value
        return f"{self.metric or last.metric} {found:.3f} reached {self.value:g}" if good else ""
