"""The report reads what the ledger wrote: figures against plain sums, curves worked by hand, a page
that is inert.
"""

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.numpy import load_file

from flrce.cli.cli import main
from flrce.cli.terminal import ProgressDisplay, format_sparkline
from flrce.config.experiment import Experiment
from flrce.core.types import Round, RoundRecord, State
from flrce.errors import BadInput
from flrce.methods.stopping.budget import AnyOf, CostBudget
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.report import page, run_detail, tables
from flrce.simulation import result, runs
from flrce.storage import read
from report_helpers import HOSTILE, SMALL, compared, experiment, hostile


def run_of(accuracies, joules=1.0, seed=0, name="fedavg", averaged=None):
    """A run with these accuracies, one a round, made without a folder."""
    rounds = tuple(
        RoundRecord(
            i + 1,
            accuracy=a,
            averaged=averaged and averaged[i],
            joules=joules,
            bytes_up=10,
            bytes_down=10,
            seconds=2,
        )
        for i, a in enumerate(accuracies)
    )
    setting = {"seed": seed, "rounds": len(rounds), "recipe": {"name": name}}
    return read.RecordedRun(Path("made"), setting, rounds, (), {"clients": ["a", "b"]}, (), {})


def test_interval_by_hand():
    # 1, 2, 3: mean 2, deviation 1, t(2, .975) = 4.302653, so 4.302653 / sqrt(3) = 2.484138
    found = tables.confidence_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.half == pytest.approx(2.484138, abs=1e-6)
    assert tables.confidence_interval([4.0]) == tables.ConfidenceInterval(4.0, None, 1, 4.0, 4.0)
    assert tables.confidence_interval([]) == tables.ConfidenceInterval(None, None, 0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8))
def test_interval_agrees_with_the_summary_of_a_run_of_many_seeds(values):
    names = dict.fromkeys(result.list_seed_figures())
    theirs = runs.summarize_seeds([names | {"accuracy": v} for v in values])["accuracy"]
    ours = tables.confidence_interval(values)
    assert ours.mean == pytest.approx(theirs["mean"], abs=1e-6)
    assert ours.half == pytest.approx(theirs["half"], abs=1e-6, rel=1e-9)


def test_band_keeps_the_last_accuracy_of_a_run_that_ended():
    # two seeds: .2 .4 .6 .8, and .4 .8 which stops: from round 3 on its .8 counts, so the means are
    # .3 .6 .7 .8
    part = tables.RunGroup("g", (run_of([0.2, 0.4, 0.6, 0.8]), run_of([0.4, 0.8], seed=1)))
    x, mean, half = tables.compute_mean_band(part, "rounds")
    assert x.tolist() == [1, 2, 3, 4]
    assert mean == pytest.approx([0.3, 0.6, 0.7, 0.8])
    assert half[0] == pytest.approx(
        0.1
    )  # round 1: 0.2 and 0.4, of which an interval would say 0.3 ± 1.27
    assert half[3] == pytest.approx(0, abs=1e-9)


def test_course_counts_what_abandoned_rounds_cost():
    run = run_of([0.5, 0.6])
    lost = RoundRecord(2, outcome="abandoned", joules=5.0, seconds=1.0)
    run = read.RecordedRun(
        run.folder, run.experiment, (run.rounds[0], lost, run.rounds[1]), (), {}, (), {}
    )
    assert tables.trace_metric(run, "joules")[0].tolist() == [1.0, 7.0]
    assert tables.trace_metric(run, "rounds")[0].tolist() == [1.0, 2.0]


def test_course_kinds():
    run = run_of([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], averaged=[0.1, 0.15, 0.2, 0.25, 0.3, 0.35])
    assert tables.trace_metric(run, "rounds", "averaged")[1].tolist() == [
        0.1,
        0.15,
        0.2,
        0.25,
        0.3,
        0.35,
    ]
    # running mean of 5: the sixth is (.2 + .3 + .4 + .5 + .6) / 5
    assert tables.trace_metric(run, "rounds", "smooth")[1] == pytest.approx(
        [0.1, 0.15, 0.2, 0.25, 0.3, 0.4]
    )


