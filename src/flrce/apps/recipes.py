"""flrce recipes list | show NAME"""

import json

from flrce.apps.show import table
from flrce.errors import BadInput, nearest
from flrce.pieces import describe
from flrce.recipes import CATALOGUE


def list_(as_json: bool) -> None:
    """Every recipe with one line about it."""
    rows = [[name, (make.__doc__ or "").split("\n")[0]] for name, make in CATALOGUE.items()]
    table("recipes", ("name", "what it is"), rows, as_json)


def show(name: str, as_json: bool) -> None:
    """One recipe's pieces and their settings."""
    if name not in CATALOGUE:
        raise BadInput(f"recipe {name!r} is unknown; {nearest(name, CATALOGUE)}")
    recipe = CATALOGUE[name]()
    pieces = {role: describe(piece) for role, piece in recipe.pieces()}
    if as_json:
        print(json.dumps(pieces, indent=1, default=str))
        return
    rows = []
    for role, piece in pieces.items():
        kind = str(piece.pop("piece"))
        rows.append([role, kind, ", ".join(f"{key} = {value}" for key, value in piece.items())])
    table(f"{name}: {(CATALOGUE[name].__doc__ or '').split(chr(10))[0]}", ("question", "answer", "settings"), rows)
