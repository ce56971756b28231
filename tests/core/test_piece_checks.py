"""Links that would be lost are refused when the recipe is built: one name sent twice, links on
another role.
"""

from dataclasses import dataclass, field, replace

import pytest
import torch

from flrce import Link
from flrce.cli.cli import main
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.client.workload import PlainTraining
from flrce.methods.selection.rooted import RootClientSampling
from flrce.methods.selection.uniform import UniformSelector
from flrce.training.update_chain import SGD, UpdateChain


@dataclass(frozen=True)
class Sender(Link):
    name: str = "mean"

    def step(self, g, w, state):
        return g, state

    def list_extra_sizes(self, d):
        return {self.name: d}

    def end_round(self, w, state):
        return {}, {self.name: w.clone()}


@dataclass(frozen=True)
class SendingTrainer(PlainTraining):
    @property
    def links(self):
        return (Sender(),)


@dataclass(frozen=True)
class LinkedSelector(UniformSelector):
    @property
    def links(self):
        return (Sender(),)


@dataclass(frozen=True)
class Graph(UniformSelector):
    links: tuple = (3, 4)  # something else of the same name
    inner: object = field(default=None)


def test_two_links_that_send_one_name_are_refused():
    both = UpdateChain((Sender("a"), Sender("b"), SGD()))
    assert both.list_extra_sizes(4) == {"a": 4, "b": 4}
    with pytest.raises(BadInput, match="Sender sends 'a', as a link before it does"):
        UpdateChain((Sender("a"), Sender("a"), SGD()))
    one = Sender("a")
    with pytest.raises(BadInput, match="'a'"):
        UpdateChain((one, one, SGD()))
    with pytest.raises(BadInput, match="'mean'"):
        replace(recipes.fedavg(2), trainer=SendingTrainer(), update=UpdateChain((Sender(), SGD())))


def test_a_name_that_is_sent_twice_without_being_declared_is_refused_too():
    class Silent(Link):
        def step(self, g, w, state):
            return g, state

        def end_round(self, w, state):
            return {}, {"mean": w}

    chain = UpdateChain((Silent(), Silent(), SGD()))
    with pytest.raises(BadInput, match="'mean'"):
        chain.end_round(torch.zeros(2), ({}, {}, {}))


@pytest.mark.parametrize(
    "selector", [LinkedSelector(), RootClientSampling(LinkedSelector(), 0)], ids=["plain", "inner"]
)
def test_links_of_another_role_than_the_trainer_are_refused(selector):
    with pytest.raises(
        BadInput, match=r"selector \w+ has links, and only a trainer's reach clients"
    ):
        replace(recipes.fedavg(2), selector=selector)


def test_a_field_named_links_that_holds_no_links_is_allowed():
    assert replace(recipes.fedavg(2), selector=Graph()).selector == Graph()
    assert replace(recipes.fedavg(2), trainer=SendingTrainer()).chain.list_extra_sizes(3) == {
        "mean": 3
    }


def test_the_command_line_says_it_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "misplaced.py").write_text(
        "from dataclasses import dataclass\n"
        "from flrce.methods.selection.uniform import UniformSelector\n"
        "class Link:\n"
        "    def step(self, g, w, state): return g, state\n"
        "@dataclass(frozen=True)\n"
        "class Mine(UniformSelector):\n"
        "    @property\n"
        "    def links(self): return [Link()]\n"
    )
    (tmp_path / "e.toml").write_text(
        'rounds = 1\nclients = 4\nper_round = 2\n[recipe]\nname = "fedavg"\nselector ='
        ' "misplaced:Mine"\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["run", "e.toml"]) == 2
    assert "selector Mine has links" in capsys.readouterr().err
