"""LoRA (Hu et al. 2022): thin matrices beside fixed ones, and all that follows from their shape.

An adapter of rank R is a small network of its own, in -> R -> out; its R inner units are what a
client of lower rank has fewer of, as in any sub-model.
"""

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.errors import BadInput
from flrce.models.flat import FrozenParameter, ModelLayout, make_layout
from flrce.models.part import ModelPart, floor_share

log = logging.getLogger("flrce")
DOWN, UP = "lora_A", "lora_B"  # as in HuggingFace's peft


class LoRA(nn.Module):
    """base(x) + alpha / R * B A x, with A (R, in) as peft draws it and B (out, R) zero at first."""

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        inside, out = int(base.in_features), int(base.out_features)  # type: ignore[arg-type]
        self.base, self.scale = base, alpha / rank
        where = next(base.parameters()).device
        self.lora_A = nn.Parameter(
            (2 * torch.rand(rank, inside, device=where) - 1) / math.sqrt(inside)
        )
        self.lora_B = nn.Parameter(torch.zeros(out, rank, device=where))

    def forward(self, x: Tensor) -> Tensor:
        added = F.linear(F.linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B) * self.scale
        out: Tensor = self.base(x)
        return out + added.to(out.dtype)


def add_lora_adapters(
    net: nn.Module,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | Sequence[str] = "q_proj,v_proj",
) -> nn.Module:
    """The net, frozen, with an adapter beside each linear layer that `targets` names.

    Targets are last names of layers, or patterns of whole ones: "q_proj", "layers.2*.mlp.*".
    """
    given = targets.split(",") if isinstance(targets, str) else targets
    wanted = [each.strip() for each in given if each.strip()]
    if not 1 <= rank <= 4096 or not 0 < alpha < math.inf:
        raise BadInput(
            f"rank = {rank} and alpha = {alpha}: an adapter needs a rank from 1 to 4096 and an"
            " alpha above 0"
        )
    linear = {name: layer for name, layer in net.named_modules() if name and _is_linear(layer)}
    if not wanted:
        raise BadInput(
            "targets names no layer; give last names of linear layers, such as q_proj,v_proj"
        )
    matches = [name for each in wanted for name in _match_target_layers(each, linear, net)]
    net.requires_grad_(False)
    sides: list[Any] = []
    for name in dict.fromkeys(matches):
        parent, _, last = name.rpartition(".")
        setattr(net.get_submodule(parent), last, LoRA(linear[name], rank, alpha))
        sides += [linear[name].in_features, linear[name].out_features]
    if min(sides) < rank:
        text = "rank %d: no change of a layer with a side of %d has more than that; lower it"
        log.warning(text, rank, min(sides))
    return net


def _match_target_layers(target: str, linear: Mapping[str, nn.Module], net: nn.Module) -> list[str]:
    """Names of the linear layers that a target means."""
    here = [
        name for name in linear if target == name.rpartition(".")[2] or fnmatchcase(name, target)
    ]
    if not here and any(isinstance(layer, LoRA) for layer in net.modules()):
        raise BadInput(
            f"targets: {target!r} matches no linear layer without an adapter; adapt a network once"
        )
    if not here:
        few = ", ".join(sorted({name.rpartition(".")[2] for name in linear})[:9])
        has = f"{few} ('*': all of them)" if few else "none"
        raise BadInput(
            f"targets: {target!r} matches no linear layer of {type(net).__name__}; it has {has}"
        )
    return here


def _is_linear(layer: nn.Module) -> bool:
    shaped = hasattr(layer, "in_features") and hasattr(layer, "out_features")
    return shaped and not isinstance(layer, LoRA) and len(list(layer.children())) == 0


def share_frozen_parameters(net: nn.Module) -> nn.Module:
    """The net with its frozen parameters held once, also by copies: for a pretrained one."""
    once: dict[int, FrozenParameter] = {}  # tied weights stay tied
    for module in net.modules():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not p.requires_grad:
                setattr(module, name, once.setdefault(id(p), FrozenParameter(p.data)))
    return net


class TransformersNetwork(nn.Module):
    """A causal model of transformers, or of peft around one, as a network that gives scores.

    The given one stays as it is: what trains is copied, fixed parameters are shared with it, and
    float buffers, such as rotary frequencies, are fixed here, so that neither travels.
    """

    chained = False

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(
            net, {id(p): FrozenParameter(p.data) for p in net.parameters() if not p.requires_grad}
        )
        for module in self.net.modules():
            for name, b in list(module.named_buffers(recurse=False)):
                if b.is_floating_point():
                    delattr(module, name)
                    module.register_parameter(name, FrozenParameter(b))

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.net(input_ids=ids, use_cache=False).logits
        return scores.float()


