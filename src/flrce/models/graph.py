"""A feed-forward module as layers and what feeds each of them, read with torch.fx.

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
from flrce.models.kinds import CALLS, Add, Kinds, Mean, known, options
from flrce.models.tracing import hooked, line, tied, traced

SAMPLE = -1  # the number of what comes in


@dataclass(frozen=True)
class Layer:
    """One step of a network. `name` is the module's path ("" for a function), `inside`/`out` one sample's shapes."""

    kind: str
    name: str
    inside: tuple[int, ...]
    out: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, key: str) -> Any:
        return dict(self.options)[key]


@dataclass(frozen=True)
class Node:
    """A layer and the nodes that feed it, by number."""

    layer: Layer
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """A module's layers, each after those that feed it; `output` is the last one's number where all goes into it."""

    nodes: tuple[Node, ...]
    output: int | None


def graph(module: nn.Module, shape: tuple[int, ...], kinds: Kinds, branches: bool = True) -> Graph:
    """The module's layers for one sample of this shape; BadInput if it has others than of these kinds.

    Without `branches` each layer must be fed by the last.
    """
    owner = type(module).__name__
    if found := hooked(module):  # such as torch's older weight_norm and spectral_norm
        raise BadInput(f"{owner} has {found}; a chain's layers have none")
    if found := tied(module):
        raise BadInput(f"{owner} has {found}; a chain's layers share none")
    try:
        steps = traced(module, kinds)
    except BadInput:
        raise
    except Exception as why:  # torch.fx raises many kinds for what it cannot trace
        raise BadInput(f"{owner} cannot be traced by torch.fx ({line(why)}); use a plain chain") from why
    training = module.training
    module.eval()
    try:
        read = _walked(steps, module, shape, kinds, branches)
    finally:
        module.train(training)
    names = [node.layer.name for node in read.nodes if node.layer.name]
    if len(set(names)) < len(names):
        raise BadInput(f"{owner} uses a layer twice; a chain uses each once")
    return read


def _walked(traced: fx.Graph, module: nn.Module, shape: tuple[int, ...], kinds: Kinds, branches: bool) -> Graph:
    """The graph's layers, with the shapes that two samples of zeros take on their way."""
    owner, modules = type(module).__name__, dict(module.named_modules())
    nodes: list[Node] = []
    values: dict[fx.Node, tuple[int, Tensor]] = {}
    sizes: dict[fx.Node, Any] = {}  # numbers that code asks shapes for, as in x.view(x.size(0), -1)
    previous: fx.Node | None = None
    output = None
    for step in traced.nodes:
        if step.op == "placeholder":
            if previous is not None:
                raise BadInput(f"{owner} takes more than one input; a chain has one")
            values[step] = (SAMPLE, torch.zeros(2, *shape))
        elif step.op == "output":
            last = step.args[0]
            output = values[last][0] if isinstance(last, fx.Node) and last in values else None
            break
        elif (size := _size(step, values, sizes)) is not None:
            sizes[step] = size
            continue
        else:
            kind, name, call = _read(step, modules, owner, kinds)
            fed = [one for one in _fed(step, kind, owner) if one not in sizes]
            if not branches and fed != [previous]:
                raise BadInput(f"{owner} branches at {step.name!r}; a chain feeds each layer from the last")
            if branches and _overwrites(step, call) and len([one for one in fed[0].users if one not in sizes]) > 1:
                raise BadInput(f"{owner} changes in place at {step.name!r} what another layer reads")
            given = [values[one][1] for one in fed]
            inside = tuple(given[0].shape[1:])
            y = _done(call, given, f"{owner} at {step.name!r}")
            if kind == "flatten" and step.op != "call_module" and not _flattens(step, given[0], sizes):
                raise BadInput(f"{owner} shapes samples anew at {step.name!r}; a chain only flattens them")
            if kind == "identity":
                values[step] = (values[fed[0]][0], y)
            else:
                how = options(kind, call, inside)
                layer = Layer(kind, name, inside, tuple(y.shape[1:]), tuple(sorted(how.items())))
                nodes.append(Node(layer, tuple(values[one][0] for one in fed)))
                values[step] = (len(nodes) - 1, y)
        previous = step
    return Graph(tuple(nodes), output)


