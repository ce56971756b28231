"""Bytes are counted by the tensors' own types, in every direction."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flrce import Compressor
from flrce.config.experiment import Experiment
from flrce.core.forecast import count_model_bytes, estimate_upload_bytes
from flrce.core.loop import make_initial_state, rounds
from flrce.core.payloads import make_encoding_stream
from flrce.core.pieces import NoCompression
from flrce.core.tensor_bytes import count_bytes, count_value_bytes
from flrce.core.types import Payload, PendingTask, Reply, Task
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.compression.sparsify import RandomK, TopK
from flrce.methods.compression.tensors import TensorDropout
from flrce.methods.stopping.budget import CostBudget
from flrce.models.flat import pack_model
from flrce.simulation import runs
from flrce_client.layout import count_floats


def test_bytes_are_counted_by_each_tensors_own_type():
    tensors = {
        "a": torch.zeros(3, dtype=torch.float64),
        "b": torch.zeros(5, dtype=torch.uint8),
        "c": torch.zeros(0),
    }
    assert count_bytes(tensors) == 29
    assert count_bytes(tensors.values()) == 29
    assert count_bytes(torch.zeros(2, 2, dtype=torch.float16)) == 8
    assert count_bytes({}) == count_bytes([]) == 0


def test_values_that_do_not_exist_yet_are_counted_by_the_type_they_will_have():
    assert count_value_bytes(10) == 40
    assert count_value_bytes(10, torch.float64) == 80


@dataclass(frozen=True)
class Signs(Compressor):
    """A user's compressor, of one bit for each coordinate, that does not say what its payload
    weighs.
    """

    def encode(self, u, layout, rng, carry):
        return Payload({"bits": torch.from_numpy(np.packbits((u > 0).numpy()))}), carry

    def decode(self, payload, layout, rng):
        bits = np.unpackbits(payload.buffers["bits"].numpy(force=True))[: count_floats(layout)]
        return torch.from_numpy(bits).float().mul(2).sub(1).mul(1e-3)


COMPRESSORS = [
    Quantizer(1),
    Quantizer(3),
    RotatedCode(1),
    RotatedCode(0.25),
    TopK(0.05),
    TopK(0.05, bits=4),
    TopK(0.5, "indices"),
    TopK(0.1, dense_bn=True),
    RandomK(0.2),
    TensorDropout(0.5),
    ErrorFeedback(TopK(0.1)),
    ErrorFeedback(NoCompression()),
    NoCompression(),
    Signs(),
    ErrorFeedback(Signs()),
]
SMALL = {"clients": 5, "per_round": 2, "train": {"epochs": 1}}


@pytest.fixture(scope="module")
def built():
    found = runs.build_simulation(Experiment(**SMALL))
    yield found
    found.engine.close()


def run(built, recipe, T):
    start = make_initial_state(recipe, built.engine, pack_model(built.net).clone())
    return [done.record for done in rounds(recipe, built.engine, start, T, 0)]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("k", [1, 3])
def test_a_budget_of_k_rounds_of_compressed_uploads_runs_k_rounds(built, compressor, k):
    recipe = replace(recipes.fedavg(2, epochs=1), compressor=compressor)
    spent = run(built, recipe, k)
    for unit, used in {
        "bytes": sum(h.bytes_up + h.bytes_down for h in spent),
        "joules": sum(h.joules for h in spent) * (1 + 1e-12),
        "seconds": sum(h.seconds for h in spent) * (1 + 1e-12),
    }.items():
        for more, expected in ((1.0, k), (0.999, k - 1)):
            history = run(built, replace(recipe, stop=CostBudget(**{unit: used * more})), k + 2)
            assert sum(h.outcome == "committed" for h in history) == expected, (unit, more)


@pytest.mark.parametrize("compressor", COMPRESSORS[:-2], ids=repr)
def test_a_compressor_knows_what_its_payload_will_weigh(compressor):
    layout = [("a.weight", 37), ("b.weight", 5), ("c.running_mean", 3), ("c.running_var", 3)]
    for t in range(1, 6):
        task = Task("a", 0, t, seed=0, compressor=compressor)
        payload, _ = compressor.encode(torch.randn(48), layout, make_encoding_stream(task), {})
        assert estimate_upload_bytes(task, layout, 42) == payload.nbytes


def test_an_estimate_that_is_no_number_of_bytes_is_refused():
    class Odd(Signs):
        def estimate_bytes(self, layout, rng):
            return "many"

    with pytest.raises(BadInput, match=r"Odd\.estimate_bytes returned 'many'"):
        estimate_upload_bytes(Task("a", 0, 1, 0, compressor=Odd()), [("a", 3)], 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int8], ids=str)
def test_what_goes_with_a_task_and_comes_with_a_reply_is_booked_by_its_own_type(built, dtype):
    engine = built.engine
    plain = Task(engine.clients()[0], 0, 1, seed=0, compressor=NoCompression())
    more = replace(plain, tensors={"mean": torch.zeros(50, dtype=dtype)})
    size = 50 * dtype.itemsize
    assert engine.estimate(more).bytes_down - engine.estimate(plain).bytes_down == size
    reply = Reply(
        plain.client,
        1,
        Payload({"u": torch.zeros(3)}),
        extras={"extra": torch.zeros(50, dtype=dtype)},
    )
    spent = engine.costs.book_costs([PendingTask(more, torch.zeros(3))], [reply])[0].spent
    assert spent.bytes_down == engine.model_bytes + size
    assert spent.bytes_up == 12 + size


def test_a_loss_inquiry_is_booked_as_the_engine_sends_the_model():
    class Plain:
        model_bytes = None

    class Half:
        model_bytes = 6

    assert count_model_bytes(Plain(), torch.zeros(3, dtype=torch.float64)) == 24
    assert count_model_bytes(Half(), torch.zeros(3)) == 6


#: files that compute with the width of a number for another reason than what travels: buffers in
#: memory, a file's layout, the header of a received array
OTHER_WIDTHS = {
    "core/tensor_bytes.py",
    "flower/arrays.py",
    "models/llama.py",
    "storage/tensor_file.py",
}


def test_bytes_that_travel_are_counted_in_one_place():
    package = Path(runs.__file__).parents[1]
    by_hand = re.compile(r"element_size\(|\.itemsize|\b4 \* (D|d|size|self\.size|len\()\b")
    layers = ("core", "devices", "flower", "methods", "models", "simulation", "storage")
    found = {
        str(path.relative_to(package))
        for layer in layers
        for path in (package / layer).rglob("*.py")
        if by_hand.search(path.read_text())
    }
    assert found - {"core/tensor_bytes.py"} <= OTHER_WIDTHS
