"""Set what the benchmarks measured into docs/performance.md, between its markers: python benchmarks/page.py"""

import json
import re
import shutil
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
DOCS = RESULTS.parents[1] / "docs"


def body(name: str) -> str:
    """A result file without its title."""
    return (RESULTS / f"{name}.md").read_text().split("\n", 1)[1].strip()


def relations() -> str:
    found = json.loads((RESULTS / "relations.json").read_text())
    rows = [f"{found['hardware']}.", "", "| ratio | median | quartiles |", "|---|---|---|"]
    for name, value in found.items():
        if isinstance(value, dict):
            rows.append(f"| {name} | {value['median']:.2f} | {value['low']:.2f}-{value['high']:.2f} |")
    rows += ["", "| M | d | update / torch's product | update / by slices | ns per M d |", "|---|---|---|---|---|"]
    for p in found["growth"]:
        ratios = (f"{p[name]:.2f}" for name in ("update / product", "update / by slices", "ns per M d"))
        rows.append(f"| {p['M']:,} | {p['d']:,} | {' | '.join(ratios)} |")
    return "\n".join(rows)


def million() -> str:
    """The last part of its page: whole rounds of a million clients."""
    title, _, rest = body("million").rpartition("\n## ")[2].partition("\n")
    return f"{title}.\n{rest}"


def ways() -> str:
    """What each way took on an H200 at 10 lanes, beside the plain loop and the floor of the float32 units."""
    found = json.loads((RESULTS / "ways-h200.json").read_text())
    floors = {(row["network"], "float32"): row["mflop"] / 50.3 for row in json.loads(_networks())["rows"]}
    names = ["folded:columns", "folded:rows", "folded:rows:2", "folded:direct", "folded:direct:2", "folded:each"]
    head = [
        "network",
        "precision",
        "plain us",
        *(name.removeprefix("folded:") for name in names),
        "times plain",
        "floor us",
    ]
    rows = [f"{found['about']}.", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for net, precision in dict.fromkeys((row["net"], row["precision"]) for row in found["ways"]):
        us = {row["way"]: row["us"] for row in found["ways"] if (row["net"], row["precision"]) == (net, precision)}
        best = min(us[name] for name in names if name in us)
        cells = [f"{us[name]:.0f}" if name in us else "" for name in names]
        plain, floor = us["plain loop"], floors.get((net, precision))
        cells += [f"**{plain / best:.1f}**", "" if floor is None else f"{floor:.0f}"]
        rows.append(f"| {net} | {precision} | {plain:.0f} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _networks() -> str:
    return (RESULTS / "networks.json").read_text()


def embed(page: str, name: str, text: str) -> str:
    """The page with `text` between `<!-- name -->` and `<!-- /name -->`."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"docs/performance.md has no <!-- {name} --> and <!-- /{name} -->; put them back")
    return pattern.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


def main() -> None:
    place = DOCS / "performance.md"
    page = place.read_text()
    texts = {name: body(name) for name in ("peers", "native", "growth", "h200", "networks")}
    texts |= {"relations": relations(), "million": million(), "ways": ways()}
    if (RESULTS / "peers-networks.md").exists():
        texts["peers-networks"] = body("peers-networks")
    for name, text in texts.items():
        page = embed(page, name, text)
    place.write_text(page)
    for picture in ("peers.svg", "growth.svg"):
        shutil.copyfile(RESULTS / picture, DOCS / "img" / picture)


if __name__ == "__main__":
    main()
