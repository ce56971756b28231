"""Empty stand-ins for what a peer imports at its top and this work never calls (image readers,
trackers).
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec) -> types.ModuleType:
        module = _Empty(spec.name)
        module.__path__ = []  # a package: it may be asked for modules inside
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(*names: str) -> None:
    """From now on these packages import as empty ones."""
    sys.meta_path.insert(0, _Finder(names))
