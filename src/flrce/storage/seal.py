"""The seal of a run: hashes of its files, written when it ends."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flrce.core.host import require_memory
from flrce.errors import BadInput, format_one_line
from flrce.storage.disk import hash_file, write_atomically
from flrce.storage.limited import (
    MAX_DOCUMENT_BYTES,
    describe_error,
    hash_prefix,
    open_regular,
    read_limited,
    split_lines,
)

SEAL_FILE = "checksums.json"
MODEL_FILE = "model.json"  # preprocessing of raw samples and meaning of the outputs
SEALED_FILES = (
    *("experiment.toml", "partition.json", MODEL_FILE),
    *("rounds.jsonl", "clients.jsonl", "relations.jsonl"),
    *("model.safetensors", "last.safetensors", "relations.safetensors"),
    *("final.json", "summary.json"),
)
# They have the hashes of all other files of the checkpoint.
MANIFESTS = tuple(f"checkpoint/manifest.{slot}.json" for slot in "ab")
MAX_SEAL_BYTES = 2**20
MAX_SETTINGS_BYTES = 2**24  # of experiment.toml
PARSED_SIZE_RATIO = 4  # memory of a parsed file, at least, in multiples of its size


class DamagedRun(BadInput):
    """A file of a run was changed after it was written."""


FileMarks = Mapping[str, Mapping[str, Any]]  # file -> bytes, sha256


def write_seal(folder: Path, known: FileMarks) -> None:
    """Write the marks of all files of a run. `known` has those of the committed ledgers."""
    names = [name for name in (*SEALED_FILES, *MANIFESTS) if (folder / name).is_file()]
    files = {name: dict(known.get(name) or hash_file(folder / name)) for name in names}
    write_atomically(folder / SEAL_FILE, serialize_marks(files))


def serialize_marks(files: FileMarks) -> bytes:
    """The bytes of the seal, with its own hash."""
    return json.dumps({"sha256": _hash_marks(files), "files": files}, indent=1).encode()


def read_seal(folder: Path) -> FileMarks:
    """The marks of a finished run's files; empty if it has not ended or is of an older version."""
    path = folder / SEAL_FILE
    if not os.path.lexists(path):
        return {}
    try:
        data = read_limited(path, MAX_SEAL_BYTES)
        files = parse_document(data, path).get("files")
    except OSError as why:
        raise DamagedRun(
            f"{path} cannot be read ({describe_error(why)}); restore it, or use another --out"
        ) from why
    except BadInput as why:
        raise DamagedRun(why) from why
    if (
        not isinstance(files, dict)
        or not _is_plausible_seal(files)
        or data != serialize_marks(files)
    ):
        raise DamagedRun(
            f"{path} was changed after it was written; restore it, or delete it to read the run"
            " unchecked"
        )
    return files


def list_unlisted_files(folder: Path, marks: FileMarks) -> list[str]:
    """Files of a sealed run that its seal does not list: they were added later."""
    # Seals of earlier versions list no manifests.
    names = SEALED_FILES if set(marks).isdisjoint(MANIFESTS) else (*SEALED_FILES, *MANIFESTS)
    return [name for name in names if name not in marks and os.path.lexists(folder / name)]


def refuse_unlisted(folder: Path, marks: FileMarks) -> None:
    """Raise BadInput if a file was added to a sealed run."""
    for name in list_unlisted_files(folder, marks):
        raise DamagedRun(
            f"{folder / name} was added after the run ended ({SEAL_FILE} does not list it);"
            " remove it"
        )


