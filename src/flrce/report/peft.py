"""A run's adapters for HuggingFace's peft: adapter_config.json, adapter_model.safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from flrce.config.experiment import Experiment
from flrce.errors import BadInput
from flrce.models.adapters import DOWN, UP
from flrce.models.nets import build_network
from flrce.models.seeds import SeedSpaceNetwork
from flrce.storage.disk import write_files

ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
# where a model that has a name here is published
PUBLISHED_MODELS = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
# of model.options
DEFAULT_MODEL_OPTIONS: dict[str, Any] = {"path": "smollm2", "rank": 8, "alpha": 16.0}
PEFT_CONFIG = {
    **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True},
    **{"lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False},
}
PEFT_NAME_PREFIX = "base_model.model."  # peft around a causal model


def write_adapters(
    model: Mapping[str, Tensor], experiment: Experiment, out: Path | str
) -> dict[str, Any]:
    """Write the adapters among a model's tensors, a run's or one client's; return the config."""
    if experiment.model.name != "llama":
        raise BadInput(
            f"the run trained model.name = {experiment.model.name!r}; only 'llama' has adapters for"
            " peft"
        )
    out, options = Path(out), {**DEFAULT_MODEL_OPTIONS, **(experiment.model.options or {})}
    adapters = collect_adapters(model, experiment)
    tensors = {to_transformers_name(name): x for name, x in adapters.items()}
    if not tensors:
        few = ", ".join(sorted(model)[:2])
        raise BadInput(
            f"the model has no adapters of 'llama' but {few or 'nothing'}: a network that was"
            " handed over in Python takes its tensors by load_state_dict, and its own library"
            " writes them"
        )
    targets = sorted({name.rpartition(".")[0] for name in tensors})
    base = str(options["path"])
    config = {
        **PEFT_CONFIG,
        "base_model_name_or_path": PUBLISHED_MODELS.get(base, base),
        "r": int(options["rank"]),
        "lora_alpha": float(options["alpha"]),
        "target_modules": targets,
    }
    named = {f"{PEFT_NAME_PREFIX}{name}.weight": x.contiguous() for name, x in tensors.items()}
    weights, settings = save(named, {"format": "pt"}), json.dumps(config, indent=1).encode()
    write_files(out, {ADAPTER_FILE: weights, CONFIG_FILE: settings})
    return config


def to_transformers_name(name: str) -> str:
    """The name in a causal model of transformers: layers below `model`, output layer beside."""
    return f"lm_{name}" if name.startswith("head.") else f"model.{name}"


def collect_adapters(tensors: Mapping[str, Tensor], experiment: Experiment) -> dict[str, Tensor]:
    """Both matrices of every adapter by name; those of a seed space are computed."""
    if "steps" in tensors:
        net = build_network("llama", (1,), 1, experiment.seed, 1, True, experiment.model.options)
        assert isinstance(net, SeedSpaceNetwork)
        net.load_state_dict({"steps": tensors["steps"]}, strict=False)
        tensors = dict(net.net.named_parameters()) | net.compute_parameters()
    return {
        name: x.detach() for name, x in tensors.items() if name.rpartition(".")[2] in (DOWN, UP)
    }
