"""Row 28: a real deployment on lines that lose packets, with a SuperLink that dies and a node that
is cut off.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")
LOSSY = Path(__file__).with_name("lossy.py")


@pytest.fixture
def namespace():
    """A command that runs another one in namespaces of its own; skips where the machine has
    none.
    """
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if not shutil.which(tool)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    command = ["unshare", "-rn"]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no network namespaces here: {tried.stderr.strip()}")
    return command


@pytest.mark.row(
    28, "30 % packet loss, 200 kbit/s, SuperLink killed, line cut", "ends; failed clients booked"
)
def test_bad_lines(namespace, tmp_path, seen):
    began = time.monotonic()
    for attempt in range(
        2
    ):  # luck decides how long a line is dead, and whether a reply is faster than the cut
        done = subprocess.run(
            [*namespace, sys.executable, str(LOSSY), str(tmp_path / f"{attempt}")],
            capture_output=True,
            text=True,
            timeout=1200,
        )
        if done.returncode in (0, 77):
            break
    if done.returncode == 77:
        pytest.skip(f"the kernel cannot spoil a line: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    found = json.loads(done.stdout)
    lines = [line for line in found["rounds"] if line["outcome"] == "committed"]
    assert [line["t"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert set(line["chosen"]) <= set(
            found["nodes"]
        )  # after the restart they are who they were
        assert set(line["replied"]) | set(line["rejected"]) == set(line["chosen"])
    last = lines[-1]
    assert last["rejected"][found["cut"]] == "no reply within 35 s"
    assert last["replied"]
    assert last["bytes_wasted"] >= 4 * 2000  # the model was sent down a dead line
    assert found["second"] == "finished:completed"
    assert (
        found["first"] == "finished:failed"
    )  # its state folder is what the second run went on from
    arrived, lost = found["packets"]
    assert 0.2 < lost / arrived < 0.4
    failed = sum(len(line["rejected"]) for line in found["rounds"])
    seen(
        f"{lost} of {arrived} packets lost, 3 rounds, {failed} failed replies,"
        f" {time.monotonic() - began:.0f} s"
    )


METERED = Path(__file__).with_name("metered.py")


@pytest.mark.slow
def test_booked_bytes_are_those_on_the_interfaces(namespace, tmp_path):
    """2 rounds of 3 nodes with 8 MB each way: what the ledger books is what the interfaces count,
    less the heartbeats of an idle federation, to 1 %. The rest is headers and control messages; a
    busy machine adds to them, so the least of up to three deployments counts.
    """
    for attempt in range(3):
        overhead = measure_wire_overhead(namespace, tmp_path / str(attempt))
        assert min(overhead) >= 0
        if max(overhead) <= 0.01:
            return
    pytest.fail(f"the wire carried {overhead} of the booked bytes more, down and up")


def measure_wire_overhead(namespace, folder):
    """Bytes on the interfaces beyond those booked, as a share of these, down and up."""
    folder.mkdir()
    done = subprocess.run(
        [*namespace, sys.executable, str(METERED), str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode == 77:
        pytest.skip(f"no veth pairs here: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    found = json.loads(done.stdout)
    assert found["status"] == "finished:completed"
    lines = found["rounds"]
    assert [line["outcome"] for line in lines] == ["committed", "committed"]
    booked = [sum(line[name] for line in lines) for name in ("bytes_down", "bytes_up")]
    assert booked == [2 * 3 * 8_000_000] * 2
    measured = zip(booked, found["wire"], found["idle"], strict=True)
    return [(wire - idle) / payload - 1 for payload, wire, idle in measured]


FAR = Path(__file__).with_name("far.py")


@pytest.mark.nightly
def test_five_far_hosts_make_the_simulators_model(namespace, tmp_path):
    """200 ms each way, 1 % loss, 1 Mbit/s, and a host that reboots in the second round: what is
    abandoned is repeated, and the model has the bits of a simulation.
    """
    done = subprocess.run(
        [*namespace, sys.executable, str(FAR), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    if done.returncode == 77:
        pytest.skip(f"no tun devices here: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    found = json.loads(done.stdout)
    assert found["status"] == "finished:completed"
    committed = [line for line in found["rounds"] if line["outcome"] == "committed"]
    assert [line["t"] for line in committed] == [1, 2, 3]
    assert all(len(line["replied"]) == 5 for line in committed)
    sent, lost = found["packets"]
    assert lost > 0.005 * sent
    booked = sum(line["bytes_up"] + line["bytes_down"] for line in found["rounds"])
    assert found["bytes"] > booked
    experiment = tmp_path / "state" / "experiment.toml"
    command = ["run", experiment, "--set", "engine.name=simulator", "--out"]
    subprocess.run(
        [sys.executable, "-m", "flrce", *map(str, command), str(tmp_path / "simulated")], check=True
    )
    deployed, simulated = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("state", "simulated")
    )
    assert deployed == simulated
