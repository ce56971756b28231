"""A chain of layers as fused stages: a product, then BatchNorm, activation and pooling while it is still in cache."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from flrce.compiling import Unsupported
from flrce.errors import BadInput
from flrce.models.chain import Chain, Layer, chain
from flrce.models.flat import Layout, layout
from flrce.models.kinds import FUSED

Size = tuple[int, int]
Shape = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True)
class Norm:
    """A BatchNorm by the names of its tensors in w; gamma is "" where it is not affine."""

    gamma: str
    beta: str
    mean: str
    var: str
    eps: float
    momentum: float


@dataclass(frozen=True)
class Group:
    """A GroupNorm likewise; gamma or beta is "" where it has none."""

    groups: int
    gamma: str
    beta: str
    eps: float


@dataclass(frozen=True)
class Stage:
    """One fused step. `op` is conv, linear, none; alone in their stage: pool (one that overlaps or is padded), average,
    and group, which takes an activation.
    """

    op: str
    index: int  # into Chain.trained: the block it is frozen with
    inside: Shape
    middle: Shape  # after the product
    out: Shape  # after pooling
    kernel: Size = (1, 1)
    stride: Size = (1, 1)
    padding: Size = (0, 0)
    weight: str = ""
    bias: str = ""
    norm: Norm | None = None
    group: Group | None = None
    act: str = "PLAIN"
    pool: Size = (1, 1)

    @property
    def learns(self) -> bool:
        normal = (self.norm and self.norm.gamma) or (self.group and (self.group.gamma or self.group.beta))
        return bool(self.weight or normal)


@dataclass(frozen=True)
class Plan:
    """The stages of a net and where its tensors lie in w."""

    stages: tuple[Stage, ...]
    layout: Layout
    classes: int
    blocks: int  # how many trained layers, the limit of `first`


def plan(net: nn.Module, shape: tuple[int, ...]) -> Plan:
    """The stages of this net for samples of this shape; Unsupported with the reason if it is beyond the kernels."""
    try:
        found = chain(net, shape, FUSED)
    except (BadInput, RuntimeError) as why:  # no chain, or one that does not take this shape
        raise Unsupported(str(why).splitlines()[0]) from why
    where = layout(net)
    if any(not p.requires_grad for p in net.parameters()):
        raise Unsupported("the net has parameters that are not trained")
    if any(s.shape == () for s in where.slots) or not found.trained:
        raise Unsupported("the net has no convolution or linear layer")
    stages = _stages(found, where, _volume(shape))
    if len(found.layers[-1].out) != 1:
        raise Unsupported(f"the net ends in shape {found.layers[-1].out}, not in one row of logits")
    return Plan(stages, where, found.layers[-1].out[0], len(found.trained))


def _volume(shape: tuple[int, ...]) -> Shape:
    if len(shape) == 3:
        return (shape[0], shape[1], shape[2])
    if len(shape) == 2:
        return (shape[0], 1, shape[1])
    size = 1
    for n in shape:
        size *= n
    return (size, 1, 1)


def _stages(found: Chain, where: Layout, now: Shape) -> tuple[Stage, ...]:
    names = {s.name for s in where.slots}
    after = frozenset({"batchnorm", "relu", "tanh", "maxpool"})
    stages: list[Stage] = []
    index, open_ = -1, frozenset[str]()  # open_: what the last stage may still take
    for layer in found.layers:
        if layer.kind == "dropout":
            if layer["p"] > 0:
                raise Unsupported(f"Dropout at {layer.name!r} with p = {layer['p']}")
        elif layer.kind == "flatten":
            open_ = open_ & {"relu", "tanh"} if _volume(layer.out) != now else open_
        elif layer.kind in ("conv", "linear"):
            index += 1
            stages.append(_product(layer, index, now, names))
            open_ = after
        elif layer.kind == "groupnorm":
            stages.append(Stage("group", max(index, 0), now, now, now, group=_group(layer, names)))
            open_ = frozenset({"relu", "tanh"})
        elif layer.kind == "avgpool":
            out, how = _volume(layer.out), {"kernel": layer["kernel"], "stride": layer["stride"]}
            stages.append(Stage("average", max(index, 0), now, now, out, **how))
            open_ = frozenset()
        else:
            tiled = layer.kind != "maxpool" or _tiled(layer)
            if layer.kind not in open_ or not tiled:
                stages.append(Stage("none" if tiled else "pool", max(index, 0), now, now, now))
                open_ = after if tiled else frozenset()
            stages[-1], open_ = _take(stages[-1], layer, open_, names)
        now = _volume(layer.out)
    return tuple(stages)


def _take(stage: Stage, layer: Layer, open_: frozenset[str], names: set[str]) -> tuple[Stage, frozenset[str]]:
    """The stage with one more layer in it, and what may follow: activation and pooling commute, both being monotone."""
    if layer.kind == "batchnorm":
        return replace(stage, norm=_norm(layer, names)), open_ - {"batchnorm"}
    if layer.kind in ("relu", "tanh"):
        return replace(stage, act=layer.kind.upper()), open_ - {"batchnorm", "relu", "tanh"}
    if layer["dilation"] != (1, 1):
        raise Unsupported(f"max-pooling with dilation {layer['dilation']}")
    out = _volume(layer.out)
    if stage.op == "pool":
        return replace(stage, out=out, kernel=layer["kernel"], stride=layer["stride"], padding=layer["padding"]), open_
    return replace(stage, out=out, pool=layer["kernel"]), open_ - {"batchnorm", "maxpool"}


def _tiled(layer: Layer) -> bool:
    """Whether pooling windows tile the plane without overlap, padding or a partial last window."""
    kernel, before, after = layer["kernel"], _volume(layer.inside)[1:], _volume(layer.out)[1:]
    return bool(
        kernel == layer["stride"]
        and layer["padding"] == (0, 0)
        and all(n // k == o for n, k, o in zip(before, kernel, after, strict=True))
    )


def _product(layer: Layer, index: int, inside: Shape, names: set[str]) -> Stage:
    options: dict[str, Any] = dict(layer.options)
    weight, bias = f"{layer.name}.weight", f"{layer.name}.bias" if options["bias"] else ""
    if not {weight, bias} <= names | {""}:
        raise Unsupported(f"{layer.name!r} shares its tensors with another layer")
    out = _volume(layer.out)
    if layer.kind == "linear":
        if len(layer.inside) != 1:
            raise Unsupported(f"Linear at {layer.name!r} on samples of shape {layer.inside}; flatten first")
        return Stage("linear", index, inside, out, out, weight=weight, bias=bias)
    if options["groups"] != 1 or options["dilation"] != (1, 1):
        raise Unsupported(
            f"convolution at {layer.name!r} with groups {options['groups']}, dilation {options['dilation']}"
        )
    return Stage(
        "conv", index, inside, out, out, options["kernel"], options["stride"], options["padding"], weight, bias
    )


def _norm(layer: Layer, names: set[str]) -> Norm:
    if not layer["running"] or layer["momentum"] is None:
        raise Unsupported(f"BatchNorm at {layer.name!r} without running statistics or momentum")
    gamma, beta, mean, var = (f"{layer.name}.{x}" for x in ("weight", "bias", "running_mean", "running_var"))
    gamma, beta = (gamma, beta) if layer["affine"] else ("", "")
    if not {gamma, beta, mean, var} <= names | {""}:
        raise Unsupported(f"{layer.name!r} shares its tensors with another layer")
    return Norm(gamma, beta, mean, var, layer["eps"], layer["momentum"])


def _group(layer: Layer, names: set[str]) -> Group:
    gamma = f"{layer.name}.weight" if layer["weight"] else ""
    beta = f"{layer.name}.bias" if layer["bias"] else ""
    if not {gamma, beta} <= names | {""}:
        raise Unsupported(f"{layer.name!r} shares its tensors with another layer")
    return Group(layer["groups"], gamma, beta, layer["eps"])
