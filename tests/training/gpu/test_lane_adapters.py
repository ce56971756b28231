"""Adapters of many lanes beside a fixed linear layer, which all lanes share."""

from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.models.adapters import LoRA
from flrce.training.gpu import lane_functions
from flrce.training.gpu.chain_net import DeviceSamples
from flrce.training.gpu.operations import batched_linear
from flrce.training.gpu.vmap_net import VmapNet


class Own(nn.Module):
    """base(x) + 3 B A x."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(base.out_features, rank))
        self.down = nn.Parameter(torch.randn(rank, base.in_features))
        self.base = base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + 3.0 * F.linear(F.linear(x, self.down), self.up)
        return found


def test_lanes_by_hand() -> None:
    # base 2 x + 1, down 1 and 2, up 1 and -1: lane 0 gives 2 x + 1 + 3 x, lane 1 2 x + 1 - 6 x
    made = Own(nn.Linear(1, 1), 1)
    made.base.weight.data.fill_(2.0)
    made.base.bias.data.fill_(1.0)
    net = VmapNet(made, DeviceSamples(torch.randn(8, 1), torch.zeros(8), 1.0, 0.0))
    tensors = {"down": torch.tensor([1.0, 2.0]), "up": torch.tensor([1.0, -1.0])}
    own = {name: each.reshape(2, 1, 1).requires_grad_() for name, each in tensors.items()}
    x = torch.tensor([1.0, 2.0, 1.0, 2.0]).reshape(2, 2, 1).requires_grad_()
    with mock.patch.object(
        lane_functions, "batched_linear", side_effect=batched_linear
    ) as products:
        y = net.compute_outputs(own, x, torch.tensor([2, 2]), training=True)
    assert products.call_count == 2  # the base is one product of everyone's samples
    assert y.flatten().tolist() == [6.0, 11.0, -3.0, -7.0]
    gx, gd, gu = torch.autograd.grad(y.sum(), (x, own["down"], own["up"]))
    assert gx.flatten().tolist() == [5.0, 5.0, -4.0, -4.0]  # 2 + 3 and 2 - 6
    assert gd.flatten().tolist() == [9.0, -9.0]  # 3 up (1 + 2)
    assert gu.flatten().tolist() == [9.0, 18.0]  # 3 down (1 + 2)


def test_lanes_as_autograd_has_them() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        Own(nn.Linear(7, 6), 2), nn.Tanh(), LoRA(nn.Linear(6, 5).requires_grad_(False), 3, 6.0)
    )
    lanes = VmapNet(net, DeviceSamples(torch.randn(9, 4, 7), torch.zeros(9), 1.0, 0.0))
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    own = {
        name: torch.randn(3, *net.get_parameter(name).shape, requires_grad=True) for name in names
    }
    x = torch.randn(3, 2, 4, 7)
    y = lanes.compute_outputs(own, x, torch.tensor([2, 2, 2]), training=True)
    each = [
        torch.func.functional_call(net, {n: own[n][i] for n in names}, (x[i],)) for i in range(3)
    ]
    torch.testing.assert_close(y, torch.stack(each))
    both = [
        torch.autograd.grad(z.square().sum(), list(own.values())) for z in (y, torch.stack(each))
    ]
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        half = lanes.compute_outputs(own, x, torch.tensor([2, 2, 2]), training=True)
    torch.testing.assert_close(half.float(), y, rtol=0.05, atol=0.5)
