"""What was measured, checked and set in ratio: results/peers.json, peers.md and peers.svg."""

import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median

import torch
from nets import LENGTH, build
from roster import PEERS
from work import SETTINGS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from h200_networks import products
from native import CASES

EXPECTED = {"steps": 150, "trained": 17_500, "evaluated": 15_000}  # of a round
SAMPLES = (EXPECTED["trained"] + EXPECTED["evaluated"]) * 3 * 32 * 32  # bytes
SLACK = 0.05  # of the samples, that a peer may train on more or fewer
NOISE = 0.05  # how far an accuracy may lie from the others' median after the same number of rounds
FOREIGN = 0.2  # cores that others may use during a round that counts as quiet
ABOUT = {
    "resnet-8": "ResNet-8, GroupNorm, 78,042 floats",
    "lstm": "char LSTM 2 x 256, 819,920 floats",
    "gpt": "GPT, 4 layers of 128, 823,888 floats",
}
LABELS = {peer.name: peer.label for peer in PEERS}
OURS = ("native", "auto", "torch")
Rows = list[dict]


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def gflop() -> tuple[float, float]:
    """GFLOP of a round: 10 clients' training, and the evaluation."""
    train, evaluate = CASES[0].work()
    return 10 * train, evaluate


def read(log: Path) -> tuple[Rows, dict[str, str]]:
    """(rounds that count, why peers without any are absent). A run that left out work does not
    count.
    """
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    broken = {
        run_of(row): row
        for row in rows
        if "absent" not in row and row["round"] > 1 and not did_it(row)
    }
    present = [row for row in rows if "absent" not in row and run_of(row) not in broken]
    absent = {row["peer"]: row["absent"] for row in rows if "absent" in row}
    for (peer, *_), row in broken.items():
        absent[peer] = (
            f"round {row['round']} trained on {row['trained']} samples, not {EXPECTED['trained']}"
        )
    ran = {row["peer"] for row in present}
    return present, {peer: why for peer, why in absent.items() if peer not in ran}


def run_of(row: dict) -> tuple[str, int, int]:
    return row["peer"], row["pass"], row["cores"]


def did_it(row: dict) -> bool:
    """Whether a round did the work up to how a peer cuts its batches."""
    return all(abs(row[key] / EXPECTED[key] - 1) < SLACK for key in ("trained", "evaluated"))


def work_checked(rows: Rows) -> dict[str, str]:
    """What is wrong with each peer's work; an empty text if nothing is.

    Steps are counted over a run: while one process ends a round, another may have begun the next.
    """
    runs, final = defaultdict(list), defaultdict(list)
    for row in rows:
        runs[run_of(row)].append(row)
    last = max(row["round"] for row in rows)
    faults = {row["peer"]: "" for row in rows}
    for (peer, *_), run in runs.items():
        final[peer] += [row["accuracy"] for row in run if row["round"] == last]
        steps, trained = (sum(row[key] for row in run) / len(run) for key in ("steps", "trained"))
        wrong = [
            row["evaluated"]
            for row in run
            if row["round"] > 1 and row["evaluated"] != EXPECTED["evaluated"]
        ]
        if (steps, trained) != (EXPECTED["steps"], EXPECTED["trained"]) or wrong:
            faults[peer] = (
                f"{steps:g} steps, {trained:g} + {[*wrong, EXPECTED['evaluated']][0]} samples"
            )
    middle = median(median(values) for values in final.values() if values)
    for peer, values in final.items():
        if values and abs(median(values) - middle) > NOISE and not faults[peer]:
            faults[peer] = f"accuracy {median(values):.3f}, others {middle:.3f}"
    return faults


