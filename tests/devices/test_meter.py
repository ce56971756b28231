"""A meter of one's own: a file, a function or a sensor of watts, read where work is done."""

import time

import pytest

from flrce.cli.cli import main
from flrce.cli.profile import _measure_steady_watts
from flrce.devices import energy
from flrce.devices.costs import load_profile
from flrce.devices.energy import EnergyMeter, EnergyReading
from flrce.errors import BadInput
from flrce_client import meter
from flrce_client.costs import measure_work


@pytest.fixture(autouse=True)
def no_meter():
    yield
    meter.use_meter(None)
    energy._get_meter.cache_clear()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "joules"
    path.write_text("100.0\n")
    return path


def test_a_meter_file_is_read_before_and_after_the_work(file, monkeypatch):
    monkeypatch.setenv(meter.METER_VARIABLE, str(file))
    result, cost = measure_work(lambda: file.write_text("112.5\n"))
    assert (result, cost.joules) == (6, 12.5)
    _, again = measure_work(lambda: file.write_text("3.0\n"))
    assert again.joules == 0.0  # a meter that was reset counts nothing, not less


def test_the_meter_of_the_torch_client(file):
    meter.use_meter(meter.open_meter(str(file)))
    energy._get_meter.cache_clear()
    _, reading = energy.measure_cost(lambda: file.write_text("107.0"))
    assert reading.counters == (("meter", 7.0),)
    assert EnergyMeter().seen == ("meter",)


def test_a_meter_by_module_and_function(tmp_path, monkeypatch):
    (tmp_path / "plug.py").write_text("def read_joules():\n    return 41.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert meter.open_meter("plug:read_joules")() == 41.0
    with pytest.raises(ValueError, match="could not convert"):
        meter.open_meter(str(tmp_path / "plug.py"))


def test_watts_are_integrated_over_time(monkeypatch):
    now, watts = [0.0], [10.0]
    monkeypatch.setattr(meter.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(meter.threading.Thread, "start", lambda self: None)
    read = meter.PowerSampler(lambda: watts[0])
    now[0], watts[0] = 2.0, 20.0
    assert read() == 30.0  # 2 s at 15 W
    now[0] = 3.0
    assert read() == 50.0


def test_a_sampler_asks_by_itself():
    asked = []
    read = meter.PowerSampler(lambda: asked.append(1) or 1.0, every=0.01)
    deadline = time.monotonic() + 5
    while len(asked) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(asked) >= 4
    assert read() > 0


def test_a_profile_goes_by_the_meter(tmp_path, monkeypatch, capsys):
    """A plug that reads 5 W of time: idle and busy alike."""
    (tmp_path / "plug.py").write_text(
        "import time\ndef read_joules():\n    return 5 * time.perf_counter()\n"
    )
    monkeypatch.chdir(tmp_path)
    told = ["--model", "cnn-digits", "--seconds", "0.1"]
    assert main(["profile", *told, "--meter", "plug:read_joules", "--out", "board.toml"]) == 0
    device = load_profile("board.toml")
    assert device.idle_watts == pytest.approx(5, rel=0.05)
    assert device.active_watts == pytest.approx(5, rel=0.05)
    (tmp_path / "still").write_text("7.0")
    assert main(["profile", *told, "--meter", "still"]) == 2
    assert "the meter (meter) did not move in 0.1 s" in capsys.readouterr().err


class RecordedMeter:
    """Reads one number of watts after the other."""

    seen = ("meter",)

    def __init__(self, *watts):
        self.left = list(watts)

    def measure(self, work):
        work()
        return None, EnergyReading(2.0, (("meter", 2.0 * self.left.pop(0)),))


def test_power_that_two_measurements_do_not_agree_on_is_measured_again():
    # 2 and 9 W differ by more than a factor of 2; then 4 and 6 W: 5 W in the mean
    steady = RecordedMeter(2, 9, 4, 6, 100)
    assert _measure_steady_watts(steady, lambda: None, "idle watts", 2.0) == pytest.approx(5.0)
    assert steady.left == [100]


@pytest.mark.parametrize("noise", [(1, 9), (0, 4)])
def test_a_noisy_meter_writes_no_profile(noise):
    noisy = RecordedMeter(*3 * noise)
    with pytest.raises(BadInput, match=r"too noisy: two measurements of active watts of 2 s each"):
        _measure_steady_watts(noisy, lambda: None, "active watts", 2.0)
    assert not noisy.left


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "name", "watts"),
    [
        ({"bus/i2c/drivers/ina3221x/6-0040/iio:device0/in_power0_input": "4100"}, "board", 4.1),
        (
            {
                "class/hwmon/hwmon0/name": "cpu_thermal",
                "class/hwmon/hwmon3/name": "ina3221",
                "class/hwmon/hwmon3/in1_input": "5000",
                "class/hwmon/hwmon3/curr1_input": "800",
            },
            "board",
            4.0,
        ),
        (
            {
                "class/power_supply/BAT0/status": "Discharging",
                "class/power_supply/BAT0/power_now": "8500000",
            },
            "battery",
            8.5,
        ),
        (
            {
                "class/power_supply/battery/status": "Discharging",
                "class/power_supply/battery/voltage_now": "4000000",
                "class/power_supply/battery/current_now": "-500000",
            },
            "battery",
            2.0,
        ),
    ],
)
def test_sensors_of_boards_and_batteries(tmp_path, files, name, watts):
    write(tmp_path, files)
    found, read_watts = meter.find_power_sensor(tmp_path)
    assert (found, read_watts()) == (name, pytest.approx(watts))


def test_a_battery_that_charges_tells_nothing(tmp_path):
    write(tmp_path, {"class/power_supply/BAT0/status": "Charging"})
    assert meter.find_power_sensor(tmp_path) is None
