"""flrce advise: which trials run, how far, at what cost, and what is said in the end."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from test_arena import run_of
from test_remote_runs import posted

from flrce.config.experiment import Experiment
from flrce.core.intervals import confidence_interval
from flrce.errors import BadInput
from flrce_arena import advise, advise_cli, search
from flrce_arena.prior import FIRST_TRIALS, METHODS, PLAIN_METHOD

pytest.importorskip("optuna")
SMALL = Experiment(rounds=100, clients=6, per_round=3, train={"epochs": 1, "lr": 0.1})
FEW = {name: METHODS[name] for name in (PLAIN_METHOD, "fedadam + average")}


def make_search(methods=METHODS, rounds=100, limits=None, run=None) -> search.TrialSearch:
    experiment = SMALL.with_tables({"rounds": rounds})
    return search.TrialSearch(experiment, methods, limits or {"joules": 100.0}, Path(), run)


def scored(found: search.TrialSearch, *entries) -> search.TrialSearch:
    """Trials of (method, multiple, scores) whose rounds cost 1 J."""
    for method, multiple, *scores in entries:
        made = found.make_trial(len(found.trials), method, multiple)
        record = run_of(method, [0.1] * 2)
        found.trials.append(replace(made, record=record, scores=tuple(scores)))
    return found


def test_rungs_follow_from_the_budget():
    """100 J at 1 J a round: 3 rounds are 3 %. 1,000 J: 2 %. 10 J: a quarter of what the search
    has.
    """
    for joules, share in ((100.0, 0.03), (1000.0, 0.02), (10.0, 0.06)):
        found = scored(make_search(rounds=5000, limits={"joules": joules}), (PLAIN_METHOD, 1.0))
        assert found._rung_share(0) == pytest.approx(share)
        assert found._rung_share(1) == pytest.approx(3 * share)


def test_evaluations_are_booked_apart():
    """Rounds of 1 J, and 5 J more where the model is evaluated: 10 rounds with 2 evaluations."""
    record = run_of("x", [None, None, 0.5])
    record.rounds["joules"][:] = [1.0, 1.0, 6.0]
    trial = replace(scored(make_search(), (PLAIN_METHOD, 1.0)).trials[0], record=record)
    assert trial.estimate_cost("joules", 10, 2) == pytest.approx(20.0)


def test_equal_scores_take_the_lowest_rate():
    rivals = [
        (PLAIN_METHOD, 9.0, 0.81),
        (PLAIN_METHOD, 1.0, 0.80),
        ("fedadam + average", 1.0, 0.81),
    ]
    found = scored(make_search(), *rivals, (PLAIN_METHOD, 27.0, 0.5))
    ranked = [(t.method, t.multiple) for t in found._rank_trials(found.trials, 0)]
    assert ranked[:2] == [(PLAIN_METHOD, 1.0), ("fedadam + average", 1.0)]
    assert ranked[2:] == [(PLAIN_METHOD, 9.0), (PLAIN_METHOD, 27.0)]


def test_the_highest_rate_that_was_tried_is_not_advised():
    tried = [(PLAIN_METHOD, 1.0, 0.3), (PLAIN_METHOD, 3.0, 0.5)]
    assert scored(make_search(), *tried).choose_best().multiple == 1.0
    above = (PLAIN_METHOD, 9.0, 0.2)
    assert scored(make_search(), *tried, above).choose_best().multiple == 3.0
    only = ("scaffold + average", 3.0, 0.9)
    best = scored(make_search(), *tried, only).choose_best()
    assert best.label == "scaffold + average, lr 0.3"
    assert advise.find_rate_edge(best, [best]) == "highest"


def test_rates_beside_the_best_are_tried_before_any_trial_climbs():
    found = scored(make_search(), *((*entry, 0.1) for entry in FIRST_TRIALS))
    found.trials[1] = replace(found.trials[1], scores=(0.9,))  # FedAvg, 9 times the rate
    new = [(t.method, t.multiple) for t in found._list_first_trials()]
    assert new == [(PLAIN_METHOD, 27.0)]  # 3 times is among the first trials
    assert [t.number for t in found._list_climbing()] == [1, 0]  # two of six


def test_what_may_save_joules_is_tried_once_rates_are():
    """The best trial with four times the batch, half of the epochs, 4 bits; at their own costs."""
    trained = SMALL.with_tables({"train": {"batch": 8, "epochs": 4}})
    found = search.TrialSearch(trained, FEW, {"joules": 1000.0}, Path(), None)
    tried = [(PLAIN_METHOD, multiple) for multiple in (1.0, 3.0, 9.0, 1 / 3)]
    scored(found, *((*entry, 0.5) for entry in tried), ("fedadam + average", 1.0, 0.1))
    found.trials[0] = replace(found.trials[0], scores=(0.8,))
    new = found._list_first_trials()
    names = ["batch 32", "2 epochs", "4-bit uploads"]
    assert [t.method for t in new] == [f"{PLAIN_METHOD}, {name}" for name in names]
    trains = [t.experiment.train for t in new]
    assert [(t.batch, t.epochs, t.lr) for t in trains] == [(32, 4, 0.1), (8, 2, 0.1), (8, 4, 0.1)]
    assert new[2].experiment.to_tables()["recipe"]["compressor"]["bits"] == 4
    assert {(s.rung, s.rounds) for s in found._choose_steps()} == {(-1, search.PROBE_ROUNDS)}
    scored(found, *((t.method, 1.0) for t in new))
    # 3 % of 100 rounds at 1 J each; a variant whose rounds take a quarter of that has 12
    found.trials[5].record.rounds["joules"][:] = [0.25, 0.25]
    assert [found._plan_step(found.trials[i]).rounds for i in (1, 5, 6)] == [9, 12, 3]
    scored(found, *((t.method, 1.0, 0.1) for t in new))
    assert found._list_variants() == []


def test_a_variant_is_tried_only_if_its_comparison_is_paid_for():
    """100 J at 1 J a round: the search has 24 J, a rung is 3 J, and a probe 2 J."""
    found = scored(make_search(FEW), (PLAIN_METHOD, 1.0, 0.8))
    scored(found, *((PLAIN_METHOD, multiple, 0.5) for multiple in (3.0, 9.0, 1 / 3)))
    scored(found, ("fedadam + average", 1.0, 0.1))  # 10 J are spent, 14 J left
    step = next(s for s in found._choose_steps() if s.trial.method in found.variants)
    assert (step.rung, found._count_needed(step, "joules")) == (-1, pytest.approx(2 + 3))
    tried = replace(step.trial, record=run_of("x", [0.1] * 2))
    first = found._plan_step(tried)  # nothing is kept for a climb
    assert (first.rung, found._count_needed(first, "joules")) == (0, first.cost["joules"])


def test_where_bytes_alone_are_limited_training_is_as_it_was():
    found = scored(make_search(FEW, limits={"bytes": 1e9}), (PLAIN_METHOD, 1.0, 0.5))
    assert found._list_variants() == []


def test_a_small_budget_tries_a_few_before_it_keeps_something_for_climbs():
    """40 J at 1 J a round: the search has 9.6 J, 2 of them spent, and a trial takes 2 or 3."""
    found = scored(make_search(rounds=5000, limits={"joules": 40.0}), (PLAIN_METHOD, 1.0, 0.5))
    steps = found._choose_steps()
    assert [step.rung for step in steps] == [0] * len(steps)
    assert len(steps) >= 2


def test_optuna_proposes_within_the_rates_tried():
    found = scored(make_search(), *((*entry, 0.1 * i) for i, entry in enumerate(FIRST_TRIALS)))
    found.trials[2] = replace(found.trials[2], scores=(-math.inf,))  # it diverged
    asked = [search.propose_with_optuna(found.trials, list(METHODS), seed) for seed in (1, 1, 2)]
    assert asked[0] == asked[1] != asked[2]
    assert all(method in METHODS and 1 / 3 <= multiple <= 27 for method, multiple in asked)


def test_uploads_of_few_bits_where_bytes_are_limited():
    dense = search.choose_bit_widths(METHODS, {"joules": 1.0})
    coded = search.choose_bit_widths(METHODS, {"bytes": 1.0})
    assert dense == METHODS
    assert coded[PLAIN_METHOD]["recipe"]["compressor"] == {"piece": "quantize", "bits": 4}
    assert coded["flrce"] == METHODS["flrce"]  # it has a code of its own


@pytest.fixture(scope="module")
def advice(tmp_path_factory):
    """The advice for 60 rounds' joules, and the folder of its search."""
    work = tmp_path_factory.mktemp("search")
    budget = advise.SearchBudget(joules=150.0)
    return advise.advise_recipe(SMALL, budget, work, methods=FEW, seeds=2), work


