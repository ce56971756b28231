"""How sure a mean over seeds is: 95 % intervals by Student's t."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def half_width(values: ArrayLike) -> Any:
    """Half the width of the mean's interval, over the first axis; of two values at least."""
    from scipy.special import stdtrit  # a single run needs none of scipy

    array = np.asarray(values, float)
    n = len(array)
    return stdtrit(n - 1, 0.975) * array.std(0, ddof=1) / n**0.5


@dataclass(frozen=True)
class ConfidenceInterval:
    """A mean with the half-width of its 95 % interval (Student's t); one value has no interval."""

    mean: float | None
    half: float | None
    n: int
    low: float | None = None
    high: float | None = None

    @property
    def spread(self) -> float | None:
        """What is drawn around the mean: the interval; of two values how far they lie from it."""
        if self.n == 2 and self.low is not None and self.high is not None:
            return (self.high - self.low) / 2
        return self.half

    def divide_by(self, unit: float) -> "ConfidenceInterval":
        scaled = [
            None if x is None else x / unit for x in (self.mean, self.half, self.low, self.high)
        ]
        return ConfidenceInterval(scaled[0], scaled[1], self.n, scaled[2], scaled[3])

    def format_interval(self, digits: int) -> str:
        if self.mean is None:
            return "--"
        if (digits == 0 or self.n == 2) and self.low is not None and self.high is not None:
            # whole numbers; two have no interval yet
            low, high = (f"{self.low:.{digits}f}", f"{self.high:.{digits}f}")
            return low if low == high else f"{low} to {high}"
        return f"{self.mean:.{digits}f}" + (
            "" if self.half is None else f" ± {self.half:.{digits}f}"
        )


def confidence_interval(values: Sequence[float]) -> ConfidenceInterval:
    """95 % interval of the mean.

    >>> confidence_interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, half=2.484137..., n=3, low=1.0, high=3.0)
    """
    n = len(values)
    if n < 2:
        return ConfidenceInterval(
            values[0] if n else None, None, n, *([values[0]] * 2 if n else ())
        )
    half = float(half_width(values))
    return ConfidenceInterval(float(np.mean(values)), half, n, min(values), max(values))
