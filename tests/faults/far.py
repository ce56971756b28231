"""Five hosts on lines of 1 Mbit/s with 200 ms of delay and 1 % loss each way, one of which reboots:
unshare -rn python far.py FOLDER

Every SuperNode sits in a network namespace of its own. Its line is a pair of tun devices, between
which a thread of this process passes packets on: late, at the line's rate, and some not at all. So
TCP meets what it would meet on such a line, on kernels without netem too. Prints what was seen as
JSON; exit code 77: this machine cannot, and why.
"""

import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "deployment"))
from fleet import APP, rounds
from lossy import Lossy, call

HOSTS, ROUNDS, REBOOTED = 5, 3, 2
DELAY_SECONDS, LOSS, BITS_PER_SECOND = 0.2, 0.01, 1_000_000
MAX_QUEUE_SECONDS = 2.0  # packets beyond are dropped, as by a router
MAX_PACKET_BYTES = 2048
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
#: every reply counts, so that a round without the rebooted host is abandoned and repeated
SETTINGS = (
    f"clients={HOSTS} per_round={HOSTS} rounds={ROUNDS} recipe.name=flrce-no-stop"
    f" recipe.minimum={HOSTS} train.epochs=1 engine.kernel=torch engine.eval_every={ROUNDS}"
)


def open_tun(name: str) -> int:
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return handle


class Lines(threading.Thread):
    """Passes packets on between pairs of tun devices. Which are lost is drawn from a seed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.selector = selectors.DefaultSelector()
        self.random = random.Random(0)
        self.free_at: dict[int, float] = {}  # device -> when what it sent has left it
        self.waiting: list[tuple[float, int, int, bytes]] = []
        self.sent = self.lost = self.bytes = 0

    def add(self, a: int, b: int) -> None:
        for source, target in ((a, b), (b, a)):
            self.selector.register(source, selectors.EVENT_READ, target)
            self.free_at[source] = 0.0

    def run(self) -> None:
        while True:
            wait = self.waiting[0][0] - time.monotonic() if self.waiting else 0.1
            for key, _ in self.selector.select(min(max(wait, 0.0), 0.1)):
                self._take(key.fd, key.data)
            while self.waiting and self.waiting[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(self.waiting)
                try:
                    os.write(target, packet)
                except OSError:  # that host is rebooting
                    self.lost += 1

    def _take(self, source: int, target: int) -> None:
        try:
            packet = os.read(source, MAX_PACKET_BYTES)
        except OSError:
            return
        now = time.monotonic()
        leaves = max(now, self.free_at[source]) + 8 * len(packet) / BITS_PER_SECOND
        self.sent += 1
        self.bytes += len(packet)
        if self.random.random() < LOSS or leaves > now + MAX_QUEUE_SECONDS:
            self.lost += 1
            return
        self.free_at[source] = leaves
        heapq.heappush(self.waiting, (leaves + DELAY_SECONDS, self.sent, target, packet))


class Far(Lossy):
    """A host at the far end of each line."""

    def __init__(self, folder: Path) -> None:
        self.lines, self.far = Lines(), {}
        super().__init__(folder)
        self.lines.start()

    def line(self, k: int) -> list[object]:
        if k in self.far:  # a host that starts again keeps its line
            return self.far[k]
        self._start(f"line{k}", ["unshare", "-n", "sleep", "3000"])
        pid = self.processes[f"line{k}"].pid
        self._until(
            lambda: os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"),
            30,
            "a namespace",
        )
        inside = ["nsenter", "-t", pid, "-n"]
        near, far = open_tun(f"near{k}"), open_tun(f"far{k}")
        call("ip", "link", "set", f"far{k}", "netns", pid)
        call("ip", "addr", "add", f"10.77.{k}.1", "peer", f"10.77.{k}.2", "dev", f"near{k}")
        call("ip", "link", "set", f"near{k}", "up")
        call(*inside, "ip", "addr", "add", f"10.77.{k}.2", "peer", f"10.77.{k}.1", "dev", f"far{k}")
        call(*inside, "ip", "link", "set", f"far{k}", "up")
        call(*inside, "ip", "link", "set", "lo", "up")
        self.lines.add(near, far)
        self.far[k] = inside
        return inside


def story(fleet: Far, state: Path) -> dict[str, object]:
    """All rounds of an experiment; a host reboots in the second."""
    for k in range(HOSTS):
        fleet.node(k)
    began = time.monotonic()
    run = fleet.run(f'state="{state}" timeout=240.0 wait=600.0 set="{SETTINGS}"', APP)
    fleet._until(lambda: len(rounds(state)) >= 1, 900, "round 1")
    fleet.kill(f"node{REBOOTED}")
    time.sleep(5)
    fleet.node(REBOOTED)
    status = fleet.finish(run, 1500)
    return {
        "status": status,
        "rounds": rounds(state),
        "seconds": time.monotonic() - began,
        "packets": [fleet.lines.sent, fleet.lines.lost],
        "bytes": fleet.lines.bytes,
    }


def main(folder: Path) -> int:
    try:
        call("ip", "link", "set", "lo", "up")
        os.close(open_tun("try0"))
        subprocess.run(["nsenter", "--version"], capture_output=True, check=True)
    except OSError as why:
        print(why)
        return 77
    fleet = Far(folder / "fleet")
    try:
        print(json.dumps(story(fleet, folder / "state")))
        return 0
    finally:
        fleet.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
