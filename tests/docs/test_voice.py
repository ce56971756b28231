"""The manual is easy to read: short sentences, and the words of the field."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reading import DOCS, FENCE, ROOT, name_page

MAX_WORDS = 40
MANUAL = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
#: words that only this project used, and what to write instead
DIALECT = {
    "handed back": "the final model",
    "passed over": "ignored",
    "without a word": "silently",
    "of one's own": "of your own",
    "in one line": "raises an error",
    "is told of": "is reported",
    "judged": "evaluated",
}


def list_sentences(text: str) -> Iterator[str]:
    """Sentences of running text: no code, no tables, no targets of links."""
    text = re.sub(FENCE, "\n\n", text)
    text = re.sub(r"^(\||    ).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s+|^#+ ", text, flags=re.MULTILINE):
        yield from re.split(r"(?<!al)(?<!vs)[.!?:;]\s+", " ".join(block.split()))


def test_sentences_are_found():
    text = "# A head\n\nOne two. Three [four](x.md):\n- five; six\n\n```sh\nseven\n```\n\n| a |\n"
    assert list(filter(None, list_sentences(text))) == [
        "A head",
        "One two",
        "Three four:",
        "five",
        "six",
    ]


@pytest.mark.parametrize("page", MANUAL, ids=name_page)
def test_no_sentence_is_longer_than_forty_words(page: Path) -> None:
    text = page.read_text()
    assert not [s for s in list_sentences(text) if len(s.split()) > MAX_WORDS]


@pytest.mark.parametrize("page", MANUAL, ids=name_page)
def test_the_manual_uses_the_words_of_the_field(page: Path) -> None:
    sentences = " \n".join(list_sentences(page.read_text())).lower()
    assert {word: DIALECT[word] for word in DIALECT if word in sentences} == {}
