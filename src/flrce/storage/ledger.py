"""The run directory: settings, one JSON line per round and per client, checkpoint and results."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from flrce.core.host import sync_folder
from flrce.core.record import fill_start_times
from flrce.core.roles import StopRule
from flrce.core.state_values import RelationshipMap
from flrce.core.types import Round, RoundRecord, State
from flrce.errors import BadInput, format_one_line
from flrce.storage import checkpoint
from flrce.storage.disk import FolderLock, LineFile, make_folder, write_atomically
from flrce.storage.failpoint import hit_failpoint
from flrce.storage.ledger_lines import (
    parse_record,
    replace_non_finite,
    to_client_line,
    to_jsonl,
    to_relation_line,
    to_round_line,
)
from flrce.storage.limited import open_regular, split_lines
from flrce.storage.recorded_rules import RULES_KEY, record_rules
from flrce.storage.seal import SEAL_FILE, SEALED_FILES, read_lines, write_seal
from flrce.storage.settings import (
    fingerprint_experiment,
    list_former_fingerprints,
    require_same_data,
    require_same_experiment,
)
from flrce.storage.summary import get_versions, summarize_run

LEDGER_FILES = ("rounds.jsonl", "clients.jsonl", "relations.jsonl")


class Ledger:
    """An open run directory, locked for other processes.

    `experiment` is stored as experiment.toml. A run resumes only with the same settings and data;
    settings that change no result (number of workers) may differ, and `rounds` may grow.
    """

    def __init__(
        self,
        folder: Path,
        experiment: str,
        partition: Mapping[str, Any],
        resume: bool,
        kernel: str = "",
    ) -> None:
        self.folder = folder
        before = experiment
        with explain_write_errors(folder):
            _validate_folder_name(folder)
            refuse_unless_new(folder, resume)
            make_folder(folder)
            _refuse_symlinks(folder)
            self.lock = FolderLock(folder / "lock")
            try:
                before = require_same_experiment(folder / "experiment.toml", experiment)
                require_same_data(folder / "partition.json", partition)
                write_atomically(folder / "experiment.toml", experiment.encode())
                write_atomically(folder / "partition.json", json.dumps(partition).encode())
            except BaseException:
                self.lock.close()
                raise
        versions = get_versions()
        if kernel:  # other kernels, other bits
            versions["kernel"] = kernel
        self.journal = checkpoint.Journal(
            folder / "checkpoint",
            fingerprint_experiment(experiment),
            versions,
            list_former_fingerprints(before, experiment),
        )
        self.files = {name: LineFile(folder / name) for name in LEDGER_FILES}
        self.committed: State | None = None

    def restore(self, state: State) -> State:
        """The state of the last committed round, or the initial one. Truncates the ledger to it."""
        with explain_write_errors(self.folder):
            committed = self.read_committed(state)
            if committed is None:
                self._require_no_lost_rounds()
            marks = self.journal.last.ledger if self.journal.last else {}
            (self.folder / SEAL_FILE).unlink(missing_ok=True)  # its files are about to change
            self.journal.drop_unusable()
            for name, lines in self.files.items():
                lines.open(marks.get(name))
            sync_folder(self.folder)
        return committed or state

    def read_committed(self, start: State) -> State | None:
        """The last committed state with its history, from the disk; changes no file.

        `start` is a new initial state.
        """
        committed = self.journal.restore(start, self._verify_files)
        if committed is not None and self.journal.last is not None:
            length = self.journal.last.ledger["rounds.jsonl"]["bytes"]
            with open_regular(self.folder / "rounds.jsonl") as file:
                records = [parse_record(json.loads(line)) for line in split_lines(file, length)]
            committed = replace(committed, history=fill_start_times(records))
        self.committed = committed
        return committed

    def append(self, done: Round) -> None:
        """Write one round's lines, then commit it."""
        self.lock.check_ownership()
        hit_failpoint("round.done")
        clients = [to_client_line(client) for client in done.clients]
        relation = to_relation_line(done)
        with explain_write_errors(self.folder):
            self.files["rounds.jsonl"].append(to_jsonl([to_round_line(done.record)]))
            self.files["clients.jsonl"].append(to_jsonl(clients))
            self.files["relations.jsonl"].append(to_jsonl([relation] if relation else []))
            for lines in self.files.values():
                lines.sync()
            marks = {name: lines.mark for name, lines in self.files.items()}
            self.journal.save(done, marks, self.lock.check_ownership)
        self.committed = done.state
        hit_failpoint("round.committed")

    def write_results(
        self,
        state: State,
        trainable: int,
        model: Mapping[str, Tensor],
        last: Mapping[str, Tensor] | None = None,
        final: Mapping[str, Any] | None = None,
        base: int = 0,
        stop: StopRule | None = None,
    ) -> None:
        """Write the final model, the `last` one if it differs, the relationship map and the
        summary.

        `final` has the metrics of the final model by client and class; `base` is the number of
        bytes of the frozen part; of a `stop` of the user's own the summary keeps what it saw.
        """
        self.lock.check_ownership()
        piece_state = state.server_state.get("selector")
        summary = summarize_run(state.history, state.w.numel(), trainable, base)
        if stop is not None and (rules := record_rules(stop, state.history)):
            summary[RULES_KEY] = rules
        with explain_write_errors(self.folder):
            self._write_tensors("model.safetensors", model)
            if last is not None:
                self._write_tensors("last.safetensors", last)
            if isinstance(piece_state, RelationshipMap) and piece_state.H is not None:
                tables = {"Omega": piece_state.Omega, "H": piece_state.H, "R": piece_state.R}
                present = {name: table for name, table in tables.items() if table is not None}
                self._write_tensors("relations.safetensors", present)  # a sketch has no Omega
            if final is not None:
                self._write_json("final.json", final)
            self._write_json("summary.json", summary)
            write_seal(self.folder, self.journal.last.ledger if self.journal.last else {})
            sync_folder(self.folder)

    def _write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        data = save({key: tensor.contiguous() for key, tensor in tensors.items()})
        write_atomically(self.folder / name, data)

    def _write_json(self, name: str, table: Mapping[str, Any]) -> None:
        text = json.dumps(replace_non_finite(table), indent=1)
        write_atomically(self.folder / name, text.encode())

    def close(self) -> None:
        for lines in self.files.values():
            lines.close()
        self.lock.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verify_files(self, marks: checkpoint.FileMarks) -> None:
        for name, lines in self.files.items():
            lines.verify(marks.get(name))

    def _require_no_lost_rounds(self) -> None:
        """Before the first commit there is at most one line; BadInput if there are more."""
        path = self.folder / "rounds.jsonl"
        count = sum(1 for _ in read_lines(path, {}))
        if count > 1:
            raise BadInput(
                f"{path} has {count} rounds but checkpoint/ has none; restore it, or use another"
                " --out"
            )


