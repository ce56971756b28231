"""State on disk: one commit point a round, cost proportional to the round's P clients, and proof of every byte.

A commit writes `N.state` (the model and what is small), `N.rows` (the rows of the server's tables that the round
touched, and what its clients keep) and, when clients have appeared, `N.roster`. The manifest names every file still
needed and the ledger's length, each with its SHA-256, and bears its own; it is written aside, fsynced and renamed: that
rename is the commit. Manifests take turns between two names, so the previous commit stays whole at every moment.

Files are readable by their owner alone (mode 0600): clients' last updates lie in them as they came.

What the pieces remember is described in snapshot.py; `N.I.rows` are the rows of a table that changed, where they are
looked for.

A row's newest file counts. Files of which less than half is still current are emptied bit by bit: their last rows
move into the next commit, so the folder holds at most about twice the tables' size.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from flrce.errors import BadInput
from flrce.host import sync_folder
from flrce.store import snapshot
from flrce.store.changed import Watch
from flrce.store.disk import PRIVATE, write_pieces, write_through
from flrce.store.failpoint import failpoint
from flrce.store.pages import Rows, pages
from flrce.store.places import Places
from flrce.store.snapshot import ROWS_OF, Assembly, Snapshot, Tensors
from flrce.types import Round, State

SCHEMA = 3
SIMPLER = 2  # the schema before: it described no values but plain ones, and wrote rows of the round's clients alone
SLOTS = ("manifest.a.json", "manifest.b.json")
FORMER = ("manifest.json", "manifest.previous.json")  # of schema 1
OURS = (".state", ".rows", ".roster", ".part")
Marks = Mapping[str, Mapping[str, Any]]  # ledger file -> bytes, sha256
Tables = dict[str, Tensor | Rows]
log = logging.getLogger("flrce")

__all__ = ["Commit", "Journal", "write_through"]


@dataclass(frozen=True)
class Commit:
    """What the manifest says."""

    t: int
    attempt: int
    files: dict[str, dict[str, Any]]  # name -> sha256, bytes
    latest: str  # stem of the newest state file
    roster: str  # file with the clients' names
    rounds: dict[str, str]  # "table/round" of tables by round -> file
    scalars: dict[str, Any]  # what the pieces remember besides tensors
    ledger: dict[str, dict[str, Any]]  # length and SHA-256 of each ledger file at the commit
    experiment: str  # fingerprint of the configuration
    versions: dict[str, str]
    schema: int = SCHEMA


class Journal:
    """The checkpoint folder of one run."""

    def __init__(
        self, folder: Path, experiment: str, versions: Mapping[str, str], former: Collection[str] = ()
    ) -> None:
        """`experiment` is the fingerprint of the settings; commits under a `former` one are gone on with too."""
        self.folder, self.experiment, self.versions = folder, experiment, dict(versions)
        self.accepted = {experiment, *former}
        self.last: Commit | None = None
        self.slot = ""  # the name of the last commit's manifest
        self.roster: tuple[str, ...] = ()
        self.places = Places()
        self.changed: dict[str, Places] = {}  # table of which all that changed is written -> where its rows lie
        self.watch = Watch()

    def save(self, done: Round, ledger: Marks, guard: Callable[[], None]) -> None:
        """Commit one round; `guard` raises if the folder is no longer this run's."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state, stem = done.state, f"{len(done.state.history):06d}"
        touched = sorted({*done.touched, *self.places.stragglers(set(done.touched))})
        shot = snapshot.take(state, touched)
        changed = self._changed_rows(shot)
        before = self.last.rounds if self.last else {}
        stored = {name: file for name, file in before.items() if name in shot.rounds}  # entries by round never change
        rounds = {name: stored.get(name, f"{stem}.rows") for name in shot.rounds}
        new = {name: x for name, x in shot.rounds.items() if name not in stored}
        files = self._written(stem, shot, new, touched, changed)
        roster = self.last.roster if self.last else ""
        if state.roster != self.roster or not roster:
            roster = f"{stem}.roster"
            files[roster] = write_pieces(self.folder / roster, [json.dumps(state.roster).encode()], PRIVATE)
        needed = {*self.places.without(touched), *rounds.values(), roster}
        for key, rows in changed.items():
            needed |= self.changed.get(key, Places()).without(rows).keys()
        kept = {name: entry for name, entry in (self.last.files if self.last else {}).items() if name in needed}
        commit = Commit(
            state.t, state.attempt, kept | files, stem, roster, rounds, shot.scalars,
            {name: dict(mark) for name, mark in ledger.items()}, self.experiment, self.versions,
        )  # fmt: skip
        self._commit(commit, guard)
        self.last, self.roster = commit, state.roster
        self.places.moved(touched, f"{stem}.rows")
        self.changed = {key: self.changed.get(key, Places()) for key in changed}
        for (key, rows), name in zip(changed.items(), _names(stem, changed), strict=True):
            self.changed[key].moved(rows, name)
        self.watch.keep(shot.tables)

    def _changed_rows(self, shot: Snapshot) -> dict[str, list[int]]:
        """Table -> rows to write: those that changed since the last commit, and some that empty an old file."""
        found = {}
        for key, table in shot.tables.items():
            rows = set(self.watch.find_changed_rows(key, table))
            old = self.changed.get(key, Places()).stragglers(rows)
            found[key] = sorted(rows | {k for k in old if k < len(table)})
        return found

    def _written(
        self, stem: str, shot: Snapshot, new: Tensors, touched: Sequence[int], changed: Mapping[str, Sequence[int]]
    ) -> dict[str, dict[str, Any]]:
        """The files of a commit and their marks: the model and what is small; rows, and `new` entries by round."""
        whole = f"{stem}.state"
        files = {whole: write_pieces(self.folder / whole, pages(shot.whole), PRIVATE)}
        if touched or new:
            rows = f"{stem}.rows"
            files[rows] = write_pieces(self.folder / rows, pages(shot.rows | new), PRIVATE)
        for (key, k), name in zip(changed.items(), _names(stem, changed), strict=True):
            if k:  # a file for each table: it is deleted when that table needs it no longer
                own: Tables = {key: Rows(shot.tables[key], tuple(k)), ROWS_OF + key: torch.tensor(k)}
                files[name] = write_pieces(self.folder / name, pages(own), PRIVATE)
        return files

    def restore(self, start: State, verify: Callable[[Marks], None]) -> State | None:
        """The last committed state without its history; `start` is the initial one of the same recipe.

        A damaged newest checkpoint falls back on the spare; `verify` raises ValueError if the ledger is not as a
        manifest says. None: nothing was committed.
        """
        found, problems = manifests(self.folder)
        for path, commit, roster in found:
            try:
                state = self._load(commit, roster, start)
                verify(commit.ledger)
            except BadInput:
                raise
            except (ValueError, KeyError, IndexError, OSError, TypeError, RuntimeError, SafetensorError) as why:
                problems.append(f"{path.name}: {' '.join(str(why).split())[:200]}")
                continue
            if commit.experiment not in self.accepted:
                raise BadInput(f"{self.folder.parent} was made by another experiment; use its own, or another --out")
            if problems:
                log.warning(f"{self.folder}: {problems[0]}; going on from round {commit.t}, the commit before")
            self._warn(commit)
            self.last, self.roster, self.slot = commit, state.roster, path.name
            return state
        if problems:
            raise BadInput(f"{self.folder} is damaged beyond its spare ({'; '.join(problems)}); use another --out")
        return None

    def _load(self, commit: Commit, roster: tuple[str, ...], start: State) -> State:
        """The state that a manifest describes, one file in memory at a time."""
        roster = roster or tuple(json.loads(self._checked(commit.roster, commit)))
        build, rounds = Assembly(start, roster, commit.scalars), {}
        content: dict[str, tuple[int, ...]] = {}
        changed: dict[str, dict[str, tuple[int, ...]]] = {key: {} for key in build.owners}
        for name in sorted((name for name in commit.files if name.endswith(".rows")), reverse=True):
            tensors = load(self._checked(name, commit))
            build.add(name, tensors)
            content[name] = tuple(tensors["k"].tolist()) if "k" in tensors else ()
            for key, held in changed.items():
                held[name] = tuple(tensors[ROWS_OF + key].tolist()) if ROWS_OF + key in tensors else ()
            rounds.update({entry: tensors[entry].clone() for entry, file in commit.rounds.items() if file == name})
        whole: Tensors = load(self._checked(f"{commit.latest}.state", commit))
        state = build.state(commit.t, commit.attempt, whole, rounds)
        self.places = Places(build.owner, content, Counter(build.owner.values()))
        self.changed = {key: Places(own, changed[key], Counter(own.values())) for key, own in build.owners.items()}
        self.watch.keep(build.found)
        return state

    def _checked(self, name: str, commit: Commit) -> bytes:
        data = (self.folder / name).read_bytes()
        entry = commit.files[name]
        if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ValueError(f"{name} is not as it was written")
        return data

    def _commit(self, commit: Commit, guard: Callable[[], None]) -> None:
        """Write the manifest under the name that the last one has not: until it is whole, that one counts."""
        sync_folder(self.folder)
        failpoint("commit.ready")
        guard()
        first, second = SLOTS
        spare = self.slot
        self.slot = second if spare == first else first
        write_through(self.folder / self.slot, _sealed(commit), PRIVATE)
        sync_folder(self.folder)
        failpoint("commit.done")
        self._sweep({*commit.files, *(self.last.files if self.last else ()), self.slot, spare})

    def _sweep(self, needed: set[str]) -> None:
        """Delete what neither this commit nor the one before needs."""
        for path in self.folder.iterdir():
            if path.name not in needed and (path.suffix in OURS or path.name in (*SLOTS, *FORMER)):
                path.unlink()
                failpoint("commit.swept")

    def _warn(self, commit: Commit) -> None:
        """Say which versions have changed since: the same bits are promised only for the same ones."""
        old = commit.versions
        drift = [f"{k} {old[k]} -> {v}" for k, v in self.versions.items() if k in old and old[k] != v]
        if drift:
            log.warning(f"{self.folder.parent} was begun with other versions ({', '.join(drift)}): bits may differ")


