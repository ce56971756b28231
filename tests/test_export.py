"""A run's adapters, as another program loads them."""

import json

import pytest
import torch
from safetensors.torch import load_file

import flrce
from flrce.apps.cli import main
from flrce.models.adapters import adapt
from flrce.models.llama import load
from flrce.models.nets import build
from language import weights, write_folder

RANK, ALPHA = 3, 6.0


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    write_folder(folder / "model", weights())
    rows = [{"client": f"c{i}", "text": f"the man on the hill {i} " * 9} for i in range(3)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(place, out, recipe, **options):
    experiment = flrce.Experiment(
        rounds=2, clients=3, per_round=2, recipe=recipe,
        data={"path": str(place / "text.jsonl"), "tokenizer": str(place / "model"), "length": 12,
              "partition": "natural"},
        model={"name": "llama", "options": {"path": str(place / "model"), "rank": RANK, "alpha": ALPHA, **options}},
        objective={"name": "next-token", "metrics": ["perplexity"]},
        train={"lr": 0.3, "steps": 2, "batch": 4}, engine={"workers": 1, "device": "cpu"},
    )  # fmt: skip
    return experiment, flrce.run(experiment, out)


def scores(place, folder):
    """W x + alpha / r B A x, by the names and numbers in the exported files alone."""
    config, held = json.loads((folder / "adapter_config.json").read_text()), {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        assert name.startswith("base_model.model.model.layers.")
        held[name.removeprefix("base_model.model.model.").removesuffix(".weight")] = tensor
    there = [name.removeprefix("model.") for name in config["target_modules"]]  # layers lie below it in transformers
    net = adapt(load(place / "model"), config["r"], config["lora_alpha"], there)
    net.load_state_dict(held, strict=False)
    return net(torch.arange(3, 15)[None])


@pytest.mark.parametrize("recipe", ["fedit", "ffa-lora", "fedkseed"])
def test_what_is_exported_is_what_was_trained(place, tmp_path, recipe):
    options = {"seeds": 20} if recipe == "fedkseed" else {}
    experiment, result = trained(place, tmp_path / "run", {"name": recipe}, **options)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "peft")]) == 0
    net = build("llama", (12,), 1, experiment.seed, 1, True, experiment.model.options)
    net.load_state_dict(result.model, strict=False)
    ids = torch.arange(3, 15)[None]
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
    assert config["target_modules"][0] == "model.layers.0.self_attn.q_proj"
    found = scores(place, tmp_path / "peft")
    torch.testing.assert_close(found, net(ids), atol=1e-5, rtol=1e-4)
    assert float((found - load(place / "model")(ids)).detach().abs().max()) > 1e-4


def test_peft_loads_it(place, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    experiment, result = trained(place, tmp_path / "run", {"name": "flora", "rates": [1.0, 0.34]})
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "peft")]) == 0
    base = transformers.LlamaForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    net = build("llama", (12,), 1, experiment.seed, 1, True, experiment.model.options)
    net.load_state_dict(result.model, strict=False)
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(theirs(ids).logits, net(ids), atol=1e-4, rtol=1e-3)


def test_what_has_no_adapters_is_told_so(tmp_path, capsys):
    flrce.run(flrce.Experiment(rounds=1, clients=4, per_round=2), tmp_path / "digits")
    assert main(["export", str(tmp_path / "digits"), "--out", str(tmp_path / "peft")]) == 2
    assert "adapters are those of 'llama' alone" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none"), "--out", str(tmp_path / "peft")]) == 2
    assert not (tmp_path / "peft").exists()
