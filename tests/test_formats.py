"""Language models read from disk: weights, forward pass and tokens, each worked from its
definition.
"""

import json
import math
import signal
import struct
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from flrce.errors import BadInput
from flrce.formats import patterns
from flrce.formats.bpe import GPT2_PATTERN, TOKENIZER_PATTERNS, Tokenizer, merge_pairs, split_words
from flrce.formats.gguf import GgufFile
from flrce.formats.language import open_language_model
from flrce.formats.quants import QUANT_FORMATS, dequantise_weights
from flrce.models.llama import load_llama
from flrce.models.seeds import SeedSpaceNetwork
from language import (
    EPS,
    MARKS,
    SIZES,
    THETA,
    alphabet,
    relative,
    tokens,
    weights,
    write_folder,
    write_gguf,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, w = tmp_path_factory.mktemp("language"), weights()
    return write_folder(folder / "hf", w), write_gguf(folder / "tiny.gguf", w), w


def by_the_book(w, ids, slowed=(1.0,) * 8, sharper=1.0, window=100):
    """A Llama in loops over positions and heads, in float64; rotary frequencies are divided by
    `slowed`.

    Layers have biases where `w` does; a position sees the last `window` ones.
    """
    w = {name: tensor.double().numpy() for name, tensor in w.items()}
    heads, kv = SIZES["heads"], SIZES["kv_heads"]
    head, n = len(w["model.layers.0.self_attn.q_proj.weight"]) // heads, len(ids)

    def norm(x, g):
        return x / math.sqrt((x * x).mean() + EPS) * g

    def turn(v, p):
        half = head // 2
        out = np.empty(head)
        for i in range(half):
            a = p * THETA ** (-2 * i / head) / slowed[i]
            out[i] = v[i] * math.cos(a) - v[i + half] * math.sin(a)
            out[i + half] = v[i + half] * math.cos(a) + v[i] * math.sin(a)
        return out * sharper

    x = [w["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(SIZES["layers"]):
        b = {
            k.removeprefix(f"model.layers.{layer}."): v
            for k, v in w.items()
            if f"layers.{layer}." in k
        }
        seen = [norm(v, b["input_layernorm.weight"]) for v in x]

        def linear(name, v, b=b):
            return b[f"{name}_proj.weight"] @ v + b.get(f"{name}_proj.bias", 0)

        q, k, v = ([linear(f"self_attn.{p}", s) for s in seen] for p in "qkv")
        for p in range(n):
            out = np.zeros(heads * head)
            near = range(max(0, p + 1 - window), p + 1)
            for h in range(heads):
                g = h // (heads // kv)
                mine = turn(q[p][h * head : (h + 1) * head], p)
                scores = [
                    mine @ turn(k[j][g * head : (g + 1) * head], j) / math.sqrt(head) for j in near
                ]
                e = np.exp(np.array(scores) - max(scores))
                out[h * head : (h + 1) * head] = sum(
                    a / e.sum() * v[j][g * head : (g + 1) * head]
                    for j, a in zip(near, e, strict=True)
                )
            x[p] = x[p] + linear("self_attn.o", out)
        for p in range(n):
            s = norm(x[p], b["post_attention_layernorm.weight"])
            gate = linear("mlp.gate", s)
            x[p] = x[p] + linear("mlp.down", gate / (1 + np.exp(-gate)) * linear("mlp.up", s))
    return np.stack([w["model.embed_tokens.weight"] @ norm(v, w["model.norm.weight"]) for v in x])


def test_the_forward_pass_is_the_definition(files):
    folder, _, w = files
    ids = [5, 80, 3, 260, 17, 80]
    expected = by_the_book(w, ids)
    net = load_llama(folder)
    got = net(torch.tensor([ids, ids[::-1]]))
    assert got.shape == (2, 6, SIZES["vocabulary"])
    np.testing.assert_allclose(got[0].detach().double().numpy(), expected, atol=2e-4)
    last = load_llama(folder, every=False)(torch.tensor([ids]))
    torch.testing.assert_close(last[0], got[0, -1])


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_stretched_positions_are_read_in_both_forms(tmp_path, files):
    """Heads of 16 numbers, so frequencies 1, 10^-.5, .1, ...: in 64 positions 10.2, 3.22 and 1.02
    turns, then fewer.

    Pairs of 4 turns or more stay, those of 1 or fewer are 8 times slower, and 3.22 lies .740 of the
    way between.
    """
    expected = [1.0, 1 / (0.74036 + 0.25964 / 8), 1 / (0.00620 + 0.99380 / 8), *[8.0] * 5]
    ids = [5, 80, 3, 260, 17, 80]
    for rope, slowed in ((LLAMA3, expected), ({"type": "linear", "factor": 2.5}, [2.5] * 8)):
        folder = write_folder(tmp_path / str(len(rope)), files[2])
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": rope}))
        np.testing.assert_allclose(open_language_model(folder).sizes.slowed, slowed, rtol=1e-3)
        got = load_llama(folder)(torch.tensor([ids]))[0].double().numpy()
        np.testing.assert_allclose(
            got, by_the_book(files[2], ids, open_language_model(folder).sizes.slowed), atol=2e-4
        )
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    assert (
        open_language_model(write_gguf(tmp_path / "a.gguf", files[2], **linear)).sizes.slowed
        == (2.5,) * 8
    )
    listed = write_gguf(
        tmp_path / "b.gguf", {**files[2], "rope_freqs.weight": torch.tensor(expected)}
    )
    np.testing.assert_allclose(open_language_model(listed).sizes.slowed, expected, rtol=1e-6)


def test_yarn_in_both_forms(tmp_path, files):
    """Heads of 16, theta 10^4, at first 64 positions: pair i turns 10.19 / 10^(i / 2) times.

    32 turns would be at i = 8 ln(0.318) / ln(10^4) = -0.99, so from 0 on; 1 at 8 ln(10.19) /
    ln(10^4) = 2.02, so up to 3: the stretched share is i / 3, and 1 / (share / 4 + 1 - share) = 1,
    4 / 3, 2, 4. Cosines grow by 0.1 ln(4) + 1.
    """
    expected, ids = [1, 4 / 3, 2, *[4.0] * 5], [5, 80, 3, 260, 17, 80]
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = write_folder(tmp_path / "hf", files[2])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": rope}))
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    file = write_gguf(
        tmp_path / "y.gguf", files[2], **{f"llama.rope.scaling.{k}": v for k, v in keys.items()}
    )
    for path in (folder, file):
        sizes = open_language_model(path).sizes
        np.testing.assert_allclose(sizes.slowed, expected, rtol=1e-12)
        assert sizes.sharper == pytest.approx(1.1386294)
    got = load_llama(folder)(torch.tensor([ids]))[0].double().numpy()
    np.testing.assert_allclose(got, by_the_book(files[2], ids, expected, 1.1386294), atol=2e-4)


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
RELATIVES = {
    "qwen2": (QKV, 16, {"model_type": "qwen2", "sliding_window": 2, "use_sliding_window": False}),
    "mistral": ((), 16, {"model_type": "mistral", "sliding_window": 3}),
    "biases": ((*QKV, "self_attn.o_proj", *MLP), 16, {"attention_bias": True, "mlp_bias": True}),
    "heads": ((), 24, {"head_dim": 24}),
}


@pytest.mark.parametrize("name", RELATIVES)
def test_relatives_of_llama_are_the_definition(tmp_path, name):
    biased, head, config = RELATIVES[name]
    w, ids = relative(tmp_path / "hf", weights(), biased, head, **config), [5, 80, 3, 260, 17, 80]
    window = 3 if name == "mistral" else 100
    got = load_llama(tmp_path / "hf")(torch.tensor([ids]))[0].double().numpy()
    np.testing.assert_allclose(got, by_the_book(w, ids, (1.0,) * 12, window=window), atol=3e-4)


def test_both_forms_hold_the_same_model(files):
    folder, file, _ = files
    ids = torch.randint(0, SIZES["vocabulary"], (2, 9), generator=torch.Generator().manual_seed(1))
    a, b = load_llama(folder), load_llama(file)
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        step = {"self_attn": 1 / 127, "mlp": 1 / 15}.get(
            name.split(".")[2] if name.startswith("layers") else "", 0
        )
        assert (p - q).abs().max() <= 1.01 * step * p.abs().max() + 1e-3 * bool(step), name
    assert torch.corrcoef(torch.stack([a(ids).flatten(), b(ids).flatten()]))[0, 1] > 0.98
    assert a.provision == (folder / "model.safetensors").stat().st_size
    assert b.provision == file.stat().st_size


def test_copies_share_the_base_and_bfloat16_is_near(files):
    import copy

    net = load_llama(files[0])
    other = copy.deepcopy(net)
    assert other.tokens is not net.tokens
    assert all(
        p.data_ptr() == q.data_ptr()
        for p, q in zip(net.parameters(), other.parameters(), strict=True)
    )
    assert load_llama(files[0]).tokens.data_ptr() == net.tokens.data_ptr()
    half = load_llama(files[0], "bfloat16")
    ids = torch.arange(3, 12)[None]
    assert half.tokens.dtype == torch.bfloat16
    assert half(ids).dtype == torch.float32
    assert (half(ids) - net(ids)).abs().max() < 0.1 * net(ids).abs().max()


@pytest.mark.parametrize(
    ("kind", "block", "values"),
    [
        # scale 2, levels 0..15 low then high, minus 8
        (
            2,
            struct.pack("<e", 2.0) + bytes([0x10 * 15 + 1] * 16),
            [2 * (1 - 8)] * 16 + [2 * (15 - 8)] * 16,
        ),
        (
            3,
            struct.pack("<ee", 0.5, -1.0) + bytes([0x42] * 16),
            [0.5 * 2 - 1] * 16 + [0.5 * 4 - 1] * 16,
        ),
        # fifth bits: weight 0 alone has its set, so 16 + 3 - 16
        (6, struct.pack("<eI", 1.0, 1) + bytes([0x03] * 16), [3.0] + [3 - 16] * 15 + [-16.0] * 16),
        (
            7,
            struct.pack("<eeI", 1.0, 10.0, 1 << 31) + bytes([0x21] * 16),
            [11.0] * 16 + [12.0] * 15 + [28.0],
        ),
        (8, struct.pack("<e", 0.25) + bytes([4] * 31 + [256 - 8]), [1.0] * 31 + [-2.0]),
        (0, struct.pack("<f", 1.5), [1.5]),
        (1, struct.pack("<e", -2.5), [-2.5]),
        (30, struct.pack("<f", -3.0)[2:], [-3.0]),
    ],
)
def test_blocks_by_hand(kind, block, values):
    found = dequantise_weights(QUANT_FORMATS[kind], np.frombuffer(block, np.uint8))
    assert found.tolist() == values


@pytest.mark.parametrize("kind", [12, 13, 14])
def test_super_blocks_weight_by_weight(kind):
    """As llama.cpp's reference unpacks them, one weight after another."""
    rng = np.random.default_rng(kind)
    quant = QUANT_FORMATS[kind]
    raw = rng.integers(0, 256, (3, quant.size), dtype=np.uint8)
    ends = [slice(208, 210)] if kind == 14 else [slice(0, 2), slice(2, 4)]
    for where in ends:
        raw[:, where] = np.array([[0.5], [0.25], [-1.0]], np.float16).view(np.uint8)
    found = dequantise_weights(quant, raw).reshape(3, 256)
    for block, values in zip(raw.tolist(), found, strict=True):
        np.testing.assert_allclose(
            values, (six if kind == 14 else four_or_five)(block, kind), rtol=1e-6
        )


def half(block, at):
    return float(np.array(block[at : at + 2], np.uint8).view(np.float16)[0])


def four_or_five(b, kind):
    out, q = [], b[4:16]
    for part in range(8):
        chunk, up = divmod(part, 2)
        if part < 4:
            scale, least = q[part] & 63, q[part + 4] & 63
        else:
            scale, least = (
                (q[part + 4] & 15) | (q[part - 4] >> 6) << 4,
                (q[part + 4] >> 4) | (q[part] >> 6) << 4,
            )
        for i in range(32):
            level = b[(48 if kind == 13 else 16) + 32 * chunk + i] >> 4 * up & 15
            level += 16 * (b[16 + i] >> part & 1) if kind == 13 else 0
            out.append(half(b, 0) * scale * level - half(b, 2) * least)
    return out


def six(b, kind):
    out = []
    for i in range(256):
        side, at = divmod(i, 128)
        quarter, l = divmod(at, 32)
        low = b[64 * side + 32 * (quarter % 2) + l] >> 4 * (quarter // 2) & 15
        high = b[128 + 32 * side + l] >> 2 * quarter & 3
        scale = int(np.int8(np.uint8(b[192 + 8 * side + 2 * quarter + l // 16])))
        out.append(half(b, 208) * scale * ((low | high << 4) - 32))
    return out


def test_words_and_merges_by_hand(files):
    folder, file, _ = files
    for path in (folder, file):
        tokenizer = open_language_model(path).tokenizer()
        assert tokenizer.patterns == TOKENIZER_PATTERNS["smollm"]
        ids = tokenizer.encode("on the 12 an")
        assert [tokenizer.tokens[i] for i in ids] == ["on", "Ġthe", "Ġ", "1", "2", "Ġa", "n"]
        assert tokenizer.specials == {mark: i for i, mark in enumerate(MARKS)}
        assert tokenizer.encode(MARKS[0])[0] != 0  # text that looks like a mark is text
        assert tokenizer.decode([0, *ids, 2]) == "on the 12 an"
    assert split_words("I'll  go\n now", (GPT2_PATTERN,)) == ["I", "'ll", " ", " go", "\n", " now"]


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_merging_is_lowest_rank_first_whatever_the_order(data):
    """Against the definition, which looks through all pairs before every merge."""
    letters, pairs = ["a", "b", "c"], []
    for _ in range(data.draw(st.integers(0, 10))):
        pair = data.draw(st.tuples(st.sampled_from(letters), st.sampled_from(letters)))
        if pair not in pairs:
            pairs.append(pair)
            letters.append("".join(pair))
    ranks = {pair: i for i, pair in enumerate(data.draw(st.permutations(pairs)))}
    word = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=20))
    plain = list(word)
    while found := [(ranks[pair], i) for i, pair in enumerate(pairwise(plain)) if pair in ranks]:
        at = min(found)[1]
        plain[at : at + 2] = ["".join(plain[at : at + 2])]
    assert merge_pairs(word, ranks) == plain


def test_accents_are_composed_where_a_tokenizer_says_so(tmp_path):
    """As Qwen2's do: e and its accent are the two bytes of one letter. Another normalizer is
    refused.
    """
    folder = write_folder(tmp_path / "model", weights())
    told = json.loads((folder / "tokenizer.json").read_text())
    apart, one = "the e\u0301", "the \u00e9"
    plain = open_language_model(folder).tokenizer()
    assert plain.encode(apart) != plain.encode(one)
    for normalizer in ({"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFC"}]}):
        (folder / "tokenizer.json").write_text(json.dumps({**told, "normalizer": normalizer}))
        tokens = open_language_model(folder).tokenizer()
        assert tokens.encode(apart) == tokens.encode(one) == plain.encode(one)
    (folder / "tokenizer.json").write_text(
        json.dumps({**told, "normalizer": {"type": "Lowercase"}})
    )
    with pytest.raises(BadInput, match="it normalises texts by Lowercase; use another model"):
        open_language_model(folder).tokenizer()


def test_a_word_without_end_takes_no_age():
    """A hundred thousand letters without a space, as base64 has them: 5e9 comparisons if every
    merge looked at all.
    """
    tokenizer = Tokenizer((*alphabet(), "aa", "aaaa"), (("a", "a"), ("aa", "aa")))
    assert len(tokenizer.encode("a" * 100_000)) == 25_000


def test_a_word_that_is_a_token_may_be_taken_whole():
    """Llama 3's rule (ignore_merges): "abc" is a token that no merges lead to."""
    plain = Tokenizer((*alphabet(), "bc", "abc"), (("b", "c"),))
    assert [plain.tokens[i] for i in plain.encode("abc")] == ["a", "bc"]
    assert replace(plain, whole=True).encode("abc") == [257]


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=60)
def test_any_text_comes_back(text):
    tokenizer = Tokenizer(tuple(tokens()), (("Ġ", "a"), ("t", "h")), TOKENIZER_PATTERNS["smollm"])
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode("utf-8", "replace").decode()
    assert "".join(split_words(text, TOKENIZER_PATTERNS["llama3"])) == text
    assert set(alphabet()) <= set(tokenizer.tokens)


@pytest.mark.parametrize("cut", [0, 3, 4, 12, 30, 200, 4000, -40])
def test_a_file_that_ends_early_is_one_line(files, tmp_path, cut):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(files[1].read_bytes()[:cut])
    with pytest.raises(BadInput) as why:
        load_llama(broken)
    assert "\n" not in str(why.value)
    assert "broken.gguf" in str(why.value)


def test_damaged_files_never_raise_anything_else(files, tmp_path):
    raw, rng = bytearray(files[1].read_bytes()), np.random.default_rng(0)
    broken = tmp_path / "broken.gguf"
    for _ in range(60):
        copy = bytearray(raw)
        for at in rng.integers(4, 9000, 4):
            copy[at] = rng.integers(256)
        broken.write_bytes(copy)
        with suppress(BadInput):
            GgufFile(broken)
            open_language_model(broken).tokenizer()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"hidden_size": "x"}, "width = x"),
        ({"num_attention_heads": 7}, "no grouping"),
        ({"num_hidden_layers": 3}, "layers.2.input_layernorm.weight is missing"),
        ({"vocab_size": 7}, "has shape (288, 64)"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor = None of its rotary positions"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
            "scales its rotary positions by 'dynamic'",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": "x"}},
            "beta_fast = x of its rotary",
        ),
        ({"rope_scaling": [2]}, "must be a table"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotates only part"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "windows in some of its layers"),
        ({"head_dim": 7}, "no grouping"),
        ({"head_dim": 32}, "q_proj.weight has shape (64, 64), not (128, 64)"),
        ({"model_type": "mistral", "sliding_window": "x"}, "window = x"),
        ({"attention_bias": True}, "q_proj.bias is missing"),
        ({"hidden_act": "gelu"}, "another activation than silu"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"rms_norm_eps": 10**30}, "eps = "),
    ],
)
def test_folders_that_are_no_llama_are_refused(tmp_path, change, told):
    folder = write_folder(tmp_path / "hf", weights())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(BadInput, match="hf") as why:
        load_llama(folder)
    assert told in str(why.value)


