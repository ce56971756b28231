"""Language models read from disk: weights, forward pass and tokens, each worked from its
definition.
"""

import json
import math
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from flrce.errors import BadInput
from flrce.formats.gguf import open_gguf
from flrce.formats.language import open_language_model
from flrce.formats.tokenizers import LLAMA3_PATTERN, load_gguf_tokenizer
from flrce.models.llama import load_llama
from flrce.models.seeds import SeedSpaceNetwork
from language_files import (
    EPS,
    MARKS,
    SIZES,
    THETA,
    alphabet,
    relative,
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


def divisors(path):
    """What the rotary frequencies of a model are divided by, pair by pair of a head of 16."""
    return [THETA ** (-2 * i / 16) / f for i, f in enumerate(load_llama(path).frequencies)]


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
        np.testing.assert_allclose(divisors(folder), slowed, rtol=1e-3)
        got = load_llama(folder)(torch.tensor([ids]))[0].double().numpy()
        np.testing.assert_allclose(got, by_the_book(files[2], ids, divisors(folder)), atol=2e-4)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    stretched = write_gguf(tmp_path / "a.gguf", files[2], **linear)
    np.testing.assert_allclose(divisors(stretched), [2.5] * 8, rtol=1e-6)
    listed = write_gguf(
        tmp_path / "b.gguf", {**files[2], "rope_freqs.weight": torch.tensor(expected)}
    )
    np.testing.assert_allclose(divisors(listed), expected, rtol=1e-6)


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
        np.testing.assert_allclose(divisors(path), expected, rtol=1e-6)
        assert load_llama(path).scale == pytest.approx(1.1386294)
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


def test_words_and_merges_by_hand(files):
    folder, file, _ = files
    for path in (folder, file):
        tokenizer = open_language_model(path).tokenizer()
        ids = tokenizer.encode("on the 12 an")
        assert [tokenizer.tokens[i] for i in ids] == ["on", "Ġthe", "Ġ", "1", "2", "Ġa", "n"]
        assert tokenizer.specials == {mark: i for i, mark in enumerate(MARKS)}
        assert tokenizer.encode(MARKS[0])[0] != 0  # text that looks like a mark is text
        assert tokenizer.decode([0, *ids, 2]) == "on the 12 an"
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"  # a lone surrogate


def test_accents_are_composed_where_a_tokenizer_says_so(tmp_path):
    """As Qwen2's do: e and its accent are the two bytes of one letter."""
    folder = write_folder(tmp_path / "model", weights())
    told = json.loads((folder / "tokenizer.json").read_text())
    apart, one = "the e\u0301", "the \u00e9"
    plain = open_language_model(folder).tokenizer()
    assert plain.encode(apart) != plain.encode(one)
    (folder / "tokenizer.json").write_text(json.dumps({**told, "normalizer": {"type": "NFC"}}))
    tokens = open_language_model(folder).tokenizer()
    assert tokens.encode(apart) == tokens.encode(one) == plain.encode(one)


def put_pattern(tmp_path, pattern, place):
    folder = write_folder(tmp_path / "patterns", weights())
    told = json.loads((folder / "tokenizer.json").read_text())
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    if place == "normalizer":
        told["normalizer"] = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "x"}
    elif place == "pre_tokenizer":
        told["pre_tokenizer"] = {**words, "invert": False}
    else:
        inner = [{**words, "invert": False}, told["pre_tokenizer"]]
        told["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": inner}
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return open_language_model(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="patterns are tried where processes can fork")
@pytest.mark.parametrize(
    ("pattern", "place"),
    [
        ("t*t*t*[^t]", "sequence"),
        (r"\w*\w*\w*[^\s\S]", "normalizer"),
        ("(?:[a-z ]*[a-z ]*){2}[^a-z ]", "pre_tokenizer"),
    ],
)
def test_patterns_of_polynomial_time_are_refused(pattern, place, tmp_path):
    with pytest.raises(BadInput, match="its patterns take more than 2 s"):
        put_pattern(tmp_path, pattern, place).tokenizer()


@pytest.mark.skipif(sys.platform != "linux", reason="patterns are tried where processes can fork")
@pytest.mark.parametrize("pattern", ["(t+)+$", "(t|tt)+$", "(?:t|t)*$"])
def test_patterns_of_exponential_time_are_refused(pattern, tmp_path):
    with pytest.raises(BadInput, match="its patterns take more than 2 s"):
        put_pattern(tmp_path, pattern, "pre_tokenizer").tokenizer()


@pytest.mark.parametrize("pattern", [LLAMA3_PATTERN, r"\s+|\w+|[^\w\s]+", r"\p{N}{1,3}", "[0-9]"])
def test_common_patterns_are_taken(pattern, tmp_path):
    assert put_pattern(tmp_path, pattern, "sequence").tokenizer().encode("on the 12 an")


