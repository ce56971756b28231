"""flrce recipes list | show NAME"""

import inspect
import json

from flrce.cli.options import look_at
from flrce.cli.terminal import print_table
from flrce.config.compose import list_recipe_settings
from flrce.core.pieces import describe_piece
from flrce.errors import BadInput
from flrce.methods.catalogue.families import CONTRIBUTED_METHODS, FAMILIES, suggest_replacement
from flrce.methods.catalogue.recipes import CATALOGUE, summarize_recipe


def list_recipes(as_json: bool) -> None:
    """Every recipe with its family and a summary."""
    rows = [
        [family, name, summarize_recipe(name)]
        for family, names in FAMILIES.items()
        for name in names
    ]
    if not as_json:  # a family is named once, before its first method
        rows = [
            ["" if i and rows[i - 1][0] == row[0] else row[0], *row[1:]]
            for i, row in enumerate(rows)
        ]
    print_table("recipes", ("family", "name", "summary"), rows, as_json)


def show_recipe(name: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """One recipe's pieces, as `overrides` change them, what it says of itself, and its own
    settings.
    """
    if name not in CATALOGUE:
        hint = suggest_replacement(name, CATALOGUE, CONTRIBUTED_METHODS)
        raise BadInput(f"recipe {name!r} is unknown; {hint}")
    recipe = (
        look_at(None, [*overrides, f"recipe.name={name}"]).build_recipe()
        if overrides
        else CATALOGUE[name]()
    )
    pieces = {role: describe_piece(piece) for role, piece in recipe.iter_pieces()}
    if as_json:
        print(json.dumps(pieces, indent=1, default=str))
        return
    rows = []
    for role, piece in pieces.items():
        kind = str(piece.pop("piece"))
        rows.append([role, kind, ", ".join(f"{key} = {value}" for key, value in piece.items())])
    more = (inspect.getdoc(CATALOGUE[name]) or "").partition("\n\n")[2]
    print_table(f"{name}: {summarize_recipe(name)}", ("role", "piece", "settings"), rows)
    if more.strip():
        print(more.strip())
    own = [
        f"{key} = {default.default!r}"
        for key, default in list_recipe_settings(CATALOGUE[name]).items()
    ]
    print(f"Settings of this recipe, under [recipe]: {', '.join(own) or 'none'}.")