def test_weights_that_are_no_numbers_are_refused(tmp_path, files):
    """Read without a word they would make every loss NaN, and packed bytes would be taken for
    weights.
    """
    name = "model.layers.1.mlp.up_proj.weight"
    for value, told in ((math.nan, "holds NaN"), (math.inf, "or infinity"), (None, "is of I8")):
        spoilt = files[2][name].clone() if value is not None else files[2][name].to(torch.int8)
        if value is not None:
            spoilt[3, 2] = value
        folder = write_folder(tmp_path / told[-4:], {**files[2], name: spoilt})
        with pytest.raises(BadInput, match=f"{name} .*{told}"):
            load_llama(folder)


def test_a_base_beyond_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """80,192 numbers: 288 x 64 and 64 outside, two blocks of 2 x 64 + 2 x 64 x 64 + 2 x 32 x 64 + 3
    x 64 x 96.
    """
    folder = write_folder(tmp_path, weights())
    monkeypatch.setattr("flrce.core.host.get_available_memory", lambda: 4 * 80_192 - 1)
    with pytest.raises(
        BadInput, match=r"in float32 needs 0.0 GB, .*; set model.options.dtype = 'bfloat16'"
    ):
        load_llama(folder)
    assert load_llama(folder, "bfloat16").tokens.dtype == torch.bfloat16
    monkeypatch.setattr("flrce.core.host.get_available_memory", lambda: 4 * 80_192)
    load_llama(folder)
    monkeypatch.setattr("flrce.core.host.get_available_memory", lambda: 3 * 100 * 15 - 1)
    with pytest.raises(BadInput, match="a seed space of 100 directions of 15 numbers needs"):
        SeedSpaceNetwork(torch.nn.Linear(4, 3), 100)


