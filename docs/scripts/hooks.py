"""A hook of mkdocs: takes the pages of research/docs into the site under research/, copies what pages
show from elsewhere in the repository (../research/results/fig.svg), and fills in the tables of
generated.py.
"""

import os
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.append(str(Path(__file__).parent))
from generated import fill_marks

LINK = re.compile(r"\]\((?!https?://)([^)#\s]+)")
ROOT = Path(__file__).resolve().parent.parent.parent
#: folder of the repository -> folder of the site; what lies elsewhere goes to OUTSIDE
SITE_FOLDERS = {"research/docs": "research", "docs": "."}
OUTSIDE = "outside"


def resolve_link(link: str, page: str) -> str:
    """The path, from the repository's root, that a page of the site links to."""
    if page.startswith(f"{OUTSIDE}/"):
        folder = os.path.dirname(page.removeprefix(f"{OUTSIDE}/"))
    else:
        folder = "research/docs" if page.startswith("research/") else "docs"
    return os.path.normpath(os.path.join(folder, link))


def place_in_site(path: str) -> str:
    """Where a file of the repository lies in the site."""
    for folder, place in SITE_FOLDERS.items():
        if path.startswith(f"{folder}/"):
            return os.path.normpath(f"{place}/{path.removeprefix(f'{folder}/')}")
    return f"{OUTSIDE}/{path}"


def find_outside(text: str, page: str) -> set[str]:
    """Files of the repository, outside of the site's folders, that a page links to."""
    paths = {resolve_link(link, page) for link in LINK.findall(text)}
    return {
        path
        for path in paths
        if (ROOT / path).is_file() and place_in_site(path).startswith(f"{OUTSIDE}/")
    }


def collect_outside(pages: dict[str, str]) -> set[str]:
    """Files outside of the site's folders that the pages link to, and that such files link to."""
    outside: set[str] = set()
    while pages:
        linked = {path for name, text in pages.items() for path in find_outside(text, name)}
        new = linked - outside
        outside |= new
        pages = {
            f"{OUTSIDE}/{path}": (ROOT / path).read_text() for path in new if path.endswith(".md")
        }
    return outside


def rewrite_links(text: str, page: str) -> str:
    """A page's text with links to files as the site has them; others stay as they are."""

    def rewrite(found: re.Match[str]) -> str:
        path = resolve_link(found[1], page)
        if not (ROOT / path).is_file():
            return found[0]
        return f"]({os.path.relpath(place_in_site(path), os.path.dirname(page) or '.')}"

    return LINK.sub(rewrite, text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    research = ROOT / "research" / "docs"
    for path in sorted(research.rglob("*")):
        if path.is_file():
            name = f"research/{path.relative_to(research).as_posix()}"
            content = path.read_text() if path.suffix == ".md" else path.read_bytes()
            files.append(File.generated(config, name, content=content))
    pages = {page.src_uri: page.content_string for page in files.documentation_pages()}
    for name in sorted(collect_outside(pages)):
        content = (ROOT / name).read_bytes()
        files.append(File.generated(config, f"{OUTSIDE}/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return rewrite_links(fill_marks(markdown), page.file.src_uri)
