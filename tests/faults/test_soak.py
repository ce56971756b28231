"""A short soak on Flower's in-process grid; `benchmarks/soak.py --flower 500` is the long one."""

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import soak_flower

ROUNDS = 30


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    return soak_flower.soak(ROUNDS, folder), folder


@pytest.mark.row(2, "Flower server killed in every third segment of ten rounds", "BIT")
def test_a_killed_flower_server_loses_nothing_that_was_logged(soaked, seen):
    result, _ = soaked
    assert result.problems == ()
    assert result.kills == 1
    assert ROUNDS - result.kills <= result.logged <= ROUNDS
    seen(f"{ROUNDS} rounds, {result.kills} kill")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda rows: rows.pop(3), "the ledger has not each round once"),
        (lambda rows: rows[20].update(bytes_up=1), "bytes_up differs from the undisturbed run"),
        (lambda rows: rows[2].update(joules=9.0), "joules differs from the undisturbed run"),
        (lambda rows: rows[1].update(clock=-1), "committed lines changed after the kill"),
    ],
    ids=["lost", "bytes", "joules", "changed"],
)
def test_the_soak_sees_what_a_kill_could_lose(soaked, tmp_path, spoil, problem):
    folder = tmp_path / "killed"
    shutil.copytree(soaked[1] / "killed", folder)
    ledger = folder / "state" / "rounds.jsonl"
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    spoil(rows)
    ledger.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = soak_flower.compare_ledgers(folder, soaked[1] / "calm", ROUNDS)
    assert any(problem in each for each in problems)