def test_a_folder_s_files_are_those_that_huggingface_would_read(tmp_path, files):
    w = files[2]
    folder = write_folder(tmp_path / "m", w)
    save_file(
        {name: x + 1 for name, x in w.items()}, folder / "zz.safetensors"
    )  # of another making
    assert torch.equal(load_llama(folder).norm.weight, w["model.norm.weight"])
    assert load_llama(folder).provision == (folder / "model.safetensors").stat().st_size
    (folder / "model.safetensors").unlink()
    names, index = sorted(w), folder / "model.safetensors.index.json"
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, some in shards.items():
        save_file({name: w[name] for name in some}, folder / file)
    index.write_text(
        json.dumps({"weight_map": {name: file for file, some in shards.items() for name in some}})
    )
    assert all(torch.equal(open_language_model(folder).tensor(name), w[name]) for name in w)
    for wrong in ({"x": "c.safetensors"}, {"x": "../m/a.safetensors"}, {"x": 3}, [1], None):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(BadInput, match=r"index.json (names|has no weight_map)"):
            open_language_model(folder)


def test_a_count_of_key_heads_may_be_left_empty(tmp_path):
    folder = write_folder(tmp_path, weights(kv_heads=SIZES["heads"]))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": None}))
    assert open_language_model(folder).sizes.kv_heads == SIZES["heads"]


