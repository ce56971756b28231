"""Mistakes in a user's pieces that no base class can see: each is one clear line."""

from dataclasses import dataclass, field, replace

import pytest
import torch

import flrce
from flrce.core.downlink import EncodedModel
from flrce.core.pieces import get_buffer
from flrce.core.types import Download
from flrce.errors import BadInput
from flrce.training.update_chain import SGD, UpdateChain


@dataclass(frozen=True)
class Mean(flrce.Aggregator):
    def __call__(self, w, updates, state):
        return w + updates.U.mean(0)


class WritesModel(Mean):
    def __call__(self, w, updates, state):
        w += updates.U.mean(0)
        return w


class WritesUpdates(Mean):
    def __call__(self, w, updates, state):
        updates.U.mul_(0.5)
        return w + updates.U.mean(0)


class ForgetsToReturn(Mean):
    def initial_state(self, M, d, D):
        return (0,)

    def observe(self, state, event):
        state = (state[0] + 1,)


class KeepsASet(Mean):
    def initial_state(self, M, d, D):
        return {1, 2}


@dataclass(frozen=True)
class Idle(flrce.Link):
    def step(self, g, w, state):
        return g, state


class SendsNumber(Idle):
    def end_round(self, w, state):
        return {}, {"x": 1.5}

    def list_extra_sizes(self, d):
        return {"x": 1}


class KeepsNumber(Idle):
    def end_round(self, w, state):
        return {"x": 3}, {}


class OneTerm(Idle):
    def loss_term(self, batch, state):
        return batch.features.square().mean()


@dataclass(frozen=True)
class SendsFloat(flrce.LocalTrainer):
    def assign(self, tasks, state, view):
        return [replace(task, tensors={"x": 1.0}) for task in tasks]


@dataclass(frozen=True)
class OneForAll(flrce.Downlink):
    def encode_models(self, state, w, requests):
        return [EncodedModel(w, None)], state


MISTAKES = [
    ({"aggregator": WritesModel()}, "WritesModel changed the model or the updates"),
    ({"aggregator": WritesUpdates()}, "WritesUpdates changed the model or the updates"),
    ({"aggregator": ForgetsToReturn()}, "ForgetsToReturn.observe returned None"),
    ({"aggregator": KeepsASet()}, "its state is a set"),
    ({"update": UpdateChain((SendsNumber(), SGD(0.1)))}, "SendsNumber.end_round returned"),
    ({"update": UpdateChain((KeepsNumber(), SGD(0.1)))}, "KeepsNumber.end_round returned"),
    ({"update": UpdateChain((OneTerm(), SGD(0.1)))}, "OneTerm.loss_term gave a tensor of"),
    ({"trainer": SendsFloat()}, r"SendsFloat.assign: tensors\['x'\] is a float"),
    ({"downlink": OneForAll()}, "OneForAll.encode_models gave 1 downloads for 2 requests"),
]
SMALL = {"rounds": 2, "clients": 6, "engine": {"workers": 1, "kernel": "torch"}}


@pytest.mark.parametrize(("pieces", "says"), MISTAKES)
def test_a_mistake_is_one_line(pieces, says):
    recipe = replace(flrce.recipes.fedavg(P=2, epochs=1), **pieces)
    with pytest.raises(BadInput, match=says) as problem:
        flrce.run(flrce.Experiment(recipe=recipe, **SMALL))
    assert "\n" not in str(problem.value)


@dataclass(frozen=True)
class HalfCode(flrce.Compressor):
    """float16."""

    def encode(self, u, layout, rng, client_state):
        return flrce.Payload({"half": u.half()}), client_state

    def decode(self, payload, layout, rng):
        size = sum(count for _, count in layout)
        return get_buffer(payload, "half", torch.float16, size).float()


@dataclass(frozen=True)
class HalfDownload(flrce.Downlink):
    """Only what a downlink must define."""

    code: flrce.Compressor = field(default=HalfCode())

    def encode_models(self, state, w, requests):
        payload = flrce.Payload({"half": w.half()})
        download = Download("full", self.code, nbytes=payload.nbytes, coded=True)
        return [EncodedModel(w.half().float(), download, payload) for _ in requests], state


def test_a_downlink_that_defines_encode_models_alone_is_asked():
    recipe = replace(flrce.recipes.fedavg(P=2, epochs=1), downlink=HalfDownload())
    dense = flrce.run(flrce.Experiment(recipe=flrce.recipes.fedavg(P=2, epochs=1), **SMALL))
    half = flrce.run(flrce.Experiment(recipe=recipe, **SMALL))
    assert 2 * half.summary["bytes_down"] == dense.summary["bytes_down"]