def test_labels_name_the_settings_that_differ_and_nothing_else():
    def made(seed, **recipe):
        run = run_of([0.5], seed=seed)
        return read.RecordedRun(
            run.folder,
            {**run.experiment, "recipe": {"name": "flrce", "preset": "default", **recipe}},
            run.rounds,
            (),
            {},
            (),
            {},
        )

    parts = tables.group_runs([made(0, psi=4), made(1, psi=4), made(0, psi=5), made(0)])
    assert [(part.label, len(part.runs)) for part in parts] == [
        ("flrce (psi 4)", 2),
        ("flrce (psi 5)", 1),
        ("flrce", 1),
    ]


def test_units_follow_the_largest_total():
    small, large = run_of([0.5], joules=900.0), run_of([0.5], joules=1100.0)
    assert tables.choose_units([tables.RunGroup("", (small,))])["joules"] == (1.0, "J")
    assert tables.choose_units([tables.RunGroup("", (small, large))])["joules"] == (1e3, "kJ")


def test_folders_of_recipes_seeds_and_single_runs_are_found_once():
    everything = read.read_runs([compared(), compared() / "flrce", compared() / "flrce" / "seed-0"])
    assert len(everything) == 6
    assert [part.label.split(" ")[0] for part in tables.group_runs(everything)] == [
        "fedavg",
        "flrce",
        "flrce-no-stop",
    ]
    assert [run.seed for run in everything] == [0, 1, 0, 1, 0, 1]


def test_figures_are_those_of_summary_json():
    for run in read.read_runs([compared()]):
        kept = json.loads((run.folder / "summary.json").read_text())
        assert run.summary == kept


def test_clients_costs_add_up_to_the_rounds():
    for run in read.read_runs([compared()]):
        costs = run_detail.sum_client_costs(run, range(len(run.roster)))
        assert sum(costs["joules"]) + sum(costs["joules_wasted"]) == pytest.approx(
            run.summary["joules"], rel=1e-4
        )
        assert sum(costs["bytes"]) == run.summary["bytes_up"] + run.summary["bytes_down"]
        assert sum(costs["n"]) == sum(len(h.chosen) for h in run.rounds)


def test_the_recorded_map_ends_as_the_final_map_and_scores_are_exact():
    for run in read.read_runs([compared() / "flrce-no-stop"]):
        kept = load_file(run.folder / "relations.safetensors")
        assert (
            np.abs(run_detail.rebuild_relationship_map(run) - kept["Omega"]).max()
            <= 0.5 / 127 + 1e-6
        )
        H = np.zeros(12, np.float32)
        for relation in run.relations:
            H[list(relation.k)] = relation.H
        assert H.tolist() == kept["H"].tolist()


def test_relations_survive_resume_byte_for_byte(tmp_path):
    wanted = experiment("flrce-no-stop", rounds=6)
    runs.run(wanted, tmp_path / "straight")

    class Enough(Exception):
        pass

    def leave(done):
        if done.record.t == 3:
            raise Enough

    with pytest.raises(Enough):
        runs.run(wanted, tmp_path / "resumed", watch=leave)
    with open(tmp_path / "resumed" / "relations.jsonl", "ab") as f:
        f.write(b'{"t":4,"k":[0')  # as a crash in the middle of a line would leave it
    assert [r.t for r in read.read_single_run(tmp_path / "resumed").relations] == [1, 2, 3]
    runs.run(wanted, tmp_path / "resumed", resume=True)
    straight, resumed = (
        (tmp_path / name / "relations.jsonl").read_bytes() for name in ("straight", "resumed")
    )
    assert straight == resumed
    assert len(straight.splitlines()) == 6


def test_cluster_order_puts_those_that_agree_together():
    # clients 0, 2 and 4 agree with one another and oppose 1, 3 and 5
    side = np.array([1, -1] * 3)
    Omega = (np.outer(side, side) * 100 * (1 - np.eye(6))).astype(np.int8)
    relation = read.RelationChange(1, tuple(range(6)), (0.0,) * 6, Omega)
    run = read.RecordedRun(Path(), {}, (), (), {"clients": list("abcdef")}, (relation,), {})
    order = run_detail.order_by_relationship(run)
    assert sorted(order) == list(range(6))
    assert len({side[k] for k in order[:3]}) == 1


