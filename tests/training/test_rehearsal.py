"""Networks, objectives, metrics and transforms that do not go together: refused in one line before
anything trains.

And odd networks that do: they train alike on every trainer.
"""

import sys
import warnings
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flrce import Experiment, run
from flrce.data.sources import Source
from flrce.errors import BadInput
from flrce.models.flat import convert_to_float32
from flrce.models.graph import build_layer_chain
from flrce.simulation import runs
from flrce.simulation.run_slot import DeviceSchedulers
from flrce.training.metrics import METRICS, TOKEN_METRICS, Metric, macro_f1
from flrce.training.objectives import NextToken

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 6)).astype(np.float32)
CLASSES = Source("made", X, (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0), tuple("abc"))
VALUES = Source("made", X, X[:, :2] + 1, (), kind="values")
IDS = rng.integers(0, 9, (60, 5))
TOKENS = Source("made", IDS, np.roll(IDS, -1, 1), tuple("abcdefghi"), kind="tokens")


def quick(**tables):
    usual = {
        "rounds": 2,
        "clients": 4,
        "per_round": 2,
        "recipe": {"name": "fedavg"},
        "data": {"partition": "iid"},
        "train": {"epochs": 1},
        "engine": {"workers": 1},
    }
    return Experiment(**{**usual, **tables})


class Answer(nn.Module):
    """A small network whose answer is put into some form."""

    def __init__(self, form=lambda z: z, outputs=3):
        super().__init__()
        self.inner, self.out, self.form = nn.Linear(6, 5), nn.Linear(5, outputs), form

    def forward(self, x):
        return self.form(self.out(torch.tanh(self.inner(x))))


@pytest.mark.parametrize(
    ("form", "line"),
    [
        (
            lambda z: (z.sum(), z),
            r"the loss of Classification cannot be .* gives a tuple of \(\), \(2, 3\)",
        ),
        (
            lambda z: {"a": z, "b": z},
            r"gives a dict of \(2, 3\), \(2, 3\) for targets \(2,\): .*; adapt the network",
        ),
        (lambda z: z[:, None], "adapt the network, or set another objective"),
    ],
)
def test_answers_that_the_objective_cannot_take(form, line):
    trained = []
    with pytest.raises(BadInput, match=line):
        run(quick(), data=CLASSES, model=Answer(form), watch=trained.append)
    assert not trained


@pytest.mark.parametrize("kernel", ["torch", "auto"])
def test_scores_alone_in_a_tuple_or_a_dict_are_taken_out(kernel):
    def model(form):
        torch.manual_seed(0)
        found = run(
            quick(engine={"workers": 1, "kernel": kernel}), data=CLASSES, model=Answer(form)
        )
        return found.model["inner.weight"]

    plain = model(lambda z: z)
    for form in (lambda z: (z, None), lambda z: {"logits": z}):
        torch.testing.assert_close(model(form), plain)


@pytest.mark.parametrize(
    ("objective", "data", "line"),
    [
        (
            {"name": "classification", "metrics": ["mae"]},
            CLASSES,
            "'mae' is about values, Classification about classes",
        ),
        (
            {"name": "regression", "metrics": ["accuracy"]},
            VALUES,
            "'accuracy' is about classes or tokens, Regression",
        ),
        ({"name": "regression"}, CLASSES, "gives 3 values a sample, the data has 1"),
        ({"name": "classification"}, VALUES, "loss of Classification cannot be taken of Answer"),
        (
            {"name": "classification", "weights": [1.0, 2.0]},
            CLASSES,
            "weights has 2 values for 3 classes",
        ),
        ("multi-label", CLASSES, "loss of MultiLabel cannot be taken"),
    ],
)
def test_objectives_and_metrics_that_do_not_fit(objective, data, line):
    with pytest.raises(BadInput, match=line):
        run(quick(objective=objective), data=data, model=Answer())


