"""A Flower deployment behind bad lines, in a network namespace of its own: unshare -rn python
lossy.py FOLDER

Every SuperNode sits in a further namespace, at the end of a veth pair of 200 kbit/s that loses 30 %
of the packets both ways. tbf keeps the rate. Four instructions of classic BPF draw a random number
per packet and drop it: unlike netem, even small kernels have that. Prints what was seen as JSON;
exit code 77: this machine cannot, and why.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "deployment"))
from fleet import Fleet, free_port, rounds

APP = Path(__file__).parent / "line_app"
NODES, ROUNDS, TIMEOUT = 3, 3, 35.0
LOSS, RATE = 0.3, "200kbit"
RANDOM, KEEP, DROP = 0xFFFFF038, 0, 2  # SKF_AD_OFF + SKF_AD_RANDOM, TC_ACT_OK, TC_ACT_SHOT
#: code, jump if true, jump if false, operand: A = random; A >= threshold ? keep : drop
BYTECODE = f"4,32 0 0 {RANDOM},53 1 0 {int(LOSS * 2**32)},6 0 0 {DROP},6 0 0 {KEEP}"


def call(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command[:8]))}: {done.stderr.strip()}")
    return done.stdout


def spoil(device: str, *inside: object) -> None:
    """The rate on what the device sends, the loss on what it receives; one segment a packet."""
    call(*inside, "ip", "link", "set", device, "up", "gso_max_segs", 1)
    call(
        *inside,
        "tc",
        "qdisc",
        "add",
        "dev",
        device,
        "root",
        "tbf",
        "rate",
        RATE,
        "burst",
        "4kb",
        "latency",
        "2s",
    )
    call(*inside, "tc", "qdisc", "add", "dev", device, "ingress")
    call(
        *inside,
        "tc",
        "filter",
        "add",
        "dev",
        device,
        "parent",
        "ffff:",
        "bpf",
        "da",
        "bytecode",
        BYTECODE,
    )


class Lossy(Fleet):
    """The SuperLink listens on every line of this namespace; a node is alone at the other end of
    its line.
    """

    def start_link(self) -> None:
        self.link = ["0.0.0.0" if part == "127.0.0.1" else part for part in self.link]
        super().start_link()

    def node(self, partition: int) -> None:
        far, k = self.line(partition), partition
        self._start(
            f"node{k}",
            [
                *map(str, far),
                "flower-supernode",
                "--superlink",
                f"10.77.{k}.1:{self.port}",
                "--insecure",
                "--host",
                "127.0.0.1",
                "--port",
                str(free_port()),
                "--node-config",
                f"partition-id={k} num-partitions={NODES}",
            ],
        )

    def line(self, k: int) -> list[object]:
        """Lay the line of a node; returns how to run a command at its far end."""
        self._start(f"line{k}", ["unshare", "-n", "sleep", "1000"])
        pid = self.processes[f"line{k}"].pid
        self._until(
            lambda: os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"),
            10,
            "a namespace",
        )
        far = ["nsenter", "-t", pid, "-n"]
        call(
            "ip", "link", "add", f"near{k}", "type", "veth", "peer", "name", f"far{k}", "netns", pid
        )
        call("ip", "addr", "add", f"10.77.{k}.1/30", "dev", f"near{k}")
        call(*far, "ip", "addr", "add", f"10.77.{k}.2/30", "dev", f"far{k}")
        call(*far, "ip", "link", "set", "lo", "up")
        self.prepare_device(f"near{k}")
        self.prepare_device(f"far{k}", *far)
        return far

    def prepare_device(self, device: str, *inside: object) -> None:
        spoil(device, *inside)

    def name(self, k: int) -> str:
        """What the server calls a node: its id."""
        found = re.search(r"SuperNode ID: (\d+)", (self.folder / f"node{k}.log").read_text())
        return f"node-{found[1]}" if found else ""

    def packets(self) -> tuple[int, int]:
        """(arrived at the server's ends, of these dropped there), as the kernel counts them."""
        shown = [call("tc", "-s", "-j", "qdisc", "show", "dev", f"near{k}") for k in range(NODES)]
        queues = [
            queue for text in shown for queue in json.loads(text) if queue["kind"] == "ingress"
        ]
        lost = sum(queue["drops"] for queue in queues)
        return sum(queue["packets"] for queue in queues), lost


def story(fleet: Lossy, state: Path) -> dict[str, object]:
    """A round; the SuperLink is killed and started again; a round by a second run; a line is cut; a
    last round.
    """
    what = f'state="{state}" rounds={ROUNDS} timeout={TIMEOUT}'

    def until(count: int) -> None:
        done = lambda: sum(line["outcome"] == "committed" for line in rounds(state)) >= count  # noqa: E731
        fleet._until(done, 240, f"round {count}")

    ends: dict[str, str] = {}

    def ended(*some: str) -> bool:
        """Whether these runs have ended; `flwr list` takes seconds, so it is asked for all at
        once.
        """
        ends.update(
            {
                run["run-id"]: run["status"]
                for run in json.loads(fleet.flwr("list", "test", "--format", "json"))["runs"]
            }
        )
        return all(ends.get(run, "").startswith("finished") for run in some)

    first = fleet.run(what, APP)
    until(1)
    fleet.kill("link")
    fleet.start_link()
    fleet._until(
        lambda: ended(first), 180, "the first run to end", every=1
    )  # until then the state folder is its own
    second = fleet.run(what, APP)
    until(2)
    call("ip", "link", "set", "near2", "down")
    until(ROUNDS)
    assert fleet.name(2) in rounds(state)[-1]["rejected"], "it answered before its line was cut"
    fleet._until((state / "summary.json").exists, 120, "a summary")
    fleet._until(lambda: ended(first, second), 180, "both runs to end", every=1)
    return {
        "first": ends[first],
        "second": ends[second],
        "rounds": rounds(state),
        "cut": fleet.name(2),
        "nodes": [fleet.name(k) for k in range(NODES)],
        "packets": fleet.packets(),
    }


def main(folder: Path) -> int:
    try:
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "try0", "type", "veth", "peer", "name", "try1")
        spoil("try0")
    except OSError as why:
        print(why)
        return 77
    fleet = Lossy(folder / "fleet", database=True)
    try:
        for k in range(NODES):
            fleet.node(k)
        print(json.dumps(story(fleet, folder / "state")))
        return 0
    finally:
        fleet.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
