"""flrce whatif runs/a --psi 4,4.5,5 --preset frugal,accurate"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flrce.apps.show import bars, table
from flrce.errors import BadInput
from flrce.intervals import interval
from flrce.recipes import threshold
from flrce.results import tables
from flrce.results.carbon import moved
from flrce.results.price import prices, thinned
from flrce.results.tasks import require_one_task
from flrce.results.whatif import Outcome, caveats, grid, replay, rules
from flrce.stops.worth import metric_scale
from flrce.store import headline as words
from flrce.store import read

List = str | None  # A,B,...
MOVED = "The same rounds, clients and joules: who would have been there at another time needs a new run."


def whatif(
    run: Path, psi: List, patience: List, joules: List, nbytes: List, seconds: List, rounds: List, preset: List,
    points: List, start: List, as_json: bool,
) -> None:  # fmt: skip
    """Replay stop rules on a recorded run: where each would have ended it, and what that would have saved.

    Every value is a rule of its own; without any, the paper's thresholds psi. A preset is FLrce's own stop: frugal,
    balanced or accurate. Selection changes need a new run.
    """
    runs = read.find([run])
    wanted: dict[str, list[Any]] = {
        "psi": _values("psi", psi, lambda part: threshold(part if "%" in part else float(part), runs[0].P)),
        "patience": _values("patience", patience, int), "rounds": _values("rounds", rounds, int),
        "joules": _values("joules", joules, float), "nbytes": _values("bytes", nbytes, float),
        "seconds": _values("seconds", seconds, float), "preset": _values("preset", preset, str.strip),
        "points": _values("points", points, float),
    }  # fmt: skip
    if len({each.name for each in runs}) > 1:
        raise BadInput(f"{run} holds several recipes; name the folder of one, such as {runs[0].folder.parent}")
    with read.careful(runs):
        require_one_task(runs, "name the folder of one")
        if start:
            _moved(runs, start.split(","), as_json)
        else:
            _show(run, runs, wanted, as_json)


def _moved(runs: list[read.Run], starts: list[str], as_json: bool) -> None:
    """Grams at other times."""
    found = {each: moved(each, starts) for each in runs}
    if as_json:
        told = [{"run": str(each.folder), "starts": [asdict(m) for m in same]} for each, same in found.items()]
        print(json.dumps({"runs": told, "notes": [MOVED]}, indent=1))
        return
    rows = [
        [same[0].start, interval([m.grams for m in same]).text(3), interval([m.ratio for m in same]).text(2)]
        for same in zip(*found.values(), strict=True)
    ]
    table("the same rounds begun at another time", ["start", "g CO2", "times what was booked"], rows)
    print(MOVED)


def _show(run: Path, runs: list[read.Run], wanted: dict[str, list[Any]], as_json: bool) -> None:
    outcomes = {each: [replay(each, *rule) for rule in (rules(each, **wanted) or grid(each)).items()] for each in runs}
    notes = list(dict.fromkeys(note for each in runs for note in caveats(each, outcomes[each])))
    if as_json:
        told = [
            {
                "run": str(each.folder),
                "rules": [asdict(o) for o in outcomes[each]],
                "price": [asdict(price) for price in prices(each)],
            }
            for each in runs
        ]
        print(json.dumps({"runs": told, "notes": notes}, indent=1))
        return
    title = (
        f"{run}: {len(runs[0].done)} rounds recorded" if len(runs) == 1 else f"{run}: {len(runs)} runs, 95 % intervals"
    )
    units, judged = tables.units(tables.groups(runs)), tables.metric(tables.groups(runs))
    energy, traffic = units["joules"][1], units["bytes"][1]
    heads = [
        "rule",
        "stops",
        "round",
        words.heading(judged),
        f"averaged{' %' if judged in words.SHARES else ''}",
        energy,
        traffic,
        f"{energy} saved",
        f"{traffic} saved",
    ]
    table(title, heads, [_row(list(same), units) for same in zip(*outcomes.values(), strict=True)])
    for note in notes:
        print(note)
    if len(runs) == 1:
        _priced(runs[0])


def _priced(run: read.Run) -> None:
    """What a point would have cost, over the run."""
    found = thinned(prices(run))
    if not found:
        return
    scale = metric_scale(run.done)
    what = "one more point" if scale.in_points else f"improving {words.name(scale.metric)} by {scale.format(1.0)}"
    print(f"\nEstimated cost of {what} (as many rounds again, over the upper end of their predicted gain):")
    labels, lengths = [f"round {p.t}" for p in found], [p.joules for p in found]
    print("\n".join(bars(labels, lengths, [p.told() for p in found])))


def _row(same: list[Outcome], units: dict[str, tuple[float, str]]) -> list[str]:
    """One rule over the seeds."""
    stops, many = [float(o.stop) for o in same if o.stop is not None], len(same) > 1
    said = "yes" if stops else "no"
    if many:
        said = f"{len(stops)} of {len(same)}"
    (joules, _), (nbytes, _) = units["joules"], units["bytes"]
    share = units["headline"][0]
    digits = 1 if share != 1 else 4
    figures = {"accuracy": (share, digits), "averaged": (share, digits), "joules": (joules, 1), "bytes": (nbytes, 2)}
    figures |= {"joules_saved": (joules, 1), "bytes_saved": (nbytes, 2)}
    cells = []
    for name, (per, digits) in figures.items():
        values = [getattr(o, name) / per for o in same if getattr(o, name) is not None]
        cells.append(interval(values).text(digits))
    return [same[0].rule, said, interval(stops).text(1 if many else 0), *cells]


def _values(name: str, text: str | None, kind: Callable[[str], Any]) -> list[Any]:
    """A,B,... as numbers."""
    try:
        return [kind(part) for part in text.split(",")] if text else []
    except BadInput:
        raise
    except ValueError:
        word = "whole numbers" if kind is int else "numbers"
        raise BadInput(f"--{name} {text!r}: give {word} with commas, such as --{name} 5,10") from None
