"""Names of recipes that changed their meaning: what files mean now, what stored runs meant."""

import pytest

from flrce.config.experiment import Experiment
from flrce.config.recipe_names import complete_stored_table, explain_changed_name
from flrce.methods.catalogue import recipes
from flrce.methods.catalogue.frugal import LONG_RUN_BITS, choose_bits
from flrce.methods.downlink.chain import ChainState
from flrce.methods.downlink.difference import HeldModels
from flrce.methods.downlink.fitted import FittedDownload


def test_the_default_is_frugal_and_flrce_the_published_method():
    assert Experiment().recipe == {"name": "frugal"}
    assert Experiment().build_recipe().name == "frugal"
    named = Experiment(recipe={"name": "flrce"})
    assert named.recipe == {"name": "flrce", "preset": "paper"}
    assert named.build_recipe().selector == recipes.flrce().selector
    assert Experiment(recipe={"psi": "40%"}).recipe["name"] == "flrce"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"name": "flrce"}, 'the default recipe is now "frugal"'),
        ({"name": "flrce", "preset": "frugal"}, 'preset = "default", points = 4}'),
        ({"name": "flrce", "preset": "wary"}, '{name = "frugal", preset = "wary"}'),
        ({"name": "flrce", "preset": "paper"}, ""),
        ({"name": "flrce", "preset": "hardened", "psi": 3}, ""),
        ({"name": "frugal"}, ""),
        ({"name": "fedprox", "preset": "default"}, ""),
    ],
)
def test_a_changed_meaning_is_told_in_one_line(table, words):
    notice = explain_changed_name(table)
    assert words in notice
    assert bool(words) == bool(notice)
    assert "\n" not in notice


def test_a_stored_run_means_what_it_meant():
    assert complete_stored_table({"name": "flrce"})["preset"] == "default"
    assert complete_stored_table({})["name"] == "flrce"
    assert complete_stored_table({"name": "fedprox"}) == {"name": "fedprox"}


@pytest.mark.parametrize(
    ("rounds", "bits"),
    [(5, (4, 2, 4)), (20, (2, 2, 4)), (21, LONG_RUN_BITS), (None, LONG_RUN_BITS)],
)
def test_short_runs_have_more_bits(rounds, bits):
    assert choose_bits(rounds) == bits


def test_a_fleet_whose_models_do_not_fit_gets_a_chain():
    """8 clients of 4 floats need 128 bytes."""
    assert isinstance(FittedDownload(max_bytes=128).initial_state(8, 4, 4), HeldModels)
    assert isinstance(FittedDownload(max_bytes=127).initial_state(8, 4, 4), ChainState)
