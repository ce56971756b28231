"""Shared by all tests: hypothesis without deadlines (first torch calls are slow), the oracle on the path."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
settings.register_profile(
    "flrce", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("flrce")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real data in its packed form; tests that need it skip where there is none."""
    folder = Path(os.environ.get("FLRCE_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "load.py").exists():
        pytest.skip("no real data: set FLRCE_TEST_DATA")
    return folder
