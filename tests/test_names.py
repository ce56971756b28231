"""Names read as the field writes: verbs with an object, nouns for classes, each class name once."""

import ast
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import flrce
from flrce import Selector
from flrce.errors import BadInput

SOURCE = Path(__file__).resolve().parent.parent / "src" / "flrce"
RESEARCH = SOURCE.parent.parent / "research" / "src"
TREES = [ast.parse(path.read_text()) for root in (SOURCE, RESEARCH) for path in root.rglob("*.py")]
IRREGULAR = [
    "told",
    "heard",
    "kept",
    "held",
    "sent",
    "found",
    "brought",
    "made",
    "gone",
    "begun",
    "laid",
    "said",
    "seen",
    "known",
    "drawn",
    "cut",
    "come",
    "left",
    "shown",
    "written",
    "given",
    "taken",
    "met",
    "spent",
    "chosen",
    "lost",
    "paid",
    "built",
    "bound",
    "frozen",
    "split",
]
#: functions inside kernels and C templates, and names that users already have
ALLOWED = {
    "chained", "compressing", "diverged", "embedding", "encoding", "mapping", "padding", "scaled",
    "seed", "speed", "split", "timing", "weighted",
}  # fmt: skip


def function_names():
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for tree in TREES for node in ast.walk(tree) if isinstance(node, kinds)}


def test_functions_are_no_bare_participles():
    bare = {name.strip("_") for name in function_names()}
    participles = {name for name in bare if re.fullmatch("[a-z]+(ed|ing)", name)} | (
        bare & set(IRREGULAR)
    )
    recipes = set(flrce.recipes.CATALOGUE)  # fedkseed
    assert participles - ALLOWED - recipes == set()


def test_every_class_has_a_name_of_its_own():
    classes = Counter(
        node.name for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    twice = {name for name, count in classes.items() if count > 1}
    assert twice == set()


@dataclass(frozen=True)
class OldSelector(Selector):
    """Written before 0.2: `init` would be ignored."""

    def init(self, M, d, D):
        return None

    def select(self, memory, view, rng):
        raise AssertionError("never reached")


def test_a_piece_with_an_old_method_name_is_an_error():
    with pytest.raises(BadInput, match=r"OldSelector\.init is called initial_state since"):
        replace(flrce.recipes.fedavg(P=2), selector=OldSelector())
