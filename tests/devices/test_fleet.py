"""Fleets of several devices, budgets that hold, energy that is measured where it can be, and this
machine's profile.
"""

import json
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce import Experiment
from flrce.cli import profile
from flrce.cli.cli import main
from flrce.cli.profile import (
    SpeedFit,
    StepTiming,
    choose_form,
    compute_held_out_errors,
    fit_timings,
)
from flrce.devices.availability import DailyRoundAvailability, RandomRoundAvailability
from flrce.devices.costs import assign_devices, load_profile
from flrce.devices.energy import EnergyMeter, EnergyReading, extract_counters
from flrce.errors import BadInput
from flrce.models.flat import pack_model
from flrce.report.page import render_report
from flrce.simulation import runs
from flrce.storage.read import read_single_run

NAMES = ("jetson-nano", "raspberry-pi-4", "phone")


@given(st.integers(1, 60), st.lists(st.floats(0.05, 5), min_size=1, max_size=3), st.integers(0, 99))
def test_a_mix_gives_every_client_one_device_in_its_shares(M, shares, seed):
    clients = [f"c{i}" for i in range(M)]
    mix = dict(zip(NAMES, shares, strict=False))
    devices = assign_devices(mix, clients, seed)
    assert set(devices) == set(clients)
    assert devices == assign_devices(mix, clients, seed)
    count = Counter(device.name for device in devices.values())
    for name, share in mix.items():
        assert abs(count[name] - M * share / sum(shares)) <= 1


def test_the_seed_decides_who_has_what():
    clients = [f"c{i}" for i in range(40)]
    mix = {"jetson-nano": 0.7, "raspberry-pi-4": 0.3}
    first, second = assign_devices(mix, clients, 0), assign_devices(mix, clients, 1)
    assert Counter(d.name for d in first.values()) == {"jetson-nano": 28, "raspberry-pi-4": 12}
    assert first != second


def test_devices_by_client(tmp_path, caplog):
    clients = ["phone-1", "phone-2", "clinic", "shed"]
    named = {
        "phone-*": "phone",
        "phone-2": "jetson-nano",
        "shed": "raspberry-pi-4",
    }  # a name beats a pattern
    devices = assign_devices("laptop-cpu", clients, 0, named)
    assert [devices[c].name for c in clients] == [
        "phone",
        "jetson-nano",
        "laptop-cpu",
        "raspberry-pi-4",
    ]
    path = tmp_path / "devices.csv"
    path.write_text(
        "client,profile\nphone-*,phone\nphone-2,jetson-nano\nshed,raspberry-pi-4\nelsewhere,phone\n\n"
    )
    assert assign_devices("laptop-cpu", clients, 0, str(path)) == devices
    assert not caplog.text
    assign_devices("laptop-cpu", clients, 0, {"tablet-*": "phone"})
    assert "'tablet-*' fits no client" in caplog.text


def test_the_rest_of_a_fleet_stays_what_it_was():
    clients = [f"c{i}" for i in range(40)]
    mix = {"jetson-nano": 0.7, "raspberry-pi-4": 0.3}
    plain, named = assign_devices(mix, clients, 0), assign_devices(mix, clients, 0, {"c7": "phone"})
    assert {c for c in clients if plain[c] != named[c]} == {"c7"}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no columns client and profile"),
        ("name,device\na,phone\n", "no columns client and profile"),
        ("client,profile\na\n", "line 2 is no pair"),
        ("client,profile\na,phone\na,phone\n", "line 3 is no pair, or names a client twice"),
        ("client,profile\na,phnoe\n", "did you mean 'phone'"),
    ],
)
def test_malformed_lists_of_devices(tmp_path, text, match):
    (tmp_path / "devices.csv").write_text(text)
    with pytest.raises(BadInput, match=match):
        assign_devices("phone", ["a"], 0, str(tmp_path / "devices.csv"))


def test_a_slower_device_takes_longer():
    def seconds(kind):
        exp = Experiment(
            rounds=1,
            clients=4,
            per_round=4,
            recipe={"name": "fedavg"},
            fleet={"clients": {"2": kind}},
        )
        return next(runs.rounds(exp)).record.seconds

    assert seconds("raspberry-pi-4") != seconds("laptop-cpu")