def test_the_search_costs_less_than_a_quarter_and_the_run_gets_the_rest(advice):
    found, _ = advice
    assert 0 < found.spent["joules"] < 0.25 * 150
    assert len(found.tried) >= 3
    assert found.expected.n == 2
    assert found.experiment.rounds < SMALL.rounds
    assert set(found.untried) <= set(FEW)


def test_trials_that_climb_continue_their_runs(advice):
    _, work = advice
    courses: dict[str, list] = {}
    for path in work.glob("trial-*-*.json"):
        rounds = json.loads(path.read_text())["rounds"]
        courses.setdefault(path.stem.rpartition("-")[0], []).append(rounds["joules"])
    climbed = [sorted(c, key=len) for c in courses.values() if len(c) > 1]
    assert climbed
    for first, *others in climbed:
        assert all(other[: len(first) - 1] == first[:-1] for other in others)
    for path in work.glob("trial-*/rounds.jsonl"):
        kept = max(len(course) for course in courses[path.parent.name])
        assert len(path.read_text().splitlines()) == kept


def test_a_search_goes_on_where_it_was_interrupted(advice, tmp_path, monkeypatch):
    whole, ran = advise.runs.run, []

    def cut(each, folder, **options):
        ran.append((Path(folder).name, each.rounds))
        if len(ran) == 4:
            raise KeyboardInterrupt
        return whole(each, folder, **options)

    def ask():
        budget = advise.SearchBudget(joules=150.0)
        return advise.advise_recipe(SMALL, budget, tmp_path, methods=FEW, seeds=2)

    monkeypatch.setattr(advise.runs, "run", cut)
    with pytest.raises(KeyboardInterrupt):
        ask()
    assert ask() == advice[0]
    assert ran.count(ran[0]) == 1  # the first step was recorded


