"""Fine-tuning by adapters: products, seeds and scalars, text, and whole runs on a tiny Llama."""

import gzip
import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import flrce
from flrce.core.pieces import MalformedPayload
from flrce.core.roles import RoundView
from flrce.core.types import LocalWork, Payload, Selection, Task, Updates
from flrce.data.sources import IGNORED_TARGET
from flrce.data.user.text import encode_dialogue, from_text, split_windows
from flrce.errors import BadInput
from flrce.formats.language import open_language_model
from flrce.methods.aggregation.lora_products import LoRAProductMean, nearest_low_rank_factors
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.catalogue import recipes
from flrce.methods.client.fedkseed import FiniteDifferences
from flrce.methods.compression.nonzero import NonzeroCoordinates
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.models.adapters import get_adapter_rank, make_low_rank_part
from flrce.models.flat import FrozenParameter, make_layout, pack_model
from flrce.models.nets import build_network
from flrce.models.seeds import SeedSpaceNetwork
from flrce.simulation.runs import build_simulation, run_in_process
from flrce.training.batches import SampleBatches, Samples
from flrce.training.gpu.batch_trainer import ClientBatchTrainer
from flrce.training.links import ClientContext
from flrce.training.trainer import TorchTrainer
from flrce.training.update_chain import SGD, Momentum, UpdateChain
from language_files import weights, write_folder, write_gguf

R, IN, OUT = 4, 7, 5
SHAPES = (("x.lora_A", (R, IN)), ("x.lora_B", (OUT, R)), ("bias", (3,)))
D = R * IN + OUT * R + 3


def factors(row):
    return row[: R * IN].reshape(R, IN).double(), row[R * IN : R * (IN + OUT)].reshape(
        OUT, R
    ).double()


def told(w, clients, n, covered=None):
    U = torch.stack(clients) - w
    k = torch.arange(len(clients))
    return Updates(k, U, torch.tensor(n, dtype=torch.float64), D, covered=covered, shapes=SHAPES)


