"""The manifest of a commit: which files of a checkpoint belong to it, and how long the ledger was,
all with hashes.

A folder has two, which take turns: the newest commit's, and its spare, the one before.
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
# the schema before: it described no values but plain ones, and wrote rows of the round's clients
# alone
PREVIOUS_SCHEMA = 2
MANIFEST_FILES = ("manifest.a.json", "manifest.b.json")
OLD_MANIFEST_FILES = ("manifest.json", "manifest.previous.json")  # of schema 1
LEDGER_FILES = ("rounds.jsonl", "clients.jsonl", "relations.jsonl")


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


def read_manifests(folder: Path) -> tuple[list[tuple[Path, Commit, tuple[str, ...]]], list[str]]:
    """Every readable manifest, the newest first, with the names an old one lists; and what is wrong
    with the others.
    """
    found, problems = [], []
    for path in (folder / name for name in (*MANIFEST_FILES, *OLD_MANIFEST_FILES)):
        if not os.path.lexists(path):
            continue
        try:
            found.append((path, *read_manifest(path)))
        except BadInput:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as why:
            problems.append(f"{path.name}: {format_one_line(describe_error(why), 200)}")
    return sorted(found, key=lambda item: int(item[1].latest), reverse=True), problems


def read_manifest(path: Path) -> tuple[Commit, tuple[str, ...]]:
    """A manifest, and the clients' names where an old one lists them; ValueError or OSError if it
    is damaged.
    """
    raw = json.loads(read_limited(path, MAX_DOCUMENT_BYTES))
    if raw.get("schema") == 1 and "commit" not in raw:
        return validate_commit(_from_first(raw)), tuple(raw["roster"])
    body = raw["commit"]
    if hashlib.sha256(_canonical_json(body)).hexdigest() != raw["sha256"]:
        raise ValueError("the manifest is not as it was written")
    if body["schema"] not in (PREVIOUS_SCHEMA, SCHEMA):
        raise BadInput(
            f"{path} has schema {format_one_line(body['schema'], 20)}, this version reads {SCHEMA};"
            " use the version that wrote it"
        )
    return validate_commit(Commit(**body)), ()


def validate_commit(commit: Commit) -> Commit:
    """ValueError unless every field is of its kind and every file a plain name: somebody else may
    have written it.
    """
    tables = (commit.files, commit.rounds, commit.scalars, commit.ledger, commit.versions)
    names = [
        *commit.files,
        *commit.rounds.values(),
        f"{commit.latest}.state",
        *filter(None, [commit.roster]),
    ]
    texts = (commit.experiment, commit.latest, commit.roster)
    sound = (
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
    if not sound:
        raise ValueError("it does not describe a commit")
    return commit


def serialize_commit(commit: Commit) -> bytes:
    """A manifest's bytes, its own hash included."""
    body = _canonical_json(asdict(commit))
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'","commit":' + body + b"}"


def committed_marks(folder: Path) -> FileMarks:
    """How long the ledgers of a run were at its last commit, and their hashes; nothing before the
    first one.
    """
    found, problems = read_manifests(folder / "checkpoint")
    if problems and not found:
        raise DamagedRun(
            f"{folder}/checkpoint/{problems[0]}; restore it, or delete checkpoint/ to read the run"
            " unchecked"
        )
    return found[0][1].ledger if found else {}


def known_marks(folder: Path) -> tuple[FileMarks, bool]:
    """What is known of a run's files, by its seal or else by its last commit; and whether it is
    sealed.
    """
    if marks := read_seal(folder):
        refuse_unlisted(folder, marks)
        return marks, True
    return committed_marks(folder), False


def find_damage(folder: Path) -> tuple[int, list[str]]:
    """How many files a sealed run has, those of both commits included, and what is wrong with
    them.
    """
    marks, place = read_seal(folder), folder / "checkpoint"
    problems = find_damaged_files(folder, marks) + [
        f"{name}: added after the run ended" for name in list_unlisted_files(folder, marks)
    ]
    if place.is_symlink():
        problems.append("checkpoint: it is a symbolic link; put the folder itself in its place")
    found, unreadable = read_manifests(place)
    problems += [f"checkpoint/{line}" for line in unreadable]
    files: dict[str, Mapping[str, Any]] = {}
    for path, commit, _ in found:
        files |= commit.files
        if path.name in OLD_MANIFEST_FILES and not set(marks).isdisjoint(MANIFESTS):
            problems.append(f"checkpoint/{path.name}: added after the run ended")
    problems += [f"checkpoint/{line}" for line in find_damaged_files(place, files)]
    if set(marks).isdisjoint(MANIFESTS):  # by an earlier version
        problems += _lost_commits(marks, found[0][1] if found else None)
    return len(marks) + len(files), list(dict.fromkeys(problems))


def _lost_commits(marks: FileMarks, newest: Commit | None) -> list[str]:
    """What a seal without manifests, by an earlier version, tells of the checkpoint: its newest
    commit ends the run.
    """
    if "partition.json" not in marks:
        return []  # a run that was kept without a checkpoint
    if newest is None:
        return ["checkpoint: missing, or without a manifest"]
    longer = [
        name
        for name, mark in newest.ledger.items()
        if marks.get(name, mark)["bytes"] != mark["bytes"]
    ]
    return (
        [f"checkpoint: its newest manifest is of round {newest.t}, {longer[0]} goes on"]
        if longer
        else []
    )


def _from_first(raw: Mapping[str, Any]) -> Commit:
    """Schema 1: names and rows inside the manifest, no SHA-256 of the ledger or of the manifest
    itself.
    """
    ledger = {name: {"bytes": length, "sha256": None} for name, length in raw["ledger"].items()}
    same = ("t", "attempt", "files", "latest", "rounds", "scalars", "experiment")
    return Commit(**{key: raw[key] for key in same}, roster="", ledger=ledger, versions={})


def _canonical_json(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