def prepare_network(net: Any) -> nn.Module:
    """A network as it is trained; those of transformers and peft give more than scores."""
    if not isinstance(net, nn.Module):
        what = f"the class {net.__name__}" if isinstance(net, type) else f"a {type(net).__name__}"
        raise BadInput(f"model is {what}; give a network, such as model=nn.Linear(8, 2)")
    net = copy_network_to_host(remove_torch_compile(net))
    homes = {kind.__module__.partition(".")[0] for kind in type(net).__mro__}
    return TransformersNetwork(net) if homes & {"transformers", "peft"} else net


def copy_network_to_host(net: nn.Module) -> nn.Module:
    """The net on the host, where runs begin. One on a GPU is copied and stays as it is."""
    away = [x for x in (*net.parameters(), *net.buffers()) if x.device.type != "cpu"]
    if any(x.is_meta for x in away):
        raise BadInput(
            f"{type(net).__name__} has tensors without values (device 'meta'); load its weights"
            " first"
        )
    moved: dict[int, Any] = {id(x): _copy_tensor_to_host(x) for x in away}
    return copy.deepcopy(net, moved) if moved else net


def _copy_tensor_to_host(x: Tensor) -> Tensor:
    value = x.detach().cpu()
    return nn.Parameter(value, x.requires_grad) if isinstance(x, nn.Parameter) else value


def remove_torch_compile(net: nn.Module) -> nn.Module:
    """The net without torch.compile, which would compile again in every worker."""
    if not any(map(_is_compiled, net.modules())):
        return net
    log.warning(
        "a network of torch.compile trains as the module that it was made of: trainers have their"
        " own kernels"
    )
    net = copy.deepcopy(_unwrap_compiled(net))
    for module in list(net.modules()):
        for name, child in module.named_children():
            module._modules[name] = _unwrap_compiled(child)
    return net


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" and isinstance(
        getattr(module, "_orig_mod", None), nn.Module
    )


def _unwrap_compiled(module: nn.Module) -> nn.Module:
    while _is_compiled(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


def get_adapter_rank(net: nn.Module) -> int:
    """The largest rank of the net's adapters, of ours or of peft's; 0 where it has none."""
    return max((len(down) for _, down, _, _ in _list_adapter_factors(net)), default=0)


def make_low_rank_part(
    net: nn.Module, where: ModelLayout, rate: float, rng: Generator | None = None
) -> ModelPart:
    """The part whose adapters have a share `rate` of the inner units: the first, or random ones."""
    small = copy.deepcopy(net)
    # of each matrix: which dimension counts them, and those that stay
    units: dict[str, tuple[int, Tensor]] = {}
    for down, A, up, B in _list_adapter_factors(small):
        R = len(A)
        r = floor_share(rate, R)
        if rng is None:
            chosen = torch.arange(r)
        else:
            chosen = torch.from_numpy(rng.permutation(R)[:r]).sort().values
        if rng is not None and not A.requires_grad:
            raise BadInput(
                "random ranks do not go with a fixed lora_A, which all clients share; use"
                " prefix-units"
            )
        units |= {down: (0, chosen), up: (1, chosen)}
        for name, p, dim in ((down, A, 0), (up, B, 1)):
            parent, _, last = name.rpartition(".")
            cut = nn.Parameter(p.data.index_select(dim, chosen.to(p.device)), p.requires_grad)
            setattr(small.get_submodule(parent), last, cut)
    held, names = [], []
    for slot in where.slots:
        grid = torch.arange(slot.size).reshape(slot.shape)
        if slot.name in units:
            grid = grid.index_select(*units[slot.name])
        held.append(grid.reshape(-1) + slot.offset)
        names.append((slot.name, grid.numel()))
    assert [slot.size for slot in make_layout(small).slots] == [size for _, size in names]
    return ModelPart(small, (rate, 0), tuple(names), torch.cat(held))


def _list_adapter_factors(net: nn.Module) -> list[tuple[str, nn.Parameter, str, nn.Parameter]]:
    """The two matrices of each adapter, A (R, in, ...) and B (out, R, ...), with their names."""
    known = list(net.named_parameters())
    factors = []
    for i, j in pair_adapter_factors([(name, tuple(p.shape)) for name, p in known]):
        (down, A), (up, B) = known[i], known[j]
        if A.dim() > 1 and B.dim() > 1 and len(A) == B.shape[1]:
            factors.append((down, A, up, B))
    return factors


def pair_adapter_factors(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[int, int]]:
    """Places of the two matrices of each adapter among tensors with these names and shapes."""
    places = {name: i for i, (name, _) in enumerate(shapes)}
    ups = {name: i for name, i in places.items() if UP in name.split(".")}
    return [
        (places[down], i) for name, i in ups.items() if (down := name.replace(UP, DOWN)) in places
    ]
