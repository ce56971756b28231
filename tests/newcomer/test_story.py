"""The sentences a report opens with, worked by hand."""

from dataclasses import replace

import pytest

from flrce.core.types import RoundRecord
from flrce.report import endings, verdict
from flrce.report.live import describe_run_state
from flrce.report.tables import RunGroup
from flrce.report.why import explain_run_end
from flrce.storage import read
from report_helpers import compared


@pytest.fixture(scope="module")
def run():
    return read.read_single_run(compared() / "fedavg" / "seed-0")


def made(run, seed, accuracy, joules=100.0, nbytes=1000, stop="", rounds=2, **more):
    """A run of a few rounds that cost `joules` and `nbytes` in all."""
    each = {"joules": joules / rounds, "bytes_up": nbytes // rounds}
    records = [
        RoundRecord(t, accuracy=accuracy, accuracy_weighted=accuracy, loss=1.0, **each)
        for t in range(1, rounds + 1)
    ]
    records[-1] = replace(records[-1], stop=stop)
    own = {**run.experiment, "seed": seed, "rounds": 10 if stop else rounds, **more}
    return replace(run, experiment=own, rounds=tuple(records), costs=(), relations=(), extra={})


def test_savings_and_how_sure_they_are(run):
    fedavg = RunGroup("fedavg", tuple(made(run, s, 0.90 + 0.01 * s) for s in range(3)))
    # paired differences 2, 1, 3 points: mean 2, deviation 1, 4.302653 / sqrt(3) = 2.5, so it may be
    # chance
    better = RunGroup(
        "mine",
        tuple(
            made(run, s, 0.90 + 0.01 * s + d, 75.0, 400) for s, d in enumerate((0.02, 0.01, 0.03))
        ),
    )
    told = verdict.describe_comparison(better, fedavg)
    assert (
        told
        == "Against fedavg, mine used 25 % less energy and 60 % less traffic, and its accuracy is"
        " 2.0 points higher (± 2.5 over 3 seeds, so it may be chance)."
    )
    frugal = RunGroup("frugal", tuple(made(run, s, 0.90, 26.0, 40) for s in range(3)))
    told = verdict.describe_comparison(frugal, fedavg)
    assert "frugal used 74 % less energy and 25 times less traffic" in told
    sure = RunGroup("mine", tuple(made(run, s, 0.88 + 0.01 * s) for s in range(3)))
    assert "as much energy and as much traffic" in verdict.describe_comparison(sure, fedavg)
    assert "2.0 points lower (± 0.0 over 3 seeds, more than chance)" in verdict.describe_comparison(
        sure, fedavg
    )
    one = verdict.describe_comparison(RunGroup("mine", better.runs[:1]), fedavg)
    assert "one seed: this may be chance" in one


@pytest.mark.parametrize(
    ("stop", "words", "decided"),
    [
        (
            "predicted gain from doubling the rounds: 0.8 points (0.2 to 1.5); price 2",
            "predicted gain from doubling the rounds: 0.8 points (0.2 to 1.5); price 2",
            "gain",
        ),
        (
            "no improvement over the last 20 evaluations",
            "no improvement over the last 20 evaluations",
            "gain",
        ),
        (
            "no improvement over 20 rounds of clients' reports",
            "no improvement over 20 rounds of",
            "gain",
        ),
        (
            (
                "twice the rounds would bring at most 1.75 < 2 points (+1.8 +- 0.3 points a"
                " doubling, by clients)"
            ),
            "doubling the rounds was predicted to gain less than 2 points",
            "gain",
        ),
        (
            (
                "no rise to be seen over 50 rounds (+1.11 +- 0.15 points a doubling over 20 rounds,"
                " by clients)"
            ),
            "doubling the rounds was predicted to gain less than its price",
            "gain",
        ),
        (
            "headway -0.048 < 0.007 over 20 rounds",
            "recent rounds undid each other's progress",
            "headway",
        ),
        ("conflicts 3 >= psi 2", "the updates of the selected clients conflicted", "conflicts"),
        (
            "next round would pass budget of 60 joules (61.2)",
            "one more round would have exceeded its budget of 60",
            "",
        ),
        (
            "abandoned 3 times in a row: nobody is reachable",
            "abandoned 3 times in a row: nobody is reachable",
            "",
        ),
    ],
)
def test_a_stop_in_plain_words(run, stop, words, decided):
    ended = made(run, 0, 0.9, stop=stop)
    assert endings.describe_ending(ended).startswith(f"stopped after round 2 of 10: {words}")
    assert endings.get_stop_criterion(ended) == decided


def group(run, name, accuracies, joules=100.0, nbytes=1000, **more):
    """A recipe with one run per accuracy."""
    recipe = {"recipe": {"name": name}}
    runs = (made(run, s, a, joules, nbytes, **recipe, **more) for s, a in enumerate(accuracies))
    return RunGroup(name, tuple(runs))


def test_the_first_sentence_names_the_best_trade_off_not_the_first_of_the_alphabet(run):
    fedavg = group(run, "fedavg", (0.90, 0.91, 0.92))
    accurate = group(run, "accurate", (0.93, 0.94, 0.95), 400.0, 4000)  # best metric, dear
    frugal = group(run, "frugal", (0.92, 0.93, 0.94), 50.0, 100)  # 1 point below the best
    cheap = group(run, "cheap", (0.80, 0.81, 0.82), 10.0, 10)  # cheapest, and 13 points below it
    for groups in ([accurate, cheap, fedavg, frugal], [cheap, fedavg, frugal, accurate]):
        told = verdict.describe_groups(groups)
        assert told[0] == (
            "frugal is the best trade-off: against fedavg, it used 50 % less energy and 10 times"
            " less traffic, and its accuracy is 2.0 points higher (± 0.0 over 3 seeds, more than"
            " chance)."
        )
        assert told[1].startswith("It reached 93.0 ± 2.5 % accuracy (mean over 3 seeds) for 50.0 ")
        assert [line.split(" used")[0] for line in told[2:4]] == [
            "Against fedavg, accurate",
            "Against fedavg, cheap",
        ]


def test_the_baseline_may_be_the_best_trade_off(run):
    fedavg = group(run, "fedavg", (0.90, 0.91, 0.92))
    cheap = group(run, "cheap", (0.80, 0.81, 0.82), 10.0, 10)
    told = verdict.describe_groups([cheap, fedavg])
    assert told[0] == (
        "fedavg is the best trade-off: no other recipe within 2 points of the best used less"
        " energy and traffic."
    )


def test_recipes_that_cannot_be_told_apart_share_a_sentence(run):
    fedavg = group(run, "fedavg", (0.90, 0.91, 0.92))
    frugal = group(run, "frugal", (0.90, 0.91, 0.92), 50.0, 100)
    # differences 2, -1, -1 points: mean 0, so chance
    like = [group(run, name, (0.92, 0.90, 0.91), 102.0, 1000) for name in ("oort", "power")]
    told = verdict.describe_groups([like[0], fedavg, like[1], frugal])
    assert told[0].startswith("frugal is the best trade-off")
    alike = (
        "oort and power cannot be told apart from fedavg: energy and traffic are within 5 %, and"
    )
    assert sum("oort" in line for line in told) == 1
    assert any(line.startswith(alike) for line in told)
    assert verdict.describe_groups([fedavg, *like])[0].startswith(alike)


def test_a_metric_of_which_less_is_better_has_its_own_best(run):
    def values(name, errors, joules):
        made_group = group(run, name, (0.5,) * len(errors), joules)
        records = [
            tuple(
                replace(h, accuracy=None, metric="mae", lower=True, metrics={"mae": error})
                for h in each.rounds
            )
            for each, error in zip(made_group.runs, errors, strict=True)
        ]
        runs = zip(made_group.runs, records, strict=True)
        return RunGroup(name, tuple(replace(each, rounds=own) for each, own in runs))

    fedavg, good, bad = (
        values(name, errors, joules)
        for name, errors, joules in (
            ("fedavg", (2.0, 2.1), 100.0),
            ("good", (2.0, 2.0), 50.0),
            ("bad", (4.0, 4.0), 10.0),
        )
    )
    told = verdict.describe_groups([bad, fedavg, good])
    assert told[0].startswith("good is the best trade-off: against fedavg, it used 50 % less")


def test_endings_that_are_the_same_share_a_sentence(run):
    stop = "no improvement over the last 20 evaluations"
    early = [
        group(run, name, (0.9, 0.9, 0.9), cost, stop=stop) for name, cost in (("b", 9), ("a", 20))
    ]
    told = verdict.describe_groups([*early, group(run, "fedavg", (0.9, 0.9, 0.9))])
    assert told[0].startswith("b is the best trade-off")
    assert f"3 of 3 runs stopped early, after 2 of 10 rounds: {stop}." in told[1]
    assert f"a: 3 of 3 runs stopped early, after 2 of 10 rounds: {stop}." in told


def test_nothing_is_said_of_runs_without_rounds(run):
    groups = [RunGroup("x", (replace(run, rounds=()),))]
    assert verdict.describe_groups(groups) == ["No round is committed yet."]


def test_the_model_is_shown_for_each_client_and_class(tmp_path):
    """final.json: their means are the headline, weighted by hold-outs or not."""
    import flrce
    from flrce.report.run_detail import build_final_metrics
    from flrce.report.why import explain_client

    result = flrce.run(
        flrce.Experiment(rounds=3, clients=8, per_round=4, engine={"workers": 1}), tmp_path / "a"
    )
    run = read.read_single_run(tmp_path / "a")
    values, held = run.final["clients"], run.final["held"]
    known = [value for value in values if value is not None]
    assert sum(known) / len(known) == pytest.approx(result.summary["accuracy"])
    by_class = sum(
        n * (value or 0.0) for n, value in zip(held, run.final["classes"], strict=True)
    ) / sum(held)
    by_client = sum(
        n * (value or 0.0) for n, value in zip(run.partition["held"], values, strict=True)
    ) / sum(held)
    assert by_class == pytest.approx(by_client)
    assert len(build_final_metrics(run, range(8))["byClient"]) == 8
    assert any(
        "of the final model on its hold-out" in sentence
        for sentence in explain_client(run, run.roster[0]).sentences
    )


def test_the_plainest_fedavg_is_what_others_are_compared_with(run):
    own = {**run.experiment["recipe"], "name": "fedavg", "selector": "mine:Own", "minimum": 2}
    mine = RunGroup("fedavg (selector mine:Own)", (made(run, 0, 0.9, recipe=own),))
    plain = RunGroup("fedavg (lr 0.05)", (made(run, 0, 0.9, recipe={"name": "fedavg"}),))
    other = RunGroup("oort", (made(run, 0, 0.9, recipe={"name": "oort"}),))
    assert verdict.choose_baseline([mine, plain, other]) is plain
    assert verdict.choose_baseline([other]) is other
    assert "two seeds are too few" in verdict.describe_comparison(
        RunGroup("a", tuple(made(run, s, 0.9) for s in (0, 1))),
        RunGroup("b", tuple(made(run, s, 0.8) for s in (0, 1))),
    )


def test_a_note_says_whose_it_is(run):
    short = {"name": "fedavg", "stop": {"piece": "patience", "rounds": 30}}
    mine, plain = (
        RunGroup(name, (made(run, 0, 0.9, recipe=recipe),))
        for name, recipe in (("mine", short), ("fedavg", {"name": "fedavg"}))
    )
    note = "the stop rule Patience needs 31 rounds, so it cannot end a run of 2."
    assert verdict.format_group_notes([mine, plain]) == [f"Note on mine: {note}"]
    assert verdict.format_group_notes([mine]) == [f"Note: {note}"]


def test_a_run_of_all_its_rounds_was_not_stopped_early(run):
    """A rule that is met in round 15 of 15 ended nothing."""
    records = made(
        run,
        0,
        0.9,
        stop="predicted gain from doubling the rounds: 0.8 points (0.2 to 1.5); price 2",
    ).rounds
    assert endings.describe_state(records, 10) == "stopped early"
    assert endings.describe_state(records, 2) == "finished"
    assert endings.describe_state(records[:1], 2) == "unfinished"
    assert (
        endings.describe_state(
            [replace(records[0], outcome="abandoned", stop="abandoned 3 times")], 2
        )
        == "unfinished"
    )
    whole = made(run, 0, 0.9, stop="no improvement over the last 6 evaluations", rounds=10)
    assert endings.describe_ending(whole).startswith(
        "ran all 10 rounds; its stop rule was met in the last round: no improvement"
    )
    assert (
        "The run completed all 10 rounds; its stop rule was met"
        in explain_run_end(whole).sentences[0]
    )
    assert describe_run_state(whole, "") == "finished"