def read_sealed_file(path: Path, marks: FileMarks, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
    """The bytes of a file, checked against its mark if there is one; empty if it does not exist.

    BadInput if the file does not agree with its mark.
    """
    mark = marks.get(path.name)
    try:
        needed = PARSED_SIZE_RATIO * min(path.lstat().st_size, limit)
        require_memory(needed, str(path), "read it on a larger machine")
        data = read_limited(path, limit)
    except FileNotFoundError:
        data = b""
    except OSError as why:
        raise BadInput(f"{path} cannot be read: {describe_error(why)}") from why
    if mark is None:
        return data
    data = data[: mark["bytes"]]  # the rest was never committed
    if len(data) < mark["bytes"] or (
        mark["sha256"] and hashlib.sha256(data).hexdigest() != mark["sha256"]
    ):
        raise DamagedRun(_describe_damage(path))
    return data


def read_lines(path: Path, marks: FileMarks) -> Iterator[bytes]:
    """Complete lines of a ledger, checked against its mark if there is one; none if it does not
    exist. BadInput if the file does not agree with its mark.
    """
    mark = marks.get(path.name)
    length = None if mark is None else mark["bytes"]
    try:
        file = open_regular(path)
    except FileNotFoundError:
        if length:
            raise DamagedRun(_describe_damage(path)) from None
        return
    except OSError as why:
        raise BadInput(f"{path} cannot be read: {describe_error(why)}") from why
    with file:
        size = os.fstat(file.fileno()).st_size if length is None else length
        if mark is not None:
            count, sha256 = hash_prefix(file, length)
            if count < mark["bytes"] or (mark["sha256"] and sha256 != mark["sha256"]):
                raise DamagedRun(_describe_damage(path))
        require_memory(PARSED_SIZE_RATIO * size, str(path), "read it on a larger machine")
        yield from split_lines(file, length)


def find_damaged_files(folder: Path, marks: FileMarks) -> list[str]:
    """Every file that does not agree with its mark, with the reason."""
    problems = []
    for name, mark in marks.items():
        path = folder / name
        try:
            actual, size = hash_file(path, mark["bytes"]), path.stat().st_size
        except FileNotFoundError:
            problems.append(f"{name}: missing")
            continue
        except OSError as why:
            problems.append(f"{name}: {describe_error(why)}")
            continue
        if actual["bytes"] < mark["bytes"]:
            problems.append(f"{name}: {actual['bytes']} bytes, {mark['bytes']} were written")
        elif mark["sha256"] and actual["sha256"] != mark["sha256"]:
            problems.append(f"{name}: its SHA-256 is not that of what was written")
        elif size > mark["bytes"]:
            problems.append(f"{name}: {size - mark['bytes']} bytes more than were committed")
    return problems


def read_json_table(path: Path, limit: int = MAX_DOCUMENT_BYTES) -> dict[str, Any]:
    """A JSON file that holds a table, or BadInput."""
    try:
        data = read_limited(path, limit)
    except OSError as why:
        raise BadInput(
            f"{path} cannot be read ({describe_error(why)}); restore it, or use another --out"
        ) from why
    return parse_document(data, path)


def parse_document(data: bytes, path: Path) -> dict[str, Any]:
    """The table in the bytes of a JSON file, or BadInput."""
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as why:
        raise BadInput(
            f"{path} cannot be read ({format_one_line(why, 100)}); restore it, or use another --out"
        ) from why
    if not isinstance(table, dict):
        raise BadInput(f"{path} holds no table; restore it, or use another --out")
    return table


def is_mark(value: Any) -> bool:
    """Whether this is a length and a SHA-256, which schema 1 does not always have."""
    if not isinstance(value, dict) or type(value.get("bytes")) is not int or value["bytes"] < 0:
        return False
    sha256 = value.get("sha256", 0)
    return sha256 is None or (
        isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256) is not None
    )


def _describe_damage(path: Path) -> str:
    return (
        f"{path} was changed after it was written; restore it (flrce verify {path.parent} checks"
        " all files)"
    )


def _is_plausible_seal(files: Mapping[str, Any]) -> bool:
    """Whether these are names of files of a run directory, each with a mark."""
    return bool(files) and all(
        name in (*SEALED_FILES, *MANIFESTS) and is_mark(mark) for name, mark in files.items()
    )


def _hash_marks(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