def test_oort_prefers_the_fast_half_of_a_fleet():
    mix = {"laptop-cpu": 0.5, "raspberry-pi-4": 0.5}
    shared = {
        "rounds": 25,
        "clients": 30,
        "per_round": 6,
        "data": {"partition": "iid"},
        "train": {"epochs": 1},
        "fleet": {"profile": mix},
        "engine": {"workers": 1, "eval_every": 25},
    }
    slow = {}
    for name in ("fedavg", "oort"):
        exp = Experiment(**shared, recipe={"name": name})
        devices = assign_devices(mix, clients_of(exp), exp.seed)
        picks = [c for h in runs.run(exp).history[5:] for c in h.replied]
        slow[name] = sum(devices[c].name == "raspberry-pi-4" for c in picks) / len(picks)
    assert slow["fedavg"] > 0.35
    assert slow["oort"] < 0.6 * slow["fedavg"]


def clients_of(exp):
    built = runs.build_simulation(exp)
    built.engine.close()
    return built.federation.clients


# --- budgets ------------------------------------------------------------------------------------


def limited(recipe="fedavg", **stop):
    return Experiment(
        rounds=30,
        clients=10,
        per_round=3,
        recipe={"name": recipe},
        stop=stop,
        train={"epochs": 1},
        engine={"workers": 1, "eval_every": 30},
    )


def spent_by(history):
    return {
        "joules": sum(h.joules for h in history),
        "bytes": sum(h.bytes_up + h.bytes_down for h in history),
        "seconds": sum(h.seconds for h in history),
    }


@pytest.fixture(scope="module")
def unlimited():
    """What a recipe does without a budget, each asked for once."""
    return cache(lambda recipe: runs.run(limited(recipe)).history)


@pytest.mark.parametrize("recipe", ["fedavg", "oort", "power-of-choice", "pyramidfl"])
@pytest.mark.parametrize("kind", ["joules", "bytes", "seconds"])
def test_a_budget_is_never_passed(recipe, kind, unlimited):
    free = unlimited(recipe)
    limit = 0.4 * spent_by(free)[kind]
    history = runs.run(limited(recipe, **{kind: limit})).history
    assert "budget" in history[-1].stop
    assert kind in history[-1].stop
    assert len(history) < len(free)
    assert (
        spent_by(history)[kind] <= limit
    )  # what a refused round would have asked or sent included
    done = [h for h in history if h.outcome == "committed"]
    for h, same in zip(
        done, free, strict=False
    ):  # the budget changes nothing before it ends the run
        assert (h.chosen, h.joules) == (same.chosen, same.joules)


@pytest.mark.parametrize("recipe", ["power-of-choice", "fedcomgate", "oort"])
@pytest.mark.parametrize("kind", ["joules", "bytes"])
def test_a_round_just_beyond_the_budget_costs_nothing(recipe, kind, unlimited):
    """What it would ask before training and send besides the model counts as well."""
    free = unlimited(recipe)
    for rounds in (1, 7):
        limit = 0.999 * spent_by(free[:rounds])[kind]
        history = runs.run(limited(recipe, **{kind: limit})).history
        assert history[-1].outcome == "not started"
        assert spent_by(history)[kind] <= limit
        assert spent_by(history[-1:])[kind] == 0


def test_with_exact_estimates_a_joule_budget_is_not_passed_at_all():
    limit = 2.5 * runs.run(limited()).history[0].joules
    history = runs.run(limited(joules=limit)).history
    assert history[-1].outcome == "not started"
    assert spent_by(history)["joules"] <= limit


def test_a_round_that_cannot_be_paid_for_is_not_started():
    exp = limited(joules=1e-6)
    result = runs.run(exp)
    (only,) = result.history
    assert only.outcome == "not started"
    assert only.stop.startswith("next round would pass budget of 1e-06 joules")
    assert spent_by(result.history) == {"joules": 0, "bytes": 0, "seconds": 0}
    built = runs.build_simulation(exp)
    built.engine.close()
    start = pack_model(built.net)
    assert torch.equal(torch.cat([x.flatten() for x in result.model.values()]), start)


