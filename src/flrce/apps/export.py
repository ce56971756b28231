"""flrce export runs/a --out adapters"""

import json
from pathlib import Path

from flrce.results import peft


def export(run: Path, out: Path, last: bool, as_json: bool) -> None:
    """The adapters that a run handed back, for peft."""
    config = peft.export(run, out, last)
    if as_json:
        print(json.dumps(config, indent=1))
        return
    count = len(config["target_modules"])
    print(f"wrote {out}: {count} adapters of rank {config['r']}, for peft over {config['base_model_name_or_path']}")
