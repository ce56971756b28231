"""A griffe extension: examples in docstrings (>>>) become code blocks in the reference."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(
    r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", re.MULTILINE
)  # up to the next empty line


def fenced(text: str) -> str:
    """The text with each run of example lines as a block of its own.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text).rstrip()


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
