"""The client package's codes against torch's: decoding to the bit, encoding to stated tolerances,
and what a device imports.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flrce.core.downlink import HeldPart, encode_model
from flrce.core.payloads import fingerprint_model
from flrce.core.pieces import NoCompression
from flrce.core.types import Payload
from flrce.methods.registry import PIECES
from flrce.rng import make_stream
from flrce_client.codecs import CODECS, read_codec
from flrce_client.costs import measure_work, read_energy_counters, subtract_counters
from flrce_client.downloads import ModelForm, decode_model, fingerprint_vector
from flrce_client.errors import MalformedPayload


class UnnamedCode(NoCompression):
    """A code of the user's own."""


CODES = [
    ("dense", {}),
    ("rotated", {"bits": 1}),
    ("rotated", {"bits": 2, "scale": "contractive"}),
    ("rotated", {"bits": 3}),
    ("rotated", {"bits": 4}),
    ("rotated", {"bits": 0.3}),
    ("rotated", {"bits": 0.5, "scale": "contractive"}),
    ("quantize", {"bits": 8}),
    ("quantize", {"bits": 3, "stochastic": False}),
    ("topk", {"keep": 0.1}),
    ("topk", {"keep": 0.02, "bits": 4}),
    ("topk", {"keep": 0.5, "dense_bn": True}),
    ("topk", {"keep": 1.0}),
    ("randomk", {"keep": 0.2, "scaled": True}),
    ("ternary", {"share": 0.05}),
    ("nonzero", {}),
    ("drop-tensors", {"rate": 0.5}),
    ("fixed-point", {"levels": 1}),
    ("fixed-point", {"levels": 20}),
    ("growing-bits", {}),
    ("skip-layers", {"skipped": "layer.weight,other"}),
    ("skip-layers", {"skipped": ""}),
]
#: codes whose buffers are the same bytes on both sides; of the others sums in another order
SAME_BYTES = {"dense", "quantize", "randomk", "nonzero", "drop-tensors", "skip-layers"}
IDS = [f"{name} {' '.join(map(str, values.values()))}" for name, values in CODES]
vectors = st.tuples(st.integers(0, 2**31), st.integers(1, 5000), st.sampled_from([1e-20, 1.0, 1e6]))


def draw(seed, n, size):
    """(an update, its layout with BatchNorm's statistics last)."""
    rng = np.random.default_rng(seed)
    u = (rng.standard_normal(n) * size).astype(np.float32)
    u[rng.random(n) < 0.1] = 0
    cut = n - n // 10
    return u, (("layer.weight", cut), ("norm.running_mean", n - cut))


