"""Networks by name: the paper's CNNs, and at least one for every kind of sample."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import nn

from flrce.core.bounds import NonEmptyText, PositiveFloat, make_schema
from flrce.errors import BadInput, suggest_name
from flrce.models.gpt import GPT
from flrce.models.resnet import ResNet
from flrce.models.sequences import RecurrentNetwork, TimeSeriesCNN

log = logging.getLogger("flrce")
SampleKind = Literal["images", "series", "tokens", "numbers"]
LayerSize = Annotated[int, Ge(1), Le(1 << 20)]  # of a layer, or how many there are


def _make_convolutions(channels: int, widths: tuple[int, int], **how: Any) -> list[nn.Module]:
    """Two convolutions, each with BatchNorm, ReLU and a pool that halves the image."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Conv2d(channels, width, **how), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return [*layers, nn.Flatten()]


def _build_cifar_cnn(classes: int, tanh: bool = False) -> nn.Sequential:
    """conv 3-6-16 (3x3, pad 1); fc 1024-120-84 without bias; fc-classes.

    `tanh`: the released code's network for CIFAR100 (`cifar100/models.py` at commit bae0216), which
    has a tanh behind the ReLU of each hidden linear layer. It bounds what reaches the last layer;
    the paper's text has no word of it.
    """
    layers = _make_convolutions(3, (6, 16), kernel_size=3, padding=1)
    for inside, out in ((1024, 120), (120, 84)):
        layers += [nn.Linear(inside, out, bias=False), nn.ReLU(), *([nn.Tanh()] if tanh else [])]
    return nn.Sequential(*layers, nn.Linear(84, classes))


def _build_emnist_cnn(classes: int) -> nn.Sequential:
    """conv 1-20-20 (3x3, pad 1); fc 980-classes."""
    layers = _make_convolutions(1, (20, 20), kernel_size=3, padding=1)
    return nn.Sequential(*layers, nn.Linear(980, classes))


def _build_speech_cnn(classes: int) -> nn.Sequential:
    """conv 1-50-50 (2x2, stride 2, pad 2) on 32x32 features; fc 450-classes."""
    layers = _make_convolutions(1, (50, 50), kernel_size=2, stride=2, padding=2)
    return nn.Sequential(*layers, nn.Linear(450, classes))


def _build_digits_cnn(classes: int) -> nn.Sequential:
    """A small relative of the EMNIST net for 8x8 images."""
    layers = _make_convolutions(1, (8, 16), kernel_size=3, padding=1)
    return nn.Sequential(*layers, nn.Linear(64, classes))


#: name -> (input shape it wants, or None for any; builder from number of classes)
PAPER_CNNS: dict[str, tuple[tuple[int, ...], Callable[[int], nn.Sequential]]] = {
    "cnn-cifar": ((3, 32, 32), _build_cifar_cnn),
    "cnn-emnist": ((1, 28, 28), _build_emnist_cnn),
    "cnn-speech": ((1, 32, 32), _build_speech_cnn),
    "cnn-digits": ((1, 8, 8), _build_digits_cnn),
    "cnn-cifar-tanh": ((3, 32, 32), partial(_build_cifar_cnn, tanh=True)),
}


@dataclass(frozen=True)
class NetworkRequirements:
    """What a network is to take and to give."""

    shape: tuple[int, ...]  # of one sample
    outputs: int
    vocabulary: int = 0  # token ids there are; 0: samples are numbers
    every: bool = False  # an answer after every token, not only after the last
    signed: bool = False  # images of -1..1 instead of 0..1

    @property
    def sample_kind(self) -> SampleKind:
        if self.vocabulary:
            return "tokens"
        return {3: "images", 2: "series"}.get(len(self.shape), "numbers")  # type: ignore[return-value]


@dataclass(frozen=True)
class NetworkKind:
    """One kind of network: the samples it takes, its builder, and its options."""

    takes: SampleKind  # "numbers": of any shape
    make: Callable[..., nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)  # name -> type, with its bounds


def _build_linear(need: NetworkRequirements) -> nn.Sequential:
    """Logistic regression where classes are to be told, linear regression where values are."""
    return nn.Sequential(nn.Flatten(), nn.Linear(int(torch.Size(need.shape).numel()), need.outputs))


def _build_mlp(need: NetworkRequirements, hidden: int = 64) -> nn.Sequential:
    width = int(torch.Size(need.shape).numel())
    layers = (nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, need.outputs))
    return nn.Sequential(nn.Flatten(), *layers)


def _make_resnet_kind(
    widths: tuple[int, ...], blocks: int, norm: Literal["group", "batch"]
) -> NetworkKind:
    def build_resnet(need: NetworkRequirements) -> nn.Module:
        return ResNet(need.shape[0], need.outputs, widths, blocks, norm)

    return NetworkKind("images", build_resnet)


def _make_recurrent_kind(cell: Literal["lstm", "gru"]) -> NetworkKind:
    def build_recurrent(need: NetworkRequirements, **more: int) -> nn.Module:
        return RecurrentNetwork(need.vocabulary, need.outputs, need.every, cell, **more)

    options = dict.fromkeys(("embedding", "width", "layers"), LayerSize)
    return NetworkKind("tokens", build_recurrent, options)


def _build_gpt(need: NetworkRequirements, **more: int) -> nn.Module:
    return GPT(need.vocabulary, need.outputs, need.shape[0], need.every, **more)


