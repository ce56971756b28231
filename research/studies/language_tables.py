"""Tables, claims and figure of the language study, from lines alone.

python research/studies/language_tables.py gather DIR     DIR's runs, as research/studies/language.py left them, in two small files
python research/studies/language_tables.py                research/docs/language.md's tables and every claim of the plan
python research/studies/language_tables.py figure FILE    perplexity against megabytes
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student

HERE = Path(__file__).parent
PLAN = json.loads((HERE / "plans" / "language.json").read_text())
LINES, SPEED = HERE / "lines" / "language.jsonl", HERE / "lines" / "language-speed.jsonl"
ARMS = {"": "", "-averaged": " + average", "-guided": " + FLrce"}  # and how tables name them
KEYS = (
    "t",
    "up",
    "down",
    "joules",
    "perplexity",
    "averaged",
    "pooled",
)  # of an evaluation; costs since round 1
Lines = dict[str, dict[str, Any]]


def gather(folder: Path) -> None:
    """One line a run: its evaluations with what had been spent by then. What other occasions
    completed is kept.
    """
    rows = {row["name"]: row for row in _rows()}
    for path in sorted(folder.glob("*-s*.json")) + sorted(folder.glob("search-*.json")):
        line = json.loads(path.read_text())
        seen = [[_short(each[key]) for key in KEYS] for each in _spent(line["rounds"])]
        stop = line["rounds"][-1].get("stop", "")
        found = {"name": line["name"], "complete": line["complete"], "stop": stop, "seen": seen}
        for row in (found, *_plain(found)):
            if not rows.get(row["name"], {}).get("complete"):
                rows[row["name"]] = row
    text = [json.dumps(rows[name], separators=(",", ":")) + "\n" for name in sorted(rows)]
    LINES.write_text("".join(text))
    found = folder / "speed.jsonl"
    if found.exists():
        SPEED.write_text(found.read_text())


def _plain(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The plain run that an averaged one is, judged by its last model."""
    if "-averaged" in row["name"]:
        seen = [
            [None if key == "averaged" else each[i] for i, key in enumerate(KEYS)]
            for each in row["seen"]
        ]
        yield {**row, "name": row["name"].replace("-averaged", ""), "seen": seen}


def _rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []


