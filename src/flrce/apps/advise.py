"""flrce advise mine.toml --joules 200000 --bytes 2e9"""

import json
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from flrce.apps.options import experiment, place
from flrce.apps.targets import prepare_file, prepare_folder
from flrce.arena.advise import PLAIN, Advice, Budget
from flrce.arena.advise import advise as search
from flrce.arena.away import away
from flrce.errors import BadInput
from flrce.intervals import Interval
from flrce.parts import device_of
from flrce.store import headline
from flrce.store.disk import BY_UMASK, write_through


def advise(
    file: Path | None, overrides: tuple[str, ...], out: Path | None, joules: float | None, nbytes: float | None,
    seconds: float | None, work: Path | None, device: str | None, where: str, as_json: bool, trust: bool = False,
) -> None:  # fmt: skip
    """Say which recipe to run for an experiment and a budget."""
    asked = experiment(file, overrides, device, trust)
    if where == "here":
        device_of(asked)
    if out is not None and out.is_file():
        raise BadInput(f"--out {out} exists; name a file that does not")
    if out is not None:
        prepare_file(out, "--out")
    told = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
    send = None if where == "here" else away(*place(where))
    near = None if send is None else Path.cwd()  # where other machines see it too
    if work is not None:
        prepare_folder(work, "--work")
    with tempfile.TemporaryDirectory(prefix="flrce-advise-", dir=near) if work is None else nullcontext(work) as folder:
        found = search(asked, Budget(joules, nbytes, seconds), Path(folder), told, send=send)
    if out is not None:
        write_through(out, found.experiment.toml().encode(), BY_UMASK)
    if as_json:
        answer = {key: value for key, value in asdict(found).items() if key != "experiment"}
        print(json.dumps({**answer, "enough": found.enough, "experiment": found.experiment.toml()}, indent=1))
        return
    for line in sentences(found):
        print(line)
    print(f"flrce run {out}" if out else "\n" + found.experiment.toml())


def sentences(found: Advice) -> list[str]:
    """The advice in words."""
    rounds, spent = found.experiment.rounds, found.spent
    lines = [
        f"Run {found.label}, {rounds} rounds: {headline.name(found.metric)} {_of(found.expected, found.metric)} "
        f"({found.expected.n} seeds, 95 % interval).",
        f"Finding out took {spent['joules']:.3g} J, {spent['bytes'] / 1e6:.3g} MB and {spent['seconds']:.3g} s of the "
        "fleet's; the rounds are what the rest of the budget pays for.",
    ]
    if found.label.startswith(f"{PLAIN},"):
        lines.append("Plain FedAvg with an average is enough here: nothing that was tried does better.")
    elif found.enough:
        lines.append(
            f"Plain FedAvg with an average has {_of(found.plain, found.metric)} for the same joules: it cannot be told "
            "apart, so take it if you prefer the simpler."
        )
    else:
        lines.append(f"Plain FedAvg with an average has {_of(found.plain, found.metric)} for the same joules.")
    return lines


def _of(value: Interval, metric: str) -> str:
    unit = " %" if metric in headline.SHARES else ""
    return f"{value.per(headline.unit(metric)).text(headline.digits(metric))}{unit}"
