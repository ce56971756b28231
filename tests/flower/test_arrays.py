"""Any model of floats: scalars, float64 and float16 arrays, clients that widen or narrow; FedAvg is
the oracle.
"""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from safetensors.torch import load_file

from flrce.flower import FLrce, Guarded, RecipeStrategy, compressing, introduce
from flrce.flower.arrays import ALLOWED_DTYPES, make_array
from flrce.flower.grid import LocalGrid
from flrce.methods.catalogue import recipes

QUIET = {"wait_for_nodes": 5.0, "fraction_evaluate": 0.0}
STRATEGIES = {
    "recipe": lambda: RecipeStrategy(recipes.fedavg(3), **QUIET),
    "flrce": lambda: FLrce(**QUIET),
    "paper": lambda: FLrce(preset="paper", **QUIET),
    "authors": lambda: FLrce(preset="authors", **QUIET),
    "hardened": lambda: FLrce(preset="hardened", **QUIET),
    "median": lambda: RecipeStrategy(recipes.median(3), **QUIET),
    "guarded": lambda: Guarded(FedAvg(fraction_evaluate=0.0), **QUIET),
    "guarded adam": lambda: Guarded(FedAdam(fraction_evaluate=0.0), **QUIET),
}


def app(width=None, **options) -> ClientApp:
    """Adds about a tenth to every float; answers in another `width` where one is given."""
    made = ClientApp(**options)

    @made.train()
    def train(message, context):
        reply = {}
        for name, array in message.content["arrays"].items():
            value = array.numpy()
            if value.dtype.kind == "f":
                step = np.asarray(0.1 + 0.001 * context.node_config["partition-id"], value.dtype)
                value = np.asarray(value + step).astype(width or value.dtype)
            reply[name] = Array(value)
        metrics = MetricRecord({"num-examples": 3 + context.node_config["partition-id"]})
        return Message(
            RecordDict({"arrays": ArrayRecord(reply), "metrics": metrics}), reply_to=message
        )

    return made


