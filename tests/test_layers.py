"""Data flows one way: a file imports lower layers only, and same-layer files only inside its own package."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "flrce"
#: module or package -> layer; the longest matching prefix counts
LAYERS = {
    "version": 0, "errors": 0, "types": 0, "pieces": 0, "rng": 0, "linalg": 0,
    "data": 1, "models": 1, "disk": 1, "memory": 1, "pages": 0, "payloads": 1, "snapshot": 1,
    "relations": 2, "native": 2, "local": 2, "selectors": 2, "submodels": 2, "compressors": 2, "aggregators": 2,
    "stops": 2, "averages": 2, "gate": 2, "booking": 2, "trust": 2, "sketch": 2, "roster": 2,
    "costs": 3, "recipes": 3, "names": 3, "loop": 3,
    "compose": 4, "engines": 4, "ledger": 4, "checkpoint": 4, "failpoint": 0, "energy": 4,
    "config": 5, "runs": 5, "reports": 5, "track": 5, "reproduce": 5,
    "flower": 6, "apps": 6, "": 7,
}  # fmt: skip
#: same-layer imports across packages that are meant
ALLOWED = {
    ("pieces", "types"), ("linalg", "types"), ("rng", "types"), ("types", "errors"), ("pieces", "errors"),
    ("local", "native"), ("selectors", "relations"), ("ledger", "checkpoint"), ("runs", "config"), ("apps", "flower"),
    ("reproduce", "runs"), ("reproduce", "config"), ("reproduce", "reports"), ("reports", "config"), ("flower", "apps"),
    ("energy", "engines"), ("engines", "energy"), ("track", "runs"), ("checkpoint", "failpoint"),
    ("booking", "gate"), ("selectors", "sketch"),
    ("engines", "compose"), ("gate", "linalg"), ("recipes", "costs"), ("engines", "ledger"), ("engines", "checkpoint"),
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
        fine = LAYERS[there] < LAYERS[here] or (here, there) in ALLOWED
        assert fine, f"{path.name} (layer {LAYERS[here]}) imports {there} (layer {LAYERS[there]})"


def test_only_flower_files_import_flwr():
    for path in FILES:
        text = path.read_text()
        if "import flwr" in text or "from flwr" in text:
            assert path.name.startswith("flower") or path.name == "wire.py", path


def test_the_loop_the_catalogue_and_the_map_stay_short():
    for name, most in {"loop.py": 160, "relations.py": 160, "recipes.py": 330, "gate.py": 160}.items():
        assert len((SOURCE / name).read_text().splitlines()) <= most, name