RIGHT = METRICS["accuracy"].of
BAD = {
    "named-loss": (
        Metric("loss", RIGHT),
        "'loss' is what the loss itself is called; give each metric a name",
    ),
    "nowhere": (
        Metric("up", RIGHT, better="up"),
        "'up' has better = 'up'; say 'higher' or 'lower'",
    ),
    "raising": (
        Metric("odds", RIGHT, lambda numbers: 1 / 0),
        r"metric 'odds' fails on \d+ samples: ZeroDivisionError",
    ),
    "nothing": (
        Metric("odds", RIGHT, lambda numbers: None),
        "'odds' fails on .*NaN where there is none",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_metrics_of_ones_own_that_fail_are_named(name, monkeypatch):
    metric, line = BAD[name]
    monkeypatch.setitem(sys.modules, "owned", SimpleNamespace(METRIC=metric))
    with pytest.raises(BadInput, match=line):
        run(quick(objective={"name": "classification", "metrics": ["owned:METRIC"]}), data=CLASSES)


def test_a_metric_is_named_once():
    with pytest.raises(BadInput, match="'accuracy' is there twice"):
        quick(objective={"name": "classification", "metrics": ["accuracy", "accuracy"]})


@pytest.mark.parametrize(
    ("transform", "data", "line"),
    [
        (
            "crop",
            CLASSES,
            r"train.augment: RandomCrop cannot take samples of shape \(6,\): .*; drop it",
        ),
        (
            "noise",
            TOKENS,
            r"train.augment: GaussianNoise makes torch.float32 \(5,\) of token ids; drop it",
        ),
    ],
)
def test_transforms_that_the_samples_are_not_for(transform, data, line):
    with pytest.raises(BadInput, match=line):
        run(quick(train={"augment": [transform]}), data=data)


def test_a_network_that_cannot_be_built_is_named(tmp_path, monkeypatch):
    (tmp_path / "unbuilt.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self, shape):\n        raise KeyError('half')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        BadInput, match=r"'unbuilt:Net' cannot be built with \{'shape': \(6,\)\}: KeyError: 'half'"
    ):
        run(quick(model={"name": "unbuilt:Net"}), data=CLASSES)


def test_batchnorm_without_statistics_judges_nobody_alone(caplog):
    def net(norm, *front):
        return nn.Sequential(*front, nn.Linear(6, 4), norm, nn.Linear(4, 3))

    with pytest.raises(BadInput, match=r"cannot judge a sample by itself: .*running statistics"):
        run(quick(), data=CLASSES, model=net(nn.BatchNorm1d(4, track_running_stats=False)))
    images = Source(
        "made", rng.normal(size=(60, 1, 4, 4)).astype(np.float32), CLASSES.y, CLASSES.classes
    )
    front = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False)
    run(quick(rounds=1), data=images, model=nn.Sequential(*front, nn.Flatten(), nn.Linear(8, 3)))
    assert any("judges a sample by those beside it" in line for line in caplog.messages)


def test_code_that_changes_its_samples_in_place_judges_each_alone(caplog):
    """The rehearsal looks at the same samples several times, and so must not hand them out to be
    changed.
    """

    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2))

    class Plain(nn.Linear):
        def forward(self, x):
            return super().forward(x * 2)

    found = []
    for kind in (Doubled, Plain):
        torch.manual_seed(0)
        found.append(run(quick(), data=CLASSES, model=kind(6, 3)).model["weight"])
    assert torch.equal(*found)
    assert "judges a sample by those beside it" not in caplog.text


def test_class_weights_may_be_asked_for_first_while_a_model_is_judged():
    """Clients that judge the model before they train, with weights that no test has used: they
    would be inference's.
    """
    weighted = {"name": "classification", "weights": [1.0, 2.25, 3.5]}
    done = run(
        quick(recipe={"name": "fedavg", "holdouts": True}, objective=weighted),
        data=CLASSES,
        model=Answer(),
    )
    assert len(done.history) == 2


