"""Adapters of many lanes beside a fixed linear layer: which modules are taken for one, and what
they give.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.models.adapters import LoRA
from flrce.training.gpu.adapters import AdapterParts, LaneAdapter, find_adapter_parts
from flrce.training.gpu.chain_net import DeviceSamples
from flrce.training.gpu.folded_net import FoldedNet


class Own(nn.Module):
    """base(x) + 3 B A x, unless `odd` says something else."""

    def __init__(self, base: nn.Linear, rank: int, odd: str = "") -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(base.out_features, rank))
        self.down = nn.Parameter(torch.randn(rank, base.in_features))
        self.base, self.odd = base.requires_grad_(odd == "trained"), odd

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.down)
        low = low.relu() if self.odd == "bent" else low
        low = F.dropout(low, 0.5, self.training) if self.odd == "dropped" else low
        scale = 1.0 if self.odd == "merged" and not self.training else 3.0
        found: Tensor = self.base(x) + scale * F.linear(low, self.up)
        return found


def test_what_is_an_adapter() -> None:
    base = nn.Linear(6, 5)
    assert find_adapter_parts(Own(base, 2)) == AdapterParts("base", "down", "up", 3.0)
    assert find_adapter_parts(Own(nn.Linear(4, 4, bias=False), 4)) == AdapterParts(
        "base", "down", "up", 3.0
    )  # by numbers alone
    assert find_adapter_parts(LoRA(base, 4, alpha=2.0)) == AdapterParts(
        "base", "lora_A", "lora_B", 0.5
    )


@pytest.mark.parametrize("odd", ["bent", "dropped", "merged", "trained"])
def test_what_is_none(odd: str) -> None:
    made = Own(nn.Linear(6, 5), 2, odd)
    state = torch.get_rng_state()
    assert find_adapter_parts(made) is None
    assert torch.equal(state, torch.get_rng_state())


def test_nor_what_somebody_looks_at() -> None:
    made = Own(nn.Linear(6, 5), 2)
    made.base.register_forward_hook(lambda *_: None)
    assert find_adapter_parts(made) is None


def test_lanes_by_hand() -> None:
    # base 2 x + 1, down 1 and 2, up 1 and -1: lane 0 gives 2 x + 1 + 3 x, lane 1 2 x + 1 - 6 x
    made = Own(nn.Linear(1, 1), 1)
    made.base.weight.data.fill_(2.0)
    made.base.bias.data.fill_(1.0)
    net = FoldedNet(made, DeviceSamples(torch.randn(8, 1), torch.zeros(8), 1.0, 0.0))
    assert isinstance(net.module, LaneAdapter)
    tensors = {"down": torch.tensor([1.0, 2.0]), "up": torch.tensor([1.0, -1.0])}
    own = {name: each.reshape(2, 1, 1).requires_grad_() for name, each in tensors.items()}
    x = torch.tensor([1.0, 2.0, 1.0, 2.0]).reshape(2, 2, 1).requires_grad_()
    y = net.compute_outputs(own, x, torch.tensor([2, 2]), training=True)
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
    folded = FoldedNet(net, DeviceSamples(torch.randn(9, 4, 7), torch.zeros(9), 1.0, 0.0))
    assert [type(each) for each in folded.module] == [LaneAdapter, nn.Tanh, LaneAdapter]
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    own = {
        name: torch.randn(3, *net.get_parameter(name).shape, requires_grad=True) for name in names
    }
    x = torch.randn(3, 2, 4, 7)
    y = folded.compute_outputs(own, x, torch.tensor([2, 2, 2]), training=True)
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
        half = folded.compute_outputs(own, x, torch.tensor([2, 2, 2]), training=True)
    torch.testing.assert_close(half.float(), y, rtol=0.05, atol=0.5)
