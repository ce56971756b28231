"""Losses and metrics passed as Python objects: instances, functions, torch modules."""

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score
from torch import nn
from torch.nn import functional as F

import flrce
from flrce.errors import BadInput
from flrce.training.given_objectives import GivenObjective, make_metrics
from flrce.training.metrics import METRICS

rng = np.random.default_rng(3)
X = rng.normal(size=(80, 4)).astype(np.float32)
Y = (X[:, 0] + X[:, 1] > 0).astype(np.int64)
TABLES = {"rounds": 2, "clients": 4, "per_round": 4, "data": {"partition": "iid"}, "seed": 1}
TABLES |= {"recipe": {"name": "fedavg"}, "model": {"name": "linear"}, "engine": {"kernel": "torch"}}


def run(out=None, resume=False, **given):
    return flrce.run(flrce.Experiment(**TABLES), out, resume, data=(X, Y), **given)


def mean_loss(out, y):
    return F.cross_entropy(out, y)


def sample_losses(out, y):
    return F.cross_entropy(out, y, reduction="none")


class Doubled:
    """An objective of the full form."""

    evaluation_metrics = (METRICS["accuracy"],)

    def losses(self, out, y):
        return 2 * F.cross_entropy(out, y, reduction="none")


def test_forms_of_one_loss_train_the_same_model():
    usual = run()
    for form in (
        mean_loss,
        sample_losses,
        lambda out, y: F.cross_entropy(out, y),
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.NLLLoss(),
    ):
        if isinstance(form, nn.NLLLoss):
            form = lambda out, y: nn.NLLLoss()(out.log_softmax(1), y)  # noqa: E731
        given = run(objective=form)
        assert given.summary["accuracy"] == usual.summary["accuracy"]
        assert given.history[-1].loss == pytest.approx(usual.history[-1].loss, rel=1e-5)
        for name, tensor in usual.model.items():
            torch.testing.assert_close(given.model[name], tensor, rtol=1e-5, atol=1e-6)


def test_an_instance_and_a_weighted_loss_differ_from_the_usual():
    usual = run().model
    assert not torch.equal(run(objective=Doubled()).model["1.weight"], usual["1.weight"])
    weighted = run(objective=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0])))
    named = flrce.Experiment(**TABLES, objective={"name": "classification", "weights": (1.0, 5.0)})
    expected = flrce.run(named, data=(X, Y)).model["1.weight"]
    torch.testing.assert_close(weighted.model["1.weight"], expected)


def test_the_loss_of_a_sample_is_that_of_a_batch_of_one():
    out, y = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    given = GivenObjective(mean_loss, ())
    torch.testing.assert_close(given.losses(out, y), sample_losses(out, y))
    training = out.clone().requires_grad_()
    given.losses(training, y).mean().backward()
    other = out.clone().requires_grad_()
    sample_losses(other, y).mean().backward()
    torch.testing.assert_close(training.grad, other.grad)


def macro_f1_by_sklearn(out, y):
    return f1_score(y, out.argmax(1), average="macro")


class Accumulated:
    """As the metrics of torchmetrics: reset, update, compute."""

    higher_is_better = True

    def reset(self):
        self.pairs = []

    def update(self, out, y):
        self.pairs.append((out.argmax(1), y))

    def compute(self):
        guessed, true = (torch.cat(part) for part in zip(*self.pairs, strict=True))
        return torch.tensor(balanced_accuracy_score(true, guessed))


def test_metrics_as_functions_and_objects():
    metrics = {"f1": macro_f1_by_sklearn, "balanced": Accumulated(), "accuracy": "accuracy"}
    result = run(metrics={k: v for k, v in metrics.items() if k != "accuracy"})
    assert result.history[-1].metric == "f1"
    ours = flrce.run(
        flrce.Experiment(**TABLES, objective={"name": "classification", "metrics": ["macro-f1"]}),
        data=(X, Y),
    )
    assert result.history[-1].metrics["f1"] == pytest.approx(
        ours.history[-1].metrics["macro-f1"], rel=1e-9
    )
    assert 0 < result.history[-1].metrics["balanced"] <= 1
    assert (
        run(objective=mean_loss, metrics=["accuracy", "macro-f1"]).history[-1].metric == "accuracy"
    )