def test_metrics_of_tokens_leave_out_what_does_not_count():
    out = torch.zeros(1, 3, 7)
    out[0, 0, 2] = out[0, 1, 1] = 1.0
    out[0, 1, 6] = -1.0
    y = torch.tensor([[2, 6, -100]])  # guessed; the last guess of seven; does not count
    assert (
        TOKEN_METRICS["accuracy"].value(TOKEN_METRICS["accuracy"].of(out, y).double().numpy())
        == 0.5
    )
    assert TOKEN_METRICS["top-5"].value(TOKEN_METRICS["top-5"].of(out, y).double().numpy()) == 0.5
    assert [
        judge.mean for judge in NextToken(metrics=("top-5", "accuracy")).evaluation_metrics
    ] == [False, False]
    pairs = np.array([[[2, 2], [1, 6], [0, -100]]])  # F1 of 2 is 1, of 1 and 6 it is 0: 1/3
    assert macro_f1(pairs) == pytest.approx(1 / 3)


# --- odd networks -------------------------------------------------------------------------------


class Scaled(Answer):
    """A parameter that is one number, one that is none, and one that nothing uses."""

    def __init__(self):
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return super().forward(x) * self.scale


class Normed(nn.Module):
    """A layer whose weight a hook makes, as torch's older functions do it."""

    def __init__(self, norm):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.inner = norm(nn.Linear(6, 5))
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.inner(x)))


class Cast(nn.Module):
    """Parameters of double precision, and code that asks them for theirs."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3).double()
        self.register_buffer("shift", torch.zeros(6, dtype=torch.float64))

    def forward(self, x):
        return self.out(x.to(self.out.weight.dtype) + self.shift)


class Tied(nn.Sequential):
    """Two layers with one weight: a chain would take them for two."""

    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        self[2].weight = self[0].weight


ODD = {
    "tied": Tied,
    "scaled": Scaled,
    "weight-norm": lambda: Normed(nn.utils.weight_norm),
    "spectral-norm": lambda: Normed(nn.utils.spectral_norm),
    "double": Cast,
}


@pytest.mark.parametrize("update", [{}, {"momentum": 0.9}])
@pytest.mark.parametrize("name", ODD)
def test_odd_networks_train_alike_everywhere(name, update):
    torch.manual_seed(0)
    net, found = ODD[name](), []
    for engine, schedulers in (
        ({"kernel": "torch"}, None),
        ({"kernel": "auto"}, None),
        ({}, DeviceSchedulers("cpu")),
    ):
        exp = quick(train={"epochs": 1, **update}, engine={"workers": 1, **engine})
        built = runs.build_simulation(exp, CLASSES, net, schedulers)
        with closing(built.engine):
            *_, last = built.iterate_rounds(exp)
            found.append(last.state.w)
    assert not torch.equal(found[0], built.initial_state().w)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


def test_hooks_are_no_chain():
    """A fused kernel would not call them."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    net[1].register_forward_hook(lambda layer, given, out: 2 * out)
    with pytest.raises(BadInput, match="Sequential has a hook at '1'"):
        build_layer_chain(net, (6,))


def test_complex_parameters_are_refused():
    class Phases(Answer):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.ones(6, dtype=torch.cfloat))

        def forward(self, x):
            return super().forward(F.relu((x * self.phase).real))

    with pytest.raises(BadInput, match="Phases has complex parameters; hold them as real ones"):
        run(quick(), data=CLASSES, model=Phases())


def test_what_travels_in_double_precision_becomes_single_in_a_copy(caplog):
    net = Cast()
    made = convert_to_float32(net)
    assert made.out.weight.dtype == made.shift.dtype == torch.float32
    assert net.out.weight.dtype == torch.float64
    assert (
        "Cast has float64 parameters or buffers: they train and travel as float32"
        in caplog.messages
    )
    assert convert_to_float32(made) is made


def test_clients_of_flower_that_hold_nothing_back_are_no_news(monkeypatch):
    figures, said = pytest.importorskip("flrce.flower.metrics"), []
    monkeypatch.setattr(figures.log, "warning", lambda *told: said.append(told))
    done = run(
        quick(data={"partition": "iid", "holdout": 0.0}, engine={"name": "flower"}), data=CLASSES
    )
    assert [h.last_model_metric for h in done.history] == [None, None]
    assert not said
