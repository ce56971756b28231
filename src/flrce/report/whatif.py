"""Stop rules replayed on a recorded run: a rule only ends a run, and sees nothing but the record.

A budget also refuses a round by its estimate, of which the record knows only what the round then
cost; `list_caveats` says where the two differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flrce.core.pieces import NoCompression, StopRule
from flrce.core.shadow_stops import SHADOW_THRESHOLDS
from flrce.core.traits import CostAwareStop, SizedCompressor
from flrce.core.types import ClientCost, RoundRecord
from flrce.errors import BadInput, suggest_name
from flrce.methods.catalogue.recipes import RELATIONSHIP_PRESETS, STOP_PRESETS, flrce
from flrce.methods.stopping.budget import CostBudget, Patience
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.stopping.no_headway import NoHeadway
from flrce.storage.read import RecordedRun

REPLAY_CAVEAT = (
    "Only the end of a run can be replayed: what would change who is selected or how they train"
    " needs a new run."
)


@dataclass(frozen=True)
class ReplayOutcome:
    """How a recorded run would have ended under another rule."""

    rule: str
    stop: int | None  # committed rounds at the stop; None: it never says stop in what is recorded
    why: str
    accuracy: float | None  # the headline of that round's model, or of the last one judged before
    averaged: float | None
    joules: float
    bytes: int
    joules_saved: float
    bytes_saved: int


def build_stop_rules(
    run: RecordedRun,
    psi: Sequence[float] = (),
    patience: Sequence[int] = (),
    joules: Sequence[float] = (),
    nbytes: Sequence[float] = (),
    seconds: Sequence[float] = (),
    rounds: Sequence[int] = (),
    preset: Sequence[str] = (),
    points: Sequence[float] = (),
) -> dict[str, StopRule]:
    """Each value as a rule of its own, by name; psi in the conflict rule of the run, or of its
    preset.
    """
    for name, values in {
        "psi": psi,
        "patience": patience,
        "joules": joules,
        "bytes": nbytes,
        "seconds": seconds,
        "rounds": rounds,
        "points": points,
    }.items():
        for value in values:
            if not value > 0:
                raise BadInput(f"--{name} {value:g}: must be above 0")
    for name in preset:
        if name not in STOP_PRESETS:
            raise BadInput(f"--preset {name}: {suggest_name(name, STOP_PRESETS)}")
        if isinstance(STOP_PRESETS[name], NoHeadway) and not any(
            h.headway is not None for h in run.committed_rounds
        ):
            raise BadInput(
                f"--preset {name}: {run.folder} kept no averaged model, so no headway; set average"
                ' = "ema"'
            )
    return {
        **{name: STOP_PRESETS[name] for name in preset},
        **{f"{value:g} points": MarginalGain(points=value) for value in points},
        **{
            f"psi {value:g}": replace(run.conflict_rule or _get_preset_rule(run), psi=value)
            for value in psi
        },
        **{f"patience {value}": Patience(value) for value in patience},
        **{f"{value:g} joules": CostBudget(joules=value) for value in joules},
        **{f"{value:g} bytes": CostBudget(bytes=value) for value in nbytes},
        **{f"{value:g} seconds": CostBudget(seconds=value) for value in seconds},
        **{f"{value} rounds": CostBudget(rounds=value) for value in rounds},
    }


def _get_preset_rule(run: RecordedRun) -> UpdateConflicts:
    """The conflict rule that a run without one would have been under: its preset's."""
    preset = run.experiment.get("recipe", {}).get("preset", "default")
    stop = flrce(psi="50%", preset=preset, P=run.P).stop if preset in RELATIONSHIP_PRESETS else None
    return stop if isinstance(stop, UpdateConflicts) else UpdateConflicts(1.0)


def build_threshold_rules(run: RecordedRun) -> dict[str, StopRule]:
    """The paper's thresholds, scaled to the run's P."""
    return build_stop_rules(run, psi=[psi * run.P / 10 for psi in SHADOW_THRESHOLDS])


def replay_rule(run: RecordedRun, name: str, rule: StopRule) -> ReplayOutcome:
    """The first round in which the rule says stop, and what that would have saved."""
    before = rule.check_next_round if isinstance(rule, CostAwareStop) else None
    for i, h in enumerate(run.rounds):
        if h.outcome == "not started":
            break
        cost = ClientCost(
            bytes_up=h.bytes_up, bytes_down=h.bytes_down, joules=h.joules, compute_seconds=h.seconds
        )
        why = before(run.rounds[:i], [cost]) if before else ""
        if why:
            return _build_outcome(run, name, why, i)
        why = rule(run.rounds[: i + 1]) if h.outcome == "committed" else ""
        if why:
            return _build_outcome(run, name, why, i + 1)
    return _build_outcome(run, name, "", len(run.rounds))


def _build_outcome(run: RecordedRun, name: str, why: str, kept: int) -> ReplayOutcome:
    """The run cut after its first `kept` records."""
    head, tail = run.rounds[:kept], run.rounds[kept:]
    seen = next((h for h in reversed(head) if h.last_model_metric is not None), RoundRecord(0))
    return ReplayOutcome(
        name,
        sum(h.outcome == "committed" for h in head) if why else None,
        why,
        seen.last_model_metric,
        seen.averaged,
        sum(h.joules for h in head),
        sum(h.bytes_up + h.bytes_down for h in head),
        sum(h.joules for h in tail),
        sum(h.bytes_up + h.bytes_down for h in tail),
    )


def list_caveats(run: RecordedRun, outcomes: Sequence[ReplayOutcome]) -> list[str]:
    """What the replay cannot tell."""
    notes = [REPLAY_CAVEAT]
    if run.rounds and run.rounds[-1].stop and any(o.stop is None for o in outcomes):
        notes.append(
            f"The run itself ended after round {len(run.committed_rounds)} ({run.rounds[-1].stop}):"
            " a rule that had not said stop by then would have gone on, how far only a new run can"
            " tell."
        )
    reasons = _explain_overestimates(run)
    if reasons and any(
        "joules" in o.rule or "bytes" in o.rule or "seconds" in o.rule for o in outcomes
    ):
        notes.append(
            "Under a budget a real run may end sooner: it refuses a round by an estimate, and"
            f" {' and '.join(reasons)}."
        )
    return notes


def _explain_overestimates(run: RecordedRun) -> list[str]:
    """Why a round may have been estimated at more than it then cost."""
    if run.recipe is None:
        return ["what it would have estimated is not known"]
    lines = run.costs
    reasons = {
        "what compressed replies weigh was not known before": not isinstance(
            run.recipe.compressor, NoCompression | SizedCompressor
        ),
        "spares were asked along": any(len(h.chosen) > run.P for h in run.rounds),
        "replies did not count": any(h.rejected for h in run.rounds),
        "who would train was not known when losses were asked for": any(
            line["outcome"] == "asked" for line in lines
        ),
        "costs were measured": run.experiment.get("engine", {}).get("name") == "flower",
    }
    return [reason for reason, holds in reasons.items() if holds]