def model(**arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def values(result):
    return {name: array.numpy() for name, array in result.arrays.items()}


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_scalars_train(name, tmp_path):
    """nn.Parameter(torch.tensor(2.65)) has no dimension; with a folder, so that it is written and
    read back too.
    """
    arrays = model(scale=np.float32(2.65), bias=np.ones(2, np.float32))
    strategy = STRATEGIES[name]()
    strategy.folder = tmp_path / "run"
    found = values(strategy.start(LocalGrid(app(), 3), arrays, 2))
    assert found["scale"].shape == ()
    assert found["scale"].dtype == np.float32
    assert 2.65 < float(found["scale"]) < 2.95
    kept = load_file(tmp_path / "run" / "model.safetensors")
    assert kept["scale"].shape == ()
    again = STRATEGIES[name]()
    again.folder = tmp_path / "run"
    assert np.array_equal(
        values(again.start(LocalGrid(app(), 3), arrays, 2))["scale"], found["scale"]
    )


@pytest.mark.parametrize("name", ["recipe", "guarded"])
@pytest.mark.parametrize("case", ["all", "one of three"])
def test_float64_keeps_its_digits(name, case):
    """Against FedAvg alone, to 1e-15; 1 + 1e-12 would be 1 in float32."""
    other = np.float64 if case == "all" else np.float32
    arrays = model(
        a=np.array([1 + 1e-12, 1e9 / 3, -1e-300]),
        b=np.array([0.5, 1 / 3], other),
        c=np.float64(np.pi),
    )
    alone = values(
        FedAvg(fraction_evaluate=0.0, min_available_nodes=3).start(LocalGrid(app(), 3), arrays, 3)
    )
    ours = values(STRATEGIES[name]().start(LocalGrid(app(), 3), arrays, 3))
    for key, value in alone.items():
        assert ours[key].dtype == value.dtype
        np.testing.assert_allclose(
            ours[key], value, rtol=1e-15 if value.dtype == np.float64 else 1e-6
        )


@pytest.mark.parametrize("name", ["recipe", "guarded", "flrce", "hardened", "authors", "median"])
def test_values_beyond_float32_stay(name, tmp_path):
    """1e300 in a float64 model: kept as it is, in the result and on the disk."""
    arrays = model(a=np.array([1e300, 1.0]), b=np.array([np.float32(1.0)]))
    strategy = STRATEGIES[name]()
    strategy.folder = tmp_path
    found = values(strategy.start(LocalGrid(app(), 3), arrays, 2))
    assert found["a"][0] == 1e300
    assert found["b"].dtype == np.float32
    kept = load_file(tmp_path / "model.safetensors")
    assert kept["a"].dtype == torch.float64
    assert float(kept["a"][0]) == 1e300
    assert kept["b"].dtype == torch.float32
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [len(line["replied"]) for line in rounds] == [3, 3]


@pytest.mark.parametrize("name", ["recipe", "flrce", "guarded"])
@pytest.mark.parametrize("width", ["float16", "float32", "float64"])
@pytest.mark.parametrize("own", ["float16", "float32", "float64"])
def test_clients_may_answer_in_another_width(name, width, own):
    """FedAvg takes them too. The model keeps its own width, and what really travelled is booked."""
    arrays = model(a=np.ones((2, 2), own), s=np.asarray(0.5, own), n=np.array([7]))
    result = STRATEGIES[name]().start(LocalGrid(app(width), 3), arrays, 2)
    found = values(result)
    assert {found[key].dtype for key in "as"} == {np.dtype(own)}
    assert found["n"].tolist() == [7]
    np.testing.assert_allclose(found["a"].astype(float), 1.2, atol=5e-3)
    assert [len(record.replied) for record in result.history] == [3, 3]
    assert result.history[0].bytes_up == 3 * 5 * np.dtype(width).itemsize
    assert result.history[0].bytes_down == 3 * 5 * np.dtype(own).itemsize


def test_a_float64_model_survives_the_mod():
    """Dense through `compressing`: the update travels as float64, so the run equals that of whole
    models.
    """
    arrays = model(a=np.array([1 + 1e-12, 1 / 3]))
    plain = STRATEGIES["recipe"]().start(LocalGrid(app(), 3), arrays, 2)
    encoded = STRATEGIES["recipe"]().start(
        LocalGrid(introduce(app(mods=[compressing])), 3), arrays, 2
    )
    assert np.array_equal(values(plain)["a"], values(encoded)["a"])
    assert encoded.history[0].bytes_up == 3 * 2 * 8


@pytest.mark.parametrize("name", ["flrce", "guarded"])
def test_floats_in_the_other_byte_order_are_read_as_fedavg_reads_them(name):
    """Arrays of files written on another machine keep its byte order in numpy."""
    arrays = model(w=np.arange(3.0).astype(">f4"), counts=np.array([2**63], np.uint64))
    found = values(STRATEGIES[name]().start(LocalGrid(app(">f4"), 3), arrays, 2))
    theirs = values(FedAvg(fraction_evaluate=0.0).start(LocalGrid(app(">f4"), 3), arrays, 2))
    assert found["w"].dtype == np.float32
    np.testing.assert_allclose(found["w"], theirs["w"], rtol=1e-6)
    assert found["counts"].tolist() == [2**63]  # whole numbers stay as they are


@pytest.mark.parametrize("dtype", sorted(ALLOWED_DTYPES))
def test_arrays_are_flowers_own_byte_for_byte(dtype):
    values = np.arange(12).reshape(3, 4).astype(dtype)
    for each in (values, values[1, 2], values[:0], values.T, values[:, ::2], values.reshape(-1)):
        each = np.asarray(each)
        ours, theirs = make_array(each), Array(np.asarray(each, order="C"))
        assert (ours.dtype, ours.shape, ours.stype) == (theirs.dtype, theirs.shape, theirs.stype)
        assert ours.data == theirs.data
