"""What joules rest on: every joule is measured, modelled or assumed, and the parts add up."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flrce import Experiment
from flrce.core.checked_replies import book_costs
from flrce.core.cost_table import (
    ASSUMED_FIELDS,
    BASIS_FIELDS,
    assumed_share,
    describe_basis,
    describe_joules,
)
from flrce.core.pending import DueTasks
from flrce.core.types import ClientCost, Reply, Task
from flrce.devices.cost_models import ClientLoad, CostModel, price_loads
from flrce.devices.costs import (
    FIGURES,
    DeviceProfile,
    add_network_energy,
    count_step_traffic,
    load_profile,
)
from flrce.devices.flops import StepTraffic
from flrce.errors import BadInput
from flrce.flower.device_records import MeasuredCosts
from flrce.report.page import render_report
from flrce.simulation import runs
from flrce.storage.read import read_single_run

DEVICE = DeviceProfile("round numbers", 2, 10, 1e9, 0.01, 8e6, 16e6, 1e-6, 5e-7)


def basis_of(spent):
    return {name: spent.other[name] for name in BASIS_FIELDS if name in spent.other}


def test_the_basis_of_a_clients_joules_by_hand():
    # 50 batches of 10 ms at 10 W: 5 J; 2e9 FLOPs at 1e9/s: 20 J; 4 MB down, 1 MB up: 3 J of radio
    device = replace(DEVICE, assumed=frozenset({"batch_seconds", "up_joules"}))
    spent = device.estimate_cost(4_000_000, 1_000_000, 2e9, 50)
    assert basis_of(spent) == pytest.approx(
        {"joules_assumed_batches": 5, "joules_modelled": 20, "joules_assumed_radio": 3}
    )
    by_power = replace(DEVICE, assumed=frozenset({"active_watts"}))
    assert basis_of(by_power.estimate_cost(4_000_000, 1_000_000, 2e9, 50)) == pytest.approx(
        {"joules_assumed_batches": 5, "joules_assumed_work": 20, "joules_modelled": 3}
    )


def test_waiting_rests_on_idle_power():
    device = replace(DEVICE, assumed=frozenset({"idle_watts"}))
    fast, slow = device.estimate_cost(0, 0, 1e9, 0), device.estimate_cost(0, 0, 4e9, 0)
    replies = [Reply("a", 1, spent=fast), Reply("b", 1, spent=slow)]
    lines, costs = book_costs(1, DueTasks((Task("a", 0, 1, 0), Task("b", 1, 1, 0))), replies, {})
    assert lines[0].spent.other["joules_assumed_waiting"] == 3 * 2  # 3 s at 2 W
    assert costs.other == {"joules_modelled": 10 + 40, "joules_assumed_waiting": 6}


def test_a_radio_that_stays_awake_after_each_transfer():
    device = replace(DEVICE, tail_joules=12.0)
    assert device.estimate_cost(100, 100, 0, 0).joules == pytest.approx(24 + 150e-6)
    assert device.estimate_cost(100, 0, 0, 0).joules == pytest.approx(12 + 50e-6)
    assert device.estimate_cost(0, 0, 1e9, 0).joules == 10


def test_two_powers_and_traffic_by_hand():
    """1,000 operations of 1 ms at 4 W, 1e9 FLOPs in 1 s and 3 GB at 1 GB/s at 10 W."""
    device = replace(DEVICE, overhead_watts=4, operation_seconds=1e-3, memory_bytes=1e9)
    spent = device.estimate_cost(0, 0, 1e9, 0, traffic=StepTraffic(1000, 3e9))
    assert spent.compute_seconds == pytest.approx(1 + 1 + 3)
    assert spent.overhead_seconds == 1
    assert spent.joules == pytest.approx(4 + 40)
    half = device.truncate_cost(spent, 2.5)
    assert (half.overhead_seconds, half.joules) == (0.5, pytest.approx(22))


def test_operations_and_bytes_of_a_layer_by_hand():
    """A linear layer of 3 x 5 without bias: products forward and of the weights' gradient."""
    net = nn.Linear(3, 5, bias=False)
    operations, batch, sample = count_step_traffic(net, (3,), train=False)
    assert operations == 1  # one product: reads x and the weights, writes the result
    assert (batch, sample) == (4 * 15, 4 * (3 + 5))
    assert count_step_traffic(net, (3,))[0] > 1
    assert net.weight.grad is None


