"""flrce verify runs/a, flrce verify runs/a runs/b"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import click
from safetensors import SafetensorError
from safetensors.torch import load_file

from flrce.errors import BadInput, format_one_line
from flrce.storage.disk import hash_file
from flrce.storage.limited import (
    MAX_DOCUMENT_BYTES,
    describe_error,
    open_regular,
    read_limited,
    split_lines,
)
from flrce.storage.manifest import find_damage
from flrce.storage.seal import SEAL_FILE, SEALED_FILES, find_damaged_files, read_seal

LEDGER_FILES = ("rounds.jsonl", "clients.jsonl", "relations.jsonl")
TENSOR_FILES = ("model.safetensors", "last.safetensors", "relations.safetensors")
DOCUMENT_FILES = ("partition.json", "final.json", "summary.json")
COMPARED_FILES = (*DOCUMENT_FILES[:1], *LEDGER_FILES, *TENSOR_FILES, *DOCUMENT_FILES[1:])
MACHINE_KEYS = ("versions", "hardware")  # of summary.json: where a run ran, not what came of it


@dataclass(frozen=True)
class RunDifference:
    """One place where two runs part."""

    file: str
    where: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return format_one_line(
            f"{self.file}: {self.where}: {_shorten_value(self.a)} against {_shorten_value(self.b)}"
        )


def verify_runs(a: Path, b: Path | None, as_json: bool) -> None:
    """Check a run's files, or compare two runs. Exit code 1: something differs."""
    if b is None:
        return check_run_files(a, as_json)
    differences = list(compare_run_files(a, b))
    if as_json:
        print(json.dumps([vars(d) for d in differences], indent=1, default=str))
    elif not differences:
        print(f"identical: {', '.join(_list_compared_files(a))}")
    else:
        print("\n".join(str(d) for d in differences))
    if differences:
        raise click.exceptions.Exit(1)


def check_run_files(folder: Path, as_json: bool) -> None:
    """Check every file of a run, its checkpoint included, against its hash."""
    _refuse_unless_run(folder)
    if not read_seal(folder):
        raise BadInput(
            f"{folder} has no {SEAL_FILE}: it has not ended yet, or an earlier version wrote it;"
            " end it with --resume"
        )
    count, problems = find_damage(folder)
    if as_json:
        print(json.dumps({"files": count, "problems": problems}, indent=1))
    else:
        whole = f"whole: {count} files are as they were written"
        print("\n".join(map(format_one_line, problems)) if problems else whole)
    if problems:
        raise click.exceptions.Exit(1)


def compare_run_files(a: Path, b: Path) -> Iterator[RunDifference]:
    """The first difference in every file of two runs; then equal files that are not as written."""
    for folder in (a, b):
        _refuse_unless_run(folder)
    different = list(_find_differences(a, b))
    yield from different
    names = {difference.file for difference in different}
    yield from (broken for broken in _find_broken_seals(a, b) if broken.file not in names)


def _find_differences(a: Path, b: Path) -> Iterator[RunDifference]:
    for name in _list_compared_files(a) | dict.fromkeys(_list_compared_files(b)):
        one, other = a / name, b / name
        if not (os.path.lexists(one) and os.path.lexists(other)):
            there = ["present" if os.path.lexists(path) else "missing" for path in (one, other)]
            yield RunDifference(name, "file", *there)
            continue
        try:
            if hash_file(one) != hash_file(other):
                yield from islice(_compare_file(one, other), 1)
        except (OSError, ValueError, RecursionError, SafetensorError) as why:
            raise BadInput(
                f"{name} cannot be compared: {describe_error(why)}; is one of the runs damaged?"
            ) from why


def _refuse_unless_run(folder: Path) -> None:
    if not any(os.path.lexists(folder / name) for name in ("rounds.jsonl", SEAL_FILE)):
        raise BadInput(
            f"{folder} is no run directory: it has no rounds.jsonl; name a folder that `flrce run`"
            " wrote"
        )


