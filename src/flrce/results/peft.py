"""A run's adapters as HuggingFace's peft reads them: adapter_config.json and adapter_model.safetensors."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flrce.config import Experiment
from flrce.errors import BadInput, brief
from flrce.models.adapters import DOWN, UP
from flrce.models.nets import build
from flrce.models.seeds import Seeded
from flrce.store.disk import BY_UMASK, write_through
from flrce.store.seal import MAX_SETTINGS_BYTES, SEAL, Marks, contents, refuse_unlisted, sealed
from flrce.user_code import NOTHING

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PUBLIC = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}  # where a model that has a name here is published
USUAL: dict[str, Any] = {"path": "smollm2", "rank": 8, "alpha": 16.0}  # of model.options
BEFORE = "base_model.model."  # peft around a causal model


def export(run: Path, out: Path, last: bool = False) -> dict[str, Any]:
    """Write the adapters that a run handed back, or its `last` ones, into the folder `out`; the config is returned."""
    if not os.path.lexists(run / "experiment.toml"):
        raise BadInput(f"{run} is no run directory; give the --out of a run")
    marks = _marks(run, last)
    contents(run / "experiment.toml", marks, MAX_SETTINGS_BYTES)  # rank and alpha stand there: as they were sealed
    experiment = Experiment.load(run / "experiment.toml", trust=NOTHING)  # a record is data
    if kept := experiment.kept_patterns():
        raise BadInput(
            f"{run}: every client keeps {', '.join(kept)} of its own; flrce.run(experiment, {str(run)!r}, "
            "resume=True).personal has their models, and flrce.results.peft.write writes one"
        )
    return write(_read(run, last, marks), experiment, out)


def write(model: Mapping[str, Tensor], experiment: Experiment, out: Path | str) -> dict[str, Any]:
    """Write the adapters among a model's named tensors, a run's or one client's own; the config is returned."""
    if experiment.model.name != "llama":
        raise BadInput(
            f"the run trained model.name = {experiment.model.name!r}; adapters are those of 'llama' alone, any other "
            "network takes its model.safetensors by load_state_dict"
        )
    options, out = {**USUAL, **(experiment.model.options or {})}, Path(out)
    tensors = {published(name): x for name, x in adapters(model, experiment).items()}
    if not tensors:
        few = ", ".join(sorted(model)[:2])
        raise BadInput(
            f"the model has no adapters of 'llama' but {few or 'nothing'}: a network that was handed over in Python "
            "takes its tensors by load_state_dict, and its own library writes them"
        )
    targets = sorted({name.rpartition(".")[0] for name in tensors})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True,
        "base_model_name_or_path": PUBLIC.get(str(options["path"]), str(options["path"])),
        "r": int(options["rank"]), "lora_alpha": float(options["alpha"]), "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "target_modules": targets,
    }  # fmt: skip
    named = {f"{BEFORE}{name}.weight": tensor.contiguous() for name, tensor in tensors.items()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_through(out / WEIGHTS, save(named, {"format": "pt"}), BY_UMASK)
        write_through(out / CONFIG, json.dumps(config, indent=1).encode(), BY_UMASK)
    except OSError as why:
        raise BadInput(f"{out} cannot be written: {why.strerror or why}; give a folder that can") from why
    return config


def published(name: str) -> str:
    """The name in a causal model of transformers: its layers lie below `model`, its output layer beside it."""
    return f"lm_{name}" if name.startswith("head.") else f"model.{name}"


def adapters(tensors: Mapping[str, Tensor], experiment: Experiment) -> dict[str, Tensor]:
    """Both matrices of every adapter, by their names in the network; those of a seed space are worked out."""
    if "steps" in tensors:
        net = build("llama", (1,), 1, experiment.seed, 1, True, experiment.model.options)
        assert isinstance(net, Seeded)
        net.load_state_dict({"steps": tensors["steps"]}, strict=False)
        tensors = dict(net.net.named_parameters()) | net.moved()
    return {name: x.detach() for name, x in tensors.items() if name.rpartition(".")[2] in (DOWN, UP)}


def _marks(run: Path, last: bool) -> Marks:
    """What the seal says of a run's files; BadInput where there is no model, or nothing to check it by."""
    marks = sealed(run)
    names = ("last.safetensors", "model.safetensors") if last else ("model.safetensors",)
    if not any(os.path.lexists(run / name) or name in marks for name in names):
        raise BadInput(
            f"{run} has no model yet: one is written when the run ends or is interrupted; go on with --resume"
        )
    if not marks:
        raise BadInput(f"{run} has no {SEAL} to check its weights by; flrce run --out {run} --resume writes it")
    refuse_unlisted(run, marks)
    return marks


def _read(run: Path, last: bool, marks: Marks) -> dict[str, Tensor]:
    name = "last.safetensors" if last and "last.safetensors" in marks else "model.safetensors"  # often the same
    path, size = run / name, marks.get(name, {"bytes": 0})["bytes"]
    try:
        return load(contents(path, marks, size))
    except SafetensorError as why:
        raise BadInput(f"{path} cannot be read ({brief(why, 80)}); restore it (flrce verify {run} checks all)") from why