def _build_llama(
    need: NetworkRequirements,
    path: str = "smollm2",
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | list[str] = "q_proj,v_proj",
    dtype: str = "float32",
    recompute: bool = False,
    seeds: int = 0,
) -> nn.Module:
    from flrce.models.adapters import add_lora_adapters
    from flrce.models.flat import freeze_parameters
    from flrce.models.llama import load_llama
    from flrce.models.seeds import SeedSpaceNetwork

    # probes have no backward pass
    net = load_llama(path, dtype, need.every, recompute and not seeds)
    if need.vocabulary > net.vocabulary:
        raise BadInput(
            f"the data has token ids up to {need.vocabulary - 1}, the model knows"
            f" {net.vocabulary}; set data.tokenizer to the model's path"
        )
    if need.shape[0] > net.context:
        text = "samples of %d ids, and the model was made for %d: perplexity suffers beyond;"
        log.warning(f"{text} lower data.length", need.shape[0], net.context)
    adapted = add_lora_adapters(net, rank, alpha, targets)
    if seeds:
        return SeedSpaceNetwork(
            freeze_parameters(adapted, ["*.lora_A"]), seeds, int(torch.randint(2**31, ()))
        )
    return adapted


def _build_time_series_cnn(need: NetworkRequirements, **more: int) -> nn.Module:
    return TimeSeriesCNN(need.shape[0], need.outputs, **more)


LLAMA_OPTIONS: dict[str, Any] = {
    "path": NonEmptyText,
    "rank": Annotated[int, Ge(1), Le(4096)],
    "alpha": PositiveFloat,
    "targets": NonEmptyText | list[NonEmptyText],
    "dtype": Literal["float32", "bfloat16"],
    "recompute": bool,
    "seeds": Annotated[int, Ge(0), Le(1 << 20)],
}
NARROW, WIDE = (16, 32, 64), (64, 128, 256, 512)
NETWORK_KINDS: dict[str, NetworkKind] = {
    "mlp": NetworkKind("numbers", _build_mlp, {"hidden": LayerSize}),
    "logistic": NetworkKind("numbers", _build_linear),
    "linear": NetworkKind("numbers", _build_linear),
    "resnet-8": _make_resnet_kind(NARROW, 1, "group"),
    "resnet-8-bn": _make_resnet_kind(NARROW, 1, "batch"),
    "resnet-20": _make_resnet_kind(NARROW, 3, "group"),
    "resnet-20-bn": _make_resnet_kind(NARROW, 3, "batch"),
    "resnet-18": _make_resnet_kind(WIDE, 2, "group"),
    "resnet-18-bn": _make_resnet_kind(WIDE, 2, "batch"),
    "cnn-1d": NetworkKind("series", _build_time_series_cnn, {"width": LayerSize}),
    "lstm": _make_recurrent_kind("lstm"),
    "gru": _make_recurrent_kind("gru"),
    "gpt": NetworkKind(
        "tokens", _build_gpt, dict.fromkeys(("layers", "width", "heads"), LayerSize)
    ),
    "llama": NetworkKind("tokens", _build_llama, LLAMA_OPTIONS),
}
NETWORK_NAMES = ("auto", *PAPER_CNNS, *NETWORK_KINDS)


def choose_network(need: NetworkRequirements) -> str:
    """The net for such samples: an LSTM for token ids, the paper's of this shape, else an MLP."""
    if need.sample_kind == "tokens":
        return "lstm"
    if need.sample_kind == "series":
        return "cnn-1d"
    return next((name for name, (wanted, _) in PAPER_CNNS.items() if wanted == need.shape), "mlp")


def build_network(
    name: str,
    shape: tuple[int, ...],
    outputs: int,
    seed: int,
    vocabulary: int = 0,
    every: bool = False,
    options: Mapping[str, Any] | None = None,
    signed: bool = False,
) -> nn.Module:
    """A new net. The same seed gives the same weights, whatever was drawn before."""
    need = NetworkRequirements(shape, outputs, vocabulary, every, signed)
    if name == "auto":
        name = choose_network(need)
    options = dict(options or {})
    _validate_network_options(name, need, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in PAPER_CNNS:
            return PAPER_CNNS[name][1](outputs)
        try:
            return NETWORK_KINDS[name].make(need, **options)
        except BadInput:
            raise
        except (TypeError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as why:
            raise BadInput(
                f"model.name {name!r} with options {options} cannot be built: {why}"
            ) from why


def _validate_network_options(
    name: str, need: NetworkRequirements, options: Mapping[str, Any]
) -> None:
    """Refuses samples that the net cannot take, and options it does not have."""
    known: Mapping[str, Any] = {}
    if name in PAPER_CNNS:
        wanted = PAPER_CNNS[name][0]
        if need.vocabulary or wanted != need.shape:
            raise BadInput(
                f"model.name {name!r} wants samples of shape {wanted}, the data has {need.shape};"
                " use auto"
            )
    else:
        takes, known = NETWORK_KINDS[name].takes, NETWORK_KINDS[name].options
        if takes != need.sample_kind and not (takes == "numbers" and need.sample_kind != "tokens"):
            raise BadInput(
                f"model.name {name!r} takes {takes}, the data has {need.sample_kind} of shape"
                f" {need.shape}; use auto"
            )
    for key in options:
        if key not in known:
            raise BadInput(
                f"model.options.{key} is no option of {name};"
                f" {suggest_name(key, known) if known else 'it has none'}"
            )
    why, _ = make_schema(name, {key: (kind, None) for key, kind in known.items()}).validate_values(
        options
    )
    if why:
        raise BadInput(f"model.options.{why}")
