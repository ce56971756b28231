"""Values that the Tab key offers, for click's own shell completion."""

from collections.abc import Callable, Iterable

from click import Context, Parameter
from click.shell_completion import CompletionItem

Completer = Callable[[Context, Parameter, str], list[CompletionItem]]


def complete_names(list_names: Callable[[], Iterable[str]]) -> Completer:
    """Offer names; in a list with commas, for its last part."""

    def complete(_: Context, __: Parameter, typed: str) -> list[CompletionItem]:
        before, comma, last = typed.rpartition(",")
        names = sorted(name for name in list_names() if name.startswith(last))
        return [CompletionItem(f"{before}{comma}{name}") for name in names]

    return complete


def list_setting_keys() -> list[str]:
    """Every key of an experiment file, with an equals sign."""
    from flrce.config.experiment import Experiment
    from flrce.core.roles import ROLES

    keys = []
    for name, field in Experiment.model_fields.items():
        table = getattr(field.annotation, "model_fields", {})
        keys += [f"{name}.{key}" for key in table] or [name]
    keys += ["recipe.name", "recipe.preset", *(f"recipe.{role}" for role in ROLES)]
    return [f"{key}=" for key in keys]


def list_recipe_names() -> list[str]:
    from flrce.methods.catalogue.families import FAMILIES

    return [name for names in FAMILIES.values() for name in names]


def list_piece_names() -> list[str]:
    from flrce.methods.registry import PIECES

    return sorted({name for names in PIECES.values() for name in names})


def list_roles() -> list[str]:
    from flrce.methods.registry import PIECES

    return list(PIECES)


def list_datasets() -> list[str]:
    from flrce.data.sources import DATASET_NAMES

    return list(DATASET_NAMES)