@given(st.integers(0, 10**6), st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_products_are_averaged_exactly_where_the_rank_allows(seed, P):
    """Clients share one row of A each, so that the mean of products has rank at most R and no
    truncation is needed.
    """
    rng = torch.Generator().manual_seed(seed)
    w, rows = torch.randn(D, generator=rng), torch.randn(R, IN, generator=rng)
    clients, n = [], torch.randint(1, 9, (P,), generator=rng).tolist()
    for _ in range(P):
        mix = torch.randn(R, R, generator=rng)
        rest = torch.randn(OUT * R + 3, generator=rng)
        clients.append(torch.cat([(mix @ rows).flatten(), rest]))
    made = LoRAProductMean()(w, told(w, clients, n), None)
    mean = sum(m * (factors(c)[1] @ factors(c)[0]) for m, c in zip(n, clients, strict=True)) / sum(
        n
    )
    A, B = factors(made)
    assert float((B @ A - mean).norm()) <= 1e-5 * float(mean.norm())
    torch.testing.assert_close(made[-3:], WeightedMean()(w, told(w, clients, n), None)[-3:])


def test_the_naive_mean_of_factors_is_another_thing():
    """Two clients with A = e1, B = e1 and A = -e1, B = -e1 agree on the product; their mean factors
    are zero.
    """
    w = torch.zeros(D)
    one, other = torch.zeros(D), torch.zeros(D)
    one[0], one[R * IN] = 1.0, 1.0
    other[0], other[R * IN] = -1.0, -1.0
    naive, exact = (
        how(w, told(w, [one, other], [1, 1]), None) for how in (WeightedMean(), LoRAProductMean())
    )
    assert float((factors(naive)[1] @ factors(naive)[0]).norm()) == 0
    expected = torch.zeros(OUT, IN, dtype=torch.float64)
    expected[0, 0] = 1
    torch.testing.assert_close(factors(exact)[1] @ factors(exact)[0], expected)


@pytest.mark.parametrize("ordered", [False, True])
def test_beyond_the_rank_the_nearest_product_is_taken(ordered):
    rng = torch.Generator().manual_seed(0)
    A, B = (torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((12, IN), (OUT, 12)))
    A0, B0 = (torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((R, IN), (OUT, R)))
    a, b = nearest_low_rank_factors(A, B, A0, B0, ordered)
    u, s, vt = torch.linalg.svd(B @ A, full_matrices=False)
    torch.testing.assert_close(b @ a, u[:, :R] * s[:R] @ vt[:R])
    if ordered:  # a client of rank 2 gets the two largest
        torch.testing.assert_close(b[:, :2] @ a[:2], u[:, :2] * s[:2] @ vt[:2])


def test_nothing_moves_where_nothing_changed():
    """Of all factors with one product, those nearest to w: so w itself, once its rows are
    orthogonal and as long.
    """
    A = torch.eye(R, IN)
    w = torch.cat(
        [A.flatten(), torch.randn(OUT * R + 3, generator=torch.Generator().manual_seed(1))]
    )
    torch.testing.assert_close(
        LoRAProductMean()(w, told(w, [w, w], [1, 3]), None), w, atol=1e-6, rtol=1e-5
    )


def test_clients_of_several_ranks_count_with_what_they_hold():
    rng = torch.Generator().manual_seed(2)
    w = torch.randn(D, generator=rng)
    clients = [w + torch.randn(D, generator=rng) for _ in range(2)]
    covered = torch.ones(2, D, dtype=torch.bool)
    grid_a, grid_b = torch.zeros(R, IN, dtype=torch.bool), torch.zeros(OUT, R, dtype=torch.bool)
    grid_a[:1], grid_b[:, :1] = True, True
    covered[0, : R * IN], covered[0, R * IN : R * (IN + OUT)] = grid_a.flatten(), grid_b.flatten()
    clients[0] = torch.where(covered[0], clients[0], w)
    made = LoRAProductMean("equal")(w, told(w, clients, [1, 1], covered), None)
    (a0, b0), (a1, b1) = map(factors, clients)
    mean = (b0[:, :1] @ a0[:1] + b1 @ a1) / 2
    u, s, vt = torch.linalg.svd(mean, full_matrices=False)
    A, B = factors(made)
    torch.testing.assert_close(B @ A, u[:, :R] * s[:R] @ vt[:R], atol=1e-5, rtol=1e-4)


def test_only_what_was_touched_travels():
    u = torch.zeros(1000)
    u[3], u[999] = -2.5, 1e-30
    payload, _ = NonzeroCoordinates().encode(u, (("steps", 1000),), None, {})
    assert payload.nbytes == 2 * (2 + 4)
    assert torch.equal(NonzeroCoordinates().decode(payload, (("steps", 1000),)), u)
    wide, _ = NonzeroCoordinates().encode(torch.ones(2**15 + 1), (("steps", 2**15 + 1),), None, {})
    assert wide.buffers["where"].dtype == torch.int32
    for where in ([3, 3], [5, 2], [-1, 4], [4, 1000]):
        bad = Payload({"where": torch.tensor(where, dtype=torch.int16), "values": torch.ones(2)})
        with pytest.raises(MalformedPayload, match="ascend"):
            NonzeroCoordinates().decode(bad, (("steps", 1000),))


def test_differences_are_the_gradient_of_a_parabola():
    w, target = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.5, 1.0])
    link = FiniteDifferences(eps=0.5, count=3)
    state = {"where": torch.tensor([[2, 0, 1]]), "step": torch.tensor(0)}
    before = w.clone()
    loss, g = link.estimate(lambda: (w - target).square()[None].sum(1), w, state)
    assert g.tolist() == [2.0, -1.0, 4.0]  # exact: a parabola has no third derivative
    assert torch.equal(w, before)
    assert float(loss) == pytest.approx(1 + 0.25 + 4 + 0.25)  # eps^2 above
    assert link.forward_passes == 6


