"""The study's tables come from its rows, and the page says what they say."""

import importlib.util
import json
import re
import types
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("plan", ["fleets", "fleets-carbon"])
def test_the_page_has_the_study_s_ratios(plan, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("fleets", HOME / "research/studies/fleets.py")
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    (tmp_path / "rows.jsonl").write_bytes(
        (HOME / f"benchmarks/results/{plan}/rows.jsonl").read_bytes()
    )
    study.tables(types.SimpleNamespace(plan=plan, folder=tmp_path))
    told = capsys.readouterr().out
    assert told == (HOME / f"benchmarks/results/{plan}/fleets.md").read_text()
    page = (HOME / "research/docs/fleets.md").read_text()
    ratios = set(re.findall(r"\d\.\d\d \(\d\.\d\d to \d\.\d\d\)", told.partition("\n- ")[0]))
    assert len(ratios) > 15
    left = {
        "1.00 (1.00 to 1.00)",
        "1.47 (1.04 to 2.08)",
        "1.47 (1.09 to 2.00)",
    }  # clean hours within one night
    assert {ratio for ratio in ratios if ratio not in page} <= left


def test_the_page_has_the_meter_s_errors():
    spec = importlib.util.spec_from_file_location("joules", HOME / "benchmarks/joules.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    results = json.loads((HOME / "benchmarks/results/joules.json").read_text())
    told = bench.page(results)
    assert told == (HOME / "benchmarks/results/joules.md").read_text()
    for row in (
        "| timed | a network | 5% | 20% | -38%",
        "| two powers | a network | 11% | 33% | -47%",
        "| linear | a network | 39% | 74% | +150%",
    ):
        assert row in told
    rows = [
        {"net": n, "size": 1, "flops": f, "tensors": k, "seconds": 1.0, "joules": 2 * k + f / 1e12}
        for n, f, k in (("a", 1e12, 1), ("b", 3e12, 5), ("c", 9e12, 2))
    ]
    assert (
        max(abs(e) for _, e in bench.errors(bench.MODELS["launches"], rows, "net")) < 1e-9
    )  # it is that model
    assert max(abs(e) for _, e in bench.errors(bench.MODELS["linear"], rows, "net")) > 0.1
