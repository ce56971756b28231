"""Every variant of client batches, on networks of every kind, against plain torch in float64."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.models.flat import make_layout, pack_model, unpack_model
from flrce.models.gpt import GPT
from flrce.models.resnet import ResNet
from flrce.models.sequences import RecurrentNetwork, TimeSeriesCNN
from flrce.training.gpu.batch_trainer import ClientBatchTrainer
from flrce.training.gpu.operations import drop_values
from flrce.training.gpu.variants import Variant, list_candidate_variants
from flrce.training.objectives import Classification, NextToken

IDS, L = 11, 5
SIZES = [[4, 3], [2], [4, 4, 1]]


class Encoder(nn.Module):
    """torch's own transformer layer, behind learnt positions that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(IDS, 8, padding_idx=0), nn.Embedding(L, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places(torch.arange(L, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(
            L, device=ids.device, dtype=places.dtype
        )
        return self.head(self.layers(self.tokens(ids) + places, mask)[:, -1])


class Sideways(nn.Module):
    """A bidirectional GRU that takes time first, with a state of its own to begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.cells = nn.Embedding(IDS, 4), nn.GRU(4, 6, 2, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).transpose(0, 1)
        first = x.new_full((4, x.shape[1], 6), 0.1)
        states, last = self.cells(x, first)
        return self.head(states[-1] + last[0].repeat(1, 2))


class Scaled(nn.Module):
    """A layer of the user's with a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


class Tied(nn.Module):
    """One matrix for two layers, a norm of the user's, and a base that is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.base = (
            nn.Embedding(IDS, 6),
            Scaled(6),
            nn.Linear(6, 6).requires_grad_(False),
        )
        self.head = nn.Linear(6, IDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.base(self.tokens(ids)).tanh()))


TOKENS = {
    "gpt": (lambda: GPT(IDS, IDS, L, True, 2, 8, 2), True),
    "lstm": (lambda: RecurrentNetwork(IDS, 3, embedding=3, width=5), False),
    "gru": (lambda: RecurrentNetwork(IDS, IDS, True, "gru", embedding=3, width=5), True),
    "sideways": (Sideways, False),
    "encoder": (Encoder, False),
    "tied": (Tied, True),
}
IMAGES = {
    "resnet": lambda: ResNet(2, 3, (8, 16), 1),
    "resnet-bn": lambda: ResNet(2, 3, (8, 16), 1, "batch"),
}


def samples(every: bool | None, shape: tuple[int, ...] = (2, 6, 6)) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(2)
    if every is None:
        return torch.rand(20, *shape, generator=rng), torch.randint(0, 3, (20,), generator=rng)
    y = torch.randint(0, IDS if every else 3, (20, L) if every else (20,), generator=rng)
    return torch.randint(0, IDS, (20, L), generator=rng), y


def made(make) -> nn.Module:
    torch.manual_seed(0)
    return make()


def starts(net: nn.Module, lanes: int) -> Tensor:
    rng = torch.Generator().manual_seed(3)
    w = pack_model(net)
    return w * (1 + 0.1 * torch.rand(lanes, len(w), generator=rng))


def plain(
    net: nn.Module, w: Tensor, x: Tensor, y: Tensor, order, sizes, lr: float, objective
) -> Tensor:
    """One client in torch's own layers and autograd, in float64; the update (size,)."""
    net = unpack_model(copy.deepcopy(net).double().train(), w.double())
    for index in np.split(order, np.cumsum(sizes)[:-1]):
        batch = x[index] if x.dtype == torch.int64 else x[index].double()
        learning = [p for p in net.parameters() if p.requires_grad]
        grads = torch.autograd.grad(objective.losses(net(batch), y[index]).mean(), learning)
        with torch.no_grad():
            for p, g in zip(learning, grads, strict=True):
                p -= lr * g
    parts = [p for p in net.parameters() if p.requires_grad] + [
        b for b in net.buffers() if b.is_floating_point()
    ]
    return torch.cat([p.detach().reshape(-1) for p in parts]) - w.double()


