"""Rows 10 to 12: damaged payloads of every compressor at the gate (see payload_fuzz.py)."""

import random

import pytest
from payload_fuzz import COMPRESSORS, case

from flrce.methods.registry import PIECES


@pytest.mark.row(12, "damaged payloads of every compressor", "a reason or a sound update, < 50 MB")
@pytest.mark.parametrize("seed", range(4))
def test_damaged_codes(seed):
    passed = [case(random.Random(f"codes {seed} {i}")) for i in range(150)]
    assert any(passed)  # as a turned bit of a sign or a level does
    assert sum(passed) < 75


def test_every_compressor_is_among_them():
    assert {type(each) for each in COMPRESSORS} >= set(PIECES["compressor"].values())
