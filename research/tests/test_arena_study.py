"""The committed arena: nothing is run, every cell of its plan is recorded, and its tables come out
as committed.
"""

import csv
from collections import Counter
from pathlib import Path

import pytest

from flrce.cli import cli
from flrce_arena import records

TASKS = ("cifar10-labels", "cifar10-sizes", "speech", "shakespeare", "fed-heart")
COMMITTED = Path(__file__).resolve().parent.parent / "results" / "arena"


def test_the_committed_arena_opens_and_gives_its_tables(tmp_path, capsys):
    asked = [
        "arena",
        str(COMMITTED / "plan.toml"),
        "--against",
        str(COMMITTED),
        "--out",
        str(tmp_path),
    ]
    assert cli.main(asked) == 0
    assert not (tmp_path / "cells").exists()
    texts = [(folder / "leaderboard.csv").read_text() for folder in (tmp_path, COMMITTED)]
    made, kept = (list(csv.DictReader(text.splitlines())) for text in texts)
    assert len(made) == len(kept) > 300
    for mine, theirs in zip(made, kept, strict=True):
        assert [mine[key] for key in ("axis", "share", "method")] == [
            theirs[key] for key in ("axis", "share", "method")
        ]
        for key in ("rank", "low", "high", *TASKS):
            assert float(mine[key] or 0) == pytest.approx(float(theirs[key] or 0), abs=0.02)
    found = records.unpack_records(COMMITTED)
    assert {p.task for p in found} == set(TASKS)
    judged = Counter((p.task, p.method) for p in found if p.seed)
    assert set(judged.values()) == {5}
    assert (
        sum(all((task, method) in judged for task in TASKS) for method in {p.method for p in found})
        >= 30
    )
    told = capsys.readouterr().out
    assert "at equal joules" in told
