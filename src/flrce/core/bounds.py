"""What values a piece's fields may have: ranges stand beside the fields, and one schema is made of
them.

A piece writes `decay: Annotated[float, Ge(0), Lt(1)] = 0.9`, `by: Literal["samples", "equal"]`, or
one of the names below. Whoever builds a recipe, from a file or from Python, has its pieces checked
(pieces.Recipe).
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from flrce.errors import format_one_line, suggest_name

PositiveInt = Annotated[int, Ge(1), Le(10**9)]
NonNegativeInt = Annotated[int, Ge(0), Le(10**9)]
Proportion = Annotated[float, Ge(0), Le(1)]
PositiveProportion = Annotated[float, Gt(0), Le(1)]  # a share that is not nothing
Percent = Annotated[float, Ge(0), Le(100)]
PositiveFloat = Annotated[float, Gt(0), Le(1e18)]
NonNegativeFloat = Annotated[float, Ge(0), Le(1e18)]
EpochCount = Annotated[int, Ge(1), Le(10_000)]
BatchSize = Annotated[int, Ge(1), Le(10**7)]
LearningRate = Annotated[float, Gt(0), Le(1e6)]  # of learning
NonEmptyText = Annotated[str, MinLen(1), MaxLen(4096)]  # a name, or a path
STRICT_CONFIG = ConfigDict(
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
    protected_namespaces=(),
)


@dataclass(frozen=True)
class SettingsSchema:
    """The arguments that something is made of."""

    wanted: Mapping[str, tuple[Any, Any]]  # name -> (type, default; ...: none)
    # None: of types that none can be made of, so the piece must look after itself
    schema: type[BaseModel] | None

    def validate_values(self, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """("", the values as their types want them), or (what is wrong with the first that does not
        fit, {}).
        """
        unknown = next((key for key in values if key not in self.wanted), None)
        if unknown is not None:
            hint = suggest_name(str(unknown)[:60], self.wanted) if self.wanted else "it has none"
            return f"{format_one_line(unknown, 60)} is no setting of it; {hint}", {}
        if self.schema is None:
            return "", dict(values)
        try:
            found = self.schema.model_validate(
                {key: self._convert_list(key, value) for key, value in values.items()}
            )
        except ValidationError as error:
            return explain_validation_error(error), {}
        return "", {key: getattr(found, key) for key in values}

    def _convert_list(self, key: str, value: Any) -> Any:
        """Experiment files have lists where a field is a tuple."""
        kind = self.wanted[key][0]
        meant = any(typing.get_origin(k) is tuple for k in (kind, *typing.get_args(kind)))
        return tuple(value) if meant and isinstance(value, list) else value


def make_schema(name: str, wanted: Mapping[str, tuple[Any, Any]]) -> SettingsSchema:
    """A schema of these arguments; the defaults' own values are not checked."""
    kinds: dict[str, Any] = {
        key: (kind, ... if default is ... else None) for key, (kind, default) in wanted.items()
    }
    try:
        return SettingsSchema(wanted, create_model(name, __config__=STRICT_CONFIG, **kinds))
    except Exception:  # a user's piece may annotate with anything
        return SettingsSchema(wanted, None)


@lru_cache(maxsize=1024)
def get_schema(make: Callable[..., Any]) -> SettingsSchema:
    """What a piece's class, or a function that makes one, is made of."""
    return make_schema(getattr(make, "__name__", "piece"), list_arguments(make))


def find_problem(piece: Any) -> str:
    """What is wrong with the fields of a piece that was made, or of one that it wraps; "" if
    nothing is.
    """
    if not is_dataclass(piece) or isinstance(piece, type):
        return ""
    fields_given = {
        f.name: getattr(piece, f.name)
        for f in fields(piece)
        if f.init and getattr(piece, f.name) is not f.default
    }
    why, _ = get_schema(type(piece)).validate_values(fields_given)
    inner = (
        find_problem(value)
        for each in fields_given.values()
        for value in (each if isinstance(each, tuple) else [each])
    )
    return f"{type(piece).__name__}: {why}" if why else next(filter(None, inner), "")


def list_arguments(make: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> (type, default, ... where there is none) of a dataclass's fields or a function's
    parameters.
    """
    if not is_dataclass(make) or not isinstance(make, type):
        return {
            name: _describe_parameter(p) for name, p in inspect.signature(make).parameters.items()
        }
    hints = typing.get_type_hints(make, include_extras=True)
    return {
        f.name: (Any if f.metadata.get("piece") else hints[f.name], _get_default(f))
        for f in fields(make)
        if f.init
    }


def explain_validation_error(error: ValidationError) -> str:
    """The first problem: field = value: rule. Of a union, every kind that would do."""
    problems = error.errors()
    field = problems[0]["loc"][0] if problems[0]["loc"] else ""
    mine = [p for p in problems if p["loc"][:1] == problems[0]["loc"][:1]]
    if mine[0]["type"] == "missing":
        return f"{field} is missing; give it"
    texts = [p["msg"].removeprefix("Value error, ").removeprefix("Input should be ") for p in mine]
    words = {"String should have": "text of", "an instance of Sequence": "a list"}
    for theirs, ours in words.items():
        texts = [text.replace(theirs, ours) for text in texts]
    rules = dict.fromkeys(texts)
    return f"{field} = {format_value(mine[0]['input'])}: should be {' or '.join(rules)}"


def format_value(value: Any) -> str:
    """A value as an error message quotes it."""
    if isinstance(value, str):
        value = repr(value[:100])
    elif isinstance(value, Mapping | list | tuple):
        value = _safe_repr(value)
    text = format_one_line(value, 100)
    return text if len(text) < 60 else text[:57] + "..."


def _safe_repr(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # a giant integer in it, or a thousand brackets
        return f"a {type(value).__name__}"


def _describe_parameter(p: inspect.Parameter) -> tuple[Any, Any]:
    kind = Any if p.annotation is p.empty else p.annotation
    return kind, ... if p.default is p.empty else p.default


def _get_default(f: Any) -> Any:
    return ... if f.default is MISSING and f.default_factory is MISSING else None
