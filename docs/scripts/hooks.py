"""A hook of mkdocs: copies what pages show from outside docs/ (../research/results/fig.svg) into the site."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
ROOT = Path(__file__).resolve().parent.parent.parent


def outside(text: str) -> set[str]:
    """Paths from the repository's root that a page of docs/ links to with ../"""
    return {path for path in OUTSIDE.findall(text) if (ROOT / path).is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    found: set[str] = set()
    for page in files.documentation_pages():
        found |= outside(page.content_string)
    for path in sorted(found):
        content = (ROOT / path).read_bytes()
        files.append(File.generated(config, f"outside/{path}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    taken = outside(markdown)
    return OUTSIDE.sub(
        lambda found: f"](outside/{found[1]}" if found[1] in taken else found[0], markdown
    )
