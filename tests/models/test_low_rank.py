"""FedPara: weights as Hadamard products of low-rank factors, in any network."""

import json
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flrce
from flrce import Experiment
from flrce.core.types import Task
from flrce.errors import BadInput
from flrce.inference.export import export_network
from flrce.models.adapters import LoRA, add_lora_adapters
from flrce.models.low_rank import (
    HadamardConvolution,
    HadamardLinear,
    choose_rank,
    factorize_network,
    has_low_rank_layers,
)
from flrce.models.nets import build_network
from flrce.simulation import runs
from flrce.simulation.build import build_simulation
from training import assert_resumes


def test_ranks_by_hand():
    # r_min = 8; 2 R 128 < 4096 up to R = 15; at gamma 0.1: 8.7, rounded up
    linear = nn.Linear(64, 64)
    assert [choose_rank(linear, gamma) for gamma in (0.0, 0.1, 1.0)] == [8, 9, 15]
    # r_min = 8; 2 R (128 + 9 R) < 36,864 up to R = 38: 2 * 38 * 470 = 35,720
    assert [choose_rank(nn.Conv2d(64, 64, 3), gamma) for gamma in (0.0, 1.0)] == [8, 38]
    assert choose_rank(nn.Linear(64, 2), 0.5) == 0  # r_min = 2 has 264 floats, W has 128
    assert choose_rank(nn.Conv2d(3, 64, 3), 0.5) == 0
    assert choose_rank(nn.Conv2d(64, 64, 3, groups=2), 0.5) == 0
    assert choose_rank(nn.Linear(64, 64).requires_grad_(False), 0.5) == 0


def test_a_linear_layer_is_a_plain_loop():
    layer = HadamardLinear(nn.Linear(5, 4), 2, torch.Generator().manual_seed(1))
    W = torch.zeros(4, 5)
    for i in range(4):
        for j in range(5):
            first = sum(layer.X1[i, r] * layer.Y1[j, r] for r in range(2))
            W[i, j] = first * sum(layer.X2[i, r] * layer.Y2[j, r] for r in range(2))
    x = torch.randn(3, 5)
    assert torch.allclose(layer(x), x @ W.T + layer.bias, atol=1e-6)


def test_a_convolution_is_a_plain_loop():
    base = nn.Conv2d(4, 3, (3, 2), stride=2, padding=1, dilation=(1, 2))
    layer = HadamardConvolution(base, 2, torch.Generator().manual_seed(1))
    W = torch.zeros(3, 4, 6)
    for o in range(3):
        for i in range(4):
            parts = []
            for T, X, Y in ((layer.T1, layer.X1, layer.Y1), (layer.T2, layer.X2, layer.Y2)):
                parts.append(sum(T[r, s] * X[o, r] * Y[i, s] for r in range(2) for s in range(2)))
            W[o, i] = parts[0] * parts[1]
    x = torch.randn(2, 4, 9, 9)
    expected = F.conv2d(x, W.view(3, 4, 3, 2), base.bias, 2, 1, (1, 2))
    assert torch.allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize("layer", [nn.Linear(256, 256), nn.Conv2d(64, 64, 3), nn.Conv1d(64, 64, 5)])
def test_weights_begin_as_large_as_they_were(layer):
    torch.manual_seed(0)
    low = factorize_network(nn.Sequential(layer), 0.1, seed=3)[0]
    assert float(low.weight.detach().std()) == pytest.approx(
        float(layer.weight.detach().std()), rel=0.25
    )
    assert low.weight.shape == layer.weight.shape
    assert torch.equal(low.bias, layer.bias)


def test_products_may_have_full_rank():
    low = factorize_network(nn.Linear(64, 64), 0.0)
    assert sum(p.numel() for p in (low.X1, low.Y1, low.X2, low.Y2)) == 2 * 8 * 128
    assert int(torch.linalg.matrix_rank(low.weight.double())) == 64  # 8 squared


def test_floats_of_the_papers_network_by_hand():
    """The CIFAR-10 CNN, layer by layer; biases and norms are as they were."""
    net = build_network("cnn-cifar", (3, 32, 32), 10, 0)
    low = factorize_network(net, 0.0)
    expected = 0
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            rank = choose_rank(layer, 0.0)
            out, inside, *kernel = layer.weight.shape
            k = kernel[0] * kernel[1] if kernel else 0
            factors = 2 * rank * (out + inside + rank * k)
            assert not rank or factors < layer.weight.numel()
            expected += factors if rank else layer.weight.numel()
    vectors = sum(p.numel() for p in net.parameters() if p.dim() < 2)
    assert sum(p.numel() for p in low.parameters()) == expected + vectors < 134_946 / 2
    assert not has_low_rank_layers(net)  # it is a copy


