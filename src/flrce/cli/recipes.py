"""flrce recipes list | show NAME"""

import inspect
import json

from flrce.cli.options import look_at
from flrce.cli.terminal import print_table
from flrce.config.compose import list_recipe_settings
from flrce.core.pieces import describe_piece
from flrce.errors import BadInput
from flrce.methods.catalogue.families import (
    CONTRIBUTED_METHODS,
    FAMILIES,
    FORMER_NAMES,
    describe_evidence,
    suggest_replacement,
)
from flrce.methods.catalogue.recipes import CATALOGUE, summarize_recipe

EVIDENCE_NOTE = (
    "verified: run = the authors' released function gives the same; code, paper, abstract = read;"
    " recalled = a reconstruction from memory of the paper; ours. Details: docs/methods.md. Methods"
    f" known from abstracts only are in examples/contrib: {', '.join(CONTRIBUTED_METHODS)}."
)


def list_recipes(as_json: bool) -> None:
    """Every recipe with its family and a summary."""
    rows = []
    for family, names in FAMILIES.items():
        for i, name in enumerate(names):  # a person reads a family once, before its first method
            family_shown = family if as_json or not i else ""
            rows.append([family_shown, name, describe_evidence(name), summarize_recipe(name)])
    print_table("recipes", ("family", "name", "verified", "summary"), rows, as_json)
    if not as_json:
        print(EVIDENCE_NOTE)


def show_recipe(name: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """One recipe's pieces with these overrides, its documentation and its settings."""
    name = FORMER_NAMES.get(name, name)
    if name not in CATALOGUE:
        hint = suggest_replacement(name, CATALOGUE, CONTRIBUTED_METHODS)
        raise BadInput(f"recipe {name!r} is unknown; {hint}")
    if overrides:
        recipe = look_at(None, [*overrides, f"recipe.name={name}"]).build_recipe()
    else:
        recipe = CATALOGUE[name]()
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
    settings = list_recipe_settings(CATALOGUE[name])
    own = [f"{key} = {parameter.default!r}" for key, parameter in settings.items()]
    print(f"Settings of this recipe, under [recipe]: {', '.join(own) or 'none'}.")
