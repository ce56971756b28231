"""Released functions of the server and of compressors, and flrce's, on the same random inputs."""

import math
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from released import Check, load_definitions, load_statements
from torch import Tensor, nn

from flrce.core.types import Updates
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.aggregation.staleness import FedAsyncMixing
from flrce.methods.compression.quantize import Quantizer
from flrce.models.flat import make_layout, pack_model
from flrce.rng import make_stream

WIDTHS = (1.0, 0.5, 0.25)


def verify_server(code: Path) -> list[Check]:
    return [verify_quantizer(code), verify_heterofl(code), verify_fedasync(code)]


def verify_fedasync(code: Path) -> Check:
    """alpha_t of a reply by its age. In the released script the model after `epoch` updates has the
    time stamp `epoch`, so that a reply to the newest model has age 0.
    """
    file = "train_cifar10_mxnet_fedasync_singlethread_impl.py"
    statements = load_statements(code, "fedasync", file, "worker_delay", "alpha_scaled")
    kinds = {"constant": "none", "polynomial": "power", "hinge": "hinge"}
    cases, worst = 300, 0.0
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        staleness: Any = list(kinds)[seed % len(kinds)]
        a, b = float(rng.uniform(0.1, 10)), int(rng.integers(0, 8))
        epoch, age, alpha = int(rng.integers(20, 900)), int(rng.integers(0, 17)), rng.uniform()
        settings = SimpleNamespace(alpha_type=kinds[staleness], alpha_adaptive=a, alpha_adaptive2=b)
        scope = {"math": math, "args": settings, "alpha": alpha, "epoch": epoch, "sum_delay": 0}
        names: dict[str, Any] = {"worker_ts": epoch - age}
        exec(statements, scope | names, names)
        mine = alpha * FedAsyncMixing(0.6, staleness, a, b).staleness_weight(age)
        worst = max(worst, abs(mine - names["alpha_scaled"]))
    return Check("FedAsync", "alpha_scaled", cases, worst, 1e-12, "statements of a script")


def verify_quantizer(code: Path) -> Check:
    """FedCOM's quantiser of 8 bits, rounded to the nearest.

    The released code truncates the level of the mean to an integer, so that one end of the range
    is clipped. flrce does not, and the comparison leaves it out.
    """
    names = ["quantize_tensor", "dequantize_tensor"]
    namespace = {"torch": torch, "SCALE_QUANTIZE": 0.001, "ZERO_POINT_QUANTIZE": 0.0}
    file = "fedtorch/comms/utils/flow_utils.py"
    real_zero = {"zero_point = int(zero_point)": "zero_point = float(zero_point)"}
    scope = load_definitions(code, "fedtorch", file, names, namespace, real_zero)
    cases, values, other_levels = 300, 0, 0
    for seed in range(cases):
        x = draw_tensor(seed)
        levels, info = scope["quantize_tensor"](x.clone(), 8, adaptive=True)
        released = scope["dequantize_tensor"](levels, info)
        code_8 = Quantizer(8, stochastic=False)
        layout, rng = (("x", len(x)),), make_stream(0, "encode", 1, "a")
        payload, _ = code_8.encode(x, layout, rng, {})
        steps = (code_8.decode(payload, layout) - released).abs() / float(info[0])
        if float(steps.max()) > 1.01:
            return Check("FedCOM", "quantize_tensor", cases, float(steps.max()), 1.01)
        values, other_levels = values + len(x), other_levels + int((steps > 1e-3).sum())
    note = "share of values on the next level, half-way in float32; without the released truncation"
    return Check("FedCOM", "quantize_tensor", cases, other_levels / values, 1e-3, note)


def draw_tensor(seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(int(rng.integers(2, 400))) * rng.lognormal(-3, 2)
    return torch.from_numpy(x + rng.normal() * 0.01).float()


def verify_heterofl(code: Path) -> Check:
    """The mean over the holders of each weight, of clients with three widths."""
    cases, worst = 20, 0.0
    for seed in range(cases):
        torch.manual_seed(seed)
        net = nn.Sequential(
            OrderedDict(conv1=nn.Conv2d(1, 8, 3), conv2=nn.Conv2d(8, 8, 3), linear=nn.Linear(8, 4))
        )
        settings = {"model_name": "conv", "global_model_rate": 1.0, "model_split_mode": "fix"}
        namespace = {"torch": torch, "np": np, "cfg": settings, "OrderedDict": OrderedDict}
        scope = load_definitions(code, "heterofl", "src/fed.py", ["Federation"], namespace)
        labels = {m: list(range(4)) for m in range(len(WIDTHS))}
        weights = OrderedDict((k, v.clone()) for k, v in net.state_dict().items())
        federation = scope["Federation"](weights, list(WIDTHS), labels)
        users = list(range(len(WIDTHS)))
        index = federation.split_model(users)
        local = [
            OrderedDict(
                (k, torch.randn_like(slice_tensor(v, index[m][k]))) for k, v in weights.items()
            )
            for m in users
        ]
        w = pack_model(net).clone()
        updates = collect_updates(net, w, local, index)
        mine = WeightedMean(by="equal")(w, updates, None)
        federation.combine(local, index, users)
        released = torch.cat([v.flatten() for v in federation.global_parameters.values()])
        worst = max(worst, float((mine - released).abs().max()))
    return Check("HeteroFL", "Federation.combine", cases, worst, 1e-6)


def slice_tensor(x: Tensor, index: Any) -> Tensor:
    if isinstance(index, tuple):
        return x[torch.meshgrid(*index, indexing="ij")]
    return x[index]


def collect_updates(net: nn.Module, w: Tensor, local: list[Any], index: list[Any]) -> Updates:
    """Updates of whole length, zero where a client holds nothing, with what each holds."""
    layout = make_layout(net)
    U, covered = torch.zeros(len(local), len(w)), torch.zeros(len(local), len(w), dtype=torch.bool)
    for m, tensors in enumerate(local):
        at = 0
        for name, whole in net.state_dict().items():
            view = torch.arange(at, at + whole.numel()).view(whole.shape)
            held = slice_tensor(view, index[m][name]).flatten()
            U[m, held] = tensors[name].flatten() - w[held]
            covered[m, held] = True
            at += whole.numel()
    k = torch.arange(len(local))
    return Updates(k, U, torch.ones(len(local)), layout.trainable, covered=covered)
