"""Records of an arena that somebody else wrote: read within limits, and held against the same tasks."""

import gzip
import json
import os
import resource
from pathlib import Path

import pytest
from harness import in_child

from flrce.errors import BadInput
from flrce_arena import records
from flrce_arena.cli import require_same_tasks


def test_an_arena_is_not_held_against_another_task_of_the_same_name() -> None:
    base = {"tasks": {"a": {"data": {"name": "digits"}}, "b": {"data": {"name": "mnist"}}}}
    require_same_tasks(
        {"tasks": {"a": {"data": {"name": "digits"}, "rounds": 9}}}, base, Path("p.toml")
    )
    require_same_tasks({"methods": {}}, base, Path("p.toml"))
    with pytest.raises(BadInput, match="task 'b' has another data"):
        require_same_tasks({"tasks": {"b": {"data": {"name": "digits"}}}}, base, Path("p.toml"))


def test_records_are_unpacked_within_a_limit(tmp_path):
    """Three hundred megabytes in one line, and in many: refused long before they are in memory."""
    cell = {
        "schema": 2,
        "task": "a",
        "method": "b",
        "seed": 0,
        "tried": {},
        "fingerprint": "",
        "metric": "accuracy",
        "lower": False,
        "recipe": {},
        "rounds": {name: [] for name in (*records.KEPT_FIELDS, "value")},
    }
    line = json.dumps(cell).encode() + b" " * 10**6 + b"\n"
    for name, piece in (("long", b" " * 10**6), ("many", line)):
        with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
            for _ in range(300):
                file.write(piece)

    def child():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for name, why in (("long", "a line of more than"), ("many", "unpacks to more than")):
            with pytest.raises(BadInput, match=why):
                records.unpack_records(tmp_path / name)
        for name in ("/dev/zero", tmp_path / "pipe"):
            with pytest.raises(BadInput, match="not a regular file"):
                records.unpack_records(Path(name))
        assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 200e6

    os.mkfifo(tmp_path / "pipe")
    assert in_child(child) == 0
