"""Run directories with figures that no run would write; used by the suite and by `make fuzz`."""

import copy
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

ODD: list[Any] = [
    None,
    0,
    1,
    -1,
    10**8,
    10**30,
    -(10**30),
    1e308,
    -1e308,
    0.5,
    "",
    "x",
    "\x1b[2J",
    "a" * 5000,
    [],
    [1],
    [[]],
    {},
    {"a": 1},
    True,
    "NaN",
    [None],
    ["a", "b"],
    {"": {}},
    2**63,
    "AAAA",
    "committed",
    3,
]
FILES = (
    "rounds.jsonl",
    "clients.jsonl",
    "relations.jsonl",
    "partition.json",
    "summary.json",
    "experiment.toml",
)


def mutated(whole: Path, target: Path, rng: random.Random) -> Path:
    """A copy of a run without its seal, with one to three things done to its files."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(
        whole,
        target,
        ignore=shutil.ignore_patterns("checkpoint", "checksums.json", "*.safetensors"),
    )
    for _ in range(rng.randint(1, 3)):
        path = target / rng.choice(FILES)
        if path.suffix == ".jsonl" and rng.random() < 0.8:
            rows = [
                json.loads(line)
                for line in path.read_text(errors="replace").splitlines()
                if _table(line)
            ]
            if rows:
                _spoil(rng.choice(rows), rng)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif (
            path.suffix == ".json"
            and rng.random() < 0.8
            and _table(path.read_text(errors="replace"))
        ):
            table = json.loads(path.read_text(errors="replace"))
            _spoil(table, rng)
            path.write_text(json.dumps(table))
        else:
            _cut(path, rng)
    return target


#: of a sealed run: what a command may be led to read
WHOLE = (
    *FILES,
    "final.json",
    "model.safetensors",
    "relations.safetensors",
    "checksums.json",
    "lock",
    "checkpoint",
)
PRESENT = ("flip", "cut", "delete", "swap", "link", "device", "pipe", "folder", "more")


def damaged(whole: Path, target: Path, rng: random.Random) -> tuple[Path, str]:
    """A copy of a sealed run with one thing done to one of its files, and what; "" where nothing
    was changed.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(whole, target)
    path = target / rng.choice(WHOLE)
    if path.name == "checkpoint" and rng.random() < 0.9:
        path = rng.choice(sorted(path.iterdir()))
    what = rng.choice(PRESENT)
    data = b"" if path.is_dir() else path.read_bytes()
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if what == "flip" and data:
        at = rng.randrange(8 * len(data))
        path.write_bytes(
            data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]
        )
    elif what == "cut" and data:
        path.write_bytes(data[: rng.randrange(len(data))])
    elif what == "more":
        path.write_bytes(data + rng.choice([b"\n", b"{}\n", b"[" * 5000]))
    elif what == "swap":
        other = target / rng.choice([name for name in WHOLE[:-1] if name != path.name])
        path.write_bytes(other.read_bytes() if other.exists() else b"")
    elif what == "link":
        path.symlink_to(whole / path.relative_to(target))
    elif what == "device":
        path.symlink_to(rng.choice(["/dev/zero", "/dev/full", "/dev/tty"]))
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    return target, "" if path.name == "lock" else f"{what} {path.relative_to(target)}"


def _table(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _spoil(table: dict[str, Any], rng: random.Random) -> None:
    if not table or rng.random() < 0.1:
        table[rng.choice(["t", "k", "x", ""])] = copy.deepcopy(rng.choice(ODD))
        return
    key = rng.choice(list(table))
    value = table[key]
    if isinstance(value, dict) and value and rng.random() < 0.5:
        _spoil(value, rng)
    elif isinstance(value, list) and value and rng.random() < 0.5:
        value[rng.randrange(len(value))] = copy.deepcopy(rng.choice(ODD))
    elif rng.random() < 0.2:
        del table[key]
    else:
        table[key] = copy.deepcopy(rng.choice(ODD))


def _cut(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if not data:
        return
    at = rng.randrange(len(data))
    action = rng.random()
    if action < 0.4:
        data[at] = rng.randrange(256)
    elif action < 0.7:
        del data[at : at + rng.randrange(200)]
    else:
        data[at:at] = rng.choice(
            [b"[" * 3000, b"9" * 5000, b"\n", b"{", b"\xff", b"NaN", b"1e999", b"null"]
        )
    path.write_bytes(bytes(data))