def byte_tokenizer(pre, *more, merges=()):
    """Of a GGUF file's values: all bytes, then these tokens."""
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*alphabet(), *more],
        "merges": list(merges),
        "eos_token_id": 0,
    }
    return load_gguf_tokenizer("a.gguf", {f"tokenizer.ggml.{k}": v for k, v in keys.items()})


def test_a_word_that_is_a_token_may_be_taken_whole():
    """Llama 3's rule (ignore_merges): "abc" is a token that no merges lead to."""
    plain = byte_tokenizer("gpt-2", "bc", "abc", merges=["b c"])
    assert [plain.tokens[i] for i in plain.encode("abc")] == ["a", "bc"]
    assert byte_tokenizer("llama3", "bc", "abc", merges=["b c"]).encode("abc") == [257]


def test_numbers_are_cut_as_the_file_says():
    """One by one in SmolLM, by three in Llama 3, together in GPT-2: "12" is a token."""
    for pre, parts in (("smollm", 4), ("llama3", 3), ("gpt-2", 2)):
        tokens = byte_tokenizer(pre, "12", "34", merges=["1 2", "3 4"])
        assert len(tokens.encode("1234")) == parts, pre


@given(st.text(max_size=60), st.sampled_from(["smollm", "llama3", "gpt-2"]))
@settings(deadline=None, max_examples=100)
def test_any_text_comes_back(text, pre):
    tokenizer = byte_tokenizer(pre, "Ġa", "th", merges=["Ġ a", "t h"])
    assert tokenizer.decode(tokenizer.encode(text)) == text


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
            open_gguf(broken)
            open_language_model(broken).tokenizer()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"hidden_size": "x"}, "'hidden_size' expected int, got str"),
        ({"num_attention_heads": 7}, "not a multiple of the number of attention heads (7)"),
        ({"num_hidden_layers": 3}, "layers.2.self_attn.q_proj.weight is missing"),
        ({"vocab_size": 7}, "has shape (288, 64)"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "Missing required keys in `rope_parameters`"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
            "scales its rotary positions by 'dynamic'",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": "x"}},
            "'<' not supported between instances of 'str'",
        ),
        ({"rope_scaling": [2]}, "'rope_parameters' with value [2] doesn't match"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotates only part"),
        ({"model_type": "qwen2"}, "q_proj.bias is missing"),
        ({"head_dim": 7}, "requires an even rotary dimension"),
        ({"head_dim": 32}, "q_proj.weight has shape (64, 64), not (128, 64)"),
        (
            {"model_type": "mistral", "sliding_window": "x"},
            "'sliding_window' with value 'x' doesn't match",
        ),
        ({"attention_bias": True}, "q_proj.bias is missing"),
        ({"hidden_act": "gulp"}, "invalid configuration: 'gulp'"),
        ({"num_hidden_layers": 10**9}, "says it has 1000000000 layers"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"rms_norm_eps": 10**30}, "'rms_norm_eps' expected float, got int"),
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
    assert open_language_model(folder).config.num_key_value_heads == SIZES["heads"]


def test_other_mistakes_name_the_remedy(tmp_path, files):
    for path, told in (
        (tmp_path / "no.gguf", "does not exist"),
        (tmp_path, "config.json cannot be read"),
    ):
        with pytest.raises(BadInput, match=told):
            load_llama(path)
    other = write_gguf(tmp_path / "o.gguf", weights(), **{"general.architecture": "qwen2"})
    with pytest.raises(BadInput, match="architecture 'qwen2'; supported is llama"):
        load_llama(other)
    for kind, told in (
        ("llama", "no complete tokenizer: 288 tokens, 0 scores"),
        ("bert", "supported are llama, and gpt2 of the"),
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


FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_forward_pass_is_that_of_transformers(tmp_path, kind):
    """The loop over the layers is written anew here: masks, windows and positions by layer."""
    transformers = pytest.importorskip("transformers", reason="needs flrce[llm]")
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes, **FAMILIES[kind])
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(0, 50, (3, 11))
    with torch.no_grad():
        torch.testing.assert_close(
            load_llama(tmp_path)(ids), theirs(ids).logits, atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("form", ["folder", "gguf", "tokenizer"])
def test_a_missing_library_is_one_line(tmp_path, monkeypatch, form):
    folder, file = write_folder(tmp_path / "hf", weights()), tmp_path / "new.gguf"
    write_gguf(file, weights())
    opened = open_language_model(folder)

    def fail(name):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", fail)
    steps = {
        "folder": lambda: load_llama(folder),
        "gguf": lambda: load_llama(file),
        "tokenizer": opened.tokenizer,
    }
    with pytest.raises(BadInput, match=r'needs the package \w+; pip install "flrce\[llm\]"$'):
        steps[form]()
