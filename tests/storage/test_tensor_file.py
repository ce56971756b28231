"""Tensors as a file in pieces: safetensors itself reads it back, and no row of a large table is
copied.
"""

import hashlib
import tracemalloc

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from flrce.storage.disk import write_chunks
from flrce.storage.tensor_file import (
    MIN_ROW_BYTES,
    SAFETENSORS_DTYPES,
    TableRows,
    iter_safetensors_chunks,
)

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(
    st.dictionaries(
        st.text('ab/é"', min_size=1, max_size=4),
        st.tuples(st.sampled_from(sorted(SAFETENSORS_DTYPES, key=str)), SHAPES),
    )
)
def test_safetensors_reads_what_was_written(wanted):
    made = {name: (torch.rand(shape) * 9).to(dtype) for name, (dtype, shape) in wanted.items()}
    found = load(b"".join(iter_safetensors_chunks(made)))
    assert found.keys() == made.keys()
    for name, x in made.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x)


@given(
    st.lists(st.integers(0, 6), max_size=5).map(tuple),
    st.sampled_from([1, 5, MIN_ROW_BYTES // 4, MIN_ROW_BYTES]),
)
def test_rows_are_those_of_the_table(k, width):
    table = torch.arange(7 * width, dtype=torch.float32).reshape(7, width)
    strided = table[:, : width // 2]
    found = load(
        b"".join(
            iter_safetensors_chunks(
                {
                    "a": TableRows(table, k),
                    "b": TableRows(strided, k),
                    "c": TableRows(table[:, 0], k),
                }
            )
        )
    )
    for name, whole in {"a": table, "b": strided, "c": table[:, 0]}.items():
        assert torch.equal(found[name], whole[list(k)].reshape(found[name].shape))


def test_a_large_table_is_written_without_a_copy(tmp_path):
    table = torch.rand(4, 2**20)
    tracemalloc.start()
    mark = write_chunks(tmp_path / "rows", iter_safetensors_chunks({"V": TableRows(table, (3, 1))}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    data = (tmp_path / "rows").read_bytes()
    assert mark == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    assert torch.equal(load(data)["V"], table[[3, 1]])
    assert peak < 2**20  # two rows are 8 MB
    pieces = list(iter_safetensors_chunks({"V": TableRows(table, (3, 1))}))[1:]
    table[3, 0], table[1, -1] = -7.0, -8.0  # the pieces are views
    assert pieces[0][:4].tobytes() == torch.tensor([-7.0]).numpy().tobytes()
    assert pieces[1][-4:].tobytes() == torch.tensor([-8.0]).numpy().tobytes()
