"""What the server sends: difference downloads against a plain loop, their bytes, and who holds
what.
"""

import copy
from dataclasses import replace

import pytest
import torch
from test_recipes import RECIPES, SLOW
from torch import nn

from flrce.config.experiment import Experiment
from flrce.core import loop
from flrce.core.downlink import (
    DenseDownload,
    DownloadRequest,
    HeldPart,
    decode_model,
    encode_model,
    encode_model_batch,
    split_batches,
)
from flrce.core.memory_limits import check_memory, estimate_server_bytes
from flrce.core.types import ClientCost, Download, Payload, Reply, Task
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.compression.sparsify import RandomK, TopK
from flrce.methods.downlink.chain import ChainedDownload
from flrce.methods.downlink.difference import DifferenceDownload
from flrce.methods.downlink.quantised import QuantisedDownload
from flrce.models.flat import pack_model, unpack_model
from flrce.rng import make_stream
from flrce.simulation import runs
from stub_engine import StubEngine
from training import cut_and_resumed

DIFFERENCE = {
    "piece": "difference",
    "code": {"piece": "quantize", "bits": 4},
    "first": {"piece": "quantize", "bits": 6},
}
SMALL = {
    "rounds": 5,
    "per_round": 3,
    "clients": 7,
    "seed": 3,
    "data": {"name": "digits"},
    "train": {"epochs": 1, "batch": 16},
    "engine": {"workers": 1, "kernel": "torch"},
}


def made(downlink=DIFFERENCE, name="fedavg", engine=None, **tables):
    recipe = {"name": name, **tables.pop("recipe", {}), "downlink": downlink}
    return Experiment.from_tables(
        SMALL | {"recipe": recipe, "engine": engine or SMALL["engine"]} | tables
    )


def states(experiment):
    """The simulation, and every round of it."""
    built = runs.build_simulation(experiment)
    recipe, engine = built.recipe, built.engine
    start = built.initial_state()
    done = [
        replace(one, state=replace(one.state, server_state=copy.deepcopy(one.state.server_state)))
        for one in loop.rounds(recipe, engine, start, experiment.rounds, experiment.seed)
    ]
    engine.close()
    return built, done


def sgd_update(built, w, client, t, seed):
    """(local model - w) after one epoch of plain SGD, and the client's samples."""
    federation, runner = built.engine.federation, built.engine.runner
    index = federation.get_client_samples(client, t)
    order = index[make_stream(seed, "batches", t, client).permutation(len(index))]
    net = unpack_model(copy.deepcopy(built.net), w).train()
    for start in range(0, len(order), 16):
        batch = torch.from_numpy(order[start : start + 16])
        if len(batch) == 1:
            continue  # BatchNorm cannot train on one sample
        x = runner.x[batch].float() * runner.scale + runner.shift
        net.zero_grad()
        nn.functional.cross_entropy(net(x), runner.y[batch]).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
    return pack_model(net) - w, len(index)


def trained(built):
    """The tensors that a code encodes: all but BatchNorm's statistics."""
    names, found = built.engine.runner.all.names, []
    for name, size in names:
        if sum(n for _, n in found) < built.engine.trainable:
            found.append((name, size))
    return found


def test_difference_downloads_equal_a_plain_loop():
    built, done = states(made(train={"epochs": 1, "batch": 16, "lr": 0.1}))
    layout, d = trained(built), built.engine.trainable
    w = w0 = pack_model(built.net)
    held = {}
    for one in done:
        t, total, mean = one.record.t, 0, torch.zeros_like(w, dtype=torch.float64)
        for client in one.record.chosen:
            code = Quantizer(4) if client in held else Quantizer(6)
            base = held.get(client, w0)
            rng = make_stream(3, "downlink", t, client)
            payload, _ = code.encode((w - base)[:d], layout, rng, {})
            # BatchNorm's statistics travel as they are
            held[client] = torch.cat([base[:d] + code.decode(payload, layout), w[d:]])
            u, n = sgd_update(built, held[client], client, t, 3)
            mean, total = mean + n * u.double(), total + n
        w = (w.double() + mean / total).float()
        torch.testing.assert_close(one.state.w, w, rtol=1e-5, atol=1e-6)
        for client, model in held.items():
            row = one.state.roster.index(client)
            torch.testing.assert_close(
                one.state.server_state["downlink"].models[row], model, rtol=1e-5, atol=1e-6
            )
        w = one.state.w  # rounding errors do not add up


