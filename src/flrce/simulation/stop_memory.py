"""Earlier runs of a task, read once before the first round: the memory of the stop rule."""

import glob
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from flrce.config.experiment import Experiment, read_toml
from flrce.errors import BadInput
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.stopping.memory import (
    GainCurve,
    compute_gain_curve,
    hash_summary,
    look_up_earlier_gain,
    summarize_curves,
)
from flrce.storage.read import RecordedRun, read_runs

SEEDS_FILE = "seeds.json"  # in a folder of seeds, all of one command
log = logging.getLogger("flrce")


def resolve_stop_memory(
    experiment: Experiment, out: Path | str | None, resume: bool = False
) -> Experiment:
    """The experiment with what `recipe.stop.like` names read and summarised in its stop rule.

    A resumed run keeps the summary that it was started with.
    """
    table = experiment.recipe.get("stop")
    if not isinstance(table, dict) or not table.get("like") or table.get("earlier"):
        return experiment
    stored = _read_stored_table(out) if resume and out is not None else {}
    summary = stored or _summarize_runs(experiment, str(table["like"]), out)
    stop = {**table, **summary}
    return experiment.model_copy(update={"recipe": {**experiment.recipe, "stop": stop}})


def _read_stored_table(out: Path | str) -> dict[str, Any]:
    paths = sorted([*Path(out).glob("experiment.toml"), *Path(out).glob("seed-*/experiment.toml")])
    if not paths:
        return {}
    path = paths[0]
    stop = read_toml(path).get("recipe", {}).get("stop", {})
    return {key: value for key, value in stop.items() if key.startswith("earlier")}


def _summarize_runs(experiment: Experiment, like: str, out: Path | str | None) -> dict[str, Any]:
    runs = [run for run in _read_earlier_runs(like, out) if _is_same_task(run, experiment)]
    if not runs:
        raise BadInput(
            f"recipe.stop.like = {like!r} names no finished run of this data set; give folders that"
            " `flrce run --out` made, or drop like"
        )
    rule = replace(experiment.build_recipe().stop, like="")  # type: ignore[type-var]
    assert isinstance(rule, MarginalGain)
    curves = [compute_gain_curve(run.committed_rounds) for run in runs]
    summary = summarize_curves(curves)
    early = sum(_is_too_early(rule, run, curve) for run, curve in zip(runs, curves, strict=True))
    log.info("The stop rule remembers %d earlier runs (%s).", len(runs), like)
    return {
        "earlier": list(summary),
        "earlier_runs": len(runs),
        "earlier_too_early": early,
        "earlier_hash": hash_summary(summary),
    }


def _read_earlier_runs(like: str, out: Path | str | None) -> list[RecordedRun]:
    """Every run that the pattern names, but for what this command itself writes."""
    own = None if out is None else Path(out).resolve()
    if own is not None and (own.parent / SEEDS_FILE).exists():
        own = own.parent
    runs: list[RecordedRun] = []
    for name in sorted(glob.glob(str(Path(like).expanduser()))):
        folder = Path(name)
        if folder.is_dir() and any(folder.rglob("rounds.jsonl")):
            runs += read_runs([folder])
    return [run for run in runs if own is None or not run.folder.resolve().is_relative_to(own)]


def _is_same_task(run: RecordedRun, experiment: Experiment) -> bool:
    """Whether a run is of the same data set and metric, and has rounds to learn from."""
    data = dict(run.experiment.get("data", {}))
    ours = experiment.data.model_dump()
    same = all(data.get(key) == ours.get(key) for key in ("name", "path"))
    return same and bool(run.committed_rounds)


def _is_too_early(rule: MarginalGain, run: RecordedRun, curve: GainCurve) -> bool:
    """Whether the rule would have ended a run from which doubling the rounds gained its price."""
    look = next((look for look in rule.list_looks(run.committed_rounds) if look.should_stop), None)
    if look is None:
        return False
    flat = [x for t, gain in sorted(curve.items()) for x in (float(t), gain, 1.0, 1.0)]
    gained = look_up_earlier_gain(flat, look.t)
    return gained is not None and gained.mean >= look.price
