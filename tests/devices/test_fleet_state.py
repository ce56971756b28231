"""Presence, batteries, carbon and pace all at once: whatever they are, the books hold and a kill
changes nothing.
"""

import json
import pickle
from itertools import pairwise

import numpy as np
import pytest

from flrce import Experiment
from flrce.devices.availability import HOUR, find_departure_times
from flrce.devices.carbon import JOULES_PER_KWH
from flrce.devices.costs import assign_devices
from flrce.report.carbon import shift_run_start
from flrce.simulation import runs
from flrce.storage.read import read_single_run

# ten minutes a batch, so that a task lasts an hour and takes half a battery; boards take half the
# time
SLOW = {
    "idle_watts": 0.5,
    "active_watts": 8.0,
    "flops": 1e9,
    "batch_seconds": 600.0,
    "up_bits": 1e6,
    "down_bits": 1e6,
    "up_joules": 1e-5,
    "down_joules": 1e-5,
}
DEADLINE, LATER = (
    {"piece": "deadline", "seconds": 0.6 * HOUR},
    {"piece": "clean-hours", "share": 0.3, "within": 4e4},
)
CASES = {
    "chance, deadline": ({"piece": "chance", "share": 0.6, "slot": 2 * HOUR}, DEADLINE),
    "diurnal, clean hours": ({"piece": "diurnal", "needs": "wifi"}, LATER),
    "diurnal and churn, buffered": (
        [
            {"piece": "diurnal", "needs": "wifi"},
            {"piece": "churn", "joins": HOUR, "stays": 9 * HOUR, "away": HOUR, "returns": 1.0},
        ],
        {"piece": "buffered", "size": 2},
    ),
    "sessions from a csv file, fastest": ("csv", {"piece": "fastest"}),
    "FedScale's trace, deadline": ("fedscale", {**DEADLINE, "seconds": 0.7 * HOUR}),
    "FLASH's phones, clean hours": ("flash", LATER),
}


def traces(folder):
    """The same kind of fleet in three public forms: sessions of hours, some every day, some cut
    short.
    """
    rng, on = np.random.default_rng(0), {}
    for k in range(10):
        starts = np.cumsum(rng.uniform(1, 4, 5)) * HOUR
        on[str(k)] = [
            (a, a + rng.uniform(0.5, 0.9) * (b - a)) for a, b in pairwise(starts.tolist())
        ]
    rows = [f"{client},{a:.1f},{b:.1f}" for client, some in on.items() for a, b in some]
    (folder / "csv").write_text("\n".join(["client,from,to", *rows]))
    told = {
        int(client): {
            "active": [int(a) for a, _ in some],
            "inactive": [int(b) for _, b in some],
            "finish_time": int(some[-1][1]) + 600,
            "duration": 1,
            "model": "x",
        }
        for client, some in on.items()
    }
    (folder / "fedscale").write_bytes(pickle.dumps(told))
    phones = {}
    for client, some in on.items():
        lines = ["2020-01-31 00:00:00\twifi", "2020-01-31 00:00:00\tscreen_off"]
        for a, b in some:
            lines += [
                f"2020-01-31 {_clock(a)}\tbattery_charged_on",
                f"2020-01-31 {_clock(b)}\tbattery_charged_off",
            ]
        phones[client] = {"messages": "\n".join(lines)}
    (folder / "flash").write_text(json.dumps(phones))


def _clock(second):
    return f"{int(second // 3600):02}:{int(second % 3600 // 60):02}:{int(second % 60):02}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("living")
    traces(found)
    for name, batch in (("slow", 600.0), ("board", 300.0)):
        figures = {**SLOW, "batch_seconds": batch}
        lines = [
            f'{key} = {{ value = {value}, source = "made up" }}' for key, value in figures.items()
        ]
        (found / f"{name}.toml").write_text("\n".join(lines))
    hours = 200.0 + 150.0 * np.sin(np.arange(24 * 30) / 24 * 2 * np.pi)
    np.savez(
        found / "c.npz", DE=hours, DE_start="2021-03-01", CISO=hours[::-1], CISO_start="2021-03-01"
    )
    return found


def experiment(folder, case, **changes):
    availability, pace = CASES[case]
    availability = (
        {"piece": "trace", "path": str(folder / availability)}
        if isinstance(availability, str)
        else availability
    )
    living = {
        "profile": {str(folder / "slow.toml"): 0.7, str(folder / "board.toml"): 0.3},
        "availability": availability,
        "battery": {
            "piece": "phone",
            "floor": 0.25,
            "least": 0.4,
            "charge_watts": 5.0,
            "on": [str(folder / "slow.toml")],
        },
        "carbon": str(folder / "c.npz"),
        "start": "2021-03-02T06:00",
    }
    tables = {
        "rounds": 7,
        "clients": 10,
        "per_round": 4,
        "train": {"epochs": 2, "batch": 64},
        "fleet": living,
        "data": {"partition": "iid"},
        "recipe": {"name": "fedavg", "pace": pace, "minimum": 2},
    }
    return Experiment(**{**tables, **changes})


def alive(exp):
    clients = tuple(runs.build_data_and_model(exp)[0].clients)
    return exp.fleet.build_fleet_model(
        exp.seed, clients, assign_devices(exp.fleet.profile, clients, exp.seed, exp.fleet.clients)
    )


def works(found):
    """(client, when it was sent its task, its line) of every task, round by round."""
    sent = {}
    for done in found:
        sent |= dict.fromkeys(done.record.chosen, done.record.began)
        yield [(line.client, sent[line.client], line) for line in done.clients]


