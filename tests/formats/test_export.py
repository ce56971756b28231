"""A run's adapters, as another program loads them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import flrce
from flrce.cli.cli import main
from flrce.core.cost_table import COSTS
from flrce.data.sources import IGNORED_TARGET
from flrce.inference.model_folder import make_card
from flrce.models.adapters import add_lora_adapters
from flrce.models.llama import load_llama
from flrce.models.nets import build_network
from flrce.report import peft
from flrce.simulation.runs import build_simulation
from language_files import weights, write_folder

RANK, ALPHA = 3, 6.0
IDS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    write_folder(folder / "model", weights())
    rows = [{"client": f"c{i}", "text": f"the man on the hill {i} " * 9} for i in range(3)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(place, out, recipe, more=None, **options):
    experiment = flrce.Experiment(
        rounds=2,
        clients=3,
        per_round=2,
        recipe=recipe,
        data={
            "path": str(place / "text.jsonl"),
            "tokenizer": str(place / "model"),
            "length": 12,
            "partition": "natural",
        },
        model={
            "name": "llama",
            "options": {"path": str(place / "model"), "rank": RANK, "alpha": ALPHA, **options},
            **(more or {}),
        },
        objective={"name": "next-token", "metrics": ["perplexity"]},
        train={"lr": 0.3, "steps": 2, "batch": 4},
        engine={"workers": 1, "device": "cpu"},
    )
    return experiment, flrce.run(experiment, out)


def scores(place, folder, ids=IDS):
    """W x + alpha / r B A x, by the names and numbers in the exported files alone."""
    config, held = json.loads((folder / "adapter_config.json").read_text()), {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        assert name.startswith("base_model.model.model.layers.")
        held[name.removeprefix("base_model.model.model.").removesuffix(".weight")] = tensor
    there = [
        name.removeprefix("model.") for name in config["target_modules"]
    ]  # layers lie below it in transformers
    net = add_lora_adapters(load_llama(place / "model"), config["r"], config["lora_alpha"], there)
    net.load_state_dict(held, strict=False)
    return net(ids)


@pytest.mark.parametrize("recipe", ["fedit", "ffa-lora", "fedkseed"])
def test_what_is_exported_is_what_was_trained(place, tmp_path, recipe):
    options = {"seeds": 20} if recipe == "fedkseed" else {}
    experiment, result = trained(place, tmp_path / "run", {"name": recipe}, **options)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "peft")]) == 0
    net = build_network("llama", (12,), 1, experiment.seed, 1, True, experiment.model.options)
    net.load_state_dict(result.model, strict=False)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
    assert config["target_modules"][0] == "model.layers.0.self_attn.q_proj"
    found = scores(place, tmp_path / "peft")
    torch.testing.assert_close(found, net(IDS), atol=1e-5, rtol=1e-4)
    assert float((found - load_llama(place / "model")(IDS)).detach().abs().max()) > 1e-4


def untied(folder):
    """The tiny model with an output layer of its own."""
    more = {
        "lm_head.weight": 0.2 * torch.randn(288, 64, generator=torch.Generator().manual_seed(5))
    }
    write_folder(folder, weights() | more)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "tie_word_embeddings": False}))
    return folder


def test_an_adapter_of_the_output_layer_goes_by_its_public_name(place, tmp_path):
    """It lies beside the layers in transformers, not below them: peft passes over names that it
    does not find.
    """
    base = untied(tmp_path / "base")
    trained(
        place,
        tmp_path / "run",
        {"name": "fedit"},
        path=str(base),
        targets="head,layers.1.mlp.up_proj",
    )
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "peft")]) == 0
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["lm_head", "model.layers.1.mlp.up_proj"]
    shapes = {
        n: tuple(x.shape)
        for n, x in load_file(tmp_path / "peft" / "adapter_model.safetensors").items()
    }
    assert shapes == {
        "base_model.model.lm_head.lora_A.weight": (RANK, 64),
        "base_model.model.lm_head.lora_B.weight": (288, RANK),
        "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight": (RANK, 64),
        "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight": (96, RANK),
    }


@pytest.mark.parametrize("layers", ["some", "all"])
def test_peft_loads_it(place, tmp_path, layers):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = pytest.importorskip("peft", reason="peft is not installed")
    where = place / "model" if layers == "some" else untied(tmp_path / "base")
    options = {} if layers == "some" else {"targets": "*", "path": str(where)}
    experiment, result = trained(
        place, tmp_path / "run", {"name": "flora", "rates": [1.0, 0.34]}, **options
    )
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "peft")]) == 0
    base = transformers.LlamaForCausalLM.from_pretrained(where, dtype=torch.float32)
    adapted = theirs.PeftModel.from_pretrained(base, tmp_path / "peft")
    net = build_network("llama", (12,), 1, experiment.seed, 1, True, experiment.model.options)
    net.load_state_dict(result.model, strict=False)
    torch.testing.assert_close(adapted(IDS).logits, net(IDS), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("how", ["ditto", "kept"])
def test_a_client_takes_its_own_adapters_along(place, tmp_path, how):
    """What is exported gives the client's hold-out the perplexity that the run's own judgement
    found.
    """
    more = {"kept": "*.lora_B"} if how == "kept" else {}
    experiment, result = trained(
        place, tmp_path / "run", {"name": "ditto" if how == "ditto" else "fedit"}, more
    )
    found = json.loads((tmp_path / "run" / "final.json").read_text())
    federation = build_simulation(experiment).federation
    assert set(result.personal) == {
        client for record in result.history for client in record.replied
    }
    for client in result.personal:
        peft.write_adapters(result.personal[client], experiment, tmp_path / client)
        row = federation.client_indices[client]
        index = federation.held[row]
        x, y = (
            torch.from_numpy(np.array(each)[index])
            for each in (federation.source.x, federation.source.y)
        )
        loss = F.cross_entropy(
            scores(place, tmp_path / client, x).flatten(0, 1),
            y.flatten(),
            ignore_index=IGNORED_TARGET,
        )
        assert float(loss.detach().exp()) == pytest.approx(found["clients"][row], rel=1e-4)
    again = flrce.run(experiment, tmp_path / "run", resume=True)
    one = next(iter(result.personal))
    assert all(
        torch.equal(again.personal[one][name], x) for name, x in result.personal[one].items()
    )
    if how == "kept":
        assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "none")]) == 2


def test_the_head_over_a_fixed_base_is_the_last_adapter(place, tmp_path):
    """The last layer of all is a norm of the base, which neither trains nor travels."""
    _, result = trained(place, tmp_path / "run", {"name": "fedper"})
    last = "layers.1.self_attn.v_proj"
    one = next(iter(result.personal.values()))
    own = {name for name, x in one.items() if not torch.equal(x, result.model[name])}
    assert own == {f"{last}.lora_A", f"{last}.lora_B"}
    # two layers' q and v of rank 3, less one v of 32 x 64
    assert result.history[0].bytes_up == 2 * 4 * RANK * (2 * (64 + 64) + 64 + 32)


def test_a_client_without_a_model_of_its_own_has_none(place, tmp_path):
    assert not trained(place, tmp_path / "run", {"name": "fedit"})[1].personal


def test_other_networks_become_a_folder_with_a_card(tmp_path, capsys):
    """model.safetensors as trained, and the run's figures in the card's front matter and table."""
    experiment = flrce.Experiment(rounds=2, clients=4, per_round=2, recipe={"name": "fedavg"})
    result = flrce.run(experiment, tmp_path / "digits")
    assert main(["export", str(tmp_path / "digits"), "--out", str(tmp_path / "hub")]) == 0
    assert "a model card" in capsys.readouterr().out
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    assert tensors.keys() == result.model.keys()
    assert all(torch.equal(x, result.model[name]) for name, x in tensors.items())
    _, front, body = (tmp_path / "hub" / "README.md").read_text().split("---\n", 2)
    header = dict(line.split(": ", 1) for line in front.splitlines())
    metric = json.loads(header["model-index"])[0]["results"][0]["metrics"][0]
    assert metric == {"type": "accuracy", "value": result.summary["value"]}
    assert json.loads(header["tags"]) == ["federated-learning", "flrce", "fedavg"]
    joules, traffic = (COSTS[name].of_summary(result.summary) for name in ("joules", "bytes"))
    assert f"| Energy | {COSTS['joules'].format_amount(joules)} |" in body
    assert f"| Traffic | {COSTS['bytes'].format_amount(traffic)} |" in body
    assert (tmp_path / "hub" / "model.json").is_file()


@pytest.mark.parametrize("value", [0.75, None], ids=["evaluated", "never evaluated"])
def test_the_hubs_library_reads_the_card(tmp_path, value):
    """Also of a run whose clients know neither a metric nor their joules."""
    hub = pytest.importorskip("huggingface_hub", reason="needs flrce[huggingface]")
    summary = {"metric": "accuracy", "value": value, "rounds": 2, "bytes_up": 5e6, "bytes_down": 0,
               "joules": 0.0, "energy": "unknown", "parameters": 10, "versions": {"flrce": "1"}}  # fmt: skip
    (tmp_path / "README.md").write_bytes(make_card(flrce.Experiment(), summary, "usage"))
    card = hub.ModelCard.load(tmp_path / "README.md")
    found = [result.metric_value for result in card.data.eval_results or []]
    assert found == ([0.75] if value else [])
    assert card.data.library_name == "flrce"
    assert "| Traffic | 5 MB |" in card.text
    assert "Energy is unknown." in card.text


def test_a_folder_that_is_no_run_is_not_exported(tmp_path):
    assert main(["export", str(tmp_path / "none"), "--out", str(tmp_path / "hub")]) == 2
    assert not (tmp_path / "hub").exists()


def test_a_network_handed_over_in_python_is_not_exported_as_nothing(place, tmp_path, capsys):
    experiment, _ = trained(place, tmp_path / "own", {"name": "fedit"})
    net = nn.Sequential(
        nn.Embedding(288, 8), nn.Linear(8, 288)
    )  # the experiment's own llama stands aside
    flrce.run(experiment, tmp_path / "run", model=net)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "peft")]) == 2
    assert (
        "no adapters of 'llama' but 0.weight, 1.bias: a network that was handed over"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "peft").exists()


def test_a_place_that_cannot_be_written_is_one_line(place, tmp_path, capsys):
    trained(place, tmp_path / "run", {"name": "fedit"})
    (tmp_path / "file").write_text("mine")
    capsys.readouterr()
    for args, told in (
        ([tmp_path / "run", "--out", tmp_path / "file"], "cannot be written"),
        ([tmp_path / "run", "--out", tmp_path / "file" / "x"], "cannot be written"),
        ([tmp_path, "--out", tmp_path / "new"], "is no run directory"),
    ):
        assert main(["export", *map(str, args)]) == 2
        assert told in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_damaged_weights_and_settings_are_not_exported(place, tmp_path, capsys):
    """Every file that an export reads is as the run sealed it, or nothing is written."""
    trained(place, tmp_path / "run", {"name": "fedit"})
    run, rng = tmp_path / "run", np.random.default_rng(0)
    asked = ["export", str(run), "--out", str(tmp_path / "peft")]

    def refused(*more):
        code = main([*asked, *more])
        error = capsys.readouterr().err
        assert (code, error.count("\n"), (tmp_path / "peft").exists()) == (2, 1, False), error
        return error

    for name in ("model.safetensors", "experiment.toml"):
        whole = (run / name).read_bytes()
        for at in [
            *range(64),
            *rng.integers(8 * len(whole), size=150).tolist(),
        ]:  # the header's length is at the front
            data = bytearray(whole)
            data[at // 8] ^= 1 << at % 8
            (run / name).write_bytes(data)
            assert name in refused()
        (run / name).write_bytes(whole)
    text = (run / "experiment.toml").read_text()
    (run / "experiment.toml").write_text(text.replace("alpha = 6.0", "alpha = 60.0"))
    assert "experiment.toml was changed after it was written" in refused()
    (run / "experiment.toml").write_text(text)
    if not (run / "last.safetensors").exists():
        (run / "last.safetensors").write_bytes((run / "model.safetensors").read_bytes())
        assert "last.safetensors was added" in refused("--last")
        (run / "last.safetensors").unlink()
    seal = (run / "checksums.json").read_bytes()
    (run / "checksums.json").unlink()
    assert "has no checksums.json" in refused()
    (run / "checksums.json").write_bytes(seal)
    (run / "model.safetensors").rename(tmp_path / "aside")
    (run / "model.safetensors").symlink_to("/dev/zero")
    assert "symbolic link" in refused()
    (run / "model.safetensors").unlink()
    (tmp_path / "aside").rename(run / "model.safetensors")
    assert main(asked) == 0
