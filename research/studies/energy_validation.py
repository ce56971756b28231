"""Forms of an energy model against energy that others measured.

    python research/studies/energy_validation.py            # replays, writes results/energy/validation.csv

`zeus_power.csv` holds 1,609 measured rows of the public power traces of Zeus (NSDI 2023,
github.com/ml-energy/zeus, commit 75a8b93, examples/research_reproducibility/zeus_nsdi23/trace,
Apache-2.0): six networks on four GPUs, seconds of an epoch and mean power by batch size, optimiser
and power limit. Within each GPU, network and power limit, every batch size is predicted by a fit of
the others:

- one power: seconds of an epoch are a + b / batch size, power is the median: a profile with
  `active_watts` alone;
- two powers: the same seconds, power is P_over + (P_work - P_over) u, where u is the share of the
  time that grows with the work: a profile with `overhead_watts` too.
"""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "results" / "energy"
MIN_SIZES = 4  # batch sizes of a group; fewer leave nothing to fit


def read_rows(path=FOLDER / "zeus_power.csv"):
    """(gpu, network, limit) -> (n, 3) of batch size, seconds of an epoch, watts."""
    groups = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            values = [float(row[name]) for name in ("batch", "seconds", "watts")]
            groups[row["gpu"], row["network"], row["limit"]].append(values)
    return {key: np.array(rows) for key, rows in groups.items()}


def fit_line(x, y):
    """(a, b) of y = a + b x by least relative squares."""
    A = np.stack([np.ones_like(x), x], 1) / y[:, None]
    return np.linalg.lstsq(A, np.ones_like(y), rcond=None)[0]


def predict(rest, sizes, two_powers):
    """(n,) joules of an epoch at these batch sizes by a fit of the rows `rest`."""
    batch, seconds, watts = rest.T
    a, b = fit_line(1 / batch, seconds)

    def work_share(size):
        return np.clip(a / (a + b / size), 0.0, 1.0)

    if two_powers:
        low, slope = fit_line(work_share(batch), watts)
        power = low + slope * work_share(sizes)
    else:
        power = np.median(watts)
    return (a + b / sizes) * power


def measure_errors(groups, two_powers):
    """(n,) relative errors of every row, each predicted without its batch size."""
    errors = []
    for rows in groups.values():
        sizes = np.unique(rows[:, 0])
        for size in sizes if len(sizes) >= MIN_SIZES else ():
            out, rest = rows[rows[:, 0] == size], rows[rows[:, 0] != size]
            truth = out[:, 1] * out[:, 2]
            errors += (predict(rest, out[:, 0], two_powers) / truth - 1).tolist()
    return np.abs(errors)


def summarize(groups):
    """A row for each form and GPU: median, 90th percentile and worst of the errors."""
    lines = []
    for gpu in ("all", *sorted({key[0] for key in groups})):
        some = {key: rows for key, rows in groups.items() if gpu in ("all", key[0])}
        for form, two_powers in (("one power", False), ("two powers", True)):
            errors = measure_errors(some, two_powers)
            figures = (np.median(errors), np.quantile(errors, 0.9), errors.max())
            lines.append([gpu, form, len(errors), *(f"{100 * x:.1f}" for x in figures)])
    return lines


def main():
    lines = summarize(read_rows())
    heads = ["gpu", "form", "rows", "median error %", "90th percentile %", "worst %"]
    with (FOLDER / "validation.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([heads, *lines])
    for line in [heads, *lines]:
        print(" | ".join(map(str, line)))


if __name__ == "__main__":
    main()
