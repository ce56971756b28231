"""The arena: plans, records, leaderboards by hand, restarts, advice."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flrce.cli import cli
from flrce.config.experiment import Experiment
from flrce.core.pieces import NeverStop
from flrce.errors import BadInput
from flrce.methods.stopping.budget import Patience
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.simulation import runs
from flrce_arena import execute, job, machine, page, records
from flrce_arena.execute import get_executor
from flrce_arena.leaderboard import (
    build_leaderboard,
    compute_pareto_points,
    critical_difference,
    rank_without_each_task,
)
from flrce_arena.page import describe_saving
from flrce_arena.paired import compare_with_reference
from flrce_arena.plan import ArenaCell, ArenaPlan, iterate_task_methods
from flrce_arena.records import KEPT_FIELDS, CellRecord
from flrce_arena.stops import evaluate_stop_rules, find_stop_round
from flrce_arena.target_costs import compute_cost_to_reference
from flrce_arena.task_card import describe_plan

SMALL = {"rounds": 3, "clients": 4, "per_round": 2, "train": {"epochs": 1}}
TABLES = {
    "seeds": [1, 2],
    "tasks": {"labels": SMALL, "sizes": {**SMALL, "data": {"partition": "quantity"}}},
    "methods": {
        "fedavg": {},
        "thrifty": {"recipe": {"name": "fedavg", "compressor": {"piece": "quantize", "bits": 4}}},
    },
    "tuning": {"grid": {"train.lr": [0.01, 0.1]}, "share": 0.5},
}


def run_of(
    method: str,
    values: list[float | None],
    joules: float = 1.0,
    task: str = "a",
    seed: int = 1,
    **more,
) -> CellRecord:
    """A run whose rounds cost the same, and give these values."""
    T = len(values)
    rounds: dict[str, list] = {name: [0.0] * T for name in KEPT_FIELDS}
    rounds |= {
        "t": list(range(1, T + 1)),
        "outcome": ["committed"] * T,
        "stop": [""] * T,
        "joules": [joules] * T,
    }
    rounds |= {"bytes_up": [3] * T, "bytes_down": [4] * T, "seconds": [2.0] * T, "replied": [2] * T}
    rounds |= {"value": values, "accuracy": values, "averaged": [None] * T, "headway": [None] * T}
    rounds |= {"exploit": [False] * T, "clients": [4] * T}
    made = {"metric": "accuracy", "lower": False, "recipe": {"name": method}, **more}
    return CellRecord(task, method, seed, {}, f"{task}{method}{seed}", rounds=rounds, **made)


def test_what_a_budget_buys():
    p = run_of("x", [0.1, None, 0.3, 0.4], joules=2.0)
    assert p.cumulative_cost("joules").tolist() == [2, 4, 6, 8]
    assert p.cumulative_cost("bytes").tolist() == [7, 14, 21, 28]
    assert [p.get_value_within("joules", budget) for budget in (1, 2, 5, 6, 100)] == [
        None,
        0.1,
        0.1,
        0.3,
        0.4,
    ]
    assert p.final_value == 0.4


def test_ranks_by_hand():
    """Two tasks. Of 4 J (the reference's), b is first on both; c needs 3 J a round and has one
    model by then.
    """
    found = []
    for task, better in (("a", 0.1), ("z", 0.2)):
        for seed in (1, 2):
            found += [
                run_of("ref", [0.1, 0.2, 0.3, 0.4], task=task, seed=seed),
                run_of("b", [0.2, 0.3, 0.4, 0.4 + better], task=task, seed=seed),
                run_of("c", [0.35, 0.9], joules=3.0, task=task, seed=seed),
            ]
    whole = build_leaderboard(found, "joules", 1.0, "ref")
    assert whole.budgets == {"a": 4.0, "z": 4.0}
    assert [(s.method, s.rank) for s in whole.standings] == [("b", 1.0), ("ref", 2.0), ("c", 3.0)]
    assert whole.standings[0].first == 1.0
    assert whole.standings[2].scores["a"].mean == 0.35
    # q = 2.343 for three methods (Demsar 2006, table 5)
    assert whole.critical == pytest.approx(2.343 * (3 * 4 / (6 * 2)) ** 0.5, abs=2e-3)
    early = build_leaderboard(found, "joules", 0.5, "ref")  # 2 J: c has nothing yet
    assert [s.method for s in early.standings] == ["b", "ref", "c"]
    assert early.standings[2].scores["a"].mean is None
    at_equal_rounds = build_leaderboard(found, "rounds", 0.5, "ref")
    assert at_equal_rounds.standings[0].method == "c"
    assert rank_without_each_task(found, "joules", 1.0, "ref") == {
        "a": ["b", "ref", "c"],
        "z": ["b", "ref", "c"],
    }


def test_one_seed_has_no_intervals():
    """Draws of one seed are that seed: 100 % sure of nothing."""
    found = [run_of("ref", [0.1, 0.4]), run_of("b", [0.4, 0.5])]
    ranked = build_leaderboard(found, "joules", 1.0, "ref").standings
    assert [(s.method, s.low, s.high, s.first) for s in ranked] == [
        ("b", None, None, None),
        ("ref", None, None, None),
    ]
    b = compute_cost_to_reference(found, "joules", "ref")[0]
    assert (b.share, b.low, b.high) == (0.5, None, None)
    two = [*found, run_of("b", [0.2, 0.3], seed=2)]
    assert build_leaderboard(two, "joules", 1.0, "ref").standings[0].first is not None


def test_seed_by_seed_by_hand():
    """Better by 0.1 and 0.3 on a; on z, where less is better, by 1 on both seeds; late has no model
    in time on a.
    """
    found = []
    for seed, more in ((1, 0.1), (2, 0.3)):
        found += [run_of("ref", [seed / 10], seed=seed), run_of("b", [seed / 10 + more], seed=seed)]
        found += [run_of("late", [0.9], joules=9.0, seed=seed)]
        found += [
            run_of(m, [v], task="z", seed=seed, lower=True, metric="mae")
            for m, v in (("ref", 4.0), ("b", 3.0))
        ]
    b, late = compare_with_reference(found, "joules", 1.0, "ref")
    assert (b.method, b.gains["a"].mean, b.gains["z"].mean) == ("b", pytest.approx(0.2), 1.0)
    assert b.gains["a"].half == pytest.approx(12.706 * 0.1, rel=1e-3)  # Student's t of two
    assert (b.better, b.worse) == (("z",), ())
    assert (late.method, late.gains, late.better) == ("late", {}, ())


def test_what_is_saved_in_words():
    """Less than the reference itself needs to be there first, not less than all that it spends."""

    def told(share):
        lines = [("quick", share, share - 0.1, share + 0.1), ("ref", 0.7, None, None)]
        keys = ("method", "share", "low", "high")
        rest = {"reached": 4, "runs": 5, "below": ()}
        return {
            "reference": "ref",
            "reached": {"joules": [dict(zip(keys, line, strict=True)) | rest for line in lines]},
        }

    assert (
        describe_saving(told(0.5), "joules")
        == "To where ref ends, quick takes 50 % (95 %: 40 to 60 %) of its joules, ref itself 70 %;"
        " 4 of 5 runs get there, and on no task does it end worse in the mean."
    )
    assert describe_saving(told(0.8), "joules").startswith("Nobody gets where ref ends for less")


def test_a_rule_in_words():
    plan = {"tasks": {"mine": {"train": {"epochs": 1}}}, "methods": {"fedavg": {}}, "seeds": [1, 2]}
    spent = "Budgets are shares of what fedavg spends."
    plain = describe_plan(ArenaPlan.from_tables(plan))
    assert (
        plain["rule"]
        == f"Judged on seeds 1, 2, with the settings of tasks and methods as they are. {spent}"
    )
    assert plain["tasks"][0][:2] == ["mine", "digits, dirichlet(0.1)"]
    assert plain["tasks"][0][5].startswith("1 epoch, ")
    assert len(plain["tasks"][0]) == len(plain["heads"])
    tuning = {"times": {"train.lr": [0.3, 1]}, "grid": {"train.batch": [8, 16]}, "share": 0.5}
    assert (
        describe_plan(ArenaPlan.from_tables({**plan, "tuning": tuning}))["rule"]
        == "Every method tried train.batch = 8, 16 and train.lr at 0.3, 1 times its own on seed 0"
        f" for 50 % of the rounds, and is judged on seeds 1, 2 with what ended best. {spent}"
    )


def test_less_may_be_better():
    found = [
        run_of(m, [v], lower=True, metric="perplexity")
        for m, v in (("ref", 9.0), ("good", 4.0), ("lost", np.nan))
    ]
    ranked = build_leaderboard(found, "joules", 1.0, "ref").standings
    assert [s.method for s in ranked] == ["good", "ref", "lost"]


def test_the_front_by_hand():
    """cheap costs least, best is best; "between" is worse and dearer than cheap."""
    found = [
        run_of(method, [value], joules=joules, seed=seed)
        for method, value, joules in (
            ("cheap", 0.5, 1.0),
            ("between", 0.4, 2.0),
            ("best", 0.9, 3.0),
        )
        for seed in (1, 2, 3)
    ]
    assert {p.method: p.front for p in compute_pareto_points(found, "joules")} == {
        "cheap": 1.0,
        "between": 0.0,
        "best": 1.0,
    }


def test_what_is_saved_by_hand():
    """ref ends at 0.4 for 4 J on both tasks; quick is there after 1 J, never gets there on z with
    one seed of two.
    """
    found = []
    for task in ("a", "z"):
        for seed in (1, 2):
            found += [
                run_of("ref", [0.1, 0.2, 0.3, 0.4], task=task, seed=seed),
                run_of(
                    "quick", [0.4 if (task, seed) != ("z", 2) else 0.3, 0.39], task=task, seed=seed
                ),
                run_of("never", [0.1], task=task, seed=seed),
            ]
    quick, ref, never = compute_cost_to_reference(found, "joules", "ref")
    assert (ref.method, ref.share, ref.reached) == ("ref", 1.0, 4)
    # a: 1 / 4; z: mean of 1 / 4 and, as it never gets there, 1
    assert quick.share == pytest.approx((0.25 * 0.625) ** 0.5)
    assert (quick.reached, quick.runs) == (3, 4)
    assert quick.low == pytest.approx(0.25)
    assert quick.high == pytest.approx(0.5)
    assert (never.share, never.reached) == (None, 0)
    assert (ref.below, quick.below, never.below) == (
        (),
        ("a", "z"),
        ("a", "z"),
    )  # quick falls back to 0.39


@given(st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=2), min_size=2, max_size=5))
def test_ranks_add_up(values):
    found = [
        run_of(f"m{i}", [v], seed=seed)
        for i, pair in enumerate(values)
        for seed, v in enumerate(pair)
    ]
    ranked = build_leaderboard(found, "rounds", 1.0, "m0", draws=20).standings
    n = len(values)
    assert sum(s.rank for s in ranked) == pytest.approx(n * (n + 1) / 2)
    assert all(1 <= s.low <= s.high <= n for s in ranked)
    assert [s.rank for s in ranked] == sorted(s.rank for s in ranked)


def test_ranks_lie_within_their_intervals_and_leads_add_up():
    """a and b tie in most draws; the mean rank of three seeds need not be among those of draws."""
    rng = np.random.default_rng(3)
    values = {m: rng.integers(0, 3, (2, 3)) / 10 for m in ("ref", "a", "b", "c")}
    found = [
        run_of(m, [float(v)], task=f"task {i}", seed=seed)
        for m, tasks in values.items()
        for i, seeds in enumerate(tasks)
        for seed, v in enumerate(seeds)
    ]
    board = build_leaderboard(found, "joules", 1.0, "ref", draws=200)
    assert all(s.low <= s.rank <= s.high for s in board.standings)
    assert sum(s.first for s in board.standings) == pytest.approx(1.0)
    lone = [run_of(m, [0.5], seed=seed) for m in ("ref", "a") for seed in (1, 2)]
    tied = build_leaderboard(lone, "joules", 1.0, "ref").standings
    assert [s.first for s in tied] == [0.5, 0.5]


def test_a_name_with_a_colon_is_refused_in_words():
    with pytest.raises(BadInput, match=r"methods\.my:method = 'my:method': a name has letters"):
        ArenaPlan.from_tables(
            {"tasks": {"d": {}}, "methods": {"fedavg": {}, "my:method": {"recipe": {}}}}
        )


def test_a_board_whose_ranks_tell_nobody_apart_says_what_to_do():
    found = [
        run_of(m, [v], task=t, seed=s)
        for m, v in (("ref", 0.1), ("a", 0.2))
        for t in "xy"
        for s in (1, 2)
    ]
    board = build_leaderboard(found, "joules", 1.0, "ref")
    assert board.is_tied  # two methods on two tasks: ranks must differ by 1.39
    told = {"reached": {}, "reference": "ref", "failed": []}
    lines = page.describe_arena(found, [board], told)
    assert "no method can be told from any other. Then take the simplest, ref" in lines[-1]


def test_the_page_says_what_a_method_is_and_what_its_metric_can_be():
    found = [run_of("mine", [0.5], recipe={"name": "fedavg", "server": "adam"})]
    told = {"reference": "mine"}
    payload = page.build_arena_payload(found, told)
    assert payload["methods"][0]["summary"] == (
        "Federated averaging (McMahan et al. 2017): P at random, E epochs, weighted mean. Changed"
        " here: server."
    )
    assert payload["tasks"][0]["range"] == [0, 1]
    loss = [run_of("mine", [7.5], metric="perplexity", lower=True)]
    assert page.build_arena_payload(loss, told)["tasks"][0]["range"] is None


def test_one_task_has_no_critical_difference():
    assert critical_difference(5, 1) is None
    assert critical_difference(1, 5) is None


def test_stop_rules_are_replayed():
    p = run_of("x", [0.1, 0.5, 0.5, 0.5, 0.6])
    assert find_stop_round(p, Patience(2)) == 4
    assert find_stop_round(p, NeverStop()) is None
    (line,) = evaluate_stop_rules([p], {"patience": Patience(2)})
    assert (line.stopped, line.runs, line.round.mean) == (1, 1, 4.0)
    assert line.saved.mean == pytest.approx(0.2)
    assert line.given.mean == pytest.approx(-0.1)
    assert (
        evaluate_stop_rules(
            [dataclasses.replace(p, rounds={**p.rounds, "stop": ["", "", "", "", "x"]})],
            {"p": Patience(2)},
        )[0].runs
        == 0
    )


def test_records_come_back(tmp_path):
    found = [run_of("x", [0.1, None]), run_of("y", [0.3, 0.4])]
    records.pack_records(found, tmp_path / records.RECORDS_FILE)
    again = records.unpack_records(tmp_path)
    assert again == found
    first = (tmp_path / records.RECORDS_FILE).read_bytes()
    records.pack_records(reversed(found), tmp_path / records.RECORDS_FILE)
    assert (tmp_path / records.RECORDS_FILE).read_bytes() == first
    for damaged in (first[:-10], b"", b"not gzip at all"):
        (tmp_path / records.RECORDS_FILE).write_bytes(damaged)
        if damaged:
            with pytest.raises(BadInput, match=records.RECORDS_FILE):
                records.unpack_records(tmp_path)
    (tmp_path / "cell.json").write_text('{"schema": 2}')
    with pytest.raises(BadInput, match="no cell of an arena"):
        records.load_cell_record(tmp_path / "cell.json")


@pytest.mark.parametrize(
    "spoilt",
    [
        {"seed": "1"},
        {"metric": ["accuracy"]},
        {"rounds": [1]},
        {"rounds": {"joules": [{}, 1.0]}},
        {"rounds": {"replied": [10**9, 1]}},
        {"rounds": {"value": ["x", "y"]}},
        {"rounds": {"bytes_up": ["1", "2"]}},
        {"rounds": {"mine": [1, 2]}},
    ],
    ids=str,
)
def test_a_strangers_arena_holds_anything(spoilt, tmp_path):
    """`--against` reads what somebody else wrote: text for figures and a billion clients are one
    line.
    """
    whole = {"schema": records.SCHEMA_VERSION, **dataclasses.asdict(run_of("x", [0.1, 0.2]))}
    rounds = spoilt.get("rounds")
    changed = {
        **whole,
        **spoilt,
        **({"rounds": whole["rounds"] | rounds} if isinstance(rounds, dict) else {}),
    }
    (tmp_path / "cell.json").write_text(json.dumps(changed))
    with pytest.raises(BadInput, match="no cell of an arena"):
        records.load_cell_record(tmp_path / "cell.json")


def test_a_damaged_stream_of_records(tmp_path):
    """A flipped bit inside the packed stream is zlib's own kind of error."""
    records.pack_records([run_of("x", [0.1, 0.2])], tmp_path / records.RECORDS_FILE)
    data = bytearray((tmp_path / records.RECORDS_FILE).read_bytes())
    for at in range(10, len(data) - 8):
        spoilt = bytearray(data)
        spoilt[at] ^= 255
        (tmp_path / records.RECORDS_FILE).write_bytes(spoilt)
        with pytest.raises(BadInput):
            records.unpack_records(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seeds": []}, "seeds"),
        ({"seeds": [0]}, "seed 0 is used for tuning"),
        ({"reference": "fedprox"}, "reference = 'fedprox'"),
        (
            {"methods": {"fedavg": {}, "x": {"recipe": {"name": "fedavgg"}}}},
            "methods.x on tasks.labels",
        ),
        ({"methods": {"fedavg": {"rouns": 3}}}, "methods.fedavg on tasks.labels"),
        ({"methods": {"../up": {}}}, "methods"),
        ({"tasks": {}}, "tasks"),
        ({"stops": {"none": {"recipe": {"name": "fedavg"}}}}, "stops.none never stops"),
        ({"tuning": {"grid": {"train.lr": [-1.0]}}}, "lr"),
        ({"budgets": [float("nan")]}, "budgets"),
        ({"tuning": {"times": {"recipe.name": [0.1, 1.0]}}}, "recipe.name is no number"),
        ({"tuning": {"times": {"train.lr": [-1.0]}}}, "times"),
        ({"without": {"fedavgg": {}}}, "without.fedavgg is no method"),
        ({"without": {"thrifty": {"label": "x"}}}, "without.thrifty.label is no task"),
        ({"without": {"fedavg": {"labels": "x"}}}, "reference must run on every task"),
        ({"typo": 1}, "typo"),
        (
            {"methods": ["fedavg"]},
            "methods = ['fedavg']: is a table, with one for each, such as [methods.fedavg]",
        ),
    ],
)
def test_bad_plans_are_one_line(change, said):
    with pytest.raises(BadInput, match="plan: ") as why:
        ArenaPlan.from_tables({**TABLES, **change})
    assert said in str(why.value)
    assert "\n" not in str(why.value)


