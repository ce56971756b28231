"""Set what the benchmarks measured into the pages of research/docs, between their markers: python
benchmarks/page.py
"""

import json
import re
import shutil
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
PAGES = RESULTS.parents[1] / "research" / "docs"


def body(name: str) -> str:
    """A result file without its title."""
    return (RESULTS / f"{name}.md").read_text().split("\n", 1)[1].strip()


def relations() -> str:
    found = json.loads((RESULTS / "relations.json").read_text())
    rows = [f"{found['hardware']}.", "", "| ratio | median | quartiles |", "|---|---|---|"]
    for name, value in found.items():
        if isinstance(value, dict):
            rows.append(
                f"| {name} | {value['median']:.2f} | {value['low']:.2f}-{value['high']:.2f} |"
            )
    rows += [
        "",
        "| M | d | update / torch's product | update / by slices | ns per M d |",
        "|---|---|---|---|---|",
    ]
    for p in found["growth"]:
        ratios = (
            f"{p[name]:.2f}" for name in ("update / product", "update / by slices", "ns per M d")
        )
        rows.append(f"| {p['M']:,} | {p['d']:,} | {' | '.join(ratios)} |")
    return "\n".join(rows)


def million() -> str:
    """The last part of its page: whole rounds of a million clients."""
    title, _, rest = body("million").rpartition("\n## ")[2].partition("\n")
    return f"{title}.\n{rest}"


def others() -> str:
    """Networks of other kinds; floors say nothing of a GPU that others share."""
    found = json.loads((RESULTS / "others.json").read_text())
    rows = [
        (
            "| network | floats | batch | plain us | us | times plain | way | error | plain"
            " float32's |"
        ),
        "|---" * 9 + "|",
    ]
    for r in found["rows"]:
        low, high = r["us_range"]
        error = [f"{r['error'][name]:.0e}" for name in ("way", "plain")]
        cells = [
            r["network"],
            f"{r['floats']:,}",
            r["batch"],
            f"{r['plain_us']:.0f}",
            f"{r['us']:.0f} ({low:.0f}-{high:.0f})",
            f"**{r['times']:.1f}**",
            r["way"],
            *error,
        ]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([f"{found['device']}, torch {found['torch']}.", "", *rows])


def embed(pages: dict[Path, str], name: str, text: str) -> None:
    """Put `text` between `<!-- name -->` and `<!-- /name -->` of the page that has them."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    for path, page in pages.items():
        if pattern.search(page):
            pages[path] = pattern.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)
            return
    raise SystemExit(f"{PAGES} has no <!-- {name} --> and <!-- /{name} -->; put them back")


def main() -> None:
    pages = {path: path.read_text() for path in sorted(PAGES.glob("*.md"))}
    texts = {
        name: body(name) for name in ("peers", "native", "growth", "h200", "networks", "precision")
    }
    texts |= {"relations": relations(), "million": million(), "others": others()}
    if (RESULTS / "peers-networks.md").exists():
        texts["peers-networks"] = body("peers-networks")
    for name, text in texts.items():
        embed(pages, name, text)
    for path, page in pages.items():
        path.write_text(page)
    for picture in ("peers.svg", "growth.svg"):
        shutil.copyfile(RESULTS / picture, PAGES / "img" / picture)


if __name__ == "__main__":
    main()
