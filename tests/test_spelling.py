"""Tokenizers that write a space as ▁ and characters without a token by their bytes: Llama 2's, in
three forms.
"""

import itertools
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flrce.errors import BadInput
from flrce.formats.language import open_language_model
from flrce.formats.sentencepiece import load_sentencepiece_tokenizer
from flrce.formats.tokenizers import load_gguf_tokenizer, load_json_tokenizer
from language import weights, write_folder

MERGES = ("▁ t", "h e", "▁t he", "▁ ▁", "▁▁ ▁▁", "a n", "▁ an", "e ▁")  # the last spans two words
MARKS = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{b:02X}>" for b in range(256))
ALPHABET = tuple("▁thean\n")
TEXTS = st.text(alphabet="the an▁\n é日<0x41>", max_size=30)


def vocabulary(merges):
    return [*MARKS, *BYTES, *ALPHABET, *(merge.replace(" ", "") for merge in merges)]


def written(folder, merges=MERGES[:-1], **more):
    """A tokenizer.json as the folders of Llama 2 have it."""
    mark = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    told = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "post_processor": None,
        "decoder": None,
        "added_tokens": [{"id": i, "content": text, **mark} for i, text in enumerate(MARKS)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": "<unk>",
            "vocab": {token: i for i, token in enumerate(vocabulary(merges))},
            "merges": list(merges),
        },
        **more,
    }
    (folder / "tokenizer.json").write_text(json.dumps(told))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return load_json_tokenizer(folder)


def by_definition(text, merges, first="always"):
    """Plain loops over the whole text: the earliest merge, the leftmost pair, until there is
    none.
    """
    spelt = text.replace(" ", "▁")
    if spelt and (first == "always" or (first == "missing" and not spelt.startswith("▁"))):
        spelt = "▁" + spelt
    parts, known = list(spelt), vocabulary(merges)
    for_pair = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    while True:
        ranks = [
            (for_pair[pair], i)
            for i, pair in enumerate(itertools.pairwise(parts))
            if pair in for_pair
        ]
        if not ranks:
            break
        _, i = min(ranks)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    found = []
    for part in parts:
        found += [part] if part in known else [f"<0x{b:02X}>" for b in part.encode()]
    return [known.index(part) for part in found]


def test_by_hand(tmp_path):
    tokens = written(tmp_path)
    assert [tokens.tokens[i] for i in tokens.encode("the an")] == ["▁the", "▁an"]
    assert [tokens.tokens[i] for i in tokens.encode(" aé")] == ["▁▁", "a", "<0xC3>", "<0xA9>"]
    assert tokens.encode("") == []
    assert tokens.decode(tokens.encode("  the é")) == "  the é"
    assert tokens.end == 2
    assert tokens.encode("</s>") != [2]  # what is written like a mark is text


@given(TEXTS)
@pytest.mark.parametrize("merges", [MERGES[:-1], MERGES], ids=["words", "a token across words"])
def test_merges_against_their_definition(tmp_path_factory, merges, text):
    """A text is cut into words only where no token spans two; the result is that of the whole
    text.
    """
    tokens = written(tmp_path_factory.mktemp("t"), merges)
    assert bool(tokens.patterns) == (merges != MERGES)
    assert tokens.encode(text) == by_definition(text, merges)
    assert tokens.decode(tokens.encode(text)) == text.replace("▁", " ")


@given(TEXTS)
def test_metaspace_adds_a_space_only_where_none_is(tmp_path_factory, text):
    cutter = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    tokens = written(tmp_path_factory.mktemp("t"), normalizer=None, pre_tokenizer=cutter)
    assert tokens.encode(text) == by_definition(text, MERGES[:-1], "missing")


def values(**more):
    """The same as a GGUF file tells it: scores, the earlier merge the higher."""
    tokens = vocabulary(MERGES[:-1])
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * (259 + len(ALPHABET)) + [-float(i) for i in range(len(MERGES) - 1)]
    keys = {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "eos_token_id": 2,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@given(TEXTS)
def test_scores_give_what_merges_give(tmp_path_factory, text):
    assert load_gguf_tokenizer(None, values()).encode(text) == by_definition(text, MERGES[:-1])
    bare = load_gguf_tokenizer(None, values(add_space_prefix=False))
    assert bare.encode(text) == by_definition(text, MERGES[:-1], "never")


def message(field, data):
    size = []
    n = len(data)
    while n > 127:
        size.append(n & 127 | 128)
        n >>= 7
    return bytes([field << 3 | 2, *size, n]) + data


def model(kind=2, squeezed=0):
    """A tokenizer.model by protobuf's definition: pieces, the trainer's kind and end, the
    normalizer's two flags.
    """
    told = values()
    rows = zip(
        *(told[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")), strict=True
    )
    pieces = (
        message(1, t.encode()) + b"\x15" + struct.pack("<f", s) + bytes([24, k]) for t, s, k in rows
    )
    trainer, normalizer = (
        bytes([3 << 3, kind, (42 << 3 & 127) | 128, 42 >> 4, 2]),
        bytes([3 << 3, 1, 4 << 3, squeezed]),
    )
    return (
        b"".join(message(1, piece) for piece in pieces)
        + message(2, trainer)
        + message(3, normalizer)
    )


def test_a_file_of_sentencepiece(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model())
    tokens, same = load_sentencepiece_tokenizer(path), load_gguf_tokenizer(None, values())
    assert (tokens.tokens, tokens.scores, tokens.specials) == (
        same.tokens,
        same.scores,
        same.specials,
    )
    assert (tokens.end, tokens.encode("the é an")) == (2, same.encode("the é an"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (model(kind=1), "no BPE"),
        (model(squeezed=1), "normalises"),
        (model()[:-1], "cut short"),
        (b"", "no BPE"),
        (b"\xff" * 40, "more than ten bytes"),
    ],
    ids=["unigram", "spaces", "short", "empty", "noise"],
)
def test_a_file_that_is_not_read_is_one_line(tmp_path, data, says):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(BadInput, match=says):
        load_sentencepiece_tokenizer(path)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"normalizer": {"type": "NFKC"}}, "it normalises texts by NFKC"),
        (
            {"pre_tokenizer": {"type": "Whitespace"}},
            "pre_tokenizer 'Whitespace' beside a normalizer",
        ),
        (
            {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "_"}},
            "spaces are written '_'",
        ),
    ],
)
def test_spellings_that_are_not_read_are_one_line(tmp_path, more, says):
    with pytest.raises(BadInput, match=says):
        written(tmp_path, **more)


def test_numbers_that_do_not_fit_are_one_line():
    with pytest.raises(
        BadInput, match="has no complete tokenizer: 273 tokens, 273 kinds, 3 scores"
    ):
        load_gguf_tokenizer("a.gguf", values(scores=[0.0] * 3))


def test_against_tokenizers(tmp_path):
    peer = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokens = written(tmp_path)
    other = peer.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("", " ", "the an", "  thean\n\nan ", "日本 é the", "▁", "<0x41>", "a b c"):
        assert tokens.encode(text) == other.encode(text, add_special_tokens=False).ids


def test_a_folder_without_tokenizer_json_has_the_other_file(tmp_path):
    folder = write_folder(tmp_path / "m", weights())
    assert open_language_model(folder).tokenizer().end == 0
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(model())
    assert open_language_model(folder).tokenizer().encode("the an") == by_definition(
        "the an", MERGES[:-1]
    )
