"""Compare the settings of a stored run with those of the experiment that resumes it."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flrce.config.recipe_names import complete_stored_table
from flrce.core.files import parse_toml
from flrce.errors import BadInput, format_one_line
from flrce.storage.seal import MAX_SETTINGS_BYTES, read_json_table, read_lines, read_sealed_file

NEUTRAL_SETTINGS = ("engine.workers", "engine.device")  # settings that change no result
LENGTH_SETTING = "rounds"  # changes where a run ends, and no round before that
DEFAULT_PRESET_LINE = 'preset = "default"\n'
FlatSettings = dict[str, Any]  # "table.key" -> value


def parse_settings(experiment: str) -> FlatSettings:
    """The values of an experiment file, independent of its layout."""
    return flatten_tables(parse_toml(experiment))


def parse_stored_settings(experiment: str) -> FlatSettings:
    """The same for a stored run, with what its recipe's name meant then."""
    tables = parse_toml(experiment)
    recipe = tables.get("recipe")
    if isinstance(recipe, dict):
        tables["recipe"] = complete_stored_table(recipe)
    return flatten_tables(tables)


def select_deciding_settings(settings: FlatSettings) -> FlatSettings:
    """The settings on which the rounds of a run depend."""
    ignored = (*NEUTRAL_SETTINGS, LENGTH_SETTING)
    return {key: value for key, value in settings.items() if key not in ignored}


def require_same_experiment(path: Path, experiment: str) -> str:
    """Raise BadInput for another or a shorter experiment than the stored one; return that one."""
    if not os.path.lexists(path):
        return experiment
    try:
        before = read_sealed_file(path, {}, MAX_SETTINGS_BYTES).decode()
        old, new = parse_settings(before), parse_settings(experiment)
        if "recipe.preset" in new:  # a table of pieces, as on Flower, has none
            old = parse_stored_settings(before)
    except BadInput:
        raise
    except (ValueError, RecursionError) as why:
        raise BadInput(
            f"{path} is damaged ({format_one_line(why, 100)}); restore it, or use another --out"
        ) from why
    _require_same_settings(path, select_deciding_settings(old), select_deciding_settings(new))
    _require_enough_rounds(path, new)
    return before


def _require_same_settings(path: Path, old: FlatSettings, new: FlatSettings) -> None:
    changed = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    if changed:
        differences = "; ".join(
            f"{key} {old.get(key, 'unset')!r} -> {new.get(key, 'unset')!r}" for key in changed[:6]
        )
        raise BadInput(
            f"{path} differs from this experiment: {differences}; undo that, or use another --out"
        )


def _require_enough_rounds(path: Path, new: FlatSettings) -> None:
    rounds = path.with_name("rounds.jsonl")
    done = sum(b'"outcome":"committed"' in line for line in read_lines(rounds, {}))
    if new.get(LENGTH_SETTING, done) < done:
        raise BadInput(
            f"rounds = {new[LENGTH_SETTING]}: {path.parent} already has {done}; set at least"
            " that many, or use another --out"
        )


def fingerprint_experiment(experiment: str) -> str:
    """The hash of all settings on which the rounds depend."""
    text = json.dumps(
        select_deciding_settings(parse_settings(experiment)), sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint_experiment_text(experiment: str) -> str:
    """The hash as version 0.1 wrote it: of the text. Its runs can be resumed."""
    ignored = ("workers", "device")
    lines = [x for x in experiment.splitlines() if x.split(" = ")[0] not in ignored]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def list_former_fingerprints(*experiments: str) -> set[str]:
    """Fingerprints that earlier versions gave the same settings."""
    texts = [*experiments, *(text.replace(DEFAULT_PRESET_LINE, "") for text in experiments)]
    makers = (fingerprint_experiment, fingerprint_experiment_text)
    return {make(text) for text in texts for make in makers}


def require_same_data(path: Path, partition: Mapping[str, Any]) -> None:
    """Raise BadInput for other data than those of the stored run."""
    if not path.exists():
        return
    old, new = read_json_table(path), json.loads(json.dumps(partition))
    changed = [
        key for key in sorted(old.keys() & new.keys()) if key != "baseline" and old[key] != new[key]
    ]
    if changed == ["base"]:
        raise BadInput(f"{path} was made with another base model; restore it, or use another --out")
    if changed:
        raise BadInput(
            f"{path} was made from other data ({', '.join(changed)} differ); restore it, or use"
            " another --out"
        )


def flatten_tables(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as {"a.b": value}."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat |= flatten_tables(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