def test_the_network_is_booked_apart():
    # 0.03 and 0.14 kWh a GB are 108 and 504 uJ a byte
    for kind, joules in (("fixed", 1.08e-4), ("mobile", 5.04e-4)):
        device = add_network_energy({"a": DEVICE}, kind)["a"]
        spent = device.estimate_cost(3000, 1000, 1e9, 5)
        assert spent.other["network_joules"] == pytest.approx(4000 * joules)
        assert spent.joules == DEVICE.estimate_cost(3000, 1000, 1e9, 5).joules
    assert add_network_energy({"a": DEVICE}, None)["a"] is DEVICE


@given(
    st.floats(0, 1e10),
    st.integers(0, 500),
    st.integers(1, 10**7),
    st.sets(st.sampled_from(["idle_watts", "active_watts", "flops", "batch_seconds", "up_joules"])),
    st.floats(0, 20),
)
def test_energy_is_conserved_and_additive(flops, batches, sent, assumed, overhead_watts):
    """The basis adds up to the joules, and two halves of the work to the whole."""
    device = replace(DEVICE, assumed=frozenset(assumed), overhead_watts=overhead_watts)
    whole = device.estimate_cost(2 * sent, 2 * sent, 2 * flops, 2 * batches)
    half = device.estimate_cost(sent, sent, flops, batches)
    assert sum(basis_of(whole).values()) == pytest.approx(whole.joules)
    assert 2 * half.joules == pytest.approx(whole.joules)
    for name, joules in basis_of(whole).items():
        assert 2 * basis_of(half)[name] == pytest.approx(joules)
    parts = [device.truncate_cost(whole, share * whole.seconds) for share in (0.0, 0.3, 0.7, 1.0)]
    assert all(a.joules <= b.joules + 1e-9 for a, b in pairwise(parts))
    for part in parts:
        assert sum(basis_of(part).values()) == pytest.approx(part.joules, abs=1e-9)


def test_clients_add_up_to_rounds_and_rounds_to_the_run(tmp_path):
    exp = Experiment(
        rounds=3,
        clients=8,
        per_round=3,
        fleet={"profile": {"jetson-nano": 1.0, "phone": 1.0}, "network": "mobile"},
        engine={"workers": 1},
    )
    found = runs.run(exp, tmp_path / "run")
    read = lambda name: [json.loads(x) for x in (tmp_path / "run" / name).read_text().splitlines()]  # noqa: E731
    clients, rounds, s = read("clients.jsonl"), read("rounds.jsonl"), found.summary
    for name in (*BASIS_FIELDS, "network_joules"):
        lines = sum(line["other"].get(name, 0.0) for line in clients)
        assert lines == pytest.approx(sum(line["other"].get(name, 0.0) for line in rounds))
        assert lines == pytest.approx(s[name])
    assert sum(s[name] for name in BASIS_FIELDS) == pytest.approx(s["joules"], rel=1e-9)
    assert s["network_joules"] == pytest.approx(5.04e-4 * (s["bytes_up"] + s["bytes_down"]))
    assert assumed_share(s) > 0.9  # 5 ms a batch, an assumption, outweigh the digits' FLOPs
    assert "% assumed batch overhead" in describe_joules(s)
    page = render_report([read_single_run(tmp_path / "run")])
    assert "% assumed batch overhead" in page
    assert "Assumed J %" in page
    assert "Network energy" in page


def test_a_run_without_a_basis_says_nothing():
    old = {"joules": 12.0, "energy": "modelled", "joules_low": 8.0, "joules_high": 18.0}
    assert assumed_share(old) is None
    assert describe_basis(old) == ""
    assert describe_joules(old) == "12 J (8 to 18) modelled"
    part = {**old, "joules_modelled": 5.0}  # begun by an earlier version
    assert assumed_share(part) is None
    whole = {**old, "joules_modelled": 3.0, "joules_assumed_batches": 9.0}
    assert describe_joules(whole) == (
        "12 J (8 to 18) modelled, of which 75 % assumed batch overhead, 25 % modelled"
    )


