"""The selection study's own arithmetic: endpoints, Holm, fleets on one pool, the price of a
target.
"""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "studies"))
import selection

from flrce_reproduction.execute import load_dataset, read_dataset_sizes


def test_the_endpoint_is_the_last_sweep():
    assert selection.endpoint([0.1, 0.4, 0.6], 2) == pytest.approx(0.5)
    assert selection.endpoint([0.1, 0.4, None, 0.6], 2) == pytest.approx(0.6)
    assert selection.endpoint([0.1, 0.4, None, None], 2) == pytest.approx(0.4)
    assert selection.endpoint([None], 3) == 0


def test_holm_by_hand():
    """.01 x 3, then .02 x 2, then .03 x 1 but never below the one before."""
    np.testing.assert_allclose(selection.holm(np.array([0.03, 0.01, 0.02])), [0.04, 0.03, 0.04])


@pytest.mark.parametrize("name", ["selection-cifar10", "selection-digits", "selection-decide"])
def test_plans_name_what_there_is(name):
    plan = json.loads((Path(selection.__file__).parent / "plans" / f"{name}.json").read_text())
    for batch in plan:
        assert set(batch["cells"]) <= set(selection.CELLS)
        for cell, candidate in batch.get("primary", ()):
            keys = [key for _, keys in selection.wanted(plan) for key in keys]
            assert any(key[1:3] == (cell, candidate) for key in keys)
            assert any(key[1:3] == (cell, "chance") for key in keys)


def test_fleets_on_one_pool_have_their_own_labels():
    pool, facts = load_dataset("digits", None), read_dataset_sizes("digits", None)
    keys = [
        ("digits", cell, "chance", seed)
        for cell in ("labels, P=10", "wrong labels")
        for seed in (0, 1)
    ]
    jobs = {key: selection.experiment(*key, facts, 10, "cpu", {}) for key in keys}
    apart = {key: job.federate(pool) for key, job in jobs.items()}
    with selection.one_pool(jobs, pool) as shared:
        assert len(shared.y) == 3 * len(
            pool.y
        )  # the labels as they are, and two fleets' wrong ones
        for key, job in jobs.items():
            made = job.federate(shared)
            for mine, own in zip(made.train, apart[key].train, strict=True):
                assert (shared.y[mine] == apart[key].source.y[own]).all()
                assert (shared.x[mine] == pool.x[own]).all()
    assert jobs[keys[0]].federate(pool).source is pool


def test_the_price_of_a_target(tmp_path):
    """Half of the joules by half of the rounds on one seed, a quarter on the other: the geometric
    mean is .35.
    """

    def row(name, seed, averaged):
        told = {
            "dataset": "digits",
            "cell": "labels, P=10",
            "seed": seed,
            "candidate": name,
            "averaged": averaged,
            "end": 1,
        }
        return told | {
            key: [2.0] * len(averaged) for key in ("joules", "active", "bytes_up", "bytes_down")
        }

    rows = [
        row("uniform, 4 bits", 0, [0.1, 0.9]),
        row("chance, 4 bits", 0, [0.9, 0.9]),
        row("uniform, 4 bits", 1, [0.1, 0.2, None, 0.9]),
        row("chance, 4 bits", 1, [0.9, 0.9]),
        row("chance, 4 bits", 2, [0.1, 0.1]),
    ]
    with gzip.open(tmp_path / "selection-0.jsonl.gz", "wt") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    told = selection.headline(tmp_path, {"digits": 0.8})
    assert "| chance, 4 bits | 2 of 3 | 0.35 [" in told
