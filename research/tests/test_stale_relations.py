"""The study of old cosines and orthogonal distances: its formulas, its sums, its committed table."""

import json
import sys
from pathlib import Path

import pytest
import torch

from flrce.core import relations

HOME = Path(__file__).parents[1]


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(HOME / "studies"))
    import stale_relations

    yield stale_relations
    sys.modules.pop("stale_relations", None)


def test_the_approach_to_a_line_by_hand(study):
    w, v = torch.tensor([0.0, 4.0]), torch.tensor([2.0, 0.0])  # the x axis, 4 away
    approach = study.compute_approach
    assert approach(w, torch.tensor([7.0, -1.0]), v) == pytest.approx(1 - 3 / 4)
    assert approach(w, torch.tensor([7.0, 1.0]), v) == pytest.approx(1 - 5 / 4)
    assert approach(w, torch.tensor([0.0, 40.0]), v) == -1  # 1 - 44/4, cut off
    assert approach(w, torch.tensor([5.0, 0.0]), v) == pytest.approx(0)  # along the line
    assert study.compute_cosine(w, torch.tensor([3.0, 4.0])) == pytest.approx(0.8)


def test_estimates_are_those_of_the_selector(study):
    """Client 1's update of round 1 is compared with client 0's of round 5."""
    rng = torch.Generator().manual_seed(0)
    start, w, u, v = (torch.randn(6, generator=rng) for _ in range(4))
    for anchored, here in ((False, w), (True, w - start)):
        state = relations.init_relationships(2, 6)
        for t, model, k, update in ((1, start, 1, v), (5, w, 0, u)):
            index = torch.tensor([k])
            state = relations.record_updates(state, t, model, index, update[None], anchored)
        rows, _ = relations.compute_relationships(state, 5, w, torch.tensor([0]), u[None], anchored)
        assert float(rows[0, 1]) == pytest.approx(study.compute_approach(here, u, v), abs=1e-5)


def test_pairs_are_summed_up_by_age(study):
    pairs = study.Pairs()
    for i in range(40):
        true = 0.5 if i % 2 else -0.5
        pairs.age.append(3 if i < 30 else 12)
        pairs.true.append(true + i / 1000)
        pairs.benefit.append(true + i / 1000)
        for name in study.ESTIMATES:
            pairs.estimates[name].append(true + i / 1000 + 0.1)
        pairs.estimates["eq. 6, origin"][-1] = -1.0 - i
    lines = {(x["low"], x["high"]): x for x in study.summarize_pairs(pairs)}
    assert set(lines) == {(2, 4), (2, study.ROUNDS)}  # ten pairs of 12 rounds are too few
    young = lines[2, 4]
    assert young["pairs"] == 30
    assert young["conflicts"] == 0.5
    assert young["stale cosine"] == pytest.approx(
        {"error": 0.1, "sign": 1.0, "rank": 1.0, "benefit": 1.0}
    )
    assert young["eq. 6, origin"]["sign"] == 0.5  # it is always negative


def test_the_committed_table_follows_from_the_lines(study):
    folder = HOME / "results" / "relations"
    lines = [json.loads(row) for row in (folder / "stale.jsonl").read_text().splitlines()]
    assert study.build_tables(lines) == (folder / "stale.md").read_text()


def test_statements_of_a_script_run_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HOME / "verification"))
    monkeypatch.delitem(sys.modules, "released", raising=False)
    import released

    folder = tmp_path / released.REPOSITORIES["fedasync"].name
    folder.mkdir()
    text = "import nothing\nfor i in x:\n    y = f(i)\n    a = i + 1\n    b = a * 2\n    g(b)\n"
    (folder / "s.py").write_text(text)
    names = {"i": 4}
    exec(released.load_statements(tmp_path, "fedasync", "s.py", "a", "b"), names)
    assert (names["a"], names["b"]) == (5, 10)
    with pytest.raises(SystemExit, match="no statements"):
        released.load_statements(tmp_path, "fedasync", "s.py", "a", "z")
    sys.modules.pop("released", None)
