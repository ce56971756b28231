"""A feed-forward module as layers and what feeds each of them, read with torch.fx.

Sub-models, layer freezing and the GPU need a chain: a list of layers, each fed by the last.

Hooks, shared parameters, layers used twice and unknown operations are refused with the reason.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from flrce.errors import BadInput
from flrce.models.abilities import ChainDeclaringNetwork
from flrce.models.kinds import (
    BASIC_KINDS,
    FUNCTION_KINDS,
    AddLayer,
    LayerKinds,
    MeanLayer,
    format_layer_kinds,
    get_layer_options,
)
from flrce.models.tracing import find_hooks, find_tied_parameters, get_first_line, trace_graph

INPUT_NODE = -1  # the number of what comes in


@dataclass(frozen=True)
class LayerSpec:
    """One step of a network: its module's path ("" for a function), one sample's shapes."""

    kind: str
    name: str
    inside: tuple[int, ...]
    out: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, key: str) -> Any:
        return dict(self.options)[key]


@dataclass(frozen=True)
class LayerNode:
    """A layer and the nodes that feed it, by number."""

    layer: LayerSpec
    sources: tuple[int, ...]


@dataclass(frozen=True)
class LayerGraph:
    """A module's layers, each after its sources; `output`: number of the last, if it is one."""

    nodes: tuple[LayerNode, ...]
    output: int | None


def build_layer_graph(
    module: nn.Module, shape: tuple[int, ...], kinds: LayerKinds, branches: bool = True
) -> LayerGraph:
    """The module's layers for a sample of this shape; BadInput if it has others than `kinds`.

    Without `branches` each layer must be fed by the last.
    """
    owner = type(module).__name__
    if problem := find_hooks(module):  # such as torch's older weight_norm and spectral_norm
        raise BadInput(f"{owner} has {problem}; a chain's layers have none")
    if problem := find_tied_parameters(module):
        raise BadInput(f"{owner} has {problem}; a chain's layers share none")
    try:
        steps = trace_graph(module, kinds)
    except BadInput:
        raise
    except Exception as why:  # torch.fx raises many kinds for what it cannot trace
        raise BadInput(
            f"{owner} cannot be traced by torch.fx ({get_first_line(why)}); use a plain chain"
        ) from why
    training = module.training
    module.eval()
    try:
        read = _walk_traced_graph(steps, module, shape, kinds, branches)
    finally:
        module.train(training)
    names = [node.layer.name for node in read.nodes if node.layer.name]
    if len(set(names)) < len(names):
        raise BadInput(f"{owner} uses a layer twice; a chain uses each once")
    return read


def _walk_traced_graph(
    traced: fx.Graph, module: nn.Module, shape: tuple[int, ...], kinds: LayerKinds, branches: bool
) -> LayerGraph:
    """The graph's layers, with the shapes that two samples of zeros take on their way."""
    owner, modules = type(module).__name__, dict(module.named_modules())
    nodes: list[LayerNode] = []
    values: dict[fx.Node, tuple[int, Tensor]] = {}
    sizes: dict[fx.Node, Any] = {}  # numbers that code asks shapes for, as in x.view(x.size(0), -1)
    previous: fx.Node | None = None
    output = None
    for step in traced.nodes:
        if step.op == "placeholder":
            if previous is not None:
                raise BadInput(f"{owner} takes more than one input; a chain has one")
            values[step] = (INPUT_NODE, torch.zeros(2, *shape))
        elif step.op == "output":
            last = step.args[0]
            output = values[last][0] if isinstance(last, fx.Node) and last in values else None
            break
        elif (size := _evaluate_shape_query(step, values, sizes)) is not None:
            sizes[step] = size
            continue
        else:
            where = f"at {step.name!r}"
            kind, name, call = _identify_layer(step, modules, owner, kinds)
            fed = [one for one in _list_input_steps(step, kind, owner) if one not in sizes]
            if not branches and fed != [previous]:
                raise BadInput(f"{owner} branches {where}; a chain feeds each layer from the last")
            readers = [one for one in fed[0].users if one not in sizes] if branches else []
            if len(readers) > 1 and _is_in_place(step, call):
                raise BadInput(f"{owner} changes in place {where} what another layer reads")
            given = [values[one][1] for one in fed]
            inside = tuple(given[0].shape[1:])
            y = _run_layer(call, given, f"{owner} {where}")
            reshapes = kind == "flatten" and step.op != "call_module"
            if reshapes and not _is_flatten(step, given[0], sizes):
                raise BadInput(f"{owner} shapes samples anew {where}; a chain only flattens them")
            if kind == "identity":
                values[step] = (values[fed[0]][0], y)
            else:
                options = tuple(sorted(get_layer_options(kind, call, inside).items()))
                layer = LayerSpec(kind, name, inside, tuple(y.shape[1:]), options)
                nodes.append(LayerNode(layer, tuple(values[one][0] for one in fed)))
                values[step] = (len(nodes) - 1, y)
        previous = step
    return LayerGraph(tuple(nodes), output)


def _list_input_steps(step: fx.Node, kind: str, owner: str) -> list[fx.Node]:
    """The steps whose values a step takes, in order."""
    if kind != "add":
        return list(step.all_input_nodes)
    fed = [value for value in (*step.args, *step.kwargs.values()) if isinstance(value, fx.Node)]
    if len(fed) != 2 or len(step.args) + len(step.kwargs) != 2:
        raise BadInput(f"{owner} adds something other than two layers' outputs at {step.name!r}")
    return fed