def _spent(rounds: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    total = {"up": 0.0, "down": 0.0, "joules": 0.0}
    for r in rounds:
        for name, key in (("up", "bytes_up"), ("down", "bytes_down"), ("joules", "joules")):
            total[name] += r.get(key, 0)
        if r["perplexity"] is not None:
            more = {key: r.get(key) for key in ("t", "perplexity", "averaged", "pooled")}
            yield {**more, **total}


def _short(value: float | None) -> float | None:
    return None if value is None else int(value) if float(value).is_integer() else round(value, 4)


def read(complete: bool = True) -> Lines:
    return {
        row["name"]: {**row, "seen": [dict(zip(KEYS, seen, strict=True)) for seen in row["seen"]]}
        for row in _rows()
        if row["complete"] or not complete
    }


def handed(seen: dict[str, Any]) -> float:
    """The perplexity of the model that would be handed back."""
    return float(seen["perplexity"] if seen["averaged"] is None else seen["averaged"])


def seeds(lines: Lines, method: str, arms: Sequence[str] = ("", "-guided")) -> list[int]:
    """Those of which the runs of these arms are complete."""
    asked = (*PLAN["seeds"], *PLAN["more"])
    return [seed for seed in asked if all(f"{method}{arm}-s{seed}" in lines for arm in arms)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half of the 95 % interval by Student's t)."""
    if len(values) < 2:
        return mean(values) if values else math.nan, math.inf
    return mean(values), float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(
        len(values)
    )


def shown(values: Sequence[float], digits: int = 4) -> str:
    middle, half = interval(values)
    if not values:
        return "none"
    return f"{middle:.{digits}g}" + (f" ± {half:.2g}" if len(values) > 1 and half > 0 else "")


def verdict(values: Sequence[float], limit: float) -> str:
    """What the plan's rule says of "below this limit", and of how many values."""
    if len(values) < 2:
        return f"undecided ({len(values)})"
    middle, half = interval(values)
    found = (
        "holds" if middle + half < limit else "refuted" if middle - half > limit else "undecided"
    )
    return f"{found} ({len(values)})"


def table(lines: Lines) -> None:
    print(
        "| | seeds | rounds | perplexity | of the last model | MB up | MB down | kJ | bytes a"
        " reply |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    central = [line["seen"] for name, line in lines.items() if name.startswith("central-")]
    n = len(central)
    print(
        f"| untouched base | {n} | 0 | {shown([s[0]['perplexity'] for s in central])} | | 0 | 0 |"
        " 0 | |"
    )
    best = [min(s, key=lambda x: x["perplexity"]) for s in central]
    rounds = shown([s["t"] for s in best], 3)
    print(
        f"| centralised LoRA, at its best | {n} | {rounds} |"
        f" {shown([s['perplexity'] for s in best])} | | | | | |"
    )
    print(
        f"| centralised LoRA, at its end | {n} | {PLAN['central']['rounds']} | "
        f"{shown([s[-1]['perplexity'] for s in central])} | | | | | |"
    )
    for method in PLAN["methods"]:
        for arm, named in ARMS.items():
            last = [
                lines[f"{method}{arm}-s{seed}"]["seen"][-1]
                for seed in seeds(lines, method, (arm, "-guided"))
            ]
            if not last:
                continue
            cells = [
                shown([each["t"] for each in last], 3),
                shown([handed(each) for each in last]),
                shown([each["perplexity"] for each in last]),
                shown([each["up"] / 1e6 for each in last]),
                shown([each["down"] / 1e6 for each in last]),
                shown([each["joules"] / 1e3 for each in last]),
                f"{mean(each['up'] / each['t'] / PLAN['task']['per_round'] for each in last):,.0f}",
            ]
            print(f"| {method}{named} | {len(last)} | " + " | ".join(cells) + " |")


def runs(lines: Lines) -> None:
    """Where every run ended, seed by seed; the round in brackets where that is not the plan's
    last.
    """
    asked = [
        seed
        for seed in (*PLAN["seeds"], *PLAN["more"])
        if any(name.endswith(f"-s{seed}") for name in lines)
    ]
    print("\n| seed | " + " | ".join(map(str, asked)) + " |\n" + "|---" * (len(asked) + 1) + "|")
    for method, arm in product(PLAN["methods"], ARMS):
        cells = [_end(lines.get(f"{method}{arm}-s{seed}")) for seed in asked]
        if any(cells):
            print(f"| {method}{ARMS[arm]} | " + " | ".join(cells) + " |")


def _end(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    end = line["seen"][-1]
    cut = "" if line["complete"] else ", cut short"
    return f"{handed(end):.1f}" + (
        f" ({end['t']}{cut})" if end["t"] != PLAN["task"]["rounds"] else ""
    )


def rates(lines: Lines) -> None:
    """What rates beside the plan's did: best and last evaluation of the last model."""
    print(
        "\n| run beside the plan | perplexity at its best | round | after 40 rounds"
        " |\n|---|---|---|---|"
    )
    for name, line in sorted(lines.items()):
        if "-rate" in name and "-averaged" not in name:
            best = min(line["seen"], key=lambda each: each["perplexity"])
            print(
                f"| {name} | {best['perplexity']:.1f} | {best['t']} |"
                f" {line['seen'][-1]['perplexity']:.1f} |"
            )


def lead(lines: Lines) -> None:
    """Guided runs against others of their seed: at their ends, and at the round where the guided
    one ended.
    """
    print(
        "\n| against | seeds | ended by the stop | after rounds | joules | bytes | perplexity at"
        " the end | after as many |\n|---|---|---|---|---|---|---|---|"
    )
    for method, arm in product(PLAN["methods"], ("", "-averaged")):
        found = list(_pairs(lines, method, arm))
        if not found:
            continue
        stops = [guided for _, guided in found if guided["stop"]]
        ends = sorted(int(guided["seen"][-1]["t"]) for guided in stops)
        rows = [_against(plain, guided) for plain, guided in found]
        cells = [
            shown([row[key] for row in rows], 3) for key in ("joules", "bytes", "loss", "same")
        ]
        span = f"{ends[0]} to {ends[-1]}" if ends else ""
        told = [
            f"{method}{ARMS[arm]}",
            len(found),
            len(stops),
            span,
            f"x {cells[0]}",
            f"x {cells[1]}",
        ]
        print("| " + " | ".join(map(str, told)) + f" | {cells[2]} % | {cells[3]} % |")


def _pairs(
    lines: Lines, method: str, arm: str = ""
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for seed in seeds(lines, method, (arm, "-guided")):
        yield lines[f"{method}{arm}-s{seed}"], lines[f"{method}-guided-s{seed}"]


def _against(plain: dict[str, Any], guided: dict[str, Any]) -> dict[str, float]:
    p, g = plain["seen"][-1], guided["seen"][-1]
    then = max((s for s in plain["seen"] if s["t"] <= g["t"]), key=lambda s: s["t"])
    return {
        "joules": g["joules"] / p["joules"],
        "bytes": (g["up"] + g["down"]) / (p["up"] + p["down"]),
        "loss": 100 * (handed(g) / handed(p) - 1),
        "same": 100 * (handed(g) / handed(then) - 1),
    }


def claims(lines: Lines) -> None:
    print()
    for method in PLAN["methods"]:
        for arm, joules, loss in (("", "1", "2"), ("-averaged", "8, joules,", "8, loss,")):
            rows = [_against(plain, guided) for plain, guided in _pairs(lines, method, arm)]
            print(f"- {joules} {method}: {verdict([row['joules'] for row in rows], 1.0)}")
            print(f"- {loss} {method}: {verdict([row['loss'] for row in rows], 1.0)}")
        for name in ARMS:
            gaps = [
                handed(lines[f"{method}{name}-s{seed}"]["seen"][-1])
                - lines[f"central-s{seed}"]["seen"][0]["perplexity"]
                for seed in seeds(lines, method, (name, "-guided"))
                if f"central-s{seed}" in lines
            ]
            print(f"- 3 {method}{name}: {shown(gaps)}, {verdict(gaps, 0.0)}")
    for number, method, limit in ((4, "ffa-lora", 0.5), (5, "flora", 1.0)):
        both = [seed for seed in seeds(lines, method) if seed in seeds(lines, "fedit")]
        ends = [
            (lines[f"{method}-s{s}"]["seen"][-1], lines[f"fedit-s{s}"]["seen"][-1]) for s in both
        ]
        gap = [100 * (handed(a) / handed(b) - 1) for a, b in ends]
        size = [(a["up"] + a["down"]) / (b["up"] + b["down"]) for a, b in ends]
        print(
            f"- {number}: {shown(gap)} % ({verdict(gap, 2.0)}), bytes x {shown(size)}"
            f" ({verdict(size, limit)})"
        )


def speed() -> None:
    if not SPEED.exists():
        return
    print(
        "\n| base | clients | engine | plain loop | transformers loop | engine / plain | engine /"
        " transformers |\n|---|---|---|---|---|---|---|"
    )
    rows = [json.loads(text) for text in SPEED.read_text().splitlines()]
    for dtype, clients in dict.fromkeys((row["dtype"], row["clients"]) for row in rows):
        rates = [row["rates"] for row in rows if (row["dtype"], row["clients"]) == (dtype, clients)]
        names = [how for how in ("engine", "plain", "transformers") if how in rates[0]]
        cells = [shown([each[how] / 1e3 for each in rates], 3) for how in names]
        cells += [shown([each["engine"] / each[how] for each in rates], 3) for how in names[1:]]
        print(f"| {dtype} | {clients} | " + " | ".join(cells) + " |")
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        memory = next(row["memory"] for row in rows if row["dtype"] == dtype)
        told = {
            how: {key: round(n / 1e9, 2) for key, n in each.items()} for how, each in memory.items()
        }
        print(dtype, "GB:", told)
    goal = [
        r["rates"]["transformers"] / r["rates"]["engine"]
        for r in rows
        if "transformers" in r["rates"] and (r["dtype"], r["clients"]) == ("bfloat16", 10)
    ]
    print(f"- 7: {verdict(goal, 0.1)}")


def figure(lines: Lines, out: Path) -> None:
    """Perplexity of what would be handed back against megabytes up and down, means over seeds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flrce"
    from matplotlib import pyplot

    drawing, (left, right) = pyplot.subplots(1, 2, figsize=(8.4, 4.0), width_ratios=[1, 2.4])
    for i, method in enumerate(PLAN["methods"]):
        place = left if method == "fedkseed" else right
        for arm, style in (("", "-"), ("-averaged", ":"), ("-guided", "--")):
            all_seen = [
                lines[f"{method}{arm}-s{seed}"]["seen"] for seed in seeds(lines, method, (arm,))
            ]
            if not all_seen:
                continue
            together = list(zip(*all_seen, strict=False))  # evaluations that all seeds have
            x = [mean((each["up"] + each["down"]) / 1e6 for each in seen) for seen in together]
            y = [mean(map(handed, seen)) for seen in together]
            place.plot(x, y, f"C{i}", ls=style, lw=1.4, label=method + ARMS[arm])
    central = [
        line["seen"]
        for name, line in lines.items()
        if name.startswith("central-") and line["complete"]
    ]
    if central:
        base, best = (
            mean(s[0]["perplexity"] for s in central),
            mean(min(x["perplexity"] for x in s) for s in central),
        )
        left.axhline(base, c="0.45", ls=":", lw=1, label="untouched base")
        right.axhline(best, c="0.45", ls="-.", lw=1, label="centralised LoRA at its best")
    left.set(xlabel="MB up and down, all clients", ylabel="perplexity of the model handed back")
    right.set(xlabel="MB up and down, all clients")
    for place in (left, right):
        place.legend(fontsize=7, frameon=False)
    drawing.tight_layout()
    drawing.savefig(out, metadata={"Date": None})


def main() -> None:
    match sys.argv[1:]:
        case ["gather", folder]:
            gather(Path(folder))
        case ["figure", file]:
            figure(read(), Path(file))
        case []:
            lines = read()
            table(lines)
            runs(read(complete=False))
            lead(lines)
            rates(lines)
            claims(lines)
            speed()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
