"""flrce export runs/a --out model.onnx"""

import json
from pathlib import Path


def export_run(run: Path, out: Path, last: bool, as_json: bool, trust: bool = False) -> None:
    """Write the model of a run: a file by its suffix, or a folder for the HuggingFace Hub."""
    if not out.suffix:
        from flrce.inference.model_folder import export_model_folder

        written = export_model_folder(run, out, last)
        print(json.dumps(written, indent=1) if as_json else f"wrote {out}: {describe(written)}")
        return
    from flrce.inference.export import export_network
    from flrce.inference.trained_model import load

    model = load(run, last=last, trust=trust)
    export_network(model, out)
    shown = {"file": str(out), "shape": list(model.spec.shape), "outputs": model.spec.outputs}
    print(json.dumps(shown, indent=1) if as_json else f"wrote {out}: takes {model.spec.shape}")


def describe(written: dict[str, object]) -> str:
    """What a folder holds, in one line."""
    targets = written.get("target_modules")
    if not isinstance(targets, list):
        return f"{written['tensors']} tensors and a model card"
    base = written["base_model_name_or_path"]
    return f"{len(targets)} adapters of rank {written['r']}, for peft over {base}; a model card"
