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
    rows += ["", "| M | d | update / product | ns per M d |", "|---|---|---|---|"]
    for p in found["growth"]:
        rows.append(f"| {p['M']:,} | {p['d']:,} | {p['update / product']:.2f} | {p['ns per M d']:.2f} |")
    return "\n".join(rows)


def embed(page: str, name: str, text: str) -> str:
    """The page with `text` between `<!-- name -->` and `<!-- /name -->`."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"docs/performance.md has no <!-- {name} --> and <!-- /{name} -->; put them back")
    return pattern.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


def main() -> None:
    place = DOCS / "performance.md"
    page = place.read_text()
    texts = {"peers": body("peers"), "growth": body("growth"), "relations": relations(), "h200": body("h200")}
    for name, text in texts.items():
        page = embed(page, name, text)
    place.write_text(page)
    for picture in ("peers.svg", "growth.svg"):
        shutil.copyfile(RESULTS / picture, DOCS / "img" / picture)


if __name__ == "__main__":
    main()