def compare(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    objective=Classification(),
    variants=None,
    precision="float32",
    tolerance: float = 2e-4,
    lanes=SIZES,
) -> list[str]:
    """Every variant that supports the network against plain(); the names of those variants.
    `lanes`: sizes of their batches.
    """
    rng = np.random.default_rng(0)
    sizes = [np.array(s) for s in lanes]
    orders = [rng.integers(0, len(x), s.sum()) for s in sizes]
    w, used = starts(net, len(lanes)), []
    stack = ClientBatchTrainer(
        net, tuple(x.shape[1:]), x, y, 1.0, 0.0, "cpu", objective=objective, precision=precision
    )
    expected = [
        plain(net, w[i], x, y, orders[i], sizes[i], 0.1, objective) for i in range(len(lanes))
    ]
    for variant in variants or stack.candidates:
        if not stack.supports(variant):
            continue
        out = stack.train(w, orders, sizes, 0.1, variant=variant)[0]
        assert torch.equal(out, stack.train(w, orders, sizes, 0.1, variant=variant)[0])
        for i, update in enumerate(expected):
            error = (out[i].double() - w[i].double() - update).norm() / update.norm()
            assert error < tolerance, (str(variant), i, float(error))
        used.append(str(variant))
    return used


@pytest.mark.parametrize("name", TOKENS)
def test_networks_for_tokens(name: str) -> None:
    make, every = TOKENS[name]
    used = compare(made(make), *samples(every), NextToken() if every else Classification())
    assert used == ["columns"]


@pytest.mark.parametrize("name", IMAGES)
def test_residual_networks(name: str) -> None:
    assert compare(made(IMAGES[name]), *samples(None)) == ["columns"]


def test_series() -> None:
    assert "columns" in compare(made(lambda: TimeSeriesCNN(2, 3, 4)), *samples(None, (2, 9)))


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    """Layers of all kinds in a row over images of 2 x 6 x 6, with a shortcut around some."""
    layers: list[nn.Module] = []
    channels, side = 2, 6
    for _ in range(draw(st.integers(1, 3))):
        groups = draw(st.sampled_from([1, 2]))
        width, kernel = 2 * draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3]))
        stride, dilation = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
        padding = draw(st.sampled_from([0, 1]))
        after = (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        if after < 2:
            break
        mode = draw(st.sampled_from(["zeros", "replicate"]))
        layers.append(
            nn.Conv2d(
                channels,
                width,
                kernel,
                stride,
                padding,
                dilation,
                groups,
                draw(st.booleans()),
                mode,
            )
        )
        norm = draw(st.sampled_from([nn.Identity, nn.BatchNorm2d, lambda c: nn.GroupNorm(1, c)]))
        layers += [norm(width), draw(st.sampled_from([nn.Tanh, nn.GELU, nn.SiLU]))()]
        channels, side = width, after
        if side > 3 and draw(st.booleans()):
            layers.append(nn.AvgPool2d(2))
            side //= 2
    norm = draw(
        st.sampled_from([nn.Identity, nn.LayerNorm])
    )  # BatchNorm of two samples blows rounding up
    flat = channels * side * side
    return nn.Sequential(
        *layers, nn.Flatten(), norm(flat) if norm is not nn.Identity else norm(), nn.Linear(flat, 3)
    )


@given(networks(), st.integers(0, 99))
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
def test_random_networks(net: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for p in net.parameters():
        nn.init.normal_(p, 0.3, 0.3)
    x, y = samples(None)
    lanes = [[4, 3], [7, 5]]  # BatchNorm cannot train on one sample
    variants = [Variant.COLUMNS, Variant.DIRECT]  # without Triton `direct` computes as `columns`
    used = compare(net, x, y, variants=variants, tolerance=1e-3, lanes=lanes)
    assert used == ["columns", "direct"]


def test_blocks_may_be_frozen_in_every_variant() -> None:
    net = made(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3),
            nn.BatchNorm2d(3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(48, 4),
            nn.Tanh(),
            nn.Linear(4, 3),
        )
    )
    x, y = samples(None)
    stack, w = ClientBatchTrainer(net, (2, 6, 6), x, y, 1.0, 0.0, "cpu"), starts(net, 2)
    orders, sizes = [np.arange(6), np.arange(5)], [np.array([3, 3]), np.array([5])]
    chained = stack.train(w, orders, sizes, 0.1, first=1, variant=Variant.CHAIN)[0]
    out = stack.train(w, orders, sizes, 0.1, first=1, variant=Variant.COLUMNS)[0]
    torch.testing.assert_close(out, chained, rtol=1e-5, atol=1e-6)
    head = make_layout(net)["4.weight"].offset
    assert torch.equal(out[:, :head], w[:, :head])


def test_what_is_dropped_depends_on_the_lane_alone() -> None:
    net = made(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(72, 32), nn.Dropout(0.4), nn.ReLU(), nn.Linear(32, 3)
        )
    )
    x, y = samples(None)
    stack, w = ClientBatchTrainer(net, (2, 6, 6), x, y, 1.0, 0.0, "cpu"), starts(net, 3)
    orders, sizes = [np.arange(8)] * 3, [np.array([4, 4])] * 3
    both = stack.train(w, orders, sizes, 0.1, seeds=[5, 2**62, 5])[0]
    for i, seed in enumerate((5, 2**62, 5)):
        one = stack.train(w[i : i + 1], orders[:1], sizes[:1], 0.1, seeds=[seed])[0]
        torch.testing.assert_close(one[0], both[i], rtol=1e-5, atol=1e-6)
    other = stack.train(w[:1], orders[:1], sizes[:1], 0.1, seeds=[6])[0]
    assert not torch.allclose(other[0], both[0], atol=1e-4)
    assert torch.equal(
        stack.evaluate(w, np.arange(9))["loss"], stack.evaluate(w, np.arange(9))["loss"]
    )