def test_a_budget_of_rounds_counts_committed_ones():
    history = runs.run(limited(rounds=4)).history
    assert [h.outcome for h in history] == ["committed"] * 4 + ["not started"]


def test_a_finished_budget_stays_finished(tmp_path):
    exp = limited(joules=1.0)
    first = runs.run(exp, tmp_path / "run").history
    again = runs.run(exp, tmp_path / "run", resume=True).history
    assert first == again


# --- measured energy ----------------------------------------------------------------------------


def test_a_meter_says_what_it_measures_or_why_not():
    meter = EnergyMeter()
    result, reading = meter.measure(lambda: sum(range(200_000)))
    assert result == sum(range(200_000))
    assert reading.seconds > 0
    if meter.why:
        assert reading.joules is None
        assert reading.watts is None
        assert "\n" not in meter.why
    else:
        assert reading.joules > 0
        assert {name for name, _ in reading.counters} == set(meter.seen)


def test_a_failed_piece_of_work_leaves_the_meter_usable():
    meter = EnergyMeter()
    with pytest.raises(ZeroDivisionError):
        meter.measure(lambda: 1 / 0)
    assert meter.measure(lambda: 7)[0] == 7


def test_a_processors_counter_is_read_through_zeus(tmp_path, monkeypatch):
    """zeus's own RAPL code over a counter made of files: 1 J before the work, 6 J after it."""
    rapl = pytest.importorskip("zeus.device.cpu.rapl", reason="extra energy")
    zone = tmp_path / "intel-rapl" / "intel-rapl:0"
    zone.mkdir(parents=True)
    for name, text in {
        "name": "package-0",
        "energy_uj": "1000000",
        "max_energy_range_uj": "262143328850",
    }.items():
        (zone / name).write_text(text)
    monkeypatch.setattr(rapl, "RAPL_DIR", str(tmp_path / "intel-rapl"))
    monkeypatch.setattr("zeus.device.cpu._cpus", None)
    rapl.rapl_is_available.cache_clear()
    meter = EnergyMeter()
    rapl.rapl_is_available.cache_clear()
    assert (meter.why, meter.seen) == ("", ("cpu 0",))
    _, reading = meter.measure(lambda: (zone / "energy_uj").write_text("6000000"))
    assert reading.joules == pytest.approx(5.0)


def test_counters_of_processors_add_up():
    Measurement = pytest.importorskip("zeus.monitor.energy", reason="extra energy").Measurement
    window = Measurement(time=2.0, gpu_energy={0: 30.0}, cpu_energy={0: 8.0}, dram_energy={0: 2.0})
    reading = EnergyReading(window.time, extract_counters(window))
    assert reading.counters == (("gpu 0", 30.0), ("cpu 0", 8.0), ("dram 0", 2.0))
    assert reading.joules == 40
    assert reading.watts == 20


def test_a_jetsons_total_is_never_added_to_its_rails():
    Measurement = pytest.importorskip("zeus.monitor.energy", reason="extra energy").Measurement
    from zeus.device.soc.jetson import JetsonMeasurement

    soc = JetsonMeasurement(cpu_energy_mj=4000.0, gpu_energy_mj=3000.0, total_energy_mj=9000.0)
    assert extract_counters(Measurement(time=1.0, gpu_energy={}, soc_energy=soc)) == (
        ("board", 9.0),
    )


def test_apples_parts_are_joules():
    Measurement = pytest.importorskip("zeus.monitor.energy", reason="extra energy").Measurement
    from zeus.device.soc.apple import AppleSiliconMeasurement

    soc = AppleSiliconMeasurement(cpu_total_mj=1500, gpu_mj=500)
    assert extract_counters(Measurement(time=1.0, gpu_energy={}, soc_energy=soc)) == (
        ("cpu_total", 1.5),
        ("gpu", 0.5),
    )


# --- this machine's profile ---------------------------------------------------------------------


def timing(network, seconds, fitted=True, **work):
    return StepTiming(network, 8, fitted, {"batches": 1.0, **work}, seconds)


