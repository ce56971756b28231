"""What `make bench` makes of the rounds it measured."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"


@pytest.fixture(scope="module")
def summary():
    before = list(sys.path)
    sys.path.insert(0, str(PEERS))
    try:
        import summary
    finally:
        sys.path[:] = before
    return summary


def row(peer, t, cpu, number=0, **more):
    usual = {
        "cores": 1,
        "foreign": 0.0,
        "accuracy": 0.3,
        "steps": 150,
        "trained": 17_500,
        "evaluated": 15_000,
    }
    return {"peer": peer, "pass": number, "round": t, "cpu_seconds": cpu, **usual, **more}


def test_ratios_pair_the_same_pass_and_round_and_leave_the_warm_up_out(summary):
    rows = [
        row("native", 1, 9.0),
        row("native", 2, 2.0),
        row("native", 2, 4.0, number=1),
        row("pfl", 1, 9.0),
        row("pfl", 2, 6.0),
        row("pfl", 2, 8.0, number=1),
    ]
    # 6 / 2 and 8 / 4; pairing across passes would give 6 / 4 or 8 / 2
    assert summary.compared(rows, 1, "cpu_seconds")["pfl"] == {
        "values": [6.0, 8.0],
        "ratios": [3.0, 2.0],
    }


def test_the_fastest_of_the_others_is_set_against_both_of_ours(summary):
    rows = [row("native", 2, 1.0), row("torch", 2, 4.0), row("plain", 2, 7.0), row("pfl", 2, 6.0)]
    assert (
        summary.best(rows, 1, "cpu_seconds")[0]
        == "The fastest of the others in CPU seconds, pfl-research (processes): 6.00 (6.00-6.00)"
        " times what flrce, fused kernels (threads) takes, 1.50 (1.50-1.50) times what flrce,"
        " torch (processes) takes."
    )
    assert summary.best(rows[:2], 1, "cpu_seconds") == []


def test_less_work_and_another_accuracy_are_told(summary):
    rows = [
        row("native", 2, 1.0),
        row("plain", 2, 1.0),
        row("fedjax", 2, 1.0, steps=140),
        row("pfl", 2, 1.0, accuracy=0.4),
    ]
    faults = summary.work_checked(rows)
    assert faults["native"] == faults["plain"] == ""
    assert faults["fedjax"].startswith("140 steps")
    assert faults["pfl"] == "accuracy 0.400, others 0.300"


def test_a_step_of_the_next_round_counts_for_the_run(summary):
    early = [
        row("pfl", 2, 1.0, steps=151, trained=17_628),
        row("pfl", 3, 1.0, steps=149, trained=17_372),
    ]
    assert summary.work_checked(early) == {"pfl": ""}


def test_a_run_that_left_out_work_does_not_count(summary, tmp_path):
    rows = [row("native", 2, 1.0), row("flwr", 2, 2.0), row("flwr", 3, 0.5, steps=0, trained=0)]
    log = tmp_path / "lines.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)))
    kept, absent = summary.read(log)
    assert kept == rows[:1]
    assert absent == {"flwr": "round 3 trained on 0 samples, not 17500"}


def test_rounds_under_foreign_load_are_left_out_where_others_remain(summary):
    calm, loud = row("native", 2, 1.0), row("native", 3, 2.0, foreign=1.5)
    assert summary.quiet_only([calm, loud]) == ([calm], False)
    assert summary.quiet_only([loud]) == ([loud], True)


def test_work_of_a_round_is_counted(summary):
    train, evaluate = summary.gflop()
    # convolutions 2*32*32*6*27 and 2*16*16*16*54, products 2*(1024*120 + 120*84 + 84*10): 1,041,744
    # FLOP a sample
    forward = 331_776 + 442_368 + 267_600
    # two products more in training, but no gradient for the samples themselves
    assert train == pytest.approx(17_500 * (3 * forward - 331_776) / 1e9)
    assert evaluate == pytest.approx(15_000 * forward / 1e9)


@pytest.fixture(scope="module")
def joules():
    spec = importlib.util.spec_from_file_location("joules", BENCHMARKS / "joules.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_model_of_joules_is_tried_on_what_it_was_not_fitted_to(joules):
    """Joules that are 100 W of time and 2 nJ a byte but for one network, which nobody else can tell
    of.
    """
    sizes = {
        "a": (1e-3, 1e6),
        "b": (2e-3, 9e6),
        "c": (5e-3, 4e6),
        "d": (8e-3, 8e7),
        "e": (9e-3, 2e6),
    }
    rows = [
        {
            "net": net,
            "size": 16,
            "seconds": s,
            "bytes": b,
            "joules": 100 * s + 2e-9 * b,
            "flops": b**0.5,
            "tensors": 9,
            "operations": 30,
        }
        for net, (s, b) in sizes.items()
    ]
    assert max(abs(e) for _, e in joules.errors(("seconds", "bytes"), rows, "net")) < 1e-6
    found, won = joules.searched(rows, "net", joules.QUANTITIES)
    assert max(abs(e) for _, e in found) < 1e-6
    assert won == {("seconds", "bytes"): 5}
    rows[3]["joules"] *= 2
    off = {row["net"]: e for row, e in joules.errors(("seconds", "bytes"), rows, "net")}
    assert off["d"] == pytest.approx(-0.5)  # as predicted by the others, which are right
    assert "| traffic | a network |" in joules.page(
        {"rows": rows, "hardware": "none", "idle_watts": 1.0, "lasts": 1}
    )


def test_a_steps_operations_and_bytes(joules):
    """Twice the batch: as many operations, and more bytes; what was counted before is kept."""
    few, many = (joules.counted({"net": "mlp", "size": size}) for size in (4, 8))
    assert few["operations"] == many["operations"] > 4
    assert few["bytes"] < many["bytes"] < 2 * few["bytes"]  # weights are moved as often
    assert joules.counted({"operations": 1}) == {"operations": 1}
