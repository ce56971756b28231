"""A compiled network beside the module it was made of, once, in float64: what was misread must not train."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from flrce.local.native.trainer import Kernel
from flrce.models.flat import layout, pack

SAMPLES = 12
NEAR = 0.03  # of the gradient's length: float32 is some 1e-3 away where a ReLU decides the other way


def differs(kernel: Kernel, net: nn.Module, shape: tuple[int, ...], classes: int) -> str:
    """Where kernel and module part on random samples: in training or in evaluation; "" where they do not."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, *shape, generator=rng)
    y = torch.randint(0, classes, (SAMPLES,), generator=rng)
    where, w = layout(net), pack(net)
    g = torch.zeros(where.trainable)
    losses, judged = kernel.gradient(w.clone(), x, y, g), kernel.evaluate(w, x, y, 1.0, 0.0)[1]
    known = copy.deepcopy(net).double()
    with torch.no_grad():
        evaluated = F.cross_entropy(known.eval()(x.double()), y, reduction="none")
    trained = F.cross_entropy(known.train()(x.double()), y, reduction="none")
    names = [slot.name for slot in where.slots if slot.trainable]
    tensors = dict(known.named_parameters())
    found = torch.autograd.grad(trained.mean(), [tensors[name] for name in names])
    truth = torch.cat([one.flatten() for one in found])
    if not _close(losses, trained.detach()) or not (g - truth).norm() <= NEAR * truth.norm() + 1e-6:
        return "training"
    return "" if _close(judged, evaluated) else "evaluation"


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b, rtol=1e-3, atol=1e-3)