def test_joules_of_a_meter_are_measured():
    costs = MeasuredCosts(None, profile=DEVICE)
    spent = costs.add_joules(ClientCost(10, 10, compute_seconds=2.0, joules=7.0, measured=True))
    assert basis_of(spent) == {"joules_measured": 7.0}
    timed = costs.add_joules(ClientCost(compute_seconds=2.0))
    assert basis_of(timed) == {"joules_modelled": 20.0}
    # a measured time needs no rate
    rated = replace(DEVICE, assumed=frozenset({"flops", "batch_seconds"}))
    assert basis_of(rated.add_joules(ClientCost(compute_seconds=2.0))) == {"joules_modelled": 20.0}


def test_a_figure_says_whether_it_is_assumed(tmp_path):
    lines = [
        f'{name} = {{ value = {value}, source = "{source}" }}'
        for name, value, source in (
            ("idle_watts", 1, "assumed: a guess"),
            ("active_watts", 5, "meter"),
            ("up_bits", 1e6, "not measured here, taken from laptop-cpu"),
            ("down_bits", 1e6, "meter"),
            ("up_joules", 1e-6, "meter"),
            ("down_joules", 1e-6, "meter"),
        )
    ]
    lines.append('flops = { value = 1e9, source = "meter", basis = "assumed" }')
    lines.append('batch_seconds = { value = 0.1, source = "assumed once", basis = "measured" }')
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(lines))
    assert load_profile(str(file)).assumed == {"idle_watts", "up_bits", "flops"}
    file.write_text("\n".join(lines).replace('"assumed" }', '"hoped" }'))
    with pytest.raises(BadInput, match="basis must be measured or assumed, got 'hoped'"):
        load_profile(str(file))


def test_a_profile_that_counts_traffic_prices_whole_runs(tmp_path):
    """Operations cost 1 ms each: the more of them, the longer; the model's bits stay the same."""
    text = "\n".join(
        f'{name} = {{ value = {getattr(DEVICE, name)}, source = "meter" }}' for name in FIGURES[:8]
    )
    (tmp_path / "plain.toml").write_text(text)
    more = '\noperation_seconds = { value = 1e-3, source = "meter" }'
    (tmp_path / "launching.toml").write_text(text + more)
    found = [
        runs.run(
            Experiment(
                rounds=1,
                clients=4,
                per_round=2,
                recipe={"name": "fedavg"},
                fleet={"profile": str(tmp_path / name)},
                engine={"workers": 1},
            )
        )
        for name in ("plain.toml", "launching.toml")
    ]
    plain, launching = (each.summary["joules"] for each in found)
    assert launching > 2 * plain
    for name, values in found[0].model.items():
        assert torch.equal(values, found[1].model[name])


def test_assumed_parts_have_names():
    assert len(set(ASSUMED_FIELDS.values())) == len(ASSUMED_FIELDS)


@dataclass(frozen=True)
class Doubled(CostModel):
    """Everything takes twice the joules, or half of them."""

    by: float = 2.0

    def price(self, loads):
        return [replace(load.cost, joules=self.by * load.cost.joules) for load in loads]


@pytest.mark.parametrize("by", [0.5, 2.0])
def test_a_cost_model_that_changes_joules_keeps_the_basis_whole(by):
    device = replace(DEVICE, assumed=frozenset({"batch_seconds"}))
    spent = device.estimate_cost(0, 0, 1e9, 100)  # 10 J assumed, 10 J modelled
    priced = price_loads(Doubled(by), [ClientLoad("a", device, spent)])[0]
    want = {0.5: (5, 5), 2.0: (10, 30)}[by]
    assert sorted(basis_of(priced).values()) == pytest.approx(want)


def test_work_priced_on_another_device_keeps_its_traffic():
    device = replace(DEVICE, overhead_watts=4, operation_seconds=1e-3, memory_bytes=1e9)
    spent = device.estimate_cost(0, 0, 1e9, 7, traffic=StepTraffic(1000, 3e9))
    found = device.infer_traffic(spent)
    assert (found.operations, found.moved_bytes) == pytest.approx((1000, 3e9))
    faster = replace(device, flops=2e9)
    again = ClientLoad("a", device, spent).price_on(faster)
    assert again.compute_seconds == pytest.approx(spent.compute_seconds - 0.5)
