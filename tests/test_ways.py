"""Every way to train lanes, on networks of every kind, against plain torch in float64."""

import copy
from math import inf

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
from flrce.simulation.variant_choice import PLAIN_LOOP, VariantCache, find_fastest, load_variants
from flrce.training.gpu.batched import drop_values
from flrce.training.gpu.stack import ClientBatchTrainer
from flrce.training.gpu.variants import Variant
from flrce.training.objectives import Classification, NextToken

IDS, L = 11, 5
HOW = ("columns", "rows", "direct", "grouped", "each")
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
    ways=None,
    precision="float32",
    tolerance: float = 2e-4,
    lanes=SIZES,
) -> list[str]:
    """Every way that the network can go against plain(); the names of those ways. `lanes`: sizes of
    their batches.
    """
    rng = np.random.default_rng(0)
    sizes = [np.array(s) for s in lanes]
    orders = [rng.integers(0, len(x), s.sum()) for s in sizes]
    w, gone = starts(net, len(lanes)), []
    stack = ClientBatchTrainer(
        net, tuple(x.shape[1:]), x, y, 1.0, 0.0, "cpu", objective=objective, precision=precision
    )
    expected = [
        plain(net, w[i], x, y, orders[i], sizes[i], 0.1, objective) for i in range(len(lanes))
    ]
    for way in ways or stack.ways:
        try:
            stack.get_network(way)
        except BadInput:
            continue
        out = stack.train(w, orders, sizes, 0.1, way=way)[0]
        assert torch.equal(out, stack.train(w, orders, sizes, 0.1, way=way)[0])
        for i, update in enumerate(expected):
            error = (out[i].double() - w[i].double() - update).norm() / update.norm()
            assert error < tolerance, (str(way), i, float(error))
        gone.append(str(way))
    return gone


@pytest.mark.parametrize("name", TOKENS)
def test_networks_for_tokens(name: str) -> None:
    make, every = TOKENS[name]
    gone = compare(made(make), *samples(every), NextToken() if every else Classification())
    assert {"folded:columns", "single:1", "single:4"} <= set(gone)


@pytest.mark.parametrize("name", IMAGES)
def test_residual_networks(name: str) -> None:
    gone = compare(made(IMAGES[name]), *samples(None))
    assert {"folded:columns", "folded:rows", "folded:grouped", "folded:each", "single:1"} <= set(
        gone
    )


def test_series() -> None:
    gone = compare(made(lambda: TimeSeriesCNN(2, 3, 4)), *samples(None, (2, 9)))
    assert {"folded:columns", "folded:rows", "folded:grouped", "folded:each", "single:1"} <= set(
        gone
    )


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
    ways = [Variant("folded", kind) for kind in ("columns", "rows", "grouped", "each")] + [
        Variant("single")
    ]
    lanes = [[4, 3], [7, 5]]  # BatchNorm cannot train on one sample
    assert len(compare(net, x, y, ways=ways, tolerance=1e-3, lanes=lanes)) == 5


def test_blocks_may_be_frozen_in_every_way() -> None:
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
    chained = stack.train(w, orders, sizes, 0.1, first=1, way=Variant("chain"))[0]
    for way in (Variant("folded", "each"), Variant("single")):
        out = stack.train(w, orders, sizes, 0.1, first=1, way=way)[0]
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
    both = stack.train(w, orders, sizes, 0.1, seeds=[5, 2**62, 5], way=Variant("folded"))[0]
    for i, seed in enumerate((5, 2**62, 5)):
        for way in (Variant("folded"), Variant("single", streams=4)):
            one = stack.train(w[i : i + 1], orders[:1], sizes[:1], 0.1, seeds=[seed], way=way)[0]
            torch.testing.assert_close(one[0], both[i], rtol=1e-5, atol=1e-6)
    other = stack.train(w[:1], orders[:1], sizes[:1], 0.1, seeds=[6], way=Variant("folded"))[0]
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
    ways = [Variant("folded"), Variant("single")]
    assert len(compare(made(make), *samples(every), objective, ways, "bf16", tolerance=0.05)) == 2


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


@pytest.mark.parametrize(
    "text", ["chain", *(f"folded:{how}" for how in HOW), "mapped", "single:4", "folded:rows:2"]
)
def test_a_way_has_a_name(text: str) -> None:
    assert str(Variant.from_text(text)) == text


@pytest.mark.parametrize(
    "text", ["", "folded", "folded:x", "folded:rows:3", "single:0", "single:-1", "chain:2"]
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="no way"):
        Variant.from_text(text)


