"""Shared by the tests of flrce-research: helpers of the core's tests on the path."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "faults")]
