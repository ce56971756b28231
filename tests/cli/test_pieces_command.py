"""flrce pieces list | show, and the families of flrce recipes list."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from flrce.cli.cli import main
from flrce.core.types import RoundRecord
from flrce.methods.catalogue.families import EVIDENCE, FAMILIES, describe_evidence
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.methods.registry import PIECES
from flrce.report.selection import get_phase


def read_json(capsys, *command):
    assert main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_recipe_belongs_to_one_family():
    members = Counter(name for names in FAMILIES.values() for name in names)
    assert set(members) == set(CATALOGUE)
    assert set(members.values()) == {1}


def test_every_recipe_says_how_it_was_verified_as_its_documentation_does():
    words = Counter(name for names in EVIDENCE.values() for name in names)
    assert set(words) == set(CATALOGUE)
    assert set(words.values()) == {1}
    text = (Path(__file__).parents[2] / "docs/methods.md").read_text()
    found = {}
    for section in re.split(r"\n##+ ", text):
        names = re.findall(r"`([\w-]+)`", section.splitlines()[0])
        verified = " ".join(re.findall(r"Verified: .*", section))
        bold = set(re.findall(r"\*\*(run|code|paper|abstract|recalled)\*\*", verified))
        found |= dict.fromkeys(names, bold or ({"ours"} if "Ours" in section else set()))
    assert {name for name in CATALOGUE if describe_evidence(name) not in found[name]} == set()


def test_recipes_are_listed_by_family(capsys):
    rows = read_json(capsys, "recipes", "list")
    assert {row["name"]: row["family"] for row in rows}["scaffold"] == "client drift"
    assert {row["name"]: row["verified"] for row in rows}["tifl"] == "recalled"
    assert main(["recipes", "list"]) == 0
    assert capsys.readouterr().out.count("client drift") == 1


def test_every_piece_is_listed_with_settings_and_file(capsys):
    rows = read_json(capsys, "pieces", "list")
    assert {(row["role"], row["name"]) for row in rows} == {
        (role, name) for role, names in PIECES.items() for name in names
    }
    topk = next(row for row in rows if row["name"] == "topk")
    assert topk["file"] == "methods/compression/sparsify.py"
    assert topk["settings"].startswith("keep = 0.6")
    assert all(row["file"].endswith(".py") and row["summary"] for row in rows)


def test_one_role(capsys):
    assert {row["role"] for row in read_json(capsys, "pieces", "list", "stop")} == {"stop"}
    assert main(["pieces", "list", "stopp"]) == 2
    assert "did you mean 'stop'?" in capsys.readouterr().err


def test_a_piece_is_shown_for_every_role_that_has_its_name(capsys):
    shown = read_json(capsys, "pieces", "show", "momentum")
    assert [each["role"] for each in shown] == ["server", "link"]
    assert shown[0]["setting"] == "recipe.server"
    assert {"name": "beta", "type": "float", "default": "0.9"} in shown[0]["settings"]
    assert main(["pieces", "show", "topk"]) == 0
    assert "largest in" in capsys.readouterr().out


def test_an_unknown_piece(capsys):
    assert main(["pieces", "show", "quantiz"]) == 2
    assert "did you mean 'quantize'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("why", "exploit", "phase"),
    [({}, False, ""), ({"due": 3}, True, ""), ({"phi": 0.4}, True, "exploit"), ({"epsilon": 0.9}, False, "explore")],
)  # fmt: skip
def test_only_selectors_that_explore_have_a_phase(why, exploit, phase):
    assert get_phase(RoundRecord(1, exploit=exploit, why=why)) == phase