@pytest.fixture(scope="module")
def arena(tmp_path_factory) -> Path:
    """The small plan, run once."""
    folder = tmp_path_factory.mktemp("arena")
    plan = folder / "plan.toml"
    import tomli_w

    plan.write_text(tomli_w.dumps(TABLES))
    assert cli.main(["arena", str(plan), "--out", str(folder / "out")]) == 0
    return folder


def test_an_arena_from_the_command_line(arena, capsys):
    told = json.loads((arena / "out" / "arena.json").read_text())
    assert next(line["method"] for line in told["reached"]["bytes"]) == "thrifty"
    assert {b["axis"] for b in told["boards"]} == {"rounds", "joules", "bytes", "seconds"}
    assert not told["failed"]
    assert set(told["settings"]) == {f"{t}/{m}" for t in TABLES["tasks"] for m in TABLES["methods"]}
    found = records.unpack_records(arena / "out")
    assert len([p for p in found if p.seed == 0]) == 2 * 2 * 2  # tasks, methods, rates
    assert len([p for p in found if p.seed]) == 2 * 2 * 2  # tasks, methods, seeds
    assert {len(p.rounds["t"]) for p in found if p.seed} == {3}
    assert {len(p.rounds["t"]) for p in found if not p.seed} == {2}
    page = (arena / "out" / "arena.html").read_text()
    assert "2 methods on 2 tasks" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_what_is_recorded_is_not_run_again(arena, monkeypatch):
    before = (arena / "out" / records.RECORDS_FILE).read_bytes()
    gone = next((arena / "out" / "cells").rglob("1-*.json"))
    gone.unlink()
    ran = []
    plan = ArenaPlan.load(arena / "plan.toml")

    def counted(cells, work):
        ran.extend(cells)
        yield from get_executor("here", {})(cells, work)

    job.run_plan(plan, arena / "out", counted)
    assert len(ran) == 1
    assert (arena / "out" / records.RECORDS_FILE).read_bytes() == before


