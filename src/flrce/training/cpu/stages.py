"""A network's layers as fused stages: a product, then BatchNorm, activation and pooling while it is
still in cache.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import nn

from flrce.core.c_compiler import KernelUnavailable
from flrce.errors import BadInput
from flrce.models.abilities import ChainDeclaringNetwork
from flrce.models.flat import ModelLayout, make_layout
from flrce.models.graph import INPUT_NODE, LayerGraph, LayerSpec, build_layer_graph
from flrce.models.kinds import RESIDUAL_KINDS
from flrce.training.cpu.joints import untangle_stages
from flrce.training.cpu.plan import Group, Norm, Plan, Shape, Stage

FUSED_AFTER_PRODUCT = frozenset({"batchnorm", "relu", "tanh", "maxpool"})
ACTIVATIONS = frozenset({"relu", "tanh"})
# the most in one convolution of a residual network: see _refuse_wide_convolutions
MAX_CONVOLUTION_WEIGHTS = 300_000


def plan_stages(net: nn.Module, shape: tuple[int, ...]) -> Plan:
    """The stages of this net for samples of this shape; KernelUnavailable with the reason if it is beyond
    the kernels.
    """
    if isinstance(net, ChainDeclaringNetwork) and not net.chained:
        raise KernelUnavailable(
            f"{type(net).__name__} is more than layers that feed and skip each other"
        )
    try:
        found = build_layer_graph(net, shape, RESIDUAL_KINDS)
    except (BadInput, RuntimeError) as why:  # unknown layers, or such as do not take this shape
        raise KernelUnavailable(str(why).splitlines()[0]) from why
    trained = [node for node in found.nodes if node.layer.kind in ("conv", "linear")]
    where = make_layout(net)
    if any(not p.requires_grad for p in net.parameters()):
        raise KernelUnavailable("the net has parameters that are not trained")
    if any(s.shape == () for s in where.slots) or not trained:
        raise KernelUnavailable("the net has no convolution or linear layer")
    used = Counter(source for node in found.nodes for source in node.sources)
    if found.output != len(found.nodes) - 1 or any(
        not used[i] for i in range(len(found.nodes) - 1)
    ):
        raise KernelUnavailable(
            "the net computes more than it gives, or gives more than one tensor"
        )
    if any(node.layer.kind == "add" for node in found.nodes):
        _refuse_wide_convolutions(where)
    stages = _Fused({s.name for s in where.slots}, found, used, _to_planes(shape)).stages
    last = found.nodes[-1].layer.out
    if len(last) != 1:
        raise KernelUnavailable(f"the net ends in shape {last}, not in one row of logits")
    skips = any(stage.op == "sum" for stage in stages)
    return Plan(
        untangle_stages(stages, _to_planes(shape)), where, last[0], 1 if skips else len(trained)
    )


def _refuse_wide_convolutions(where: ModelLayout) -> None:
    """KernelUnavailable where torch's convolutions are faster: a weight's gradient is a whole vector
    here, and past MAX_CONVOLUTION_WEIGHTS of them a convolution's no longer stay in the cache.

    Torch's CPU seconds over the kernels' on residual networks, batch 32, planes of 32 x 32,
    AVX-512: 1.58 with at most 36,864 weights (ResNet-8), 1.34 with 147,456, 1.05 with 589,824, 0.97
    with 2,359,296 (ResNet-18).
    """
    for slot in where.slots:
        if len(slot.shape) > 2 and slot.size > MAX_CONVOLUTION_WEIGHTS:
            raise KernelUnavailable(
                f"{slot.name!r} has {slot.size:,} weights; with more than {MAX_CONVOLUTION_WEIGHTS:,} torch is"
                " faster"
            )


def _to_planes(shape: tuple[int, ...]) -> Shape:
    if len(shape) == 3:
        return (shape[0], shape[1], shape[2])
    if len(shape) == 2:
        return (shape[0], 1, shape[1])
    size = 1
    for n in shape:
        size *= n
    return (size, 1, 1)


class _Fused:
    """The stages of a graph, made layer by layer; `used`: how many layers read each."""

    def __init__(
        self, names: set[str], found: LayerGraph, used: Counter[int], shape: Shape
    ) -> None:
        self.names, self.used = names, used
        self.skips = any(node.layer.kind == "add" for node in found.nodes)
        self.stages: list[Stage] = []
        self.open: frozenset[str] = frozenset()  # what the last stage may still take
        self.index = -1
        self.made = {INPUT_NODE: (INPUT_NODE, shape)}  # a layer's stage, and its shape
        for i, node in enumerate(found.nodes):
            ready = self.open if self._ends_last_stage(node.sources[0]) else frozenset[str]()
            self._add_layer(node.layer, [self.made[source] for source in node.sources], ready)
            passed = node.layer.kind in ("dropout", "flatten")
            stage = self.made[node.sources[0]][0] if passed else len(self.stages) - 1
            self.made[i] = (stage, _to_planes(node.layer.out))

    def _ends_last_stage(self, source: int) -> bool:
        """Whether a layer is the end of the last stage, and nobody else reads it."""
        return self.made[source][0] == len(self.stages) - 1 and self.used[source] == 1

    def _add_layer(
        self, layer: LayerSpec, fed: list[tuple[int, Shape]], ready: frozenset[str]
    ) -> None:
        """The stages with one more layer; `ready`: what its source may still take."""
        source, now = fed[0]
        index = 0 if self.skips else max(self.index, 0)
        if layer.kind == "dropout":
            if layer["p"] > 0:
                raise KernelUnavailable(f"Dropout at {layer.name!r} with p = {layer['p']}")
            self.open = ready
        elif layer.kind == "flatten":
            self.open = ready & ACTIVATIONS if _to_planes(layer.out) != now else ready
        elif layer.kind in ("conv", "linear"):
            self.index += 1
            index = 0 if self.skips else self.index
            self._open_stage(
                _make_product_stage(layer, index, source, now, self.names), FUSED_AFTER_PRODUCT
            )
        elif layer.kind == "groupnorm":
            self._open_stage(
                Stage(
                    "group", index, (source,), now, now, now, group=_read_group(layer, self.names)
                ),
                ACTIVATIONS,
            )
        elif layer.kind == "add":
            self._open_stage(
                Stage("sum", index, tuple(one for one, _ in fed), now, now, now), ACTIVATIONS
            )
        elif layer.kind == "avgpool":
            out, how = _to_planes(layer.out), {"kernel": layer["kernel"], "stride": layer["stride"]}
            self._open_stage(Stage("average", index, (source,), now, now, out, **how), frozenset())
        else:
            tiled = layer.kind != "maxpool" or _is_tiled(layer)
            if layer.kind not in ready or not tiled:
                self._open_stage(
                    Stage("none" if tiled else "pool", index, (source,), now, now, now),
                    FUSED_AFTER_PRODUCT,
                )
                self.open = FUSED_AFTER_PRODUCT if tiled else frozenset()
            self.stages[-1], self.open = _merge_layer(self.stages[-1], layer, self.open, self.names)

    def _open_stage(self, stage: Stage, open_: frozenset[str]) -> None:
        self.stages.append(stage)
        self.open = open_


def _merge_layer(
    stage: Stage, layer: LayerSpec, open_: frozenset[str], names: set[str]
) -> tuple[Stage, frozenset[str]]:
    """The stage with one more layer in it, and what may follow: activation and pooling commute,
    both being monotone.
    """
    if layer.kind == "batchnorm":
        return replace(stage, norm=_read_norm(layer, names)), open_ - {"batchnorm"}
    if layer.kind in ("relu", "tanh"):
        return replace(stage, act=layer.kind.upper()), open_ - {"batchnorm", "relu", "tanh"}
    if layer["dilation"] != (1, 1):
        raise KernelUnavailable(f"max-pooling with dilation {layer['dilation']}")
    out = _to_planes(layer.out)
    if stage.op == "pool":
        return (
            replace(
                stage,
                out=out,
                kernel=layer["kernel"],
                stride=layer["stride"],
                padding=layer["padding"],
            ),
            open_,
        )
    return replace(stage, out=out, pool=layer["kernel"]), open_ - {"batchnorm", "maxpool"}


def _is_tiled(layer: LayerSpec) -> bool:
    """Whether pooling windows tile the plane without overlap, padding or a partial last window."""
    kernel, before, after = layer["kernel"], _to_planes(layer.inside)[1:], _to_planes(layer.out)[1:]
    return bool(
        kernel == layer["stride"]
        and layer["padding"] == (0, 0)
        and all(n // k == o for n, k, o in zip(before, kernel, after, strict=True))
    )


def _make_product_stage(
    layer: LayerSpec, index: int, source: int, inside: Shape, names: set[str]
) -> Stage:
    options: dict[str, Any] = dict(layer.options)
    weight, bias = f"{layer.name}.weight", f"{layer.name}.bias" if options["bias"] else ""
    if not {weight, bias} <= names | {""}:
        raise KernelUnavailable(f"{layer.name!r} shares its tensors with another layer")
    out = _to_planes(layer.out)
    if layer.kind == "linear":
        if len(layer.inside) != 1:
            raise KernelUnavailable(
                f"Linear at {layer.name!r} on samples of shape {layer.inside}; flatten first"
            )
        return Stage("linear", index, (source,), inside, out, out, weight=weight, bias=bias)
    if options["groups"] != 1 or options["dilation"] != (1, 1):
        raise KernelUnavailable(
            f"convolution at {layer.name!r} with groups {options['groups']}, dilation"
            f" {options['dilation']}"
        )
    how = {key: options[key] for key in ("kernel", "stride", "padding")}
    return Stage("conv", index, (source,), inside, out, out, weight=weight, bias=bias, **how)


def _read_norm(layer: LayerSpec, names: set[str]) -> Norm:
    if not layer["running"] or layer["momentum"] is None:
        raise KernelUnavailable(
            f"BatchNorm at {layer.name!r} without running statistics or momentum"
        )
    gamma, beta, mean, var = (
        f"{layer.name}.{x}" for x in ("weight", "bias", "running_mean", "running_var")
    )
    gamma, beta = (gamma, beta) if layer["affine"] else ("", "")
    if not {gamma, beta, mean, var} <= names | {""}:
        raise KernelUnavailable(f"{layer.name!r} shares its tensors with another layer")
    return Norm(gamma, beta, mean, var, layer["eps"], layer["momentum"])


def _read_group(layer: LayerSpec, names: set[str]) -> Group:
    gamma = f"{layer.name}.weight" if layer["weight"] else ""
    beta = f"{layer.name}.bias" if layer["bias"] else ""
    if not {gamma, beta} <= names | {""}:
        raise KernelUnavailable(f"{layer.name!r} shares its tensors with another layer")
    return Group(layer["groups"], gamma, beta, layer["eps"])