@pytest.mark.parametrize("count", [1, 3])
def test_stacked_probes_are_those_of_each_client_alone(count):
    """Lanes of 3, 1 and 2 steps with short last batches; then more steps than the buffers were made
    for.
    """
    torch.manual_seed(0)
    net, chain = (
        nn.Linear(4, 3),
        UpdateChain((FiniteDifferences(1e-2, count), Momentum(0.5), SGD(0.3))),
    )
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    stack, trainer = ClientBatchTrainer(net, (4,), x, y, 1.0, 0.0, "cpu"), TorchTrainer(net, (4,))
    for sizes in ([[4, 4, 2], [3], [4, 1]], [[4, 4, 4, 4], [4, 4, 1], [2, 2]]):
        batches = [np.array(each) for each in sizes]
        orders = [np.arange(lane, lane + each.sum()) for lane, each in enumerate(batches)]
        locals = [
            ClientContext(
                Task("c", lane, 7, 0, LocalWork(), update=chain), len(each), 9, make_layout(net)
            )
            for lane, each in enumerate(batches)
        ]
        rates = [np.full(len(each), 0.3, np.float32) for each in batches]
        w = torch.randn(3, 15)
        found = stack.train(w, orders, batches, rates, update=chain, locals=locals)
        for lane in range(3):
            alone = trainer.train(
                w[lane],
                SampleBatches(Samples(x, y), orders[lane], batches[lane]),
                chain,
                locals[lane],
            )
            torch.testing.assert_close(found.w[lane], alone.w, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.losses[lane], alone.losses)
            torch.testing.assert_close(found.squares[lane], alone.squares)


# text


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning")
    write_folder(folder / "model", weights())
    lines = [
        {"play": "p", "role": f"r{i}", "text": f"the man on the hill {i} " * 12 + "an end in a hen"}
        for i in range(6)
    ]
    with gzip.open(folder / "plays.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return folder


def test_windows_by_hand():
    found = [(x.tolist(), y.tolist()) for x, y in split_windows(range(1, 11), 4, 0)]
    none = IGNORED_TARGET
    assert found == [
        ([1, 2, 3, 4], [2, 3, 4, 5]),
        ([5, 6, 7, 8], [6, 7, 8, 9]),
        ([9, 0, 0, 0], [10, none, none, none]),
    ]
    assert len(list(split_windows(range(10), 8, 0))) == 1  # what is left is under a quarter
    assert [x.tolist() for x, _ in split_windows([7, 8], 4, 0)] == [[7, 0, 0, 0]]


def test_only_the_response_is_learnt(place):
    tokens = open_language_model(place / "model").tokenizer()
    x, y, whole = encode_dialogue(tokens, "on", "the", 24)
    start, stop = (tokens.specials[mark] for mark in ("<|im_start|>", "<|im_end|>"))
    asked = [
        start,
        *tokens.encode("user\non"),
        stop,
        *tokens.encode("\n"),
        start,
        *tokens.encode("assistant\n"),
    ]
    told_ids = [*tokens.encode("the"), stop]
    assert x.tolist()[: len(asked)] == asked
    assert y.tolist()[: len(asked) + 1] == [IGNORED_TARGET] * (len(asked) - 1) + told_ids
    assert set(y.tolist()[len(asked) + 1 :]) == {IGNORED_TARGET}
    assert whole
    assert [encode_dialogue(tokens, "on", "the", length)[2] for length in (18, 19)] == [
        False,
        True,
    ]  # 20 ids, the last to tell
    long_x, long_y, whole = encode_dialogue(tokens, "q" * 90, "z" * 90, 24)
    assert not whole
    assert (long_y != IGNORED_TARGET).sum() == 12  # half of 25
    assert tokens.decode(long_x[13:].tolist()) == "z" * 11
    assert len(long_x) == len(long_y) == 24


def test_text_by_role_and_its_mistakes(place):
    source = from_text(place / "plays.jsonl.gz", str(place / "model"), 16, most=3)
    assert source.groups == tuple(f"p:r{i}" for i in range(6))
    assert source.x.shape == (18, 16)
    assert (source.kind, source.outputs, source.predicts_every_position) == ("tokens", 288, True)
    tokens = open_language_model(place / "model").tokenizer()
    assert tokens.decode(source.x[0].tolist()).startswith("the man on")
    np.testing.assert_array_equal(source.x[0, 1:], source.y[0, :-1])
    for text, words in (
        ("{", "line 1 is no json"),
        ('{"a": 1}', 'neither "text" nor'),
        ('{"text": 3}', "'text' is no text"),
        ("", "holds no text"),
        ('{"text": "a b", "client": []}', "no 'client'"),
    ):
        path = place / "bad.jsonl"
        path.write_text(text)
        with pytest.raises(BadInput, match=words):
            from_text(path, str(place / "model"), 16)
    (place / "bad.jsonl.gz").write_bytes(b"\x1f\x8b no")
    with pytest.raises(BadInput, match="no usable gzip"):
        from_text(place / "bad.jsonl.gz", str(place / "model"), 16)


def test_other_names_of_question_and_answer(place, caplog):
    """Alpaca's and Dolly's keys give what prompt and response give; what has no answer is told
    of.
    """
    path, made = place / "asked.jsonl", []
    for row in (
        {"prompt": "on\nthe", "response": "an"},
        {"instruction": "on", "input": "the", "output": "an"},
        {"instruction": "on", "context": "the", "response": "an"},
        {"instruction": "on\nthe", "input": "", "output": "an"},
    ):
        path.write_text(json.dumps(row) + "\n" + json.dumps({"prompt": "x", "response": ""}))
        made.append(from_text(path, str(place / "model"), 24))
    assert all(
        np.array_equal(made[0].x, each.x) and np.array_equal(made[0].y, each.y) for each in made
    )
    assert made[0].x.shape == (1, 24)
    assert "1 lines with an empty response are left out" in caplog.text


def test_answers_that_are_cut_are_told_of(place, caplog):
    path = place / "long.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "on", "response": "the" * n}) + "\n" for n in (1, 2, 9))
    )
    from_text(path, str(place / "model"), 28)
    assert not caplog.text
    from_text(path, str(place / "model"), 20)
    assert (
        "long.jsonl: 1 lines do not fit into 20 ids: prompts lose their beginning, responses"
        in caplog.text
    )


