"""What a module calls in order, by torch.fx; and hooks and shared parameters."""

import copy
from collections.abc import Iterator
from threading import Lock

import torch
from torch import fx, nn

from flrce.errors import BadInput
from flrce.models.drawing import get_rng_states, preserve_rng_states
from flrce.models.kinds import LayerKinds

#: torch.fx patches nn.Module while it traces, so one thread at a time, and none may run a module
#: meanwhile
TRACING_LOCK = Lock()


def find_hooks(module: nn.Module) -> str:
    """Where a hook runs that a layer's own code does not show; "" if none does."""
    for path, layer in module.named_modules():
        forward = layer._forward_hooks or layer._forward_pre_hooks
        if forward or layer._backward_hooks or layer._backward_pre_hooks:
            return f"a hook at {path!r}" if path else "a hook"
    return ""


def find_tied_parameters(module: nn.Module) -> str:
    """A parameter with two names; "" if there is none. A layer used twice is none."""
    first: dict[int, str] = {}
    for path, layer in module.named_modules():
        for name, p in layer.named_parameters(path, recurse=False):
            if id(p) in first:
                return f"one parameter as {first[id(p)]!r} and {name!r}"
            first[id(p)] = name
    return ""


def is_plain_sequence(module: nn.Module, kinds: LayerKinds) -> bool:
    """Whether a module is a plain sequence of such layers, each once, with no code of its own."""
    leaves = [layer for _, layer in _iter_sequence_layers(module, "")]
    plain = bool(leaves) and all(type(layer) in kinds for layer in leaves)
    return plain and len({id(layer) for layer in leaves}) == len(leaves)


def trace_graph(module: nn.Module, kinds: LayerKinds) -> fx.Graph:
    """What feeds what. A plain sequence is told, not traced: see TRACING."""
    if is_plain_sequence(module, kinds):
        graph = fx.Graph()
        x = graph.placeholder("x")
        for path, _ in _iter_sequence_layers(module, ""):
            x = graph.call_module(path, (x,))
        graph.output(x)
        return graph
    host = torch.device("cpu")
    with TRACING_LOCK, preserve_rng_states(host):
        before = get_rng_states(host)
        graphs = [
            fx.symbolic_trace(copy.deepcopy(module).train(mode)).graph for mode in (True, False)
        ]
        if get_rng_states(host) != before:
            raise BadInput(f"{type(module).__name__} draws at random without a layer that says so")
    if _format_steps(graphs[0]) != _format_steps(graphs[1]):
        raise BadInput(f"{type(module).__name__} calls other layers in training than in evaluation")
    return graphs[0]


def _format_steps(graph: fx.Graph) -> list[str]:
    return [f"{step.op} {step.target} {step.args} {step.kwargs}" for step in graph.nodes]


def _iter_sequence_layers(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """(path, layer) of nested sequences in order; nothing for any other module."""
    if type(module) is nn.Sequential:
        for name, child in module._modules.items():
            if child is not None:
                yield from _iter_sequence_layers(child, f"{path}.{name}".lstrip("."))
    elif path:
        yield path, module


def get_first_line(why: Exception) -> str:
    return str(why).splitlines()[0] if str(why) else type(why).__name__