def test_lines_of_retried_rounds_go_to_their_own_record():
    def line(t, client, outcome="useful", joules=1.0):
        return {
            "t": t,
            "client": client,
            "outcome": outcome,
            "joules": joules,
            "bytes_up": 1,
            "bytes_down": 1,
        }

    rounds = (
        RoundRecord(1, "abandoned", chosen=("a", "b")),
        RoundRecord(1, chosen=("b", "c")),
        RoundRecord(2, chosen=("a",)),
    )
    costs = (
        line(1, "a", "no reply"),
        line(1, "b", "no reply"),
        line(1, "x", "nobody asked"),
        line(1, "b", joules=2.0),
        line(1, "c", joules=3.0),
        line(1, "d", "asked"),
        line(2, "a", joules=4.0),
    )
    run = read.RecordedRun(Path(), {}, rounds, costs, {"clients": list("abcd")}, (), {})
    assert [[part["client"] for part in parts] for parts in run.client_lines] == [
        ["a", "b"],
        ["b", "c"],
        ["a"],
    ]
    costs = run_detail.sum_client_costs(run, range(4))  # "x" is no client of ours
    assert costs["joules"] == [4.0, 2.0, 3.0, 1.0]
    assert costs["joules_wasted"] == [1.0, 1.0, 0.0, 0.0]


def test_reading_a_run_loads_no_code_that_its_settings_name(tmp_path):
    shutil.copytree(compared() / "fedavg" / "seed-0", tmp_path / "run")
    (tmp_path / "run" / "checksums.json").unlink()
    (tmp_path / "evil.py").write_text("raise SystemExit('loaded')")
    text = (tmp_path / "run" / "experiment.toml").read_text()
    (tmp_path / "run" / "experiment.toml").write_text(
        text.replace('average = "ema"', 'average = "evil:Average"')
    )
    script = (
        "from flrce.storage import read; r = read.read_single_run('run'); print(r.recipe, r.psi)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ran.stdout.strip(), ran.returncode) == ("None None", 0)


def embedded(text: str) -> dict:
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
    )


def test_the_page_holds_its_script_by_hash_and_asks_for_nothing():
    text = page.render_report(read.read_runs([compared()]))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "default-src 'none'" in text
    outside = re.findall(r"(?:src|href|url|import)\s*[=(]\s*[\"']?(?:https?:)?//", text)
    assert not outside
    assert len(text) < 1_000_000


def test_the_page_holds_the_figures():
    data = embedded(page.render_report(read.read_runs([compared()])))
    assert [recipe["seeds"] for recipe in data["recipes"]] == [2, 2, 2]
    fedavg, flrce = data["recipes"][:2]
    assert fedavg["hasAverage"]
    assert not flrce["hasAverage"]
    mean = np.mean([run.summary["joules"] for run in read.read_runs([compared() / "flrce"])])
    assert flrce["figures"]["joules"][0] == pytest.approx(mean)
    assert len(data["partitions"]) == 2  # one a seed, shared by the recipes
    stopped = [run for run in data["runs"] if run["stop"]]
    assert stopped
    assert all(run["psi"] == 1.5 and run["conflicts"][-1] >= 1.5 for run in stopped)


def test_names_cannot_leave_their_place():
    text = page.render_report(read.read_runs([hostile()]))
    data = embedded(text)  # parses: no name ended the element
    assert set(data["rosters"][0]) == set(HOSTILE)
    assert "<img src=x" not in text
    assert "<svg onload" not in text
    assert text.count("</script>") == 2
    assert text.count("<script") == 2


