"""From names to pieces: the catalogue's recipes, with the pieces of an experiment file."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any

from flrce.config.recipe_names import DEFAULT_RECIPE
from flrce.core.bounds import SettingsSchema, format_value, get_schema, make_schema
from flrce.core.piece_checks import explain_renamed_method
from flrce.core.pieces import Recipe
from flrce.core.roles import ROLES, explain_wrong_role
from flrce.core.user_code import has_member, import_object, is_own_class, validate_factory
from flrce.devices.cost_models import CostModel
from flrce.errors import BadInput, format_one_line, suggest_name
from flrce.methods.catalogue.families import (
    CONTRIBUTED_METHODS,
    CONTRIBUTED_PIECES,
    FORMER_NAMES,
    suggest_replacement,
)
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.methods.own_pieces import find_inner_role
from flrce.methods.registry import PIECES
from flrce.methods.stopping.budget import AnyOf, CostBudget
from flrce.training.links import explain_wrong_link
from flrce.training.metrics import MetricLike
from flrce.training.objectives import OBJECTIVES, OBJECTIVES_BY_KIND, Objective
from flrce.training.optimizers import SGD, Adam, GradientClip, Momentum, PersistentLink, WeightDecay
from flrce.training.update_chain import UpdateChain

LOCAL_WORK_KEYS = ("epochs", "batch", "lr")
#: trainers of version 0.1, whose tables could hold what [train] holds now
OLD_TRAINERS = (
    *("sgd", "fill-the-round", "fewer-epochs", "proximal", "freeze", "deadline", "corrected"),
)
# role -> the piece that a list stands for, and its field
COMBINED_ROLES = {"trainer": ("combined", "trainers"), "stop": ("any", "rules")}
RECIPE_FLAGS = ("holdouts", "sums")  # of any recipe: true or false
ROLE_METHODS = {  # of kinds of piece without a base class
    "schedule": "__call__",
    "augment": "__call__",
    "availability": "find_next_change",
    "trouble": "apply_to_fleet",
    "battery": "compute_levels",
    "costs": "price",
}


def compose_recipe(
    table: Mapping[str, Any],
    local: Mapping[str, Any],
    budget: Mapping[str, Any],
    personal: tuple[str, ...] = (),
    frozen: tuple[str, ...] = (),
) -> Recipe:
    """A recipe from `[recipe]` (name, own settings, pieces by role) and the budgets of `[stop]`.

    With `base`, that is the recipe of the catalogue, and the name is one's own.
    """
    chosen, local = dict(table), dict(local)
    label = chosen.pop("name", DEFAULT_RECIPE)
    name = chosen.pop("base", label)
    name = FORMER_NAMES.get(name, name) if isinstance(name, str) else name
    _validate_recipe_name(name, label, "base" if "base" in table else "name")
    pieces = {role: chosen.pop(role) for role in ROLES if role in chosen}
    _move_old_settings(pieces, local)
    minimum = chosen.pop("minimum", None)
    flags = {key: chosen.pop(key) for key in RECIPE_FLAGS if key in chosen}
    # a chain that a recipe of one's own is written with is whole, and may want what is kept
    given = local.pop("update", None) if "base" in table else None
    recipe = _make_catalogue_recipe(name, chosen, local)
    made = {role: build_piece(role, wanted) for role, wanted in pieces.items()}
    if given is not None:
        made["update"] = given
    least = 0 if made.get("aggregator", recipe.aggregator).accepts_empty_rounds else 1
    recipe = replace(
        recipe,
        personal=(*recipe.personal, *personal),
        frozen=(*recipe.frozen, *frozen),
        minimum=max(recipe.minimum, least),
        **made,
    )
    minimum = recipe.minimum if minimum is None else minimum
    if type(minimum) is not int or not least <= minimum <= recipe.P:
        raise BadInput(
            f"recipe.minimum = {format_value(minimum)}: must be an integer from {least} to"
            f" per_round = {recipe.P}"
        )
    for key, value in flags.items():
        if type(value) is not bool:
            raise BadInput(f"recipe.{key} = {format_value(value)}: must be true or false")
    if budget:
        recipe = replace(recipe, stop=AnyOf((recipe.stop, CostBudget(**budget))))
    if "base" in table:
        recipe = replace(recipe, name=label)
    return replace(recipe, minimum=minimum, **flags)


def _validate_recipe_name(name: Any, label: Any, key: str) -> None:
    """BadInput unless the catalogue has the recipe and its label can be shown."""
    if not isinstance(name, str) or name not in CATALOGUE:
        raise BadInput(
            f"recipe.{key} = {format_value(name)}:"
            f" {suggest_replacement(format_one_line(name, 60), CATALOGUE, CONTRIBUTED_METHODS)}"
        )
    if not isinstance(label, str) or not label or len(label) > 60:
        raise BadInput(
            f"recipe.name = {format_value(label)}: give it a name of at most 60 characters"
        )


def _make_catalogue_recipe(
    name: str, settings: Mapping[str, Any], local: Mapping[str, Any]
) -> Recipe:
    """A recipe of the catalogue with its own settings and those of [train]."""
    given = {key: value for key, value in local.items() if key not in ("steps", "rounds")}
    make = CATALOGUE[name]
    if "rounds" in inspect.signature(make).parameters:
        given["rounds"] = local.get("rounds")  # of the run: pieces may depend on its length
    _validate_recipe_settings(settings, name)
    try:
        recipe = make(**settings, **given)
    except (TypeError, ValueError, ArithmeticError) as why:
        raise BadInput(f"recipe.{name}: {why}") from why
    return replace(recipe, work=replace(recipe.work, steps=local.get("steps")))


def _move_old_settings(pieces: dict[str, Any], local: dict[str, Any]) -> None:
    """Move how much clients train from a trainer's table of version 0.1 to the settings of [train].

    Only of trainers that version had, and only what is no field of theirs: a class of the user's
    keeps its own.
    """
    trainer = pieces.get("trainer")
    name = trainer.get("piece") if isinstance(trainer, Mapping) else None
    if not isinstance(trainer, Mapping) or name not in OLD_TRAINERS:
        return
    own = {f.name for f in _dataclass_fields(PIECES["trainer"][str(name)])}
    moved = {key: trainer[key] for key in LOCAL_WORK_KEYS if key in trainer and key not in own}
    local |= moved
    pieces["trainer"] = {key: value for key, value in trainer.items() if key not in moved}


def list_recipe_settings(make: Any) -> dict[str, inspect.Parameter]:
    """A catalogue function's own settings by name, without those of [train] and per_round."""
    taken = {"P", "rounds", "epochs", "batch", "lr", "steps", "update", "augment", "local", "kw"}
    settings: dict[str, inspect.Parameter] = {}
    for base in (make, *getattr(make, "bases", ())):
        settings |= {
            k: p
            for k, p in inspect.signature(base).parameters.items()
            if k not in taken and k not in settings
        }
    return settings