def test_against_a_committed_arena(arena, tmp_path):
    """A new method is run, the others are taken from the record."""
    mine = ArenaPlan.from_tables({**TABLES, "methods": {**TABLES["methods"], "fedprox": {}}})
    ran = []

    def counted(cells, work):
        ran.extend(cells)
        yield from get_executor("here", {})(cells, work)

    found = job.run_plan(mine, tmp_path, counted, records.unpack_records(arena / "out"))
    assert {cell.method for cell in ran} == {"fedprox"}
    assert {p.method for p in found.judged} == {"fedavg", "thrifty", "fedprox"}


def test_a_method_of_ones_own_is_one_entry(arena, tmp_path, capsys):
    """The rest of the plan is the arena's; a task may be picked."""
    (tmp_path / "mine.toml").write_text('[methods.mine]\nrecipe = { name = "fedprox", mu = 0.1 }\n')
    asked = [
        "arena",
        str(tmp_path / "mine.toml"),
        "--against",
        str(arena / "out"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert cli.main([*asked, "--tasks", "sizes"]) == 0
    told = json.loads((tmp_path / "out" / "arena.json").read_text())
    board = next(b for b in told["boards"] if b["axis"] == "joules" and b["share"] == 1.0)
    assert {s["method"] for s in board["standings"]} == {"mine", "fedavg", "thrifty"}
    assert list(board["budgets"]) == ["sizes"]
    ran = {p.parent.name for p in (tmp_path / "out" / "cells").rglob("*.json")}
    assert ran == {"mine"}
    capsys.readouterr()
    assert cli.main([*asked, "--tasks", "size"]) == 2
    assert "--tasks 'size' is no task" in capsys.readouterr().err


def test_one_cell_that_fails_leaves_the_others(tmp_path, caplog):
    plan = ArenaPlan.from_tables({**TABLES, "tuning": {}, "seeds": [1], "tasks": {"labels": SMALL}})

    def broken(cells, work):
        for cell in cells:
            if cell.method == "thrifty":
                yield cell, "out of luck"
            else:
                yield from get_executor("here", {})([cell], work)

    found = job.run_plan(plan, tmp_path, broken)
    assert [p.method for p in found.judged] == ["fedavg"]
    assert found.failed == (("thrifty on labels, seed 1", "out of luck"),)
    assert [p.method for p in job.run_plan(plan, tmp_path).judged] == ["fedavg", "thrifty"]


def test_the_best_settings_are_chosen_by_direction():
    plan = ArenaPlan.from_tables(TABLES)
    tuned = [
        dataclasses.replace(run_of("fedavg", [value]), tried={"train.lr": lr})
        for lr, value in ((0.01, 3.0), (0.1, 2.0))
    ]
    settings = plan.list_settings("labels", "fedavg")
    assert job.choose_settings(settings, tuned) == {"train.lr": 0.01}
    assert job.choose_settings(settings, [dataclasses.replace(p, lower=True) for p in tuned]) == {
        "train.lr": 0.1
    }
    assert job.choose_settings(settings, []) == {"train.lr": 0.01}
    diverged = [dataclasses.replace(run_of("fedavg", [np.nan]), tried={"train.lr": 0.01}), tuned[1]]
    assert job.choose_settings(settings, diverged) == {"train.lr": 0.1}


def test_multiples_of_a_tasks_own_and_what_is_left_out():
    """lr is 0.2 in one task and 0.1 (the default) in the other; thrifty is not run on sizes."""
    tasks = {
        "labels": {**SMALL, "train": {"epochs": 1, "lr": 0.2}},
        "sizes": TABLES["tasks"]["sizes"],
    }
    left = {"thrifty": {"sizes": "for a reason"}}
    plan = ArenaPlan.from_tables(
        {**TABLES, "tasks": tasks, "tuning": {"times": {"train.lr": [0.5, 3.0]}}, "without": left}
    )
    assert plan.list_settings("labels", "fedavg") == [{"train.lr": 0.1}, {"train.lr": 0.6}]
    assert plan.list_settings("sizes", "fedavg") == [{"train.lr": 0.05}, {"train.lr": 0.3}]
    assert plan.list_tuning_cells("labels", "thrifty")[1].experiment.train.lr == 0.6
    assert list(iterate_task_methods(plan)) == [
        ("labels", "fedavg"),
        ("labels", "thrifty"),
        ("sizes", "fedavg"),
    ]


def test_rules_read_records_as_they_read_rounds():
    """A rule that listens to clients ends a replayed run where it ends a live one."""
    rule = MarginalGain(8.0)
    experiment = Experiment(
        rounds=120,
        clients=4,
        per_round=2,
        train={"epochs": 1, "lr": 0.05},
        recipe={"name": "frugal", "points": 8.0},
        seed=3,
    )
    history = runs.run(experiment).history
    assert history[-1].stop
    p = records.build_cell_record(ArenaCell("a", "frugal", 3, {}, experiment), history)
    assert find_stop_round(p, rule) == len(history)
    deaf = {**p.rounds, "holdouts": [[] for _ in history]}
    assert rule.assess_history(dataclasses.replace(p, rounds=deaf).history) != rule.assess_history(
        p.history
    )


def test_grams_are_an_axis_where_there_are_some():
    clean, dirty = (
        dataclasses.replace(p, rounds={**p.rounds, "grams": [g, g]})
        for p, g in ((run_of("ref", [0.1, 0.2]), 1.0), (run_of("b", [0.2, 0.3]), 4.0))
    )
    assert "grams" not in records.list_cost_axes([run_of("ref", [0.1])])
    assert "grams" in records.list_cost_axes([clean])
    assert [
        s.method for s in build_leaderboard([clean, dirty], "joules", 1.0, "ref").standings
    ] == ["b", "ref"]
    assert [s.method for s in build_leaderboard([clean, dirty], "grams", 1.0, "ref").standings] == [
        "ref",
        "b",
    ]


ONE = {**SMALL, "engine": {"workers": 1}}


def lots_of(plan: ArenaPlan, device: str) -> list[machine.CellBatch]:
    cells = [
        cell
        for task, method in iterate_task_methods(plan)
        for cell in plan.list_evaluation_cells(task, method, {})
    ]
    return machine.build_cell_batches(cells, lambda cell: device)


def test_stacks_hold_what_trains_alike():
    methods = {
        name: {}
        for name in ("fedavg", "median", "fedadam", "scaffold", "power-of-choice", "fedbuff")
    }
    methods["flrce"] = {"recipe": {"name": "flrce", "preset": "default"}}
    plan = ArenaPlan.from_tables(
        {**TABLES, "tuning": {}, "seeds": list(range(1, 6)), "methods": methods}
    )
    found = lots_of(plan, "cuda")
    assert sum(len(lot.cells) for lot in found) == 2 * 7 * 5
    assert {len(lot.cells) for lot in found} == {
        10
    }  # 30 plain ones in thirds, the others' tasks and seeds together
    kinds = [{cell.method for cell in lot.cells} for lot in found]
    assert all(kind <= {"fedavg", "median", "fedadam"} or len(kind) == 1 for kind in kinds)
    (drift,) = (lot for lot in found if lot.cells[0].method == "scaffold")
    assert {cell.task for cell in drift.cells} == {
        "labels",
        "sizes",
    }  # one pool of samples, two partitions


def test_processes_of_this_machine_give_the_same(tmp_path):
    """Cells in a process of their own, and others as a stack, against this process."""
    plan = ArenaPlan.from_tables({**TABLES, "tuning": {}, "tasks": {"labels": ONE}})
    batches = lots_of(plan, "cpu")
    cells = [cell for batch in batches for cell in batch.cells]
    alone = {cell.label: execute.run_cell(cell, str(tmp_path / cell.folder)) for cell in cells}
    ended = list(execute.run_cell_batches(batches, tmp_path / "processes", 2))
    assert {cell.label: p for cell, p in ended} == alone
    for batch in lots_of(plan, "cuda"):
        for cell, p in zip(batch.cells, execute.run_stack(batch.cells, "cpu"), strict=True):
            # a stack adds in another order
            assert p.final_value == pytest.approx(alone[cell.label].final_value, abs=0.02)
            assert p.rounds["bytes_up"] == alone[cell.label].rounds["bytes_up"]


def test_jobs_elsewhere_give_the_same(tmp_path):
    plan = ArenaPlan.from_tables(
        {**TABLES, "tuning": {}, "tasks": {"labels": SMALL}, "methods": {"fedavg": {}}}
    )
    near = job.run_plan(plan, tmp_path / "near")
    far = job.run_plan(plan, tmp_path / "far", get_executor("processes", {"timeout_min": 5}))
    assert far.judged == near.judged
    with pytest.raises(BadInput, match="--on 'moon'"):
        get_executor("moon", {})


def many(keys, values, table="grid"):
    tables = {f"train.k{i}": [0.1 * (1 + j) for j in range(values)] for i in range(keys)}
    return {
        "tasks": {"d": {}},
        "methods": {"fedavg": {}},
        "seeds": [9],
        "tuning": {"seeds": [1], table: tables},
    }


@pytest.mark.parametrize("tables", [many(5, 50), many(5, 50, "times"), many(400, 50), many(10, 2)])
def test_settings_are_counted_before_they_are_expanded(tables):
    with pytest.raises(
        BadInput, match=r"combinations of settings for each method and task, at most 1000"
    ):
        ArenaPlan.from_tables(tables)


def test_runs_are_counted_before_any_is_looked_at():
    tasks = {f"t{i}": {} for i in range(20)}
    with pytest.raises(BadInput, match=r"plan: 400000 runs, at most 100000"):
        ArenaPlan.from_tables(
            {"tasks": tasks, "methods": {"fedavg": {}}, "seeds": list(range(20000))}
        )


def test_a_long_key_is_cut_in_the_line_about_it():
    tables = {
        "tasks": {"d": {}},
        "methods": {"fedavg": {}},
        "tuning": {"times": {"a." * 3000 + "a": [1, 2]}},
    }
    with pytest.raises(BadInput) as refused:
        ArenaPlan.from_tables(tables)
    assert len(str(refused.value)) < 400
