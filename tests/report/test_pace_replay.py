"""`flrce whatif --pace`: by hand, and against runs that had the pace."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import flrce
from flrce.cli.cli import main
from flrce.core.types import RoundRecord
from flrce.errors import BadInput
from flrce.methods.pacing.pace import BufferedPace, OverCommitment, ReplyDeadline
from flrce.report.pace_replay import replay_pace
from flrce.simulation import runs
from flrce.storage.read import read_runs

SMALL = {
    "rounds": 3,
    "clients": 12,
    "per_round": 6,
    "train": {"epochs": 1},
    "engine": {"workers": 1},
    "fleet": {"profile": {"raspberry-pi-4": 0.5, "jetson-nano": 0.5}},
}


def record(seconds, outcomes):
    """One round whose clients took so long, and drew 2 W while they waited."""
    lines = [
        {"t": 1, "outcome": why, "compute_seconds": s, "idle_watts": 2.0}
        for s, why in zip(seconds, outcomes, strict=True)
    ]
    chosen = tuple(f"{i}" for i in range(len(seconds)))
    replied = tuple(k for k, why in zip(chosen, outcomes, strict=True) if why == "useful")
    h = RoundRecord(1, chosen=chosen, replied=replied, seconds=max(seconds), joules=100.0)
    return SimpleNamespace(costs=lines, rounds=[h], recipe=None)


def test_over_commitment_and_deadline_by_hand():
    run = record([1.0, 2.0, 4.0, 10.0], ["useful"] * 4)
    # 4 asked are 3 and a third more: 3 count; three clients wait 6 s less, and one 0 s
    fast = replay_pace(run, "fastest", OverCommitment(spares=1 / 3))
    assert (fast.seconds, fast.replies, fast.joules) == (4.0, 3, 100 - 2 * 3 * 6.0)
    late = replay_pace(run, "deadline", ReplyDeadline(5.0))
    assert (late.seconds, late.replies, late.joules) == (5.0, 3, 100 - 2 * 3 * 5.0)
    none = replay_pace(run, "deadline", ReplyDeadline(0.5))
    assert (none.replies, none.short_rounds, none.seconds) == (0, 1, 0.5)


def test_a_client_that_left_is_waited_for_only_where_its_reply_is_needed():
    run = record([1.0, 2.0, 3.0, 9.0], ["useful", "useful", "useful", "left after 9 s of 12"])
    assert replay_pace(run, "fastest", OverCommitment(1 / 3)).seconds == 3.0
    assert replay_pace(run, "deadline", ReplyDeadline(50.0)).seconds == 9.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("paces")
    runs.run(flrce.Experiment(**SMALL, recipe={"name": "fedavg"}), place / "plain")
    return place


def test_its_own_pace_gives_what_is_recorded(folder):
    (run,) = read_runs([folder / "plain"])
    same = replay_pace(run, "synchronous", run.recipe.pace)
    assert same.seconds == pytest.approx(same.seconds_recorded)
    assert same.joules == pytest.approx(same.joules_recorded)
    assert (same.replies, same.short_rounds) == (18, 0)


def test_a_deadline_replayed_is_the_first_round_of_a_run_with_it(folder, tmp_path):
    """The rounds choose the same clients, and a client's time does not depend on the model."""
    (run,) = read_runs([folder / "plain"])
    longest = max(line["compute_seconds"] + line["transfer_seconds"] for line in run.costs)
    pace = {"piece": "deadline", "seconds": 0.6 * longest}
    made = runs.run(
        flrce.Experiment(**SMALL, recipe={"name": "fedavg", "pace": pace}), tmp_path / "run"
    )
    found = replay_pace(run, "deadline", ReplyDeadline(0.6 * longest))
    assert found.replies == sum(len(h.replied) for h in made.history) < 18
    assert found.seconds == pytest.approx(sum(h.seconds for h in made.history))
    assert found.joules == pytest.approx(sum(h.joules for h in made.history))


def test_what_the_record_does_not_tell_is_an_error(folder):
    (run,) = read_runs([folder / "plain"])
    with pytest.raises(BadInput, match="go on from round to round"):
        replay_pace(run, "buffered", BufferedPace(3))
    with pytest.raises(BadInput, match="asks 6 clients for no number of replies"):
        replay_pace(run, "mine", Odd())


@dataclass(frozen=True)
class Odd(flrce.Pace):
    """Asks five, whatever is wanted."""

    def cohort_size(self, P, busy):
        return 5

    def max_replies(self, P):
        return None


def test_the_command(folder, capsys):
    arguments = ["whatif", str(folder / "plain"), "--pace", "fastest"]
    table = '{ piece = "deadline", seconds = 1.0 }'
    assert main([*arguments, "--pace", table]) == 0
    assert "needs a new run" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [p["pace"] for p in shown["runs"][0]["paces"]] == ["fastest"]
    assert main(["whatif", str(folder / "plain"), "--pace", "buffered"]) == 2