def _fed(step: fx.Node, kind: str, owner: str) -> list[fx.Node]:
    """The steps whose values a step takes, in order."""
    if kind != "add":
        return list(step.all_input_nodes)
    fed = [value for value in (*step.args, *step.kwargs.values()) if isinstance(value, fx.Node)]
    if len(fed) != 2 or len(step.args) + len(step.kwargs) != 2:
        raise BadInput(f"{owner} adds something other than two layers' outputs at {step.name!r}")
    return fed


def _size(step: fx.Node, values: Mapping[fx.Node, tuple[int, Tensor]], sizes: Mapping[fx.Node, Any]) -> Any:
    """What a step asks of a shape: all of it, or a number of it; None where it does something else."""
    first = step.args[0] if step.args else None
    if not isinstance(first, fx.Node):
        return None
    rest: Any = step.args[1:]
    if first in values and (step.target == "size" or (step.target is getattr and rest == ("shape",))):
        shape = values[first][1].shape
        return shape[rest[0]] if step.target == "size" and rest else shape
    return sizes[first][rest[0]] if first in sizes and step.target is operator.getitem else None


def _done(call: Any, given: Sequence[Tensor], where: str) -> Tensor:
    """What a layer makes of two samples."""
    try:
        with torch.no_grad():
            y: Tensor = call(*given)
    except BadInput:
        raise
    except Exception as why:  # a step that was taken for a layer and is none
        raise BadInput(f"{where} does something that its layers do not say ({line(why)})") from why
    return y


def _flattens(step: fx.Node, x: Tensor, sizes: Mapping[fx.Node, Any]) -> bool:
    """Whether a view, reshape or flatten leaves each of the samples x (2, ...) a vector."""
    known = {key: sizes.get(value, value) for key, value in step.kwargs.items()}  # type: ignore[arg-type]
    args = fx.node.map_arg(step.args[1:], lambda one: sizes.get(one, one))
    call = step.target if callable(step.target) else getattr(type(x), str(step.target))
    try:
        return tuple(call(x, *args, **known).shape) == (len(x), x[0].numel())
    except (RuntimeError, TypeError, IndexError):
        return False


def _overwrites(step: fx.Node, call: Any) -> bool:
    if step.op == "call_module":
        return bool(getattr(call, "inplace", False))
    inplace = step.kwargs.get("inplace") or (step.target is F.relu and len(step.args) > 1 and step.args[1])
    return bool(inplace) or step.target in (operator.iadd, "add_")


def _read(node: fx.Node, modules: dict[str, nn.Module], owner: str, kinds: Kinds) -> tuple[str, str, Any]:
    """(kind, module path, the layer as a function) of one graph node."""
    if node.op == "call_module":
        layer = modules[str(node.target)]
        kind = kinds.get(type(layer))
        if kind is None:
            raise BadInput(f"{owner} has a {type(layer).__name__} at {node.target!r}; known layers: {known(kinds)}")
        if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1):
            raise BadInput(f"{owner} flattens dimensions {layer.start_dim} to {layer.end_dim}; only 1 to -1 is a chain")
        return kind, str(node.target), layer
    kind = CALLS.get(node.target)
    if node.target is torch.reshape or (node.op == "call_method" and node.target in ("view", "reshape")):
        kind = "flatten"
    if kind is None or kind not in kinds.values():
        called = getattr(node.target, "__name__", node.target)
        raise BadInput(f"{owner} calls {called!r}; known layers: {known(kinds)}")
    return kind, "", _called(kind, node)


def _called(kind: str, node: fx.Node) -> Any:
    """The layer that a function or method without weights stands for."""
    rest = {key: value for key, value in node.kwargs.items() if key != "inplace"}
    args = node.args[1:]
    if kind == "maxpool":
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        values: dict[str, Any] = {**dict(zip(names, args, strict=False)), **rest}
        return nn.MaxPool2d(**{key: value for key, value in values.items() if key in names and value is not None})
    if kind == "avgpool":
        first: Any = args[0] if args else next((rest[key] for key in ("dim", "output_size") if key in rest), None)
        if first is None:
            raise BadInput(f"a mean over all samples at {node.name!r}; a chain only averages planes")
        if node.target in ("mean", torch.mean):
            return Mean(first, bool(rest.get("keepdim", args[1] if len(args) > 1 else False)))
        return nn.AdaptiveAvgPool1d(first) if node.target is F.adaptive_avg_pool1d else nn.AdaptiveAvgPool2d(first)
    return {"flatten": nn.Flatten, "relu": nn.ReLU, "tanh": nn.Tanh, "add": Add}[kind]()
