"""The sentences are true: ranks, draws and peers against the record, by independent counts."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from flrce import Experiment
from flrce.cli.cli import main
from flrce.report.selection import compute_scores_before, recover_selection_draw
from flrce.report.tables import RunGroup, build_summary_table
from flrce.report.why import escape_unprintable, explain_client, explain_round, explain_run_end
from flrce.simulation import runs
from flrce.storage import read
from report_helpers import HOSTILE, compared, experiment, hostile


@pytest.fixture(scope="module")
def run():
    return read.read_single_run(compared() / "flrce-no-stop" / "seed-0")


def test_exploit_rounds_take_the_largest_scores_that_were_known(run):
    exploits = [h for h in run.committed_rounds if h.exploit]
    assert exploits
    for h in exploits:
        rank = compute_scores_before(run, h.t).rank
        assert [rank[run.client_indices[client]] for client in h.chosen] == [1, 2, 3, 4, 5]


def test_the_draw_decides_every_round(run):
    assert {h.exploit for h in run.committed_rounds} == {True, False}
    for h in run.committed_rounds:
        assert recover_selection_draw(run, h) is not None
        assert (recover_selection_draw(run, h) < h.why["phi"]) == (not h.exploit)


def test_a_round_is_told_with_its_numbers(run):
    h = next(h for h in run.committed_rounds if h.exploit)
    answer = explain_round(run, h.t)
    text = "\n".join(answer.sentences)
    assert text.startswith(
        f"Round {h.t} exploited: the draw {recover_selection_draw(run, h):.3f} was not below the"
        f" probability to explore, phi = {h.why['phi']:.3f}, so it selected the 5 reachable clients"
        " that agree most with the others.\nSelected, with their agreement with the others:"
        f" {h.chosen[0]} ({compute_scores_before(run, h.t).H[run.client_indices[h.chosen[0]]]:+.2f}, rank 1 of"
        " 12), "
    )
    assert f"conflicted with {h.conflicts:.2f} of 4 peers" in text
    assert [entry["rank"] for entry in answer.facts["chosen"]] == [1, 2, 3, 4, 5]
    explored = next(h for h in run.committed_rounds if not h.exploit)
    assert "5 clients at random" in explain_round(run, explored.t).sentences[0]


def test_a_client_left_out_learns_by_how_much(run):
    h = next(h for h in run.committed_rounds if h.exploit)
    left = next(client for client in run.roster if client not in h.chosen)
    facts = explain_client(run, left, h.t).facts
    assert facts["chosen"] is False
    assert facts["rank"] > 5
    assert facts["H"] <= facts["cut"]
    taken = explain_client(run, h.chosen[-1], h.t)
    assert (taken.facts["chosen"], taken.facts["rank"], taken.facts["H"]) == (True, 5, facts["cut"])
    assert (
        taken.sentences[1]
        == f"Client {h.chosen[-1]} was selected: its agreement with the others was"
        f" {facts['cut']:+.2f}, rank 5 of 12; the lowest of the selected clients was"
        f" {facts['cut']:+.2f}."
    )


def test_no_sentence_wants_the_paper_s_letters_known(run):
    """H and Omega are facts for programs; phi and psi stand beside what they are."""
    asked = [explain_round(run, t) for t in (1, 8, 16)]
    asked += [explain_client(run, client, t) for client in run.roster[:3] for t in (None, 8, 16)]
    text = " ".join(sentence for answer in asked for sentence in answer.sentences)
    assert "agreement with the others" in text
    assert not re.search(r"\b(H|Omega)\b", text)
    assert all(said.endswith("probability to explore, ") for said in re.split(r"phi = ", text)[:-1])


def test_a_client_is_told_its_part_and_its_peers(run):
    client = max(run.roster, key=lambda name: sum(name in h.chosen for h in run.rounds))
    answer = explain_client(run, client)
    rounds = [h.t for h in run.rounds if client in h.chosen]
    assert answer.facts["chosen"] == rounds
    assert f"Client {client} was selected in {len(rounds)} of 16 rounds" in answer.sentences[0]
    row = load_file(run.folder / "relations.safetensors")["Omega"][run.client_indices[client]]
    best = run.roster[int(np.argmax(row))]
    assert answer.facts["agrees"][0][0] == best
    assert answer.facts["agrees"][0][1] == pytest.approx(row.max(), abs=0.5 / 127)
    worst = run.roster[int(np.argmin(row))]
    assert answer.facts["disagrees"][0][0] == worst
    assert all(value < 0 for _, value in answer.facts["disagrees"])
    spent = sum(line["joules"] for line in run.costs if line["client"] == client)
    assert answer.facts["joules"] == pytest.approx(spent, rel=1e-4)


def test_peers_are_those_known_before_the_round(run):
    """In the first round nobody knew anybody."""
    assert "agrees" not in explain_client(run, run.rounds[0].chosen[0], 1).facts


def test_the_stop_is_explained():
    stopped = next(run for run in read.read_runs([compared() / "flrce"]) if run.rounds[-1].stop)
    answer = explain_run_end(stopped)
    assert (
        f"stopped after round {len(stopped.committed_rounds)} of 16: the updates of the"
        " selected clients conflicted" in answer.sentences[0]
    )
    assert answer.facts["psi"] == 1.5
    assert answer.facts["most"] >= 1.5
    assert answer.facts["most_round"] == len(stopped.committed_rounds)
    free = read.read_single_run(compared() / "flrce-no-stop" / "seed-0")
    assert "completed all 16 rounds" in explain_run_end(free).sentences[0]
    assert explain_run_end(free).facts["shadow_stops"] == free.summary["shadow_stops"]


def test_a_threshold_never_reached_is_told_with_the_closest_round(tmp_path):
    runs.run(experiment("flrce", rounds=8, recipe={"psi": 4.0}), tmp_path / "run")
    run = read.read_single_run(tmp_path / "run")
    facts = explain_run_end(run).facts
    exploits = [h for h in run.committed_rounds if h.exploit]
    assert facts["stop"] == ""
    assert facts["most"] == max(h.conflicts for h in exploits) < 4.0


def test_turns_and_a_standstill_are_explained(tmp_path):
    """Twelve clients, five a round: in the third round two are due, and three of the next sweep go
    with them.
    """
    stop = {"piece": "standstill", "level": 1.0, "n": 2, "first": 3, "after": 3}
    own = Experiment(
        rounds=9,
        clients=12,
        per_round=5,
        recipe={"name": "flrce", "preset": "default", "stop": stop},
        engine={"workers": 1},
    )
    runs.run(own, tmp_path / "run")
    run = read.read_single_run(tmp_path / "run")
    assert (
        explain_round(run, 3).sentences[0]
        == "Round 3 selected 5 clients grouped by their last updates; each client is selected once"
        " before any is selected again, and 2 were still due."
    )
    told = explain_client(run, run.rounds[2].chosen[0], 3)
    assert told.sentences[1].endswith("was among them.")
    assert "rank" not in told.facts
    answer = explain_run_end(run)
    assert (
        "stopped after round 4 of 9: recent rounds undid each other's progress"
        in answer.sentences[0]
    )
    assert answer.facts["least"] > answer.facts["headway"]


def test_random_selection_says_so():
    run = read.read_single_run(compared() / "fedavg" / "seed-0")
    assert "5 of 12 clients at random" in explain_round(run, 3).sentences[0]
    assert "H" not in explain_client(run, run.roster[0], 3).facts
    assert not any(
        "psi" in sentence for sentence in explain_run_end(run).sentences
    )  # it had no such rule


def test_other_selectors_show_what_they_recorded(tmp_path):
    runs.run(experiment("oort", rounds=3), tmp_path / "run")
    run = read.read_single_run(tmp_path / "run")
    assert explain_round(run, 2).sentences[0].startswith("Round 2 was selected by ")


def test_names_cannot_drive_a_terminal(capsys):
    assert main(["why", str(hostile()), "--round", "2"]) == 0
    assert main(["why", str(hostile()), "--client", HOSTILE[6]]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "\\x1b[31mred" in told
    assert escape_unprintable("new\nline") == "new\\x0aline"


def test_command_json_and_default(capsys):
    folder = str(compared() / "flrce-no-stop" / "seed-0")
    for arguments in (
        [],
        ["--stop"],
        ["--round", "3"],
        ["--client", "3"],
        ["--round", "3", "--client", "3"],
    ):
        assert main(["why", folder, *arguments, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["sentences"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--round", "99"], "use 1 to 16"),
        (["--round", "0"], "use 1 to 16"),
        (["--client", "33"], "did you mean '3'"),
        (["--stop", "--round", "3"], "drop --round"),
    ],
)
def test_bad_questions_are_refused_in_one_line(capsys, arguments, says):
    assert main(["why", str(compared() / "flrce-no-stop" / "seed-0"), *arguments]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert len(told.splitlines()) == 1


def test_a_folder_of_several_runs_is_refused(capsys):
    assert main(["why", str(compared())]) == 2
    assert "name one of them" in capsys.readouterr().err


def test_a_stop_with_a_price_is_explained_in_points_and_joules(tmp_path):
    stop = {"piece": "worth", "points": 20.0}
    shape = {"rounds": 70, "clients": 12, "per_round": 4, "engine": {"workers": 1}}
    runs.run(
        Experiment(**shape, recipe={"name": "flrce", "preset": "default", "stop": stop}),
        tmp_path / "run",
    )
    answer = explain_run_end(read.read_single_run(tmp_path / "run"))
    told = " ".join(answer.sentences)
    assert "predicted gain from doubling the rounds: " in told.lower()
    assert "; your price is 20." in told
    assert "at most" not in told
    assert "Over the last doubling of the rounds it improved by " in told
    assert answer.facts["gain"] < answer.facts["price"] == 20.0


def test_a_reply_that_came_alone_pulls_against_nobody(tmp_path):
    runs.run(experiment("fedasync", rounds=2, clients=4, per_round=2), tmp_path / "run")
    (alone,) = read.read_runs([tmp_path / "run"])
    assert "no peers to conflict with" in " ".join(explain_round(alone, 2).sentences)


def test_energy_that_nobody_knows_is_not_0_joules(run):
    """As on Flower, where clients neither measure joules nor are modelled."""
    rounds = [replace(h, costs=replace(h.costs, joules=0.0, measured=False)) for h in run.rounds]
    silent = replace(run, rounds=rounds)
    client = run.rounds[0].chosen[0]
    assert "an unknown amount of energy" in " ".join(explain_client(silent, client).sentences)
    assert "unknown" not in " ".join(explain_client(run, client).sentences)
    vars(silent)["summary"] = {**run.summary, "energy": "unknown", "joules": 0.0}
    heads, [row] = build_summary_table([RunGroup("silent", (silent,))])
    assert row[heads.index("Energy J")].mean is None
    assert row[heads.index("Rounds")].mean == 16
