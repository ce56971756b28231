"""IFCA: several global models, against a plain loop; bytes and FLOPs by hand; after a kill; over
Flower.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flrce
from flrce.core.pieces import MalformedPayload
from flrce.core.types import Payload
from flrce.devices.costs import inference_flops, training_flops
from flrce.errors import BadInput
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.compression.trained_group import TrainedGroup
from flrce.models.inputs import scale_inputs
from flrce.models.model_groups import ModelGroups, find_group_columns
from flrce.simulation import runs
from training import cut_and_resumed

CLIENTS, SAMPLES, FEATURES, K = 6, 40, 5, 2


def make_data():
    """Odd clients have the opposite labels of even ones: no single model fits both."""
    rng = np.random.default_rng(3)
    data = {}
    for client in range(CLIENTS):
        x = rng.normal(size=(SAMPLES, FEATURES)).astype("float32")
        y = (x[:, 0] > 0).astype("int64")
        data[f"client-{client}"] = (x, 1 - y if client % 2 else y)
    return data


def make_network():
    torch.manual_seed(0)
    return nn.Linear(FEATURES, 2)


def make_experiment(**tables):
    """One full batch is an epoch, so that the order of samples does not matter."""
    settings = {
        "rounds": 5,
        "clients": CLIENTS,
        "per_round": 4,
        "recipe": {"name": "ifca", "groups": K},
        "train": {"epochs": 2, "batch": SAMPLES, "lr": 0.5},
        "engine": {"workers": 1},
    }
    return flrce.Experiment(**settings | tables)


@pytest.fixture(scope="module")
def trained():
    experiment, data = runs.with_given_clients(make_experiment(), make_data())
    built = runs.build_simulation(experiment, data, make_network())
    done = list(built.iterate_rounds(experiment))
    built.engine.close()
    return built, done


def test_the_same_as_a_plain_loop(trained):
    built, done = trained
    federation = built.federation
    source = federation.source
    x = scale_inputs(torch.from_numpy(np.array(source.x)), source.scale, source.shift)
    y = torch.from_numpy(np.array(source.y))
    models = [make_network(), ModelGroups(make_network(), K, 0).members[1]]
    for one in done:
        sent = [[p.detach().clone() for p in net.parameters()] for net in models]
        sums, weights = [[torch.zeros_like(p) for p in net] for net in sent], [0.0] * K
        for client in one.record.replied:
            rows = torch.from_numpy(federation.train[federation.client_indices[client]])
            a, b = x[rows], y[rows]
            losses = [F.cross_entropy(F.linear(a, *net), b) for net in sent]
            chosen = int(torch.stack(losses).argmin())
            weight, bias = (p.clone().requires_grad_() for p in sent[chosen])
            for _ in range(2):
                grads = torch.autograd.grad(
                    F.cross_entropy(F.linear(a, weight, bias), b), (weight, bias)
                )
                weight, bias = (
                    (p - 0.5 * g).detach().requires_grad_()
                    for p, g in zip((weight, bias), grads, strict=True)
                )
            weights[chosen] += len(rows)
            for total, new, old in zip(sums[chosen], (weight, bias), sent[chosen], strict=True):
                total += len(rows) * (new.detach() - old)
        for net, total, n in zip(models, sums, weights, strict=True):
            for p, s in zip(net.parameters(), total, strict=True):
                p.data += s / n if n else 0
        expected = torch.cat([p.detach().reshape(-1) for net in models for p in net.parameters()])
        torch.testing.assert_close(one.state.w, expected, rtol=1e-4, atol=1e-5)


def test_clients_find_the_model_of_their_kind(trained):
    _, done = trained
    chosen = {
        line.client: line.figures["group"] for one in done for line in one.clients if line.figures
    }
    by_kind = [{g for k, g in chosen.items() if int(k[-1]) % 2 == kind} for kind in (0, 1)]
    assert sorted(map(sorted, by_kind)) == [[0.0], [1.0]]
    assert done[-1].record.accuracy > 0.85
    sizes = done[-1].record.figures
    assert sizes["group-0"] + sizes["group-1"] == len(done[-1].record.replied)
    alone = runs.run(
        make_experiment(recipe={"name": "fedavg"}), data=make_data(), model=make_network()
    )
    assert alone.history[-1].accuracy < 0.7


def test_bytes_and_flops_by_hand(trained):
    """Down: k models. Up: one model, its number in a byte, and the number that the link sends.
    FLOPs: k passes forward over the samples, and 2 epochs of one model.
    """
    _, done = trained
    floats = FEATURES * 2 + 2
    net = make_network()
    for line in (line for one in done for line in one.clients if line.outcome == "useful"):
        assert line.spent.bytes_down == 4 * K * floats
        assert line.spent.bytes_up == 4 * floats + 1 + 4
        n = line.n
        work = 2 * n * training_flops(net, (FEATURES,)) + K * n * inference_flops(net, (FEATURES,))
        assert line.spent.flops == work
        assert line.spent.batches == 2 + K


def test_estimates_are_what_is_booked(trained):
    built, done = trained
    plan = runs.loop.plan_round(built.recipe, built.engine, done[-1].state, 0)
    for task in plan.tasks:
        spent = built.engine.estimate(task)
        assert (spent.bytes_down, spent.bytes_up) == (4 * K * 12, 4 * 12 + 5)


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    given = {"data": make_data(), "model": make_network()}
    runs.run(make_experiment(), tmp_path / "straight", **given)
    cut_and_resumed(make_experiment(), tmp_path / "cut", tmp_path / "straight", **given)


@pytest.mark.parametrize("bits", [None, 8])
def test_over_flower_it_is_the_same(bits):
    pytest.importorskip("flwr")
    recipe = {"name": "ifca", "groups": K}
    if bits:
        inner = {"piece": "quantize", "bits": bits}
        recipe["compressor"] = {"piece": "trained-group", "groups": K, "inner": inner}
    given = {"data": make_data(), "model": make_network()}
    here = runs.run(make_experiment(rounds=3, recipe=recipe), **given)
    flower = make_experiment(rounds=3, recipe=recipe, engine={"name": "flower"})
    there = runs.run(flower, **given)
    for one, two in zip(here.history, there.history, strict=True):
        assert (one.bytes_up, one.bytes_down, one.figures) == (
            two.bytes_up,
            two.bytes_down,
            two.figures,
        )
        assert one.joules == pytest.approx(two.joules)
    for name, tensor in here.model.items():
        torch.testing.assert_close(there.model[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_network_by_name_and_from_a_folder(tmp_path):
    experiment = flrce.Experiment(
        rounds=2,
        clients=6,
        per_round=3,
        recipe={"name": "ifca", "groups": 3},
        model={"name": "mlp"},
        train={"epochs": 1},
    )
    result = runs.run(experiment, tmp_path / "run")
    assert isinstance(flrce.load(tmp_path / "run").network, ModelGroups)
    groups = {int(m["group"]) for m in map(result.personal.get, result.history[-1].replied) if m}
    assert groups <= {0, 1, 2}


def test_devices_decode_the_model_that_the_server_names():
    """flrce_client's code of one model among several: on Flower the same bytes and bits."""
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    given = {"data": make_data(), "model": make_network()}
    downlink = {"piece": "given-group", "groups": K}
    here, there = (
        runs.run(describe_given(downlink=downlink, engine={"name": name}), **given)
        for name in ("simulator", "flower")
    )
    assert here.summary["bytes_down"] == there.summary["bytes_down"]
    assert all(torch.equal(here.model[name], there.model[name]) for name in here.model)