def compared(rows: Rows, cores: int, key: str) -> dict[str, dict[str, list[float]]]:
    """Per peer its figures, and their ratios to ours of the same pass and round."""
    at = {
        (r["peer"], r["pass"], r["round"]): r[key]
        for r in rows
        if r["cores"] == cores and r["round"] > 1
    }
    table: dict[str, dict[str, list[float]]] = {}
    for peer in LABELS:
        own = {(p, t): value for (name, p, t), value in at.items() if name == peer}
        ratio = [
            value / at["native", p, t] for (p, t), value in own.items() if ("native", p, t) in at
        ]
        if own:
            table[peer] = {"values": list(own.values()), "ratios": ratio}
    return table


def quiet_only(rows: Rows) -> tuple[Rows, bool]:
    """Rounds without foreign load, if everyone has some; else all of them, and True: the machine
    was busy.
    """
    quiet = [row for row in rows if row["foreign"] < FOREIGN]
    enough = {(r["peer"], r["cores"]) for r in quiet if r["round"] > 1} == {
        (r["peer"], r["cores"]) for r in rows
    }
    return (quiet, False) if enough else (rows, True)


def hardware() -> str:
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return (
        f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}"
    )


def table(rows: Rows, cores: int, faults: dict[str, str]) -> list[str]:
    key, unit = ("cpu_seconds", "CPU s") if cores == 1 else ("seconds", "s")
    found, cpu = compared(rows, cores, key), compared(rows, cores, "cpu_seconds")
    versions = {row["peer"]: row["version"] for row in rows}
    head = [
        "one thread" if cores == 1 else f"{cores} cores",
        "version",
        f"{unit} a round",
        "times native",
        "same work",
    ]
    head += ["CPU s a round"] * (cores > 1)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for peer, cell in sorted(found.items(), key=lambda item: median(item[1]["values"])):
        ratio = spread(cell["ratios"]) if cell["ratios"] else "-"
        row = [LABELS[peer], versions[peer], spread(cell["values"]), ratio, faults[peer] or "yes"]
        row += [spread(cpu[peer]["values"])] * (cores > 1)
        lines.append(f"| {' | '.join(row)} |")
    return lines


def best(rows: Rows, cores: int, key: str) -> list[str]:
    """How both of ours stand to the fastest of the others, pass by pass and round by round."""
    at = {
        (r["peer"], r["pass"], r["round"]): r[key]
        for r in rows
        if r["cores"] == cores and r["round"] > 1
    }
    found = compared(rows, cores, key)
    others = {peer: median(cell["values"]) for peer, cell in found.items() if peer not in OURS}
    if not others:
        return []
    peer = min(others, key=others.__getitem__)
    times = {
        ours: [
            value / at[ours, p, t]
            for (name, p, t), value in at.items()
            if name == peer and (ours, p, t) in at
        ]
        for ours in ("native", "torch")
    }
    said = [
        f"{spread(ratio)} times what {LABELS[ours]} takes" for ours, ratio in times.items() if ratio
    ]
    unit = "CPU seconds" if key == "cpu_seconds" else "seconds by the clock"
    return (
        [f"The fastest of the others in {unit}, {LABELS[peer]}: {', '.join(said)}.", ""]
        if said
        else []
    )


def floor(rows: Rows) -> list[str]:
    """How far ours is from what the processor's matrix product would take for the same
    arithmetic.
    """
    train, evaluate = gflop()
    rate = median(row["sgemm"] for row in rows)
    ours = compared(rows, 1, "cpu_seconds").get("native")
    if not ours:
        return []
    own, copied = median(ours["values"]), median(row["copy"] for row in rows if "copy" in row)
    return [
        f"A round is {train + evaluate:.1f} GFLOP ({train:.1f} training, {evaluate:.1f}"
        f" evaluation). torch's float32 product reached {rate:.0f} GFLOP/s on one core during these"
        f" runs, so the floor is {(train + evaluate) / rate:.2f} CPU s; flrce native takes"
        f" {own:.2f}, {own * rate / (train + evaluate):.2f} times that. Its samples are"
        f" {SAMPLES / 1e6:.0f} MB, {SAMPLES / 1e9 / copied:.3f} s at the {copied:.0f} GB/s of a"
        " copy: memory does not limit it."
    ]


