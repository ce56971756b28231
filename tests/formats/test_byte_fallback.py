"""Tokenizers that write a space as ▁ and characters without a token by their bytes: Llama 2's, in
three forms.
"""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flrce.errors import BadInput
from flrce.formats.language import open_language_model
from flrce.formats.tokenizers import (
    load_gguf_tokenizer,
    load_json_tokenizer,
    load_sentencepiece_tokenizer,
)
from language_files import weights, write_folder

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
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
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
    """Also where a token spans two words."""
    tokens = written(tmp_path_factory.mktemp("t"), merges)
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tokenizer.model as SentencePiece itself trains and writes it."""
    library = pytest.importorskip("sentencepiece", reason="needs flrce[llm]")
    folder = tmp_path_factory.mktemp("spm")
    (folder / "text.txt").write_text("the then an ant than that heat\n" * 50)
    library.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<turn>"],
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def test_a_file_of_sentencepiece(trained):
    tokens = load_sentencepiece_tokenizer(trained)
    ids = tokens.encode("the  heat é <turn>")
    assert tokens.tokens[ids[0]] == "▁the"
    assert [tokens.tokens[i] for i in tokens.encode("é")[-2:]] == ["<0xC3>", "<0xA9>"]
    assert tokens.decode(ids) == "the  heat é <turn>"
    assert tokens.specials == {"<unk>": 0, "<s>": 1, "</s>": 2, "<turn>": 3}
    assert not {0, 1, 2, 3} & {*ids, *tokens.encode("<s> </s>")}  # text that looks like marks
    assert tokens.end == 2


@pytest.mark.parametrize("spoil", [lambda raw: raw[:-1], lambda _: b"", lambda _: b"\xff" * 40])
def test_a_damaged_file_is_one_line(trained, tmp_path, spoil):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(spoil(trained.read_bytes()))
    with pytest.raises(BadInput, match=r"no usable SentencePiece model: [^\n]*$"):
        load_sentencepiece_tokenizer(path)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "Magic"}},
        {"model": None},
        {"pre_tokenizer": {"type": "Magic"}},
        {"added_tokens": [{"id": -1, "content": "<s>"}]},
        {"added_tokens": [{"id": 1 << 40, "content": "<s>"}]},
        {"added_tokens": [3]},
    ],
)
def test_a_json_file_that_is_no_tokenizer_is_one_line(tmp_path, change):
    with pytest.raises(BadInput, match=r"no usable tokenizer: [^\n]*$"):
        written(tmp_path, **change)


def test_a_pattern_of_exponential_time_ends_in_one_line(tmp_path):
    words = {"type": "Split", "pattern": {"Regex": "(t+)+$"}, "behavior": "Isolated"}
    with pytest.raises(BadInput, match=r"patterns take more than 2 s .*; use another model$"):
        written(tmp_path, pre_tokenizer={**words, "invert": False})


def test_numbers_that_do_not_fit_are_one_line():
    with pytest.raises(BadInput, match="has no complete tokenizer: 273 tokens, 3 scores"):
        load_gguf_tokenizer("a.gguf", values(scores=[0.0] * 3))


def test_a_folder_without_tokenizer_json_has_the_other_file(tmp_path, trained):
    folder = write_folder(tmp_path / "m", weights())
    assert open_language_model(folder).tokenizer().end == 0
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(trained.read_bytes())
    assert open_language_model(folder).tokenizer().end == 2
