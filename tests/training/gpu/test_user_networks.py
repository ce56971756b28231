"""Networks as users write them, small: every variant against plain torch in float64."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_variants import compare, made
from torch import Tensor, nn
from torch.nn import functional as F

import flrce
from flrce import Experiment
from flrce.errors import BadInput
from flrce.models.flat import convert_to_float32, pack_model
from flrce.training.gpu.batch_trainer import ClientBatchTrainer
from flrce.training.gpu.variants import Variant
from flrce.training.objectives import Classification, NextToken, Regression

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import others

#: (small network, what it sees: images, series, ids, ids with a target after each, a table)
NETS = {
    "vit": (lambda: others.ViT(8, 1, 2, patch=8), "images"),
    "tied gpt": (lambda: others.TiedGPT(8, 1), "tokens"),
    "convnext": (lambda: others.convnext(4), "images"),
    "mobile": (lambda: others.mobile(4), "images"),
    "tcn": (lambda: others.TCN(5), "series"),
    "both ways": (lambda: others.BiLSTM(5), "ids"),
    "llama": (lambda: others.llama(8, 1), "tokens"),
    "autoencoder": (lambda: others.autoencoder(2), "values"),
    "instance": (lambda: others.instance(3), "images"),
    "bag": (lambda: others.bag(5), "ids"),
    "squeeze": (lambda: others.squeeze(4), "images"),
    "dense": (lambda: others.dense(2), "images"),
    "wide": (lambda: others.wide(4), "images"),
    "inertial": (lambda: others.inertial(4), "series"),
    "gru": (lambda: others.GRUSeries(5), "series"),
    "mixer": (lambda: others.Mixer(6, 1), "images"),
    "twice": (lambda: others.Twice(8), "images"),
    "strided": (lambda: others.strided(3), "images"),
    "table": (lambda: others.Tabular(6), "table"),
}


def undropped(net: nn.Module) -> nn.Module:
    """Which values a plain loop drops is no lane's: here none are."""
    for layer in net.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    return net


def samples(kind: str) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(2)
    y = torch.randint(0, 10, (20,), generator=rng)
    if kind == "table":
        return others.table(20, rng), y
    if kind in ("ids", "tokens"):
        x = torch.randint(0, others.TOKENS, (20, 12), generator=rng)
        return x, x.roll(-1, 1) if kind == "tokens" else y
    x = torch.randn(20, *(others.SERIES if kind == "series" else (3, 32, 32)), generator=rng)
    return x, x.flatten(1) if kind == "values" else y


@pytest.mark.parametrize("name", NETS)
def test_every_variant_is_a_plain_loop(name: str) -> None:
    make, kind = NETS[name]
    objective = {"tokens": NextToken(), "values": Regression()}.get(kind, Classification())
    net = undropped(made(make))
    used = compare(net, *samples(kind), objective, tolerance=2e-3, lanes=[[4, 3], [5, 2, 3], [6]])
    assert "columns" in used


@pytest.mark.parametrize("name", ["instance", "tied gpt", "convnext"])
def test_coarser_products_meet_code_of_ones_own(name: str) -> None:
    """What a layer gives is bfloat16 then, what stands beside it float32."""
    make, kind = NETS[name]
    objective = NextToken() if kind == "tokens" else Classification()
    net, variants = undropped(made(make)), [Variant.COLUMNS, Variant.DIRECT]
    used = compare(
        net, *samples(kind), objective, variants, "bf16", tolerance=0.2, lanes=[[4, 3], [5]]
    )
    assert len(used) == len(variants)


class Plain(nn.Module):
    """Layers by name, and a function of the network and x that uses them."""

    def __init__(self, code, **parts) -> None:
        super().__init__()
        self.code = code
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def elman(net: Plain, x: Tensor) -> Tensor:
    """Time first, both ways, from a state of its own."""
    states, last = net.cells(x.permute(2, 0, 1), net.first.expand(-1, x.shape[0], -1))
    return net.head(states[-1] + last[0].repeat(1, 2))


def tied(net: Plain, x: Tensor) -> Tensor:
    """A decoder that is the encoder's matrix, used by a function; a BatchNorm between them."""
    inner = torch.tanh(net.norm(net.a(x.flatten(1))))
    return net.head(F.linear(inner, net.a.weight.t()))


def listed(net: Plain, x: Tensor) -> Tensor:
    """Parameters in a list, and a scale that is a single number."""
    return net.head(torch.tanh(net.scale * (x.flatten(1) @ net.some[0] + net.some[1])))


def biased(net: Plain, x: Tensor) -> Tensor:
    """Attention with a bias for each pair of positions."""
    q = x.transpose(1, 2)
    return net.head(F.scaled_dot_product_attention(q, net.key(q), q, attn_mask=net.bias).mean(1))


