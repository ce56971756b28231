"""A feed-forward module as layers and what feeds each of them, read with torch.fx.

Hooks, shared parameters, layers used twice and unknown operations are refused with the reason.
"""

import copy
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from flrce.errors import BadInput
from flrce.models.kinds import CALLS, Add, Kinds, Mean, known, options

#: torch.fx patches nn.Module while it traces, so one thread at a time, and none may run a module meanwhile
TRACING = Lock()
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
    if found := _tied(module):
        raise BadInput(f"{owner} has {found}; a chain's layers share none")
    try:
        traced = _traced(module, kinds)
    except Exception as why:  # torch.fx raises many kinds for what it cannot trace
        raise BadInput(f"{owner} cannot be traced by torch.fx ({_line(why)}); use a plain chain") from why
    training = module.training
    module.eval()
    try:
        read = _walked(traced, module, shape, kinds, branches)
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
    previous: fx.Node | None = None
    output = None
    for step in traced.nodes:
        if step.op == "placeholder":
            if previous is not None:
                raise BadInput(f"{owner} takes more than one input; a chain has one")
            values[step] = (SAMPLE, torch.zeros(2, *shape))
        elif step.op == "output":
            last = step.args[0]
            output = values[last][0] if isinstance(last, fx.Node) else None
            break
        else:
            kind, name, call = _read(step, modules, owner, kinds)
            fed = _fed(step, kind, owner)
            if not branches and fed != [previous]:
                raise BadInput(f"{owner} branches at {step.name!r}; a chain feeds each layer from the last")
            if branches and _overwrites(step, call) and len(fed[0].users) > 1:
                raise BadInput(f"{owner} changes in place at {step.name!r} what another layer reads")
            inside = tuple(values[fed[0]][1].shape[1:])
            with torch.no_grad():
                y = call(*(values[one][1] for one in fed))
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


def _overwrites(step: fx.Node, call: Any) -> bool:
    if step.op == "call_module":
        return bool(getattr(call, "inplace", False))
    inplace = step.kwargs.get("inplace") or (step.target is F.relu and len(step.args) > 1 and step.args[1])
    return bool(inplace) or step.target in (operator.iadd, "add_")


def hooked(module: nn.Module) -> str:
    """Where something happens as a layer is called that its own code does not say; "" where nothing does."""
    for path, layer in module.named_modules():
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return f"a hook at {path!r}" if path else "a hook"
    return ""


def _tied(module: nn.Module) -> str:
    """Parameters that go by two names; "" where there are none. Those of a layer used twice are its own."""
    first: dict[int, str] = {}
    for path, layer in module.named_modules():
        for name, p in layer.named_parameters(path, recurse=False):
            if id(p) in first:
                return f"one parameter as {first[id(p)]!r} and {name!r}"
            first[id(p)] = name
    return ""


def _traced(module: nn.Module, kinds: Kinds) -> fx.Graph:
    """What feeds what. A plain sequence is told, not traced: see TRACING."""
    leaves = list(_leaves(module, ""))
    plain = bool(leaves) and all(type(layer) in kinds for _, layer in leaves)
    if not plain or len({id(layer) for _, layer in leaves}) < len(leaves):
        with TRACING:
            return fx.symbolic_trace(copy.deepcopy(module)).graph  # what forward sets on itself would stay behind
    graph = fx.Graph()
    x = graph.placeholder("x")
    for path, _ in leaves:
        x = graph.call_module(path, (x,))
    graph.output(x)
    return graph


def _leaves(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """(path, layer) of a sequence and the sequences within it, in order; nothing for any other module."""
    if type(module) is nn.Sequential:
        for name, child in module._modules.items():
            if child is not None:
                yield from _leaves(child, f"{path}.{name}".lstrip("."))
    elif path:
        yield path, module


def _line(why: Exception) -> str:
    return str(why).splitlines()[0] if str(why) else type(why).__name__


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
    if node.op == "call_method" and node.target in ("view", "reshape"):
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
        first: Any = args[0] if args else next(iter(rest.values()))
        if node.target in ("mean", torch.mean):
            return Mean(first, bool(rest.get("keepdim", args[1] if len(args) > 1 else False)))
        return nn.AdaptiveAvgPool1d(first) if node.target is F.adaptive_avg_pool1d else nn.AdaptiveAvgPool2d(first)
    return {"flatten": nn.Flatten, "relu": nn.ReLU, "tanh": nn.Tanh, "add": Add}[kind]()
