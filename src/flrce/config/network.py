"""The network that an experiment names: one of ours, or the user's own."""

import inspect
from typing import Any

import torch

from flrce.core.user_code import import_object, validate_factory
from flrce.data.sources import SampleSpec
from flrce.errors import BadInput, describe_exception, explain_shortage, format_one_line
from flrce.models.nets import NetworkRequirements, build_network, choose_network


def build_net(name: str, spec: SampleSpec, seed: int, options: dict[str, Any] | None = None) -> Any:
    """The network an experiment names, for these samples.

    A class of the user's gets, if it asks for them, `shape` (of one sample), `outputs` (how many
    numbers it is to give; also as `classes`) and `vocabulary` (how many token ids there are), and
    the options of the experiment.
    """
    if ":" not in name:
        name, every = resolve_network_name(name, spec), spec.predicts_every_position
        return build_network(
            name, spec.shape, spec.outputs, seed, spec.vocabulary, every, options, spec.shift < 0
        )
    make = import_object(name, "model.name")
    validate_factory(make, name, "model.name", _explain_wrong_network, "network")
    known = {"shape": spec.shape, "outputs": spec.outputs, "classes": spec.outputs}
    known["vocabulary"] = spec.vocabulary
    wanted = inspect.signature(make).parameters
    given = {**{key: value for key, value in known.items() if key in wanted}, **(options or {})}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _call_factory(make, name, given)
    if not isinstance(net, torch.nn.Module):
        raise BadInput(
            f"model.name {name!r} gives a {type(net).__name__}; it must be a torch.nn.Module"
        )
    return net


def _call_factory(make: Any, name: str, given: dict[str, Any]) -> Any:
    """What a class or function of the user's makes of these arguments, or BadInput."""
    try:
        return make(**given)
    except TypeError as why:
        raise BadInput(
            f"model.name {name!r} cannot be built: {why}; accept shape, outputs, vocabulary or"
            " nothing, and give the rest in model.options"
        ) from why
    except BadInput:
        raise
    except Exception as why:  # whatever a network of the user's may raise
        if explain_shortage(why):
            raise
        raise BadInput(
            f"model.name {name!r} cannot be built with {format_one_line(given, 160)}:"
            f" {describe_exception(why)}"
        ) from why


def resolve_network_name(name: str, spec: SampleSpec) -> str:
    """The network that "auto" means: for hashed text a linear one, which has least traffic."""
    if name != "auto":
        return name
    columns = spec.preprocessing.columns if spec.preprocessing else ()
    if any(column.buckets for column in columns):
        return "linear"
    return choose_network(
        NetworkRequirements(
            spec.shape, spec.outputs, spec.vocabulary, spec.predicts_every_position, spec.shift < 0
        )
    )


def _explain_wrong_network(kind: type) -> str:
    """Why instances of this class are no networks; "" if they are."""
    if issubclass(kind, torch.nn.Module):
        return ""
    return f"class {kind.__name__} must subclass torch.nn.Module; see docs/models-own.md"
