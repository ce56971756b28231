"""From work to seconds and joules, by hand-worked sums; and every line of a run adds up to its
totals.
"""

import json
import tomllib
from dataclasses import MISSING, fields, replace
from importlib import resources

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce import Experiment
from flrce.core.checked_replies import book_costs
from flrce.core.pending import DueTasks
from flrce.core.pieces import NoCompression
from flrce.core.types import ClientCost, LocalWork, Payload, Reply, Task
from flrce.devices.costs import (
    FIGURES,
    DeviceProfile,
    inference_flops,
    list_profile_names,
    load_profile,
    training_flops,
)
from flrce.errors import BadInput
from flrce.models.nets import PAPER_CNNS, build_network
from flrce.simulation import runs
from flrce.training.batches import draw_batches

#: net, classes -> forward multiply-adds and training FLOPs of a sample, counted by hand from the
#: layers
COUNTED = {
    ("cnn-cifar", 10): (520_872, 2_793_456),
    ("cnn-cifar", 100): (528_432, 2_838_816),
    ("cnn-emnist", 62): (907_480, 5_162_640),
    ("cnn-speech", 35): (440_550, 2_513_700),
}


@pytest.mark.parametrize(("net", "classes"), COUNTED, ids=str)
def test_flops_of_the_papers_networks(net, classes):
    shape, _ = PAPER_CNNS[net]
    module = build_network(net, shape, classes, 0)
    macs, train = COUNTED[net, classes]
    assert inference_flops(module, shape) == 2 * macs
    assert training_flops(module, shape) == train


def test_counting_leaves_a_network_as_it_was():
    module = build_network("cnn-digits", (1, 8, 8), 10, 0)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    inference_flops(module, (1, 8, 8))
    assert module.training
    assert all((before[name] == x).all() for name, x in module.state_dict().items())


ROUND_NUMBERS = DeviceProfile(
    "round numbers",
    idle_watts=2,
    active_watts=10,
    flops=1e9,
    batch_seconds=0.01,
    up_bits=8e6,
    down_bits=16e6,
    up_joules=1e-6,
    down_joules=5e-7,
)


def test_a_clients_cost_worked_by_hand():
    # 50 batches of .01 s and 2e9 FLOPs at 1e9/s: 2.5 s at 10 W; 4 MB down at 2 MB/s and 1 MB up at
    # 1 MB/s: 3 s; radio: 4e6 * 5e-7 + 1e6 * 1e-6 = 3 J
    spent = ROUND_NUMBERS.estimate_cost(4_000_000, 1_000_000, 2e9, 50)
    assert spent.compute_seconds == 2.5
    assert spent.transfer_seconds == 3.0
    assert spent.joules == pytest.approx(25 + 3)
    assert not spent.measured


def reply(client, seconds, joules=10.0, idle=2.0, ok=True, **more):
    spent = ClientCost(100, 50, compute_seconds=seconds, joules=joules, idle_watts=idle, framing=8)
    return Reply(client, 1, Payload({}) if ok else None, n=1, spent=spent, **more)


def tasks(*names, deadline=float("inf")):
    return [Task(name, k, 1, 0, deadline=deadline) for k, name in enumerate(names)]


def test_a_round_lasts_as_long_as_the_slowest_that_counts_and_the_others_wait():
    # a takes 1 s and waits 3 s at 2 W; b takes 4 s; c took 9 s, and was not waited for
    lines, costs = book_costs(
        1,
        DueTasks(tuple(tasks("a", "b", "c"))),
        [reply("a", 1), reply("b", 4), reply("c", 9)],
        {"c": "slower"},
    )
    assert costs.seconds == 4
    assert costs.joules == pytest.approx((10 + 3 * 2) + 10 + 10)
    assert costs.joules_wasted == pytest.approx(10)
    assert costs.bytes_wasted == 150
    assert [line.spent.joules for line in lines] == pytest.approx([16, 10, 10])


def test_asking_for_losses_comes_before_training_and_is_booked():
    asked = [
        ("x", ClientCost(40, compute_seconds=2.0, joules=3.0, framing=4)),
        ("a", ClientCost(compute_seconds=1.0, joules=1.0)),
    ]
    lines, costs = book_costs(1, DueTasks(tuple(tasks("a"))), [reply("a", 5)], {}, asked)
    assert costs.seconds == 5 + 2
    assert costs.joules == pytest.approx(10 + 3 + 1)
    assert costs.bytes_down == 100 + 40
    assert costs.bytes_framing == 8 + 4
    assert costs.bytes_wasted == 0
    assert [(line.client, line.outcome) for line in lines] == [
        ("a", "useful"),
        ("x", "asked"),
        ("a", "asked"),
    ]


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 1e4), st.floats(0, 10), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_the_lines_always_add_up_to_the_round(clients):
    names = [f"c{i}" for i in range(len(clients))]
    replies = [
        reply(name, s, j, idle) for name, (s, j, idle, _) in zip(names, clients, strict=True)
    ]
    lost = {name: "lost" for name, (*_, fine) in zip(names, clients, strict=True) if not fine}
    lines, costs = book_costs(1, DueTasks(tuple(tasks(*names))), replies, lost)
    assert costs.joules == pytest.approx(sum(line.spent.joules for line in lines))
    assert costs.bytes_down == sum(line.spent.bytes_down for line in lines)
    useful = [s for s, _, _, fine in clients if fine]
    assert costs.seconds == max(useful, default=0.0)
    assert costs.joules >= sum(j for _, j, _, _ in clients) - 1e-6


