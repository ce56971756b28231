"""Shared by the tests of flrce-research: helpers of the core's tests on the path."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
LENDING = ("helpers", "core", "cli", "report", "simulation", "faults")
sys.path[:0] = [str(TESTS / folder) for folder in LENDING]
