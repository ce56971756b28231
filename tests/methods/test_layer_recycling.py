"""FedLUAR: layers that are not uploaded, and their last update again."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from flrce.config.experiment import Experiment
from flrce.core.pending import apply_changes, find_changes
from flrce.core.pieces import MalformedPayload, ServerSGD
from flrce.core.roles import RoundView
from flrce.core.types import Payload, RoundEvent, Task, Updates
from flrce.errors import BadInput
from flrce.flower.wire import read_piece, write_piece
from flrce.methods.catalogue.recipes import fedluar
from flrce.methods.compression.entropy import EntropyCoded
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.compression.skipped_layers import LayerScoreState, SkippedLayers, draw_layers
from flrce.methods.compression.sparsify import TopK
from flrce.methods.server.optimizers import ServerMomentum
from flrce.methods.server.recycled import RecycledUpdate
from flrce.rng import make_stream
from flrce.simulation import runs
from training import assert_resumes

LAYOUT = [("a.weight", 4), ("a.bias", 2), ("b.weight", 3)]
SHAPES = (("a.weight", (2, 2)), ("a.bias", (2,)), ("b.weight", (1, 3)))


def rng(seed=0):
    return make_stream(seed, "encode", 1, "a")


def test_skipped_tensors_do_not_travel():
    code, u = SkippedLayers(skipped="a.weight"), torch.arange(1.0, 10.0)
    payload, _ = code.encode(u, LAYOUT, rng(), {})
    assert payload.nbytes == code.estimate_bytes(LAYOUT, rng()) == 4 * 5
    assert code.decode(payload, LAYOUT, rng()).tolist() == [0, 0, 0, 0, 5, 6, 7, 8, 9]
    assert code.coverage_mask(LAYOUT, rng()).tolist() == [False] * 4 + [True] * 5
    assert code.instruction_bytes == 2
    assert SkippedLayers().coverage_mask(LAYOUT, rng()) is None
    with pytest.raises(MalformedPayload):
        code.decode(Payload({"u": torch.zeros(9)}), LAYOUT, rng())


def test_the_rest_is_compressed():
    code = SkippedLayers(1, EntropyCoded(RotatedCode(4)), "b.weight")
    u = torch.arange(1.0, 10.0)
    got = code.decode(code.encode(u, LAYOUT, rng(), {})[0], LAYOUT, rng())
    alone = EntropyCoded(RotatedCode(4))
    payload, _ = alone.encode(u[:6], LAYOUT[:2], rng(), {})
    assert torch.equal(got[:6], alone.decode(payload, LAYOUT[:2], rng()))
    assert not got[6:].any()


def updates(covered=None):
    return Updates(
        k=torch.tensor([0]),
        U=torch.zeros(1, 9),
        n=torch.ones(1, dtype=torch.float64),
        trainable=9,
        covered=covered,
        shapes=SHAPES,
    )


def test_scores_by_hand():
    """|step| / |w| of matrices; a layer that nobody sent keeps its score."""
    w = torch.tensor([3.0, 4.0, 0.0, 0.0, 1.0, 1.0, 2.0, 0.0, 0.0])
    step = torch.tensor([0.0, 0.0, 0.6, 0.8, 9.0, 9.0, 0.5, 0.0, 0.0])
    code = SkippedLayers()
    first = code.observe(LayerScoreState(), RoundEvent(1, w, w + step, updates(), 1))
    assert first.names == ("a.weight", "b.weight")
    assert first.scores == pytest.approx((1 / 5, 0.5 / 2), rel=1e-5)
    covered = torch.tensor([[False] * 4 + [True] * 5])
    event = RoundEvent(2, w, w + 2 * step, updates(covered), 1)
    assert code.observe(first, event).scores == pytest.approx((1 / 5, 1.0 / 2), rel=1e-5)


def test_probabilities_are_inverse_scores():
    state = LayerScoreState(("a", "b", "c"), (0.1, 0.2, 0.4))  # 1 / s: 10, 5, 2.5; 4/7, 2/7, 1/7
    seen = [draw_layers(state, 1, make_stream(seed, "recycle", 1))[0] for seed in range(700)]
    counts = {name: seen.count(name) for name in "abc"}
    for name, share in (("a", 4 / 7), ("b", 2 / 7), ("c", 1 / 7)):
        sd = math.sqrt(700 * share * (1 - share))
        assert abs(counts[name] - 700 * share) < 5 * sd
    still = LayerScoreState(("a", "b"), (0.0, 1.0))
    assert draw_layers(still, 1, make_stream(0, "recycle", 1)) == ["a"]


def test_one_matrix_always_travels():
    state, view = LayerScoreState(("a", "b"), (1.0, 1.0)), RoundView(2, 1, (0,), None, *[None] * 3)
    task = SkippedLayers(9).assign([Task("a", 0, 2, 0)], state, view)[0]
    assert len(task.compressor.skipped_names) == 1
    first = SkippedLayers(9).assign([Task("a", 0, 1, 0)], LayerScoreState(), view)[0]
    assert first.compressor is None  # as it was: nothing is known in the first round


def test_the_last_step_is_repeated():
    step, w = RecycledUpdate(), torch.zeros(3)
    state = step.initial_state(1, 3, 3)
    w1, state = step.step(w, torch.tensor([1.0, 2.0, 3.0]), updates(None), state)
    covered = torch.tensor([[True, False, False], [True, False, True]])
    target = torch.tensor([5.0, 2.0, 4.0])
    w2, state = step.step(w1, target, replace(updates(), covered=covered), state)
    assert w2.tolist() == [5.0, 4.0, 4.0]
    w3, _ = step.step(w2, w2, replace(updates(), covered=torch.zeros(1, 3).bool()), state)
    assert w3.tolist() == [9.0, 6.0, 5.0]  # steps 4, 2 and 1 again


def test_an_inner_step_keeps_its_state():
    step, alone = RecycledUpdate(ServerMomentum(0.5)), ServerMomentum(0.5)
    state, own, w = step.initial_state(1, 9, 9), alone.initial_state(1, 9, 9), torch.zeros(9)
    for _ in range(3):
        target = w + 1
        mine, state = step.step(w, target, updates(), state)
        w, own = alone.step(w, target, updates(), own)
        assert torch.equal(mine, w)


def test_a_task_travels_and_is_stored():
    piece, task = SkippedLayers(), SkippedLayers(skipped="a.weight,b.weight")
    assert read_piece("compressor", write_piece("compressor", task, "c"), "c") == task
    assert apply_changes(piece, find_changes(task, piece)) == task


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: SkippedLayers(1, ErrorFeedback(TopK(0.1))), "error feedback"),
        (lambda: SkippedLayers(1, 3), "compressor"),
        (lambda: RecycledUpdate(RecycledUpdate()), "another server step"),
        (lambda: replace(fedluar(), compressor=EntropyCoded(SkippedLayers())), "outermost"),
    ],
)
def test_bad_settings_are_refused(make, word):
    with pytest.raises(BadInput, match=word):
        make()


def experiment(**recipe):
    return Experiment.from_tables(
        {
            "rounds": 6,
            "clients": 8,
            "per_round": 3,
            "train": {"lr": 0.05, "epochs": 1, "batch": 16},
            "recipe": {"name": "fedluar", **recipe},
            "engine": {"workers": 1},
        }
    )


def test_a_run_is_a_plain_loop(tmp_path):
    """Scores, draws, repeated steps and bytes, worked out again from the models of the rounds."""
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 10)
    )
    models = [torch.cat([p.detach().flatten() for p in net.parameters()]).clone()]
    exp = experiment(layers=1)
    watch = lambda done: models.append(done.state.w.clone())  # noqa: E731
    runs.run(exp, tmp_path, model=net, watch=watch)
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").open()]
    shapes = {name: p.shape for name, p in net.named_parameters()}
    scores, last, seen = {}, {}, set()
    for t in range(1, 7):
        skipped, start = "", 0
        if scores:
            inverse = np.array([1 / score for score in scores.values()])
            stream = make_stream(exp.seed, "recycle", t)
            drawn = stream.choice(3, size=1, replace=False, p=inverse / inverse.sum())
            skipped = list(scores)[drawn[0]]
        seen.add(skipped)
        floats = len(models[0]) - (shapes[skipped].numel() if skipped else 0)
        assert rows[t - 1]["bytes_up"] == 3 * 4 * floats  # three clients, float32
        assert rows[t - 1]["bytes_framing"] == 3 * (8 + 2 * bool(skipped))
        for name, shape in shapes.items():
            span = slice(start, start + shape.numel())
            w, w_next, start = models[t - 1][span], models[t][span], span.stop
            if name == skipped:
                assert torch.equal(w_next, w + last[name])
                continue
            last[name] = w_next - w
            if len(shape) > 1:
                scores[name] = float(last[name].double().norm() / (w.double().norm() + 1e-6))
    assert len(seen) > 1


@pytest.mark.parametrize("server", ["step", "momentum"])
def test_a_run_resumes(server, tmp_path):
    exp = experiment(layers=2, server={"piece": "recycled", "inner": server})
    assert_resumes(exp, tmp_path, after=3)


def test_without_recycling_a_layer_rests(tmp_path):
    models = []
    exp = experiment(layers=2, server="step")
    runs.run(exp, tmp_path, watch=lambda done: models.append(done.state.w.clone()))
    still = [int((a == b).sum()) for a, b in pairwise(models)]
    assert min(still) >= 72  # the smallest matrix at least, 8 x 1 x 3 x 3
    assert isinstance(fedluar().server, RecycledUpdate)
    assert fedluar().server.inner == ServerSGD()
