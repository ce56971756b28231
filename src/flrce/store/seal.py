"""The hashes of a run's files, written when it ends: whoever reads them later knows that nothing has changed."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flrce.errors import BadInput, brief
from flrce.store.disk import hashed, write_through

SEAL = "checksums.json"
SEALED = (
    "experiment.toml", "partition.json", "rounds.jsonl", "clients.jsonl", "relations.jsonl", "model.safetensors",
    "last.safetensors", "relations.safetensors", "final.json", "summary.json",
)  # fmt: skip
Marks = Mapping[str, Mapping[str, Any]]  # file -> bytes, sha256


def seal(folder: Path, known: Marks) -> None:
    """Write the hashes of every file of a run; `known` are those of the ledgers, as far as they are committed."""
    files = {name: dict(known.get(name) or hashed(folder / name)) for name in SEALED if (folder / name).is_file()}
    write_through(folder / SEAL, json.dumps({"sha256": _digest(files), "files": files}, indent=1).encode())


def sealed(folder: Path) -> Marks:
    """What the files of a finished run hashed to; nothing where it has not ended, or an earlier version wrote it."""
    path = folder / SEAL
    if not path.exists():
        return {}
    found = document(path)
    files = found.get("files")
    if not isinstance(files, dict) or found.get("sha256") != _digest(files) or not all(map(_mark, files.values())):
        raise BadInput(f"{path} is not as it was written; restore it, or delete it to read the run unchecked")
    return files


def contents(path: Path, marks: Marks) -> bytes:
    """A file as it was sealed, BadInput if it is not; as it is, where nothing is known of it."""
    mark, data = marks.get(path.name), path.read_bytes() if path.exists() else b""
    if mark is None:
        return data
    data = data[: mark["bytes"]]  # what follows was never committed
    if len(data) < mark["bytes"] or hashlib.sha256(data).hexdigest() != mark["sha256"]:
        raise BadInput(f"{path} is not as it was written; restore it (flrce verify {path.parent} checks all files)")
    return data


def damaged(folder: Path, marks: Marks) -> list[str]:
    """Every file that is not as its mark says, with the reason."""
    found = []
    for name, mark in marks.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name}: missing")
            continue
        now = hashed(path, mark["bytes"])
        if now["bytes"] < mark["bytes"]:
            found.append(f"{name}: {now['bytes']} bytes, {mark['bytes']} were written")
        elif mark["sha256"] and now["sha256"] != mark["sha256"]:
            found.append(f"{name}: its SHA-256 is not that of what was written")
        elif path.stat().st_size > mark["bytes"]:
            found.append(f"{name}: {path.stat().st_size - mark['bytes']} bytes more than were committed")
    return found


def document(path: Path) -> dict[str, Any]:
    """A JSON file that holds a table, or BadInput."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as why:
        raise BadInput(f"{path} cannot be read ({brief(why, 100)}); restore it, or use another --out") from why
    if not isinstance(found, dict):
        raise BadInput(f"{path} holds no table; restore it, or use another --out")
    return found


def _digest(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _mark(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("bytes")) is int and value["bytes"] >= 0 and "sha256" in value
