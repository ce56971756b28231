"""The example app on a real deployment: plain, TLS, node authentication, database; killed,
restarted and attacked.
"""

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from fleet import APP, BIN, Fleet, copied, hosts, rounds

#: small and quick; nobody evaluates, since every message starts a process that imports torch
SMALL = "clients=3 per_round=3 train.epochs=1 engine.eval_every=1000 engine.kernel=torch"
# the paper's method, dense both ways; no exploit round, so no early stop by it
EXPLORE = "recipe.name=flrce recipe.preset=paper recipe.selector.piece=relationship recipe.selector.warmup=99"

BAD = '''

import numpy as np
from flwr.app import Array, MetricRecord
from flwr.clientapp import ClientApp

good = app


class Bad(ClientApp):
    """Partition 2 sends a NaN, then a wrong shape, then an absurd number of samples."""

    def __call__(self, message, context):
        reply = good(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 2:
            u = reply.content["payload"]["u"].numpy().copy()
            t = message.content["config"]["flrce.t"]
            if t == 1:
                u[5] = np.nan
            reply.content["payload"]["u"] = Array(u[:7] if t == 2 else u)
            if t == 3:
                reply.content["metrics"]["num-examples"] = 10**12
        return reply


app = Bad()
'''

BUSY = '''

import time
from pathlib import Path
from flwr.clientapp import ClientApp

good, begun = app, Path({begun!r})


class Busy(ClientApp):
    """Partition 1 says so when it begins to train in round 2, and then takes its time; but only once."""

    def __call__(self, message, context):
        t = message.content["config"].get("flrce.t") if message.metadata.message_type == "train" else 0
        if context.node_config["partition-id"] == 1 and t == 2 and not begun.exists():
            begun.touch()
            time.sleep(600)
        return good(message, context)


app = Busy()
'''

SLOW = '''

import time
from pathlib import Path
from flwr.clientapp import ClientApp

good, go = app, Path({go!r})


class Slow(ClientApp):
    """Partition 2 takes its time over its first task, until it is told to go on."""

    def __call__(self, message, context):
        t = message.content["config"].get("flrce.t") if message.metadata.message_type == "train" else 0
        while context.node_config["partition-id"] == 2 and t == 1 and not go.exists():
            time.sleep(0.2)
        return good(message, context)


app = Slow()
'''

WATCH = """
import os, socket
with open(os.environ["FLRCE_TEST_LOOKUPS"], "a") as out:
    out.write("WATCHING\\n")
real = socket.getaddrinfo
def getaddrinfo(host, *args, **kwargs):
    with open(os.environ["FLRCE_TEST_LOOKUPS"], "a") as out:
        out.write(f"LOOKUP {host}\\n")
    return real(host, *args, **kwargs)
socket.getaddrinfo = getaddrinfo
"""


@pytest.fixture
def fleet(tmp_path, request):
    """A fleet with three nodes; whatever it runs notes every host name that it looks up."""
    watch = tmp_path / "watch"
    watch.mkdir()
    (watch / "sitecustomize.py").write_text(WATCH)
    os.environ["FLRCE_TEST_LOOKUPS"] = str(tmp_path / "lookups")
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(watch), before)))
    made = Fleet(tmp_path / "fleet", **getattr(request, "param", {}))
    try:
        for partition in range(3):
            made.node(partition)
        yield made
        lookups = (tmp_path / "lookups").read_text()
        assert lookups.count("WATCHING") > 4  # SuperLink, three nodes, and what they start
        assert hosts(lookups) <= {"127.0.0.1", "localhost", "None", "::1", "0.0.0.0"}
    finally:
        made.close()
        os.environ["PYTHONPATH"] = before
        del os.environ["FLRCE_TEST_LOOKUPS"]


def config(state: Path, extra: str) -> str:
    return f'set="{SMALL} {extra}" state="{state}"'


def test_bad_clients_fail_alone_and_the_run_stops_early(fleet, tmp_path):
    """Plain connections. The budget of three rounds is a stop rule: of nine rounds only three are
    sent.
    """
    state = tmp_path / "state"
    run = fleet.run(
        config(state, f"rounds=9 stop.rounds=3 {EXPLORE}"), copied(tmp_path / "app", bad=BAD)
    )
    assert fleet.finish(run) == "finished:completed"
    lines = rounds(state)
    done = [line for line in lines if line["outcome"] == "committed"]
    assert [line["t"] for line in done] == [1, 2, 3]
    assert all(line["replied"] == ["0", "1"] for line in done)
    reasons = [line["rejected"]["2"] for line in done]
    assert "not finite" in reasons[0]
    assert "shape" in reasons[1]
    assert "num_examples" in reasons[2]
    assert lines[-1]["stop"] == "budget of 3 rounds"
    summary = json.loads((state / "summary.json").read_text())
    assert summary["stopped"] == "budget of 3 rounds"
    assert "Stopping after round 4: budget of 3 rounds" in fleet.flwr("log", run, "test", "--show")
    assert summary["bytes_wasted"] > 0


