"""flrce export runs/a --out adapters"""

import json
from pathlib import Path

from flrce.report import peft


def export_run_adapters(run: Path, out: Path, last: bool, as_json: bool) -> None:
    """The adapters that a run handed back, for peft."""
    config = peft.export_adapters(run, out, last)
    if as_json:
        print(json.dumps(config, indent=1))
        return
    count = len(config["target_modules"])
    print(
        f"wrote {out}: {count} adapters of rank {config['r']}, for peft over"
        f" {config['base_model_name_or_path']}"
    )
