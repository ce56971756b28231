"""The data sets of the advice study, as (x, y) or (x, y, group)."""

import numpy as np

SITES, SITE_ROWS = 12, 3_000  # a table from several sites
SYNTHETIC_DEVICES = 30
WINDOW, STRIDE = 128, 64  # readings of a smartwatch, 50 a second


def prepare_tasks(raw, out):
    """Every data set as one npz in `out`; `raw` holds the files of those that no package ships."""
    out.mkdir(parents=True, exist_ok=True)
    for name, build in BUILDERS.items():
        np.savez_compressed(
            out / f"{name}.npz", **dict(zip(("x", "y", "group"), build(raw), strict=False))
        )


def load_task_data(name, folder):
    with np.load(f"{folder}/{name}.npz") as file:
        return tuple(file[key] for key in ("x", "y", "group") if key in file)


def scale_columns(x):
    """Zero mean and unit variance; missing values become the mean."""
    x = np.asarray(x, np.float64)
    scaled = (x - np.nanmean(x, 0)) / (np.nanstd(x, 0) + 1e-9)
    return np.nan_to_num(scaled).astype(np.float32)


def build_wine(folder):
    from sklearn.datasets import load_wine

    data = load_wine()
    return scale_columns(data.data), data.target


def build_breast_cancer(folder):
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    return scale_columns(data.data), data.target


def build_digits(folder):
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images[:, None] / 16).astype(np.float32), data.target


def build_heart(folder):
    with np.load(folder / "heart.npz") as file:
        return scale_columns(file["x"]), file["y"], file["group"]


def build_vowel(folder):
    with np.load(folder / "tabular.npz") as file:
        y = file["vowel_y"].astype(np.int64)
        return scale_columns(file["vowel_x"]), y - y.min(), file["vowel_speaker"]


def build_femnist(folder):
    """At most 100 samples of each of the 31 clients."""
    with np.load(folder / "femnist.npz") as file:
        x, y, group = (file[key] for key in ("x", "y", "client"))
    rng = np.random.default_rng(0)
    keep = np.concatenate([rng.permutation(np.flatnonzero(group == g))[:100] for g in set(group)])
    return (x[keep].reshape(-1, 1, 28, 28) / 255).astype(np.float32), y[keep], group[keep]


def build_chars74k(folder):
    with np.load(folder / "chars74k.npz") as file:
        return (file["x"] / 255).astype(np.float32), file["y"], file["writer"]


def build_smartwatch(folder):
    """Windows of 2.56 s, each as 30 numbers: five statistics of six axes."""
    rows, labels, subjects = [], [], []
    with np.load(folder / "smartwatch.npz") as file:
        x, offset = file["x"].astype(np.float32), file["offset"]
        for i, (label, subject) in enumerate(zip(file["y"], file["subject"], strict=True)):
            series = x[offset[i] : offset[i + 1]]
            for start in range(0, len(series) - WINDOW + 1, STRIDE):
                part = series[start : start + WINDOW]
                change = np.abs(np.diff(part, axis=0)).mean(0)
                rows.append([part.mean(0), part.std(0), part.min(0), part.max(0), change])
                labels.append(label)
                subjects.append(subject)
    return (
        scale_columns(np.array(rows).reshape(len(rows), -1)),
        np.array(labels, np.int64),
        np.array(subjects),
    )


def build_sites(folder):
    """3,000 rows from 12 sites: each shifts the inputs and prefers some of five classes."""
    rng = np.random.default_rng(42)
    site = rng.integers(0, SITES, SITE_ROWS)
    x = rng.normal(size=(SITE_ROWS, 20)) + 0.7 * rng.normal(size=(SITES, 20))[site]
    hidden = np.tanh(x @ rng.normal(size=(20, 16)) / 2)
    scores = hidden @ rng.normal(size=(16, 5)) + rng.normal(size=(SITES, 5))[site]
    y = (scores + 0.5 * rng.normal(size=scores.shape)).argmax(1)
    return scale_columns(x), y, site


def build_synthetic(folder):
    """Synthetic(1, 1) of Li et al. (FedProx, 2020): inputs and labels differ by device."""
    rng = np.random.default_rng(7)
    rows, labels, devices = [], [], []
    scales = np.diag(np.arange(1, 61, dtype=float) ** -1.2)
    for device in range(SYNTHETIC_DEVICES):
        u, b = rng.normal(0, 1), rng.normal(0, 1)
        n = int(min(rng.lognormal(4, 1) + 40, 400))
        weights, bias = rng.normal(u, 1, (60, 10)), rng.normal(u, 1, 10)
        x = rng.multivariate_normal(rng.normal(b, 1, 60), scales, n)
        rows.append(x)
        labels.append((x @ weights + bias).argmax(1))
        devices.append(np.full(n, device))
    return np.concatenate(rows).astype(np.float32), np.concatenate(labels), np.concatenate(devices)


BUILDERS = {
    "wine": build_wine,
    "breast-cancer": build_breast_cancer,
    "digits": build_digits,
    "heart": build_heart,
    "vowel": build_vowel,
    "femnist": build_femnist,
    "chars74k": build_chars74k,
    "smartwatch": build_smartwatch,
    "sites": build_sites,
    "synthetic": build_synthetic,
}
