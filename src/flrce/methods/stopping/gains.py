"""What the last doubling of the rounds gained, with an error that knows serial correlation.

Successive evaluations of an averaged model are nearly copies of one another. So nothing here counts
evaluations: a *level* is the mean over a block of rounds, a block is at least a sweep and at least
as long as the server average remembers, and the error of a level is what blocks scatter by. The
verdict is then the same, up to noise, for any `eval_every`.

From clients' reports on the model they were sent, every client is compared with itself: its mean in
the last block against its mean in the block that ended at half the rounds. Clients differ more from
one another than rounds do, and a paired difference is free of that. All clients weigh the same,
whatever number of samples they claim.
"""

import math
from dataclasses import dataclass

import numpy as np

from flrce.methods.stopping.trend import FloatArray, MetricReports

# rounds in a block, or a sweep if that is longer: an EMA of decay 0.9 remembers about ten rounds
MIN_BLOCK_ROUNDS = 12
# points: the scatter of a block's level before blocks are compared, worth PRIOR_BLOCKS of them
PRIOR_SCATTER_POINTS = 0.5
PRIOR_BLOCKS = 1
MIN_CURVE_BLOCKS = 5  # blocks in the last two doublings that a curve is fitted to
OUTLIER_SCALES = 6.0  # robust deviations from the median within which a client's gain is believed
TRIMMED_SHARE = 0.3  # of the clients at either end that the trimmed mean leaves out
LOOKS_PER_DOUBLING = 15  # looks while the rounds grow by a factor of 2, at most


@dataclass(frozen=True)
class MeasuredGain:
    """A difference of two levels in units of the metric, more is better, with its error."""

    gain: float
    error: float
    count: int  # clients that were compared with themselves, or evaluations in the two blocks

    def divide_by(self, unit: float) -> "MeasuredGain":
        return MeasuredGain(self.gain / unit, self.error / unit, self.count)


def compute_block_rounds(sweep: float) -> int:
    """Rounds whose mean is a level."""
    return max(math.ceil(sweep - 1e-9), MIN_BLOCK_ROUNDS)


def measure_evaluation_gain(
    found: MetricReports, t: int, block: int, unit: float
) -> MeasuredGain | None:
    """The gain of the evaluated model since round t / 2; None before two blocks."""
    if not _spans_doubling(found, t, block):
        return None
    scatter = _compute_block_scatter(found, t, block, unit)
    now, before = (compute_level(found, end, block) for end in (t, t / 2))
    count = sum(len(_select_window(found, end, block)) for end in (t, t / 2))
    return MeasuredGain(now - before, scatter, count)


def measure_total_evaluation_gain(
    found: MetricReports, t: int, block: int, unit: float
) -> MeasuredGain | None:
    """The gain since the first evaluation."""
    if not _spans_doubling(found, t, block):
        return None
    level = compute_level(found, t, block)
    scatter = _compute_block_scatter(found, t, block, unit)
    return MeasuredGain(level - float(found.value[0]), scatter, len(found.t))


def compute_level(found: MetricReports, end: float, block: int) -> float:
    """The mean over the block that ends in round `end`; the last value before it if it is empty."""
    window = _select_window(found, end, block)
    return float(window.mean()) if len(window) else math.nan


def _select_window(found: MetricReports, end: float, block: int) -> FloatArray:
    high = int(np.searchsorted(found.t, end, side="right"))
    low = int(np.searchsorted(found.t, end - block, side="right"))
    return found.value[min(low, max(high - 1, 0)) : high]


def _spans_doubling(found: MetricReports, t: int, block: int) -> bool:
    return len(found.t) > 1 and t >= 2 * block and bool(found.t[0] <= t / 2)


