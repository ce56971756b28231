"""Who is there at a second of the run's clock, and rounds that go by it."""

import json
import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flrce.cli.cli import main
from flrce.config.experiment import Experiment
from flrce.core.types import ClientCost
from flrce.devices.availability import (
    DAY,
    HOUR,
    AlwaysAvailable,
    BernoulliAvailability,
    ChurnAvailability,
    DiurnalAvailability,
    JointAvailability,
    find_departure_times,
    make_fleet_clients,
)
from flrce.devices.costs import DeviceProfile
from flrce.devices.fleet_model import FleetDynamics, build_fleet_dynamics
from flrce.devices.traces import TraceAvailability
from flrce.errors import BadInput
from flrce.report.live import RunWatcher
from flrce.report.why import explain_round, explain_run_end
from flrce.rng import draw_uniforms
from flrce.simulation import runs
from flrce.storage.read import read_single_run

NAMES = tuple(f"c{k}" for k in range(60))
MODELS = [
    AlwaysAvailable(),
    BernoulliAvailability(0.3, 600.0),
    DiurnalAvailability(),
    DiurnalAvailability(needs="wifi", zones=(-5.0, 0.0, 8.0)),
    ChurnAvailability(),
    ChurnAvailability(joins=DAY, stays=HOUR, away=2 * HOUR, returns=0.5),
    JointAvailability((DiurnalAvailability(), ChurnAvailability(stays=2 * DAY))),
]
FIVE = """client,from,to
a,0,100
b,50,150
c,0,20
c,60,200
d,120,200
e,199,199
"""  # e is never there


@pytest.fixture
def five(tmp_path):
    path = tmp_path / "five.csv"
    path.write_text(FIVE)
    return str(path)


def test_uniforms_are_uniform_and_the_same_for_whoever_asks():
    some = make_fleet_clients(tuple(map(str, range(20_000))))
    u = draw_uniforms(3, "x", some.ids)
    assert 0 <= u.min() < 0.001
    assert 0.999 < u.max() < 1
    counts = np.histogram(u, 20, (0, 1))[0]
    assert abs(counts - 1000).max() < 160  # five standard deviations
    assert u[7] == draw_uniforms(3, "x", make_fleet_clients(("7",)).ids)[0]
    other = np.stack(
        [
            draw_uniforms(3, "x", some.ids, 1),
            draw_uniforms(4, "x", some.ids),
            draw_uniforms(3, "y", some.ids),
        ]
    )
    assert abs(np.corrcoef(np.vstack([u, other])) - np.eye(4)).max() < 0.04


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
@settings(max_examples=25)
@given(at=st.floats(0, 20 * DAY), seed=st.integers(0, 3))
def test_what_is_said_to_hold_until_then_holds(model, at, seed):
    everyone = make_fleet_clients(NAMES)
    here, until = model.is_available(seed, everyone, at), model.find_next_change(seed, everyone, at)
    assert (until > at).all()
    for share in (0.01, 0.5, 0.999):
        between = at + share * (np.minimum(until, at + 30 * DAY) - at)
        before = between < until  # it may be rounded to the change itself
        assert (model.is_available(seed, everyone, between) == here)[before].all()
    few = np.array([3, 41])
    assert (model.is_available(seed, everyone.take_rows(few), at) == here[few]).all()
    assert (model.find_next_change(seed, everyone.take_rows(few), at) == until[few]).all()


def test_a_night_in_one_country_has_four_times_the_clients_of_a_day():
    everyone = make_fleet_clients(tuple(map(str, range(4000))))
    hours = np.array(
        [
            DiurnalAvailability().is_available(0, everyone, 5 * DAY + hour * HOUR).mean()
            for hour in range(24)
        ]
    )
    assert hours[1:5].mean() > 0.5
    assert hours[1:5].mean() > 4 * hours[9:17].mean()
    shifted = DiurnalAvailability(zones=(8.0,)).is_available(
        0, everyone, 5 * DAY + 17 * HOUR
    )  # 01:00 there
    assert abs(shifted.mean() - hours[1]) < 0.05


