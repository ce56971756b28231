"""The samples of `plans/savings-fresh.json`: those that the runs of `savings.json` did not have.

    python research/studies/savings_data.py CACHE OUT

CACHE holds whole data sets (`flrce data prepare`); OUT gets their parts. Roles and writers are
taken by rank: roles by the length of their text, writers by their number.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from flrce.data.cache import load_prepared, write_prepared

IMAGES = slice(20_000, 40_000)
GROUPS = {"speech": slice(700, 1400), "mnist-writers": slice(400, 600)}
ROLES = slice(200, 400)


def select_samples(source, rows):
    """The source with these samples only; groups without a sample are left out."""
    if source.group is None:
        return replace(source, x=source.x[rows], y=source.y[rows])
    groups, codes = np.unique(source.group[rows], return_inverse=True)
    names = tuple(source.groups[group] for group in groups)
    return replace(
        source, x=source.x[rows], y=source.y[rows], group=codes.astype(np.int64), groups=names
    )


def list_samples(name, source):
    """Which samples of a data set the study has."""
    if name.startswith("cifar"):
        return np.arange(len(source.y))[IMAGES]
    if name in GROUPS:
        chosen = np.arange(len(source.groups))[GROUPS[name]]
    elif name == "shakespeare-tokens":
        chosen = np.argsort(-np.bincount(source.group), kind="stable")[ROLES]
    else:
        return np.arange(len(source.y))
    return np.flatnonzero(np.isin(source.group, chosen))


def main():
    full, out = map(Path, sys.argv[1:])
    for folder in sorted(path for path in full.iterdir() if (path / "meta.json").exists()):
        source = load_prepared(folder, verify=False)
        part = select_samples(source, list_samples(folder.name, source))
        write_prepared(part, out / folder.name)
        print(part)


if __name__ == "__main__":
    main()