def write(log: Path, folder: Path) -> str:
    """The three files; returns the Markdown."""
    rows, absent = read(log)
    kept, busy = quiet_only(rows)
    faults = work_checked(rows)
    state = (
        "The machine was busy with other work: wall times mean little, CPU seconds of one thread"
        " are steadier."
        if busy
        else f"Rounds during which others used more than {FOREIGN} cores are left out."
    )
    rounds, passes = max(row["round"] for row in rows), len({row["pass"] for row in rows})
    text = [
        "# Rounds against the peers",
        "",
        (
            f"{hardware()}. Data: {rows[0]['data']}. {date.today()}. {passes} passes of everyone in"
            f" turn, {rounds - 1} warm rounds each; median (min-max) over rounds, ratios to the"
            f" same pass and round of flrce native. {state}"
        ),
        "",
        (
            "100 equal clients, 10 a round, 350 training and 150 validation samples each, CNN of"
            " 134,946 floats, SGD, batches of 128, 5 epochs, FedAvg; after every round the model"
            " on all 15,000 validation samples. `same work`: steps and samples counted, accuracy"
            f" after {rounds} rounds within {NOISE} of the others' median."
        ),
        "",
    ]
    for cores in sorted({row["cores"] for row in kept}):
        text += [
            *table(kept, cores, faults),
            "",
            *best(kept, cores, "cpu_seconds" if cores == 1 else "seconds"),
        ]
        text += best(kept, cores, "cpu_seconds") if cores > 1 else []
    text += [*floor(kept), ""]
    if absent:
        text += [
            "| not measured | why |",
            "|---|---|",
            *(f"| {LABELS[p]} | {why} |" for p, why in absent.items()),
            "",
        ]
    folder.mkdir(exist_ok=True)
    (folder / "peers.md").write_text("\n".join(text))
    result = {
        "hardware": hardware(),
        "busy": busy,
        "gflop": gflop(),
        "faults": faults,
        "absent": absent,
        "cpu_seconds_one_thread": compared(kept, 1, "cpu_seconds"),
        "seconds_two_cores": compared(kept, 2, "seconds"),
        "rounds": rows,
    }
    (folder / "peers.json").write_text(json.dumps(result, indent=1))
    plot(result, folder / "peers.svg")
    return "\n".join(text)


