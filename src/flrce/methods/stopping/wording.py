"""What a stop rule says of a prediction: in percentage points for shares, in percent for
perplexity, in the metric's own unit for others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flrce.core.metric_format import SHARES, format_metric_name, format_metric_value
from flrce.core.record import RoundRecord
from flrce.methods.stopping.gains import MeasuredGain
from flrce.methods.stopping.trend import LOG_METRICS

Prediction = tuple[
    float, float, float
]  # points that doubling the rounds is predicted to gain: middle, low, high
CHANGE_THRESHOLD_ERRORS = 2.0  # errors within which a measured gain is not called a change


@dataclass(frozen=True)
class MetricScale:
    """The metric that a rule's points are about."""

    metric: str = "accuracy"
    lower: bool = False  # whether less of it is better
    unit: float = 0.01  # what a point of it is

    @property
    def name(self) -> str:
        return format_metric_name(self.metric)

    @property
    def in_points(self) -> bool:
        return self.metric in SHARES and not self.lower

    def to_unit(self, points: float) -> float:
        """As many points in the unit that people read."""
        return points if self.in_points or self.metric in LOG_METRICS else points * self.unit

    def format_number(self, points: float, digits: int = 1) -> str:
        """An amount without its unit: "1.3", "0.042"."""
        if self.in_points or self.metric in LOG_METRICS:
            return f"{round(points, digits) + 0.0:.{digits}f}"
        return f"{self.to_unit(points):.3g}"

    def format_amount(self, points: float, digits: int = 1) -> str:
        """An amount of the metric: "1.3 points", "2.5 %", "0.042"."""
        unit = " points" if self.in_points else " %" if self.metric in LOG_METRICS else ""
        return self.format_number(points, digits) + unit


def describe_prediction(prediction: Prediction, price: float, scale: MetricScale) -> str:
    """The gain that doubling the rounds is predicted to bring, with its range, and the least that
    is worth them.

    >>> describe_prediction((0.84, 0.21, 1.47), 2.0, MetricScale())
    'Predicted gain from doubling the rounds: 0.8 points (0.2 to 1.5); your price is 2'
    >>> describe_prediction((0.84, 0.21, 1.47), 2.0, MetricScale("mae", True, 0.05))
    'Predicted MAE reduction from doubling the rounds: 0.042 (0.0105 to 0.0735); your price is 0.1'
    >>> describe_prediction((0.84, 0.21, 1.47), 2.0, MetricScale("perplexity", True, 3.2))
    'Predicted Perplexity reduction from doubling the rounds: 0.8 % (0.2 to 1.5); your price is 2'
    >>> describe_prediction((2.4667, -0.7, 5.6), 2.0, MetricScale())
    'Predicted gain from doubling the rounds: 2.5 points (-0.7 to 5.6); your price is 2'
    """
    middle, low, high = prediction
    noun = "gain" if scale.in_points else f"{scale.name} {'reduction' if scale.lower else 'gain'}"
    digits = 1
    if middle < price:  # 1.96 of 2 is not "2.0"
        digits = next((d for d in (1, 2, 3) if round(middle, d) < price), 4)
    amount = scale.format_amount(middle, digits)
    ends = f"{scale.format_number(low)} to {scale.format_number(high)}"
    limit = f"{scale.to_unit(price):.3g}"
    return f"Predicted {noun} from doubling the rounds: {amount} ({ends}); your price is {limit}"


def describe_change(
    done: Sequence[RoundRecord], measured: MeasuredGain, by: str, scale: MetricScale
) -> str:
    """What the evaluations of the whole run and the last doubling of the rounds show."""
    judged = [h for h in done if h.final_model_metric is not None]
    text = ""
    if len(judged) > 1:
        values = [format_metric_value(scale.metric, h.final_model_metric) for h in judged]
        text = (
            f"{scale.name} of the final model was {values[0]} in round {judged[0].t} and"
            f" {values[-1]} in round {judged[-1].t}. "
        )
    width = CHANGE_THRESHOLD_ERRORS * measured.error  # the range that is printed decides
    size = f"{scale.format_number(abs(measured.gain), 2)} ± {scale.format_amount(width, 2)}"
    if abs(measured.gain) <= width or not measured.gain:
        verb = f"did not change measurably ({'-' if measured.gain < 0 else '+'}{size})"
    else:
        verb = f"{'improved' if measured.gain > 0 else 'became worse'} by {size}"
    return (
        f"{text}Over the last doubling of the rounds it {verb}, {describe_evidence(measured, by)}."
    )


def describe_evidence(measured: MeasuredGain, by: str) -> str:
    """Where a measured gain comes from."""
    if by == "evaluations":
        return f"by {measured.count} evaluations of the final model"
    return f"by the reports of {measured.count} clients, each compared with itself"


def describe_no_learning(t: int, by: str) -> str:
    """A run that is no better than in its first rounds."""
    source = "clients' reports" if by == "reports" else "evaluations"
    return (
        f"the model has not improved measurably in {t} rounds, by {source}: it learnt in its first"
        " rounds, or not at all; likely causes of the latter: a learning rate that is too small or"
        " too large, or wrong labels"
    )