def _find_broken_seals(a: Path, b: Path) -> Iterator[RunDifference]:
    """Files that are not as either run wrote them: equal bytes then say nothing about the runs."""
    problems = [
        {line.partition(": ")[0]: line.partition(": ")[2] for line in _list_damage(each)}
        for each in (a, b)
    ]
    for name in problems[0] | problems[1]:
        yield RunDifference(name, SEAL_FILE, *(each.get(name, "as written") for each in problems))


def _list_damage(folder: Path) -> list[str]:
    marks = {name: mark for name, mark in read_seal(folder).items() if name in SEALED_FILES}
    return find_damaged_files(folder, marks)


def _list_compared_files(folder: Path) -> dict[str, None]:
    """What is compared, in the order in which a difference would arise."""
    return {name: None for name in COMPARED_FILES if os.path.lexists(folder / name)}


def _compare_file(a: Path, b: Path) -> Iterator[RunDifference]:
    if a.name in LEDGER_FILES:
        yield from _compare_ledgers(a, b)
    elif a.name in TENSOR_FILES:
        yield from _compare_tensors(a, b)
    else:
        one, other = (json.loads(read_limited(path, MAX_DOCUMENT_BYTES)) for path in (a, b))
        for where, x, y in _compare_fields(one, other):
            if where.split(".")[0] not in MACHINE_KEYS:
                yield RunDifference(a.name, where, x, y)


def _compare_ledgers(a: Path, b: Path) -> Iterator[RunDifference]:
    with open_regular(a) as left, open_regular(b) as right:
        pairs = zip_longest(split_lines(left, half=True), split_lines(right, half=True))
        for line, (x, y) in enumerate(pairs, start=1):
            if x != y:
                rows = (json.loads(text) if text else None for text in (x, y))
                yield from _compare_ledger_line(a.name, line, *rows)


def _compare_ledger_line(name: str, line: int, one: Any, other: Any) -> Iterator[RunDifference]:
    """Where one line of two ledgers differs; None: the file has ended before."""
    if not all(row is None or isinstance(row, dict) for row in (one, other)):
        raise ValueError(f"line {line} is no table")
    known = one or other or {}
    at = f"line {line}, round {known.get('t')}"
    at += f", client {known['client']}" if "client" in known else ""
    if one is None or other is None:
        yield RunDifference(name, at, *("present" if row else "missing" for row in (one, other)))
    else:
        for where, p, q in _compare_fields(one, other):
            yield RunDifference(name, f"{at}, {where}", p, q)


def _compare_tensors(a: Path, b: Path) -> Iterator[RunDifference]:
    one, other = load_file(a), load_file(b)
    for name in sorted(one.keys() | other.keys()):
        x, y = one.get(name), other.get(name)
        if x is None or y is None:
            states = ["missing" if t is None else "present" for t in (x, y)]
            yield RunDifference(a.name, name, *states)
        elif x.shape != y.shape or x.dtype != y.dtype:
            kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (x, y)]
            yield RunDifference(a.name, name, *kinds)
        else:
            apart = ~((x == y) | ((x != x) & (y != y)))
            for index in apart.nonzero()[:1].tolist():
                at = tuple(index)
                worst = float((x.double() - y.double()).abs().max())
                more = f"(and {int(apart.sum()) - 1} more, largest {worst:.3g})"
                where = f"{name}[{', '.join(map(str, at))}] {more}"
                yield RunDifference(a.name, where, x[at].item(), y[at].item())


def _compare_fields(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Places where two documents differ, depth first."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one | other:
            inner = f"{path}.{key}" if path else str(key)
            if (key in one) != (key in other):
                yield inner, one.get(key, "missing"), other.get(key, "missing")
            else:
                yield from _compare_fields(one[key], other[key], inner)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, (x, y) in enumerate(zip(one, other, strict=True)):
            yield from _compare_fields(x, y, f"{path}[{i}]")
    elif one != other:
        yield path, one, other


def _shorten_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