def test_clients_whose_names_would_be_alike_stay_apart(place):
    path = place / "alike.jsonl"
    owners = ["a b", "a/b", "a_b", "x" * 70 + "1", "x" * 70 + "2", "plain"]
    path.write_text(
        "".join(json.dumps({"client": owner, "text": "the man on"}) + "\n" for owner in owners)
    )
    groups = from_text(path, str(place / "model"), 16).groups
    assert (groups[2], groups[5]) == ("a_b", "plain")
    assert len(set(groups)) == 6
    assert max(map(len, groups)) == 64
    path.write_text('{"client": "a", "text": "the man on"}\n{"text": "the man on"}')
    with pytest.raises(BadInput, match="line 2 names no client, unlike those before it"):
        from_text(path, str(place / "model"), 16)


def test_windows_longer_than_the_model_are_told_of(place, caplog):
    build_network("llama", (129,), 1, 0, 288, True, {"path": str(place / "model")})
    assert "samples of 129 ids, and the model was made for 128" in caplog.text


@pytest.mark.parametrize(
    ("path", "says"), [("", "path of a language model is empty"), ("gone", "does not exist")]
)
def test_a_tokenizer_that_is_none_is_told_by_its_key(place, path, says):
    with pytest.raises(BadInput, match=f"data.tokenizer = '{path}': .*{says}.*; give a GGUF file"):
        from_text(place / "plays.jsonl.gz", path)


# whole runs


def experiment(place, recipe, rounds=3, **tables):
    options = {"path": str(place / "model"), "rank": 4, **tables.pop("options", {})}
    data = {"path": str(place / "plays.jsonl.gz"), "tokenizer": str(place / "model"), "length": 16}
    data |= {"partition": "natural", **tables.pop("data_more", {})}
    return flrce.Experiment(
        rounds=rounds,
        clients=6,
        per_round=3,
        data=data,
        model={"name": "llama", "options": options},
        objective={"name": "next-token", "metrics": ["perplexity", "accuracy"]},
        recipe=recipe if isinstance(recipe, dict) else {"name": recipe},
        train={
            "batch": 4,
            "epochs": 1,
            "lr": 0.02,
            **({"optimizer": "adam"} if recipe != "fedkseed" else {}),
        },
        engine={"workers": 1, "device": "cpu"},
        **tables,
    )


