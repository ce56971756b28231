"""flrce data list | info NAME | prepare NAME --from DIR"""

from pathlib import Path
from typing import Annotated

import typer

from flrce.apps.options import File, Json, Set, experiment
from flrce.apps.show import table
from flrce.data.sources import NAMES
from flrce.errors import BadInput, nearest

app = typer.Typer(no_args_is_help=True, help="Data sets: which there are, how they are shared out.")


@app.command("list")
def list_(as_json: Json = False) -> None:
    """Every data set by name, and whether it is ready to use."""
    from flrce.data import cache
    from flrce.data.sources import FASHION

    rows = []
    for name in NAMES:
        ready = name == "digits" or (cache.home() / name).is_dir() or (name == "fashion-mnist" and FASHION.is_dir())
        rows.append([name, "ready" if ready else f"flrce data prepare {name} --from DIR"])
    table("data sets", ("name", "state"), rows, as_json)


@app.command()
def info(
    name: Annotated[str | None, typer.Argument(help="A data set; without one, the experiment's.")] = None,
    file: File = None, overrides: Set = None, as_json: Json = False,
) -> None:  # fmt: skip
    """How an experiment shares its samples out: sizes and labels per client."""
    from flrce.data.federation import federate
    from flrce.data.sources import source

    more = [f'data.name="{name}"'] if name else []
    if name and name not in NAMES:
        raise BadInput(f"data set {name!r} is unknown; {nearest(name, NAMES)}")
    exp = experiment(file, [*(overrides or []), *more])
    d = exp.data
    pool = source(d.name, d.path)
    federation = federate(pool, d.partition, exp.clients, exp.seed, d.alpha, d.holdout, d.minimum)
    described = federation.describe()
    if as_json:
        import json

        print(json.dumps(described))
        return
    title = (
        f"{pool.name}: {len(pool.y)} samples {pool.shape}, {len(pool.classes)} classes; {d.partition}, seed {exp.seed}"
    )
    rows = []
    for client, train, held, labels in zip(
        described["clients"], described["train"], described["held"], described["labels"], strict=True
    ):
        rows.append([client, str(train), str(held), heat(labels)])
    table(title, ("client", "train", "held out", "labels"), rows)


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="A data set from `flrce data list`.")],
    folder: Annotated[Path, typer.Option("--from", help="Folder with the set's public files.")],
) -> None:
    """Convert a data set's public files once into a checked, memory-mapped cache."""
    from flrce.data import cache

    print(f"prepared {cache.prepare(name, folder, progress=True)}")


def heat(labels: list[int]) -> str:
    """A client's label histogram as one character a class, from nothing to its most frequent."""
    shades, most = " .:-=+*#%@", max([*labels, 1])
    return "".join(shades[-(-(len(shades) - 1) * count // most)] for count in labels)
