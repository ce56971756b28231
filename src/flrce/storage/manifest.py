"""The manifest of a commit: its checkpoint files and the ledger's length, with hashes.

A folder has two manifest files, which are written in turn: the newest commit and the one before it,
its spare.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flrce.errors import BadInput, format_one_line
from flrce.storage.limited import MAX_DOCUMENT_BYTES, describe_error, read_limited
from flrce.storage.seal import (
    MANIFESTS,
    DamagedRun,
    FileMarks,
    find_damaged_files,
    is_mark,
    list_unlisted_files,
    read_seal,
    refuse_unlisted,
)

SCHEMA = 3
PREVIOUS_SCHEMA = 2  # plain values only, and only the rows of the round's clients
MANIFEST_FILES = ("manifest.a.json", "manifest.b.json")
OLD_MANIFEST_FILES = ("manifest.json", "manifest.previous.json")  # of schema 1
LEDGER_FILES = ("rounds.jsonl", "clients.jsonl", "relations.jsonl")


@dataclass(frozen=True)
class Commit:
    """The contents of a manifest."""

    t: int
    attempt: int
    files: dict[str, dict[str, Any]]  # name -> sha256, bytes
    latest: str  # stem of the newest state file
    roster: str  # file with the clients' names
    rounds: dict[str, str]  # "table/round" of tables by round -> file
    scalars: dict[str, Any]  # state of the pieces other than tensors
    ledger: dict[str, dict[str, Any]]  # length and SHA-256 of each ledger file at the commit
    experiment: str  # fingerprint of the configuration
    versions: dict[str, str]
    schema: int = SCHEMA


def read_manifests(folder: Path) -> tuple[list[tuple[Path, Commit, tuple[str, ...]]], list[str]]:
    """Readable manifests, newest first, with the names that schema 1 lists; problems of others."""
    manifests, problems = [], []
    for path in (folder / name for name in (*MANIFEST_FILES, *OLD_MANIFEST_FILES)):
        if not os.path.lexists(path):
            continue
        try:
            manifests.append((path, *read_manifest(path)))
        except BadInput:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as why:
            problems.append(f"{path.name}: {format_one_line(describe_error(why), 200)}")
    return sorted(manifests, key=lambda item: int(item[1].latest), reverse=True), problems


def read_manifest(path: Path) -> tuple[Commit, tuple[str, ...]]:
    """A manifest, and the client names that schema 1 lists.

    ValueError or OSError if the manifest is damaged.
    """
    raw = json.loads(read_limited(path, MAX_DOCUMENT_BYTES))
    if raw.get("schema") == 1 and "commit" not in raw:
        return validate_commit(_convert_schema_1(raw)), tuple(raw["roster"])
    body = raw["commit"]
    if hashlib.sha256(_canonical_json(body)).hexdigest() != raw["sha256"]:
        raise ValueError("the manifest was changed after it was written")
    if body["schema"] not in (PREVIOUS_SCHEMA, SCHEMA):
        raise BadInput(
            f"{path} has schema {format_one_line(body['schema'], 20)}, this version reads {SCHEMA};"
            " use the version that wrote it"
        )
    return validate_commit(Commit(**body)), ()


def validate_commit(commit: Commit) -> Commit:
    """Raise ValueError unless every field has its type and file names are plain."""
    tables = (commit.files, commit.rounds, commit.scalars, commit.ledger, commit.versions)
    names = [*commit.files, *commit.rounds.values(), f"{commit.latest}.state"]
    names += [commit.roster] if commit.roster else []
    texts = (commit.experiment, commit.latest, commit.roster)
    is_valid = (
        type(commit.t) is int
        and type(commit.attempt) is int
        and min(commit.t, commit.attempt) >= 0
        and all(isinstance(table, dict) for table in tables)
        and all(isinstance(text, str) for text in texts)
        and re.fullmatch("[0-9]{1,18}", commit.latest) is not None
        and all(map(is_mark, (*commit.files.values(), *commit.ledger.values())))
        and all(mark["sha256"] for mark in commit.files.values())
        and all(isinstance(name, str) and name == os.path.basename(name) for name in names)
        and set(commit.ledger) <= set(LEDGER_FILES)
    )
    if not is_valid:
        raise ValueError("it does not describe a commit")
    return commit


def serialize_commit(commit: Commit) -> bytes:
    """The bytes of a manifest, with its own hash."""
    body = _canonical_json(asdict(commit))
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'","commit":' + body + b"}"


def committed_marks(folder: Path) -> FileMarks:
    """Lengths and hashes of a run's ledgers at its last commit; empty before the first commit."""
    manifests, problems = read_manifests(folder / "checkpoint")
    if problems and not manifests:
        raise DamagedRun(
            f"{folder}/checkpoint/{problems[0]}; restore it, or delete checkpoint/ to read the run"
            " unchecked"
        )
    return manifests[0][1].ledger if manifests else {}


def known_marks(folder: Path) -> tuple[FileMarks, bool]:
    """The marks of a run's files, from its seal or else its last commit; whether it is sealed."""
    if marks := read_seal(folder):
        refuse_unlisted(folder, marks)
        return marks, True
    return committed_marks(folder), False


def find_damage(folder: Path) -> tuple[int, list[str]]:
    """The number of files of a sealed run, with those of both commits, and their problems."""
    marks, checkpoint = read_seal(folder), folder / "checkpoint"
    problems = find_damaged_files(folder, marks) + [
        f"{name}: added after the run ended" for name in list_unlisted_files(folder, marks)
    ]
    if checkpoint.is_symlink():
        problems.append("checkpoint: it is a symbolic link; put the folder itself in its place")
    manifests, unreadable = read_manifests(checkpoint)
    problems += [f"checkpoint/{line}" for line in unreadable]
    files: dict[str, Mapping[str, Any]] = {}
    for path, commit, _ in manifests:
        files |= commit.files
        if path.name in OLD_MANIFEST_FILES and not set(marks).isdisjoint(MANIFESTS):
            problems.append(f"checkpoint/{path.name}: added after the run ended")
    problems += [f"checkpoint/{line}" for line in find_damaged_files(checkpoint, files)]
    if set(marks).isdisjoint(MANIFESTS):  # sealed by an earlier version
        problems += _find_lost_commits(marks, manifests[0][1] if manifests else None)
    return len(marks) + len(files), list(dict.fromkeys(problems))


def _find_lost_commits(marks: FileMarks, newest: Commit | None) -> list[str]:
    """Problems of a checkpoint whose manifests an earlier version's seal does not list."""
    if "partition.json" not in marks:
        return []  # the run was stored without a checkpoint
    if newest is None:
        return ["checkpoint: missing, or without a manifest"]
    for name, mark in newest.ledger.items():
        if marks.get(name, mark)["bytes"] != mark["bytes"]:
            return [f"checkpoint: its newest manifest is of round {newest.t}, but {name} is longer"]
    return []


def _convert_schema_1(raw: Mapping[str, Any]) -> Commit:
    """A manifest of schema 1: without SHA-256 of the ledger and of the manifest itself."""
    ledger = {name: {"bytes": length, "sha256": None} for name, length in raw["ledger"].items()}
    shared = ("t", "attempt", "files", "latest", "rounds", "scalars", "experiment")
    return Commit(**{key: raw[key] for key in shared}, roster="", ledger=ledger, versions={})


def _canonical_json(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
