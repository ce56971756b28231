"""Batteries and grams: worked by hand, conserved, resumed to the same bits."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from eafl import eafl
from hypothesis import given, settings
from hypothesis import strategies as st

from flrce.cli.cli import main
from flrce.config.experiment import Experiment
from flrce.core.engine import view_with_fleet_state
from flrce.core.roles import RoundView
from flrce.core.types import ClientCost, State
from flrce.devices.availability import (
    DAY,
    HOUR,
    AlwaysAvailable,
    DiurnalAvailability,
    make_fleet_clients,
)
from flrce.devices.battery import PhoneBattery
from flrce.devices.carbon import (
    CarbonGrid,
    HourlyIntensity,
    build_carbon_grid,
    get_utc_offset,
    load_intensities,
    parse_time,
)
from flrce.devices.costs import DeviceProfile
from flrce.devices.fleet_model import build_fleet_dynamics
from flrce.devices.traces import TraceAvailability
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.pacing.clean_hours import CleanHours
from flrce.methods.selection.cleanest import LowCarbonSelector
from flrce.simulation import runs
from flrce_client.power_supply import get_battery_metric, read_battery_level
from stub_engine import StubEngine

NAMES = ("a", "b", "c", "d", "e")
DEVICE = DeviceProfile("d", 0.0, 5.0, 1e6, 0.0, 8000.0, 8000.0, 1e-3, 1e-3)
SHARED = Path(__file__).parents[3] / "shared/data/carbon.npz"


def phones(charging, **fields):
    """One watt-hour each, full at first; 2 W while plugged in, 0.5 W always."""
    set_ = {
        "capacity": 1.0,
        "charge_watts": 2.0,
        "idle_watts": 0.5,
        "least": 1.0,
        "floor": 0.25,
        **fields,
    }
    return build_fleet_dynamics(
        0,
        NAMES,
        dict.fromkeys(NAMES, DEVICE),
        [AlwaysAvailable()],
        PhoneBattery(charging=charging, **set_),
    )


@pytest.fixture
def plugs(tmp_path):
    path = tmp_path / "plugs.csv"
    path.write_text("client,from,to\na,0,10000\nb,1800,3600\nc,0,600\nd,9999,10000\ne,3600,10000\n")
    return TraceAvailability(str(path), repeat=False)


def test_five_batteries_by_hand(plugs):
    fleet = phones(plugs)
    rows, hour = np.arange(5), np.full(5, 3600.0)
    # 3600 J each. a: always plugged, stays full. b: -900 J in half an hour, then +2700: full again.
    # c: full for 600 s, then -0.5 W for 3000 s = -1500 J. d and e: -1800 J.
    assert fleet.compute_battery_levels(
        fleet.initial_state(), rows, hour
    ).tolist() == pytest.approx([1, 1, 2100 / 3600, 0.5, 0.5])
    # at 5400 s: b -900 J, c -2400 J, d -2700 J (a quarter is left), e +2700 J again
    later = fleet.compute_battery_levels(fleet.initial_state(), rows, np.full(5, 5400.0)).tolist()
    assert later == pytest.approx([1, 0.75, 1200 / 3600, 0.25, 1.0])
    assert fleet.find_reachable_clients(5399.0, fleet.initial_state())[0] == list(NAMES)
    assert fleet.find_reachable_clients(5500.0, fleet.initial_state())[0] == [
        "a",
        "b",
        "c",
        "e",
    ]  # d is below its floor and refuses


def test_work_drains_and_a_flat_battery_ends_it(plugs):
    fleet = phones(plugs)
    whole = DEVICE.estimate_cost(1000, 1000, 1e8, 4)  # 1 s down, 100 s at 5 W, 1 s up; 502 J
    charge = fleet.drain_batteries([("d", 0.0, whole)], fleet.initial_state())
    assert charge.level.tolist() == pytest.approx([-1, -1, -1, (3600 - 51 - 502) / 3600, -1])
    assert charge.since.tolist() == [0, 0, 0, 102, 0]
    # at 7000 s d holds 100 J; 502 J in 102 s is 4.92 W: flat after 20.3 s, of which 19.3 s training
    (cut, why), (fine, none) = fleet.simulate_work(
        [("d", 7000.0, whole), ("a", 7000.0, whole)], fleet.initial_state()
    )
    assert why == "left with a flat battery after 20.3 s of 102"
    assert cut.compute_seconds == pytest.approx(100 * 102 / 502 - 1)
    assert (fine, none) == (whole, "")


@settings(max_examples=40)
@given(
    begins=st.lists(st.floats(0, 5 * DAY), min_size=1, max_size=6),
    joules=st.floats(1, 500),
    seed=st.integers(0, 5),
    watts=st.floats(0, 0.2),
)
def test_energy_is_conserved(begins, joules, seed, watts):
    # a battery that never fills or empties: what it holds at the end is what it held, less all that
    # was drawn
    battery = PhoneBattery(
        capacity=100.0,
        charge_watts=0.1,
        idle_watts=watts,
        least=0.5,
        most=0.5,
        charging=DiurnalAvailability(needs="charging"),
    )
    fleet = build_fleet_dynamics(
        seed, NAMES, dict.fromkeys(NAMES, DEVICE), [AlwaysAvailable()], battery
    )
    plug, charge, end = DiurnalAvailability(needs="charging"), fleet.initial_state(), 6 * DAY
    for begin in sorted(begins):
        charge = fleet.drain_batteries([("b", begin, ClientCost(joules=joules))], charge)
    one, now, plugged = make_fleet_clients(("b",)), 0.0, 0.0
    while now < end:
        edge = min(float(plug.find_next_change(seed, one, now)[0]), end)
        plugged += (edge - now) * bool(plug.is_available(seed, one, now)[0])
        now = edge
    held = fleet.compute_battery_levels(charge, np.array([1]), np.array([end]))[0] * battery.joules
    assert held == pytest.approx(
        0.5 * battery.joules + 0.1 * plugged - watts * end - joules * len(begins), rel=1e-9
    )


def by_hand():
    """Two regions of four hours: 100, 200, 300, 400 and ten times that; a, b in the first."""
    hours = np.array([100.0, 200.0, 300.0, 400.0])
    return CarbonGrid(
        ("x", "y"),
        np.array([0, 0, 1, 1, 1]),
        (HourlyIntensity(0.0, hours), HourlyIntensity(0.0, 10 * hours)),
        0.0,
    )


def test_grams_by_hand():
    fleet = build_fleet_dynamics(
        0, NAMES, dict.fromkeys(NAMES, DEVICE), [AlwaysAvailable()], None, by_hand()
    )
    kwh = ClientCost(joules=3.6e6, compute_seconds=3600.0)
    works = [
        ("a", 0.0, kwh),
        ("b", 1800.0, kwh),
        ("c", 3600.0, kwh),
        ("d", 4 * HOUR, kwh),
        ("e", 3 * HOUR, kwh),
    ]
    # b: half an hour at 100 and half at 200; d: the figures come again
    assert fleet.compute_emissions(works) == pytest.approx([100, 150, 2000, 1000, 4000])
    long = ClientCost(joules=3.6e6, compute_seconds=8 * HOUR)  # twice round
    assert fleet.compute_emissions([("a", 0.0, long)]) == pytest.approx([250])
    assert fleet.compute_emissions([("a", 2 * HOUR, ClientCost(joules=7.2e6))]) == pytest.approx(
        [600]
    )  # at once
    assert fleet.get_carbon_intensity(("a", "c"), 7200.0).tolist() == [300, 3000]
    assert by_hand().forecast_intensity(0.0, 4).tolist() == pytest.approx(
        [640, 1280, 1920, 2560]
    )  # mean of 1, 1, 10, 10, 10


def test_a_round_is_put_off_to_clean_hours():
    pace = CleanHours(share=0.25, within=3 * HOUR, look=8)
    forecast = [300, 200, 100, 120, 400, 500, 600, 110]  # the two cleanest: 100 and 110
    assert pace.choose_start_time(1000.0, forecast) == 1000.0 + 2 * HOUR
    assert pace.choose_start_time(0.0, [100, *forecast[1:]]) == 0.0
    assert CleanHours(within=HOUR, look=8).choose_start_time(0.0, forecast) == 0.0  # too far off
    assert CleanHours(deadline=HOUR, look=8).choose_start_time(0.0, forecast) == 0.0
    with pytest.raises(ValueError, match="outlive a round"):
        Experiment(
            recipe={
                "name": "fedavg",
                "pace": {"piece": "clean-hours", "pace": {"piece": "buffered", "size": 2}},
            }
        )


def test_the_cleanest_are_chosen():
    dirt = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0, 9.0])
    view = RoundView(
        1, 2, (0, 1, 2, 3, 4, 5), torch.ones(6), None, None, None, intensity=lambda k: dirt[list(k)]
    )
    picked = {
        k
        for i in range(40)
        for k in LowCarbonSelector(0.5).select(None, view, np.random.default_rng(i)).k
    }
    assert picked == {1, 3, 4}
    few = LowCarbonSelector(0.01).select(None, view, np.random.default_rng(0))
    assert sorted(few.k) == [1, 3]
    assert few.why["dirtiest_g_per_kwh"] == 2.0


def test_full_batteries_are_preferred():
    recipe = eafl(power=1.0, P=2)
    memory = recipe.selector.initial_state(6, 1, 1)
    memory.L[:] = 1
    memory.U[:] = torch.tensor([9.0, 8, 7, 6, 5, 4])
    level = torch.tensor([0.1, 0.1, 0.1, 0.9, 0.9, 0.1])
    draft = recipes.fedavg(P=2)
    view = RoundView(
        200,
        2,
        tuple(range(6)),
        torch.ones(6),
        lambda task: ClientCost(compute_seconds=1.0),
        lambda k: draft,
        None,
        battery=lambda k: level[list(k)],
    )
    picked = [
        set(recipe.selector.select(memory, view, np.random.default_rng(i)).k) for i in range(20)
    ]
    assert sum(k == {3, 4} for k in picked) > 10
    blind = RoundView(200, 2, tuple(range(6)), torch.ones(6), view.estimate, view.draft, None)
    assert {0, 1} in [
        set(recipe.selector.select(memory, blind, np.random.default_rng(i)).k) for i in range(20)
    ]


def test_public_forms_of_carbon_intensity(tmp_path):
    maps = tmp_path / "maps"
    maps.mkdir()
    (maps / "DE_2021_hourly.csv").write_text(
        "Datetime (UTC),Country,Zone Name,Zone Id,Carbon Intensity gCO₂eq/kWh (direct),Carbon"
        " Intensity gCO₂eq/kWh (LCA),Low Carbon Percentage\n2021-01-01"
        " 00:00:00,Germany,Germany,DE,300.5,350.5,50\n2021-01-01"
        " 02:00:00,Germany,Germany,DE,310,360,50\n"
    )
    found = load_intensities(str(maps))
    assert found["DE"].values.tolist() == [350.5, 350.5, 360]  # a gap is filled
    assert found["DE"].first == datetime(2021, 1, 1, tzinfo=UTC).timestamp()
    cycle = tmp_path / "SE.csv"
    cycle.write_text(
        "datetime,carbon_intensity_direct,Carbon intensity (Life"
        " cycle)\n2021-06-01T00:00:00Z,1,40\n"
    )
    assert load_intensities(str(cycle))["SE"].values.tolist() == [40]
    cast = tmp_path / "CISO.csv"
    cast.write_text("UTC time,carbon_intensity\n2020-01-01 00:00:00,250\n2020-01-01 00:30:00,350\n")
    assert load_intensities(str(cast))["CISO"].values.tolist() == [300]
    np.savez(tmp_path / "c.npz", DE=np.ones(5), DE_start="2020-01-01 00:00:00+00:00")
    assert load_intensities(str(tmp_path / "c.npz"))["DE"].first == parse_time("2020-01-01")
    assert (
        get_utc_offset("DE"),
        get_utc_offset("US-CAL-CISO"),
        get_utc_offset("SE-SE3"),
        get_utc_offset("XX"),
    ) == (1, -8, 1, None)


def test_regions_are_shared_out(tmp_path):
    np.savez(
        tmp_path / "c.npz",
        **{
            k: v
            for name in ("X", "Y")
            for k, v in ((name, np.ones(48)), (f"{name}_start", "2020-01-01"))
        },
    )
    clients = tuple(map(str, range(100)))
    found = build_carbon_grid(
        str(tmp_path / "c.npz"), {"X": 3.0, "Y": 1.0}, "2020-01-02T06:00", clients, 0
    )
    assert np.bincount(found.of).tolist() == [75, 25]
    assert found.start == parse_time("2020-01-02") + 6 * HOUR
    assert (
        found.of
        != build_carbon_grid(str(tmp_path / "c.npz"), {"X": 3.0, "Y": 1.0}, None, clients, 1).of
    ).any()


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("fleet.battery={piece='phone', floor=2.0}", "floor = 2.0"),
        ("fleet.battery=fone", "did you mean 'phone'"),
        ("fleet.carbon=none.csv", "none.csv"),
        ("fleet.regions=DE", "give fleet.carbon"),
        ("stop.grams=-1.0", "grams"),
    ],
)
def test_bad_values_are_one_line(setting, why, capsys):
    assert main(["run", "--set", setting, "--no-save"]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


def test_bad_regions_starts_and_files_are_one_line(tmp_path):
    np.savez(tmp_path / "c.npz", DE=np.ones(48), DE_start="2020-01-01")
    path = str(tmp_path / "c.npz")
    for fleet, why in (
        ({"regions": "DK"}, "did you mean 'DE'"),
        ({"start": "2021-01-01"}, "they go from 2020-01-01"),
        ({"start": "noon"}, "is no moment"),
    ):
        with pytest.raises(BadInput, match=why):
            Experiment(fleet={"carbon": path, **fleet})
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="no time or no carbon intensity"):
        Experiment(fleet={"carbon": str(tmp_path / "bad.csv")})


@pytest.fixture
def alive(tmp_path):
    day = 300 + 200 * np.cos(np.arange(24 * 40) / 24 * 2 * np.pi)
    np.savez(
        tmp_path / "c.npz", DE=day, DE_start="2020-01-01", CISO=day / 2, CISO_start="2020-01-01"
    )
    fleet = {
        "profile": "phone",
        "carbon": str(tmp_path / "c.npz"),
        "availability": {"piece": "diurnal", "needs": "wifi"},
        "battery": {
            "piece": "phone",
            "capacity": 0.002,
            "charge_watts": 0.001,
            "idle_watts": 0.0001,
        },
    }
    return {"rounds": 8, "clients": 10, "per_round": 4, "train": {"epochs": 1}, "fleet": fleet}


@pytest.mark.parametrize("name", ["oort", "fedavg", "fedbuff", "flrce"])
def test_a_fleet_on_batteries_goes_on_after_a_kill(name, alive, tmp_path):
    experiment = Experiment(**alive, recipe={"name": name})
    straight = runs.run(experiment, tmp_path / "straight")
    assert straight.summary["grams"] > 0
    want = (tmp_path / "straight/clients.jsonl").read_bytes()

    def quit_at(done):
        if done.record.t == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(experiment, tmp_path / "killed", watch=quit_at)
    runs.run(experiment, tmp_path / "killed", resume=True)
    assert (tmp_path / "killed/clients.jsonl").read_bytes() == want
    for record in straight.history:
        assert 0 <= record.grams_wasted <= record.grams
        assert record.grams <= record.joules / 3.6e6 * 500.001


def test_a_budget_of_grams_is_not_passed(alive):
    free = runs.run(Experiment(**alive, recipe={"name": "fedavg"}))
    half = free.summary["grams"] / 2
    found = runs.run(Experiment(**alive, recipe={"name": "fedavg"}, stop={"grams": half}))
    assert found.summary["rounds"] < free.summary["rounds"]
    assert found.summary["grams"] <= half
    assert "grams" in found.summary["stopped"]


def test_clean_hours_emit_less(alive):
    plain = runs.run(
        Experiment(
            **{**alive, "fleet": {**alive["fleet"], "availability": "always"}},
            recipe={"name": "fedavg"},
        )
    )
    table = {"name": "fedavg", "pace": {"piece": "clean-hours", "share": 0.1}}
    clean = runs.run(Experiment(**alive, recipe=table))
    assert (
        clean.summary["grams"] / clean.summary["joules"]
        < 0.4 * plain.summary["grams"] / plain.summary["joules"]
    )


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data/carbon.npz")
def test_thirteen_regions_of_two_years():
    found = load_intensities(str(SHARED))
    assert len(found) == 13
    assert {len(hours.values) for hours in found.values()} == {17_544}
    assert found["SE"].values.mean() < 50 < 600 < found["PL"].values.mean()


def test_a_device_tells_its_own_battery(tmp_path):
    def supply(name, **files):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(f"{text}\n")

    assert read_battery_level(tmp_path / "none") is None
    supply("AC", type="Mains", online=1)
    assert read_battery_level(tmp_path) is None
    assert get_battery_metric(tmp_path) == {}
    supply("BAT0", type="Battery", capacity=80, energy_full=30000000)
    supply("BAT1", type="Battery", capacity=20, energy_full=10000000)
    supply("mouse", type="Battery", capacity=5, scope="Device")
    supply("odd", type="Battery", capacity="full")
    assert get_battery_metric(tmp_path) == {
        "battery": pytest.approx(0.65)
    }  # (3 * 0.8 + 1 * 0.2) / 4


def test_a_selector_sees_the_batteries_that_nodes_report():
    class Nodes(StubEngine):
        def battery_levels(self, clients):
            return torch.tensor([0.9, 0.2, 0.5])

    view = RoundView(1, 2, (0, 1, 2), torch.ones(3), None, None, None)
    state = State(0, torch.zeros(1), {}, ("a", "b", "c"))
    assert view_with_fleet_state(view, Nodes(), state).battery([2, 0]).tolist() == pytest.approx(
        [0.5, 0.9]
    )
    assert view_with_fleet_state(view, StubEngine(), state).battery is None