def test_advice_from_elsewhere_is_the_same(advice, tmp_path):
    budget = advise.SearchBudget(joules=150.0)
    far = advise.advise_recipe(SMALL, budget, tmp_path, methods=FEW, seeds=2, send=posted)
    assert far == advice[0]


def test_a_budget_of_few_rounds_goes_to_the_plain_recipe(tmp_path):
    few = SMALL.with_tables({"rounds": 6})
    found = advise.advise_recipe(few, advise.SearchBudget(), tmp_path, methods=FEW, seeds=1)
    assert (found.label, len(found.tried)) == (f"{PLAIN_METHOD}, lr 0.1", 1)
    assert found.experiment.rounds == 4  # two were the search
    text = " ".join(advise_cli.describe_advice(found, {}))
    assert "the budget is too small to try anything else" in text
    assert "nothing that was tried" not in text


def test_budgets_that_cannot_be(tmp_path):
    with pytest.raises(BadInput, match="does not pay"):
        advise.advise_recipe(SMALL, advise.SearchBudget(joules=1e-3), tmp_path, methods=FEW)
    with pytest.raises(BadInput, match="must be above 0"):
        advise.advise_recipe(SMALL, advise.SearchBudget(bytes=-1.0), tmp_path, methods=FEW)


def test_what_is_said(advice):
    found = replace(
        advice[0],
        label="scaffold + average, lr 0.3",
        method="scaffold + average",
        plain_label="fedavg + average, lr 0.1",
        expected=confidence_interval([0.78, 0.80]),
        plain=confidence_interval([0.70, 0.72, 0.71]),
        gain=confidence_interval([0.08, 0.08, 0.07]),
        untried=("feddyn + average",),
        edge="highest",
    )
    price = advise.TrialSummary("x, lr 0.1", 5, 0.8, 40.0)  # 40 J for 80 points
    assert advise_cli._describe_trial(price, "accuracy").endswith("after 5 rounds, 0.5 J a point")
    text = " ".join(advise_cli.describe_advice(found, {"joules": 150.0}))
    assert "Run scaffold + average, lr 0.3" in text
    assert "71.0 ± 2.5 % for the same joules; the difference is 7.7 ± 1.4" in text
    assert "FedAvg + average is not as good" in text
    assert "Not tried: feddyn + average, and every other recipe" in text
    assert "the highest rate that was tried with scaffold + average" in text
    worse = replace(found, gain=confidence_interval([-0.08, -0.08, -0.07]))
    assert "FedAvg + average is better: run it instead" in " ".join(
        advise_cli.describe_advice(worse, {})
    )
    even = replace(found, gain=confidence_interval([0.01, -0.01, 0.0]))
    assert "FedAvg + average is as good" in " ".join(advise_cli.describe_advice(even, {}))


def test_the_advised_file_names_one_data_set():
    own = SMALL.with_tables({"data": {"path": "mine.csv"}})
    assert "name" not in advise_cli.format_experiment(own).partition("[data]")[2].partition("[")[0]
    assert 'name = "digits"' in advise_cli.format_experiment(SMALL)
