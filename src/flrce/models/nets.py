"""Networks by name: the paper's CNNs (its refs. randdrop, hermes), and one or more for every kind of sample."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import nn

from flrce.bounds import Positive, Text, settings
from flrce.errors import BadInput, nearest
from flrce.models.gpt import GPT
from flrce.models.resnet import ResNet
from flrce.models.sequences import Recurrent, Series

log = logging.getLogger("flrce")
Takes = Literal["images", "series", "tokens", "numbers"]
Size = Annotated[int, Ge(1), Le(1 << 20)]  # of a layer, or how many there are


def _cifar(classes: int, tanh: bool = False) -> nn.Sequential:
    """conv 3-6-16 (3x3, pad 1), each BatchNorm-ReLU-pool; fc 1024-120-84 without bias; fc-classes.

    `tanh`: the released code's network for CIFAR100 (`cifar100/models.py` at commit bae0216), which has a tanh behind
    the ReLU of each hidden linear layer. It bounds what reaches the last layer; the paper's text has no word of it.
    """
    first, second = ([nn.Tanh()], [nn.Tanh()]) if tanh else ([], [])  # one module each: a chain shares none
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 120, bias=False), nn.ReLU(), *first,
        nn.Linear(120, 84, bias=False), nn.ReLU(), *second,
        nn.Linear(84, classes),
    )  # fmt: skip


def _emnist(classes: int) -> nn.Sequential:
    """conv 1-20-20 (3x3, pad 1), each BatchNorm-ReLU-pool; fc 980-classes."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3, padding=1), nn.BatchNorm2d(20), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 20, 3, padding=1), nn.BatchNorm2d(20), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(980, classes),
    )  # fmt: skip


def _speech(classes: int) -> nn.Sequential:
    """conv 1-50-50 (2x2, stride 2, pad 2) on 32x32 features, each BatchNorm-ReLU-pool; fc 450-classes."""
    return nn.Sequential(
        nn.Conv2d(1, 50, 2, stride=2, padding=2), nn.BatchNorm2d(50), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(50, 50, 2, stride=2, padding=2), nn.BatchNorm2d(50), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(450, classes),
    )  # fmt: skip


