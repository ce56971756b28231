"""The frontier and the headline from lines of runs, by hand."""

import gzip
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "studies"))

import averages
import frontier
import headline as study
import headline_tables as headline

SEEDS = (500, 501, 502, 503)


def line(row, seed, level, joules, task="digits", T=100):
    """A run whose model is at `level` from the first round on and spends `joules` in each."""
    series = {
        "handed": [level] * T,
        "last": [level] * T,
        "joules": [joules] * T,
        "active": [joules] * T,
        "bytes_up": [1] * T,
        "bytes": [2] * T,
    }
    return {"key": [task, row, seed], "sweep": 10, "stopped": None, **series}


def kept(folder, lines):
    with gzip.open(folder / "headline-0.jsonl.gz", "wt") as f:
        f.writelines(json.dumps(each) + "\n" for each in lines)
    return folder


def lines():
    for i, seed in enumerate(SEEDS):
        wobble = 0.01 * i  # the same for every row: differences by seed are exact
        yield line("fedavg + q4-short", seed, 0.80 + wobble, 1000.0)
        yield line("fedavg", seed, 0.90 + wobble, 4000.0)
        yield line("flrce + q4-short", seed, 0.82 + wobble, 1000.0)


def test_a_front_has_what_nothing_cheaper_reaches(tmp_path):
    found = frontier.curves(headline.even(headline.read(kept(tmp_path, lines()))), "digits")
    means = frontier.mean(found, SEEDS)
    # flrce reaches 83.5 % with 1 kJ; FedAvg's 91.5 % first cost 4 kJ; the short one is never on the
    # front
    assert [(row, round(level, 6), cost) for row, level, cost in frontier.front(means, 1)] == [
        ("flrce + q4-short", 83.5, 1000.0),
        ("fedavg", 91.5, 4000.0),
    ]


def test_budgets_are_compared_on_seeds_that_did_not_choose(tmp_path):
    found = frontier.curves(headline.even(headline.read(kept(tmp_path, lines()))), "digits")
    shares = {
        share: (budget, gaps, rows) for share, budget, gaps, rows in frontier.budgets(found, 1)
    }
    budget, gaps, rows = shares[1.0]
    # 100 rounds of 1 kJ: FedAvg has had 25 of its rounds, 90 %, so it is the best of the others, by
    # 8 points
    assert budget == 100_000
    assert rows == [["flrce + q4-short", "fedavg"]] * 2
    assert gaps == pytest.approx([-8.0] * 4)
    middle, half = frontier.interval(gaps)
    assert frontier.verdict(middle, half) == "the others'"


def test_a_table_and_a_picture(tmp_path):
    made = frontier.tables(kept(tmp_path, lines()))
    told = made["frontier-digits"] + made["frontier-budgets-digits"]
    assert (
        "| fedavg | 91.5 ± 2.1 | 400 | 0.0002 | 1 | 1 | 100 % | 100 % |" in told
    )  # sd 1.29, t = 3.18, 4 seeds
    assert "| 1 x: 100 kJ | flrce + q4-short | fedavg | -8.00 ± 0.00 | the others' |" in told
    frontier.picture(tmp_path)
    assert (tmp_path / "frontier.svg").stat().st_size > 1000


def test_runs_that_time_cut_off_count_with_the_rounds_that_all_have(tmp_path):
    short = [line("uniform, 4 bits", 390, 0.5, 1.0, T=60), line("default", 400, 0.5, 1.0, T=100)]
    short[1]["stopped"] = 70
    few = [
        line("uniform, 4 bits", 390, 0.5, 1.0, task="cifar10", T=49),
        line("default", 401, 0.5, 1.0, T=49),
    ]
    found = headline.even(headline.read(kept(tmp_path, short + few)))
    assert set(found) == {
        ("digits", "uniform, 4 bits", 390),
        ("digits", "default", 400),
    }  # 49 is less than half
    both = found["digits", "default", 400]
    assert len(both["last"]) == len(both["joules"]) == 60
    assert both["stopped"] is None  # it ended behind these rounds


def test_the_longer_of_two_lines_of_a_run_counts(tmp_path):
    lines = [line("uniform", 400, 0.5, 1.0, T=100), line("uniform", 400, 0.5, 1.0, T=60)]
    assert len(headline.read(kept(tmp_path, lines))["digits", "uniform", 400]["last"]) == 100


def test_the_page_has_the_headline_that_the_runs_give(tmp_path):
    root = Path(__file__).resolve().parents[2]
    page = tmp_path / "page.md"
    page.write_text((root / "research/docs/target-cost.md").read_text())
    made = headline.tables(root / "research/results/headline")
    headline.embed(made, page)
    assert page.read_text() == (root / "research/docs/target-cost.md").read_text()
    assert page.read_text().count("<!-- headline-") == 4
    assert (
        made["headline-joules"].count("1.00 [1.00, 1.00]")
        == made["headline-joules"].count("\n") - 2
    )  # the base


