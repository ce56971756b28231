"""Networks with several inputs: tuples, dicts, data sets of them, HuggingFace-style batches."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import flrce
from flrce.data.fields import pack_fields, unpack_fields
from flrce.data.user import to_source
from flrce.errors import BadInput

rng = np.random.default_rng(5)
IMAGES = rng.integers(0, 255, (48, 1, 4, 4)).astype(np.uint8)
TABLE = rng.normal(size=(48, 3)).astype(np.float32)
IDS = rng.integers(0, 11, (48, 5))
MASK = rng.integers(0, 2, (48, 5)).astype(bool)
Y = (TABLE[:, 0] > 0).astype(np.int64)
TABLES = {"rounds": 2, "clients": 3, "per_round": 3, "data": {"partition": "iid"}, "seed": 4}
TABLES |= {"recipe": {"name": "fedavg"}}


class ImageAndTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.pixels, self.numbers = nn.Linear(16, 4), nn.Linear(3, 4)
        self.last = nn.Linear(8, 2)

    def forward(self, image, table):
        assert image.shape[1:] == (1, 4, 4)
        assert float(image.max()) <= 1
        parts = [self.pixels(image.flatten(1)), self.numbers(table)]
        return self.last(torch.cat(parts, 1).relu())


class Encoder(nn.Module):
    """As networks of transformers: named inputs, an output with logits among others."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(11, 6), nn.Linear(6, 2)

    def forward(self, input_ids, attention_mask=None):
        assert input_ids.dtype == torch.int64
        assert attention_mask.dtype == torch.bool
        hidden = (self.embedding(input_ids) * attention_mask[..., None]).sum(1)
        return {"hidden": hidden, "logits": self.last(hidden)}


class Items(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 48

    def __getitem__(self, i):
        return self.make(i)


def run(data, model, out=None):
    torch.manual_seed(0)
    return flrce.run(flrce.Experiment(**TABLES), out, data=data, model=model())


def test_packed_inputs_come_apart_as_they_were():
    x, fields = pack_fields({"image": IMAGES, "ids": IDS, "mask": MASK, "t": TABLE}, "data")
    image, ids, mask, table = unpack_fields(torch.from_numpy(x), fields)
    torch.testing.assert_close(image, torch.from_numpy(IMAGES) / 255)
    assert torch.equal(ids, torch.from_numpy(IDS))
    assert torch.equal(mask, torch.from_numpy(MASK))
    assert torch.equal(table, torch.from_numpy(TABLE))


def test_two_tensors_in_every_form_train_the_same_model(tmp_path, caplog):
    caplog.set_level(logging.INFO, "flrce")
    first = run(((IMAGES, TABLE), Y), ImageAndTable, tmp_path / "run")
    assert "the fast kernels take networks with one input" in caplog.text
    assert sorted(first.model) == sorted(ImageAndTable().state_dict())  # names are the network's
    named = {"image": torch.from_numpy(IMAGES), "table": TABLE}
    forms = [
        (named, Y),
        Items(lambda i: ((torch.from_numpy(IMAGES[i]), TABLE[i]), Y[i])),
        Items(lambda i: ({"image": IMAGES[i], "table": TABLE[i]}, Y[i])),
        Items(lambda i: {"image": IMAGES[i], "table": TABLE[i], "label": Y[i]}),
    ]
    for form in forms:
        for name, tensor in run(form, ImageAndTable).model.items():
            assert torch.equal(tensor, first.model[name])
    model = flrce.load(tmp_path / "run", model=ImageAndTable())
    plain = ImageAndTable()
    plain.load_state_dict(first.model)
    with torch.no_grad():
        expected = plain(torch.from_numpy(IMAGES[:7]) / 255, torch.from_numpy(TABLE[:7]))
    predicted = model.predict((IMAGES[:7], TABLE[:7]))
    np.testing.assert_allclose(predicted.probabilities, expected.softmax(1), rtol=1e-5)


def test_named_inputs_with_masks_and_logits(tmp_path):
    data = Items(lambda i: {"input_ids": IDS[i], "attention_mask": MASK[i], "labels": int(Y[i])})
    source = to_source(data, target="labels")
    assert [field.kind for field in source.preprocessing.fields] == ["integer", "boolean"]
    result = run(source, Encoder, tmp_path / "run")
    model = flrce.load(tmp_path / "run", model=Encoder())
    batch = {"input_ids": IDS[:4], "attention_mask": MASK[:4]}
    plain = Encoder()
    plain.load_state_dict(result.model)
    with torch.no_grad():
        out = plain(**{key: torch.from_numpy(value) for key, value in batch.items()})
    np.testing.assert_allclose(
        model.predict(batch).probabilities, out["logits"].softmax(1), rtol=1e-5
    )
    with pytest.raises(BadInput, match="lacks the input 'attention_mask'"):
        model.predict({"input_ids": IDS[:4]})


def test_an_objective_may_use_all_outputs():
    def loss(out, y):
        return nn.functional.cross_entropy(out["logits"], y) + 1e-3 * out["hidden"].square().mean()

    class Right:
        name, better = "right", "higher"

        def of(self, out, y):
            return (out["logits"].argmax(1) == y).float()

        def value(self, numbers):
            return float(numbers.mean())

    data = ({"input_ids": IDS, "attention_mask": MASK}, Y)
    result = flrce.run(
        flrce.Experiment(**TABLES), data=data, model=Encoder(), objective=loss, metrics=Right()
    )
    assert result.history[-1].metric == "right"


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ({"a": TABLE, "b": IDS[:40]}, "different numbers of samples: a 48, b 40"),
        ({"a": TABLE, "b": np.array(["x"] * 48)}, "give numbers or token ids"),
        ({"a": np.full((48, 1), 2**30)}, r"beyond 2\*\*24"),
    ],
)
def test_mistakes_are_told(x, message):
    with pytest.raises(BadInput, match=message):
        to_source((x, Y))


class DictBatch(ImageAndTable):
    def forward(self, batch):
        return super().forward(batch["image"], batch["table"]), batch["table"]


class TupleBatch(ImageAndTable):
    def forward(self, batch):
        image, table = batch
        return super().forward(image, table)


def test_networks_that_take_one_dict_or_tuple_train_the_same_model(tmp_path, caplog):
    first = run(((IMAGES, TABLE), Y), ImageAndTable)
    named = Items(lambda i: {"image": IMAGES[i], "table": TABLE[i], "labels": int(Y[i])})
    for data, network in (
        (({"image": IMAGES, "table": TABLE}, Y), DictBatch),
        (named, DictBatch),  # "labels" is the label, as in transformers
        (((IMAGES, TABLE), Y), TupleBatch),
    ):
        for name, tensor in run(data, network).model.items():
            assert torch.equal(tensor, first.model[name])
    assert "DictBatch gives 2 outputs; the first is its scores" in caplog.text
    run(named, DictBatch, tmp_path / "run")
    model = flrce.load(tmp_path / "run", model=DictBatch())
    assert len(model.predict({"image": IMAGES[:3], "table": TABLE[:3]}).values) == 3


def test_a_network_that_cannot_take_its_inputs_is_told_which():
    message = r"ImageAndTable cannot take the inputs 0 \(3,\) float, 1 \(1, 4, 4\) pixels"
    with pytest.raises(BadInput, match=message):
        run(((TABLE, IMAGES), Y), ImageAndTable)