LAYOUT = [("members.0.a", 2), ("members.1.a", 2), ("members.0.m", 1), ("members.1.m", 1)]


def test_the_compressor_sends_the_group_that_changed():
    u = torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0, 3.0])
    assert [c.tolist() for c in find_group_columns(LAYOUT, 2)] == [[0, 1, 4], [2, 3, 5]]
    code = TrainedGroup(2)
    payload, _ = code.encode(u, LAYOUT, None, {})
    assert payload.nbytes == code.estimate_bytes(LAYOUT, None) == 13
    assert torch.equal(code.decode(payload, LAYOUT, None), u)
    for buffers in (
        {**payload.buffers, "group": torch.tensor([2], dtype=torch.uint8)},
        {**payload.buffers, "more": torch.zeros(3)},
        {**payload.buffers, "u.u": torch.zeros(4)},
        {"u.u": torch.zeros(3)},
    ):
        with pytest.raises(MalformedPayload):
            code.decode(Payload(buffers), LAYOUT, None)


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"recipe": {"name": "ifca", "sums": True}}, "the server must know each client's group"),
        ({"recipe": {"name": "fedavg", "aggregator": "group-mean"}}, 'no link sends "group"'),
    ],
)
def test_what_does_not_go_together_is_an_error(tables, complaint):
    with pytest.raises(BadInput, match=complaint):
        make_experiment(**tables)


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"recipe": {"name": "fedavg"}}, r"model\.personal"),
        (
            {"recipe": {"name": "fedavg"}, "model": {"personal": "group"}},
            "WeightedMean does not keep",
        ),
        ({"recipe": {"name": "ifca", "aggregator": "median"}}, "CoordinateMedian does not keep"),
    ],
)
def test_groups_that_would_be_mixed_are_an_error(tables, complaint):
    if tables["recipe"]["name"] == "fedavg":
        update = ["lowest-loss-group", {"piece": "sgd", "lr": 0.1}]
        tables = tables | {"train": {"update": update}}
    with pytest.raises(BadInput, match=complaint):
        runs.build_simulation(make_experiment(**tables), make_data(), make_network())