def network_table(rows: Rows, network: str) -> list[str]:
    """One thread, CPU seconds: everyone beside what flrce trains such a network by."""
    setting = SETTINGS[network]
    batches = -(-setting.train // setting.batch) * setting.epochs
    expected = {"steps": 10 * batches, "trained": 10 * setting.train * setting.epochs}
    at = {(r["peer"], r["pass"], r["round"]): r["cpu_seconds"] for r in rows if r["round"] > 1}
    lines = [
        "| one thread | version | CPU s a round | times flrce | same work |",
        "|---|---|---|---|---|",
    ]
    found, ours = {}, usual(rows)
    for peer in dict.fromkeys(r["peer"] for r in rows):
        own = {(p, t): value for (name, p, t), value in at.items() if name == peer}
        ratio = [value / at[ours, p, t] for (p, t), value in own.items() if (ours, p, t) in at]
        runs = defaultdict(list)
        for r in rows:
            if r["peer"] == peer:
                runs[run_of(r)].append(r)
        means = {
            tuple(sum(r[key] for r in run) / len(run) for key in expected) for run in runs.values()
        }
        same = (
            "yes" if means == {tuple(expected.values())} else f"{sorted(means)} steps and samples"
        )
        version = next(r["version"] for r in rows if r["peer"] == peer)
        found[peer] = (own, ratio, version, same)
    for peer, (own, ratio, version, same) in sorted(
        found.items(), key=lambda x: median(x[1][0].values())
    ):
        compared_to = spread(ratio) if ratio else "-"
        lines.append(
            f"| {LABELS[peer]} | {version} | {spread(list(own.values()))} | {compared_to} |"
            f" {same} |"
        )
    return lines


def usual(rows: Rows) -> str:
    """Which of ours trains such a network unless one says otherwise."""
    there = {row["peer"] for row in rows}
    return next(peer for peer in OURS if peer in there or peer == "torch")


def network_gflop(network: str) -> float:
    """GFLOP of a round's products: forward, by inputs and by weights, and the evaluation."""
    setting, net = SETTINGS[network], build(network, SETTINGS[network].classes, 0)
    x = torch.zeros(1, LENGTH, dtype=torch.int64) if setting.tokens else torch.zeros(1, 3, 32, 32)
    once = products(net, x)
    return (3 * 10 * setting.train * setting.epochs + setting.clients * setting.held) * once / 1e9


def write_networks(logs: dict[str, Path], folder: Path) -> str:
    """results/peers-networks.{json,md}: a table for each network but the paper's."""
    text = ["# Other networks against the peers", ""]
    kept: dict[str, object] = {"hardware": hardware()}
    for network, log in logs.items():
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        absent = {row["peer"]: row["absent"] for row in rows if "absent" in row}
        rows = [row for row in rows if "absent" not in row]
        if not rows:
            continue
        setting, rate, work = (
            SETTINGS[network],
            median(r["sgemm"] for r in rows),
            network_gflop(network),
        )
        passes, rounds = len({r["pass"] for r in rows}), max(r["round"] for r in rows)
        kept[network] = rows
        rows, busy = quiet_only(rows)
        left = (
            "The machine was busy."
            if busy
            else f"Rounds during which others used above {FOREIGN} cores are left out."
        )
        own = [r["cpu_seconds"] for r in rows if r["peer"] == usual(rows) and r["round"] > 1]
        text += [
            (
                f"**{ABOUT[network]}**: 10 of {setting.clients} clients a round, {setting.train}"
                f" samples each, batches of {setting.batch}, {setting.epochs} epochs,"
                f" {setting.clients * setting.held} validation samples. {hardware()}. {passes}"
                f" passes in turn, {rounds - 1} warm rounds each; median (min-max), ratios of the"
                f" same pass and round. {left}"
            ),
            "",
            *network_table(rows, network),
            "",
        ]
        if own:
            text += [
                (
                    f"A round's products are {work:.0f} GFLOP; torch's float32 product reached"
                    f" {rate:.0f} GFLOP/s on one core between these runs, so the floor is"
                    f" {work / rate:.2f} CPU s and flrce takes {median(own) * rate / work:.2f}"
                    " times that."
                ),
                "",
            ]
        text += [f"Not measured: {LABELS[peer]} ({why})." for peer, why in absent.items()]
    (folder / "peers-networks.md").write_text("\n".join(text).rstrip() + "\n")
    (folder / "peers-networks.json").write_text(json.dumps(kept, indent=1))
    return "\n".join(text)


def plot(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    found = result["cpu_seconds_one_thread"]
    order = sorted(found, key=lambda peer: -median(found[peer]["values"]))
    middle = [median(found[peer]["values"]) for peer in order]
    reach = [
        [m - min(found[p]["values"]) for p, m in zip(order, middle, strict=True)],
        [max(found[p]["values"]) - m for p, m in zip(order, middle, strict=True)],
    ]
    figure, axes = pyplot.subplots(figsize=(7, 0.45 * len(order) + 1.2), layout="constrained")
    colours = ["#0072b2" if peer in OURS else "#999999" for peer in order]
    axes.barh([LABELS[peer] for peer in order], middle, xerr=reach, color=colours, capsize=3)
    axes.set_xlabel("CPU seconds a round, one thread (median, min to max)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
