"""How selections compare in traces: `python studies/selections.py FILE...`; paired differences to uniform sampling."""

import gzip
import json
import sys
from collections import defaultdict

import numpy as np


def main(files):
    runs = defaultdict(dict)
    for file in files:
        with gzip.open(file, "rt") as f:
            for row in map(json.loads, f):
                runs[row["dataset"], row["regime"], row["recipe"]][row["seed"]] = row["series"]
    for (dataset, regime, recipe), found in sorted(runs.items()):
        base = runs[dataset, regime, "uniform"]
        cells = [f"{dataset} {regime} {recipe} ({len(found)})"]
        for field in ("accuracy", "averaged"):
            ours = np.array([at(found[s][field]) for s in sorted(found)])
            cells.append(f"{field} " + " ".join(f"{x:.1f}" for x in ours.mean(0)))
            seeds = sorted(set(found) & set(base))
            if seeds and recipe != "uniform":
                gaps = np.array([at(found[s][field]) - at(base[s][field]) for s in seeds])
                half = 2.262 * gaps.std(0, ddof=1) / len(seeds) ** 0.5 if len(seeds) > 1 else gaps.std(0)
                cells.append("gap " + " ".join(f"{m:+.2f}±{h:.2f}" for m, h in zip(gaps.mean(0), half, strict=True)))
        print(" | ".join(cells), flush=True)


def at(series):
    known = [(t, 100 * v) for t, v in enumerate(series, 1) if v is not None]
    return np.array([[v for t, v in known if t <= T][-1] for T in (20, 40, 60, 80, 100)])


if __name__ == "__main__":
    main(sys.argv[1:])
