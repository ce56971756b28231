"""Networks of one's own as newcomers write them: each trains, or one line says what is wrong with
it.
"""

import logging

import pytest
import torch
from torch import nn

import flrce
from flrce.models.graph import build_layer_chain

SMALL = {
    "rounds": 2,
    "clients": 4,
    "per_round": 2,
    "engine": {"workers": 1},
    "train": {"epochs": 1, "batch": 64},
}


def run(net, **more):
    return flrce.run(flrce.Experiment(**{**SMALL, **more}), model=net)


class Answer(nn.Module):
    """Digits through one layer; `how` is what forward makes of its scores."""

    def __init__(self, how, **more):
        super().__init__()
        self.layer, self.how = nn.Linear(64, 10), how
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.how(self, self.layer(x.flatten(1)))


def test_nothing_to_train_is_refused():
    for net in (nn.Flatten(), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)):
        with pytest.raises(flrce.BadInput, match="no parameter that trains"):
            run(net)


def test_a_network_that_returns_nothing_is_refused():
    with pytest.raises(flrce.BadInput, match="gives a NoneType; let its forward return scores"):
        run(Answer(lambda self, scores: None))


def test_scores_beside_nothing():
    assert run(Answer(lambda self, scores: (scores, None))).summary["rounds"] == 2


@pytest.mark.parametrize("model", [nn.Linear, "mlp"])
def test_what_is_no_network_is_refused(model):
    with pytest.raises(flrce.BadInput, match="give a network, such as"):
        run(model)


def test_lazy_layers_get_their_sizes_from_the_data_and_values_from_the_seed():
    def lazy():
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))

    given = lazy()
    first = run(given).model["1.weight"]
    assert first.shape == (10, 64)
    assert isinstance(given[1], nn.LazyLinear)  # what was handed over stays as it is
    assert torch.equal(first, run(lazy()).model["1.weight"])
    with pytest.raises(flrce.BadInput, match="has lazy layers and cannot take the samples"):
        run(nn.Sequential(nn.LazyConv3d(4, 3)))


def test_a_softmax_at_the_end_is_told_of(caplog):
    with caplog.at_level(logging.WARNING, "flrce"):
        run(Answer(lambda self, scores: scores.softmax(1)))
    assert "leave the softmax at its end out" in caplog.text
    caplog.clear()
    run(Answer(lambda self, scores: scores.log_softmax(1)))  # the loss of these is the same
    assert "leave the softmax" not in caplog.text


def test_looking_at_a_network_leaves_it_as_it_was():
    """A forward that sets its own buffers: torch.fx would leave its proxies behind."""

    def moving(self, scores):
        self.mean = 0.9 * self.mean + 0.1 * scores.detach().mean(0)
        return scores

    net = Answer(moving)
    net.register_buffer("mean", torch.zeros(10))
    with pytest.raises(flrce.BadInput):
        build_layer_chain(net, (1, 8, 8))
    assert torch.equal(net.mean, torch.zeros(10))
    assert run(net).model["mean"].abs().sum() > 0


class Counting(nn.Module):
    """Its buffers are replaced and counted up, so that what one client leaves behind would show at
    the next.
    """

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 10), nn.BatchNorm1d(10, momentum=None)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.seen = self.seen + self.steps
        return self.norm(self.layer(x.flatten(1)))


def test_no_client_goes_on_with_anothers_buffers():
    torch.manual_seed(0)
    net = Counting()
    alone = run(
        net,
        engine={"workers": 1},
        rounds=1,
        recipe={"name": "fedavg"},
        train={"epochs": 1, "batch": 10**6},
    )
    assert alone.model["seen"] == 1  # one batch a client, each from zero: 0 + 1
    for workers in (1, 3):
        found = run(net, engine={"workers": workers}, clients=6, per_round=4).model
        if workers == 1:
            first = found
    assert all(torch.equal(first[key], found[key]) for key in first)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_batchnorm_and_batches_of_one(kernel):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))
    with pytest.raises(flrce.BadInput, match=r"no variance for BatchNorm; raise train.batch"):
        run(net, train={"batch": 1}, engine={"workers": 1, "kernel": kernel})


def test_what_a_network_raises_in_a_worker_says_where():
    def late(self, scores):
        if (
            self.training
            and self.layer.weight.grad_fn is None
            and scores.requires_grad
            and len(scores) > 2
        ):
            raise RuntimeError("not this batch")
        return scores

    where = (
        r"shape \(\d+, 1, 8, 8\): RuntimeError: not this batch \(in late, test_networks.py line"
        r" \d+\)"
    )
    with pytest.raises(flrce.BadInput, match=where) as caught:
        run(Answer(late))
    assert "in late" in "".join(caught.value.__notes__)


def test_a_file_instead_of_a_module_is_told():
    with pytest.raises(flrce.BadInput, match=r'a module is named, not a file: write "mine:make"'):
        flrce.run(flrce.Experiment(**SMALL, model={"name": "mine.py:make"}))


def test_options_are_named_where_a_class_wants_more(tmp_path, monkeypatch):
    (tmp_path / "wantsmore.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self, hidden):\n       "
        " super().__init__()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        flrce.BadInput, match=r"'hidden'; accept shape, .* give the rest in model.options"
    ):
        flrce.run(flrce.Experiment(**SMALL, model={"name": "wantsmore:Net"}))


def test_a_mean_instead_of_each_samples_loss_is_named(tmp_path, monkeypatch):
    (tmp_path / "meanloss.py").write_text(
        "from torch.nn import functional as F\nfrom flrce.training.metrics import"
        " METRICS\n\n\nclass Mean:\n    evaluation_metrics = (METRICS['accuracy'],)\n\n    def losses(self,"
        " out, y):\n        return F.cross_entropy(out, y)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        flrce.BadInput, match=r"Mean losses gave a tensor of \(\), not one value for each sample"
    ):
        flrce.run(flrce.Experiment(**SMALL, recipe={"name": "fedavg"}, objective="meanloss:Mean"))


class Causal(nn.Module):
    """A mask of -inf as a buffer, as transformers have it, beside BatchNorm's statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)
        self.register_buffer("mask", torch.full((16, 16), -torch.inf).triu(1))

    def forward(self, x):
        h = torch.relu(self.norm(self.first(x.flatten(1))))
        return self.last(h @ torch.softmax(self.mask, 1))


@pytest.mark.parametrize("engine", ["simulator", "flower"])
def test_a_mask_of_infinities_is_no_statistic(engine):
    """It is a constant of the network: it neither travels nor gets every reply refused as not
    finite.
    """
    given = flrce.Experiment(
        rounds=2,
        clients=4,
        per_round=2,
        recipe={"name": "fedavg"},
        engine={"name": engine, "workers": 1},
    )
    found = flrce.run(given, model=Causal())
    assert [len(h.replied) for h in found.history] == [2, 2]
    floats = 64 * 16 + 16 + 2 * 16 + 2 * 16 + 16 * 10 + 10  # without the mask's 256
    assert found.history[0].bytes_down == 2 * 4 * floats
    assert torch.equal(found.model["mask"], Causal().mask)