def build_local_settings(train: Mapping[str, Any]) -> dict[str, Any]:
    """`[train]` as settings of every recipe; a chain of links unless it is plain SGD."""
    train = dict(train)
    keys = (*LOCAL_WORK_KEYS, "steps")
    local: dict[str, Any] = {key: train.pop(key) for key in keys if key in train}
    if "augment" in train:
        pieces = [build_piece("augment", wanted, "train") for wanted in train.pop("augment")]
        local["augment"] = tuple(pieces)
    if "update" in train:
        links = train.pop("update")
        if train:
            raise BadInput(
                f"train.update is a whole chain; drop train.{min(train)}, or name it as a link"
            )
        return local | {
            "update": UpdateChain(tuple(build_piece("link", wanted, "train") for wanted in links))
        }
    if train:
        local["update"] = _build_update_chain(train, local.get("lr", 0.1))
    return local


def _build_update_chain(train: Mapping[str, Any], lr: float) -> UpdateChain:
    """Clipping, weight decay, momentum and the optimiser, in this order."""
    schedule = build_piece("schedule", train.get("schedule", "constant"), "train")
    name, decay = train.get("optimizer", "sgd"), train.get("weight_decay", 0.0)
    links: list[Any] = [GradientClip(train["clip"])] if "clip" in train else []
    if name == "adamw":
        end: Any = Adam(lr, decay=train.get("weight_decay", 0.01), schedule=schedule)
    else:
        links += [WeightDecay(decay)] if decay else []
        end = Adam(lr, schedule=schedule) if name == "adam" else SGD(lr, schedule)
    if name != "sgd" and ("momentum" in train or "nesterov" in train):
        raise BadInput(f"train.momentum goes with optimizer = 'sgd'; {name} has its own")
    if train.get("nesterov") and not train.get("momentum"):
        raise BadInput(
            "train.nesterov = true is about momentum; set train.momentum above 0, or drop it"
        )
    if train.get("carry") and name == "sgd" and not train.get("momentum"):
        raise BadInput(
            "train.carry = true keeps momentum or Adam's state, plain SGD has none; drop it"
        )
    if train.get("momentum"):
        links.append(Momentum(train["momentum"], train.get("nesterov", False)))
    if train.get("carry"):
        links = [PersistentLink(link) if isinstance(link, Momentum) else link for link in links]
        end = PersistentLink(end) if isinstance(end, Adam) else end
    return UpdateChain((*links, end))