@given(
    st.recursive(
        st.text() | st.integers() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_embedding_keeps_the_data_and_no_markup(value):
    text = page.to_embedded_json(value)
    assert json.loads(text) == value
    assert not set(text) & set("<>&")


def test_maps_beyond_the_page_size_are_left_out_seed_by_seed(monkeypatch):
    found = read.read_runs([compared() / "flrce-no-stop", compared() / "flrce"])
    sizes = [sum(len(r) for r in run_detail.pack_relationship_rows(run)["rows"]) for run in found]
    monkeypatch.setattr(page, "MAX_MAP_BYTES", sizes[0] + sizes[2])
    data = page.build_report_payload(tables.group_runs(found))
    kept = [
        (run["seed"], run["relations"] is not None, run.get("left_out", False))
        for run in data["runs"]
    ]
    assert kept == [(0, True, False), (1, False, True), (0, True, False), (1, False, True)]


def large(seed: int, recipe: str) -> read.RecordedRun:
    """A run as long as the paper's, with a map that compresses to nothing."""
    rng = np.random.default_rng([seed, len(recipe)])
    names = [f"client-{k}" for k in range(100)]
    rounds, relations = [], []
    for t in range(1, 101):
        k = tuple(int(i) for i in rng.permutation(100)[:10])
        costs = {
            "joules": rng.random(),
            "bytes_up": int(rng.integers(1e6)),
            "seconds": rng.random(),
        }
        rounds.append(
            RoundRecord(
                t,
                exploit=bool(t % 2),
                chosen=tuple(names[i] for i in k),
                accuracy=rng.random(),
                **costs,
            )
        )
        relations.append(
            read.RelationChange(t, k, (0.0,) * 10, rng.integers(-127, 127, (10, 100), np.int8))
        )
    labels = rng.integers(0, 50, (100, 10)).tolist()
    partition = {"clients": names, "classes": list("0123456789"), "labels": labels}
    return read.RecordedRun(
        Path(),
        {"seed": seed, "recipe": {"name": recipe}},
        tuple(rounds),
        (),
        partition,
        tuple(relations),
        {},
    )


def test_five_recipes_with_five_seeds_make_a_page_under_three_megabytes():
    names = ("fedavg", "flrce", "flrce-no-stop", "fedprox", "oort")
    text = page.render_report([large(seed, name) for name in names for seed in range(5)])
    assert len(text.encode()) < 3_000_000
    data = embedded(text)
    assert len(data["runs"]) == 25
    assert all(run["relations"] for run in data["runs"] if run["seed"] == 0)


def test_large_fleets_show_the_clients_chosen_most():
    names = [f"c{i}" for i in range(1000)]
    rounds = tuple(RoundRecord(t, chosen=(names[7], names[900 + t])) for t in range(1, 6))
    run = read.RecordedRun(
        Path(), {}, rounds, (), {"clients": names, "labels": [[1]] * 1000, "classes": ["x"]}, (), {}
    )
    rows = run_detail.select_charted_clients(run)
    assert len(rows) == run_detail.MAX_CHARTED_CLIENTS
    assert {7, 901, 902, 903, 904, 905} <= set(rows)
    described = run_detail.build_run_detail(run, rows)
    assert [rows[i] for i in described["chosen"][0]] == [7, 901]


def test_report_command_writes_page_and_json(tmp_path, capsys):
    out = tmp_path / "deep" / "r.html"
    assert main(["report", str(compared()), "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert str(out) in told["written"]
    assert out.read_text().startswith("<!doctype html>")
    assert told["headline"][0]["accuracy"]["n"] == 2


def test_what_is_no_accuracy_is_not_called_so(tmp_path):
    """The table of a regression has its own metric, and no accuracy per joule."""
    from flrce.cli.run import build_result_table

    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    tables_of = {**SMALL, "rounds": 2, "data": {"partition": "iid"}, "recipe": {"name": "fedavg"}}
    done = runs.run(
        Experiment(**tables_of), tmp_path / "run", data=(x, 50 * x[:, 0]), allow_divergence=True
    )
    plain = result.summarize_seeds([done.summary])
    heads, (line,) = build_result_table({"fedavg": plain})
    assert heads == ("recipe", "mae", "last model", "rounds", "MB", "joules")
    assert len(line) == len(heads)
    heads, (line,) = build_result_table({"fedavg": {**plain, "metric": "accuracy"}})
    assert len(line) == len(heads) == 8


def test_compare_writes_the_report(tmp_path, capsys):
    settings = [f"{key}={value}" for key, value in SMALL.items() if key != "engine"] + [
        "engine.workers=1",
        "rounds=2",
    ]
    overrides = [part for setting in settings for part in ("--set", setting)]
    assert (
        main(
            [
                "compare",
                "--recipes",
                "fedavg,flrce",
                "--seeds",
                "0",
                *overrides,
                "--out",
                str(tmp_path / "c"),
            ]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert "report.html" in told
    assert "trade-off" in told or "cannot be told apart" in told  # the page's first sentence
    assert [
        r["label"] for r in embedded((tmp_path / "c" / "report.html").read_text())["recipes"]
    ] == ["fedavg", "flrce"]


def test_an_unfinished_run_can_be_reported(tmp_path, capsys):
    shutil.copytree(compared() / "flrce-no-stop" / "seed-0", tmp_path / "run")
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "rounds.jsonl").write_text("".join(lines[:5]) + lines[5][:40])
    for name in ("summary.json", "relations.safetensors", "model.safetensors", "checksums.json"):
        (tmp_path / "run" / name).unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoint")  # of the run's end
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]) == 0
    assert "unfinished: 5 of 16 rounds" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda run: shutil.rmtree(run), "does not exist"),
        (lambda run: (run / "rounds.jsonl").unlink(), "is not a run"),
        (lambda run: (run / "rounds.jsonl").write_text("not json\n"), "cannot be read as a run"),
        (
            lambda run: (run / "rounds.jsonl").write_text('{"outcome": "committed"}\n'),
            "cannot be read as a run",
        ),
        (lambda run: (run / "experiment.toml").unlink(), "cannot be read as a run"),
    ],
)
def test_bad_folders_are_refused_in_one_line(tmp_path, capsys, break_it, says):
    shutil.copytree(compared() / "fedavg" / "seed-0", tmp_path / "run")
    (tmp_path / "run" / "checksums.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoint")  # it would know the rounds
    break_it(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "r.html").exists()