@pytest.mark.parametrize(("name", "values"), CODES, ids=IDS)
@settings(max_examples=25, deadline=None)
@given(drawn=vectors)
def test_decoding_gives_torchs_bits_and_encoding_its_values(name, values, drawn):
    u, layout = draw(*drawn)
    ours, theirs = CODECS[name](**values), PIECES["compressor"][name](**values)
    payload, _ = theirs.encode(torch.from_numpy(u), layout, make_stream(1, "encode", 2, "c"), {})
    buffers = {key: buffer.numpy() for key, buffer in payload.buffers.items()}
    decoded = theirs.decode(payload, layout, make_stream(1, "encode", 2, "c")).numpy()
    own = ours.decode(buffers, layout, make_stream(1, "encode", 2, "c"))
    assert own.dtype == decoded.dtype
    assert own.tobytes() == decoded.tobytes()
    made, _ = ours.encode(u, layout, make_stream(1, "encode", 2, "c"), {})
    assert {key: (x.dtype, x.shape) for key, x in made.items()} == {
        key: (x.dtype, x.shape) for key, x in buffers.items()
    }
    for key, x in made.items():
        if name in SAME_BYTES or x.dtype != np.float32:
            odd = np.unpackbits(x.view(np.uint8)) != np.unpackbits(buffers[key].view(np.uint8))
            # levels on an edge may fall to either side
            assert odd.sum() <= (0 if name in SAME_BYTES else 1e-3 * odd.size), key
        else:
            np.testing.assert_allclose(x, buffers[key], rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("name", ["entropy", "error-feedback", "growing-bits"])
def test_codes_within_codes(name):
    """The same settings as a message names them; two rounds, so that a residual is used."""
    config = {"key": name, "key.inner": "quantize", "key.inner.bits": 4}
    ours = read_codec(config, "key")
    theirs = PIECES["compressor"][name](PIECES["compressor"]["quantize"](bits=4))
    kept, carry = {}, {}
    for t in (1, 2):
        u, layout = draw(t, 3000, 0.1)
        payload, kept = theirs.encode(
            torch.from_numpy(u), layout, make_stream(0, "encode", t), kept
        )
        made, carry = ours.encode(u, layout, make_stream(0, "encode", t), carry)
        assert {key: x.tobytes() for key, x in made.items()} == {
            key: x.numpy().tobytes() for key, x in payload.buffers.items()
        }
        decoded = theirs.decode(payload, layout, make_stream(0, "encode", t)).numpy()
        assert ours.decode(made, layout, make_stream(0, "encode", t)).tobytes() == decoded.tobytes()
    assert {key: x.tobytes() for key, x in carry.items()} == {
        key: x.numpy().tobytes() for key, x in kept.items()
    }


def test_compressors_without_a_code_are_named_in_the_manual():
    """`flrce.flower.compressing` encodes those with torch; flrce-client refuses them."""
    assert set(CODECS) <= set(PIECES["compressor"])
    manual = (Path(__file__).resolve().parents[2] / "docs" / "flower-clients.md").read_text()
    for name in set(PIECES["compressor"]) - set(CODECS):
        assert f"`{name}`" in manual


@pytest.mark.parametrize("bits", [1, 0.5])
def test_a_difference_is_decoded_to_the_servers_bits(bits):
    rng = np.random.default_rng(0)
    base, w = (torch.from_numpy(rng.standard_normal(700).astype(np.float32)) for _ in range(2))
    form = ModelForm(("a", "b.running_var"), ((30, 20), (100,)), 600)
    part = HeldPart(None, form.layout, 600)
    code = PIECES["compressor"]["rotated"](bits, "contractive")
    payload, model = encode_model(w, base, code, part, (5, 3, "pi"))
    buffers = {key: buffer.numpy() for key, buffer in payload.buffers.items()}
    own = CODECS["rotated"](bits, "contractive")
    decoded = decode_model(buffers, base.numpy(), own, form, (5, 3, "pi"))
    assert decoded.tobytes() == model.numpy().tobytes()
    assert fingerprint_vector(decoded) == fingerprint_model(model)
    assert (
        decode_model({}, base.numpy(), own, form, (5, 3, "pi")).tobytes() == base.numpy().tobytes()
    )


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("rotated", lambda b: b.pop("scales"), "buffers 'levels'"),
        ("rotated", lambda b: b.update(levels=b["levels"][:-1]), "has shape"),
        ("quantize", lambda b: b.update(ranges=b["ranges"].astype(np.float64)), "is float64"),
        ("ternary", lambda b: b.update(quotients=b["quotients"][:1]), "quotients are not"),
        ("topk", lambda b: b.update(bitmap=~b["bitmap"]), "bitmap marks"),
    ],
)
def test_damaged_buffers_are_refused(name, spoil, said):
    u, layout = draw(3, 1000, 1.0)
    code = CODECS[name]()
    buffers, _ = code.encode(u, layout, make_stream(0, "encode"), {})
    spoil(buffers)
    with pytest.raises(MalformedPayload, match=said):
        code.decode(buffers, layout, make_stream(0, "encode"))