def _names(stem: str, tables: Collection[str]) -> list[str]:
    """Files of a commit for these tables' rows."""
    return [f"{stem}.{i}.rows" for i in range(len(tables))]


def manifests(folder: Path) -> tuple[list[tuple[Path, Commit, tuple[str, ...]]], list[str]]:
    """Every readable manifest, the newest first, with the names an old one lists; and what is wrong with the others."""
    found, problems = [], []
    for path in (folder / name for name in (*SLOTS, *FORMER)):
        if not path.exists():
            continue
        try:
            found.append((path, *read(path)))
        except BadInput:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as why:
            problems.append(f"{path.name}: {' '.join(str(why).split())[:200]}")
    return sorted(found, key=lambda item: int(item[1].latest), reverse=True), problems


def read(path: Path) -> tuple[Commit, tuple[str, ...]]:
    """A manifest, and the clients' names where an old one lists them; ValueError if it is damaged."""
    raw = json.loads(path.read_bytes())
    if raw.get("schema") == 1 and "commit" not in raw:
        return _from_first(raw), tuple(raw["roster"])
    body = raw["commit"]
    if hashlib.sha256(_canonical(body)).hexdigest() != raw["sha256"]:
        raise ValueError("the manifest is not as it was written")
    if body["schema"] not in (SIMPLER, SCHEMA):
        raise BadInput(
            f"{path} has schema {body['schema']}, this version reads {SCHEMA}; use the version that wrote it"
        )
    return Commit(**body), ()


def _from_first(raw: Mapping[str, Any]) -> Commit:
    """Schema 1: names and rows inside the manifest, no SHA-256 of the ledger or of the manifest itself."""
    ledger = {name: {"bytes": length, "sha256": None} for name, length in raw["ledger"].items()}
    same = ("t", "attempt", "files", "latest", "rounds", "scalars", "experiment")
    return Commit(**{key: raw[key] for key in same}, roster="", ledger=ledger, versions={})


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _sealed(commit: Commit) -> bytes:
    body = _canonical(asdict(commit))
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'","commit":' + body + b"}"