def test_a_share_is_dropped_and_the_mean_stays() -> None:
    x = torch.ones(2, 100, 200)
    y = drop_values(x, 0.3, torch.tensor([1, 2]), torch.tensor([7]), 0)
    for lane in y:  # 20,000 draws: standard deviation of the share 0.0032
        assert float((lane == 0).float().mean()) == pytest.approx(0.3, abs=0.015)
        assert float(lane.mean()) == pytest.approx(1.0, abs=0.03)
    assert float(((y[0] == 0) & (y[1] == 0)).float().mean()) == pytest.approx(
        0.09, abs=0.015
    )  # independent
    channels = drop_values(
        torch.ones(1, 50, 8, 3, 3), 0.5, torch.tensor([1]), torch.tensor([0]), 0, channels=True
    )
    assert bool((channels.flatten(3) == channels[..., :1, 0]).all())


@pytest.mark.parametrize("name", ["gpt", "lstm", "gru"])
def test_bfloat16_stays_near(name: str) -> None:
    make, every = TOKENS[name]
    objective = NextToken() if every else Classification()
    assert compare(made(make), *samples(every), objective, None, "bf16", tolerance=0.05)


def test_bfloat16_is_lower_than_float32() -> None:
    net, (x, y) = made(IMAGES["resnet"]), samples(None)
    w, orders, sizes = starts(net, 2), [np.arange(4)] * 2, [np.array([4])] * 2
    out = [
        ClientBatchTrainer(net, (2, 6, 6), x, y, 1.0, 0.0, "cpu", precision=p).train(
            w, orders, sizes, 0.1
        )[0]
        for p in ("float32", "bf16")
    ]
    assert out[1].dtype == torch.float32
    assert 1e-5 < (out[1] - out[0]).norm() / (out[0] - w).norm() < 0.3