def compose_objective(wanted: str | Mapping[str, Any] | None, kind: str) -> Any:
    """An objective by name, as a table {name = ..., field = value}, or by what the targets are."""
    table: dict[str, Any] = {"name": wanted} if isinstance(wanted, str) else dict(wanted or {})
    name = table.pop("name", None)
    make: Any
    if name is None:
        make = OBJECTIVES_BY_KIND[kind]
    elif isinstance(name, str) and name in OBJECTIVES:
        make = OBJECTIVES[name]
    elif isinstance(name, str) and ":" in name:
        make = import_object(name, "objective.name")
        validate_factory(make, name, "objective.name", _explain_wrong_objective, "objective")
    else:
        raise BadInput(
            f"objective.name = {name!r}: {suggest_name(str(name), OBJECTIVES)}, or"
            ' "package.module:Class"'
        )
    if "metrics" in table:
        table["metrics"] = _resolve_metrics(table["metrics"])
    try:
        made = make(**table)
    except (TypeError, ValueError) as why:
        raise BadInput(f"objective = {name or kind!r}: {why}") from why
    if not isinstance(made, Objective):
        raise BadInput(
            f"objective.name = {name!r} has no losses(out, y) or no evaluation_metrics; see"
            " docs/extending.md"
        )
    return made


def _resolve_metrics(wanted: Any) -> tuple[Any, ...]:
    """An objective's metrics: names of ours, and what "package.module:Class" names."""
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise BadInput(
            f'objective.metrics = {format_value(wanted)}: give a list of them, such as ["accuracy"]'
        )
    return tuple(_resolve_metric(m) if isinstance(m, str) and ":" in m else m for m in wanted)


def _resolve_metric(name: str) -> Any:
    """The metric that "package.module:name" names; it is made already, and nothing is called."""
    metric = import_object(name, "objective.metrics")
    if not isinstance(metric, MetricLike):
        raise BadInput(
            f"objective.metrics: {format_value(name)} is a {type(metric).__name__}, no metric; it"
            " needs name, better, of(out, y) and value(...)"
        )
    return metric


