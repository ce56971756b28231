"""flrce data list | info [NAME] [FILE] | prepare NAME --from DIR"""

from collections.abc import Sequence
from pathlib import Path

from flrce.apps.options import look_at
from flrce.apps.show import table
from flrce.apps.targets import prepare_file
from flrce.data.sources import NAMES, prepared
from flrce.errors import BadInput, nearest


def list_(as_json: bool) -> None:
    """Every data set by name, and whether it is ready to use."""
    from flrce.data import cache
    from flrce.data.sources import FASHION

    rows = []
    own = sorted(folder.name for folder in cache.home().glob("*") if folder.name not in NAMES and prepared(folder.name))
    for name in (*NAMES, *own):
        ready = (
            name in ("digits", *own) or (cache.home() / name).is_dir() or (name == "fashion-mnist" and FASHION.is_dir())
        )
        rows.append([name, "ready" if ready else f"flrce data prepare {name} --from DIR"])
    if "images" not in own:
        rows.append(["images", "of your own: flrce data prepare images --from DIR"])
    table("data sets", ("name", "state"), rows, as_json)


def info(
    name: str | None,
    file: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
    svg: Path | None,
    trust: bool = False,
) -> None:
    """How an experiment shares its samples out: sizes and labels per client."""

    if name and not file and name.endswith(".toml"):
        file, name = Path(name), None
    more = [f'data.name="{name}"'] if name else []
    if name and name not in NAMES and not prepared(name):
        hint = f"a file goes by --set data.path={name}" if Path(name).exists() else nearest(name, NAMES)
        raise BadInput(f"data set {name!r} is unknown; {hint}")
    exp = look_at(file, [*overrides, *more], trust)
    d = exp.data
    if name and d.path:
        raise BadInput(f"{name} and data.path = {str(d.path)!r}: leave one of them out")
    pool = d.read()
    federation = exp.federate(pool)
    described = federation.describe()
    what = f"{pool.outputs} {pool.kind}"
    title = f"{pool.name}: {len(pool.y):,} samples {pool.shape}, {what}; {d.partition}"
    title += f", seed {exp.seed}"
    if svg and "labels" not in described:
        raise BadInput(f"--svg draws who holds which classes, {pool.name} has {pool.kind}; leave it out")
    if svg:
        prepare_file(svg, "--svg")
        from flrce.results.paper.figures import partition

        partition(described, title, svg)
    if as_json:
        import json

        print(json.dumps({**described, "features": list(pool.features)} if pool.features else described))
        return
    if "labels" not in described:
        sizes = [
            [client, str(train), str(held), bar(train, max(described["train"]))]
            for client, train, held in zip(described["clients"], described["train"], described["held"], strict=True)
        ]
        table(title, ("client", "train", "held out", "size"), sizes)
        print_features(pool.features)
        return
    most, rows = max(described["train"]), []
    for client, train, held, labels in zip(
        described["clients"], described["train"], described["held"], described["labels"], strict=True
    ):
        rows.append([client, str(train), str(held), bar(train, most), heat(pooled(labels))])
    table(title, ("client", "train", "held out", "size", f"labels {labelled(len(pool.classes))}"), rows)
    print(skew(described["train"], described["labels"]))
    print_features(pool.features)


def print_features(features: Sequence[str]) -> None:
    """The columns of a table that the model is given."""
    if features:
        named = ", ".join(ascii(name)[1:-1] for name in features[:MOST_NAMES])
        more = f" and {len(features) - MOST_NAMES} more" if len(features) > MOST_NAMES else ""
        print(f"features: {named}{more}")


def prepare(name: str, folder: Path, own: str | None) -> None:
    """Convert a data set's public files once into a checked, memory-mapped cache."""
    from flrce.data import cache

    called = own or name
    if called != Path(called).name or called.startswith(".") or (own in NAMES and own != name):
        raise BadInput(f"--as {called!r}: give a plain name that no other data set has")
    print(f"prepared {cache.prepare(name, folder, cache.home() / called, progress=True)}")
    print(f'use it with: data.name = "{called}"')


MOST_NAMES = 40  # features that are listed
WIDTH = 50  # characters for the labels; more of them are pooled


def bar(count: int, most: int, width: int = 12) -> str:
    """A size as a bar, in eighths of a character."""
    eighths = round(8 * width * count / max(most, 1)) or 1
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()).ljust(width, "·")  # spaces at its end would be cut


def pooled(labels: list[int]) -> list[int]:
    """Neighbouring labels summed, where there are too many for one character each."""
    step = -(-len(labels) // WIDTH)
    return [sum(labels[i : i + step]) for i in range(0, len(labels), step)]


def labelled(classes: int) -> str:
    step = -(-classes // WIDTH)
    return f"0..{classes - 1}" + (f", {step} a character" if step > 1 else "")


def heat(labels: list[int]) -> str:
    """A client's label histogram as one character a class, from nothing to its most frequent."""
    shades, most = "·░▒▓█", max([*labels, 1])
    return "".join(shades[-(-(len(shades) - 1) * count // most)] for count in labels)


def skew(sizes: list[int], labels: list[list[int]]) -> str:
    """The partition in one line: how uneven the sizes are, and how many labels a client really sees."""
    ordered = sorted(sizes, reverse=True)
    top = -(-len(sizes) // 5)
    seen = sorted(_effective(row) for row in labels)
    return (
        f"sizes {min(sizes)} to {max(sizes)}, median {ordered[len(sizes) // 2]}; the largest fifth of the clients "
        f"holds {sum(ordered[:top]) / max(sum(sizes), 1):.0%}; labels a client effectively sees: median "
        f"{seen[len(seen) // 2]:.1f} of {len(labels[0])}"
    )


def _effective(labels: list[int]) -> float:
    """Effective number of labels: the inverse of the chance that two samples share one."""
    total = sum(labels)
    return total**2 / sum(count**2 for count in labels) if total else 0.0
