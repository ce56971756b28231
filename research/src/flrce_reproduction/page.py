"""Puts generated tables into a page written by hand, between a pair of marks."""

import re
from collections.abc import Mapping
from pathlib import Path

from flrce.errors import BadInput
from flrce.storage.disk import BY_UMASK, write_atomically
from flrce_reproduction.tables import NOT_RUN_TEXT

BLOCK_PATTERN = re.compile(
    r"<!-- reproduce: (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL
)


def fill_page(path: Path, blocks: Mapping[str, str]) -> list[str]:
    """Replace what stands between `<!-- reproduce: NAME -->` and `<!-- end -->`; returns the names
    filled.

    A mark of which there is no table keeps what it has; an empty one says that it is not yet run.
    """
    try:
        text = path.read_text()
    except OSError as why:
        raise BadInput(
            f"--page {path} cannot be read: {why.strerror}; name a Markdown file with marks"
        ) from why
    filled: list[str] = []

    def replace_block(found: re.Match[str]) -> str:
        name = found["name"]
        if name in blocks:
            filled.append(name)
        content = blocks.get(name) or (
            found["body"] if found["body"].strip() else f"{NOT_RUN_TEXT}\n"
        )
        return f"<!-- reproduce: {name} -->\n{content}<!-- end -->"

    changed = BLOCK_PATTERN.sub(replace_block, text)
    if not BLOCK_PATTERN.search(text):
        raise BadInput(
            f"--page {path} has no mark such as <!-- reproduce: table3-dirichlet --> with <!--"
            " end -->"
        )
    write_atomically(path, changed.encode(), BY_UMASK)
    return filled
