"""What a report opens with: what was saved, at what loss, how sure that is, and why runs ended, in plain words."""

import re
from collections.abc import Mapping, Sequence

from flrce.errors import brief
from flrce.intervals import Interval, interval
from flrce.results.tables import Group, figures, metric, settings, units
from flrce.results.tasks import split_key, task_key
from flrce.stops.budget import Patience
from flrce.stops.standstill import Standstill
from flrce.store import headline as words
from flrce.store.notes import notes, sweep_of
from flrce.store.read import Run
from flrce.types import Record

BASELINE = "fedavg"
PREDICTED = re.compile(r"predicted .* from doubling the rounds|no improvement over (the last )?\d+ (eval|rounds)")
EARLIER = re.compile(  # a stop with a price, in the words of earlier versions
    r"twice the rounds would bring at most [^<]*< (?P<price>[\d.e+]+)|no rise to be seen|no better than untrained"
)
CLOSE = 0.5  # percent: less is no saving
MANY = 4  # recipes of which each gets its own sentence; of more, the table speaks


def story(groups: Sequence[Group]) -> list[str]:
    """A few sentences about all the runs of a page."""
    if not any(run.done for group in groups for run in group.runs):
        return ["No round is committed yet."]
    first = [f"{group.label} {alone(group, groups)}" for group in groups] if len(groups) <= MANY else []
    others = []
    for group in groups:
        same = [each for each in groups if comparable(each, group)]
        if (against := baseline(same)) is not group:
            others.append(compared(group, against))
    return [*others, *first, *warned(groups)]


def comparable(one: Group, other: Group) -> bool:
    """Whether two recipes had the same data, metric and split: else a difference says nothing about them."""
    mine, theirs = one.runs[0], other.runs[0]
    return task_key(mine) == task_key(theirs) and split_key(mine) == split_key(theirs)


def warned(groups: Sequence[Group]) -> list[str]:
    """The notes of all runs, each once, with the recipes that it is about where there are others."""
    whose: dict[str, list[str]] = {}
    for group in groups:
        for note in dict.fromkeys(note for run in group.runs for note in about(run)):
            whose.setdefault(note, []).append(group.label)
    some = {note: "" if len(labels) == len(groups) else f" on {', '.join(labels)}" for note, labels in whose.items()}
    return [f"Note{about_whom}: {note}." for note, about_whom in some.items()]


def baseline(groups: Sequence[Group]) -> Group:
    """What the others are compared with: FedAvg, and of several the one with the fewest settings of its own."""
    plain = [group for group in groups if group.runs[0].name == BASELINE]
    return min(plain or groups[:1], key=lambda group: len(settings(group.runs[0])))


def alone(group: Group, groups: Sequence[Group]) -> str:
    """One recipe: how far it got, what that took, and how its runs ended."""
    scales, runs = units(groups), group.runs
    judged, seeds = metric([group]), len(runs)
    value = group.interval("accuracy").per(words.unit(judged)).text(words.digits(judged))
    spent = " and ".join(
        f"{group.interval(name).per(scales[name][0]).text(digits)} {scales[name][1]}"
        for name, digits in (("joules", 1), ("bytes", 2))
    )
    kind = " and ".join(sorted({run.summary["energy"] for run in runs}))
    where = "on the clients' hold-outs"
    unit = " %" if judged in words.SHARES else f" ({words.name(judged)})"
    reached = "had no model judged" if value == "--" else f"reached {value}{unit} {where}"
    constant = describe_baseline(runs[0])
    reached += f" ({constant})" if constant else ""
    over = f" over {seeds} seeds" if seeds > 1 else " (one seed, so no interval)"
    return f"{reached}{over} for {spent} ({kind} energy); {endings(runs)}."


def endings(runs: Sequence[Run]) -> str:
    """How the runs of a recipe ended."""
    early = [run for run in runs if run.rounds and run.rounds[-1].stop and len(run.done) < rounds_of(run)]
    if len(runs) == 1:
        return ended(runs[0])
    if not early:
        return f"no rule ended a run before its time: {span([len(run.done) for run in runs])} rounds"
    after = span([len(run.done) for run in early])
    many = f"{len(early)} of {len(runs)} runs stopped early"
    return f"{many}, after {after} of {rounds_of(runs[0])} rounds: {reason(early[0])}"


def ended(run: Run) -> str:
    """How one run ended, in words."""
    T = rounds_of(run)
    if not run.rounds:
        return "no round is committed yet"
    stop = f": {reason(run)}" if run.rounds[-1].stop else ""
    if len(run.done) >= T:
        return f"ran all {T} rounds" + (f"; its stop rule was met in the last{stop}" if stop else "")
    return f"stopped after round {len(run.done)} of {T}{stop}" if stop else f"unfinished: {len(run.done)} of {T} rounds"