def test_layers_decide_which_variants_may_suit() -> None:
    gpt, mlp = GPT(11, 11, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    cnn = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    chain, columns, direct = Variant.CHAIN, Variant.COLUMNS, Variant.DIRECT
    for net, is_chain, has_triton, expected in [
        (gpt, False, True, [direct, columns]),
        (gpt, False, False, [columns]),
        (mlp, True, True, [chain, columns]),  # a linear layer has one row per sample
        (mlp, False, True, [direct, columns]),
        (cnn, True, True, [chain, direct, columns]),
    ]:
        assert list_candidate_variants(net, is_chain, has_triton) == expected


def test_orders_drawn_anew_are_left_to_the_trainer() -> None:
    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(72, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            return self.head(x[:, torch.randperm(72)] if self.training else x)

    x, y = samples(None)
    with pytest.raises(BadInput, match="Drawn draws at random without a layer that says so"):
        ClientBatchTrainer(Drawn(), (2, 6, 6), x, y, 1.0, 0.0, "cpu")


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_precision_is_a_setting(precision: str, caplog) -> None:
    from flrce.config.experiment import Experiment
    from flrce.simulation import runs

    tables = {
        "rounds": 2,
        "clients": 6,
        "per_round": 3,
        "train": {"epochs": 1},
        "model": {"name": "mlp"},
    }
    plain = runs.run(Experiment(**tables, engine={"kernel": "torch", "workers": 1}))
    found = runs.run(
        Experiment(
            **tables,
            engine={
                "precision": precision,
                "kernel": "auto" if precision == "bf16" else "torch",
                "workers": 1,
            },
        )
    )
    w, v = (torch.cat([x.flatten() for x in each.model.values()]) for each in (plain, found))
    assert v.dtype == torch.float32
    if precision == "tf32":
        assert "is a GPU's" in caplog.text
        assert torch.equal(w, v)
    else:
        assert "the fast kernels support float32 only" in caplog.text
        assert 0 < float((w - v).norm() / w.norm()) < 0.05
    with pytest.raises(BadInput, match=r"engine\.precision"):
        Experiment(**tables, engine={"precision": "fp8"})


def fused_cnn(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36 * channels, 3),
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 3)), ["chain", "columns"]),
        (lambda: fused_cnn(64), ["chain", "direct", "columns"]),  # fused throughout
        (lambda: fused_cnn(65), ["direct", "columns"]),  # too wide for the fused kernels
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3)), ["direct", "columns"]),
        (IMAGES["resnet"], ["direct", "columns"]),
    ],
)  # fmt: skip
def test_a_rule_prefers_variants_where_triton_runs(make, expected: list[str], monkeypatch) -> None:
    from flrce.training.gpu import batch_trainer

    monkeypatch.setattr(batch_trainer, "supports_triton", lambda device: True)
    x, y = samples(None)
    stack = ClientBatchTrainer(made(make), (2, 6, 6), x, y, 1.0, 0.0, "cpu")
    assert stack.candidates == expected
    assert stack.default_variant == expected[0]


def test_a_variant_that_fails_leaves_the_next_one_and_a_line(monkeypatch, caplog) -> None:
    from flrce.training.gpu import batch_trainer

    build = ClientBatchTrainer._build_network

    def build_without_triton(self, variant):
        if variant is Variant.DIRECT:
            raise BadInput("a kernel does not compile")
        return build(self, variant)

    monkeypatch.setattr(batch_trainer, "supports_triton", lambda device: True)
    monkeypatch.setattr(ClientBatchTrainer, "_build_network", build_without_triton)
    x, y = samples(None)
    stack = ClientBatchTrainer(made(IMAGES["resnet"]), (2, 6, 6), x, y, 1.0, 0.0, "cpu")
    assert stack.default_variant is Variant.COLUMNS
    assert "ResNet: no client batch by direct kernels: a kernel does not compile" in caplog.text
    assert len(caplog.records) == 1
