"""The run directory: what was asked, one JSON line per round and per client, and what came of
it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from flrce.core.client_tables import RelationshipMap
from flrce.core.host import sync_folder
from flrce.core.record import fill_start_times
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
    """An open run directory; nobody else can open it meanwhile.

    `experiment` is kept as experiment.toml; a run goes on only under the same one, but for settings
    such as the number of workers, which change no result, and its length: a run may be extended.
    And on the same data.
    """

    def __init__(
        self,
        folder: Path,
        experiment: str,
        partition: Mapping[str, Any],
        resume: bool,
        kernel: str = "",
    ) -> None:
        self.folder, self.closed = folder, False
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
        made_by = get_versions() | (
            {"kernel": kernel} if kernel else {}
        )  # other kernels, other bits
        self.journal = checkpoint.Journal(
            folder / "checkpoint",
            fingerprint_experiment(experiment),
            made_by,
            list_former_fingerprints(before, experiment),
        )
        self.files = {name: LineFile(folder / name) for name in LEDGER_FILES}
        self.committed: State | None = None

    def restore(self, state: State) -> State:
        """The state of the last committed round, or the initial one; the ledger is cut to match
        it.
        """
        with explain_write_errors(self.folder):
            found = self.read_committed(state)
            if found is None:
                self._require_no_lost_rounds()
            marks = self.journal.last.ledger if self.journal.last else {}
            (self.folder / SEAL_FILE).unlink(missing_ok=True)  # what it describes may change now
            self.journal.drop_unusable()
            for name, lines in self.files.items():
                lines.open(marks.get(name))
            sync_folder(self.folder)
        return found or state

    def read_committed(self, start: State) -> State | None:
        """What is committed, read back from the disk; nothing is changed. `start` is a fresh
        initial state.
        """
        found = self.journal.restore(start, self._verify_files)
        if found is not None and self.journal.last is not None:
            length = self.journal.last.ledger["rounds.jsonl"]["bytes"]
            with open_regular(self.folder / "rounds.jsonl") as file:
                records = [parse_record(json.loads(line)) for line in split_lines(file, length)]
            found = replace(found, history=fill_start_times(records))
        self.committed = found
        return found

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
    ) -> None:
        """Write the final model, the `last` one where that is another, the relationship map
        and the summary.

        `final` is how good the model is for each client and each class, `base` what the fixed part
        of it weighs.
        """
        self.lock.check_ownership()
        piece_state = state.server_state.get("selector")
        summary = summarize_run(state.history, state.w.numel(), trainable, base)
        with explain_write_errors(self.folder):
            write_atomically(
                self.folder / "model.safetensors",
                save({k: v.contiguous() for k, v in model.items()}),
            )
            if last is not None:
                write_atomically(
                    self.folder / "last.safetensors",
                    save({k: v.contiguous() for k, v in last.items()}),
                )
            if isinstance(piece_state, RelationshipMap) and piece_state.H is not None:
                tables = {"Omega": piece_state.Omega, "H": piece_state.H, "R": piece_state.R}
                kept = {
                    name: table for name, table in tables.items() if table is not None
                }  # a sketch has no Omega
                write_atomically(self.folder / "relations.safetensors", save(kept))
            if final is not None:
                write_atomically(
                    self.folder / "final.json",
                    json.dumps(replace_non_finite(final), indent=1).encode(),
                )
            write_atomically(
                self.folder / "summary.json",
                json.dumps(replace_non_finite(summary), indent=1).encode(),
            )
            write_seal(self.folder, self.journal.last.ledger if self.journal.last else {})
            sync_folder(self.folder)

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
        """A crash before the first commit leaves at most one round's line; more of them had a
        checkpoint once.
        """
        path = self.folder / "rounds.jsonl"
        count = sum(1 for _ in read_lines(path, {}))
        if count > 1:
            raise BadInput(
                f"{path} holds {count} rounds but checkpoint/ has none: put it back, or use another"
                " --out"
            )


def _validate_folder_name(folder: Path) -> None:
    """BadInput unless this can be the name of a folder; a name too long is the system's to
    refuse.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise BadInput(f"--out {os.fsencode(folder)!r} is no UTF-8; name another folder") from None
    if "\0" in str(folder):
        raise BadInput(f"--out {str(folder)!r} holds a null character; name another folder")


def _refuse_symlinks(folder: Path) -> None:
    """BadInput if anything that a run writes in its folder is a link to somewhere else, a pipe or a
    device.
    """
    for name in (*SEALED_FILES, SEAL_FILE, "lock", "checkpoint"):
        path = folder / name
        if path.is_symlink():
            raise BadInput(
                f"{path} is a symbolic link; a run writes only inside its folder: remove it"
            )
        if path.exists() and not (path.is_dir() if name == "checkpoint" else path.is_file()):
            kind = "folder" if name == "checkpoint" else "regular file"
            raise BadInput(f"{path} is no {kind}; a run writes only files of its own: remove it")


def refuse_unless_new(folder: Path, resume: bool) -> None:
    """A run is gone on with only where that was asked for."""
    if (folder / "rounds.jsonl").exists() and not resume:
        raise BadInput(
            f"--out {folder} holds a run already; add --resume to go on, or name another folder"
        )


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """A write that fails is the machine's trouble, not a defect: say what to do. What is committed
    stays.
    """
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
    """A run directory of a finished run that was not journalled: enough for reports, nothing to
    resume.
    """
    make_folder(folder)
    lines = [json.dumps(to_round_line(record), separators=(",", ":")) for record in history]
    write_atomically(folder / "experiment.toml", experiment.encode())
    write_atomically(folder / "rounds.jsonl", "".join(f"{line}\n" for line in lines).encode())
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1).encode())
    write_seal(folder, {})
