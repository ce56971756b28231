"""Data flows one way: a file imports lower layers, or files of its own package."""

import ast
import re
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "flrce"
#: package, or module at the top -> layer; a file imports lower layers, or its own package
LAYERS = {
    "errors": 0,
    "rng": 0,
    "version": 0,
    "core": 1,
    "formats": 2,
    "data": 3,
    "models": 3,
    "devices": 3,
    "training": 4,
    "methods": 5,
    "config": 6,
    "storage": 7,
    "simulation": 8,
    "report": 8,
    "flower": 9,
    "inference": 9,
    "cli": 10,
    "": 11,
    "__main__": 11,
}
FILES = sorted(SOURCE.rglob("*.py"))


def package(module: str) -> str:
    parts = module.removeprefix("flrce").strip(".").split(".")
    return parts[0]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and re.match(r"flrce\b", node.module or ""):
            if node.module == "flrce":
                found |= {alias.name for alias in node.names}
            else:
                found.add(package(node.module or ""))
        elif isinstance(node, ast.Import):
            found |= {
                package(alias.name) for alias in node.names if re.match(r"flrce\b", alias.name)
            }
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path):
    here = path.relative_to(SOURCE).parts[0].removesuffix(".py").replace("__init__", "")
    assert here in LAYERS, f"give {here} a layer"
    for there in imports(path):
        if there == here:
            continue
        assert there in LAYERS, f"give {there} a layer"
        assert LAYERS[there] < LAYERS[here], (
            f"{path.name} (layer {LAYERS[here]}) imports {there} (layer {LAYERS[there]})"
        )


def test_the_core_imports_nothing_of_the_research_package():
    for path in FILES:
        assert not re.search(r"(import|from) flrce_(?!client)", path.read_text()), path


def test_the_client_package_needs_numpy_and_its_own_modules_only():
    """flwr in one file, which a device that runs no Flower does not import."""
    for path in (SOURCE.parent / "flrce_client").rglob("*.py"):
        modules = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add((node.module or "").split(".")[0])
        own = {"numpy", "flrce_client"} | ({"flwr"} if path.name == "flower.py" else set())
        assert modules <= own | sys.stdlib_module_names, path


def test_research_packages_import_one_way():
    """The reproduction may use the core alone, and so may the arena."""
    for name, other in {
        "flrce_arena": "flrce_reproduction",
        "flrce_reproduction": "flrce_arena",
    }.items():
        for path in (SOURCE.parents[1] / "research" / "src" / name).rglob("*.py"):
            assert other not in path.read_text(), path


def test_only_flower_files_import_flwr():
    for path in FILES:
        text = path.read_text()
        if "import flwr" in text or "from flwr" in text:
            assert path.parent.name == "flower", path


def test_the_loop_the_catalogue_and_the_map_stay_short():
    for name, most in {
        "core/loop.py": 230,
        "core/relations.py": 230,
        "methods/catalogue/recipes.py": 310,
        "core/gate.py": 235,
    }.items():
        assert len((SOURCE / name).read_text().splitlines()) <= most, name