def test_a_page_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["report", str(compared()), "--out", str(tmp_path / "file" / "r.html")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_one_wants_one():
    with pytest.raises(BadInput, match="holds 6 runs"):
        read.read_single_run(compared())


def test_terminal_table_shows_every_recipe(capsys, tmp_path):
    main(["report", str(compared()), "--out", str(tmp_path / "r.html")])
    told = capsys.readouterr().out
    assert all(name in told for name in ("fedavg", "flrce-no-stop", "Acc. per kJ"))


def test_progress_starts_over_with_each_seed(capsys):
    progress = ProgressDisplay("flrce", 4, AnyOf((CostBudget(joules=9.0), UpdateConflicts(3.0))))
    for seed in (0, 1):
        history: tuple[RoundRecord, ...] = ()
        for t in (1, 2):
            record = RoundRecord(t, accuracy=0.5, joules=2.0, bytes_up=500_000, bytes_down=500_000)
            history = (*history, record)
            progress(
                Round(State(t, torch.zeros(1), {}, history=history), record, ()),
                f"flrce seed {seed}",
            )
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 4  # one a round: stderr is no terminal here
    assert all("2.00 MB        4.0 J" in line for line in (told[1], told[3]))
    assert told[2].startswith("flrce seed 1  round   1/4")


def test_compare_prints_one_line_per_run(capsys):
    progress = ProgressDisplay("fedavg", 2, per_run=True)
    for t in (1, 2):
        record = RoundRecord(t, accuracy=0.5, joules=2.0)
        progress(Round(State(t, torch.zeros(1), {}, history=(record,)), record, ()))
    assert capsys.readouterr().err.splitlines() == [
        "fedavg  round   2/2  accuracy 50.0 %      0.00 MB        2.0 J"
    ]


def test_the_live_board_shows_course_threshold_and_costs():
    progress = ProgressDisplay("flrce", 10, UpdateConflicts(3.0))
    for t, accuracy in enumerate((0.1, 0.5, 0.9), 1):
        phase = {"exploit": t == 3, "why": {"phi": 0.5}}
        progress.records.append(
            RoundRecord(t, accuracy=accuracy, conflicts=t / 2, joules=2.0, **phase)
        )
    console = Console(width=100, file=io.StringIO())
    console.print(progress.build_board())
    told = console.file.getvalue()
    assert all(
        word in told for word in ("round 3 of 10", "90.0 %", "▁▅█", "of psi 3", "exploit", "6.0 J")
    )


def test_sparkline_by_hand():
    assert format_sparkline([0, 7, 3.4]) == "▁█▄"
    assert format_sparkline([2, 2]) == "▁▁"
    assert format_sparkline([]) == ""
    assert format_sparkline(range(100)) == format_sparkline(range(60, 100))
