"""Code that settings name as "package.module:Class": from where it may be imported, and what it
must be to be called.

A name in an experiment file runs code on this machine, so a file alone cannot decide what is
imported. A module may lie beside the experiment file, in the working directory, or be registered by
an installed package (entry points of the group `flrce.pieces`); all else needs the user's word
(`--trust`). Commands that only look import nothing.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import re
import site
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from typing import Any, Literal

from flrce.errors import BadInput, format_one_line

SITE_FOLDERS = {"site-packages", "dist-packages"}
PlaceKind = Literal["standard", "installed", "local"]
MODULE_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # package.module:Class
ENTRY_POINTS = "flrce.pieces"
OWN_PACKAGE = "flrce"
DEVICE_PACKAGE = "flrce_client"
#: pieces without a short name that files of earlier versions name by their former module
MOVED_NAMES = {"flrce.stops.budget:AnyOf": "flrce.methods.stopping.budget:AnyOf"}


@dataclass(frozen=True)
class ModulePlace:
    """Where a module was found."""

    kind: PlaceKind
    folder: str  # of its file; of a module without one, what it is
    loaded: bool = False  # whether this process has imported it already
    search_path: str = ""  # folder that the interpreter must search to find it; "": it does already


def find_module(name: str, folders: Sequence[str]) -> ModulePlace | None:
    """Where a module lies that is loaded, on the interpreter's path, or in one of these folders;
    None: nowhere.

    The packages around it must be loaded already.
    """
    if name in sys.modules:
        return _loaded_place(name)
    importlib.invalidate_caches()  # files may be younger than the last look into their folder
    spec = importlib.util.find_spec(name)
    if spec is not None:
        return _place_of(spec)
    for folder in folders if "." not in name else ():
        spec = PathFinder.find_spec(name, [folder])
        if spec is not None:
            place = _place_of(spec)
            return ModulePlace(place.kind, place.folder, search_path=folder)
    return None


def is_within(folder: str, outer: str) -> bool:
    """Whether a folder is another one or lies below it, links followed."""
    inner, outer = os.path.realpath(folder), os.path.realpath(outer)
    return inner == outer or inner.startswith(outer.rstrip(os.sep) + os.sep)


def working_folder() -> str:
    """The working directory; "" where it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def main_folder() -> str:
    """The folder of the program that runs, where that is the user's own script; else ""."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = os.path.dirname(os.path.abspath(file)) if file else ""
    return folder if folder and _kind_of(folder) == "local" else ""


def _loaded_place(name: str) -> ModulePlace:
    module = sys.modules[name]
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if file is None and spec is not None:
        place = _place_of(spec)
        return ModulePlace(place.kind, place.folder, loaded=True)
    if file is None:  # made by a program as it runs
        return ModulePlace(
            "standard" if name in sys.builtin_module_names else "local", "this process", loaded=True
        )
    folder = os.path.dirname(os.path.abspath(file))
    return ModulePlace(_kind_of(folder), folder, loaded=True)


def _place_of(spec: ModuleSpec) -> ModulePlace:
    """The place of a module by its specification; a package without a file lies where all its parts
    do.
    """
    if spec.origin in ("built-in", "frozen"):
        return ModulePlace("standard", spec.origin)
    if spec.has_location and spec.origin:
        folders = [os.path.dirname(os.path.abspath(spec.origin))]
    else:
        folders = [os.path.abspath(folder) for folder in spec.submodule_search_locations or ()]
    kinds = [_kind_of(folder) for folder in folders]
    foreign = [i for i, kind in enumerate(kinds) if kind != "local"]
    i = foreign[0] if foreign else 0
    return (
        ModulePlace(kinds[i], folders[i]) if folders else ModulePlace("standard", str(spec.origin))
    )


def _kind_of(folder: str) -> PlaceKind:
    real = os.path.realpath(folder)
    if SITE_FOLDERS & {*folder.split(os.sep), *real.split(os.sep)} or any(
        is_within(real, s) for s in _list_site_folders()
    ):
        return "installed"
    return (
        "standard"
        if any(is_within(real, folder) for folder in _list_library_folders())
        else "local"
    )


@lru_cache
def _list_site_folders() -> tuple[str, ...]:
    paths = [sysconfig.get_path(key) for key in ("purelib", "platlib", "scripts")]
    return tuple(path for path in [*paths, site.getusersitepackages()] if path)


@lru_cache
def _list_library_folders() -> tuple[str, ...]:
    paths = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib")]
    archive = os.path.join(
        sys.base_prefix, "lib", f"python{sys.version_info[0]}{sys.version_info[1]}.zip"
    )
    return (*(path for path in paths if path), archive)


class UserCodeNotImported(BadInput):
    """Settings name a module, and the command only looks at them."""


@dataclass(frozen=True)
class Trust:
    """What may be imported. Experiments that differ in nothing else are equal.

    nothing: no module. file: modules in `folders` and those that this process has loaded already,
    unless they are installed. caller: any that is not installed, and installed ones that are loaded
    already; settings written in Python are code of the caller. everything: any but Python's own
    library.
    """

    kind: Literal["nothing", "file", "caller", "everything"] = field(
        default="caller", compare=False
    )
    folders: tuple[str, ...] = field(default=(), compare=False)
    # folders of records, which are never code
    barred: tuple[str, ...] = field(default=(), compare=False)

    def explain_refusal(self, place: ModulePlace, module: str) -> str:
        """Why the module may not be imported from this place; "" if it may."""
        if _is_own_module(module):
            return ""
        if module.partition(".")[0] == DEVICE_PACKAGE:
            return "belongs to flrce's part for devices, which has no pieces"
        if place.kind == "standard":
            return "belongs to Python's own library, which has no pieces"
        if any(is_within(place.folder, folder) for folder in self.barred):
            return (
                f"lies in {place.folder}, a run directory, which is data: name the experiment file"
                " itself"
            )
        loaded = place.loaded and (place.kind == "local" or self.kind == "caller")
        inside = place.kind == "local" and any(
            is_within(place.folder, folder) for folder in self.folders
        )
        anywhere = self.kind == "everything" or (self.kind == "caller" and place.kind == "local")
        if anywhere or loaded or inside:
            return ""
        return (
            f"lies in {place.folder}, neither beside the experiment file nor in the working"
            " directory; if you trust it, add --trust (in Python: trust=True)"
        )


NOTHING = Trust("nothing")
_current: ContextVar[Trust | None] = ContextVar("flrce_trust", default=None)


def current_trust() -> Trust:
    """What applies here; to settings that Python code writes, that of a caller."""
    return _current.get() or Trust("caller", _own_folders())


@contextmanager
def apply_trust(trust: Trust) -> Iterator[None]:
    token = _current.set(trust)
    try:
        yield
    finally:
        _current.reset(token)


def trust_file(folder: str | None, everything: bool = False) -> Trust:
    """For an experiment file in this folder; None: for settings of the command line alone."""
    return Trust(
        "everything" if everything else "file", (*_own_folders(), *([folder] if folder else ()))
    )


def trust_record(folder: str, everything: bool = False) -> Trust:
    """For the settings that a run directory holds: nothing in it is imported."""
    return Trust("everything" if everything else "file", _own_folders(), (folder,))


def _own_folders() -> tuple[str, ...]:
    return tuple(dict.fromkeys(folder for folder in (working_folder(), main_folder()) if folder))


def import_object(name: str, where: str) -> Any:
    """The object that "package.module:name" names, if its module may be imported. It is not
    called.
    """
    module, attribute = split_name(MOVED_NAMES.get(name, name), where)
    trust = current_trust()
    if module == "__main__" and not hasattr(sys.modules["__main__"], attribute.partition(".")[0]):
        raise BadInput(
            f"{where} = {_quote_name(name)}: the class was defined in a script; resume with that"
            " script, or move the class to a module of its own before a run"
        )
    if trust.kind == "nothing" and not _is_own_module(module):
        raise UserCodeNotImported(
            f"{where} = {_quote_name(name)} names code; a command that only looks imports none"
            " (`doctor` and `data info` do with --trust)"
        )
    try:
        imported = _import_module(module, name, where, trust)
    except BadInput:
        raise
    except ImportError as why:
        remedy = "is it beside the experiment file, in the working directory, or installed?"
        if trust.barred:
            remedy = (
                "start from its folder, or name the experiment file: flrce run FILE --out DIR"
                " --resume"
            )
        raise BadInput(
            f"{where} = {_quote_name(name)} cannot be imported: {why}; {remedy}"
        ) from why
    except Exception as why:  # a module that raises as it is read
        raise BadInput(
            f"{where} = {_quote_name(name)} cannot be imported: {type(why).__name__}: {why}"
        ) from why
    try:
        return getattr(imported, attribute)
    except AttributeError as why:
        raise BadInput(f"{where} = {_quote_name(name)}: {module} has no {attribute!r}") from why


def split_name(name: str, where: str) -> tuple[str, str]:
    """Module and attribute of "package.module:name"; BadInput unless it is written so."""
    module, _, attribute = name.partition(":")
    if module.endswith(".py") and attribute:
        meant = module.removesuffix(".py")
        raise BadInput(
            f"{where} = {_quote_name(name)}: a module is named, not a file: write"
            f' "{meant}:{attribute}"'
        )
    if not MODULE_PATH.fullmatch(name) or len(name) > 500:
        raise BadInput(f'{where} = {_quote_name(name)}: write "package.module:Class"')
    return module, attribute


def _is_own_module(module: str) -> bool:
    return module.partition(".")[0] == OWN_PACKAGE


def is_own_class(kind: Any) -> bool:
    """Whether an object is a class that flrce defines; one that it only imports is not."""
    return isinstance(kind, type) and _is_own_module(kind.__module__)


def _quote_name(name: str) -> str:
    return repr(format_one_line(name, 80))


def _import_module(module: str, name: str, where: str, trust: Trust) -> types.ModuleType:
    """Import a module; its packages and the module itself are located, and may be refused, before
    each is loaded.
    """
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        part = ".".join(parts[:count])
        place = find_module(part, trust.folders)
        if place is None:
            break  # the import says what is missing
        why = trust.explain_refusal(place, part)
        if why and not _is_registered(name):
            raise BadInput(f"{where} = {_quote_name(name)}: the module {part} {why}")
        if place.search_path and place.search_path not in sys.path:
            sys.path.append(place.search_path)  # last, so that nothing installed is hidden
        if not place.loaded:
            importlib.import_module(part)
    return importlib.import_module(module)


def _is_registered(name: str) -> bool:
    """Whether an installed package registers the object, or its whole module, as a piece."""
    values = {point.value.replace(" ", "") for point in entry_points(group=ENTRY_POINTS)}
    return name in values or name.partition(":")[0] in values


def validate_factory(
    make: Any, name: str, where: str, explain: Callable[[type], str], noun: str
) -> None:
    """BadInput unless `make` is a class that can be a `noun`, or a function that returns one.

    `explain` tells why a class cannot; "" if it can. Nothing is called. Of flrce itself, classes
    only: a function of flrce may read files and import what they name.
    """
    while isinstance(make, functools.partial):
        make = make.func
    text, so = f"{where} = {_quote_name(name)}", f"so it is no {noun}; see docs/extending.md"
    if _is_own_module(name.partition(":")[0]) and not is_own_class(make):
        raise BadInput(f"{text} is no class of flrce, {so}")
    if isinstance(make, type):
        if why := explain(make):
            raise BadInput(f"{text}: {why}")
        return
    if not isinstance(make, types.FunctionType):
        kind = "built-in function" if inspect.isbuiltin(make) else type(make).__name__
        raise BadInput(f"{text} is a {kind}, not a class, {so}")
    returned = _return_type(make)
    if returned is None and not _may_call(make):
        raise BadInput(
            f"{text} is a function that does not say that it returns a {noun}; annotate it with the"
            " class (-> Class), or name the class"
        )
    if returned is not None and (why := explain(returned)):
        raise BadInput(f"{text} returns {returned.__name__}: {why}")


def _return_type(make: types.FunctionType) -> type | None:
    """The class that a function is annotated to return; None where it does not say."""
    try:
        hint = typing.get_type_hints(make).get("return")
    except Exception:  # names that exist for type checkers alone
        return None
    hint = typing.get_origin(hint) or hint
    return hint if isinstance(hint, type) else None


def _may_call(make: types.FunctionType) -> bool:
    """Whether a function that does not say what it returns may be called: code of the user's own,
    never a library's.
    """
    trust = current_trust()
    place = find_module(make.__module__, trust.folders)
    return (
        place is not None
        and place.kind == "local"
        and not trust.explain_refusal(place, make.__module__)
    )


def has_member(kind: type, *names: str) -> bool:
    """Whether instances of a class have these methods or fields; what its metaclass has does not
    count.
    """
    own: set[str] = set()
    for base in kind.__mro__:
        fields = vars(base).get("__annotations__")  # of built-in types: a descriptor
        own |= {*vars(base), *(fields if isinstance(fields, dict) else ())}
    return own.issuperset(names)


def find_names(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, name) of everything in tables that is written as a name of code."""
    if isinstance(value, str):
        if MODULE_PATH.fullmatch(value):
            yield key, value
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            yield from find_names(item, f"{key}.{inner}" if key else str(inner))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_names(item, key)