def test_churn_joins_leaves_and_returns():
    everyone = make_fleet_clients(tuple(map(str, range(4000))))
    model = ChurnAvailability(joins=DAY, stays=DAY, away=DAY, returns=1.0)
    assert not model.is_available(0, everyone, 0.0).any()
    # P(joined by 1 day and still in the first stay) alone is 1/e; in the long run half are there
    assert 0.33 < model.is_available(0, everyone, DAY).mean() < 0.45
    assert 0.46 < model.is_available(0, everyone, 40 * DAY).mean() < 0.54
    assert ChurnAvailability(returns=0.0).is_available(0, everyone, 30 * DAY).sum() < 5


def test_five_clients_by_hand(five):
    everyone = make_fleet_clients(("a", "b", "c", "d", "e"))
    trace = TraceAvailability(five, repeat=False)
    assert trace.is_available(0, everyone, 55.0).tolist() == [True, True, False, False, False]
    assert trace.find_next_change(0, everyone, 55.0).tolist() == [100, 150, 60, 120, np.inf]
    assert trace.is_available(0, everyone, 100.0).tolist() == [False, True, True, False, False]
    assert not trace.is_available(0, everyone, 500.0).any()
    again = TraceAvailability(five)  # 200 seconds long
    assert again.is_available(0, everyone, 455.0).tolist() == [True, True, False, False, False]
    assert again.find_next_change(0, everyone, 455.0).tolist() == [500, 550, 460, 520, 600]
    gone = find_departure_times(
        trace, 0, everyone, 60.0, 70.0
    )  # until 130: a goes at 100, d and e are not there at 60
    assert gone.tolist() == [100, np.inf, np.inf, 60, 60]


def test_what_a_client_had_spent_when_it_left(five):
    # 8000 bits/s each way, 1000 bytes: 1 s down, then 10 s at 5 W, then 1 s up; 1 mJ a byte
    device = DeviceProfile("d", 1.0, 5.0, 1e6, 0.0, 8000.0, 8000.0, 1e-3, 1e-3)
    whole = device.estimate_cost(1000, 1000, 1e7, 4)
    assert whole.other == {"joules_modelled": 52.0}
    assert replace(whole, other={}) == ClientCost(1000, 1000, 0, 1e7, 4, 10.0, 2.0, 52.0, 1.0)
    names = ("a", "b", "c", "d", "e")
    row = {name: k for k, name in enumerate(names)}
    life = FleetDynamics(
        0,
        make_fleet_clients(names),
        row,
        TraceAvailability(five, repeat=False),
        dict.fromkeys(names, device),
    )
    assert life.find_reachable_clients(0.0)[0] == ["a", "c"]
    assert life.find_time_with_clients(0.0, 3) == 60.0  # b comes at 50, c is away from 20 to 60
    assert life.find_time_with_clients(0.0, 4) == 0.0  # never
    (done, fine), (half, left), (short, gone) = life.simulate_work(
        [("b", 60.0, whole), ("a", 94.0, whole), ("c", 19.5, whole)]
    )
    assert (done, fine) == (whole, "")
    assert left == "left after 6 s of 12"
    assert replace(half, other={}) == ClientCost(1000, 0, 0, 5e6, 2, 5.0, 1.0, 26.0, 1.0)
    assert half.other == {"joules_modelled": 26.0}
    assert gone == "left after 0.5 s of 12"
    assert replace(short, other={}) == ClientCost(500, 0, 0, 0.0, 0, 0.0, 0.5, 0.5, 1.0)
    assert short.other == {"joules_modelled": 0.5}