@given(st.floats(1e-5, 1e-1), st.floats(1e8, 1e12))
def test_the_fit_finds_the_line_that_the_timings_lie_on(fixed, rate):
    points = [timing("a", fixed + flops / rate, flops=flops) for flops in (1e6, 1e7, 1e8, 1e9)]
    fit = fit_timings(points, ("batches", "flops"))
    for point in points:
        assert fit.predict(point.work) == pytest.approx(point.seconds, rel=1e-6)


def test_a_fixed_cost_is_never_negative():
    points = [timing("a", s, flops=f) for f, s in ((1e6, 1e-9), (1e8, 1.0), (2e8, 2.1))]
    fit = fit_timings(points, ("batches", "flops"))
    assert fit.seconds_each["batches"] >= 0
    assert fit.seconds_each["flops"] > 0


def make_timings(seconds_of):
    """Networks a to d at two sizes each, whose seconds follow from their work."""
    work = {"a": (10, 1e6, 1e6), "b": (40, 9e6, 3e6), "c": (20, 2e6, 9e7), "d": (90, 5e7, 2e7)}
    return [
        timing(
            name,
            seconds_of(operations, size * moved, size * flops),
            operations=operations,
            moved_bytes=size * moved,
            flops=size * flops,
        )
        for name, (operations, moved, flops) in work.items()
        for size in (1, 10)
    ]


def test_the_form_that_predicts_networks_it_has_not_seen_is_taken():
    by_traffic = make_timings(lambda ops, moved, flops: 1e-4 * ops + 1e-9 * moved + 1e-10 * flops)
    form = choose_form(by_traffic)
    assert form == ("operations", "moved_bytes", "flops")
    assert max(compute_held_out_errors(by_traffic, form).values()) < 1e-6
    assert max(compute_held_out_errors(by_traffic, ("batches", "flops")).values()) > 1
    by_rate = make_timings(lambda ops, moved, flops: 1e-3 + 1e-9 * flops)
    assert choose_form(by_rate) == ("batches", "flops")
    assert max(compute_held_out_errors(by_rate, ("batches", "flops")).values()) < 1e-6


def test_a_poor_fit_is_measured_again_and_then_refused(monkeypatch, tmp_path, capsys):
    tries = []

    def time_badly(trials):
        tries.append(len(trials))
        return [timing("a", 1e-3, flops=1e6), timing("a", 9.0, fitted=False, flops=2e6)]

    monkeypatch.setattr(profile, "time_steps", time_badly)
    out = tmp_path / "board.toml"
    told = ["--watts", "3", "--idle-watts", "1", "--out", str(out)]
    assert main(["profile", "--model", "cnn-digits", *told]) == 2
    assert "no profile is written; measure while nothing else runs" in capsys.readouterr().err
    assert tries == [1] * profile.MAX_FIT_TRIES
    assert not out.exists()