def test_a_share_of_seeds_has_its_exact_interval(tmp_path):
    # 10 of 10: the least share p with p^10 >= 0.025 is 0.6915; 1 of 2: 1 - sqrt(0.975) = 0.0126 to
    # sqrt(0.975) = 0.9874
    assert averages.share(10, 10) == "10 of 10 [69, 100]"
    assert averages.share(1, 2) == "1 of 2 [1, 99]"
    cell = next(iter(averages.CELLS))
    rows = [
        {
            "cell": cell,
            "seed": 0,
            "last": 0.5,
            "average": 0.60,
            "quarter": 0.6,
            "ours": 0.61,
            "flrce": 0.59,
        },
        {
            "cell": cell,
            "seed": 1,
            "last": 0.5,
            "average": 0.62,
            "quarter": 0.6,
            "ours": 0.63,
            "flrce": 0.65,
        },
    ]
    (tmp_path / "averages-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = averages.table(tmp_path).splitlines()[2].split(" | ")
    assert told[:7] == [f"| {cell}", "2", "50.0", "61.0", "60.0", "62.0", "62.0"]
    assert told[9] == "+1.00 ± 0.00"  # ours minus the plain average
    assert told[-2:] == ["2 of 2 [16, 100]", "1 of 2 [1, 99] |"]


def test_a_seed_counts_once_where_its_cells_are_one_observation(tmp_path):
    """Ours is 2 and 4 points above the plain average on the mean of two seeds' cells: 3 ± 12.7 (t =
    12.71, sd 1.41).
    """
    rows = [
        {
            "cell": cell,
            "seed": seed,
            "last": 0.5,
            "average": 0.5,
            "quarter": 0.5,
            "ours": 0.5 + gain,
            "flrce": 0.5,
        }
        for seed, gain in ((600, 0.02), (601, 0.04))
        for cell in averages.CELLS
    ]
    cut = {**rows[0], "seed": 602, "ours": 0.9}  # time ran out in its second cell
    with gzip.open(tmp_path / "averages-0.jsonl.gz", "wt") as f:
        f.writelines(json.dumps(row) + "\n" for row in [*rows, cut])
    told = [line.split(" | ") for line in averages.table(tmp_path).splitlines()]
    assert told[-1][:2] == ["| all, a seed's mean as one", "2"]
    assert told[-1][9] == "+3.00 ± 12.71"
    assert told[2][1] == "3"  # by cell, as planned, it counts
    assert told[-2][1] == str(2 * len(averages.CELLS) + 1)


def test_the_page_has_the_averages_that_the_runs_give():
    root = Path(__file__).resolve().parents[1]
    page = (root / "docs/average.md").read_text()
    assert f"<!-- averages -->\n{averages.table(root / 'results/averages')}<!-- end -->" in page


@pytest.mark.parametrize("arm", averages.ARMS)
def test_every_arm_is_an_experiment(arm):
    found = {averages.experiment(cell, arm, 600).data.name for cell in averages.CELLS}
    assert found == {"digits", "mnist-writers", "femnist", "smartwatch", "fed-heart"}


def test_the_page_has_the_frontier_that_the_runs_give(tmp_path):
    root = Path(__file__).resolve().parents[2]
    page = (root / "research/docs/frontier.md").read_text()
    for name, told in frontier.tables(root / "research/results/frontier").items():
        assert f"<!-- {name} -->\n{told}<!-- end -->" in page


@pytest.mark.parametrize("stack", [1, 2])
def test_a_run_that_time_cuts_off_keeps_its_rounds(tmp_path, monkeypatch, stack):
    for key, value in (("rounds", 3), ("clients", 8), ("per_round", 2)):
        monkeypatch.setitem(headline.PLAN["all"], key, value)
    monkeypatch.setitem(headline.PLAN["tasks"]["digits"]["train"], "steps", 1)
    monkeypatch.setitem(headline.PLAN, "seeds", [])
    options = Namespace(
        out=tmp_path, data=None, tasks="digits", device="cpu", stack=stack, share="0/1", seconds=1e9
    )
    pool, keys = (
        study.load_dataset("digits", None),
        [("digits", "default", 400), ("digits", "uniform", 400)][:stack],
    )
    cut = list(study.trained(keys, pool, options, stack > 1, until=0.0))
    assert [len(line["last"]) for line in cut] == [1] * stack
    study.run(options)
    found = headline.read(tmp_path)
    assert set(found) == {("digits", "uniform, 4 bits", seed) for seed in (390, 391)}
    assert all(len(line["last"]) == len(line["active"]) == 3 for line in found.values())
    before = (tmp_path / "headline-0.jsonl.gz").read_bytes()
    study.run(options)  # nothing is left to do
    assert (tmp_path / "headline-0.jsonl.gz").read_bytes() == before