@pytest.mark.parametrize("fleet", [{"database": True}], indirect=True)
def test_nodes_and_server_are_killed_and_the_run_goes_on(fleet, tmp_path):
    """kill -9 a SuperNode, then the ServerApp; a second `flwr run` on the same state folder ends
    what was begun.
    """
    state = tmp_path / "state"
    what = config(state, f"rounds=5 per_round=2 recipe.psi=1 {EXPLORE}")
    first = fleet.run(what)
    fleet._until(lambda: len(rounds(state)) >= 1, 300, "a first round")
    fleet.kill("node1")
    fleet.node(1)
    fleet._until(lambda: len(rounds(state)) >= 2, 300, "a second round")
    for process in fleet.serverapps():
        os.kill(process, signal.SIGKILL)
    before = rounds(state)
    fleet._until(
        lambda: fleet.status(first).startswith("finished"),
        200,
        "the killed run to be noticed",
        every=3,
    )
    assert fleet.status(first) != "finished:completed"
    second = fleet.run(what)
    assert fleet.finish(second) == "finished:completed"
    after = rounds(state)
    assert after[: len(before) - 1] == before[: len(before) - 1]  # what was committed stayed
    done = [line["t"] for line in after if line["outcome"] == "committed"]
    assert done == list(range(1, len(done) + 1))
    assert len(done) == 5
    names = {client for line in after for client in line["chosen"]}
    assert names <= {"0", "1", "2"}  # the restarted node is the same client


def test_a_node_that_is_killed_while_it_trains_is_skipped_and_comes_back(fleet, tmp_path):
    """kill -9 once it has begun: its round is committed without it, and the restarted node is the
    same client.
    """
    state, begun = tmp_path / "state", tmp_path / "begun"
    app = copied(tmp_path / "app", busy=BUSY.format(begun=str(begun)))
    run = fleet.run(config(state, f"rounds=3 {EXPLORE}"), app)
    fleet._until(begun.exists, 300, "partition 1 to train in round 2")
    assert [line["t"] for line in rounds(state)] == [1]  # committed while round 2 trains
    fleet.kill("node1")
    fleet.node(1)
    assert fleet.finish(run) == "finished:completed"
    first, second, third = rounds(state)
    assert first["replied"] == third["replied"] == ["0", "1", "2"]
    assert [line["outcome"] for line in (first, second, third)] == ["committed"] * 3
    assert second["replied"] == ["0", "2"]
    assert second["rejected"]["1"].startswith("failed")
    assert second["bytes_wasted"] == second["bytes_down"] / 3  # what it was sent


def test_a_round_that_is_logged_as_committed_survives_a_kill(fleet, tmp_path):
    """A node dies for good in round 1, so the server waits for nodes after it: the ServerApp is
    killed there.
    """
    state, begun = tmp_path / "state", tmp_path / "begun"
    app = copied(tmp_path / "app", busy=BUSY.replace("t == 2", "t == 1").format(begun=str(begun)))
    run = fleet.run(config(state, f"rounds=3 {EXPLORE}"), app)
    fleet._until(begun.exists, 300, "partition 1 to train in round 1")
    fleet.kill("node1")

    def waits():
        return (
            "Waiting for nodes"
            in fleet.flwr("log", run, "test", "--show").partition("round 1 committed")[2]
        )

    fleet._until(waits, 300, "the server to wait for nodes after round 1", every=1)
    for process in fleet.serverapps():
        os.kill(process, signal.SIGKILL)
    (first,) = rounds(state)
    assert first["outcome"] == "committed"
    assert first["replied"] == ["0", "2"]
    assert list((state / "checkpoint").glob("manifest.*"))


def test_replies_count_as_they_come(fleet, tmp_path):
    """FedBuff: two of three replies make a round, and the third counts rounds later, once, by its
    age.
    """
    state, go = tmp_path / "state", tmp_path / "go"
    app = copied(tmp_path / "app", slow=SLOW.format(go=str(go)))
    run = fleet.run(config(state, "rounds=6 recipe.name=fedbuff recipe.size=2"), app)
    fleet._until(lambda: len(rounds(state)) >= 2, 300, "two rounds without partition 2")
    assert all("2" not in line["replied"] for line in rounds(state))
    go.touch()
    assert fleet.finish(run) == "finished:completed"
    lines = rounds(state)
    assert [line["outcome"] for line in lines] == ["committed"] * 6
    assert all(len(line["replied"]) == 2 for line in lines)
    landed = next(line for line in lines if "2" in line["replied"])
    assert landed["ages"]["2"] == landed["t"] - 1 >= 2
    asked = [line["t"] for line in lines if "2" in line["chosen"]]
    assert asked[0] == 1
    assert all(t > landed["t"] for t in asked[1:])  # it was left alone meanwhile