def test_members_must_differ_and_groups_be_forgetful():
    with pytest.raises(BadInput, match="keeps a state"):
        TrainedGroup(2, ErrorFeedback(Quantizer(8)))
    with pytest.raises(BadInput, match="begin alike"):
        ModelGroups(Own(), 2)


class Own(nn.Module):
    """Parameters of its own, which nothing resets."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))


@dataclass(frozen=True)
class ByRow(flrce.LocalTrainer):
    """Client k trains model k mod K."""

    def assign(self, tasks, state, view):
        return [replace(task, tensors={"group": torch.tensor([task.k % K])}) for task in tasks]


def describe_given(engine=None, **recipe):
    tables = {
        "name": "fedavg",
        "trainer": f"{__name__}:ByRow",
        "compressor": {"piece": "trained-group", "groups": K},
        "aggregator": {"piece": "group-mean", "groups": K},
    }
    update = [{"piece": "given-group", "groups": K}, {"piece": "sgd", "lr": 0.5}]
    return make_experiment(
        recipe=tables | recipe,
        model={"personal": "group"},
        train={"epochs": 2, "batch": SAMPLES, "update": update},
        engine={"workers": 1, "kernel": "torch"} | (engine or {}),
    )


def run_given(**recipe):
    return flrce.run(describe_given(**recipe), data=make_data(), model=make_network())


def test_the_model_that_the_server_names_is_all_that_travels():
    one = run_given(downlink={"piece": "given-group", "groups": K})
    all_models = run_given()
    assert all(torch.equal(one.model[name], all_models.model[name]) for name in one.model)
    d = 2 * FEATURES + 2
    replies = sum(len(record.replied) for record in one.history)
    number = 8  # the task's int64
    assert all_models.summary["bytes_down"] == replies * (4 * K * d + number)
    assert one.summary["bytes_down"] == replies * (4 * d + 1 + number)
    groups = {client: int(kept["group"]) for client, kept in one.personal.items()}
    assert all(groups[client] == int(client[-1]) % K for client in one.history[-1].replied)


def test_a_group_that_nobody_names_is_refused():
    with pytest.raises(BadInput, match='no trainer sends the tensor "group"'):
        run_given(trainer="alike", downlink={"piece": "given-group", "groups": K})
    with pytest.raises(BadInput, match='tensor "group" must be a number below 2'):
        run_given(trainer="alike")
    with pytest.raises(BadInput, match="sends one model, and a link compares several"):
        flrce.run(
            make_experiment(recipe={"name": "ifca", "groups": K, "downlink": "given-group"}),
            data=make_data(),
            model=make_network(),
        )
