"""Data flows one way: a file imports lower layers, or files of its own package."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "flrce"
#: module or package -> layer
LAYERS = {
    "version": 0, "errors": 0, "host": 0.1, "rng": 0, "reading": 0.3, "crossing": 0, "room": 0.1, "intervals": 0,
    "payload_bytes": 0, "state_values": 0.1, "compiling": 0, "passes": 0.2, "linalg": 0.4,
    "lifetime": 0,
    "bounds": 0.5, "module_places": 0.5, "user_code": 0.6,
    "sketch": 0.6, "record": 0.6, "types": 0.7, "engine": 0.8, "traits": 0.8,
    "pieces": 1, "formats": 1,
    "data": 2, "models": 2, "relations": 2, "round": 2, "fleet": 2,
    "local": 3, "selectors": 3, "submodels": 3, "compressors": 3, "aggregators": 3, "servers": 3, "stops": 3,
    "field": 4, "rivals": 4.2, "thrift": 4.2, "tuning": 4.2, "recipes": 4.5, "names": 4, "loop": 4, "engines": 4,
    "network": 5, "idle": 5, "compose": 5.2, "written": 5.5, "sections": 5.5,
    "config": 6, "store": 6,
    "flower": 7, "track": 7, "outcome": 7, "tryout": 7, "crowd": 7.5, "parts": 7.5,
    "runs": 8,
    "results": 9,
    "arena": 9.5,
    "apps": 10,
    "": 11,
}  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def package(module: str) -> str:
    parts = module.removeprefix("flrce").strip(".").split(".")
    return parts[0]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flrce"):
            if node.module == "flrce":
                found |= {alias.name for alias in node.names}
            else:
                found.add(package(node.module or ""))
        elif isinstance(node, ast.Import):
            found |= {package(alias.name) for alias in node.names if alias.name.startswith("flrce")}
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


def test_only_flower_files_import_flwr():
    for path in FILES:
        text = path.read_text()
        if "import flwr" in text or "from flwr" in text:
            assert path.parent.name == "flower", path


def test_the_loop_the_catalogue_and_the_map_stay_short():
    for name, most in {"loop.py": 175, "relations.py": 165, "recipes.py": 240, "round/gate.py": 160}.items():
        assert len((SOURCE / name).read_text().splitlines()) <= most, name