def test_bytes_by_hand():
    """1946 trained floats in 8 tensors and 48 statistics: levels without gaps, three float32 a
    tensor, and a float32 a statistic.
    """
    built, done = states(made())
    first = -(-6 * 1946 // 8) + 12 * len(trained(built)) + 4 * 48
    later = -(-4 * 1946 // 8) + 12 * len(trained(built)) + 4 * 48
    seen = set()
    for one in done:
        new = [client for client in one.record.chosen if client not in seen]
        old = [client for client in one.record.chosen if client in seen]
        seen.update(new)
        if one.record.t == 1:  # w is still the initial model, which is a seed
            assert one.record.bytes_down == 0
            continue
        assert one.record.bytes_down == len(new) * first + len(old) * later
        # 8 bytes of numbers; hashes of the base and in the reply; a seed for the initial model
        assert one.record.bytes_framing == len(new) * (8 + 8 + 32) + len(old) * (8 + 32)
        kinds = {"first": len(new), "difference": len(old)}
        assert one.record.why["downloads"] == {k: n for k, n in kinds.items() if n}
        down = {line.client: line.spent.bytes_down for line in one.clients}
        assert down == {c: first if c in new else later for c in one.record.chosen}


def test_the_radio_pays_for_the_encoded_bytes():
    built, done = states(made())
    line = done[1].clients[0]
    assert line.spent.bytes_down
    profile = built.engine.fleet[line.client]
    spent = line.spent
    assert 8 * spent.bytes_down / profile.down_bits + 8 * spent.bytes_up / profile.up_bits == (
        pytest.approx(spent.transfer_seconds)
    )


def test_quantised_downloads_are_one_model_for_all():
    built, done = states(made({"piece": "quantised", "code": {"piece": "quantize", "bits": 8}}))
    w, d, layout = pack_model(built.net), built.engine.trainable, trained(built)
    assert "downlink" not in done[0].state.server_state
    size = d + 12 * len(layout) + 4 * (len(w) - d)
    assert {one.record.bytes_down for one in done} == {3 * size}
    code = Quantizer(8)
    payload, _ = code.encode(w[:d], layout, make_stream(3, "downlink", 1), {})
    sent, total, mean = torch.cat([code.decode(payload, layout), w[d:]]), 0, torch.zeros_like(w)
    for client in done[0].record.chosen:
        u, n = sgd_update(built, sent, client, 1, 3)
        mean, total = mean + n * u, total + n
    torch.testing.assert_close(done[0].state.w, w + mean / total, rtol=1e-4, atol=1e-6)


def test_an_exact_code_changes_nothing_but_the_last_bits():
    exact = {"piece": "difference", "code": "dense", "first": "dense"}
    (_, dense), (_, found) = states(made("dense")), states(made(exact))
    assert [one.record.chosen for one in dense] == [one.record.chosen for one in found]
    torch.testing.assert_close(found[-1].state.w, dense[-1].state.w, rtol=1e-4, atol=1e-6)
    assert found[0].record.bytes_down == dense[0].record.bytes_down


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kernel", ["torch", "native"])
def test_workers_and_kernels_do_not_show(workers, kernel):
    _, plain = states(made())
    _, found = states(made(engine={"workers": workers, "kernel": kernel}))
    if kernel == "torch":
        assert torch.equal(plain[-1].state.w, found[-1].state.w)
    # one rounding of the quantiser that falls on the other side moves w by a step
    assert float((plain[0].state.w - found[0].state.w).abs().max()) < 1e-5
    assert [one.record.bytes_down for one in plain] == [one.record.bytes_down for one in found]


@pytest.mark.parametrize("pace", ["synchronous", {"piece": "buffered", "size": 2}])
def test_a_cut_run_resumes_to_the_same_bits(tmp_path, pace):
    experiment = made(recipe={"pace": pace})
    straight = tmp_path / "straight"
    runs.run(experiment, straight)
    cut_and_resumed(experiment, tmp_path / "cut", straight)


class Line(StubEngine):
    """Clients that move to 1; some of them fail, by (client, round)."""

    trainable = 6

    def __init__(self, many=4, fails=None):
        self.many, self.fails, self.seen = many, fails or {}, []

    def clients(self, t):
        return [f"c{i}" for i in range(self.many)]

    def get_task_layout(self, task):
        return None, (("w", 6),)

    def reply(self, task, w):
        self.seen.append((task.t, task.client, task.download.kind, w.clone()))
        why = self.fails.get((task.client, task.t), "")
        if why == "lost":
            return Reply(task.client, task.t, error="holds another model", lost_base=True)
        if why == "silent":
            return Reply(task.client, task.t, error="left")
        u = torch.full((6,), float("nan")) if why == "malformed" else 0.5 * (1 - w)
        return Reply(task.client, task.t, Payload({"u": u}), n=10, spent=ClientCost())


def line_run(engine, rounds=4, P=2, **pieces):
    recipe = replace(
        recipes.fedavg(P=P), downlink=DifferenceDownload(Quantizer(4), Quantizer(4)), **pieces
    )
    start = loop.make_initial_state(recipe, engine, torch.linspace(-1, 0, 6))
    return list(loop.rounds(recipe, engine, start, rounds, 0))


def kinds_of(engine, client):
    return [(t, kind) for t, name, kind, _ in engine.seen if name == client]


def test_a_silent_client_is_sent_a_difference_to_what_it_acknowledged():
    engine = Line(2, {("c0", 1): "silent", ("c0", 3): "silent"})
    done = line_run(engine)
    assert kinds_of(engine, "c0") == [
        (1, "first"),
        (2, "first"),  # nobody knows whether it got the first one
        (3, "difference"),
        (4, "difference"),
    ]
    assert done[-1].state.server_state["downlink"].versions.tolist() == [2, 4]


def test_a_refused_reply_still_acknowledges():
    engine = Line(2, {("c0", 1): "malformed"})
    done = line_run(engine)
    assert "c0" in done[0].record.rejected
    assert kinds_of(engine, "c0") == [(1, "first"), *((t, "difference") for t in (2, 3, 4))]


def test_a_client_that_lost_its_model_starts_again():
    engine = Line(2, {("c1", 2): "lost"})
    line_run(engine)
    assert [kind for _, kind in kinds_of(engine, "c1")] == [
        "first",
        "difference",
        "first",
        "difference",
    ]


def test_an_abandoned_round_keeps_what_was_received():
    engine = Line(2, {("c0", 2): "silent"})
    done = line_run(engine, minimum=2)
    abandoned = next(one for one in done if one.record.outcome == "abandoned")
    assert abandoned.changed_rows
    assert kinds_of(engine, "c1")[:3] == [(1, "first"), (2, "difference"), (2, "difference")]


def test_newcomers_get_a_first_download():
    engine = Line(2)
    engine.clients = lambda t: ["c0", "c1"] + (["c2"] if t >= 3 else [])
    line_run(engine, rounds=6, P=3)
    assert kinds_of(engine, "c2")[:2] == [(3, "first"), (4, "difference")]


def test_errors_do_not_add_up():
    """The code of one download corrects the last one's error: held models follow w."""
    engine = Line(3)
    done = line_run(engine, rounds=30, P=3)
    w, held = done[-1].state.w, done[-1].state.server_state["downlink"].models
    assert float((w - 1).abs().max()) < 1e-3
    assert float((held - w).abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (RandomK(0.3, scaled=True), "unbiased scale"),
        (RotatedCode(0.5), "unbiased scale"),
        (Quantizer(1), "error of"),
        (ErrorFeedback(TopK(0.2)), "residual"),
    ],
)
def test_codes_that_would_diverge_are_refused(code, why):
    with pytest.raises(BadInput, match=why):
        replace(recipes.fedavg(), downlink=DifferenceDownload(code))
    for good in (TopK(0.2), RotatedCode(1), RotatedCode(0.5, scale="contractive")):
        replace(recipes.fedavg(), downlink=DifferenceDownload(good))


def test_a_quantised_download_may_be_coarse():
    replace(recipes.fedavg(), downlink=QuantisedDownload(Quantizer(1)))
    assert recipes.fedavg().downlink == DenseDownload()


def test_parts_and_statistics():
    """A part's coordinates move, the others stay; BatchNorm's statistics arrive exactly."""
    w, base = torch.linspace(0, 1, 8), torch.zeros(8)
    at = torch.tensor([1, 3, 4, 7])  # three trained floats, one statistic
    part = HeldPart(at, (("a", 2), ("b", 1), ("bn.running_var", 1)), 3)
    payload, model = encode_model(w, base, Quantizer(8), part, (0, 1, "c"))
    assert set(payload.buffers) == {"levels", "ranges", "batchnorm"}
    assert torch.equal(model[7], w[7])
    torch.testing.assert_close(model[at], w[at], rtol=0, atol=0.01)
    assert not model[[0, 2, 5, 6]].any()
    again = decode_model(payload, base, Quantizer(8), part, (0, 1, "c"))
    assert torch.equal(again, model)


CHAIN = {"piece": "chain", "code": {"piece": "quantize", "bits": 4}}


def test_a_chain_by_hand():
    """All clients of a round start from one model; each pays for the differences that it missed."""
    built, done = states(made(CHAIN, rounds=6))
    layout, d, w0 = trained(built), built.engine.trainable, pack_model(built.net)
    size = -(-4 * d // 8) + 12 * len(layout) + 4 * (len(w0) - d)
    shadow, w, seen = w0, w0, {}
    for one in done:
        t = one.record.t
        if t > 1:
            code, rng = Quantizer(4), make_stream(3, "downlink", t - 1, "chain")
            payload, _ = code.encode((w - shadow)[:d], layout, rng, {})
            shadow = torch.cat([shadow[:d] + code.decode(payload, layout), w[d:]])
        assert torch.equal(one.state.server_state["downlink"].model, shadow)
        missed = {client: t - 1 - seen.get(client, 0) for client in one.record.chosen}
        down = {line.client: line.spent.bytes_down for line in one.clients}
        dense = 4 * len(w0)
        assert down == {c: min(n * size, dense) for c, n in missed.items()}
        seen.update(dict.fromkeys(one.record.chosen, t - 1))
        w = one.state.w


def test_a_chain_resumes_to_the_same_bits(tmp_path):
    experiment = made(CHAIN, recipe={"pace": {"piece": "buffered", "size": 2}})
    runs.run(experiment, tmp_path / "straight")
    cut_and_resumed(experiment, tmp_path / "cut", tmp_path / "straight")


def test_a_chain_holds_one_model():
    recipe = replace(recipes.fedavg(P=10), downlink=ChainedDownload(Quantizer(4)))
    M, D = 100_000, 100_000_000
    one = estimate_server_bytes(recipe, M, D, D)
    each = estimate_server_bytes(
        replace(recipe, downlink=DifferenceDownload(Quantizer(4), Quantizer(4))), M, D, D
    )
    assert one < estimate_server_bytes(recipes.fedavg(P=10), M, D, D) + 4 * 4 * D
    assert each > 4 * M * D
    with pytest.raises(BadInput, match='piece = "chain"'):
        check_memory(replace(recipe, downlink=DifferenceDownload()), M, D, D)


def test_a_chain_is_of_whole_models():
    with pytest.raises(BadInput, match="whole models"):
        replace(recipes.heterofl(P=3), downlink=ChainedDownload())


def test_a_budget_knows_the_encoded_bytes():
    """Three clients of a round download 1265 bytes each at most: five rounds fit where dense
    downloads would not.
    """
    budget = {"stop": {"bytes": 5 * 3 * (1994 * 4 + 2000)}}
    _, done = states(made(rounds=9, **budget))
    _, dense = states(made("dense", rounds=9, **budget))
    assert len(done) > len(dense)
    spent = sum(one.record.bytes_up + one.record.bytes_down for one in done)
    assert spent <= budget["stop"]["bytes"]


def test_clients_report_their_loss_of_what_they_hold():
    _, done = states(made(name="power-of-choice", rounds=3))
    asked = [line for one in done for line in one.clients if line.outcome == "asked"]
    assert asked
    assert {line.spent.bytes_down for line in asked} == {0}


@pytest.mark.parametrize("name", [*RECIPES, *SLOW])
def test_every_recipe_runs_with_difference_downloads(name):
    few = {"rounds": 2, "clients": 7, "per_round": 5}
    few |= {"train": {"epochs": 2, "batch": 16}}
    _, dense = states(made("dense", name=name, **few))
    _, done = states(made(name=name, **few))
    assert dense[0].record.chosen == done[0].record.chosen
    assert done[0].record.why["downloads"] == {"first": len(done[0].record.chosen)}
    # w is still the initial model, which is a seed: only extra tensors travel
    assert done[0].record.bytes_down <= dense[0].record.bytes_down / 2
    # six of 32 bits, headers, extra tensors
    assert done[1].record.bytes_down < 0.7 * dense[1].record.bytes_down
    assert all(bool(one.state.w.isfinite().all()) for one in done)


def test_models_encoded_together_are_those_encoded_alone():
    code, part = RotatedCode(2), HeldPart(None, (("a.weight", 900), ("a.running_mean", 5)), 900)
    w, download = torch.randn(905), Download("difference", RotatedCode(2))
    bases = [torch.randn(905), w.clone(), torch.randn(905)]  # the second has w already
    tasks = [Task(f"c{k}", k, 4, 9, download=download) for k in range(3)]
    requests = [DownloadRequest(task, part) for task in tasks]
    together = encode_model_batch(w, bases, code, requests)
    for task, base, (payload, model) in zip(tasks, bases, together, strict=True):
        alone, same = encode_model(w, base, code, part, (task.seed, task.t, task.client))
        assert torch.equal(model, same)
        assert payload.buffers.keys() == alone.buffers.keys()
        assert all(torch.equal(payload.buffers[name], x) for name, x in alone.buffers.items())
    assert requests[0].batch_code is None  # on the host each is encoded alone
    assert DownloadRequest(tasks[0], part, torch.device("cuda")).batch_code == code
    held = HeldPart(torch.arange(400), (("a.weight", 400),), 400)
    assert DownloadRequest(tasks[0], held, torch.device("cuda")).batch_code is None


@pytest.mark.parametrize(("floats", "sizes"), [(1, [5]), (1 << 23, [2, 2, 1]), (1 << 30, [1] * 5)])
def test_batches_of_models_are_bounded_by_their_floats(floats, sizes):
    # 2^24 floats at once: two models of 2^23, and a larger model by itself
    batches = split_batches(list(range(5)), floats)
    assert [len(batch) for batch in batches] == sizes
    assert [i for batch in batches for i in batch] == list(range(5))
