"""A compiled network beside the module it was made of, once, in float64: what was misread must not
train.
"""

import copy
from multiprocessing import parent_process

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.core.host import run_in_child
from flrce.models.flat import make_layout, pack_model
from flrce.training.cpu.trainer import Kernel

CHECKED_SAMPLES = 12
# of the gradient's length: float32 is some 1e-3 away where a ReLU decides the other way
MAX_GRADIENT_DISTANCE = 0.03


def find_difference(kernel: Kernel, net: nn.Module, shape: tuple[int, ...], classes: int) -> str:
    """Where kernel and module part on random samples: in training or in evaluation; "" where they
    do not.
    """
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(CHECKED_SAMPLES, *shape, generator=rng)
    y = torch.randint(0, classes, (CHECKED_SAMPLES,), generator=rng)
    w, g = pack_model(net), torch.zeros(make_layout(net).trainable)
    losses, judged = kernel.gradient(w.clone(), x, y, g), kernel.evaluate(w, x, y, 1.0, 0.0)[1]

    def compute_by_module() -> tuple[NDArray[np.float64], ...]:
        return _by_module(net, x.double(), y)

    # beside a GPU a backward pass begins threads, after which no worker can be forked any more
    alone = torch.cuda.is_available() and parent_process() is None
    trained, truth, evaluated = map(
        torch.from_numpy, run_in_child(compute_by_module) if alone else compute_by_module()
    )
    if (
        not _is_close(losses, trained)
        or not (g - truth).norm() <= MAX_GRADIENT_DISTANCE * truth.norm() + 1e-6
    ):
        return "training"
    return "" if _is_close(judged, evaluated) else "evaluation"


def _by_module(net: nn.Module, x: Tensor, y: Tensor) -> tuple[NDArray[np.float64], ...]:
    """(n,) losses and (d,) their mean's gradient in training, (n,) losses in evaluation."""
    known = copy.deepcopy(net).double()
    with torch.no_grad():
        evaluated = F.cross_entropy(known.eval()(x), y, reduction="none")
    trained = F.cross_entropy(known.train()(x), y, reduction="none")
    tensors = dict(known.named_parameters())
    learning = [tensors[slot.name] for slot in make_layout(net).slots if slot.trainable]
    found = torch.autograd.grad(trained.mean(), learning, allow_unused=True, materialize_grads=True)
    truth = torch.cat([one.flatten() for one in found])
    return trained.detach().numpy(), truth.numpy(), evaluated.numpy()


def _is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b, rtol=1e-3, atol=1e-3)