def _digits(classes: int) -> nn.Sequential:
    """A small relative of the EMNIST net for 8x8 images."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, classes),
    )  # fmt: skip


def _mlp(shape: tuple[int, ...], classes: int, hidden: int = 64) -> nn.Sequential:
    width = int(torch.Size(shape).numel())
    return nn.Sequential(nn.Flatten(), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


#: name -> (input shape it wants, or None for any; builder from number of classes)
CNNS: dict[str, tuple[tuple[int, ...], Callable[[int], nn.Sequential]]] = {
    "cnn-cifar": ((3, 32, 32), _cifar),
    "cnn-emnist": ((1, 28, 28), _emnist),
    "cnn-speech": ((1, 32, 32), _speech),
    "cnn-digits": ((1, 8, 8), _digits),
    "cnn-cifar-tanh": ((3, 32, 32), partial(_cifar, tanh=True)),
}


@dataclass(frozen=True)
class Need:
    """What a network is to take and to give."""

    shape: tuple[int, ...]  # of one sample
    outputs: int
    vocabulary: int = 0  # token ids there are; 0: samples are numbers
    every: bool = False  # an answer after every token, not only after the last
    signed: bool = False  # images of -1..1 instead of 0..1

    @property
    def takes(self) -> Takes:
        if self.vocabulary:
            return "tokens"
        return {3: "images", 2: "series"}.get(len(self.shape), "numbers")  # type: ignore[return-value]


@dataclass(frozen=True)
class Net:
    """One kind of network: samples it takes, what builds it of a Need, and arguments it may be given."""

    takes: Takes  # "numbers": of any shape
    make: Callable[..., nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)  # name -> type, with its bounds


def _linear(need: Need) -> nn.Sequential:
    """Logistic regression where classes are to be told, linear regression where values are."""
    return nn.Sequential(nn.Flatten(), nn.Linear(int(torch.Size(need.shape).numel()), need.outputs))


def _resnet(widths: tuple[int, ...], blocks: int, norm: Literal["group", "batch"]) -> Net:
    return Net("images", lambda need: ResNet(need.shape[0], need.outputs, widths, blocks, norm))


def _recurrent(cell: Literal["lstm", "gru"]) -> Net:
    def make(need: Need, **more: int) -> nn.Module:
        return Recurrent(need.vocabulary, need.outputs, need.every, cell, **more)

    return Net("tokens", make, {"embedding": Size, "width": Size, "layers": Size})


def _efficientnet(need: Need, **more: Any) -> nn.Module:
    from flrce.models.pretrained import EfficientNetLite0

    if need.shape[0] not in (1, 3):
        raise ValueError(f"it takes images of 1 or 3 channels, not {need.shape[0]}")
    return EfficientNetLite0(need.outputs, **{"signed": need.signed, **more})


def _gpt(need: Need, **more: int) -> nn.Module:
    return GPT(need.vocabulary, need.outputs, need.shape[0], need.every, **more)


def _llama(
    need: Need, path: str = "smollm2", rank: int = 8, alpha: float = 16.0, targets: str | list[str] = "q_proj,v_proj",
    dtype: str = "float32", recompute: bool = False, seeds: int = 0,
) -> nn.Module:  # fmt: skip
    from flrce.models.adapters import adapt
    from flrce.models.flat import fix
    from flrce.models.llama import load
    from flrce.models.seeds import Seeded

    net = load(path, dtype, need.every, recompute and not seeds)  # probes have no backward pass
    if need.vocabulary > net.sizes.vocabulary:
        raise BadInput(
            f"the data has token ids up to {need.vocabulary - 1}, the model knows {net.sizes.vocabulary}; "
            "set data.tokenizer to the model's path"
        )
    if need.shape[0] > net.sizes.context:
        log.warning(
            "samples of %d ids, and the model was made for %d: perplexity suffers beyond; lower data.length",
            need.shape[0], net.sizes.context,
        )  # fmt: skip
    adapted = adapt(net, rank, alpha, targets)
    return Seeded(fix(adapted, ["*.lora_A"]), seeds, int(torch.randint(2**31, ()))) if seeds else adapted


NARROW, WIDE = (16, 32, 64), (64, 128, 256, 512)
NETS: dict[str, Net] = {
    "mlp": Net("numbers", lambda need, hidden=64: _mlp(need.shape, need.outputs, hidden), {"hidden": Size}),
    "logistic": Net("numbers", _linear), "linear": Net("numbers", _linear),
    "resnet-8": _resnet(NARROW, 1, "group"), "resnet-8-bn": _resnet(NARROW, 1, "batch"),
    "resnet-20": _resnet(NARROW, 3, "group"), "resnet-20-bn": _resnet(NARROW, 3, "batch"),
    "resnet-18": _resnet(WIDE, 2, "group"), "resnet-18-bn": _resnet(WIDE, 2, "batch"),
    "efficientnet-lite0": Net("images", _efficientnet, {"size": Size, "frozen": bool, "signed": bool}),
    "cnn-1d": Net("series", lambda need, **more: Series(need.shape[0], need.outputs, **more), {"width": Size}),
    "lstm": _recurrent("lstm"), "gru": _recurrent("gru"),
    "gpt": Net("tokens", _gpt, {"layers": Size, "width": Size, "heads": Size}),
    "llama": Net("tokens", _llama, {
        "path": Text, "rank": Annotated[int, Ge(1), Le(4096)], "alpha": Positive, "targets": Text | list[Text],
        "dtype": Literal["float32", "bfloat16"], "recompute": bool, "seeds": Annotated[int, Ge(0), Le(1 << 20)],
    }),
}  # fmt: skip
NAMES = ("auto", *CNNS, *NETS)


def choose(need: Need) -> str:
    """The net for such samples: LEAF's for token ids, the paper's of this shape (without tanh), else the MLP."""
    if need.takes == "tokens":
        return "lstm"
    if need.takes == "series":
        return "cnn-1d"
    return next((name for name, (wanted, _) in CNNS.items() if wanted == need.shape), "mlp")


def build(
    name: str, shape: tuple[int, ...], outputs: int, seed: int, vocabulary: int = 0, every: bool = False,
    options: Mapping[str, Any] | None = None, signed: bool = False,
) -> nn.Module:  # fmt: skip
    """A freshly initialised net; the same seed gives the same weights, whatever was drawn before."""
    need = Need(shape, outputs, vocabulary, every, signed)
    if name == "auto":
        name = choose(need)
    options = dict(options or {})
    _check(name, need, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in CNNS:
            return CNNS[name][1](outputs)
        try:
            return NETS[name].make(need, **options)
        except BadInput:
            raise
        except (TypeError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as why:
            raise BadInput(f"model.name {name!r} with options {options} cannot be built: {why}") from why


def _check(name: str, need: Need, options: Mapping[str, Any]) -> None:
    """Refuses samples that the net cannot take, and options it does not have."""
    known: Mapping[str, Any] = {}
    if name in CNNS:
        wanted = CNNS[name][0]
        if need.vocabulary or wanted != need.shape:
            raise BadInput(f"model.name {name!r} wants samples of shape {wanted}, the data has {need.shape}; use auto")
    else:
        takes, known = NETS[name].takes, NETS[name].options
        if takes != need.takes and not (takes == "numbers" and need.takes != "tokens"):
            raise BadInput(
                f"model.name {name!r} takes {takes}, the data has {need.takes} of shape {need.shape}; use auto"
            )
    for key in options:
        if key not in known:
            raise BadInput(
                f"model.options.{key} is no option of {name}; {nearest(key, known) if known else 'it has none'}"
            )
    why, _ = settings(name, {key: (kind, None) for key, kind in known.items()}).checked(options)
    if why:
        raise BadInput(f"model.options.{why}")
