"""flrce export runs/a --out model.onnx"""

import json
from pathlib import Path

from flrce.report import peft


def export_run(run: Path, out: Path, last: bool, as_json: bool, trust: bool = False) -> None:
    """Write the model of a run: a file by its suffix, or a folder of peft adapters."""
    if out.suffix:
        from flrce.inference.export import export_network
        from flrce.inference.trained_model import load

        model = load(run, last=last, trust=trust)
        export_network(model, out)
        shown = {"file": str(out), "shape": list(model.spec.shape), "outputs": model.spec.outputs}
        print(json.dumps(shown, indent=1) if as_json else f"wrote {out}: takes {model.spec.shape}")
        return
    config = peft.export_adapters(run, out, last)
    if as_json:
        print(json.dumps(config, indent=1))
        return
    count = len(config["target_modules"])
    print(
        f"wrote {out}: {count} adapters of rank {config['r']}, for peft over"
        f" {config['base_model_name_or_path']}"
    )
