"""What a stop rule says of a prediction: in percentage points for shares, in the metric's own unit
for others.
"""

from dataclasses import dataclass

from flrce.core.record import SHARES, metric_name

Prediction = tuple[
    float, float, float
]  # points that doubling the rounds is predicted to gain: middle, low, high


@dataclass(frozen=True)
class MetricScale:
    """The metric that a rule's points are about."""

    metric: str = "accuracy"
    lower: bool = False  # whether less of it is better
    unit: float = 0.01  # what a point of it is

    @property
    def in_points(self) -> bool:
        return self.metric in SHARES and not self.lower

    def to_unit(self, points: float) -> float:
        """As many points in the unit that people read."""
        return points if self.in_points else points * self.unit

    def format_amount(self, points: float, digits: int = 1) -> str:
        """An amount of the metric: "1.3 points", "0.042"."""
        return (
            f"{points + 0.0:.{digits}f} points" if self.in_points else f"{self.to_unit(points):.3g}"
        )


def describe_prediction(prediction: Prediction, price: float, scale: MetricScale) -> str:
    """The gain that doubling the rounds is predicted to bring, with its range, and the least that
    is worth them.

    >>> describe_prediction((0.84, 0.21, 1.47), 2.0, MetricScale())
    'predicted gain from doubling the rounds: 0.8 points (0.2 to 1.5); price 2'
    >>> describe_prediction((0.84, 0.21, 1.47), 2.0, MetricScale("mae", True, 0.05))
    'predicted MAE reduction from doubling the rounds: 0.042 (0.0105 to 0.0735); price 0.1'
    """
    if not scale.in_points:
        middle, low, high = (f"{scale.to_unit(points):.3g}" for points in prediction)
        what = f"{metric_name(scale.metric)} {'reduction' if scale.lower else 'gain'}"
        return (
            f"predicted {what} from doubling the rounds: {middle} ({low} to {high}); price"
            f" {scale.to_unit(price):.3g}"
        )
    digits = next(
        (d for d in (1, 2, 3) if round(prediction[2], d) < price), 4
    )  # 1.96 of 2 is not "2.0"
    middle, low, high = (f"{round(points, digits) + 0.0:.{digits}f}" for points in prediction)
    return (
        f"predicted gain from doubling the rounds: {middle} points ({low} to {high}); price"
        f" {price:.3g}"
    )


def describe_evidence(rounds: int, by: str) -> str:
    """Where a trend comes from."""
    return (
        f"the last {rounds} evaluations"
        if by == "evaluations"
        else f"{rounds} rounds of clients' reports"
    )


def describe_no_learning(t: int, by: str) -> str:
    """A run that is no better than at its start."""
    source = "clients' reports" if by == "reports" else "evaluations"
    return (
        f"the model has learnt nothing in {t} rounds, by {source}; a likely cause is a learning"
        " rate that is too small or too large, or wrong labels"
    )