@pytest.mark.parametrize("inner", ["dense", "quantize"])
def test_one_model_of_several(inner):
    layout = (("members.0.a", 3), ("members.1.a", 3), ("members.0.b", 2), ("members.1.b", 2))
    u = np.array([0, 0, 0, 1, -2, 3, 0, 0, 4, 0.5], np.float32)
    code = read_codec({"key": "trained-group", "key.groups": 2, "key.inner": inner}, "key")
    theirs = PIECES["compressor"]["trained-group"](2, PIECES["compressor"][inner]())
    payload, _ = theirs.encode(torch.from_numpy(u), layout, make_stream(0, "encode"), {})
    buffers, _ = code.encode(u, layout, make_stream(0, "encode"), {})
    assert {key: x.tobytes() for key, x in buffers.items()} == {
        key: x.numpy().tobytes() for key, x in payload.buffers.items()
    }
    decoded = theirs.decode(payload, layout, make_stream(0, "encode")).numpy()
    assert code.decode(buffers, layout, make_stream(0, "encode")).tobytes() == decoded.tobytes()
    for spoilt in (buffers | {"group": np.array([2], np.uint8)}, buffers | {"x": u}):
        with pytest.raises(MalformedPayload):
            code.decode(spoilt, layout, make_stream(0, "encode"))


def test_downloads_by_codes_that_devices_lack_are_whole():
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    from flrce.flower.device_records import is_device_code

    assert is_device_code(PIECES["compressor"]["quantize"](8))
    assert not is_device_code(PIECES["compressor"]["local-noise"]())
    assert not is_device_code(UnnamedCode())


def test_an_unknown_code_is_refused():
    with pytest.raises(MalformedPayload, match=r"code 'os\.system' is not one of"):
        read_codec({"key": "os.system"}, "key")


def test_the_processors_counters(tmp_path):
    """Two packages, of which one wraps at 1000 microjoules; a part of a package does not count."""
    for name, energy in {"intel-rapl:0": 900, "intel-rapl:1": 10, "intel-rapl:0:0": 5}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{energy}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("1000\n")
    before = read_energy_counters(tmp_path)
    assert before == {"intel-rapl:0": (900, 1000), "intel-rapl:1": (10, 1000)}

    def work():
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100\n")
        (tmp_path / "intel-rapl:1" / "energy_uj").write_text("60\n")
        return "done"

    result, cost = measure_work(work, tmp_path)
    assert result == "done"
    assert cost.joules == pytest.approx(250e-6)
    assert cost.seconds >= 0
    assert measure_work(lambda: measure_work(work, tmp_path), tmp_path)[0][1].joules is None
    assert subtract_counters({}, {}) is None
    assert read_energy_counters(tmp_path / "absent") == {}


MODULES = """
import json, sys
before = set(sys.modules)
{line}
print(json.dumps(sorted(m for m in sys.modules if "." not in m)))
"""


@pytest.mark.parametrize(
    ("line", "absent"),
    [
        ("import flrce_client.codecs, flrce_client.downloads", {"torch", "flwr", "flrce"}),
        ("from flrce_client.flower import compressing, introduce", {"torch", "flrce"}),
        ("from flrce.flower import compressing, introduce", {"torch", "sklearn", "scipy"}),
    ],
)
def test_a_device_imports_no_torch(line, absent):
    if "flower" in line:
        pytest.importorskip("flwr")
    source = str(Path(__file__).resolve().parents[2] / "src")
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {source!r})\n" + MODULES.format(line=line),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not set(json.loads(ran.stdout)) & absent


def test_payloads_are_decoded_by_the_server():
    """What numpy encodes, torch's gate decodes: to the codes' own error."""
    u, layout = draw(1, 3000, 1.0)
    made, _ = CODECS["rotated"](4).encode(u, layout, make_stream(0, "encode", 1, "c"), {})
    payload = Payload({key: torch.from_numpy(x) for key, x in made.items()})
    decoded = PIECES["compressor"]["rotated"](4).decode(
        payload, layout, make_stream(0, "encode", 1, "c")
    )
    error = np.square(decoded.numpy() - u).sum() / np.square(u).sum()
    assert error < 0.02  # four bits of a normal coordinate: about 0.0095 (Lloyd-Max)