def test_other_mistakes_name_the_remedy(tmp_path, files):
    for path, told in (
        (tmp_path / "no.gguf", "does not exist"),
        (tmp_path, "config.json cannot be read"),
    ):
        with pytest.raises(BadInput, match=told):
            load_llama(path)
    other = write_gguf(tmp_path / "o.gguf", weights(), **{"general.architecture": "qwen2"})
    with pytest.raises(BadInput, match="architecture 'qwen2'; read is llama"):
        load_llama(other)
    for kind, told in (
        ("llama", "no complete tokenizer: .* 0 scores"),
        ("bert", "read are llama's, and gpt2's of the"),
    ):
        file = write_gguf(tmp_path / "s.gguf", weights(), **{"tokenizer.ggml.model": kind})
        with pytest.raises(BadInput, match=told):
            open_language_model(file).tokenizer()
    with pytest.raises(BadInput, match="dtype"):
        load_llama(files[0], "int8")
    (files[0].parent / "bad").mkdir(exist_ok=True)
    bad = write_folder(files[0].parent / "bad", weights())
    (bad / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(BadInput, match="no usable safetensors"):
        load_llama(bad)


def test_transformers_agrees(files):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder, _, _ = files
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, SIZES["vocabulary"], (3, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(
            load_llama(folder)(ids), theirs(ids).compute_logits, atol=2e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    "pattern",
    [
        "(t+)+$",
        "(?:t|tt)*$",
        "(t|t)*$",
        "(t*)*$",
        r"(t+)\1+$",
        "(?P<a>t+)(?P=a)$",
        "(?=(t+)+$)",
        "(?i:t+)+$",
        "([]t]+)*$",
        "(t+){2,}$",
        "(?:t|tt){30}$",
        "t?" * 30 + "t" * 30,
        "t*" * 9 + "$",
        "(?:t|t)" * 30 + "$",
        "(?x)(t+) +$",
        "(?#a)(t+)(?#b)+$",
        "t{1,999}" * 5 + "$",
        "t" * 20_000,
        r"(?>t|tt)+$",
        "((((t+))))*",
    ],
)
def test_patterns_of_exponential_time_are_refused(pattern):
    with pytest.raises(BadInput, match=r"pattern .* is refused"):
        split_words("t" * 5000 + "x", (pattern,))


@pytest.mark.parametrize(
    "pattern",
    [
        GPT2_PATTERN,
        *TOKENIZER_PATTERNS["llama3"],
        r"\p{N}{1,3}",
        r"\s?[!-/:-~]+",
        r"[^\r\n\p{L}\p{N}]?\p{L}*\p{L}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\s+$",
        r"\(+|\++|[(+*]+",
        r"a{2}b{,3}|x{y}",
    ],
)
def test_patterns_of_tokenizers_in_use_stay(pattern):
    text = "It's 12345 words,  or more: (a+b)* aab bbb.\n\n x"
    assert "".join(split_words(text, (pattern,))) == text


def test_patterns_of_polynomial_time_end(monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(BadInput, match="for one text"):
        split_words("t" * 200_000 + "x", ("t+$",))
    assert time.monotonic() - began < 20
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_sizes_may_be_written_as_floats(tmp_path):
    folder = write_folder(tmp_path / "hf", weights())
    config = json.loads((folder / "config.json").read_text())
    whole = {key: float(value) for key, value in config.items() if type(value) is int}
    (folder / "config.json").write_text(json.dumps(config | whole))
    assert type(open_language_model(folder).sizes.layers) is int
    assert load_llama(folder) is not None
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2.5}))
    with pytest.raises(BadInput, match=r"layers = 2\.5"):
        open_language_model(folder)