def test_the_fastest_way_that_works_is_chosen() -> None:
    def fails() -> float:
        raise RuntimeError("out of memory")

    tries = [
        ("chain", fails),
        ("mapped", lambda: 2.0),
        ("single:1", lambda: 1.0),
        (PLAIN_LOOP, lambda: 3.0),
    ]
    assert find_fastest(tries) == (
        "single:1",
        {"chain": inf, "mapped": 2.0, "single:1": 1.0, PLAIN_LOOP: 3.0},
    )
    assert find_fastest([("chain", fails)])[0] == PLAIN_LOOP


def test_choices_last(tmp_path) -> None:
    file = tmp_path / "deep" / "ways.json"
    one, two = VariantCache(file), VariantCache(file)
    assert one.find_variant("a") is None
    assert one.remember_variant("a", "single:4") == "single:4"
    assert two.remember_variant("a", "mapped") == "single:4"  # of two that chose at once, the first
    assert VariantCache(file).find_variant("a") == "single:4"
    resumed = VariantCache(file)
    resumed.adopt_variants({"a": "mapped", "b": "loop", "c": "no way", "d": 3})
    assert [resumed.find_variant(key) for key in "abcd"] == ["mapped", "loop", None, None]
    file.write_text("[")
    assert VariantCache(file).find_variant("a") is None


def test_a_folder_that_cannot_be_written_to_costs_only_the_memory(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    choices = VariantCache(tmp_path / "file" / "ways.json")
    assert choices.remember_variant("a", "mapped") == "mapped"
    assert choices.find_variant("a") == "mapped"


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


def test_a_run_keeps_its_ways_and_brings_them_along(tmp_path, monkeypatch) -> None:
    """A resumed run goes the way it went, whatever the machine's own file says by then."""
    from flrce.config.experiment import Experiment
    from flrce.simulation import gpu_scheduler, runs

    monkeypatch.setenv("FLRCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ClientBatchTrainer, "fixed_variant", None)  # measure, though this is a CPU
    picked = iter(["single:4"])
    monkeypatch.setattr(
        gpu_scheduler,
        "find_fastest",
        lambda tries: (next(picked), {"single:4": 1.0, PLAIN_LOOP: 2.0}),
    )
    exp = Experiment(
        rounds=2, clients=4, per_round=2, train={"epochs": 1}, model={"name": "own_nets:Smooth"}
    )

    def go(rounds: int, folder: str, resume: bool = False):
        each = exp.model_copy(update={"rounds": rounds})
        return runs.run_together([(each, tmp_path / folder)], resume, device="cpu")[0]

    whole = go(2, "a")
    assert set(load_variants(tmp_path / "a").values()) == {"single:4"}
    go(1, "b")
    cached = tmp_path / "cache" / "ways.json"
    cached.write_text(cached.read_text().replace("single:4", "mapped"))
    again = go(2, "b", resume=True)
    assert all(torch.equal(whole.model[name], again.model[name]) for name in whole.model)
    assert set(load_variants(tmp_path / "b").values()) == {"single:4"}


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
        assert "fused kernels know float32" in caplog.text
        assert 0 < float((w - v).norm() / w.norm()) < 0.05
    with pytest.raises(BadInput, match=r"engine\.precision"):
        Experiment(**tables, engine={"precision": "fp8"})


def test_what_is_worth_a_measurement() -> None:
    x, y = samples(None)
    stack = ClientBatchTrainer(made(IMAGES["resnet"]), (2, 6, 6), x, y, 1.0, 0.0, "cpu")
    assert [str(way) for way in stack.variants_to_time(10) if way.kind != "folded"] == [
        "single:4",
        "single:16",
    ]
    assert [str(way) for way in stack.variants_to_time(1) if way.kind != "folded"] == ["single:1"]
    assert "folded:rows:2" in map(str, stack.variants_to_time(10))
    assert "folded:rows:2" not in map(str, stack.variants_to_time(6))  # three lanes fill no stream


def test_groups_side_by_side_train_as_one_does() -> None:
    """Ten lanes in two groups of five give what each gives in one group, up to rounding."""
    x, y = samples(None)
    net = made(IMAGES["resnet"])
    stack = ClientBatchTrainer(net, (2, 6, 6), x, y, 1.0, 0.0, "cpu")
    w = pack_model(net).repeat(10, 1)
    orders = [np.random.default_rng(i).integers(0, len(x), 7) for i in range(10)]
    sizes = [np.array([4, 3])] * 10
    one = stack.train(w, orders, sizes, 0.1, way=Variant.from_text("folded:rows")).w
    two = stack.train(w, orders, sizes, 0.1, way=Variant.from_text("folded:rows:2")).w
    assert sorted({mode.lanes for mode, _ in stack._benches}) == [
        5,
        12,
    ]  # a group's five; a shape for ten
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
