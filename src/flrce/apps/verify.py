"""flrce verify runs/a, flrce verify runs/a runs/b"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
from safetensors import SafetensorError
from safetensors.torch import load_file

from flrce.errors import BadInput, brief
from flrce.store.disk import hashed
from flrce.store.limited import MAX_DOCUMENT_BYTES, describe_error, open_regular, read_limited, split_lines
from flrce.store.manifest import find_damage
from flrce.store.seal import SEAL, SEALED, damaged, sealed

LEDGERS = ("rounds.jsonl", "clients.jsonl", "relations.jsonl")
TENSORS = ("model.safetensors", "last.safetensors", "relations.safetensors")
DOCUMENTS = ("partition.json", "final.json", "summary.json")
COMPARED = (*DOCUMENTS[:1], *LEDGERS, *TENSORS, *DOCUMENTS[1:])
MACHINE = ("versions", "hardware")  # of summary.json: where a run ran, not what came of it


@dataclass(frozen=True)
class Difference:
    """One place where two runs part."""

    file: str
    where: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return brief(f"{self.file}: {self.where}: {_short(self.a)} against {_short(self.b)}")


def verify(a: Path, b: Path | None, as_json: bool) -> None:
    """Check a run's files, or compare two runs: the first difference of each file. Exit code 1: something differs."""
    if b is None:
        return check(a, as_json)
    found = list(compare(a, b))
    if as_json:
        print(json.dumps([vars(d) for d in found], indent=1, default=str))
    elif not found:
        print(f"identical: {', '.join(_files(a))}")
    else:
        print("\n".join(str(d) for d in found))
    if found:
        raise click.exceptions.Exit(1)


def check(folder: Path, as_json: bool) -> None:
    """Every file of one run against the hashes that were written with it, those of its checkpoint included."""
    _refuse_unless_run(folder)
    if not sealed(folder):
        raise BadInput(
            f"{folder} has no {SEAL}: it has not ended yet, or an earlier version wrote it; end it with --resume"
        )
    count, problems = find_damage(folder)
    if as_json:
        print(json.dumps({"files": count, "problems": problems}, indent=1))
    else:
        whole = f"whole: {count} files are as they were written"
        print("\n".join(map(brief, problems)) if problems else whole)
    if problems:
        raise click.exceptions.Exit(1)


def compare(a: Path, b: Path) -> Iterator[Difference]:
    """The first difference in every file of two run directories."""
    for folder in (a, b):
        _refuse_unless_run(folder)
    for name in _files(a) | dict.fromkeys(_files(b)):
        one, other = a / name, b / name
        if not (os.path.lexists(one) and os.path.lexists(other)):
            there = ["present" if os.path.lexists(path) else "missing" for path in (one, other)]
            yield Difference(name, "file", *there)
            continue
        try:
            if hashed(one) != hashed(other) and (first := next(_inside(one, other), None)) is not None:
                yield first
        except (OSError, ValueError, RecursionError, SafetensorError) as why:
            raise BadInput(f"{name} cannot be compared: {describe_error(why)}; is one of the runs damaged?") from why
    yield from _broken_seals(a, b)


def _refuse_unless_run(folder: Path) -> None:
    if not any(os.path.lexists(folder / name) for name in ("rounds.jsonl", SEAL)):
        raise BadInput(f"{folder} is no run directory: it has no rounds.jsonl; name a folder that `flrce run` wrote")


def _broken_seals(a: Path, b: Path) -> Iterator[Difference]:
    """Files that are not as either run wrote them: equal bytes then say nothing about the runs."""
    problems = [{line.partition(": ")[0]: line.partition(": ")[2] for line in _damage_of(each)} for each in (a, b)]
    for name in problems[0] | problems[1]:
        yield Difference(name, SEAL, *(each.get(name, "as written") for each in problems))


def _damage_of(folder: Path) -> list[str]:
    marks = sealed(folder)
    return damaged(folder, {name: mark for name, mark in marks.items() if name in SEALED})


def _files(folder: Path) -> dict[str, None]:
    """What is compared, in the order in which a difference would arise."""
    return {name: None for name in COMPARED if os.path.lexists(folder / name)}


def _inside(a: Path, b: Path) -> Iterator[Difference]:
    if a.name in LEDGERS:
        yield from _lines(a, b)
    elif a.name in TENSORS:
        yield from _tensors(a, b)
    else:
        one, other = (json.loads(read_limited(path, MAX_DOCUMENT_BYTES)) for path in (a, b))
        for where, x, y in _fields(one, other):
            if where.split(".")[0] not in MACHINE:
                yield Difference(a.name, where, x, y)


def _lines(a: Path, b: Path) -> Iterator[Difference]:
    with open_regular(a) as left, open_regular(b) as right:
        pairs = zip_longest(split_lines(left, half=True), split_lines(right, half=True))
        for line, (x, y) in enumerate(pairs, start=1):
            if x != y:
                yield from _line(a.name, line, *(json.loads(text) if text else None for text in (x, y)))


def _line(name: str, line: int, one: Any, other: Any) -> Iterator[Difference]:
    """Where one line of two ledgers differs; None: the file has ended before."""
    if not all(row is None or isinstance(row, dict) for row in (one, other)):
        raise ValueError(f"line {line} is no table")
    known = one or other or {}
    at = f"line {line}, round {known.get('t')}" + (f", client {known['client']}" if "client" in known else "")
    if one is None or other is None:
        yield Difference(name, at, "present" if one else "missing", "present" if other else "missing")
    else:
        for where, p, q in _fields(one, other):
            yield Difference(name, f"{at}, {where}", p, q)


def _tensors(a: Path, b: Path) -> Iterator[Difference]:
    one, other = load_file(a), load_file(b)
    for name in sorted(one.keys() | other.keys()):
        x, y = one.get(name), other.get(name)
        if x is None or y is None:
            yield Difference(a.name, name, *("missing" if t is None else "present" for t in (x, y)))
        elif x.shape != y.shape or x.dtype != y.dtype:
            yield Difference(a.name, name, f"{x.dtype} {tuple(x.shape)}", f"{y.dtype} {tuple(y.shape)}")
        else:
            apart = ~((x == y) | ((x != x) & (y != y)))
            for index in apart.nonzero()[:1].tolist():
                at = tuple(index)
                worst = float((x.double() - y.double()).abs().max())
                where = f"{name}[{', '.join(map(str, at))}] (and {int(apart.sum()) - 1} more, largest {worst:.3g})"
                yield Difference(a.name, where, x[at].item(), y[at].item())


def _fields(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Places where two documents differ, depth first."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one | other:
            inner = f"{path}.{key}" if path else str(key)
            if (key in one) != (key in other):
                yield inner, one.get(key, "missing"), other.get(key, "missing")
            else:
                yield from _fields(one[key], other[key], inner)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, (x, y) in enumerate(zip(one, other, strict=True)):
            yield from _fields(x, y, f"{path}[{i}]")
    elif one != other:
        yield path, one, other


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
