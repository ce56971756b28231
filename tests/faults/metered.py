"""Bytes on the interfaces of a Flower deployment against its ledger: unshare -rn python metered.py
FOLDER

Every SuperNode sits in a network namespace of its own, at the end of a clean veth pair whose
counters are read before and after a run. Prints what was seen as JSON; exit code 77: this machine
cannot, and why.
"""

import json
import sys
import time
from pathlib import Path

from lossy import APP, NODES, Lossy, call, rounds

FLOATS, ROUNDS = 2_000_000, 2
IDLE_SECONDS = 15.0
HEADER_BYTES = 14 + 20 + 32  # Ethernet, IP and TCP with time stamps, of every packet


class Metered(Lossy):
    """Clean lines; what travels is counted at the server's ends."""

    def prepare_device(self, device: str, *inside: object) -> None:
        call(*inside, "ip", "link", "set", device, "up")

    def read_counters(self) -> tuple[int, int]:
        """(bytes to the nodes, bytes from the nodes) so far, without the headers of packets: how
        many packets there are depends on the load of the machine.
        """
        folders = [Path(f"/sys/class/net/near{k}/statistics") for k in range(NODES)]
        shown = [call("ip", "-s", "-j", "link", "show", folder.parent.name) for folder in folders]
        stats = [json.loads(text)[0]["stats64"] for text in shown]
        down, up = (
            sum(s[way]["bytes"] - HEADER_BYTES * s[way]["packets"] for s in stats)
            for way in ("tx", "rx")
        )
        return down, up


def measure(fleet: Metered, state: Path) -> dict[str, object]:
    """Counters of an idle federation, then of one run."""
    fleet._until(lambda: fleet.flwr("supernode", "list", "test").count("online") >= NODES, 240,
                 "the nodes")  # fmt: skip
    began, before = time.monotonic(), fleet.read_counters()
    time.sleep(IDLE_SECONDS)
    idle, passed = fleet.read_counters(), time.monotonic() - began
    start, began = idle, time.monotonic()
    run = fleet.run(f'state="{state}" rounds={ROUNDS} timeout=300.0 floats={FLOATS}', APP)
    status = fleet.finish(run)
    end, lasted = fleet.read_counters(), time.monotonic() - began
    rate = [(b - a) / passed for a, b in zip(before, idle, strict=True)]
    return {
        "status": status,
        "rounds": rounds(state),
        "wire": [b - a for a, b in zip(start, end, strict=True)],
        "idle": [each * lasted for each in rate],
        "seconds": lasted,
    }


def main(folder: Path) -> int:
    try:
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "try0", "type", "veth", "peer", "name", "try1")
    except OSError as why:
        print(why)
        return 77
    fleet = Metered(folder / "fleet")
    try:
        for k in range(NODES):
            fleet.node(k)
        print(json.dumps(measure(fleet, folder / "state")))
        return 0
    finally:
        fleet.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
