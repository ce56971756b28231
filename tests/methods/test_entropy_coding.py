"""The range coder and what it makes of payloads: exact, short, and refused where it is damaged."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from flrce.config.compose import build_piece
from flrce.core.pieces import MalformedPayload, NoCompression
from flrce.core.types import Payload
from flrce.errors import BadInput
from flrce.flower.session import list_client_state
from flrce.methods.catalogue import recipes
from flrce.methods.compression import range_coder
from flrce.methods.compression.entropy import EntropyCoded, compress_buffer, restore_buffer
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.nonzero import NonzeroCoordinates
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.compression.range_coder import (
    decode_symbols,
    decode_with_python,
    encode_symbols,
    encode_with_python,
)
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.compression.sparsify import RandomK, TopK
from flrce.methods.compression.tensors import TensorDropout
from flrce.rng import make_stream

LAYOUT = [("a.weight", 700), ("a.bias", 50), ("a.running_var", 10)]
INNER = [
    NoCompression(),
    Quantizer(1),
    Quantizer(3),
    Quantizer(4),
    Quantizer(8),
    TopK(0.05, "indices"),
    TopK(0.3, "bitmap"),
    TopK(0.3, "dense"),
    RandomK(0.2),
    TensorDropout(0.5),
    NonzeroCoordinates(),
    RotatedCode(1),
    RotatedCode(3),
    ErrorFeedback(Quantizer(2)),
]


def rng(seed=0):
    return make_stream(seed, "encode", 1, "a")


def test_one_and_two_symbols_by_hand():
    # One bit at p = 1/2: the middle of [0, 2^32 - 1] is 2^31 - 1. A 1 takes the lower half, whose
    # shortest number is 0; a 0 takes the upper one, from 0x80000000 on.
    assert encode_symbols(np.array([1], np.uint8), 1).tolist() == [0x00]
    assert encode_symbols(np.array([0], np.uint8), 1).tolist() == [0x80]
    # After a 0, p moves by 2/3 of the way: 32768 - 21845 = 10923 (of 65536). The rest of the range,
    # 0x7fffffff, is split at 0x7fff * 10923 + (0xffff * 10923 >> 16) = 357,924,863 = 0x15557fff:
    # a second 0 lies above 0x80000000 + that, so its shortest byte is 0x96; a 1 below it: 0x80.
    assert encode_symbols(np.array([0, 0], np.uint8), 1).tolist() == [0x96]
    assert encode_symbols(np.array([0, 1], np.uint8), 1).tolist() == [0x80]


symbol_lists = st.integers(1, 8).flatmap(
    lambda bits: st.tuples(st.just(bits), st.lists(st.integers(0, 2**bits - 1), max_size=200))
)


@given(symbol_lists)
def test_python_and_c_write_and_read_the_same_bytes(case):
    bits, values = case
    symbols, history = np.array(values, np.uint8), max(bits, 4)
    coded = encode_symbols(symbols, bits)
    assert encode_with_python(symbols, bits, history).tolist() == coded.tolist()
    assert decode_symbols(coded, len(symbols), bits).tolist() == values
    again, shifted, _ = decode_with_python(coded, len(symbols), bits, history)
    assert again.tolist() == values
    assert shifted < len(coded) <= shifted + 4


def test_without_a_compiler_python_codes(monkeypatch):
    symbols = np.random.default_rng(0).integers(0, 16, 500).astype(np.uint8)
    coded = encode_symbols(symbols, 4)
    monkeypatch.setattr(range_coder, "_load_library", lambda: None)
    assert encode_symbols(symbols, 4).tolist() == coded.tolist()
    assert decode_symbols(coded, 500, 4).tolist() == symbols.tolist()


def ideal_bits(symbols, bits):
    """-log2 of the probabilities that the coder states, from its description, in fractions."""
    total, chance, count, past = 0.0, {}, Counter(), ""
    for symbol in symbols:
        digits = f"{symbol:0{bits}b}"
        for i, digit in enumerate(digits):
            key = (past[-max(bits, 4) :], digits[:i])
            p = chance.get(key, 0.5)
            total -= math.log2(p if digit == "1" else 1 - p)
            p += ((digit == "1") - p) / (min(count[key], 60) + 1.5)
            chance[key] = min(max(p, 32 / 65536), 65504 / 65536)
            count[key] += 1
        past += digits
    return total


@pytest.mark.parametrize("bits", [1, 2, 4, 7])
def test_the_length_is_the_models_own(bits):
    gen = np.random.default_rng(bits)
    symbols = np.minimum(gen.geometric(0.4, 4000) - 1, 2**bits - 1).astype(np.uint8)
    # the past begins with zeros; after eight of them the oracle's past is the coder's
    padded = ideal_bits([0] * 8 + symbols.tolist(), bits)
    coded = 8 * len(encode_symbols(np.concatenate([np.zeros(8, np.uint8), symbols]), bits))
    assert coded == pytest.approx(padded, rel=0.003, abs=40)


def test_independent_symbols_cost_little_more_than_their_entropy():
    p = np.array([0.7, 0.2, 0.08, 0.02])
    symbols = np.random.default_rng(1).choice(4, 50_000, p=p).astype(np.uint8)
    entropy = -(p * np.log2(p)).sum()
    assert 8 * len(encode_symbols(symbols, 2)) / 50_000 == pytest.approx(entropy, rel=0.03)


def test_statistics_that_change_along_the_vector_are_followed():
    gen = np.random.default_rng(2)
    halves = [np.full(5000, 3), gen.integers(0, 16, 5000)]  # 0 bits, then 4 bits a symbol
    symbols = np.concatenate(halves).astype(np.uint8)
    assert len(encode_symbols(symbols, 4)) < 1.06 * 2500


@pytest.mark.parametrize("inner", INNER, ids=repr)
@settings(max_examples=15)
@given(st.integers(0, 10**6))
def test_the_inner_payload_comes_back_bit_by_bit(inner, seed):
    gen = np.random.default_rng(seed)
    u = torch.from_numpy(gen.standard_t(2, 760) * (gen.random(760) < gen.random())).float()
    code = EntropyCoded(inner)
    plain, _ = inner.encode(u, LAYOUT, rng(seed), {})
    coded, _ = code.encode(u, LAYOUT, rng(seed), {})
    widths = getattr(inner, "symbol_bits", {})
    for name, buffer in plain.buffers.items():
        again = restore_buffer(coded.buffers[name], widths.get(name, 8))
        assert again.dtype == buffer.dtype
        assert again.numpy().tobytes() == buffer.numpy().tobytes()
    assert torch.equal(
        code.decode(coded, LAYOUT, rng(seed)), inner.decode(plain, LAYOUT, rng(seed))
    )
    assert coded.nbytes <= plain.nbytes + len(plain.buffers)  # one byte for what is stored


any_buffer = st.sampled_from([np.int16, np.int32, np.float32, np.uint8, np.float64]).flatmap(
    lambda dtype: arrays.arrays(dtype, st.integers(0, 60))
)


@given(any_buffer, st.integers(1, 8))
def test_any_buffer_comes_back(values, bits):
    buffer = torch.from_numpy(values.copy())
    again = restore_buffer(compress_buffer(buffer, bits), bits)
    assert again.dtype == buffer.dtype
    assert again.numpy().tobytes() == values.tobytes()


def test_gaps_by_hand():
    # 16 indices 0, 1, ..., 15: every gap is 1, one symbol 0 of no further digits. The head is the
    # kind 3, the count 16 and 0 bytes of digits.
    coded = compress_buffer(torch.arange(16, dtype=torch.int32), 8)
    assert coded[:3].tolist() == [3, 16, 0]
    assert decode_symbols(coded[3:].numpy(), 16, 7).tolist() == [0] * 16
    # index 4 is a gap of 5 = 101: 2 digits behind the first, of which 0 belongs to the symbol, and
    # 1 travels; index 10 a gap of 6 = 110: symbol 2 * 2 + 1, digit 0. Then gaps of 1.
    values = torch.tensor([4, 10, *range(11, 25)], dtype=torch.int32)
    coded = compress_buffer(values, 8)
    assert coded[:4].tolist() == [3, 16, 1, 0b10_000000]
    assert decode_symbols(coded[4:].numpy(), 16, 7).tolist() == [4, 5, *[0] * 14]


def test_bytes_by_hand():
    noise = torch.randint(0, 256, (100,), dtype=torch.uint8)
    assert compress_buffer(noise, 8).tolist() == [0, *noise.tolist()]  # stored, behind one byte
    floats = torch.full((100,), 1.5)  # one exponent: 3 bytes each, the head 1 + 1, few more
    assert 302 < compress_buffer(floats, 8).numel() < 302 + 20
    assert compress_buffer(torch.ones(15), 8).dtype == torch.float32  # too few


def quantised_payload():
    u = torch.from_numpy(np.random.default_rng(0).standard_t(2, 760)).float()
    return EntropyCoded(Quantizer(4)).encode(u, LAYOUT, rng(), {})[0].buffers


def damage():
    levels = quantised_payload()["levels"]
    yield levels[:0]
    yield levels[:1]
    yield levels[: len(levels) // 2]  # a byte or two less may be the code of other symbols
    yield torch.cat([levels, levels.new_zeros(1)])
    yield torch.cat([levels, levels[:5]])
    for kind in (0, 2, 3, 4, 5, 255):
        yield torch.cat([torch.tensor([kind], dtype=torch.uint8), levels[1:]])
    yield torch.tensor([1, 255, 255, 255, 255, 127, 1, 1], dtype=torch.uint8)  # 34 GB
    yield torch.tensor([1, 255, 255, 255, 255, 255, 255], dtype=torch.uint8)  # an endless number
    yield levels.int()


@pytest.mark.parametrize("levels", list(damage()), ids=lambda x: str(x[:3].tolist()))
def test_damaged_payloads_are_malformed(levels):
    buffers = {**quantised_payload(), "levels": levels}
    with pytest.raises(MalformedPayload):
        EntropyCoded(Quantizer(4)).decode(Payload(buffers), LAYOUT, rng())


@settings(max_examples=200)
@given(st.binary(max_size=40), st.integers(1, 8))
def test_random_bytes_restore_or_are_malformed(data, bits):
    buffer = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    try:
        again = restore_buffer(buffer, bits)
    except MalformedPayload:
        return
    assert again.numel() <= range_coder.MAX_BITS_OF_BYTE * (len(data) + 4)


@pytest.mark.parametrize("names", [("levels", "scales"), ("levels", *map(str, range(50)))], ids=len)
def test_claims_of_many_symbols_are_refused_before_any_is_decoded(names, monkeypatch):
    """26 bytes claim a million symbols, 50 buffers of them fifty million."""
    monkeypatch.setattr(range_coder, "decode_symbols", pytest.fail)
    monkeypatch.setattr("flrce.methods.compression.entropy.decode_symbols", pytest.fail)
    levels = torch.tensor([1, 192, 132, 61, *[7] * 20], dtype=torch.uint8)  # 1,000,000 bytes
    with pytest.raises(MalformedPayload, match="coded symbols, more than the"):
        EntropyCoded(RotatedCode(1)).decode(Payload(dict.fromkeys(names, levels)), LAYOUT, rng())


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_decoding_ends_with_the_bytes(bits):
    """Symbols beyond the last byte are not made up: the decoder stops there."""
    data = encode_symbols(np.zeros(100, np.uint8), bits)
    for cut in range(len(data)):
        with pytest.raises(MalformedPayload):
            decode_symbols(data[:cut], 100_000 // bits, bits)
        symbols, shifted, _ = decode_with_python(data[:cut], 100_000 // bits, bits, max(bits, 4))
        assert shifted == -2
        assert len(symbols) < 100_000 // bits
    with pytest.raises(MalformedPayload, match="too few for 1000000000000 symbols"):
        decode_symbols(data, 10**12, bits)


@pytest.mark.parametrize("bits", [1, 8])
def test_the_longest_run_fits_the_bound(bits):
    symbols = np.zeros(2_000_000 // bits, np.uint8)
    data = encode_symbols(symbols, bits)
    assert 0.3 < bits * len(symbols) / (range_coder.MAX_BITS_OF_BYTE * len(data)) < 0.6
    assert np.array_equal(decode_symbols(data, len(symbols), bits), symbols)


def test_heavy_tailed_updates_shrink():
    gen = np.random.default_rng(3)
    u = torch.from_numpy(gen.standard_t(2, 20_000)).float()
    layout = [("w", 20_000)]
    plain = Quantizer(4).encode(u, layout, rng(), {})[0].nbytes
    assert EntropyCoded(Quantizer(4)).encode(u, layout, rng(), {})[0].nbytes < 0.4 * plain


def test_experiment_files_nest_it_and_feedback_goes_round_it():
    wanted = {"piece": "entropy", "inner": {"piece": "quantize", "bits": 4}}
    assert build_piece("compressor", wanted) == EntropyCoded(Quantizer(4))
    code, carry = ErrorFeedback(EntropyCoded(Quantizer(2, stochastic=False))), {}
    plain, kept = ErrorFeedback(Quantizer(2, stochastic=False)), {}
    u = torch.randn(760)
    for seed in range(3):
        _, carry = code.encode(u, LAYOUT, rng(seed), carry)
        _, kept = plain.encode(u, LAYOUT, rng(seed), kept)
    assert torch.equal(carry["residual"], kept["residual"])
    with pytest.raises(BadInput, match="compressor"):
        EntropyCoded(3)
    with pytest.raises(BadInput, match="contractive"):
        ErrorFeedback(EntropyCoded(RotatedCode(0.5)))


@pytest.mark.parametrize(
    ("compressor", "names"),
    [
        (Quantizer(4), []),
        (EntropyCoded(Quantizer(4)), []),
        (ErrorFeedback(EntropyCoded(Quantizer(4))), ["ErrorFeedback"]),
        (EntropyCoded(ErrorFeedback(Quantizer(4))), ["EntropyCoded"]),
    ],
    ids=repr,
)
def test_what_clients_keep_is_known(compressor, names):
    assert list_client_state(replace(recipes.fedavg(2), compressor=compressor)) == names


def test_fair_bits_are_not_coded_and_others_are():
    """Random bits travel as they are; ones then zeros, of which half are ones too, are coded."""
    draw = np.random.default_rng(0)
    fair = torch.from_numpy(np.packbits(draw.integers(0, 2, 2**15, dtype=np.uint8)))
    assert compress_buffer(fair, 1).nbytes == fair.nbytes + 1
    halves = torch.cat([torch.full((2**11,), 255), torch.zeros(2**11)]).byte()
    coded = compress_buffer(halves, 1)
    assert coded.nbytes < halves.nbytes / 10
    for buffer in (fair, halves):
        assert torch.equal(restore_buffer(compress_buffer(buffer, 1), 1), buffer)
