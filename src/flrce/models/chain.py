"""A feed-forward module as a plain list of layers, read with torch.fx.

Sub-models, layer freezing and the fused kernels all need to know which tensor feeds which. They ask here, once,
and a module that is not a chain (branches, shared layers, unknown operations) is refused with the reason.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from flrce.errors import BadInput
from flrce.models.abilities import Chained
from flrce.models.kinds import CALLS, KINDS, Kinds, Mean, known, options

#: torch.fx patches nn.Module while it traces, so one thread at a time, and none may run a module meanwhile
TRACING = Lock()


@dataclass(frozen=True)
class Layer:
    """One step of a chain. `name` is the module's path ("" for a function), `inside`/`out` one sample's shapes."""

    kind: str
    name: str
    inside: tuple[int, ...]
    out: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, key: str) -> Any:
        return dict(self.options)[key]


@dataclass(frozen=True)
class Chain:
    """A module as a sequence of layers, input first."""

    layers: tuple[Layer, ...]

    @property
    def trained(self) -> tuple[Layer, ...]:
        """The layers that hold weights to multiply with: a block to freeze starts at each of them."""
        return tuple(layer for layer in self.layers if layer.kind in ("conv", "linear"))

    @property
    def normalised(self) -> bool:
        """Whether any layer needs statistics of a batch, so that a batch of one sample cannot be trained on."""
        return any(layer.kind == "batchnorm" for layer in self.layers)


def chain(module: nn.Module, shape: tuple[int, ...], kinds: Kinds = KINDS) -> Chain:
    """The module's layers for one sample of this shape; BadInput if it is no plain chain of layers of these kinds."""
    if isinstance(module, Chained) and not module.chained:
        raise BadInput(f"{type(module).__name__} branches; a chain feeds each layer from the last")
    if found := hooked(module):  # such as torch's older weight_norm and spectral_norm
        raise BadInput(f"{type(module).__name__} has {found}; a chain's layers have none")
    if found := _tied(module):
        raise BadInput(f"{type(module).__name__} has {found}; a chain's layers share none")
    try:
        graph = _graph(module, kinds)
    except Exception as why:  # torch.fx raises many kinds for what it cannot trace
        raise BadInput(
            f"{type(module).__name__} cannot be traced by torch.fx ({_line(why)}); use a plain chain"
        ) from why
    modules, layers, previous = dict(module.named_modules()), [], None
    x = torch.zeros(2, *shape)
    training = module.training
    module.eval()
    try:
        for node in graph.nodes:
            if node.op == "placeholder":
                if previous is not None:
                    raise BadInput(f"{type(module).__name__} takes more than one input; a chain has one")
            elif node.op == "output":
                break
            else:
                kind, name, call = _read(node, modules, type(module).__name__, kinds)
                inside = tuple(x.shape[1:])
                inputs = node.all_input_nodes
                if inputs != [previous]:
                    raise BadInput(
                        f"{type(module).__name__} branches at {node.name!r}; a chain feeds each layer from the last"
                    )
                with torch.no_grad():
                    y = call(x)
                if kind not in ("identity",):
                    how = options(kind, call, inside)
                    layers.append(Layer(kind, name, inside, tuple(y.shape[1:]), tuple(sorted(how.items()))))
                x = y
            previous = node
    finally:
        module.train(training)
    names = [layer.name for layer in layers if layer.name]
    if len(set(names)) < len(names):
        raise BadInput(f"{type(module).__name__} uses a layer twice; a chain uses each once")
    return Chain(tuple(layers))


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


def _graph(module: nn.Module, kinds: Kinds) -> fx.Graph:
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
    return {"flatten": nn.Flatten, "relu": nn.ReLU, "tanh": nn.Tanh}[kind]()
