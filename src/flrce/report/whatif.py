"""Stop rules replayed on a recorded run: a rule only ends a run, and sees nothing but the record.

A budget also refuses a round by its estimate, of which the record knows only what the round then
cost; `list_caveats` says where the two differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from flrce.core.cost_table import COSTS
from flrce.core.evaluation import SHADOW_THRESHOLDS
from flrce.core.roles import StopRule
from flrce.core.types import ClientCost, RoundRecord
from flrce.errors import BadInput, suggest_name
from flrce.methods.catalogue.recipes import RELATIONSHIP_PRESETS, STOP_PRESETS, flrce
from flrce.methods.stopping.budget import CostBudget, CostLimit, Patience
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.marginal_gain import MarginalGain
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
    spent: Mapping[str, float]  # cost -> until that round
    saved: Mapping[str, float]  # cost -> in the rounds after it
    figures: Mapping[str, float] = field(default_factory=dict)  # of pieces, in that round

    def to_plain(self) -> dict[str, Any]:
        """For a program: every cost under its name, and what is saved of it."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        spent, saved = plain.pop("spent"), plain.pop("saved")
        return {**plain, **spent, **{f"{name}_saved": x for name, x in saved.items()}}


def build_stop_rules(
    run: RecordedRun,
    psi: Sequence[float] = (),
    patience: Sequence[int] = (),
    preset: Sequence[str] = (),
    points: Sequence[float] = (),
    **budgets: Sequence[float],
) -> dict[str, StopRule]:
    """Each value as a rule of its own, by name; `budgets` are limits of the costs in COSTS."""
    for name in budgets:
        if name not in COSTS:
            raise BadInput(f"budget {name!r}: {suggest_name(name, COSTS)}")
    for name, values in {"psi": psi, "patience": patience, "points": points, **budgets}.items():
        for value in values:
            if not value > 0:
                raise BadInput(f"--{name} {value:g}: must be above 0")
    for name in preset:
        if name not in STOP_PRESETS:
            raise BadInput(f"--preset {name}: {suggest_name(name, STOP_PRESETS)}")
        if "headway" in STOP_PRESETS[name].required_fields and not any(
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
        **{
            f"{value:g} {name}": _build_budget(name, value)
            for name, values in budgets.items()
            for value in values
        },
    }


def _build_budget(name: str, value: float) -> StopRule:
    if name == "rounds":
        return CostBudget(rounds=int(value))
    return CostLimit(name, value)


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
    before = rule.check_next_round if rule.checks_costs else None
    for i, h in enumerate(run.rounds):
        if h.outcome == "not started":
            break
        cost = ClientCost(
            bytes_up=h.bytes_up,
            bytes_down=h.bytes_down,
            joules=h.joules,
            compute_seconds=h.seconds,
            grams=h.grams,
            other=h.other,
        )
        why = before(run.rounds[:i], [cost]) if before else ""
        if why:
            return _cut_run(run, name, why, i)
        why = rule(run.rounds[: i + 1]) if h.outcome == "committed" else ""
        if why:
            return _cut_run(run, name, why, i + 1)
    return _cut_run(run, name, "", len(run.rounds))


def _cut_run(run: RecordedRun, name: str, why: str, kept: int) -> ReplayOutcome:
    """The run cut after its first `kept` records."""
    head, tail = run.rounds[:kept], run.rounds[kept:]
    seen = next((h for h in reversed(head) if h.last_model_metric is not None), RoundRecord(0))
    return ReplayOutcome(
        name,
        sum(h.outcome == "committed" for h in head) if why else None,
        why,
        seen.last_model_metric,
        seen.averaged,
        {name: sum(map(cost.of_round, head)) for name, cost in COSTS.items()},
        {name: sum(map(cost.of_round, tail)) for name, cost in COSTS.items()},
        next((h.figures for h in reversed(head) if h.outcome == "committed"), {}),
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
    priced = [name for name in COSTS if name != "rounds"]
    if reasons and any(name in o.rule for o in outcomes for name in priced):
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
        "what compressed replies weigh was not known before": not run.recipe.compressor.knows_bytes,
        "spares were asked along": any(len(h.chosen) > run.P for h in run.rounds),
        "replies did not count": any(h.rejected for h in run.rounds),
        "who would train was not known when losses were asked for": any(
            line["outcome"] == "asked" for line in lines
        ),
        "costs were measured": run.experiment.get("engine", {}).get("name") == "flower",
    }
    return [reason for reason, holds in reasons.items() if holds]
