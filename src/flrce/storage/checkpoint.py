"""The journal of a run: one atomic commit per round, with a hash of every file.

A commit writes `N.state` (the model and small tensors), `N.rows` (the rows of the server's tables
that the round changed, and the state of its clients), `N.I.rows` (changed rows of table I, see
snapshot.py) and, when clients have joined, `N.roster`. The manifest lists every file that is needed
and the length of the ledger, each with its SHA-256. It is written to a temporary file, synced and
renamed: the rename is the commit. Manifests alternate between two names, so the previous commit
stays valid at every moment.

A row may be in several files; the newest counts. Once fewer than half of the stored rows are
current, the rows of the emptiest file are written again with the next commit and the file is
deleted, so the folder has at most about twice the size of the tables.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from flrce.core.host import require_memory, sync_folder
from flrce.core.types import Round, State
from flrce.errors import BadInput, format_one_line
from flrce.storage import snapshot
from flrce.storage.disk import make_folder, write_atomically, write_chunks
from flrce.storage.failpoint import hit_failpoint
from flrce.storage.limited import describe_error, read_limited
from flrce.storage.manifest import (
    MANIFEST_FILES,
    OLD_MANIFEST_FILES,
    Commit,
    read_manifests,
    serialize_commit,
)
from flrce.storage.seal import FileMarks
from flrce.storage.snapshot import ROWS_OF, NamedTensors, Snapshot, StateAssembly
from flrce.storage.table_rows import RowLocations, TableWatch
from flrce.storage.tensor_file import TableRows, iter_safetensors_chunks

CHECKPOINT_SUFFIXES = (".state", ".rows", ".roster", ".part")
DAMAGE_ERRORS = (
    *(ValueError, KeyError, IndexError, OSError, TypeError, AttributeError),
    *(OverflowError, RuntimeError, SafetensorError),
)
Tables = dict[str, Tensor | TableRows]
log = logging.getLogger("flrce")

__all__ = ["Commit", "FileMarks", "Journal", "read_manifests", "write_atomically"]


class Journal:
    """The checkpoint folder of one run."""

    def __init__(
        self,
        folder: Path,
        experiment: str,
        versions: Mapping[str, str],
        former: Collection[str] = (),
    ) -> None:
        """`experiment`: fingerprint of the settings; those in `former` are accepted too."""
        self.folder, self.experiment, self.versions = folder, experiment, dict(versions)
        self.accepted = {experiment, *former}
        self.last: Commit | None = None
        self.slot = ""  # name of the last commit's manifest
        self.unusable: list[Path] = []  # manifests of newer commits that could not be restored
        self.roster: tuple[str, ...] = ()
        self.places = RowLocations()
        # table whose changed rows are found by comparison -> files of its rows
        self.changed: dict[str, RowLocations] = {}
        self.watch = TableWatch()

    def save(self, done: Round, ledger: FileMarks, guard: Callable[[], None]) -> None:
        """Commit one round. `guard` raises if another process has taken the folder over."""
        make_folder(self.folder)
        state, stem = done.state, f"{len(done.state.history):06d}"
        stragglers = self.places.find_stragglers(set(done.changed_rows))
        changed_rows = sorted({*done.changed_rows, *stragglers})
        shot = snapshot.take_snapshot(state, changed_rows)
        changed = self._select_rows_to_write(shot)
        before = self.last.rounds if self.last else {}
        # Entries by round never change, so each is written once.
        stored = {name: file for name, file in before.items() if name in shot.rounds}
        rounds = {name: stored.get(name, f"{stem}.rows") for name in shot.rounds}
        new = {name: x for name, x in shot.rounds.items() if name not in stored}
        files = self._write_files(stem, shot, new, changed_rows, changed)
        roster = self.last.roster if self.last else ""
        if state.roster != self.roster or not roster:
            roster = f"{stem}.roster"
            files[roster] = write_chunks(self.folder / roster, [json.dumps(state.roster).encode()])
        needed = {*self.places.count_current_rows(changed_rows), *rounds.values(), roster}
        for key, rows in changed.items():
            needed |= self.changed.get(key, RowLocations()).count_current_rows(rows).keys()
        old_files = self.last.files if self.last else {}
        files = {name: entry for name, entry in old_files.items() if name in needed} | files
        marks = {name: dict(mark) for name, mark in ledger.items()}
        settings = (shot.scalars, marks, self.experiment, self.versions)
        commit = Commit(state.t, state.attempt, files, stem, roster, rounds, *settings)
        self._commit_manifest(commit, guard)
        self.last, self.roster = commit, state.roster
        self.places.move_rows(changed_rows, f"{stem}.rows")
        self.changed = {key: self.changed.get(key, RowLocations()) for key in changed}
        for (key, rows), name in zip(changed.items(), _name_row_files(stem, changed), strict=True):
            self.changed[key].move_rows(rows, name)
        self.watch.remember_tables(shot.tables)

    def _select_rows_to_write(self, shot: Snapshot) -> dict[str, list[int]]:
        """Table -> rows that changed since the last commit, and rows that empty an old file."""
        selected = {}
        for key, table in shot.tables.items():
            rows = set(self.watch.find_changed_rows(key, table))
            stragglers = self.changed.get(key, RowLocations()).find_stragglers(rows)
            selected[key] = sorted(rows | {k for k in stragglers if k < len(table)})
        return selected

    def _write_files(
        self,
        stem: str,
        shot: Snapshot,
        new: NamedTensors,
        changed_rows: Sequence[int],
        changed: Mapping[str, Sequence[int]],
    ) -> dict[str, dict[str, Any]]:
        """Write the files of a commit and return their marks; `new` are new entries by round."""
        whole = f"{stem}.state"
        files = {whole: write_chunks(self.folder / whole, iter_safetensors_chunks(shot.whole))}
        if changed_rows or new:
            rows = f"{stem}.rows"
            files[rows] = write_chunks(self.folder / rows, iter_safetensors_chunks(shot.rows | new))
        for (key, k), name in zip(changed.items(), _name_row_files(stem, changed), strict=True):
            if k:  # one file per table, so that it can be deleted with the table's last row in it
                own: Tables = {key: TableRows(shot.tables[key], tuple(k))}
                own[ROWS_OF + key] = torch.tensor(k)
                files[name] = write_chunks(self.folder / name, iter_safetensors_chunks(own))
        return files

    def restore(self, start: State, verify: Callable[[FileMarks], None]) -> State | None:
        """The last committed state without its history; None if nothing was committed.

        `start` is the initial state of the same recipe. If the newest commit is damaged, the spare
        is restored. `verify` raises ValueError if the ledger does not agree with a manifest.
        """
        manifests, problems = read_manifests(self.folder)
        self.unusable = []
        for path, commit, roster in manifests:
            try:
                state = self._load_state(commit, roster, start)
                verify(commit.ledger)
            except BadInput:
                raise
            except DAMAGE_ERRORS as why:
                problems.append(f"{path.name}: {format_one_line(describe_error(why), 200)}")
                self.unusable.append(path)
                continue
            if commit.experiment not in self.accepted:
                raise BadInput(
                    f"{self.folder.parent} was made by another experiment; use its own, or another"
                    " --out"
                )
            if problems:
                log.warning(
                    f"{self.folder}: {problems[0]}; continuing from the previous commit, round"
                    f" {commit.t}"
                )
            self._warn_about_versions(commit)
            self.last, self.roster, self.slot = commit, state.roster, path.name
            return state
        if problems:
            raise BadInput(
                f"{self.folder} is damaged, and so is its spare ({'; '.join(problems)}); use"
                " another --out"
            )
        return None

    def drop_unusable(self) -> None:
        """Delete manifests of newer, damaged commits, before the ledger is truncated."""
        for path in self.unusable:
            path.unlink()
        if self.unusable:
            sync_folder(self.folder)
        self.unusable = []

    def _load_state(self, commit: Commit, roster: tuple[str, ...], start: State) -> State:
        """The state that a manifest describes. One file is in memory at a time."""
        roster = roster or tuple(json.loads(self._read_verified(commit.roster, commit)))
        assembly, rounds = StateAssembly(start, roster, commit.scalars), {}
        content: dict[str, tuple[int, ...]] = {}
        changed: dict[str, dict[str, tuple[int, ...]]] = {key: {} for key in assembly.owners}
        for name in sorted((name for name in commit.files if name.endswith(".rows")), reverse=True):
            tensors = load(self._read_verified(name, commit))
            assembly.add_rows(name, tensors)
            content[name] = _list_rows(tensors, "k")
            for key, table_content in changed.items():
                table_content[name] = _list_rows(tensors, ROWS_OF + key)
            entries = [entry for entry, file in commit.rounds.items() if file == name]
            rounds.update({entry: tensors[entry].clone() for entry in entries})
        whole: NamedTensors = load(self._read_verified(f"{commit.latest}.state", commit))
        state = assembly.build_state(commit.t, commit.attempt, whole, rounds)
        self.places = RowLocations(assembly.owner, content, Counter(assembly.owner.values()))
        self.changed = {
            key: RowLocations(owner, changed[key], Counter(owner.values()))
            for key, owner in assembly.owners.items()
        }
        self.watch.remember_tables(assembly.found)
        return state

    def _read_verified(self, name: str, commit: Commit) -> bytes:
        entry = commit.files[name]
        if (self.folder / name).lstat().st_size == entry["bytes"]:
            require_memory(entry["bytes"], str(self.folder / name), "free some memory")
        data = read_limited(self.folder / name, entry["bytes"])
        if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ValueError(f"{name} was changed after it was written")
        return data

    def _commit_manifest(self, commit: Commit, guard: Callable[[], None]) -> None:
        """Write the manifest under the other name: the last commit stays valid until then."""
        sync_folder(self.folder)
        hit_failpoint("commit.ready")
        guard()
        first, second = MANIFEST_FILES
        spare = self.slot
        self.slot = second if spare == first else first
        write_atomically(self.folder / self.slot, serialize_commit(commit))
        sync_folder(self.folder)
        hit_failpoint("commit.done")
        self._delete_unneeded(
            {*commit.files, *(self.last.files if self.last else ()), self.slot, spare}
        )

    def _delete_unneeded(self, needed: set[str]) -> None:
        """Delete the files that neither this commit nor the previous one needs."""
        for path in self.folder.iterdir():
            if path.name not in needed and (
                path.suffix in CHECKPOINT_SUFFIXES
                or path.name in (*MANIFEST_FILES, *OLD_MANIFEST_FILES)
            ):
                path.unlink()
                hit_failpoint("commit.swept")

    def _warn_about_versions(self, commit: Commit) -> None:
        """Log the versions that have changed: other versions may give other bits."""
        old = commit.versions
        changed = [
            f"{k} {old[k]} -> {v}" for k, v in self.versions.items() if k in old and old[k] != v
        ]
        if changed:
            log.warning(
                f"{self.folder.parent} was started with other versions ({', '.join(changed)}):"
                " bits may differ"
            )


def _list_rows(tensors: Mapping[str, Tensor], key: str) -> tuple[int, ...]:
    """The row numbers that a file has under a key."""
    return tuple(tensors[key].tolist()) if key in tensors else ()


def _name_row_files(stem: str, tables: Collection[str]) -> list[str]:
    """The names of a commit's files for the rows of these tables."""
    return [f"{stem}.{i}.rows" for i in range(len(tables))]