def crossed(net: Plain, x: Tensor) -> Tensor:
    """Learnt queries, time first, and keys that are hidden for some samples; a mask for pairs of
    positions.
    """
    keys = net.keys(x.permute(2, 0, 1))  # (L, B, E)
    hidden = x[:, 0] > 1.5
    hidden[:, 0] = False
    some = torch.zeros(3, keys.shape[0], dtype=torch.bool, device=x.device)
    some[0, -1] = True
    query = net.query.expand(-1, x.shape[0], -1)
    return net.head(
        net.attention(query, keys, keys, key_padding_mask=hidden, attn_mask=some)[0].sum(0)
    )


def stepping(net: Plain, x: Tensor) -> Tensor:
    """Time counted by the network's own code."""
    state = None
    for t in range(x.shape[2]):
        state = net.cell(x[:, :, t], state)
    return net.head(state[0] if isinstance(state, tuple) else state)


def looking(net: Plain, x: Tensor) -> Tensor:
    """Uses how much attention each position got."""
    places = x.transpose(1, 2)
    seen, shares = net.attention(places, places, places)
    return net.head((seen * shares.sum(1)[:, :, None]).mean(1))


def old_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return convert_to_float32(nn.utils.weight_norm(layer))


CODES = {
    "elman": lambda: Plain(
        elman,
        cells=nn.RNN(3, 4, 2, bidirectional=True),
        first=nn.Parameter(torch.rand(4, 1, 4)),
        head=nn.Linear(8, 10),
    ),
    "tied": lambda: Plain(tied, a=nn.Linear(21, 6), norm=nn.BatchNorm1d(6), head=nn.Linear(21, 10)),
    "listed": lambda: Plain(
        listed,
        some=nn.ParameterList([torch.randn(21, 5), torch.zeros(5)]),
        scale=nn.Parameter(torch.tensor(0.5)),
        head=nn.Linear(5, 10),
    ),
    "biased": lambda: Plain(
        biased, key=nn.Linear(3, 3), bias=nn.Parameter(torch.randn(7, 7)), head=nn.Linear(3, 10)
    ),
    "crossed": lambda: Plain(
        crossed,
        keys=nn.Linear(3, 4),
        query=nn.Parameter(torch.randn(3, 1, 4)),
        attention=nn.MultiheadAttention(4, 2),
        head=nn.Linear(4, 10),
    ),
    "old weight norm": lambda: nn.Sequential(
        old_norm(nn.Conv1d(3, 4, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(20, 10)
    ),
    "orthogonal": lambda: nn.Sequential(
        nn.Flatten(),
        nn.utils.parametrizations.orthogonal(nn.Linear(21, 5)),
        nn.Tanh(),
        nn.Linear(5, 10),
    ),
    "transposed series": lambda: nn.Sequential(
        nn.ConvTranspose1d(3, 6, 4, 3, 2, 1, groups=3, dilation=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6 * 22, 10),
    ),
    "layer under two names": lambda: Plain(
        lambda net, x: net.head(net.b(torch.tanh(net.a(x.flatten(1))))),
        **dict.fromkeys("ab", nn.Linear(21, 21)),
        head=nn.Linear(21, 10),
    ),
    "sum of a bag": lambda: Plain(
        lambda net, x: net.head(net.words((x[:, 0].abs() * 2).long())),
        head=nn.Linear(4, 10),
        words=nn.EmbeddingBag(20, 4, mode="sum", padding_idx=0),
    ),
    **{
        kind.__name__: lambda kind=kind: Plain(stepping, cell=kind(3, 4), head=nn.Linear(4, 10))
        for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)
    },
    "attention's weights": lambda: Plain(
        looking, attention=nn.MultiheadAttention(3, 1, batch_first=True), head=nn.Linear(3, 10)
    ),
    "parameters by name": lambda: Plain(
        lambda net, x: x.flatten(1) @ net.some["a"] + net.some["b"],
        some=nn.ParameterDict({"a": torch.randn(21, 10), "b": torch.zeros(10)}),
    ),
    "RMS over two dimensions": lambda: nn.Sequential(
        nn.RMSNorm((3, 7)), nn.Flatten(), nn.Linear(21, 10)
    ),
}


@pytest.mark.parametrize("name", CODES)
def test_code_that_uses_tensors_of_its_own(name: str) -> None:
    rng = torch.Generator().manual_seed(4)
    x, y = torch.randn(20, 3, 7, generator=rng), torch.randint(0, 10, (20,), generator=rng)
    used = compare(made(CODES[name]), x, y, tolerance=1e-3, lanes=[[4, 3], [5, 2, 3], [6]])
    assert "columns" in used


def functional(net: Plain, x: Tensor) -> Tensor:
    return net.head(F.dropout(torch.relu(net.a(x.flatten(1))), 0.5, net.training))


def attentive(net: Plain, x: Tensor) -> Tensor:
    q = net.a(x.transpose(1, 2)) + net.place
    seen = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5 * net.training, is_causal=True)
    return net.head(seen.mean(1))