def test_any_network_of_a_user():
    """Residual, attention, lazily made, tied, recurrent: what can be small is, all of it runs."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(40, 32)
            self.block = nn.TransformerEncoderLayer(32, 4, 128, batch_first=True)
            self.lstm = nn.LSTM(32, 32, batch_first=True)
            self.head = nn.Linear(32, 40)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.lstm(self.block(self.embed(ids)))[0])

    net = Own()
    low = factorize_network(net, 0.2)
    assert isinstance(low.block.linear1, HadamardLinear)
    assert isinstance(low.head, nn.Linear)
    assert low.head.weight is low.embed.weight
    ids = torch.arange(12).view(2, 6)
    low(ids).sum().backward()
    assert all(p.grad is not None for p in low.parameters())
    low.eval()(ids)
    again = pickle.loads(pickle.dumps(low.block.linear1))
    assert torch.equal(again.weight, low.block.linear1.weight)


def test_adapters_beside_low_rank_layers():
    net = factorize_network(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), 0.1)
    lora = add_lora_adapters(net, 2, 4.0, "*")
    assert isinstance(lora[0], LoRA)
    assert {name for name, p in lora.named_parameters() if p.requires_grad} == {
        f"{i}.lora_{side}" for i in (0, 2) for side in "AB"
    }
    plain = add_lora_adapters(nn.Sequential(nn.Linear(64, 64)), 2, 4.0, "*")
    with pytest.raises(BadInput, match="no linear layer"):
        factorize_network(plain, 0.1)  # the base is frozen, the adapters are thin already


@pytest.mark.parametrize("gamma", [-0.1, 1.5, True, "x"])
def test_bad_gamma(gamma):
    with pytest.raises(BadInput, match=r"model\.lowrank"):
        factorize_network(nn.Linear(64, 64), gamma)


def experiment(**changes):
    tables = {
        "rounds": 4,
        "clients": 6,
        "per_round": 3,
        "train": {"lr": 0.1, "epochs": 1, "batch": 16},
        "recipe": {"name": "fedavg"},
        "model": {"lowrank": 0.0},
        "engine": {"workers": 1},
    }
    return Experiment.from_tables(tables | changes)


def test_a_run_sends_factors_resumes_and_predicts(tmp_path):
    """The digits' CNN at gamma 0 by hand. The second convolution, 8 -> 16 of 3 x 3, R = 3: 2 * 3 *
    (24 + 27) = 306 floats for 1,152; the linear layer, 64 -> 10, R = 4: 2 * 4 * 74 = 592 for 640.
    """
    result = assert_resumes(experiment(), tmp_path)
    floats = 1994 - (1152 - 306) - (640 - 592)
    rows = [json.loads(line) for line in (tmp_path / "straight/rounds.jsonl").open()]
    assert {row["bytes_up"] for row in rows} == {3 * 4 * floats}
    trained = flrce.load(tmp_path / "straight")
    assert has_low_rank_layers(trained.network)
    for name, tensor in result.model.items():
        assert torch.equal(trained.network.state_dict()[name], tensor)
    export_network(trained, tmp_path / "model.pt2")
    x = torch.rand(3, 1, 8, 8)
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    scaled = x * trained.spec.scale + trained.spec.shift
    assert torch.allclose(loaded(x), trained.network(scaled), atol=1e-5)


def test_flops_of_making_weights_are_booked_by_batch():
    """Of a linear layer m x n with R: forward 2 products of 2 m n R, backward twice that."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    plain = build_simulation(experiment(model={}), model=net).engine
    low = build_simulation(experiment(), model=net).engine
    task = Task(plain.clients(1)[0], 0, 1, 0)
    assert low.costs.count_batch_flops(task) == 3 * 2 * 2 * (64 * 64 * 8 + 10 * 64 * 4)
    assert plain.costs.count_batch_flops(task) == 0
    assert low.costs.count_training_flops(task) == plain.costs.count_training_flops(task)
    assert low.costs.inference_flops == plain.costs.inference_flops


def test_other_recipes(tmp_path):
    """Compressors, personal heads and server steps see factors as any other tensors."""
    for recipe in (
        {"name": "fedper"},
        {"name": "fedluar", "layers": 1},
        {"name": "scaffold"},
        {"name": "fedavg", "compressor": {"piece": "rotated", "bits": 1}},
    ):
        runs.run(experiment(recipe=recipe, rounds=2), tmp_path / recipe["name"] / str(len(recipe)))
