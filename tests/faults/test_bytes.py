"""Rows 11 to 13: what reads a client's bytes, fed with valid input of which some bytes were changed
(see fuzz.py).
"""

from io import BytesIO

import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

import fuzz
import numpy as np
from flwr.app import Array
from hypothesis import given, settings
from hypothesis import strategies as st

from flrce.core.pieces import MalformedPayload


def npy(values, version=(1, 0)):
    stream = BytesIO()
    np.lib.format.write_array(stream, values, version)
    return stream.getvalue()


def some(data):
    """As `fuzz.Source` reads it back."""
    return bytes([len(data) & 255, len(data) >> 8]) + data


F32, TWO, ALL = (
    npy(np.zeros((2, 4), np.float32)),
    npy(np.ones(2, np.float32)),
    npy(np.zeros(12, np.float32)),
)
NAMED = b"".join(
    bytes([name]) + b"\0\0" + some(data) for name, data in ((8, F32), (9, TWO), (10, TWO))
)
VALID = {
    "array": [
        F32,
        TWO,
        npy(np.ones((2, 4), order="F")),
        npy(np.arange(4, dtype=np.int32), (2, 0)),
        npy(np.zeros((0, 3))),
    ],
    "payload": [
        bytes([0, 1, 0, 0]) + some(bytes(48)),  # dense
        bytes([1, 2, 1, 0])
        + some(bytes(24))
        + bytes([2, 4])
        + some(b"\xfc\0"),  # six of twelve, by bitmap
        bytes([6, 2, 5, 4])
        + some(bytes(12))
        + bytes([6, 0])
        + some(np.ones(9, np.float32).tobytes()),  # eight bits
    ],
    "reply": [
        bytes([0, 3]) + NAMED + bytes([1, 0, 4, 0]),  # a whole model, as any Flower client sends it
        bytes([0, 1, 0, 0, 0])
        + some(ALL)
        + bytes([1, 0, 4, 1, 2, 0, 1, 1, 3, 0, 0]),  # a payload with its echo
    ],
}


@st.composite
def changed(draw, target):
    """A valid input, cut, lengthened, or with some bytes changed."""
    data = bytearray(draw(st.sampled_from(VALID[target])))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["set", "cut", "insert", "copy"]))
        if kind == "set" and data:
            data[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 16))]
        else:
            data[at:at] = draw(st.binary(max_size=16)) if kind == "insert" else data[at : at + 16]
    return bytes(data)


@pytest.mark.row(
    11, "mutated arrays, payloads and records", "read, or refused as malformed; never an exception"
)
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_changed_bytes(target):
    for data in VALID[target]:
        fuzz.TARGETS[target](data)

    @settings(max_examples=500)
    @given(changed(target))
    def never_raises(data):
        fuzz.TARGETS[target](data)

    never_raises()


def test_valid_input_is_accepted():
    """The examples above are what they claim, so that their mutations reach deep."""
    taken = []
    judge, fuzz.judge = fuzz.judge, lambda reply, task: taken.append((reply, task))
    try:
        for target in ("payload", "reply"):
            for data in VALID[target]:
                fuzz.TARGETS[target](data)
    finally:
        fuzz.judge = judge
    assert len(taken) == 5
    for reply, task in taken:
        updates, rejected = fuzz.validate_replies(
            [task], [reply], fuzz.ReplyContext(lambda _: (None, fuzz.LAYOUT), 12, 8, None, fuzz.W)
        )
        assert len(updates) == 1, rejected


def header(shape):
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.row(12, "an array without values, of impossible shape", "refused as malformed")
@pytest.mark.parametrize(
    "shape", [(0, 10**30), (0, 2**63 - 1, 4), (0,) * 100], ids=["wide", "overflow", "deep"]
)
def test_impossible_shapes(shape):
    """0 values fit any shape with a 0 in it, but numpy has no such array."""
    with pytest.raises(MalformedPayload):
        fuzz.read_array(Array("float32", (0,), "numpy.ndarray", header(shape)))
