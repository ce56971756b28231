"""The examples of docs/extending.md: each learns, resumes to the same bits and costs what its lines
say, everywhere.
"""

import importlib
import json
import math
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flrce.config.experiment import Experiment
from flrce.core.types import Updates
from flrce.errors import BadInput
from flrce.methods import registry
from flrce.models.flat import make_layout, pack_model
from flrce.simulation import runs
from training import cut_and_resumed

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "extensions"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
#: the least that the headline improves on the network as it was made
GAINS = {"regression": 0.1, "lora": 0.1, "fedbuff": 0.15}
#: rounds after which it is looked at, where the example's own are more than that takes
ENOUGH = {
    "class_weights_f1": 3,
    "client_adam_cosine": 3,
    "ditto": 3,
    "fedbn": 2,
    "feddyn": 4,
    "scaffold": 4,
    "lora": 3,
}
#: what an example adds to the links that both sides of a deployment know
LINKS = {"scaffold": "Control", "feddyn": "Regulariser", "ditto": "Pull"}


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def tables(name, **changes):
    """The experiment in an example's docstring."""
    lines = importlib.import_module(name).__doc__.splitlines()
    found = tomllib.loads(
        "\n".join(line for line in lines if line.startswith("    ") and line[4] != "$")
    )
    return found | changes


def short(name, rounds=3):
    """The same with one epoch a round, in few batches: for what does not depend on how much is
    learnt.
    """
    found = tables(name, rounds=rounds)
    train = {**found.get("train", {}), "epochs": 1, "batch": 32}
    return found | {"train": train, "engine": {"workers": 1, "kernel": "torch"}}


