"""Random numbers of aggregators, server steps and trainers: they follow from seed, purpose and round."""

from dataclasses import dataclass, replace

import pytest
import torch
from test_loop import Made, vec

from flrce import Aggregator, LocalTrainer, ServerStep
from flrce.core.loop import make_initial_state, rounds
from flrce.core.types import State
from flrce.methods.catalogue import recipes
from flrce.rng import RoundStreams, make_stream

DRAWS: list[tuple[str, float]] = []


@dataclass(frozen=True)
class NoisyMean(Aggregator):
    """The mean of the updates, with noise."""

    def __call__(self, w, updates, memory):
        noise = updates.make_rng("noise").standard_normal(len(w))
        return w + updates.U.mean(0) + torch.from_numpy(noise).to(w.dtype)


@dataclass(frozen=True)
class NoisyStep(ServerStep):
    def step(self, w, target, updates, memory):
        return target + float(updates.make_rng("step").standard_normal()), memory


@dataclass(frozen=True)
class DrawingTrainer(LocalTrainer):
    def assign(self, tasks, memory, view):
        assert view.shapes == (("layer.weight", (2,)),)
        DRAWS.append(("view", float(view.make_rng("noise").standard_normal())))
        return tasks


def run(seed, T=3, state: State | None = None):
    engine = Made(lambda client, t, w: vec(1.0, 0.0), ["a", "b", "c"])
    engine.shapes = (("layer.weight", (2,)),)
    recipe = replace(
        recipes.fedavg(P=2), aggregator=NoisyMean(), server=NoisyStep(), trainer=DrawingTrainer()
    )
    start = make_initial_state(recipe, engine, torch.zeros(2)) if state is None else state
    return list(rounds(recipe, engine, start, T, seed))


def test_noise_differs_between_seeds_rounds_and_purposes():
    first, second = run(0)[-1].state.w, run(1)[-1].state.w
    assert not torch.equal(first, second)
    draws = {
        (seed, t, purpose): RoundStreams(seed, t).make_rng(purpose).standard_normal()
        for seed in (0, 1)
        for t in (1, 2)
        for purpose in ("noise", "step")
    }
    assert len(set(draws.values())) == len(draws)


def test_noise_is_the_same_when_a_run_goes_on():
    whole = run(3, T=4)
    half = run(3, T=2)[-1].state
    assert torch.equal(run(3, T=4, state=half)[-1].state.w, whole[-1].state.w)


def test_a_round_of_one_client_is_the_sum_of_its_draws():
    DRAWS.clear()
    done = run(5, T=1)[0]
    noise = RoundStreams(5, 1).make_rng("noise").standard_normal(2)
    step = RoundStreams(5, 1).make_rng("step").standard_normal()
    expected = torch.tensor([1.0 + noise[0] + step, noise[1] + step], dtype=torch.float32)
    torch.testing.assert_close(done.state.w, expected, atol=1e-6, rtol=0)
    # a trainer that names the same purpose draws the same numbers
    assert dict(DRAWS) == {"view": pytest.approx(noise[0])}


def test_draws_are_apart_from_those_of_flrce_and_of_other_tries():
    streams = RoundStreams(0, 1)
    assert streams.make_rng("select").random() != make_stream(0, "select", 1).random()
    assert streams.make_rng("x").random() != RoundStreams(0, 1, attempt=1).make_rng("x").random()
    assert streams.make_rng("x", "a").random() != streams.make_rng("x", "b").random()
