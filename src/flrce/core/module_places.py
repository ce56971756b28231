"""Where a module lies: Python's own library, an installed package, or a folder of the user's.
Nothing is imported.
"""

import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from typing import Literal

SITE_FOLDERS = {"site-packages", "dist-packages"}
PlaceKind = Literal["standard", "installed", "local"]


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
