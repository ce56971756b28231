"""flrce data list | info [NAME] [FILE] | prepare NAME --from DIR"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flrce.cli.options import look_at
from flrce.cli.terminal import print_table
from flrce.config.experiment import Experiment
from flrce.data.preprocessing import format_features
from flrce.data.sources import DATASET_NAMES, is_prepared
from flrce.errors import BadInput, suggest_name
from flrce.simulation.build import with_given_clients


def list_datasets(as_json: bool) -> None:
    """Every data set by name, and whether it is ready to use."""
    from flrce.data import cache
    from flrce.data.sources import FASHION_MNIST_FOLDER

    rows, folder = [], cache.get_data_folder()
    names = {path.name for path in folder.glob("*")} - set(DATASET_NAMES)
    own = sorted(name for name in names if is_prepared(name))
    for name in (*DATASET_NAMES, *own):
        ready = name in ("digits", *own) or (folder / name).is_dir()
        ready = ready or (name == "fashion-mnist" and FASHION_MNIST_FOLDER.is_dir())
        rows.append([name, "ready" if ready else f"flrce data prepare {name} --from DIR"])
    if "images" not in own:
        rows.append(["images", "of your own: flrce data prepare images --from DIR"])
    print_table("data sets", ("name", "state"), rows, as_json)


def show_partition(
    name: str | None,
    file: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
    trust: bool = False,
) -> None:
    """How an experiment shares its samples out: sizes and labels per client."""
    exp = load_named_experiment(name, file, overrides, trust)
    exp, pool = with_given_clients(exp, exp.data.read_source())
    described = exp.federate(pool).describe()
    title = f"{pool.name}: {len(pool.y):,} samples {pool.shape}, {pool.outputs} {pool.kind}"
    title += f"; {exp.data.partition}, seed {exp.seed}"
    if as_json:
        features = {"features": list(pool.features)} if pool.features else {}
        print(json.dumps({**described, **features}))
        return
    print_partition(described, title, len(pool.classes))
    if pool.features:
        print(f"features: {format_features(pool.features)}")


def load_named_experiment(
    name: str | None, file: Path | None, overrides: tuple[str, ...], trust: bool
) -> Experiment:
    """The experiment of a file, with the data set of a name where one is given."""
    if name and not file and name.endswith(".toml"):
        file, name = Path(name), None
    if name and name not in DATASET_NAMES and not is_prepared(name):
        if Path(name).exists():
            hint = f"a file goes by --set data.path={name}"
        else:
            hint = suggest_name(name, DATASET_NAMES)
        raise BadInput(f"data set {name!r} is unknown; {hint}")
    experiment = look_at(file, [*overrides, *([f'data.name="{name}"'] if name else [])], trust)
    if name and experiment.data.path:
        raise BadInput(f"{name} and data.path = {experiment.data.path!r}: leave one of them out")
    return experiment


def print_partition(described: Mapping[str, Any], title: str, classes: int) -> None:
    """One line for each client: its samples, and its labels where they are classes."""
    sizes, labels = described["train"], described.get("labels")
    headings = ["client", "train", "held out", "size"]
    rows = [
        [client, str(train), str(held), format_bar(train, max(sizes))]
        for client, train, held in zip(described["clients"], sizes, described["held"], strict=True)
    ]
    if labels is not None:
        headings.append(f"labels {format_label_range(classes)}")
        for row, counts in zip(rows, labels, strict=True):
            row.append(format_label_histogram(sum_neighbouring_labels(counts)))
    print_table(title, headings, rows)
    if labels is not None:
        print(describe_skew(sizes, labels))


def prepare_dataset(name: str, folder: Path, own: str | None) -> None:
    """Convert a data set's public files once into a checked, memory-mapped cache."""
    from flrce.data import cache

    called = own or name
    plain = called == Path(called).name and not called.startswith(".")
    if not plain or (own in DATASET_NAMES and own != name):
        raise BadInput(f"--as {called!r}: give a plain name that no other data set has")
    place = cache.get_data_folder() / called
    print(f"prepared {cache.prepare_dataset(name, folder, place, progress=True)}")
    print(f'use it with: data.name = "{called}"')


MAX_LABEL_CHARACTERS = 50  # characters for the labels; more of them are pooled


def format_bar(count: int, most: int, width: int = 12) -> str:
    """A size as a bar, in eighths of a character."""
    eighths = round(8 * width * count / max(most, 1)) or 1
    # spaces at its end would be cut
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()).ljust(width, "·")


def sum_neighbouring_labels(labels: list[int]) -> list[int]:
    """Neighbouring labels summed, where there are too many for one character each."""
    step = -(-len(labels) // MAX_LABEL_CHARACTERS)
    return [sum(labels[i : i + step]) for i in range(0, len(labels), step)]


def format_label_range(classes: int) -> str:
    step = -(-classes // MAX_LABEL_CHARACTERS)
    return f"0..{classes - 1}" + (f", {step} a character" if step > 1 else "")


def format_label_histogram(labels: list[int]) -> str:
    """A client's label histogram as one character a class, from nothing to its most frequent."""
    shades, most = "·░▒▓█", max([*labels, 1])
    return "".join(shades[-(-(len(shades) - 1) * count // most)] for count in labels)


def describe_skew(sizes: list[int], labels: list[list[int]]) -> str:
    """The partition in one line: how uneven sizes are, and how many labels a client sees."""
    ordered = sorted(sizes, reverse=True)
    top = -(-len(sizes) // 5)
    seen = sorted(_count_effective_labels(row) for row in labels)
    return (
        f"sizes {min(sizes)} to {max(sizes)}, median {ordered[len(sizes) // 2]}; the largest fifth"
        f" of the clients holds {sum(ordered[:top]) / max(sum(sizes), 1):.0%}; labels a client"
        f" effectively sees: median {seen[len(seen) // 2]:.1f} of {len(labels[0])}"
    )


def _count_effective_labels(labels: list[int]) -> float:
    """Effective number of labels: the inverse of the chance that two samples share one."""
    total = sum(labels)
    return total**2 / sum(count**2 for count in labels) if total else 0.0
