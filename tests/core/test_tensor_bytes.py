"""Large vectors: memory that is used again once it is free, tables that replies are written into,
sums in one pass.
"""

from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce.core import linalg, tensor_bytes
from flrce.core.gate import validate_replies
from flrce.core.payloads import ReplyContext
from flrce.core.pieces import NoCompression
from flrce.core.sketch import RotatedSketch
from flrce.core.types import Payload, Reply, Task

MANY = tensor_bytes.MIN_POOLED_BYTES // 4  # floats that are worth keeping


def test_memory_is_used_again_once_nobody_holds_on_to_it():
    tensor_bytes.free_unused_buffers()
    first = tensor_bytes.allocate_tensor(2, MANY)
    row, where = first[1], first.data_ptr()
    del first
    other = tensor_bytes.allocate_tensor(2, MANY)  # a row of the first is still in use
    assert other.data_ptr() != where
    other.zero_()
    row.fill_(1)
    assert not other.any()
    view = row.numpy()
    del row
    assert tensor_bytes.allocate_tensor(2, MANY).data_ptr() not in (where, other.data_ptr())
    del view
    taken = {tensor_bytes.allocate_tensor(2, MANY).data_ptr()}
    taken |= {
        x.data_ptr()
        for x in (tensor_bytes.allocate_tensor(2, MANY), tensor_bytes.allocate_tensor(2, MANY))
    }
    assert where in taken
    del other
    tensor_bytes.free_unused_buffers()
    assert not tensor_bytes._blocks


def test_kinds_and_sizes():
    assert tensor_bytes.allocate_tensor(3, dtype=torch.int64).dtype == torch.int64
    assert tensor_bytes.allocate_tensor(0, MANY).shape == (0, MANY)
    wide = tensor_bytes.allocate_tensor(MANY, dtype=torch.float64)
    assert wide.dtype == torch.float64
    assert wide.shape == (MANY,)
    assert tensor_bytes.allocate_like(wide).dtype == torch.float64
    with mock.patch.object(tensor_bytes, "MAX_POOLED_BYTES", tensor_bytes.MIN_POOLED_BYTES):
        kept = len(tensor_bytes._blocks)
        assert tensor_bytes.allocate_tensor(2, MANY).shape == (2, MANY)
        assert len(tensor_bytes._blocks) == kept
        tensor_bytes.free_unused_buffers()
        kept = len(tensor_bytes._blocks)
        table = tensor_bytes.allocate_tensor(
            2, MANY, most=tensor_bytes.MAX_POOLED_TABLE_BYTES
        )  # one of replies is kept up to a size of its own
        assert len(tensor_bytes._blocks) == kept + 1
        where = table.data_ptr()
        del table
        assert (
            tensor_bytes.allocate_tensor(
                2, MANY, most=tensor_bytes.MAX_POOLED_TABLE_BYTES
            ).data_ptr()
            == where
        )


@given(
    st.lists(
        st.sampled_from(["in place", "elsewhere", "refused", "silent"]), min_size=1, max_size=6
    )
)
def test_a_table_gives_the_same_updates(kinds):
    """Replies written into the table, beside it, or refused: those that passed, one row each, in
    the order of k.
    """
    D = 5
    tasks = [Task(f"c{k}", k, 1, 0, compressor=NoCompression()) for k in range(len(kinds))]
    values = [torch.arange(D) + 10.0 * k + 1 for k in range(len(kinds))]
    table = torch.full((len(kinds), D), torch.nan)

    def replies(with_table):
        for task, kind, u in zip(tasks, kinds, values, strict=True):
            if kind == "silent":
                continue
            at = table[task.k].copy_(u) if with_table and kind != "elsewhere" else u.clone()
            yield Reply(task.client, 1, Payload({"u": at}), n=0 if kind == "refused" else 7)

    def through(table):
        return validate_replies(
            tasks,
            list(replies(table is not None)),
            ReplyContext(lambda task: (None, [("w", D)]), D, D, table=table),
        )

    plain, why = through(None)
    tabled, same = through(table)
    assert torch.equal(tabled.U, plain.U)
    assert torch.equal(tabled.k, plain.k)
    assert same == why
    assert not len(tabled.U) or tabled.U.data_ptr() == table.data_ptr()


@given(st.integers(1, 7), st.integers(1, 60), st.integers(1, 3), st.integers(0, 2**32))
def test_turned_sums_are_those_of_plain_loops(k, d, rows, seed):
    """To the bit: block by block, in their order."""
    rng = np.random.default_rng(seed)
    offsets, signs = rng.integers(0, k, -(-d // k)), rng.choice([-1, 1], d)
    X = torch.from_numpy(rng.normal(size=(rows, d)).astype(np.float32))
    found = torch.zeros(rows, 2 * k)
    for i in range(d):
        found[:, int(offsets[i // k]) + i % k] += X[:, i] * int(signs[i])
    S = RotatedSketch(k, torch.from_numpy(offsets), torch.from_numpy(signs.astype(np.int8)))
    assert torch.equal(S(X), found[:, :k] + found[:, k:])


def test_products_of_long_updates():
    U = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    with (
        mock.patch.object(linalg, "LARGE_MODEL_FLOATS", 100),
        mock.patch.object(linalg, "LARGE_CHUNK_COLUMNS", 64),
    ):
        assert torch.allclose(linalg.gram_matrix(U), U.double() @ U.double().T, rtol=1e-13)