def held(life, works, client, until):
    """What a client's battery holds, in a plain loop over the edges of its charger's hours and of
    its work.
    """
    one, battery = life.crowd.take_rows(life.get_indices([client])), life.battery
    level = float(
        life.compute_battery_levels(life.initial_state(), life.get_indices([client]), np.zeros(1))[
            0
        ]
    )
    now = 0.0
    for end, joules in [
        *((began + line.spent.seconds, line.spent.joules) for _, began, line in works),
        (until, 0.0),
    ]:
        while now < end:
            edge = min(float(life.charger.find_next_change(life.seed, one, now)[0]), end)
            watts = (
                battery.charge_watts * bool(life.charger.is_available(life.seed, one, now)[0])
                - battery.idle_watts
            )
            level = min(max(level + watts * (edge - now) / battery.joules, 0.0), 1.0)
            now = edge
        level = min(max(level - joules / battery.joules, 0.0), 1.0)
    return level


def emitted(life, client, began, spent):
    """Grams of some work, minute by minute."""
    hours, at = life.grid.hours[life.grid.of[life.row[client]]], began + life.grid.start
    steps = max(int(spent.seconds // 60), 1)
    middles = at + (np.arange(steps) + 0.5) * spent.seconds / steps
    return (
        spent.joules
        / JOULES_PER_KWH
        * float(np.mean([hours.values[int((x - hours.first) // HOUR)] for x in middles]))
    )


@pytest.mark.parametrize("case", CASES)
def test_whatever_the_fleet_its_books_hold(folder, case):
    exp = experiment(folder, case)
    life, found = alive(exp), list(runs.rounds(exp))
    phones = {
        client for client, has in zip(life.crowd.names, life.has.tolist(), strict=True) if has
    }
    assert phones
    assert len(phones) < 10
    charge, done_before, all_works = life.initial_state(), None, []
    for done, lines in zip(found, works(found), strict=True):
        record = done.record
        assert record.began >= (
            done_before.record.began + done_before.record.seconds if done_before else 0.0
        )
        # nobody is asked who is away or below its floor, and nobody works after it has left
        assert set(record.chosen) <= set(life.find_reachable_clients(record.began, charge)[0])
        for client in phones & set(record.chosen):
            assert (
                held(life, [w for w in all_works if w[0] == client], client, record.began)
                >= life.battery.floor
            )
        for client, began, line in lines:
            some = life.crowd.take_rows(life.get_indices([client]))
            assert np.isinf(
                find_departure_times(
                    life.availability, exp.seed, some, began, max(line.spent.seconds - 1e-6, 0.0)
                )[0]
            )
            assert line.spent.grams == pytest.approx(
                emitted(life, client, began, line.spent), rel=0.02, abs=1e-9
            )
        # useful and wasted are all there is
        for total, wasted, of in (
            (record.joules, record.joules_wasted, lambda spent: spent.joules),
            (record.grams, record.grams_wasted, lambda spent: spent.grams),
            (
                record.bytes_up + record.bytes_down,
                record.bytes_wasted,
                lambda spent: spent.bytes_up + spent.bytes_down,
            ),
        ):
            useful = sum(of(line.spent) for line in done.clients if line.outcome == "useful")
            assert useful + wasted == pytest.approx(total)
        all_works += lines
        charge, done_before = done.state.server_state["fleet"], done
        # what was drawn from each battery is what its client's lines say
        for client in {client for client, _, _ in lines} & phones:
            mine, k = [work for work in all_works if work[0] == client], life.row[client]
            assert float(charge.level[k]) == pytest.approx(
                held(life, mine, client, float(charge.since[k])), abs=1e-9
            )
    assert sum(record.seconds for record in (done.record for done in found)) > HOUR


def test_the_cases_are_no_idle_ones(folder):
    """Between them: clients that leave, late ones, flat batteries, rounds that wait, rounds that
    are abandoned.
    """
    seen, waits, given_up = [], 0, 0
    for case in CASES:
        found = [done.record for done in runs.rounds(experiment(folder, case, seed=1))]
        seen += [
            why.split(" after ")[0].split(":")[0]
            for record in found
            for why in record.rejected.values()
        ]
        given_up += sum(record.outcome == "abandoned" for record in found)
        waits += sum(b.began > a.began + a.seconds for a, b in pairwise(found))
    assert {"left", "late", "left with a flat battery"} <= set(seen)
    assert waits > 3
    assert given_up


@pytest.mark.parametrize(
    ("case", "event"), [(case, 1 + 2 * (i % 3)) for i, case in enumerate(CASES)]
)
def test_killed_at_any_event_it_goes_on_to_the_same_bits(folder, case, event, tmp_path):
    """An event is a round that was yielded, abandoned ones too: the kill comes before the next one
    is begun.
    """
    exp, count = experiment(folder, case, seed=1), [0]

    def quit_at(done):
        count[0] += 1
        if count[0] == event:
            raise KeyboardInterrupt

    assert len(runs.run(exp, tmp_path / "straight").history) > event
    with pytest.raises(KeyboardInterrupt):
        runs.run(exp, tmp_path / "killed", watch=quit_at)
    runs.run(exp, tmp_path / "killed", resume=True)
    same, later = shift_run_start(
        read_single_run(tmp_path / "straight"), ["2021-03-02T06:00", "2021-03-08T18:00"]
    )
    assert same.ratio == pytest.approx(1)  # begun when it was, it emits what was booked
    assert abs(later.ratio - 1) > 0.01
    for file in ("rounds.jsonl", "clients.jsonl", "model.safetensors"):
        assert (tmp_path / "killed" / file).read_bytes() == (
            tmp_path / "straight" / file
        ).read_bytes(), file