RECIPES = [
    {"name": "fedavg"},
    {"name": "power-of-choice", "candidates": 6},
    {"name": "oort"},
    {"name": "pyramidfl"},
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r["name"])
def test_clients_rounds_and_summary_say_the_same(recipe, tmp_path):
    mix = {"jetson-nano": 1.0, "raspberry-pi-5": 1.0}
    exp = Experiment(
        rounds=4,
        clients=10,
        per_round=3,
        recipe=recipe,
        fleet={"profile": mix},
        engine={"workers": 1},
    )
    runs.run(exp, tmp_path / "run")
    read = lambda name: [json.loads(x) for x in (tmp_path / "run" / name).read_text().splitlines()]  # noqa: E731
    clients, rounds = read("clients.jsonl"), read("rounds.jsonl")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for h in rounds:
        mine = [c for c in clients if c["t"] == h["t"]]
        assert {c["client"] for c in mine} >= set(h["chosen"])
        for whole, part in (
            ("bytes_up", "bytes_up"),
            ("bytes_down", "bytes_down"),
            ("bytes_framing", "framing"),
        ):
            assert sum(c[part] for c in mine) == h[whole]
        assert sum(c["joules"] for c in mine) == pytest.approx(h["joules"], rel=1e-12)
        wasted = [c for c in mine if c["outcome"] not in ("useful", "asked")]
        assert sum(c["joules"] for c in wasted) == pytest.approx(h["joules_wasted"], rel=1e-12)
    for name in ("bytes_up", "bytes_down", "bytes_framing", "bytes_wasted"):
        assert summary[name] == sum(h[name] for h in rounds)
    for name in ("joules", "joules_wasted", "seconds"):
        assert summary[name] == pytest.approx(sum(h[name] for h in rounds), rel=1e-12)
    assert summary["energy"] == "modelled"


# --- profiles -----------------------------------------------------------------------------------

SHIPPED = (
    "jetson-nano",
    "jetson-nano-5w",
    "laptop-cpu",
    "phone",
    "raspberry-pi-4",
    "raspberry-pi-5",
)


def test_the_shipped_profiles():
    assert list_profile_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_figure_says_where_it_is_from(name):
    table = tomllib.loads(
        (resources.files("flrce") / "devices" / "profiles" / f"{name}.toml").read_text()
    )
    needed = {f.name for f in fields(DeviceProfile) if f.default is MISSING} - {"name"}
    assert needed | {"error"} <= set(table) <= set(FIGURES)
    for figure in table.values():
        assert set(figure) - {"basis"} == {"value", "source"}
        known = any(word in figure["source"] for word in ("assumed", "read 20", "recalled"))
        assert known, figure["source"]
    device = load_profile(name)
    assert 0 < device.idle_watts < device.active_watts


def test_the_weaker_mode_is_slower_and_draws_less():
    weak, strong = load_profile("jetson-nano-5w"), load_profile("jetson-nano")
    assert weak.flops < strong.flops
    assert weak.active_watts < strong.active_watts
    assert weak.batch_seconds > strong.batch_seconds


def test_work_is_booked_for_the_samples_of_the_batches_that_are_trained():
    """Steps that end within an epoch: an epoch's last batch is smaller, so shares of an epoch would
    be wrong.
    """
    built = runs.build_simulation(
        Experiment(clients=5, per_round=2, data={"partition": "iid"}, train={"batch": 100})
    )
    built.engine.close()
    client = built.engine.clients()[0]
    n = built.engine.count_samples(client)
    assert n % 100 > 1
    for steps in (None, 1, 2, 3, 4, 7):
        task = Task(client, 0, 1, seed=0, work=LocalWork(2, 100, steps), compressor=NoCompression())
        order, sizes = draw_batches(task, n, normalised=True)
        spent = built.engine.estimate(task)
        assert spent.flops == len(order) * training_flops(built.net, (1, 8, 8))
        assert spent.batches == len(sizes)


def test_tensors_that_go_with_a_task_are_in_its_estimate():
    built = runs.build_simulation(Experiment(clients=5, per_round=2))
    built.engine.close()
    plain = Task(built.engine.clients()[0], 0, 1, seed=0, compressor=NoCompression())
    more = replace(plain, tensors={"mean": torch.zeros(50)})
    extra = built.engine.estimate(more).bytes_down - built.engine.estimate(plain).bytes_down
    assert extra == 4 * 50


def test_for_small_nets_the_fixed_cost_of_a_batch_outweighs_its_flops():
    spent = load_profile("jetson-nano").estimate_cost(
        0, 0, 16 * training_flops(build_network("cnn-digits", (1, 8, 8), 10, 0), (1, 8, 8)), 1
    )
    assert load_profile("jetson-nano").batch_seconds > 0.9 * spent.compute_seconds


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("value = 55e9", "value = 0"), "flops must be above 0"),
        (("value = 55e9", 'value = "fast"'), "flops must be a number"),
        (("value = 2.2\n", "value = -1\n"), "idle_watts must be a number, 0 or more"),
        (("value = 2.2\n", "value = nan\n"), "idle_watts must be a number, 0 or more"),
        (("[flops]", "[flop]"), "unexpected keyword argument 'flop'"),
        (("[flops]", "[flops"), "malformed"),
    ],
)
def test_a_bad_profile_is_refused_before_anything_runs(tmp_path, change, why):
    text = (resources.files("flrce") / "devices" / "profiles" / "jetson-nano.toml").read_text()
    assert change[0] in text
    (tmp_path / "mine.toml").write_text(text.replace(*change))
    with pytest.raises(BadInput, match=why):
        Experiment.from_tables({"fleet": {"profile": str(tmp_path / "mine.toml")}})


def test_an_unknown_profile_names_the_nearest():
    with pytest.raises(BadInput, match="did you mean 'raspberry-pi-4'"):
        load_profile("rasberry-pi-4")
    with pytest.raises(BadInput, match="cannot be read"):
        load_profile("nowhere.toml")