def test_flrce_profile_makes_a_fleet_of_this_machine(tmp_path, capsys):
    mine = tmp_path / "mine.toml"
    assert (
        main(
            [
                "profile",
                "--model",
                "cnn-digits",
                "--out",
                str(mine),
                "--watts",
                "30",
                "--idle-watts",
                "5",
                "--json",
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    assert "give --watts" not in said.err  # it was given
    rows = {row["figure"]: row for row in json.loads(said.out)}
    device = load_profile(str(mine))
    assert (device.active_watts, device.idle_watts) == (30, 5)
    assert "told to flrce profile" in rows["active_watts"]["source"]
    assert "measured by flrce profile" in rows["flops"]["source"]
    assert "that were not fitted: cnn-digits, batches of 8, 32, 96" in rows["error"]["source"]
    assert device.error > 0
    assert 1e6 < device.flops < 1e15
    assert 0 <= device.batch_seconds < 1
    exp = Experiment(
        rounds=1, clients=5, per_round=2, fleet={"profile": str(mine)}, engine={"workers": 1}
    )
    assert runs.run(exp).summary["joules"] > 0


def test_a_profile_of_an_experiments_own_network(tmp_path, capsys):
    """Its network, optimiser and batch: 3 of 24 samples are fitted and 24, tried are 6, 12 and
    48.
    """
    mine, file = tmp_path / "mine.toml", tmp_path / "own.toml"
    file.write_text(
        'clients = 6\nper_round = 2\nmodel.name = "mlp"\n[train]\nbatch = 24\noptimizer = "adam"\n'
    )
    told = ["--watts", "30", "--idle-watts", "5", "--json"]
    assert (
        main(["profile", "--for", str(file), "--set", "train.lr=0.01", "--out", str(mine), *told])
        == 0
    )
    rows = {row["figure"]: row for row in json.loads(capsys.readouterr().out)}
    assert "the network of own.toml, batches of 6, 12, 48" in rows["error"]["source"]
    assert "training the network of own.toml" in rows["flops"]["source"]
    exp = Experiment.load(file, [f"fleet.profile={mine}", "rounds=1"])
    assert runs.run(exp).summary["joules_high"] > 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--model", "cnn-cifra"], "did you mean 'cnn-cifar'"),
        (["--for", "nowhere.toml"], "nowhere.toml"),
        (["--for", "nowhere.toml", "--model", "cnn-digits"], "give one of the two"),
        (["--set", "train.lr=0.1"], "name it with --for FILE"),
        (["--watts", "-3"], "--watts -3: must be above 0"),
        (["--out", "mine.json"], "a profile's name ends in .toml"),
        (["--model", "cnn-digits", "--meter", "nowhere"], "--meter 'nowhere' cannot be read"),
    ],
)
def test_bad_input_of_flrce_profile_is_one_line(arguments, why, capsys):
    assert main(["profile", *arguments]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1
    assert not Path("mine.json").exists()


def test_clients_come_and_go_by_seed_and_round():
    some = [f"c{k}" for k in range(200)]
    half = [client for client in some if RandomRoundAvailability(0.5)(0, client, 3)]
    assert 70 < len(half) < 130
    assert half == [client for client in some if RandomRoundAvailability(0.5)(0, client, 3)]
    assert half != [client for client in some if RandomRoundAvailability(0.5)(0, client, 4)]
    assert half != [client for client in some if RandomRoundAvailability(0.5)(1, client, 3)]
    for client in some[:5]:  # 3 of every 6 rounds, one after the other
        there = [DailyRoundAvailability(6, 3)(0, client, t) for t in range(1, 25)]
        assert sum(there) == 12
        assert sum(a != b for a, b in pairwise(there)) <= 8
        assert there[:6] == there[6:12]


def test_the_experiment_says_who_can_be_reached():
    tables = {"rounds": 6, "clients": 10, "per_round": 4, "recipe": {"name": "fedavg"}}
    found = runs.run(
        Experiment(**tables, fleet={"availability": {"piece": "by-chance", "share": 0.4}})
    )
    there = RandomRoundAvailability(0.4)
    for record in found.history:
        assert 0 < len(record.chosen) <= 4
        assert all(there(0, client, record.t) for client in record.chosen)
    with pytest.raises(BadInput, match=r"fleet\.availability = 'by-chance': share"):
        Experiment(fleet={"availability": {"piece": "by-chance", "share": 2.0}})
    with pytest.raises(BadInput, match="did you mean 'daily'"):
        Experiment(fleet={"availability": "dayly"})


def test_a_profile_s_error_reaches_the_books(tmp_path):
    tables = {"rounds": 2, "clients": 5, "per_round": 2, "recipe": {"name": "fedavg"}}
    found = runs.run(Experiment(**tables, fleet={"profile": "raspberry-pi-4"}), tmp_path / "run")
    s = found.summary
    assert s["joules_low"] == pytest.approx(s["joules"] / 1.5)  # its error is 0.5
    assert s["joules_high"] == pytest.approx(s["joules"] * 1.5)
    assert f"({s['joules_low']:.4g} to {s['joules_high']:.4g})" in repr(found)
    assert "the true value may be 0.67 to 1.50 times this" in render_report(
        [read_single_run(tmp_path / "run")]
    )


def test_errors_of_what_was_not_fitted():
    fit = SpeedFit({"batches": 1.0, "flops": 1e-9})
    assert fit.compute_error(timing("a", 2.0, flops=1e9)) == 0  # 1 s and 1 s
    assert fit.compute_error(timing("a", 4.0, flops=1e9)) == 1  # half of what it takes