def _compute_block_scatter(found: MetricReports, t: int, block: int, unit: float) -> float:
    """What the levels of blocks scatter by about a parabola in log2 t over the last two doublings.

    PRIOR_SCATTER_POINTS stands for blocks that are not there yet.
    """
    ends = np.arange(t, t / 4 + block - 1e-9, -block)
    levels = np.array([compute_level(found, float(end), block) for end in ends])
    finite = np.isfinite(levels)
    levels, middles = levels[finite], np.log2(ends[finite] - block / 2 + 0.5)
    squares, freedom = 0.0, 0
    if len(levels) >= MIN_CURVE_BLOCKS:
        powers = np.vander(middles - middles.mean(), 3)
        rest = levels - powers @ np.linalg.lstsq(powers, levels, rcond=None)[0]
        squares, freedom = float(rest @ rest), len(levels) - 3
    prior = PRIOR_BLOCKS * (PRIOR_SCATTER_POINTS * unit) ** 2
    return math.sqrt((prior + squares) / (PRIOR_BLOCKS + freedom))


def measure_report_gain(
    found: MetricReports, t: int, block: int, trimmed: bool = False
) -> MeasuredGain | None:
    """The clients' mean gain since round t / 2, each compared with itself; None before two
    blocks, or where fewer than two clients spoke in both.
    """
    if t < 2 * block:
        return None
    return compare_blocks(found, t, t / 2, block, trimmed)


def compare_blocks(
    found: MetricReports, end: float, before: float, block: int, trimmed: bool = False
) -> MeasuredGain | None:
    """Paired differences between two blocks of rounds, of the clients that spoke in both."""
    M = int(found.k.max()) + 1 if len(found.k) else 0
    difference = _average_clients(found, end, block, M) - _average_clients(found, before, block, M)
    pairs = difference[np.isfinite(difference)]
    if len(pairs) < 2:
        return None
    if trimmed:
        return _trim(pairs)
    believed = bound_outliers(pairs)
    error = float(believed.std(ddof=1)) / math.sqrt(len(pairs))
    return MeasuredGain(float(believed.mean()), error, len(pairs))


def bound_outliers(pairs: FloatArray) -> FloatArray:
    """Every client's gain drawn to within OUTLIER_SCALES of the median."""
    middle = float(np.median(pairs))
    usual = float(np.median(np.abs(pairs - middle))) * 1.4826
    reach = OUTLIER_SCALES * max(usual, float(np.sqrt(np.mean(np.square(pairs)))) / 2)
    believed: FloatArray = np.clip(pairs, middle - reach, middle + reach)
    return believed


def _trim(pairs: FloatArray) -> MeasuredGain:
    """The mean without TRIMMED_SHARE of the clients at either end: so many liars cannot take it
    beyond what honest clients say. Its error is Tukey and McLaughlin's, from winsorised pairs.
    """
    cut, ordered = int(TRIMMED_SHARE * len(pairs) + 1e-9), np.sort(pairs)
    kept = ordered[cut : len(pairs) - cut]
    spread = float(np.clip(ordered, kept[0], kept[-1]).std(ddof=1))
    error = spread / ((1 - 2 * TRIMMED_SHARE) * math.sqrt(len(pairs)))
    return MeasuredGain(float(kept.mean()), error, len(pairs))


def _average_clients(found: MetricReports, end: float, block: int, M: int) -> FloatArray:
    """(M,) each client's mean report in the block that ends in round `end`; nan: it said
    nothing.
    """
    low, high = (int(np.searchsorted(found.t, at, side="right")) for at in (end - block, end))
    k, value = found.k[low:high], found.value[low:high]
    count = np.bincount(k, minlength=M)
    total = np.bincount(k, value, minlength=M)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def compute_uniform_width(t: int, block: int, freedom: int, alpha: float) -> float:
    """Errors that an interval must reach for all looks of a run together to hold it with
    probability 1 - alpha.

    The j-th doubling after the first look spends alpha / (j (j + 1)), shared by its looks: a
    union bound, so it holds however looks depend on one another.
    """
    from scipy.stats import t as student

    j = 1 + max(math.floor(math.log2(t / (2 * block))), 0)
    share = alpha / (j * (j + 1) * LOOKS_PER_DOUBLING)
    return float(student.isf(share / 2, max(freedom, 1)))
