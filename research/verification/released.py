"""Released code of other authors: which files and commits, and single definitions taken from them.

Only the named functions and classes are run, so that none of their packages' imports are needed.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Repository:
    """A public repository at the commit that was read."""

    owner: str
    name: str
    commit: str

    @property
    def url(self) -> str:
        return f"https://github.com/{self.owner}/{self.name}"


HETEROFL = (
    "HeteroFL-Computation-and-Communication-Efficient-Federated-Learning-for-Heterogeneous-Clients"
)
REPOSITORIES = {
    "flrce": Repository("ZiruNiu0", "FLrce", "bae0216"),
    "oort": Repository("SymbioticLab", "Oort", "05a3aa1"),
    "pyramidfl": Repository("liecn", "PyramidFL", "dd1d143"),
    "divfl": Repository("melodi-lab", "divfl", "4a5b80d"),
    "clustered": Repository("Accenture", "Labs-Federated-Learning", "6707484"),
    "heterofl": Repository("diaoenmao", HETEROFL, "cc40f3e"),
    "fedtorch": Repository("MLOPTPSU", "FedTorch", "ab8068d"),
    "niid-bench": Repository("Xtra-Computing", "NIID-Bench", "61b901a"),
    "feddyn": Repository("alpemreacar", "FedDyn", "48a19fa"),
    "feddc": Repository("gaoliang13", "FedDC", "13440c2"),
    "fednova": Repository("JYWa", "FedNova", "47b4e09"),
    "moon": Repository("QinbinLi", "MOON", "8fcba3c"),
    "fedasync": Repository("xcgoner", "async_fl", "4730eeb"),
    "rfa": Repository("krishnap25", "RFA", "40945d2"),
    "robust": Repository("epfml", "byzantine-robust-optimizer", "288417f"),
    "fedrep": Repository("lgcollins", "FedRep", "d82e629"),
}


@dataclass(frozen=True)
class Check:
    """One comparison: what was run, how often, and the largest difference that was found."""

    method: str
    function: str
    cases: int
    difference: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit


def load_definitions(
    code: Path,
    repository: str,
    file: str,
    names: Sequence[str],
    namespace: Mapping[str, Any],
    replacements: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The named top-level functions and classes of a released file, run in `namespace`.

    `replacements` are calls that today's torch or numpy no longer accepts, in a form that they do.
    """
    path = code / REPOSITORIES[repository].name / file
    text = path.read_text(encoding="utf-8")
    for old, new in replacements.items():
        text = text.replace(old, new)
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    found = {node.name for node in tree.body}  # type: ignore[attr-defined]
    if found != set(names):
        raise SystemExit(f"{path}: no {', '.join(sorted(set(names) - found))}")
    scope = dict(namespace)
    exec(compile(tree, str(path), "exec"), scope)
    return scope


def load_statements(code: Path, repository: str, file: str, first: str, last: str) -> CodeType:
    """The statements of a released script from the one that assigns `first` to that of `last`."""
    path = code / REPOSITORIES[repository].name / file
    for block in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(block, "body", None)
        names = [_find_assigned(node) for node in body] if isinstance(body, list) else []
        if first in names and last in names:
            found = body[names.index(first) : names.index(last) + 1]
            return compile(ast.Module(found, []), str(path), "exec")
    raise SystemExit(f"{path}: no statements from {first} to {last}")


def _find_assigned(node: ast.AST) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return target.id if isinstance(target, ast.Name) else ""