def reason(run: Run) -> str:
    """Why a rule ended the run, without its jargon."""
    stop = run.rounds[-1].stop if run.rounds else ""
    which = decided(run)
    if which == "headway":
        rule = next((rule for rule in run.rules if isinstance(rule, Standstill)), Standstill())
        return f"its rounds had begun to undo one another (mean headway of the last {rule.n} below its limit)"
    if which == "conflicts":
        last = run.done[-1]
        peers = max(len(last.replied) - 1, 0)
        return f"the chosen clients pulled against one another ({run.conflicts(last):.1f} of {peers} peers on average)"
    if which == "gain":
        return reword_gain(stop)
    if "budget" in stop:
        return f"{stop.partition(' (')[0].replace('next round would pass', 'one more round would have passed its')}"
    if any(isinstance(rule, Patience) for rule in run.rules) and stop.startswith("no gain"):
        return f"its {words.name(run.summary.get('metric', 'accuracy')).lower()} had stopped improving"
    return stop


def reword_gain(stop: str) -> str:
    """What a stop with a price says; runs of earlier versions say it in other words."""
    found = EARLIER.match(stop)
    if not found:
        return stop
    if found["price"]:
        return f"doubling the rounds was predicted to gain less than {found['price']} points"
    return "doubling the rounds was predicted to gain less than their price"


def decided(run: Run) -> str:
    """The quantity on which the stop was decided: headway, conflicts, gain, or "" for budgets and the like."""
    stop = run.rounds[-1].stop if run.rounds else ""
    if EARLIER.match(stop) or PREDICTED.match(stop):
        return "gain"
    return next((name for name in ("headway", "conflicts") if stop.startswith(name)), "")


def compared(group: Group, against: Group) -> str:
    """What a recipe saved against another, at what loss, and how sure that is: seeds in pairs where both have them."""
    saved = " and ".join(
        _less(mine.mean, theirs.mean, word)
        for word, mine, theirs in (
            ("energy", group.interval("joules"), against.interval("joules")),
            ("traffic", group.interval("bytes"), against.interval("bytes")),
        )
    )
    apart = difference(group, against)
    if apart.mean is None:
        return f"Against {against.label}, {group.label} used {saved}."
    judged = metric([group, against])
    share = judged in words.SHARES
    digits = ".1f" if share else ".3g"
    size = f"{abs(apart.mean):{digits}}{' points' if share else ''}"
    half = "" if apart.half is None else f"{apart.half:{digits}}"
    points = f"{size} {'higher' if apart.mean >= 0 else 'lower'}"
    points = "no different" if points.startswith("0.0 ") else points
    if apart.half is None:
        sure = "one seed, so nobody knows how much of that is chance"
    elif apart.n == 2:
        sure = "two seeds, too few to tell it from chance"
    elif abs(apart.mean) > apart.half:
        sure = f"± {half} over {apart.n} seeds, more than chance"
    else:
        sure = f"± {half} over {apart.n} seeds, so it may be chance"
    called = words.name(judged).lower() if judged == "accuracy" else words.name(judged)
    return f"Against {against.label}, {group.label} used {saved}, and its {called} is {points} ({sure})."


def difference(group: Group, against: Group) -> Interval:
    """The headline metric of a group less that of another, shares in points, seed by seed."""
    unit = words.unit(metric([group, against]))
    theirs = {run.seed: figures(run)["accuracy"] for run in against.runs}
    pairs = [(figures(run)["accuracy"], theirs.get(run.seed)) for run in group.runs]
    return interval([(mine - other) / unit for mine, other in pairs if mine is not None and other is not None])


def about(run: Run) -> tuple[str, ...]:
    """What one should know of a run beyond its figures."""
    if run.recipe is None:
        return ()
    every = int(run.experiment.get("engine", {}).get("eval_every", 1))
    sweep = sweep_of(run.recipe, len(run.roster))
    return notes(run.rounds, run.partition, run.recipe.stop, rounds_of(run), every, sweep)


def describe_baseline(run: Run) -> str:
    """The score of a constant prediction by the run's metric; "" where it is not known."""
    found, metric = run.partition.get("baseline"), str(run.summary.get("metric", "accuracy"))
    value = found.get("metrics", {}).get(metric) if isinstance(found, Mapping) else None
    if not isinstance(value, int | float) or not isinstance(found, Mapping):
        return ""
    what = brief(found.get("predicts", "the same"), 80)
    return f"always predicting {what} gives {words.name(metric)} {words.shown(metric, value)}"


def rounds_of(run: Run) -> int:
    return int(run.experiment.get("rounds", 100))


def describe_state(records: Sequence[Record], T: int) -> str:
    """In a word or two: "finished" after all T rounds, "stopped early" before, "unfinished" where nothing ended it."""
    if sum(h.outcome == "committed" for h in records) >= T:
        return "finished"
    stopped = bool(records) and bool(records[-1].stop) and records[-1].outcome != "abandoned"
    return "stopped early" if stopped else "unfinished"


def span(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _less(mine: float | None, theirs: float | None, word: str) -> str:
    if not mine or not theirs:
        return f"as much {word}"
    share = 100 * (1 - mine / theirs)
    if abs(share) < CLOSE:
        return f"as much {word}"
    return f"{abs(share):.0f} % {'less' if share > 0 else 'more'} {word}"