@pytest.mark.parametrize("net", ["gpt", "lstm", "auto"])
def test_a_network_without_a_file_learns_the_same_text(place, net):
    """As many embeddings and scores as the tokenizer has tokens, whatever the text uses of them."""
    told = experiment(
        place, "fedavg", data_more={"trouble": [{"piece": "wrong-labels", "share": 0.2}]}
    )
    told = told.model_copy(
        update={"model": told.model.model_copy(update={"name": net, "options": {}})}
    )
    result = flrce.run(told)
    assert {288} <= {n for x in result.model.values() for n in x.shape}
    assert (
        result.history[-1].last_model_metric < result.history[0].last_model_metric < 288
    )  # a guess among all tokens


def test_text_in_the_words_of_another_model_is_refused(place, tmp_path):
    """All of its ids are within the model's vocabulary, and mean something else."""
    other = write_folder(tmp_path / "other", weights())
    told = json.loads((other / "tokenizer.json").read_text())
    shifted = {token: (i + 7) % 285 + 3 for token, i in told["model"]["vocab"].items()}
    told["model"]["vocab"] = shifted
    (other / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(BadInput, match="every id would be another word; set both alike"):
        build_simulation(experiment(place, "fedit", options={"path": str(other)}))
    (other / "tokenizer.json").unlink()  # weights alone: the text's tokenizer is taken at its word
    build_simulation(experiment(place, "fedit", options={"path": str(other)})).engine.close()
    build_simulation(
        experiment(
            place, "fedit", options={"path": str(write_gguf(tmp_path / "m.gguf", weights()))}
        )
    ).engine.close()


SIZE = 2 * (4 * 128 + 4 * 96)  # of two layers' q and v adapters of rank 4
ONLY_B = 2 * 4 * (64 + 32)
METHODS = {
    "fedit": ("fedit", {}, 4 * SIZE, 4 * SIZE),
    "ffa-lora": ("ffa-lora", {}, 4 * ONLY_B, 4 * ONLY_B),
    "flexlora": ({"name": "flexlora", "rates": [0.5, 0.25]}, {}, None, None),
    "fedkseed": ("fedkseed", {"seeds": 40}, 4 * 40, None),
    "guided": (
        {"name": "fedit", "guided": True, "compressor": {"piece": "quantize", "bits": 4}},
        {},
        4 * SIZE,
        None,
    ),
    "sparse": (
        {"name": "ffa-lora", "compressor": {"piece": "topk", "keep": 0.1}},
        {},
        4 * ONLY_B,
        None,
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_base_never_travels_and_runs_resume(place, tmp_path, name):
    recipe, options, down, up = METHODS[name]
    told_experiment = experiment(place, recipe, options=options)
    built = build_simulation(told_experiment)
    before = {
        key: p.detach().clone() for key, p in built.net.named_parameters() if not p.requires_grad
    }
    built.engine.close()
    straight = flrce.run(told_experiment, tmp_path / "straight")
    assert all(
        torch.equal(before[key], p) for key, p in built.net.named_parameters() if key in before
    )
    for record in straight.history:
        if down is not None:
            assert record.bytes_down == 3 * down
        if up is not None:
            assert record.bytes_up == 3 * up
    if name == "flexlora":  # ranks 2 and 1 of 4
        assert {r.bytes_down for r in straight.history} <= {n * SIZE for n in (3, 4, 5, 6)}
    if name == "fedkseed":  # a step is 6 bytes; a role has at most 5 batches
        assert all(r.bytes_up <= 3 * 6 * 8 for r in straight.history)
    flrce.run(experiment(place, recipe, rounds=2, options=options), tmp_path / "again")
    longer = experiment(place, recipe, rounds=3, options=options)
    again = flrce.run(longer, tmp_path / "again", resume=True)
    assert all(torch.equal(straight.model[key], again.model[key]) for key in straight.model)
    size = (tmp_path / "straight" / "model.safetensors").stat().st_size
    assert size < 4 * 2 * SIZE + 40_000  # adapters, and no base
    assert straight.summary["metric"] == "perplexity"


def test_another_base_is_not_gone_on_with(place, tmp_path):
    """Adapters mean something beside the weights that they were trained with, and only there."""
    base = write_folder(tmp_path / "base", weights())
    first = experiment(place, "fedit", rounds=1, options={"path": str(base)})
    flrce.run(first, tmp_path / "run")
    write_folder(base, weights(seed=1))
    more = first.model_copy(update={"rounds": 2})
    with pytest.raises(BadInput, match="was made with another base model; restore it"):
        flrce.run(more, tmp_path / "run", resume=True)
    write_folder(base, weights())
    assert len(flrce.run(more, tmp_path / "run", resume=True).history) == 2


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ({"name": "flexlora", "rates": []}, "rates is empty"),
        ({"name": "flexlora", "rates": [1.0, 2.0]}, "rate 2.0: must be above 0 and at most 1"),
        ({"name": "fedit", "points": 0}, "recipe.points = 0: should be greater than 0"),
        ({"name": "fedkseed", "directions": 9}, "a step probes 9 directions, and 8 numbers train"),
    ],
)
def test_settings_of_these_methods_are_checked(place, recipe, told):
    with pytest.raises(BadInput, match=told):
        build_simulation(
            experiment(place, recipe, options={"seeds": 8} if recipe["name"] == "fedkseed" else {})
        )


def test_probes_of_two_runs_are_one_stack(place, caplog):
    runs = [
        experiment(place, "fedkseed", rounds=2, options={"seeds": 40}, seed=seed) for seed in (0, 1)
    ]
    together = run_in_process([(each, None) for each in runs], device="cpu")
    assert "one after another" not in caplog.text
    for each, found in zip(runs, together, strict=True):
        alone = flrce.run(each)
        assert [r.bytes_up for r in found.history] == [r.bytes_up for r in alone.history]
        moved = alone.model["steps"]
        torch.testing.assert_close(
            found.model["steps"], moved, atol=2e-3 * float(moved.abs().max()), rtol=0
        )
        assert found.summary["value"] == pytest.approx(alone.summary["value"], rel=1e-4)


def test_the_base_is_booked_once_as_provisioning(place):
    result = flrce.run(experiment(place, "fedit", rounds=2))
    files = (place / "model" / "model.safetensors").stat().st_size
    chosen = {client for record in result.history for client in record.chosen}
    assert result.summary["bytes_base"] == files
    assert result.summary["bytes_provisioned"] == files * len(chosen)
    idle = result.history[0].clients - len(chosen)  # they evaluate the model all the same
    assert idle > 0
    assert result.summary["bytes_provisioned_evaluation"] == files * idle


def test_adapters_learn(place):
    base = experiment(place, "fedit", rounds=5)
    result = flrce.run(
        base.model_copy(update={"train": base.train.model_copy(update={"epochs": 3})})
    )
    values = [record.last_model_metric for record in result.history]
    assert values[-1] < 0.7 * values[0]


def test_energy_is_forward_through_the_base_and_backward_to_adapters(place):
    """By hand, per token: the base forward 2 N; backward through it 2 N; weights of adapters alone,
    not of the base.
    """
    flops = {}
    for name, options in (("fedit", {}), ("fedkseed", {"seeds": 8})):
        built = build_simulation(experiment(place, name, options=options))
        task = built.recipe.build_tasks(
            Selection((0,)),
            {},
            RoundView(
                1,
                3,
                (0,),
                torch.ones(6),
                built.engine.estimate,
                lambda k, built=built: Task(
                    "p:r0", k, 1, 0, built.recipe.work, update=built.recipe.chain
                ),
                lambda rows: torch.zeros(len(rows)),
            ),
        )[0]
        flops[name] = built.engine.costs.count_training_flops(task)
        built.engine.close()
    L, width, kv, hidden, vocabulary = 16, 64, 32, 96, 288
    matrices = 2 * (2 * width * width + 2 * width * kv + 3 * width * hidden) + vocabulary * width
    attention = 2 * 2 * 2 * L * width  # two layers: scores and their use, by every position of L
    forward = L * (2 * matrices + attention)
    adapters = 2 * (4 * (width + width) + 4 * (width + kv)) * 2 * L
    assert flops["fedkseed"] == pytest.approx(2 * (forward + adapters), rel=0.02)
    # the first block's inputs need no gradient before q and v; attention's backward is twice its
    # forward
    most = 2 * forward + L * attention + 3 * adapters
    assert 0.75 * most < flops["fedit"] <= 1.01 * most


def test_personal_adapters_stay_and_judge(place):
    kept = experiment(place, "fedit", rounds=2)
    kept = kept.model_copy(update={"model": kept.model.model_copy(update={"kept": "*.lora_B"})})
    result = flrce.run(kept)
    assert all(record.bytes_up == 3 * 4 * (SIZE - ONLY_B) for record in result.history)
    assert result.summary["value"] > 1


@pytest.mark.parametrize("name", ["flexlora", "fedkseed", "sparse"])
def test_flower_sends_the_same_and_no_base(place, name):
    """Each node loads the base from disk; what goes over Flower's messages is what the simulator
    books.
    """
    server = pytest.importorskip("flrce.flower.server", reason="flwr is not installed")
    recipe, options, _, _ = METHODS[name]
    tables = experiment(place, recipe, rounds=2, options=options)
    here, there = flrce.run(tables), server.run_on_local_grid(tables)
    for one, other in zip(here.history, there.history, strict=True):
        assert (one.bytes_up, one.bytes_down, one.chosen) == (
            other.bytes_up,
            other.bytes_down,
            other.chosen,
        )
        assert one.joules == pytest.approx(other.joules)
    sent = dict(there.arrays.to_torch_state_dict())
    assert sent
    assert all(torch.equal(sent[key], here.model[key]) for key in sent)


@pytest.mark.parametrize("recipe", ["ffa-lora", "flexlora", "ranks", "seeds"])
def test_a_model_of_transformers_with_peft(place, recipe):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = transformers.LlamaForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    torch.manual_seed(0)
    net = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    )
    before = {name: p.clone() for name, p in net.state_dict().items()}
    told = {"ranks": {"name": "flexlora", "rates": [0.5]}, "seeds": "fedkseed"}.get(recipe, recipe)
    tables = experiment(place, told, rounds=2)
    result = flrce.run(tables, model=SeedSpaceNetwork(net, 30) if recipe == "seeds" else net)
    floats = {"ffa-lora": ONLY_B, "flexlora": SIZE, "ranks": SIZE // 2, "seeds": 30}[recipe]
    assert all(record.bytes_down == 3 * 4 * floats for record in result.history)
    fixed = sum(p.nbytes for p in base.parameters() if not p.requires_grad)
    assert (
        fixed <= result.summary["bytes_base"] <= fixed + 4 * SIZE + 100
    )  # rotary frequencies; no directions
    assert all(
        torch.equal(p, before[name]) for name, p in net.state_dict().items()
    )  # the given one is left alone
    if recipe != "seeds":  # a few probes teach little
        found = net.load_state_dict(
            {name.removeprefix("net."): x for name, x in result.model.items()}, strict=False
        )
        assert not found.unexpected_keys
        assert result.history[-1].last_model_metric < result.history[0].last_model_metric


class Wrapped(nn.Module):
    """An adapter laid out as peft's: matrices in dictionaries of linear layers."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("rate", [0.5, 0.25])
def test_ranks_of_adapters_in_the_form_of_peft(rate):
    torch.manual_seed(0)
    net = nn.Sequential(Wrapped(nn.Linear(6, 5)), nn.Tanh(), Wrapped(nn.Linear(5, 3)))
    assert get_adapter_rank(net) == 4
    where = make_layout(net)
    part = make_low_rank_part(net, where, rate)
    r = int(4 * rate)
    assert sum(size for _, size in part.names) == r * (6 + 5) + r * (5 + 3)
    w = pack_model(net)
    assert torch.equal(w[part.held], pack_model(part.net))
    x, y = torch.randn(7, 6), net[0].base_layer
    first = part.net[0]
    A, B = net[0].lora_A["default"].weight[:r], net[0].lora_B["default"].weight[:, :r]
    torch.testing.assert_close(first(x), y(x) + 2.0 * x @ A.T @ B.T)


def test_probing_single_weights_is_told_of(place, caplog):
    build_simulation(experiment(place, "fedkseed")).engine.close()
    assert "set model.options.seeds" in caplog.text


def test_a_round_that_is_not_judged_is_still_of_its_metric(place):
    told = experiment(place, "fedit", rounds=3)
    engine = told.engine.model_copy(update={"eval_every": 2})
    history = flrce.run(told.model_copy(update={"engine": engine})).history
    assert [(record.metric, record.lower) for record in history] == [("perplexity", True)] * 3
    assert [record.last_model_metric is None for record in history] == [True, False, False]


def test_a_run_that_no_budget_pays_for_is_still_of_its_metric(place):
    found = flrce.run(experiment(place, "fedit", stop={"bytes": 100.0}))
    assert found.summary["rounds"] == 0
    assert (found.summary["metric"], found.summary["better"]) == ("perplexity", "lower")


def test_products_of_no_adapters_are_told_of(caplog):
    plain = flrce.Experiment(recipe={"name": "flexlora"}, engine={"workers": 1, "device": "cpu"})
    build_simulation(plain).engine.close()
    assert "flexlora averages products of adapters, and this network has none" in caplog.text


def test_a_price_without_the_stop_that_asks_it_is_refused_in_python_too():
    with pytest.raises(BadInput, match="set guided = true, or drop points"):
        recipes.fedit(points=0.5)
    assert recipes.fedit(points=0.5, guided=True).stop == MarginalGain(0.5)
    assert recipes.fedit(guided=True).stop == MarginalGain()


def test_the_example_goes_from_nothing_to_a_report(place, tmp_path, monkeypatch):
    script = Path(__file__).resolve().parents[2] / "examples" / "llm" / "run.py"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            str(script),
            "--model",
            str(place / "model"),
            "--out",
            str(tmp_path),
            "--rounds",
            "2",
            "--length",
            "24",
            "--methods",
            "flexlora,fedit-4bit,fedkseed",
        ],
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    page = (tmp_path / "report.html").read_text()
    assert "perplexity" in page
    summaries = [
        json.loads((tmp_path / name / "summary.json").read_text())
        for name in ("flexlora", "fedit-4bit")
    ]
    assert (
        summaries[1]["bytes_up"] < summaries[1]["bytes_down"] / 6
    )  # four bits instead of 32, and a scale each


def test_the_example_tells_a_mistake_in_one_line(place, tmp_path):
    script = Path(__file__).resolve().parents[2] / "examples" / "llm" / "run.py"
    mistaken = [
        "--model",
        str(place / "model"),
        "--out",
        str(tmp_path),
        "--length",
        "96",
        "--rank",
        "0",
    ]
    done = subprocess.run(
        [sys.executable, str(script), *mistaken], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr == "error: model.options.rank = 0: should be greater than or equal to 1\n"


def test_catalogue_has_them_with_and_without_guidance():
    for name in ("fedit", "ffa-lora", "flexlora", "fedkseed"):
        plain, guided = (
            recipes.CATALOGUE[name](P=5),
            recipes.CATALOGUE[name](P=5, guided=True, points=4.0),
        )
        assert type(plain.stop).__name__ == "NeverStop"
        assert guided.stop == MarginalGain(points=4.0)
        assert guided.holdouts
        assert type(guided.selector).__name__ == "RoundRobinSelector"
    assert FrozenParameter(torch.zeros(2)).requires_grad is False


def test_the_former_name_of_flexlora_works(caplog):
    with caplog.at_level("WARNING"):
        old = flrce.Experiment.load(None, ["recipe.name=flora", "recipe.rates=[0.5]"])
    assert 'recipe "flora" is now called "flexlora"' in caplog.text
    new = flrce.Experiment.load(None, ["recipe.name=flexlora", "recipe.rates=[0.5]"])
    assert old.build_recipe() == new.build_recipe()
    assert new.build_recipe().name == "flexlora"