def time_first(net: Plain, x: Tensor) -> Tensor:
    return net.head(net.drop(net.cells(x.permute(2, 0, 1))[0]).mean(0))


DROPPING = {
    "function": lambda: Plain(functional, a=nn.Linear(21, 8), head=nn.Linear(8, 10)),
    "attention": lambda: Plain(attentive, a=nn.Linear(3, 4), place=nn.Parameter(torch.zeros(4)), head=nn.Linear(4, 10)),
    "time first": lambda: Plain(time_first, cells=nn.LSTM(3, 4, 2, dropout=0.5), drop=nn.Dropout(0.5),
                                head=nn.Linear(4, 10)),
    "encoder": lambda: Plain(lambda net, x: net.head(net.layers(x.permute(2, 0, 1) + net.token).mean(0)),
                             token=nn.Parameter(torch.zeros(3)), head=nn.Linear(3, 10),
                             layers=nn.TransformerEncoderLayer(3, 1, 6, dropout=0.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPPING)
def test_what_is_dropped_hangs_on_the_lane_alone(name: str) -> None:
    """In whatever way it is asked for: the same alone and among others, something else with another
    seed.
    """
    rng = torch.Generator().manual_seed(4)
    x, y = torch.randn(20, 3, 7, generator=rng), torch.randint(0, 10, (20,), generator=rng)
    net = made(DROPPING[name])
    stack, w = ClientBatchTrainer(net, (3, 7), x, y, 1.0, 0.0, "cpu"), pack_model(net).repeat(3, 1)
    orders, sizes = [np.arange(8)] * 3, [np.array([4, 4])] * 3
    both = stack.train(w, orders, sizes, 0.5, seeds=[5, 6, 5], variant=Variant.COLUMNS)[0]
    torch.testing.assert_close(both[0], both[2])
    assert (both[1] - both[0]).norm() > 1e-3 * both[0].norm()
    one = stack.train(w[:1], orders[:1], sizes[:1], 0.5, seeds=[6], variant=Variant.COLUMNS)[0]
    torch.testing.assert_close(one[0], both[1], rtol=1e-4, atol=1e-5)
    first, again = (stack.evaluate(w, np.arange(9))["loss"] for _ in range(2))
    assert torch.equal(first, again)


def test_what_drops_in_evaluation_is_no_lane() -> None:
    """F.dropout drops in evaluation too unless it is told; lanes would draw another time each."""
    net = Plain(lambda net, x: net.a(F.dropout(x.flatten(1))), a=nn.Linear(21, 10))
    with pytest.raises(BadInput, match="draws at random"):
        ClientBatchTrainer(
            net, (3, 7), torch.randn(20, 3, 7), torch.zeros(20, dtype=torch.int64), 1.0, 0.0, "cpu"
        )


@pytest.mark.parametrize(
    ("name", "remedy"), [("tcn", "data.layout = 'series'"), ("bag", "data.layout = 'tokens'")]
)
def test_what_x_was_taken_for_is_told(name: str, remedy: str) -> None:
    """Three axes are grey images and whole numbers are numbers, unless somebody says otherwise."""
    make, kind = NETS[name]
    with pytest.raises(BadInput, match=f"cannot take float32 samples .*; .*{remedy}"):
        flrce.run(
            Experiment(rounds=1, clients=2, per_round=1), data=samples(kind), model=made(make)
        )


class Counter(nn.Module):
    """Statistics of its own that no sample is in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(21, 10)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.n.add_(1.0)
        return self.head(x.flatten(1)) * (1 + 0.1 * self.n)


def test_statistics_of_a_lane_that_has_finished_stand_still() -> None:
    """Of seven lanes five go on, in a step of six."""
    rng = torch.Generator().manual_seed(4)
    x, y = torch.randn(20, 3, 7, generator=rng), torch.randint(0, 10, (20,), generator=rng)
    assert "columns" in compare(made(Counter), x, y, tolerance=1e-3, lanes=[[4, 3]] * 5 + [[3]] * 2)


def test_weights_that_a_pass_changes_are_no_lanes() -> None:
    net = Plain(
        lambda net, x: net.words((x[:, 0].abs() * 2).long()).mean(1),
        words=nn.Embedding(20, 10, max_norm=1.0),
    )
    with pytest.raises(BadInput, match="changes its weights as it runs"):
        ClientBatchTrainer(
            net, (3, 7), torch.randn(20, 3, 7), torch.zeros(20, dtype=torch.int64), 1.0, 0.0, "cpu"
        )
