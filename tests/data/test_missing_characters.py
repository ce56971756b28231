"""Characters that a tokenizer has no token for: said once, with file and line, and left out."""

import json

import pytest

pytest.importorskip("tokenizers")

from flrce.data.user.text import from_text
from language_files import weights, write_folder


@pytest.fixture
def model(tmp_path):
    """A model whose vocabulary lacks byte 4 (it is spelt U+0104)."""
    folder = write_folder(tmp_path / "model", weights())
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    del content["model"]["vocab"]["\u0104"]
    path.write_text(json.dumps(content))
    return str(folder)


def test_a_control_character_is_reported_with_its_line(model, tmp_path, caplog):
    path = tmp_path / "lines.jsonl"
    texts = ["abc abc abc", "abc \x04abc abc", "\x04\x04abc abc abc"]
    rows = [json.dumps({"client": "a", "text": text}) for text in texts]
    path.write_text("\n".join(rows) + "\n")
    source = from_text(path, model, length=4)
    assert len(source.x)
    said = [record.getMessage() for record in caplog.records]
    (line,) = [text for text in said if "no token" in text]
    assert "lines.jsonl line 2, client 'a'" in line
    assert "'\\x04' (U+0004)" in line


def test_a_folder_of_texts_names_the_file(model, tmp_path, caplog):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("abc abc\nabc abc abc\x04 abc abc")
    from_text(folder, model, length=4)
    (line,) = [r.getMessage() for r in caplog.records if "U+0004" in r.getMessage()]
    assert "a.txt line 2, client 'a'" in line


def test_a_prompt_is_looked_through_too(model, tmp_path, caplog):
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"prompt": "abc\x04", "response": "abc abc"}) + "\n")
    from_text(path, model, length=8)
    (line,) = [r.getMessage() for r in caplog.records if "U+0004" in r.getMessage()]
    assert "turns.jsonl line 1: " in line