def given(name):
    module = importlib.import_module(name)
    return {"data": module.data()} if hasattr(module, "data") else {}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The short run of an example, left alone, with its folder: resumed runs, the stack and Flower
    repeat it.
    """
    folder = tmp_path_factory.mktemp("plain")

    @cache
    def run(name):
        return runs.run(Experiment(**short(name)), folder / name, **given(name)), folder / name

    return run


def start(experiment, more):
    """The headline before the first round."""
    built = runs.build_simulation(experiment, **more)
    judged = built.engine.evaluate(pack_model(built.net, built.engine.runner.layout), 1, True, {})
    built.engine.close()
    return judged.value


def adds_up(folder):
    """The lines of clients sum to those of rounds."""
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    clients = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
    for record in rounds:
        parts = [each for each in clients if each["t"] == record["t"]]
        for key in ("bytes_up", "bytes_down"):
            assert sum(each[key] for each in parts) == record[key] > 0
        assert record["joules"] >= sum(each["joules"] for each in parts) > 0  # and idle power


def test_the_documentation_lists_them():
    text = (FOLDER.parents[1] / "docs" / "extending.md").read_text()
    assert [name for name in NAMES if f"[`{name}.py`]" not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_short_and_by_the_public_door(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 75
    assert "getattr" not in text
    assert not re.search(r"\._[a-z]", text)


@pytest.mark.parametrize("name", NAMES)
def test_learns_and_adds_up(name, tmp_path):
    more, setting = given(name), tables(name)
    setting["rounds"] = ENOUGH.get(name, setting["rounds"])
    experiment = Experiment(**setting, engine={"workers": 1})
    found = runs.run(experiment, tmp_path / "learns", **more)
    gain = found.history[-1].last_model_metric - start(experiment, more)
    assert (-gain if found.history[-1].lower else gain) > GAINS.get(name, 0.3)
    adds_up(tmp_path / "learns")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_resumes_to_the_same_bits(name, plain, tmp_path):
    _, straight = plain(name)
    cut_and_resumed(Experiment(**short(name)), tmp_path / "cut", straight, **given(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_stack_gives_the_same(name, plain):
    """Fused where the stack knows the chain, by torch on its device where it does not."""
    more, experiment = given(name), Experiment(**short(name))
    here, _ = plain(name)
    found = runs.run_together(
        [(experiment, None)], data=(lambda _: more["data"]) if more else None, device="cpu"
    )
    for one, two in zip(here.history, found[0].history, strict=True):
        assert (one.bytes_up, one.bytes_down, one.replied) == (
            two.bytes_up,
            two.bytes_down,
            two.replied,
        )
    if "optimizer" in experiment.train.model_dump(exclude_none=True):
        # Adam goes full steps along a gradient that is 0 but for rounding: that of a bias before
        # BatchNorm
        assert found[0].history[-1].last_model_metric == pytest.approx(
            here.history[-1].last_model_metric, abs=0.05
        )
        return
    for key, tensor in here.model.items():
        torch.testing.assert_close(found[0].model[key], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_over_flower(name, plain, tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    if name in LINKS:
        link = getattr(importlib.import_module(name), LINKS[name])
        monkeypatch.setitem(registry.PIECES["link"], f"example-{name}", link)
    more, over = given(name), short(name) | {"engine": {"name": "flower"}}
    if name == "fedbuff":
        with pytest.raises(BadInput, match="availability"):
            runs.run(Experiment(**over), **more)
        del over["fleet"]["availability"]
        here = runs.run(Experiment(**over | {"engine": {"workers": 1, "kernel": "torch"}}), **more)
    else:
        here, _ = plain(name)
    found = runs.run(Experiment(**over), tmp_path / "run", **more)
    for one, two in zip(here.history, found.history, strict=True):
        # both bill evaluations that a stop rule reads
        assert (one.bytes_up, one.bytes_down) == (two.bytes_up, two.bytes_down)
        assert (two.metric, two.lower, set(two.metrics)) == (
            one.metric,
            one.lower,
            set(one.metrics),
        )
        assert two.last_model_metric == pytest.approx(one.last_model_metric, abs=0.02)
    assert set(found.model) == set(here.model)


def sizes(name, more):
    built = runs.build_simulation(Experiment(**tables(name)), **more)
    built.engine.close()
    return built.engine.trainable, built.engine.size, built.net


def test_scaffold_s_bytes(plain):
    """Each way the model, and the trained floats once more: c down, what changed of c_k up; P =
    4.
    """
    trained, size, _ = sizes("scaffold", {})
    found, _ = plain("scaffold")
    assert [(h.bytes_up, h.bytes_down) for h in found.history] == [
        (4 * 4 * (size + trained),) * 2
    ] * 3


def test_scaffold_s_c_is_the_mean_of_its_clients():
    """With M clients, c = (1/M) sum c_k after every round, whoever took part."""
    experiment = Experiment(**short("scaffold"))
    built = runs.build_simulation(experiment)
    for done in built.iterate_rounds(experiment):
        kept = [carry["update.0.c"] for carry in done.state.client_states.values()]
        torch.testing.assert_close(
            done.state.server_state["trainer"].c, sum(kept) / 8, rtol=1e-4, atol=1e-6
        )
    built.engine.close()


def test_ditto_sends_one_model_and_keeps_the_other():
    experiment = Experiment(**tables("ditto", rounds=2))
    built = runs.build_simulation(experiment)
    found = list(built.iterate_rounds(experiment))[-1]
    built.engine.close()
    one = make_layout(built.net.shared).size
    assert found.record.bytes_up == found.record.bytes_down == 4 * 4 * one
    personal = [carry["kept"] for carry in found.state.client_states.values()]
    assert all(len(each) == one for each in personal)
    assert not torch.equal(personal[0], personal[1])


def test_ditto_s_personal_model_by_hand():
    """One full-batch step: v - lr (grad F(v) + strength (v - w))."""
    ditto = importlib.import_module("ditto")
    w = torch.tensor([1.0, 2.0, 5.0, 7.0])  # two personal floats, then the two shared ones
    g = torch.tensor([0.1, 0.2, 0.3, 0.4])
    pull = ditto.Pull(0.5)
    found, _ = pull.step(g.clone(), w, {"came": w[2:].clone()})
    # 0.1 + 0.5 (1 - 5), 0.2 + 0.5 (2 - 7)
    assert found.tolist() == pytest.approx([-1.9, -2.3, 0.3, 0.4])


def test_feddyn_s_server_by_hand():
    feddyn, updates = (
        importlib.import_module("feddyn"),
        importlib.import_module("flrce.core.types").Updates,
    )
    server = feddyn.Server(0.5)
    memory = server.initial_state(4, 2, 3)  # four clients; two trained floats and a statistic
    U = torch.tensor([[1.0, 0.0, 9.0], [3.0, 2.0, 9.0]])
    w, target = torch.zeros(3), U.mean(0)
    made, memory = server.step(w, target, updates(torch.arange(2), U, torch.ones(2), 2), memory)
    assert memory.h.tolist() == [-0.5, -0.25]  # -0.5 (1 + 3) / 4, -0.5 (0 + 2) / 4
    assert made.tolist() == [3.0, 1.5, 9.0]  # (2, 1) + (0.5, 0.25) / 0.5


def test_powersgd_of_a_matrix_of_its_rank_is_exact():
    """A rank-1 matrix of 4 x 6 and a vector of 3: 2 (4 + 6) and 3 floats travel."""
    code = importlib.import_module("powersgd").LowRank(2)
    matrix = torch.outer(torch.arange(1.0, 5), torch.arange(6.0) - 2).reshape(-1)
    u, layout = torch.cat([matrix, torch.tensor([1.0, 2.0, 3.0])]), [("a", 24), ("b", 3)]
    payload, _ = code.encode(u, layout, np.random.default_rng(0), {})
    assert payload.nbytes == code.estimate_bytes(layout, None) == 4 * (20 + 3)
    torch.testing.assert_close(code.decode(payload, layout, None), u)


def test_mifa_counts_those_who_are_not_there():
    """Client 0 sent 4 in round 1, client 1 sends 2 in round 2: w + (4 + 2) / 2."""
    mifa = importlib.import_module("mifa")
    rule = mifa.LastUpdates()
    state = rule.initial_state(3, 1, 1)
    state.updates[0], state.seen[0] = 4.0, True
    updates = Updates(torch.tensor([1]), torch.tensor([[2.0]]), torch.ones(1).double(), 1)
    assert rule(torch.tensor([10.0]), updates, state).tolist() == [13.0]
    assert state.seen.tolist() == [True, False, False]  # until the round is committed


def test_fedntd_s_term_by_hand():
    """Outputs of the wrong classes (0, log 3) and (0, 0): KL of (1/2, 1/2) from (1/4, 3/4)."""
    fedntd = importlib.import_module("fedntd")
    out = torch.tensor([[5.0, 0.0, math.log(3)]])
    batch = SimpleNamespace(
        out=out, y=torch.tensor([0]), forward_at=lambda at: (torch.zeros(1, 3), None)
    )
    term = fedntd.NotTrueDistillation(2.0).loss_term(batch, {"start": None})
    assert term.tolist() == pytest.approx([2 * (math.log(2) + math.log(2 / 3)) / 2])


def test_fedbn_keeps_its_norms(plain):
    module = importlib.import_module("fedbn")
    trained, size, net = sizes("fedbn", {"data": module.data()})
    assert (
        trained
        == size
        == sum(p.numel() for n, p in net.named_parameters() if not n.startswith("1."))
    )
    found, _ = plain("fedbn")
    assert [h.bytes_up for h in found.history] == [4 * 4 * size] * 3


def test_fedbuff_meets_only_who_is_there_and_discounts_the_old():
    fedbuff, updates = (
        importlib.import_module("fedbuff"),
        importlib.import_module("flrce.core.types").Updates,
    )
    found = runs.run(Experiment(**tables("fedbuff")))
    there = fedbuff.Shifts(3)
    assert all(there(0, client, h.t) for h in found.history for client in h.chosen)
    assert any(
        set(h.replied) - set(h.chosen) for h in found.history
    )  # a reply to an earlier round's task
    U, n = torch.tensor([[1.0], [4.0]]), torch.ones(2).double()
    made = fedbuff.Discounted(0.5)(
        torch.zeros(1), updates(torch.arange(2), U, n, 1, age=torch.tensor([0, 3])), None
    )
    assert made.tolist() == [2.0]  # weights 1 and 1/2: (1 + 2) / 1.5


def test_lora_s_base_stays_where_it_is(plain):
    module = importlib.import_module("lora")
    trained, size, net = sizes("lora", {"data": module.data()})
    fixed = {name: p for name, p in net.named_parameters() if not p.requires_grad}
    assert trained == size == sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert sum(p.numel() for p in fixed.values()) > 2 * trained
    found, _ = plain("lora")
    assert [(h.bytes_up, h.bytes_down) for h in found.history] == [(4 * 4 * size,) * 2] * 3
    assert all(torch.equal(found.model[name], p) for name, p in fixed.items())
    assert any(
        not torch.equal(found.model[n], p) for n, p in net.named_parameters() if p.requires_grad
    )


def test_the_stop_reads_the_metric():
    found = runs.run(Experiment(**tables("stop_on_metric")))
    last = found.history[-1]
    assert last.stop.startswith("worst-recall")
    assert last.pooled["worst-recall"] >= 0.5 > found.history[-2].pooled["worst-recall"]


def test_nobody_there_ends_the_run_with_a_reason():
    experiment = Experiment(**tables("fedadam"), fleet={"availability": "test_extensions:nobody"})
    found = runs.run(experiment)
    assert "nobody is reachable" in found.history[-1].stop


def nobody():
    return lambda seed, client, t: False


def test_no_example_of_another_name_is_shadowed():
    for name in NAMES:
        importlib.import_module(name)
        assert Path(sys.modules[name].__file__).parent == FOLDER
