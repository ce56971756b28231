"""What is kept of a run: its rounds in short, small enough to commit, and enough to write every
table again.
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flrce.config.experiment import Experiment
from flrce.core.record import FLAT_FIELDS, RoundRecord
from flrce.core.user_code import NOTHING
from flrce.errors import BadInput
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.storage.disk import BY_UMASK, write_atomically
from flrce.storage.manifest import known_marks
from flrce.storage.read import parse_lines
from flrce.storage.seal import MAX_SETTINGS_BYTES, parse_document, read_lines, read_sealed_file
from flrce.storage.settings import NEUTRAL_SETTINGS, flatten_tables
from flrce.storage.summary import summarize_run
from flrce_reproduction.plan import DatasetSizes, PaperCell

#: fields of a round that are kept, and the digits after the point of those that are not exact
KEPT_FIELDS = {
    "t": None,
    "outcome": None,
    "exploit": None,
    "conflicts": 4,
    "consensus": 4,
    "accuracy": 6,
    "accuracy_weighted": 6,
    "loss": 4,
    "averaged": 6,
    "bytes_up": None,
    "bytes_down": None,
    "bytes_framing": None,
    "bytes_wasted": None,
    "joules": 3,
    "joules_wasted": 3,
    "seconds": 3,
    "measured": None,
    "stop": None,
}


@dataclass(frozen=True)
class PaperRun:
    """One finished cell in short. Tables are made from these only, so that they can be made again
    without the cells.
    """

    cell: str
    experiment: Mapping[str, Any]
    history: tuple[RoundRecord, ...]
    size: int  # floats that travel
    trainable: int
    versions: str
    hardware: str

    @cached_property
    def summary(self) -> dict[str, Any]:
        return summarize_run(self.history, self.size, self.trainable)

    @property
    def accuracies(self) -> dict[int, float]:
        """Of the final model, by the committed rounds that were evaluated."""
        done = [h for h in self.history if h.outcome == "committed" and h.accuracy is not None]
        return {h.t: (h.accuracy if h.averaged is None else h.averaged) or 0.0 for h in done}

    def cut_at_threshold(self, psi: float) -> "PaperRun":
        """The run as FLrce's rule with threshold psi would have ended it (Algorithm 3): same
        rounds, fewer of them.
        """
        rule = UpdateConflicts(psi)
        for i in range(len(self.history)):
            if why := rule(self.history[: i + 1]):
                last = replace(self.history[i], stop=why)
                return replace(self, history=(*self.history[:i], last))
        return self


def explain_difference(stored: Mapping[str, Any], wanted: Experiment) -> str:
    """How a stored experiment differs from the wanted one in what decides its result; "" if it does
    not. How often the model is evaluated decides nothing: no cell has a rule that reads it.
    """
    try:
        experiment = Experiment.from_tables(dict(stored), trust=NOTHING)
    except BadInput as why:
        return str(why)
    kept, asked = flatten_tables(experiment.model_dump()), flatten_tables(wanted.model_dump())
    keys = sorted({*kept, *asked} - {*NEUTRAL_SETTINGS, "engine.eval_every"})
    changed = [key for key in keys if kept.get(key) != asked.get(key)]
    return "; ".join(f"{key} {kept.get(key)} instead of {asked.get(key)}" for key in changed[:3])


def read_cell_run(cell: PaperCell, out: Path) -> PaperRun | None:
    """A cell's run directory in short, if it ran to its end."""
    folder = out / cell.folder
    if not (folder / "rounds.jsonl").is_file():
        return None
    marks, _ = known_marks(folder)
    read_sealed_file(folder / "experiment.toml", marks, MAX_SETTINGS_BYTES)
    stored = Experiment.load(folder / "experiment.toml", trust=NOTHING).model_dump()
    if why := explain_difference(stored, cell.experiment):
        raise BadInput(
            f"{folder} holds another experiment: {why}; name another --out, or run it anew with"
            " --again"
        )
    lines = parse_lines(read_lines(folder / "rounds.jsonl", marks), "rounds.jsonl")
    history = tuple(map(_to_record, lines))
    if not is_finished(history, cell.experiment.rounds) or not (folder / "summary.json").is_file():
        return None
    path = folder / "summary.json"
    summary = parse_document(read_sealed_file(path, marks), path)
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    return PaperRun(
        cell.name,
        stored,
        tuple(_round_record(h) for h in history),
        summary["floats_on_the_wire"],
        summary["parameters"],
        versions,
        summary["hardware"],
    )


def is_finished(history: tuple[RoundRecord, ...], T: int) -> bool:
    """Whether a run reached T or was stopped; one that ran out of clients can go on."""
    last = history[-1] if history else RoundRecord(0)
    return last.outcome != "abandoned" and (bool(last.stop) or last.t >= T)


def _to_record(row: Mapping[str, Any]) -> RoundRecord:
    fields: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in row.items() if key in FLAT_FIELDS
    }
    return RoundRecord(**fields)


def _round_record(record: RoundRecord) -> RoundRecord:
    kept = {}
    for name, digits in KEPT_FIELDS.items():
        value = getattr(record, name)
        kept[name] = round(value, digits) if digits is not None and value is not None else value
    return RoundRecord(**kept)


def write_records(runs: Iterable[PaperRun], folder: Path) -> None:
    """One compressed file per data set and regime, a line per run, a list per column."""
    files: dict[str, list[str]] = {}
    for run in sorted(runs, key=lambda run: run.cell):
        dataset, regime = run.cell.split("/")[:2]
        line: dict[str, Any] = asdict(replace(run, history=()))
        line["history"] = {name: [getattr(h, name) for h in run.history] for name in KEPT_FIELDS}
        text = json.dumps(line, separators=(",", ":"))
        files.setdefault(f"{dataset}-{regime}.jsonl.gz", []).append(f"{text}\n")
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        packed = gzip.compress("".join(lines).encode(), mtime=0)
        write_atomically(folder / name, packed, BY_UMASK)


def read_records(folder: Path) -> dict[str, PaperRun]:
    """Every run kept in a folder of records, by cell."""
    runs: dict[str, PaperRun] = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        try:
            for line in gzip.decompress(path.read_bytes()).decode().splitlines():
                row = json.loads(line)
                columns = row.pop("history")
                rounds = zip(*(columns[name] for name in KEPT_FIELDS), strict=True)
                history = tuple(
                    RoundRecord(**dict(zip(KEPT_FIELDS, values, strict=True))) for values in rounds
                )
                runs[row["cell"]] = PaperRun(**row, history=history)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as why:
            raise BadInput(
                f"{path} is damaged ({why}); remove it, its cells are read again or rerun"
            ) from why
    return runs


def write_dataset_sizes(facts: Mapping[str, DatasetSizes], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {**read_stored_sizes(folder), **facts}
    table = {name: asdict(size) for name, size in sorted(sizes.items())}
    write_atomically(folder / "data.json", (json.dumps(table, indent=1) + "\n").encode(), BY_UMASK)


def read_stored_sizes(folder: Path) -> dict[str, DatasetSizes]:
    """The sizes of the data sets that the records were made with."""
    path = folder / "data.json"
    if not path.is_file():
        return {}
    try:
        return {name: DatasetSizes(**row) for name, row in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as why:
        raise BadInput(
            f"{path} is damaged ({why}); remove it and run with the data at hand"
        ) from why