@pytest.mark.parametrize(
    "fleet",
    [{"tls": True}, {"tls": True, "authenticate": True}],
    indirect=True,
    ids=["tls", "auth"],
)
def test_encrypted_and_authenticated(fleet, tmp_path):
    """Two rounds of the default recipe: nodes make the initial model themselves, so the first
    downloads are empty and the second ones are differences. Under authentication, a node without a
    registered key never gets in.
    """
    state = tmp_path / "state"
    if fleet.authenticate:
        fleet.stranger()
    run = fleet.run(config(state, "rounds=2"))
    assert fleet.finish(run) == "finished:completed"
    first, second = rounds(state)
    assert sorted(first["replied"]) == sorted(second["replied"]) == ["0", "1", "2"]
    assert first["why"]["downloads"] == {"first": 3}
    assert second["why"]["downloads"] == {"difference": 3}
    assert first["bytes_down"] == 0
    whole = (state / "model.safetensors").stat().st_size
    assert 0 < 5 * second["bytes_down"] < 3 * whole
    assert (fleet.folder / "link.log").read_text().count("Activated node_id") == 3


def test_simulation_engine_on_ray(tmp_path):
    """Ray listens on all interfaces, so it runs in a network namespace of its own that has loopback
    only.
    """
    pytest.importorskip("ray", reason="needs Ray: pip install flwr[simulation]")
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("no permission for a network namespace (unshare -n)")
    state, script = tmp_path / "state", tmp_path / "inside.py"
    script.write_text(
        RAY.format(
            tests=str(Path(__file__).parent), folder=str(tmp_path), app=str(APP), state=str(state)
        )
    )

    inside = f"ip link set lo up && {BIN / 'python'} {script}"
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", inside], capture_output=True, text=True, timeout=500
    )
    assert "STATUS finished:completed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert [line["t"] for line in rounds(state)] == [1, 2]


RAY = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from fleet import Fleet

class Simulated(Fleet):
    def start_link(self):
        self.link.append("--simulation")
        super().start_link()

fleet = Simulated(Path({folder!r}) / "fleet")
try:
    what = 'set="clients=6 per_round=2 rounds=2 train.epochs=1 engine.kernel=torch" state="{state}"'
    out = fleet.flwr("run", {app!r}, "test", "--run-config", what, "--format", "json", "--federation-config",
                     "num-supernodes=6 client-resources-num-cpus=1")
    import json
    print("STATUS", fleet.finish(str(json.loads(out)["run-id"])))
finally:
    print(fleet.logs()[-3000:])
    fleet.close()
"""


LINE_APP = Path(__file__).parents[1] / "faults" / "line_app"
SOAK_ROUNDS, KILL_EVERY = 30, 3


@pytest.mark.nightly
def test_thirty_rounds_with_a_kill_in_every_third(tmp_path):
    """The ServerApp is killed at a random moment after every third round and the app is run again:
    what was committed stays as it was, and no logged round is trained again.
    """
    state, fleet, runs = tmp_path / "state", Fleet(tmp_path / "fleet"), []
    kept: list[list[bytes]] = []
    what = f'state="{state}" rounds={SOAK_ROUNDS} timeout=120.0'
    try:
        for k in range(3):
            fleet.node(k)
        online = lambda: fleet.flwr("supernode", "list", "test").count("online") >= 3  # noqa: E731
        fleet._until(online, 240, "the nodes", every=1)
        for kill in range(SOAK_ROUNDS // KILL_EVERY):
            runs.append(fleet.run(what, LINE_APP))
            reached = kill * KILL_EVERY + KILL_EVERY - 1
            fleet._until(lambda n=reached: len(rounds(state)) >= n, 400, f"round {reached}")
            time.sleep(random.Random(kill).uniform(0, 6))
            for process in fleet.serverapps():
                os.kill(process, signal.SIGKILL)
            # the last line of those waited for may not be committed yet
            kept.append((state / "rounds.jsonl").read_bytes().splitlines()[: reached - 1])
        runs.append(fleet.run(what, LINE_APP))
        assert fleet.finish(runs[-1], 600) == "finished:completed"
        logs = "".join(fleet.flwr("log", run, "test", "--show") for run in runs)
    finally:
        fleet.close()
    committed = rounds(state)
    assert [line["t"] for line in committed] == list(range(1, SOAK_ROUNDS + 1))
    assert {line["outcome"] for line in committed} == {"committed"}
    logged = [int(t) for t in re.findall(r"round (\d+) committed", logs)]
    assert len(logged) == len(set(logged))
    assert len(runs) == SOAK_ROUNDS // KILL_EVERY + 1
    lines = (state / "rounds.jsonl").read_bytes().splitlines()
    assert all(lines[: len(before)] == before for before in kept)
    assert (state / "summary.json").exists()