def _validate_folder_name(folder: Path) -> None:
    """Raise BadInput unless this can be the name of a folder."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise BadInput(f"--out {os.fsencode(folder)!r} is not UTF-8; name another folder") from None
    if "\0" in str(folder):
        raise BadInput(f"--out {str(folder)!r} has a null character; name another folder")


def _refuse_symlinks(folder: Path) -> None:
    """Raise BadInput if a file that a run writes is a link, a pipe or a device."""
    for name in (*SEALED_FILES, SEAL_FILE, "lock", "checkpoint"):
        path = folder / name
        if path.is_symlink():
            raise BadInput(
                f"{path} is a symbolic link; remove it: a run writes only inside its folder"
            )
        if path.exists() and not (path.is_dir() if name == "checkpoint" else path.is_file()):
            kind = "folder" if name == "checkpoint" else "regular file"
            raise BadInput(f"{path} is not a {kind}; remove it: a run writes only its own files")


def refuse_unless_new(folder: Path, resume: bool) -> None:
    """Raise BadInput if the folder has a run, unless it is to be resumed."""
    if (folder / "rounds.jsonl").exists() and not resume:
        raise BadInput(
            f"--out {folder} already has a run; add --resume to continue it, or name another folder"
        )


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turn a failed write into a BadInput that says what to do. Committed rounds stay valid."""
    try:
        yield
    except OSError as why:
        reason = why.strerror or str(why)
        remedy = "name another folder, or make room"
        if os.path.exists(folder / "rounds.jsonl"):
            remedy = "the last committed round is kept: make room, then use --resume"
        elif os.path.isdir(folder):
            remedy = "no round is lost: make room, then use --resume, or name another folder"
        raise BadInput(
            f"{format_one_line(folder, 200)} cannot be written: {reason}; {remedy}"
        ) from why


def write_finished_run(
    folder: Path, experiment: str, history: Sequence[RoundRecord], summary: Mapping[str, Any]
) -> None:
    """Write a run directory of a finished run without a checkpoint: for reports only."""
    make_folder(folder)
    lines = [json.dumps(to_round_line(record), separators=(",", ":")) for record in history]
    write_atomically(folder / "experiment.toml", experiment.encode())
    write_atomically(folder / "rounds.jsonl", "".join(f"{line}\n" for line in lines).encode())
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1).encode())
    write_seal(folder, {})
