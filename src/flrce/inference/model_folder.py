"""A trained model as a folder for the HuggingFace Hub: weights, settings, and a model card."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save

from flrce.config.experiment import Experiment
from flrce.core.cost_table import COSTS
from flrce.core.user_code import NOTHING
from flrce.errors import BadInput
from flrce.report.peft import write_adapters
from flrce.storage.disk import write_files
from flrce.storage.run_model import load_run_tensors, read_model_marks
from flrce.storage.seal import (
    MAX_SETTINGS_BYTES,
    MODEL_FILE,
    FileMarks,
    parse_document,
    read_sealed_file,
)

CARD_FILE = "README.md"
CARD = """---
{front}
---

# {title}

Trained by federated learning with flrce {version}: recipe `{recipe}`, {rounds} rounds,
{clients} clients, {per_round} a round, data `{data}`.

| | |
|---|---|
{rows}

Energy is {energy}. The {metric} is the mean over the clients' hold-outs.

{usage}
"""
USE_NETWORK = """```python
import safetensors.torch

network.load_state_dict(safetensors.torch.load_file("model.safetensors"), strict=False)
```

`experiment.toml` has the settings of the run; `model.json` says how raw samples were prepared."""
USE_ADAPTERS = """```python
from peft import PeftModel

model = PeftModel.from_pretrained(base, "FOLDER")
```"""


def export_model_folder(run: Path, out: Path, last: bool = False) -> dict[str, Any]:
    """Write the model of a run (`last`: its last one) and a card into `out`; what was written."""
    if not os.path.lexists(run / "experiment.toml"):
        raise BadInput(f"{run} is no run directory; give the --out of a run")
    marks = read_model_marks(run, last)
    settings = read_sealed_file(run / "experiment.toml", marks, MAX_SETTINGS_BYTES)
    experiment = Experiment.load(run / "experiment.toml", trust=NOTHING)  # a record is data
    if patterns := experiment.personal_patterns():
        raise BadInput(
            f"{run}: every client keeps {', '.join(patterns)} of its own; flrce.run(experiment,"
            f" {str(run)!r}, resume=True).personal has their models, and"
            " flrce.report.peft.write_adapters writes the adapters of one"
        )
    summary = read_summary(run, marks)
    tensors = load_run_tensors(run, last, marks)
    if experiment.model.name == "llama":
        written = write_adapters(tensors, experiment, out)
        files = {CARD_FILE: make_card(experiment, summary, USE_ADAPTERS)}
    else:
        files = {
            "model.safetensors": save(tensors, {"format": "pt"}),
            "experiment.toml": settings,
            CARD_FILE: make_card(experiment, summary, USE_NETWORK),
        }
        if MODEL_FILE in marks:
            files[MODEL_FILE] = read_sealed_file(run / MODEL_FILE, marks)
        written = {"files": sorted(files), "tensors": len(tensors)}
    write_files(out, files)
    return written


def read_summary(run: Path, marks: FileMarks) -> dict[str, Any]:
    """The figures of a run that has ended."""
    if "summary.json" not in marks:
        raise BadInput(f"{run} has no summary.json yet: resume it with --resume, then export it")
    path = run / "summary.json"
    return parse_document(read_sealed_file(path, marks, MAX_SETTINGS_BYTES), path)


def make_card(experiment: Experiment, summary: Mapping[str, Any], usage: str) -> bytes:
    """A model card in the Hub's format; its front matter is JSON, which YAML contains."""
    recipe = str(experiment.recipe.get("name", "own"))
    data = str(experiment.data.path or experiment.data.name)
    metric, value = str(summary["metric"]), summary["value"]
    title = f"{Path(data).stem}, {recipe}"
    result = {
        "task": {"type": "other"},
        "dataset": {"type": Path(data).stem, "name": Path(data).stem},
        "metrics": [{"type": metric, "value": value}],
    }
    front: dict[str, Any] = {
        "library_name": "flrce",
        "tags": ["federated-learning", "flrce", recipe],
        "metrics": [metric],
    }
    if value is not None:  # the Hub refuses a result without a value
        front["model-index"] = [{"name": title, "results": [result]}]
    if grams := summary.get("grams"):
        source = "flrce, from modelled energy and the grid's carbon intensity"
        front["co2_eq_emissions"] = {"emissions": grams, "source": source}
    costs = [
        (cost.heading, cost.format_amount(cost.of_summary(summary)))
        for cost in COSTS.values()
        if cost.of_summary(summary)
    ]
    shown = "unknown" if value is None else f"{value:.4g}"
    rows = [(metric, shown), *costs, ("Parameters", f"{summary['parameters']:,}")]
    text = CARD.format(
        front="\n".join(f"{key}: {json.dumps(entry)}" for key, entry in front.items()),
        title=title,
        version=summary["versions"]["flrce"],
        recipe=recipe,
        rounds=int(summary["rounds"]),
        clients=experiment.clients,
        per_round=experiment.per_round,
        data=Path(data).name,
        rows="\n".join(f"| {name} | {text} |" for name, text in rows),
        energy=summary["energy"],
        metric=metric,
        usage=usage,
    )
    return text.encode()