def test_fedscale_and_flash_traces(tmp_path):
    fedscale = tmp_path / "client_behave_trace"
    told = {
        7: {
            "duration": 30,
            "inactive": [20, 80],
            "finish_time": 100,
            "active": [0, 70],
            "model": "x",
        },
        8: {"duration": 30, "inactive": [50], "finish_time": 60, "active": [10], "model": "y"},
    }
    fedscale.write_bytes(pickle.dumps(told))
    pair = make_fleet_clients(("7", "8"))
    assert TraceAvailability(str(fedscale)).is_available(0, pair, 75.0).tolist() == [
        True,
        True,
    ]  # the second's 60 s come again: 15
    assert TraceAvailability(str(fedscale)).is_available(0, pair, 59.0).tolist() == [False, False]
    flash = tmp_path / "behaviour.json"
    events = [
        ("01:00:00", "battery_charged_on"),
        ("01:10:00", "wifi"),
        ("01:20:00", "screen_off"),
        ("02:00:00", "83.0%"),
        ("03:00:00", "screen_on"),
        ("03:30:00", "battery_charged_off"),
    ]
    flash.write_text(
        json.dumps({"x": {"messages": "\n".join(f"2020-01-31 {t}\t{e}" for t, e in events)}})
    )
    phone, trace = make_fleet_clients(("x",)), TraceAvailability(str(flash))
    ready = [bool(trace.is_available(0, phone, minute * 60.0)[0]) for minute in range(24 * 60)]
    assert ready == [80 <= minute < 180 for minute in range(24 * 60)]
    charger = trace.get_charging_model()
    assert [bool(charger.is_available(0, phone, m * 60.0)[0]) for m in range(24 * 60)] == [
        60 <= m < 210 for m in range(1440)
    ]
    assert TraceAvailability(str(fedscale)).get_charging_model() is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("client,from\na,0\n", "no columns client, from, to"),
        ("client,from,to\na,9,3\n", "line 2 goes from 9 to 3"),
        ("client,from,to\na,x,3\n", "line 2 is no pair of seconds"),
        ("client,from,to\n", "holds no clients"),
        ('{"a": 3}', "cannot be read"),
        (b"\x80\x04c__builtin__\neval\n(S'1'\ntR.", "only plain numbers"),
        (b"\x80\x04", "cannot be read"),
    ],
)
def test_a_bad_trace_is_one_line(tmp_path, content, why):
    path = tmp_path / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput, match=why) as error:
        Experiment(fleet={"availability": {"piece": "trace", "path": str(path)}})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("fleet.availability=diurnl", "did you mean 'diurnal'"),
        ("fleet.availability={piece='chance', share=1.5}", "share = 1.5"),
        ("fleet.availability={piece='churn', stays=0.0}", "stays = 0.0"),
        ("fleet.availability={piece='trace', path='none.csv'}", "none.csv"),
        ("fleet.availability=['diurnal', 'curn']", "did you mean 'churn'"),
    ],
)
def test_bad_availability_is_one_line(setting, why, capsys):
    assert main(["run", "--set", setting, "--no-save"]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


def test_the_old_name_of_availability_means_the_same(tmp_path, caplog):
    old = Experiment(fleet={"presence": ["diurnal", "churn"]})
    assert old == Experiment(fleet={"availability": ["diurnal", "churn"]})
    assert "presence" not in old.to_toml()
    with pytest.raises(BadInput, match=r"fleet\.presence is the old name of fleet\.availability"):
        Experiment(fleet={"presence": "diurnal", "availability": "daily"})
    path = tmp_path / "e.toml"
    for table, told in (
        ('presence = "churn"', "fleet.presence is now called fleet.availability"),
        ('availability = "daily"', 'fleet.availability = "daily" goes by rounds'),
        ('availability = { piece = "by-chance", share = 0.3 }', '"by-chance" goes by rounds'),
        ('availability = "churn"', ""),
    ):
        path.write_text(f"[fleet]\n{table}\n")
        caplog.clear()
        Experiment.load(path)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == (1 if told else 0)
        assert not told or told in lines[0]


def test_availability_is_the_simulator_s():
    for key, value in (("availability", "diurnal"), ("interval", 60.0)):
        with pytest.raises(BadInput, match=rf"fleet\.{key} is the simulator's"):
            runs.run(Experiment(fleet={key: value}, engine={"name": "flower"}))


class EveryOther:
    """A user's model by the second, which is no subclass: a and c, then b, by slots of 10 s."""

    def is_available(self, seed, crowd, at):
        odd = np.floor(np.broadcast_to(at, len(crowd)) / 10) % 2 == 1
        return np.array([name in "bd" for name in crowd.names]) == odd

    def find_next_change(self, seed, crowd, at):
        return (np.floor(np.broadcast_to(at, len(crowd)) / 10) + 1) * 10


def not_the_first(seed, client, t):
    """A user's model by rounds: a cannot be reached in odd rounds."""
    return client != "a" or t % 2 == 0


def test_reasons_add_up_to_all_who_cannot_be_reached():
    names = ("a", "b", "c", "d", "e")
    models = [EveryOther(), not_the_first]
    life = build_fleet_dynamics(0, names, {}, models)
    # of a, c, e at second 0, a cannot be reached in round 1
    assert life.find_reachable_clients(0.0, None, 1) == (
        ["c", "e"],
        {"away": 2, "not in this round": 1},
    )
    assert life.find_reachable_clients(0.0, None, 2) == (["a", "c", "e"], {"away": 2})
    assert life.find_reachable_clients(10.0, None, 1) == (["b", "d"], {"away": 3})
    # nobody leaves its work because of the round
    assert np.isinf(
        find_departure_times(life.availability, 0, life.crowd, 0.0, 9.0)[[0, 2, 4]]
    ).all()


def test_the_record_counts_who_could_not_be_reached_and_why(tmp_path):
    names = [f"{k}" for k in range(8)]
    sessions = "".join(f"{k},{0 if int(k) < 5 else 1e5},1e6\n" for k in names)
    (tmp_path / "trace.csv").write_text("client,from,to\n" + sessions)
    # a phone that begins below its floor refuses: 0.1 of a battery against 0.2
    fleet = {
        "availability": {"piece": "trace", "path": str(tmp_path / "trace.csv")},
        "profile": "phone",
        "clients": {"0": "jetson-nano", "1": "jetson-nano", "*": "phone"},
        "battery": {"piece": "phone", "least": 0.1, "most": 0.1, "on": ["phone"]},
    }
    tables = {"rounds": 1, "clients": 8, "per_round": 4, "recipe": {"name": "fedavg"}}
    found = runs.run(Experiment(**tables, fleet=fleet), tmp_path / "run")
    why = found.history[0].why
    assert why["reachable"] == 2
    assert why["unreachable"] == {"outside its sessions": 3, "battery below its floor": 3}
    told = explain_round(read_single_run(tmp_path / "run"), 1).sentences[0]
    assert "(not asked: 3 outside its sessions, 3 battery below its floor)" in told
    last = explain_run_end(read_single_run(tmp_path / "run")).sentences
    assert any("6 of 8 clients never trained" in each for each in last)
    (view,) = RunWatcher([tmp_path]).take_snapshot()
    assert view["round"]["reach"].startswith("2 of 8 reachable (not asked: 3 outside its sessions")


def test_a_clock_too_short_for_its_fleet_is_named_before_the_run(caplog):
    tables = {"rounds": 2, "clients": 6, "per_round": 3, "recipe": {"name": "fedavg"}}
    hourly = {"piece": "chance", "share": 0.5}
    runs.run(Experiment(**tables, fleet={"availability": hourly}))
    (line,) = [r.getMessage() for r in caplog.records if "modelled clock" in r.getMessage()]
    assert "0 of 6 clients come or go" in line
    assert "fleet.interval" in line
    caplog.clear()
    # two rounds that begin two hours apart see more than an hour
    found = runs.run(Experiment(**tables, fleet={"availability": hourly, "interval": 7200.0}))
    runs.run(Experiment(**tables, fleet={"availability": "by-chance"}))
    assert not any("modelled clock" in record.getMessage() for record in caplog.records)
    assert found.history[1].began == 7200.0


MIX = {"raspberry-pi-4": 0.5, "phone": 0.5}
LIVING = {
    "rounds": 8,
    "clients": 12,
    "per_round": 4,
    "train": {"epochs": 1},
    "fleet": {"profile": MIX, "availability": {"piece": "chance", "share": 0.5, "slot": 0.05}},
}
PACES = [None, {"piece": "fastest"}, {"piece": "buffered", "size": 2}]
paced = pytest.mark.parametrize("pace", PACES, ids=["synchronous", "fastest", "buffered"])


def living(pace):
    return Experiment(**LIVING, recipe={"name": "fedavg", **({"pace": pace} if pace else {})})


@paced
def test_nobody_works_while_absent_and_the_books_add_up(pace, tmp_path):
    experiment = living(pace)
    found = list(runs.rounds(experiment))
    life = experiment.fleet.build_fleet_model(
        0, tuple(runs.build_data_and_model(experiment)[0].clients), {}
    )
    assert any("left after" in why for done in found for why in done.record.rejected.values())
    sent = {}
    for before, done in pairwise([None, *found]):
        record = done.record
        assert record.began >= (before.record.began + before.record.seconds if before else 0.0)
        assert set(record.chosen) <= set(life.find_reachable_clients(record.began)[0])
        sent |= dict.fromkeys(record.chosen, record.began)
        for line in done.clients:
            some = life.crowd.take_rows(life.get_indices([line.client]))
            gone = find_departure_times(
                life.availability, 0, some, sent[line.client], max(line.spent.seconds - 1e-9, 0.0)
            )
            assert np.isinf(gone[0])
        useful = sum(line.spent.joules for line in done.clients if line.outcome == "useful")
        assert useful + record.joules_wasted == pytest.approx(record.joules)
    straight = runs.run(experiment, tmp_path / "straight")
    assert straight.summary["seconds"] == found[-1].record.began + found[-1].record.seconds


@paced
def test_killed_after_any_round_it_goes_on_to_the_same_bits(pace, tmp_path):
    experiment = living(pace)
    runs.run(experiment, tmp_path / "straight")
    want = (tmp_path / "straight/rounds.jsonl").read_bytes()

    def quit_after(stop, done):
        if done.record.t == stop:
            raise KeyboardInterrupt

    for stop in (1, 3, 6):
        killed = tmp_path / f"killed-{stop}"
        with pytest.raises(KeyboardInterrupt):
            runs.run(experiment, killed, watch=lambda done, stop=stop: quit_after(stop, done))
        runs.run(experiment, killed, resume=True)
        assert (killed / "rounds.jsonl").read_bytes() == want
        assert (killed / "model.safetensors").read_bytes() == (
            tmp_path / "straight/model.safetensors"
        ).read_bytes()


def test_a_night_is_waited_for():
    nights = {"piece": "diurnal", "night": 1.0, "day": 0.0, "spread": 0.0, "wifi": 1.0}
    tables = {"rounds": 2, "clients": 6, "per_round": 3, "recipe": {"name": "fedavg", "minimum": 3}}
    first = runs.run(Experiment(**tables, fleet={"availability": nights})).history[0]
    assert first.began == 0.0  # plugged in since 22:30 or so of the day before
    first = runs.run(
        Experiment(**tables, fleet={"availability": {**nights, "zones": [9.0]}})
    ).history[0]
    assert 13.2 * HOUR < first.began < 13.8 * HOUR  # 09:00 there, and plugged in at 22:15 to 22:45
