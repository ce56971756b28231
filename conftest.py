"""Shared by all tests: hypothesis without deadlines (first torch calls are slow), the oracle on the
path.
"""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent
#: helpers, and folders whose tests lend parts to tests of other folders
SHARED = ("helpers", "core", "methods", "report", "storage", ".")
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "contrib")]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in SHARED]
settings.register_profile(
    "flrce",
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("flrce")

#: begun first, so that of two workers none is left with a long file at the end
LONGEST = (
    "test_recipes",
    "test_strategy",
    "test_reproduce",
    "test_gpu_scheduler",
    "test_native",
    "test_extensions",
    "test_browser",
    "test_arena",
    "test_methods",
    "test_app",
    "test_task_kinds",
    "test_report",
    "test_lora",
    "test_simulator",
    "test_fleet",
    "test_nets",
    "test_remote_runs",
    "test_trainer",
    "test_marginal_gain",
    "test_fleet_state",
    "test_whatif",
    "test_server_memory",
    "test_variants",
    "test_secure",
    "test_pending_tasks",
    "test_battery",
    "test_sampling",
    "test_selectors",
    "test_client_evaluation",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(autouse=True)
def _forget_written_modules(tmp_path_factory):
    """Modules that a test wrote and imported are forgotten: another test's `mine` is another."""
    before = set(sys.modules)
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if isinstance(file, str) and file.startswith(written):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _forget_costs():
    """Rows that a run added to the table of costs."""
    from flrce.core.cost_table import COSTS

    before = dict(COSTS)
    yield
    COSTS.clear()
    COSTS.update(before)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real data in its packed form; tests that need it skip where there is none."""
    folder = Path(os.environ.get("FLRCE_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "load.py").exists():
        pytest.skip("no real data: set FLRCE_TEST_DATA")
    return folder


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """A cache of a test file's own: kernels are built there for the first time."""
    before = os.environ.get("FLRCE_CACHE")
    os.environ["FLRCE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("FLRCE_CACHE")
    if before is not None:
        os.environ["FLRCE_CACHE"] = before