def test_functions_get_outputs_and_targets_as_they_were():
    out, y = torch.randn(6, 2, 3), torch.randint(0, 9, (6, 4))
    seen = []
    (metric,) = make_metrics({"probe": lambda a, b: seen.append((a, b)) or a.sum()})
    value = metric.value(metric.of(out, y).numpy())
    torch.testing.assert_close(seen[0][0], out)
    assert torch.equal(seen[0][1], y)
    assert value == pytest.approx(float(out.sum()), rel=1e-5)


def test_directions_of_metrics(caplog):
    def absolute_error(out, y):
        return (out.argmax(1) - y).abs()

    def agreement(out, y):
        return out.argmax(1) == y

    assert [m.better for m in make_metrics([absolute_error, agreement])] == ["lower", "higher"]
    assert "absolute_error counts as better where lower" in caplog.text


def test_a_run_says_what_it_needs_to_go_on(tmp_path):
    run(tmp_path / "run", objective=mean_loss)
    kept = flrce.Experiment.load(tmp_path / "run" / "experiment.toml")
    assert kept.objective == "given:mean_loss"
    with pytest.raises(BadInput, match=r"mean_loss came from Python; pass them again: flrce\.run"):
        flrce.run(kept, tmp_path / "run", resume=True, data=(X, Y))
    again = run(tmp_path / "run", resume=True, objective=mean_loss)
    assert again.summary["rounds"] == 2
    assert flrce.load(tmp_path / "run").predict(X[:3]).values.shape == (3,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"objective": Doubled}, "the class Doubled; pass an instance"),
        ({"objective": 3}, "objective is a int; give an objective"),
        ({"objective": lambda out, y: 1.0}, "return a tensor"),
        ({"objective": lambda out, y: out[:3, :1]}, "return one value, or one per sample"),
        ({"metrics": [3]}, "give a name, a function of"),
        ({"metrics": ["acuracy"]}, "did you mean 'accuracy'"),
    ],
)
def test_mistakes_are_told(given, message):
    with pytest.raises(BadInput, match=message):
        run(**given)


def test_torchmetrics_as_they_are():
    torchmetrics = pytest.importorskip("torchmetrics")
    accuracy = torchmetrics.classification.MulticlassAccuracy(2, average="micro")
    result = run(metrics={"theirs": accuracy, "ours": METRICS["accuracy"]})
    last = result.history[-1].metrics
    assert last["theirs"] == pytest.approx(last["ours"], rel=1e-6)


def test_values_of_one_column_are_compared_one_by_one():
    """A network gives (n, 1), values are (n,): torch would compare each with all."""
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)).numpy()
    y = x[:, 0] * 3
    experiment = flrce.Experiment(rounds=2, clients=2, per_round=2, seed=1)

    def squared(out, y):
        assert out.shape == y.shape
        return (out - y).square().mean()

    def mean_absolute_error(out, y):
        assert out.shape == y.shape
        return (out - y).abs().mean()

    own = flrce.run(experiment, data=(x, y), objective=squared, metrics=mean_absolute_error)
    ours = flrce.run(experiment, data=(x, y))
    found = own.summary["metrics"]["mean_absolute_error"]
    assert found == pytest.approx(ours.summary["metrics"]["mae"], rel=1e-5)


def test_a_collection_of_metrics_is_a_dict_of_them():
    class Collection:  # as torchmetrics.MetricCollection
        def items(self):
            return [("hits", lambda out, y: (out.argmax(1) == y).float().mean())]

    assert [m.name for m in make_metrics(Collection())] == ["hits"]