def build_piece(role: str, wanted: Any, where: str = "recipe") -> Any:
    """One piece from a name ("topk", "package.module:Class") or a table {piece = name, ...}."""
    if isinstance(wanted, str):
        wanted = {"piece": wanted}
    elif role in COMBINED_ROLES and isinstance(wanted, list):
        name, key = COMBINED_ROLES[role]
        wanted = {"piece": name, key: wanted}
    table = dict(wanted) if isinstance(wanted, Mapping) else {}
    name = table.pop("piece", None)
    if not isinstance(name, str):
        raise BadInput(
            f'{where}.{role} = {format_value(wanted)}: give a name, or a table with piece = "name"'
        )
    if ":" in name:
        make = import_object(name, f"{where}.{role}")
        validate_factory(make, name, f"{where}.{role}", partial(_explain_wrong_piece, role), role)
    elif name in PIECES[role]:
        make = PIECES[role][name]
    else:
        hint = suggest_replacement(name[:60], PIECES[role], CONTRIBUTED_PIECES)
        raise BadInput(f'{where}.{role} = {format_value(name)}: {hint}, or "package.module:Class"')
    wrapped = {
        f.name: _build_inner_pieces(inner_role, table[f.name], where)
        for f in _dataclass_fields(make)
        if f.name in table and (inner_role := find_inner_role(role, make, f))
    }
    try:
        why, values = get_schema(make).validate_values({**table, **wrapped})
        made = None if why else make(**values)
    except Exception as problem:  # a class of the user's may raise anything
        raise BadInput(
            f"{where}.{role} = {name!r}: {problem or type(problem).__name__}"
        ) from problem
    if why:
        raise BadInput(f"{where}.{role} = {name!r}: {why}")
    if why := _explain_wrong_piece(role, type(made)):
        raise BadInput(f"{where}.{role} = {name!r}: {why}")
    return made


def _explain_wrong_piece(role: str, kind: type) -> str:
    """Why instances of this class cannot have the role; "" if they can."""
    if why := explain_renamed_method(kind):
        return why
    if role in ROLES:
        return explain_wrong_role(role, kind)
    if role == "link":
        return explain_wrong_link(kind)
    if role == "costs" and not issubclass(kind, CostModel):
        return f"class {kind.__name__} must subclass flrce.CostModel; see docs/piece-cost.md"
    if is_own_class(kind) and kind not in PIECES[role].values():
        return f"{kind.__name__} is no {role} of flrce; see docs/extending.md"
    if has_member(kind, ROLE_METHODS[role]):
        return ""
    if role == "availability" and has_member(kind, "__call__"):  # of (seed, client, round)
        return ""
    return (
        f"{kind.__name__} has no {ROLE_METHODS[role]!r}, so it is no {role}; see docs/extending.md"
    )


def _explain_wrong_objective(kind: type) -> str:
    """Why instances of this class are no objectives; "" if they are."""
    if has_member(kind, "losses", "evaluation_metrics"):
        return ""
    lacks = f"{kind.__name__} has no losses(out, y) or no evaluation_metrics"
    return f"{lacks}, so it is not an objective; see docs/piece-objective.md"


def _build_inner_pieces(role: str, wanted: Any, where: str) -> Any:
    """The piece within a piece, or all of a list."""
    if isinstance(wanted, list):
        return tuple(build_piece(role, each, where) for each in wanted)
    return build_piece(role, wanted, where)


def _dataclass_fields(make: Any) -> tuple[Any, ...]:
    return fields(make) if hasattr(make, "__dataclass_fields__") else ()


def _validate_recipe_settings(given: Mapping[str, Any], name: str) -> None:
    """BadInput unless these are settings of the recipe, each of its type."""
    valid = list_recipe_settings(CATALOGUE[name])
    for key in given:
        if key not in valid:
            hint = suggest_name(key[:60], ["name", *valid, *ROLES, "minimum", *RECIPE_FLAGS])
            raise BadInput(f"recipe.{key[:60]} is no setting of {name}; {hint}")
    why, _ = _settings_schema(name).validate_values(given)
    if why:
        raise BadInput(f"recipe.{why}")


@lru_cache
def _settings_schema(name: str) -> SettingsSchema:
    settings = list_recipe_settings(CATALOGUE[name])
    return make_schema(name, {key: (p.annotation, p.default) for key, p in settings.items()})
