"""Stop rules replayed on a recorded run: a rule only ends a run, and sees nothing but the record.

A budget also refuses a round by its estimate, of which the record knows only what the round then cost; `caveats` says
where the two differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flrce.errors import BadInput, nearest
from flrce.pieces import Dense, StopRule
from flrce.recipes import SELECTIONS, STOPS, flrce
from flrce.stops.budget import Budget, Patience
from flrce.stops.conflict import SHADOWS, Conflicts
from flrce.stops.standstill import Standstill
from flrce.stops.worth import Worth
from flrce.store.read import Run
from flrce.traits import KnowsBytes, Refuses
from flrce.types import Record, Spent

SELECTION = (
    "Only the end of a run can be replayed: what would change who is selected or how they train needs a new run."
)


@dataclass(frozen=True)
class Outcome:
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


def rules(
    run: Run, psi: Sequence[float] = (), patience: Sequence[int] = (), joules: Sequence[float] = (),
    nbytes: Sequence[float] = (), seconds: Sequence[float] = (), rounds: Sequence[int] = (),
    preset: Sequence[str] = (), points: Sequence[float] = (),
) -> dict[str, StopRule]:  # fmt: skip
    """Each value as a rule of its own, by name; psi in the conflict rule of the run, or of its preset."""
    for name, values in {
        "psi": psi, "patience": patience, "joules": joules, "bytes": nbytes, "seconds": seconds, "rounds": rounds,
        "points": points,
    }.items():  # fmt: skip
        for value in values:
            if not value > 0:
                raise BadInput(f"--{name} {value:g}: must be above 0")
    for name in preset:
        if name not in STOPS:
            raise BadInput(f"--preset {name}: {nearest(name, STOPS)}")
        if isinstance(STOPS[name], Standstill) and not any(h.headway is not None for h in run.done):
            raise BadInput(f'--preset {name}: {run.folder} kept no averaged model, so no headway; set average = "ema"')
    return {
        **{name: STOPS[name] for name in preset},
        **{f"{value:g} points": Worth(points=value) for value in points},
        **{f"psi {value:g}": replace(run.rule or _preset(run), psi=value) for value in psi},
        **{f"patience {value}": Patience(value) for value in patience},
        **{f"{value:g} joules": Budget(joules=value) for value in joules},
        **{f"{value:g} bytes": Budget(bytes=value) for value in nbytes},
        **{f"{value:g} seconds": Budget(seconds=value) for value in seconds},
        **{f"{value} rounds": Budget(rounds=value) for value in rounds},
    }


def _preset(run: Run) -> Conflicts:
    """The conflict rule that a run without one would have been under: its preset's."""
    preset = run.experiment.get("recipe", {}).get("preset", "default")
    stop = flrce(psi="50%", preset=preset, P=run.P).stop if preset in (*STOPS, *SELECTIONS) else None
    return stop if isinstance(stop, Conflicts) else Conflicts(1.0)


def grid(run: Run) -> dict[str, StopRule]:
    """The paper's thresholds, scaled to the run's P."""
    return rules(run, psi=[psi * run.P / 10 for psi in SHADOWS])


def replay(run: Run, name: str, rule: StopRule) -> Outcome:
    """The first round in which the rule says stop, and what that would have saved."""
    before = rule.before if isinstance(rule, Refuses) else None
    for i, h in enumerate(run.rounds):
        if h.outcome == "not started":
            break
        cost = Spent(bytes_up=h.bytes_up, bytes_down=h.bytes_down, joules=h.joules, compute_seconds=h.seconds)
        why = before(run.rounds[:i], [cost]) if before else ""
        if why:
            return _outcome(run, name, why, i)
        why = rule(run.rounds[: i + 1]) if h.outcome == "committed" else ""
        if why:
            return _outcome(run, name, why, i + 1)
    return _outcome(run, name, "", len(run.rounds))


def _outcome(run: Run, name: str, why: str, kept: int) -> Outcome:
    """The run cut after its first `kept` records."""
    head, tail = run.rounds[:kept], run.rounds[kept:]
    seen = next((h for h in reversed(head) if h.headline is not None), Record(0))
    return Outcome(
        name, sum(h.outcome == "committed" for h in head) if why else None, why, seen.headline, seen.averaged,
        sum(h.joules for h in head), sum(h.bytes_up + h.bytes_down for h in head),
        sum(h.joules for h in tail), sum(h.bytes_up + h.bytes_down for h in tail),
    )  # fmt: skip


def caveats(run: Run, outcomes: Sequence[Outcome]) -> list[str]:
    """What the replay cannot tell."""
    notes = [SELECTION]
    if run.rounds and run.rounds[-1].stop and any(o.stop is None for o in outcomes):
        notes.append(
            f"The run itself ended after round {len(run.done)} ({run.rounds[-1].stop}): a rule that had not said stop "
            "by then would have gone on, how far only a new run can tell."
        )
    reasons = _guessed(run)
    if reasons and any("joules" in o.rule or "bytes" in o.rule or "seconds" in o.rule for o in outcomes):
        notes.append(
            f"Under a budget a real run may end sooner: it refuses a round by an estimate, and {' and '.join(reasons)}."
        )
    return notes


def _guessed(run: Run) -> list[str]:
    """Why a round may have been estimated at more than it then cost."""
    if run.recipe is None:
        return ["what it would have estimated is not known"]
    lines = run.costs
    reasons = {
        "what compressed replies weigh was not known before": not isinstance(run.recipe.compressor, Dense | KnowsBytes),
        "spares were asked along": any(len(h.chosen) > run.P for h in run.rounds),
        "replies did not count": any(h.rejected for h in run.rounds),
        "who would train was not known when losses were asked for": any(line["outcome"] == "asked" for line in lines),
        "costs were measured": run.experiment.get("engine", {}).get("name") == "flower",
    }
    return [reason for reason, holds in reasons.items() if holds]
