"""The sentences are true: ranks, draws and peers against the record, by independent counts."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from flrce import Experiment, runs
from flrce.apps.cli import main
from flrce.results.scores import draw, scores
from flrce.results.why import clean, why_client, why_round, why_stop
from flrce.store import read
from report_helpers import HOSTILE, compared, experiment, hostile


@pytest.fixture(scope="module")
def run():
    return read.one(compared() / "flrce-no-stop" / "seed-0")


def test_exploit_rounds_take_the_largest_scores_that_were_known(run):
    exploits = [h for h in run.done if h.exploit]
    assert exploits
    for h in exploits:
        rank = scores(run, h.t).rank
        assert [rank[run.row[client]] for client in h.chosen] == [1, 2, 3, 4, 5]


def test_the_draw_decides_every_round(run):
    assert {h.exploit for h in run.done} == {True, False}
    for h in run.done:
        assert draw(run, h) is not None
        assert (draw(run, h) < h.why["phi"]) == (not h.exploit)


def test_a_round_is_told_with_its_numbers(run):
    h = next(h for h in run.done if h.exploit)
    answer = why_round(run, h.t)
    text = "\n".join(answer.sentences)
    assert text.startswith(
        f"Round {h.t} exploited: the draw {draw(run, h):.3f} was not below the chance to explore, "
        f"phi = {h.why['phi']:.3f}, so it took the 5 reachable clients that agree most with the others.\n"
        "Chosen, with how much each agrees with the others: "
        f"{h.chosen[0]} ({scores(run, h.t).H[run.row[h.chosen[0]]]:+.2f}, rank 1 of 12), "
    )
    assert f"pulled against {h.conflicts:.2f} of 4 peers" in text
    assert [entry["rank"] for entry in answer.facts["chosen"]] == [1, 2, 3, 4, 5]
    explored = next(h for h in run.done if not h.exploit)
    assert "5 at random" in why_round(run, explored.t).sentences[0]


def test_a_client_left_out_learns_by_how_much(run):
    h = next(h for h in run.done if h.exploit)
    left = next(client for client in run.roster if client not in h.chosen)
    facts = why_client(run, left, h.t).facts
    assert facts["chosen"] is False
    assert facts["rank"] > 5
    assert facts["H"] <= facts["cut"]
    taken = why_client(run, h.chosen[-1], h.t)
    assert (taken.facts["chosen"], taken.facts["rank"], taken.facts["H"]) == (True, 5, facts["cut"])
    assert taken.sentences[1] == (
        f"Client {h.chosen[-1]}, by how much it agrees with the others: {facts['cut']:+.2f}, rank 5 of 12; the last "
        f"one taken had {facts['cut']:+.2f}, so it was chosen."
    )


def test_no_sentence_wants_the_paper_s_letters_known(run):
    """H and Omega are facts for programs; phi and psi stand beside what they are."""
    asked = [why_round(run, t) for t in (1, 8, 16)]
    asked += [why_client(run, client, t) for client in run.roster[:3] for t in (None, 8, 16)]
    text = " ".join(sentence for answer in asked for sentence in answer.sentences)
    assert "agrees with the others" in text
    assert not re.search(r"\b(H|Omega)\b", text)
    assert all(said.endswith("chance to explore, ") for said in re.split(r"phi = ", text)[:-1])


def test_a_client_is_told_its_part_and_its_peers(run):
    client = max(run.roster, key=lambda name: sum(name in h.chosen for h in run.rounds))
    answer = why_client(run, client)
    rounds = [h.t for h in run.rounds if client in h.chosen]
    assert answer.facts["chosen"] == rounds
    assert f"Client {client} was chosen in {len(rounds)} of 16 rounds" in answer.sentences[0]
    row = load_file(run.folder / "relations.safetensors")["Omega"][run.row[client]]
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
    assert "agrees" not in why_client(run, run.rounds[0].chosen[0], 1).facts


def test_the_stop_is_explained():
    stopped = next(run for run in read.find([compared() / "flrce"]) if run.rounds[-1].stop)
    answer = why_stop(stopped)
    assert (
        f"stopped after round {len(stopped.done)} of 16: the chosen clients pulled against one another"
        in answer.sentences[0]
    )
    assert answer.facts["psi"] == 1.5
    assert answer.facts["most"] >= 1.5
    assert answer.facts["most_round"] == len(stopped.done)
    free = read.one(compared() / "flrce-no-stop" / "seed-0")
    assert "went through all 16 rounds" in why_stop(free).sentences[0]
    assert why_stop(free).facts["shadow_stops"] == free.summary["shadow_stops"]


def test_a_threshold_never_reached_is_told_with_the_closest_round(tmp_path):
    runs.run(experiment("flrce", rounds=8, recipe={"psi": 4.0}), tmp_path / "run")
    run = read.one(tmp_path / "run")
    facts = why_stop(run).facts
    exploits = [h for h in run.done if h.exploit]
    assert facts["stop"] == ""
    assert facts["most"] == max(h.conflicts for h in exploits) < 4.0


def test_turns_and_a_standstill_are_explained(tmp_path):
    """Twelve clients, five a round: in the third round two are due, and three of the next sweep go with them."""
    stop = {"piece": "standstill", "level": 1.0, "n": 2, "first": 3, "after": 3}
    own = Experiment(rounds=9, clients=12, per_round=5, recipe={"name": "flrce", "stop": stop}, engine={"workers": 1})
    runs.run(own, tmp_path / "run")
    run = read.one(tmp_path / "run")
    assert why_round(run, 3).sentences[0] == (
        "Round 3 took 5 clients grouped by their last updates; everybody has a turn before anybody has the next, and 2 "
        "were still waiting for theirs."
    )
    told = why_client(run, run.rounds[2].chosen[0], 3)
    assert told.sentences[1].endswith("was among them.")
    assert "rank" not in told.facts
    answer = why_stop(run)
    assert "stopped after round 4 of 9: its rounds had begun to undo one another" in answer.sentences[0]
    assert answer.facts["least"] > answer.facts["headway"]


def test_random_selection_says_so():
    run = read.one(compared() / "fedavg" / "seed-0")
    assert "5 of 12 clients at random" in why_round(run, 3).sentences[0]
    assert "H" not in why_client(run, run.roster[0], 3).facts
    assert not any("psi" in sentence for sentence in why_stop(run).sentences)  # it had no such rule


def test_other_selectors_show_what_they_recorded(tmp_path):
    runs.run(experiment("oort", rounds=3), tmp_path / "run")
    run = read.one(tmp_path / "run")
    assert why_round(run, 2).sentences[0].startswith("Round 2 was chosen by ")


def test_names_cannot_drive_a_terminal(capsys):
    assert main(["why", str(hostile()), "--round", "2"]) == 0
    assert main(["why", str(hostile()), "--client", HOSTILE[6]]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "\\x1b[31mred" in told
    assert clean("new\nline") == "new\\x0aline"


def test_command_json_and_default(capsys):
    folder = str(compared() / "flrce-no-stop" / "seed-0")
    for arguments in ([], ["--stop"], ["--round", "3"], ["--client", "3"], ["--round", "3", "--client", "3"]):
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
    shape = {"rounds": 40, "clients": 12, "per_round": 4, "engine": {"workers": 1}}
    runs.run(Experiment(**shape, recipe={"name": "flrce", "stop": stop}), tmp_path / "run")
    answer = why_stop(read.one(tmp_path / "run"))
    told = " ".join(answer.sentences)
    assert "predicted gain from doubling the rounds: " in told
    assert "; the price is 20 points." in told
    assert "at most" not in told
    assert "points per doubling of the rounds" in told
    assert answer.facts["gain"] < answer.facts["price"] == 20.0


def test_a_reply_that_came_alone_pulls_against_nobody(tmp_path):
    runs.run(experiment("fedasync", rounds=2, clients=4, per_round=2), tmp_path / "run")
    (alone,) = read.find([tmp_path / "run"])
    assert "nobody for it to pull against" in " ".join(why_round(alone, 2).sentences)
