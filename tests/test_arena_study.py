"""The committed arena: nothing is run, every cell of its plan is recorded, and its tables come out as committed."""

import csv
from pathlib import Path

import pytest

from flrce.apps import cli
from flrce.arena import records

COMMITTED = Path(__file__).resolve().parent.parent / "results" / "arena"


def test_the_committed_arena_opens_and_gives_its_tables(tmp_path, capsys):
    asked = ["arena", str(COMMITTED / "plan.toml"), "--against", str(COMMITTED), "--out", str(tmp_path)]
    assert cli.main(asked) == 0
    assert not (tmp_path / "cells").exists()
    texts = [(folder / "leaderboard.csv").read_text() for folder in (tmp_path, COMMITTED)]
    made, kept = (list(csv.DictReader(text.splitlines())) for text in texts)
    assert len(made) == len(kept) > 300
    for mine, theirs in zip(made, kept, strict=True):
        assert [mine[key] for key in ("axis", "share", "method")] == [
            theirs[key] for key in ("axis", "share", "method")
        ]
        for key in ("rank", "low", "high", "fed-heart", "digits-labels"):
            assert float(mine[key] or 0) == pytest.approx(float(theirs[key] or 0), abs=0.02)
    found = records.unpack(COMMITTED)
    assert len({p.method for p in found}) >= 30
    assert len({p.seed for p in found if p.seed}) == 5
    told = capsys.readouterr().out
    assert "at equal joules" in told
