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

KINDS: dict[type[nn.Module], str] = {
    nn.Conv2d: "conv", nn.Linear: "linear", nn.BatchNorm2d: "batchnorm", nn.BatchNorm1d: "batchnorm",
    nn.ReLU: "relu", nn.Tanh: "tanh", nn.MaxPool2d: "maxpool", nn.Flatten: "flatten", nn.Dropout: "dropout",
    nn.Identity: "identity",
}  # fmt: skip
#: functions and methods that stand for a layer without parameters
CALLS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", "relu": "relu", torch.tanh: "tanh", F.tanh: "tanh", "tanh": "tanh",
    F.max_pool2d: "maxpool", torch.max_pool2d: "maxpool", torch.flatten: "flatten", "flatten": "flatten",
}  # fmt: skip
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


def chain(module: nn.Module, shape: tuple[int, ...]) -> Chain:
    """The module's layers for one sample of this shape; BadInput if it is no plain chain of known layers."""
    if isinstance(module, Chained) and not module.chained:
        raise BadInput(f"{type(module).__name__} branches; a chain feeds each layer from the last")
    try:
        graph = _graph(module)
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
                kind, name, options, call = _read(node, modules, type(module).__name__)
                inputs = node.all_input_nodes
                if inputs != [previous]:
                    raise BadInput(
                        f"{type(module).__name__} branches at {node.name!r}; a chain feeds each layer from the last"
                    )
                with torch.no_grad():
                    y = call(x)
                if kind not in ("identity",):
                    layers.append(
                        Layer(kind, name, tuple(x.shape[1:]), tuple(y.shape[1:]), tuple(sorted(options.items())))
                    )
                x = y
            previous = node
    finally:
        module.train(training)
    names = [layer.name for layer in layers if layer.name]
    if len(set(names)) < len(names):
        raise BadInput(f"{type(module).__name__} uses a layer twice; a chain uses each once")
    return Chain(tuple(layers))


def _graph(module: nn.Module) -> fx.Graph:
    """What feeds what. A plain sequence is told, not traced: see TRACING."""
    leaves = list(_leaves(module, ""))
    known = bool(leaves) and all(type(layer) in KINDS for _, layer in leaves)
    if not known or len({id(layer) for _, layer in leaves}) < len(leaves):
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


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _read(node: fx.Node, modules: dict[str, nn.Module], owner: str) -> tuple[str, str, dict[str, Any], Any]:
    """(kind, module path, options, the layer as a function) of one graph node."""
    if node.op == "call_module":
        layer = modules[str(node.target)]
        kind = KINDS.get(type(layer))
        if kind is None:
            raise BadInput(f"{owner} has a {type(layer).__name__} at {node.target!r}; known layers: {_known()}")
        options = _options(kind, layer)
        if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1):
            raise BadInput(f"{owner} flattens dimensions {layer.start_dim} to {layer.end_dim}; only 1 to -1 is a chain")
        return kind, str(node.target), options, layer
    kind = CALLS.get(node.target)
    if kind is None:
        if node.op == "call_method" and node.target in ("view", "reshape"):
            return "flatten", "", {}, lambda x: x.flatten(1)
        raise BadInput(f"{owner} calls {getattr(node.target, '__name__', node.target)!r}; known layers: {_known()}")
    rest = {k: v for k, v in node.kwargs.items() if k != "inplace"}
    args = tuple(a for a in node.args[1:])
    if kind == "maxpool":
        names = ("kernel", "stride", "padding", "dilation", "ceil")
        values: dict[str, Any] = {"stride": None, "padding": 0, "dilation": 1, "ceil": False}
        values |= dict(zip(names, args, strict=False))
        values |= {("kernel" if k == "kernel_size" else "ceil" if k == "ceil_mode" else k): v for k, v in rest.items()}
        pool = nn.MaxPool2d(values["kernel"], values["stride"] or None, values["padding"], values["dilation"],
                            ceil_mode=bool(values["ceil"]))  # fmt: skip
        return kind, "", _options(kind, pool), pool
    if kind == "flatten":
        return kind, "", {}, lambda x: x.flatten(1)
    return kind, "", {}, torch.relu if kind == "relu" else torch.tanh


def _options(kind: str, layer: Any) -> dict[str, Any]:
    if kind == "conv":
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise BadInput(
                f"Conv2d with padding={layer.padding!r}, mode {layer.padding_mode!r}; use integers and zeros"
            )
        return {
            "bias": layer.bias is not None, "kernel": _pair(layer.kernel_size), "stride": _pair(layer.stride),
            "padding": _pair(layer.padding), "dilation": _pair(layer.dilation), "groups": layer.groups,
        }  # fmt: skip
    if kind == "linear":
        return {"bias": layer.bias is not None}
    if kind == "batchnorm":
        return {
            "eps": layer.eps,
            "momentum": layer.momentum,
            "affine": layer.affine,
            "running": layer.track_running_stats,
        }
    if kind == "maxpool":
        return {
            "kernel": _pair(layer.kernel_size), "stride": _pair(layer.stride), "padding": _pair(layer.padding),
            "dilation": _pair(layer.dilation), "ceil": layer.ceil_mode,
        }  # fmt: skip
    if kind == "dropout":
        return {"p": layer.p}
    return {}


def _known() -> str:
    return ", ".join(sorted(kind.__name__ for kind in KINDS))