def _evaluate_shape_query(
    step: fx.Node, values: Mapping[fx.Node, tuple[int, Tensor]], sizes: Mapping[fx.Node, Any]
) -> Any:
    """The shape, or a number of it, that a step asks for; None for other steps."""
    first = step.args[0] if step.args else None
    if not isinstance(first, fx.Node):
        return None
    rest: Any = step.args[1:]
    if first in values and (
        step.target == "size" or (step.target is getattr and rest == ("shape",))
    ):
        shape = values[first][1].shape
        return shape[rest[0]] if step.target == "size" and rest else shape
    return sizes[first][rest[0]] if first in sizes and step.target is operator.getitem else None


def _run_layer(call: Any, given: Sequence[Tensor], where: str) -> Tensor:
    """What a layer makes of two samples."""
    try:
        with torch.no_grad():
            y: Tensor = call(*given)
    except BadInput:
        raise
    except Exception as why:  # a step that was taken for a layer and is none
        raise BadInput(
            f"{where} does something that its layers do not say ({get_first_line(why)})"
        ) from why
    return y


def _is_flatten(step: fx.Node, x: Tensor, sizes: Mapping[fx.Node, Any]) -> bool:
    """Whether a view, reshape or flatten leaves each of the samples x (2, ...) a vector."""
    known = {key: sizes.get(value, value) for key, value in step.kwargs.items()}  # type: ignore[arg-type]
    args = fx.node.map_arg(step.args[1:], lambda one: sizes.get(one, one))
    call = step.target if callable(step.target) else getattr(type(x), str(step.target))
    try:
        return tuple(call(x, *args, **known).shape) == (len(x), x[0].numel())
    except (RuntimeError, TypeError, IndexError):
        return False


def _is_in_place(step: fx.Node, call: Any) -> bool:
    if step.op == "call_module":
        return bool(getattr(call, "inplace", False))
    inplace = step.kwargs.get("inplace") or (
        step.target is F.relu and len(step.args) > 1 and step.args[1]
    )
    return bool(inplace) or step.target in (operator.iadd, "add_")


def _identify_layer(
    node: fx.Node, modules: dict[str, nn.Module], owner: str, kinds: LayerKinds
) -> tuple[str, str, Any]:
    """(kind, module path, the layer as a function) of one graph node."""
    if node.op == "call_module":
        layer = modules[str(node.target)]
        kind = kinds.get(type(layer))
        if kind is None:
            raise BadInput(
                f"{owner} has a {type(layer).__name__} at {node.target!r}; known layers:"
                f" {format_layer_kinds(kinds)}"
            )
        if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1):
            raise BadInput(
                f"{owner} flattens dimensions {layer.start_dim} to {layer.end_dim}; only 1 to -1 is"
                " a chain"
            )
        return kind, str(node.target), layer
    kind = FUNCTION_KINDS.get(node.target)
    if node.target is torch.reshape or (
        node.op == "call_method" and node.target in ("view", "reshape")
    ):
        kind = "flatten"
    if kind is None or kind not in kinds.values():
        called = getattr(node.target, "__name__", node.target)
        raise BadInput(f"{owner} calls {called!r}; known layers: {format_layer_kinds(kinds)}")
    return kind, "", _make_functional_layer(kind, node)


def _make_functional_layer(kind: str, node: fx.Node) -> Any:
    """The layer that a function or method without weights stands for."""
    rest = {key: value for key, value in node.kwargs.items() if key != "inplace"}
    args = node.args[1:]
    if kind == "maxpool":
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        values: dict[str, Any] = {**dict(zip(names, args, strict=False)), **rest}
        return nn.MaxPool2d(
            **{key: value for key, value in values.items() if key in names and value is not None}
        )
    if kind == "avgpool":
        first: Any = args[0] if args else rest.get("dim", rest.get("output_size"))
        if first is None:
            raise BadInput(
                f"a mean over all samples at {node.name!r}; a chain only averages planes"
            )
        if node.target in ("mean", torch.mean):
            return MeanLayer(first, bool(rest.get("keepdim", args[1] if len(args) > 1 else False)))
        if node.target is F.adaptive_avg_pool1d:
            return nn.AdaptiveAvgPool1d(first)
        return nn.AdaptiveAvgPool2d(first)
    return {"flatten": nn.Flatten, "relu": nn.ReLU, "tanh": nn.Tanh, "add": AddLayer}[kind]()


@dataclass(frozen=True)
class LayerChain:
    """A module as a sequence of layers, input first."""

    layers: tuple[LayerSpec, ...]

    @property
    def weight_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that have weights. A block to freeze starts at each of them."""
        return tuple(layer for layer in self.layers if layer.kind in ("conv", "linear"))


def build_layer_chain(
    module: nn.Module, shape: tuple[int, ...], kinds: LayerKinds = BASIC_KINDS
) -> LayerChain:
    """The module's layers for a sample of this shape; BadInput unless it is a chain of `kinds`."""
    if isinstance(module, ChainDeclaringNetwork) and not module.chained:
        raise BadInput(f"{type(module).__name__} branches; a chain feeds each layer from the last")
    return LayerChain(
        tuple(node.layer for node in build_layer_graph(module, shape, kinds, branches=False).nodes)
    )
