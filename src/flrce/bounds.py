"""What values a piece's fields may have: ranges stand beside the fields, and one schema is made of them.

A piece writes `decay: Annotated[float, Ge(0), Lt(1)] = 0.9`, `by: Literal["samples", "equal"]`, or one of the names
below. Whoever builds a recipe, from a file or from Python, has its pieces checked (pieces.Recipe).
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from flrce.errors import brief, nearest

Count = Annotated[int, Ge(1), Le(10**9)]
Whole = Annotated[int, Ge(0), Le(10**9)]
Share = Annotated[float, Ge(0), Le(1)]
Part = Annotated[float, Gt(0), Le(1)]  # a share that is not nothing
Percent = Annotated[float, Ge(0), Le(100)]
Positive = Annotated[float, Gt(0), Le(1e18)]
Amount = Annotated[float, Ge(0), Le(1e18)]
Epochs = Annotated[int, Ge(1), Le(10_000)]
Batch = Annotated[int, Ge(1), Le(10**7)]
Rate = Annotated[float, Gt(0), Le(1e6)]  # of learning
Text = Annotated[str, MinLen(1), MaxLen(4096)]  # a name, or a path
STRICT = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True, protected_namespaces=()
)


@dataclass(frozen=True)
class Settings:
    """The arguments that something is made of."""

    wanted: Mapping[str, tuple[Any, Any]]  # name -> (type, default; ...: none)
    schema: type[BaseModel] | None  # None: of types that none can be made of, so the piece must look after itself

    def checked(self, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """("", the values as their types want them), or (what is wrong with the first that does not fit, {})."""
        unknown = next((key for key in values if key not in self.wanted), None)
        if unknown is not None:
            hint = nearest(str(unknown)[:60], self.wanted) if self.wanted else "it has none"
            return f"{brief(unknown, 60)} is no setting of it; {hint}", {}
        if self.schema is None:
            return "", dict(values)
        try:
            found = self.schema.model_validate({key: self._fit(key, value) for key, value in values.items()})
        except ValidationError as error:
            return explained(error), {}
        return "", {key: getattr(found, key) for key in values}

    def _fit(self, key: str, value: Any) -> Any:
        """Experiment files have lists where a field is a tuple."""
        kind = self.wanted[key][0]
        meant = any(typing.get_origin(k) is tuple for k in (kind, *typing.get_args(kind)))
        return tuple(value) if meant and isinstance(value, list) else value


def settings(name: str, wanted: Mapping[str, tuple[Any, Any]]) -> Settings:
    """A schema of these arguments; the defaults' own values are not checked."""
    kinds: dict[str, Any] = {key: (kind, ... if default is ... else None) for key, (kind, default) in wanted.items()}
    try:
        return Settings(wanted, create_model(name, __config__=STRICT, **kinds))
    except Exception:  # a user's piece may annotate with anything
        return Settings(wanted, None)


@lru_cache(maxsize=1024)
def settings_of(make: Callable[..., Any]) -> Settings:
    """What a piece's class, or a function that makes one, is made of."""
    return settings(getattr(make, "__name__", "piece"), arguments(make))


def problem(piece: Any) -> str:
    """What is wrong with the fields of a piece that was made, or of one that it wraps; "" if nothing is."""
    if not is_dataclass(piece) or isinstance(piece, type):
        return ""
    given = {
        f.name: getattr(piece, f.name) for f in fields(piece) if f.init and getattr(piece, f.name) is not f.default
    }
    why, _ = settings_of(type(piece)).checked(given)
    inner = (problem(value) for each in given.values() for value in (each if isinstance(each, tuple) else [each]))
    return f"{type(piece).__name__}: {why}" if why else next(filter(None, inner), "")


def arguments(make: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> (type, default, ... where there is none) of a dataclass's fields or a function's parameters."""
    if not is_dataclass(make) or not isinstance(make, type):
        return {name: _parameter(p) for name, p in inspect.signature(make).parameters.items()}
    hints = typing.get_type_hints(make, include_extras=True)
    return {f.name: (Any if f.metadata.get("piece") else hints[f.name], _default(f)) for f in fields(make) if f.init}


def explained(error: ValidationError) -> str:
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
    return f"{field} = {shown(mine[0]['input'])}: should be {' or '.join(rules)}"


def shown(value: Any) -> str:
    """A value as an error message quotes it."""
    if isinstance(value, str):
        value = repr(value[:100])
    elif isinstance(value, Mapping | list | tuple):
        value = _safe(value)
    text = brief(value, 100)
    return text if len(text) < 60 else text[:57] + "..."


def _safe(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # a giant integer in it, or a thousand brackets
        return f"a {type(value).__name__}"


def _parameter(p: inspect.Parameter) -> tuple[Any, Any]:
    kind = Any if p.annotation is p.empty else p.annotation
    return kind, ... if p.default is p.empty else p.default


def _default(f: Any) -> Any:
    return ... if f.default is MISSING and f.default_factory is MISSING else None
