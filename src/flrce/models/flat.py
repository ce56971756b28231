"""nn.Module <-> the flat float32 vector w that travels, by the role of each tensor.

| role | what | where it is |
|---|---|---|
| trained | parameters that ask for gradients | first in w: the paper's vector |
| statistics | float buffers: BatchNorm's running mean and variance | behind them in w, averaged |
| kept | parameters and buffers that stay with a client | in a vector of the client's own |
| fixed | parameters that ask for no gradients: the base under LoRA | in the module; never travel |

Integer buffers (`num_batches_tracked`) never travel either, nor masks of -inf. A client trains its
local vector: what it keeps and trains, then w, then what it keeps of the statistics; so both w and
all that trains are one slice of it.
"""

import copy
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flrce.core.tensor_bytes import count_bytes
from flrce.errors import BadInput
from flrce.models.abilities import get_provision_bytes

NORMS_KEYWORD = "norms"  # in place of a pattern: every normalisation layer
ANY_NORMS_KEYWORD = "any-norms"  # the same; a network without such layers is fine too
FINGERPRINT_SAMPLES = 4096  # numbers of each fixed tensor that its fingerprint is of
HEAD_KEYWORD = "head"  # in place of a pattern: the last layer that has parameters to train
log = logging.getLogger("flrce")
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_NORM_LAYERS = (*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm)


class FrozenParameter(nn.Parameter):
    """A parameter from a file that never changes: copies share its memory, and no run stores it."""

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> "FrozenParameter":
        return super().__new__(cls, data, False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenParameter":
        if id(self) not in memo:
            memo[id(self)] = FrozenParameter(self.data)
        found: FrozenParameter = memo[id(self)]
        return found


@dataclass(frozen=True)
class TensorSlot:
    """One tensor's place in w."""

    name: str
    shape: tuple[int, ...]
    offset: int
    trainable: bool

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True)
class ModelLayout:
    """Where each tensor lies in w: `size` floats travel, the first `trainable` are trained."""

    slots: tuple[TensorSlot, ...]
    trainable: int
    size: int
    # what stays with the client, in a vector of its own: trained first
    personal: tuple[TensorSlot, ...] = ()

    def view_tensors(self, w: Tensor) -> dict[str, Tensor]:
        """Named views into w (..., size); writing to them writes to w."""
        return {s.name: w[..., s.span].reshape((*w.shape[:-1], *s.shape)) for s in self.slots}

    def __getitem__(self, name: str) -> TensorSlot:
        return next(s for s in self.slots if s.name == name)

    @cached_property
    def personal_layout(self) -> "ModelLayout":
        """The client's own vector alone."""
        return _make_consecutive_layout([(s.name, s.shape, s.trainable) for s in self.personal])

    @cached_property
    def local_layout(self) -> "ModelLayout":
        """The local vector: all that a client holds."""
        if not self.personal:
            return self
        trained = [s for s in (*self.personal, *self.slots) if s.trainable]
        rest = [s for s in (*self.slots, *self.personal) if not s.trainable]
        return _make_consecutive_layout([(s.name, s.shape, s.trainable) for s in (*trained, *rest)])

    @property
    def shared_slice(self) -> slice:
        """Where w lies in the local vector."""
        return slice(self.personal_layout.trainable, self.personal_layout.trainable + self.size)

    def join(self, w: Tensor, own: Tensor | None) -> Tensor:
        """The local vector of a client with these kept floats."""
        if not self.personal or own is None:
            return w
        trained = self.personal_layout.trainable
        return torch.cat([own[:trained], w, own[trained:]])

    def split(self, local: Tensor) -> tuple[Tensor, Tensor | None]:
        """(w, the client's own) of a local vector."""
        if not self.personal:
            return local, None
        where = self.shared_slice
        return local[where], torch.cat([local[: where.start], local[where.stop :]])


def _make_consecutive_layout(
    tensors: Sequence[tuple[str, tuple[int, ...], bool]], kept: tuple[TensorSlot, ...] = ()
) -> ModelLayout:
    """One tensor behind the other; those that train come first."""
    slots, offset, trainable = [], 0, 0
    for name, shape, trained in tensors:
        slots.append(TensorSlot(name, shape, offset, trained))
        offset += slots[-1].size
        trainable += slots[-1].size if trained else 0
    return ModelLayout(tuple(slots), trainable, offset, kept)


def list_model_tensors(module: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """(name, tensor, trained) of all that has a place in w or with a client, trained ones first."""
    trained = [(name, p.data, True) for name, p in module.named_parameters() if p.requires_grad]
    return trained + [(name, b, False) for name, b in module.named_buffers() if _is_statistic(b)]


def _is_statistic(b: Tensor) -> bool:
    """Whether a buffer is a statistic. One with infinities is a constant, like a causal mask."""
    return b.is_floating_point() and (bool(b.isnan().any()) or not bool(b.isinf().any()))


def make_layout(module: nn.Module, kept: Sequence[str] = ()) -> ModelLayout:
    """The layout of a module's w. `kept`: patterns of personal tensors, "norms" or "head"."""
    tensors = list_model_tensors(module)
    stays = _match_personal_tensors(module, [name for name, _, _ in tensors], kept)
    own = _make_consecutive_layout(
        [(name, tuple(x.shape), trained) for name, x, trained in tensors if name in stays]
    ).slots
    travels = [(name, tuple(x.shape), trained) for name, x, trained in tensors if name not in stays]
    return _make_consecutive_layout(travels, own)


def find_head_layer(module: nn.Module, trained: bool = False) -> str:
    """The path of the last layer that has parameters (`trained`: parameters that train)."""
    paths = [
        name.rpartition(".")[0]
        for name, p in module.named_parameters()
        if p.requires_grad or not trained
    ]
    return paths[-1] if paths else ""


def _match_personal_tensors(
    module: nn.Module, names: Sequence[str], patterns: Sequence[str]
) -> set[str]:
    personal: set[str] = set()
    for pattern in patterns:
        if pattern in (NORMS_KEYWORD, ANY_NORMS_KEYWORD):
            modules = module.named_modules()
            layers = [path for path, layer in modules if isinstance(layer, _NORM_LAYERS)]
            here = {name for name in names if name.rpartition(".")[0] in layers}
        elif pattern == HEAD_KEYWORD:
            head = find_head_layer(module, trained=True)
            here = {name for name in names if name.rpartition(".")[0] == head}
        else:
            here = {name for name in names if fnmatchcase(name, pattern)}
        if not here and pattern != ANY_NORMS_KEYWORD:
            few = ", ".join(names[:6])
            raise BadInput(
                f"{pattern!r}, which clients are to keep (model.personal, recipe.heads), matches no"
                f" tensor of the network; it has {few}, ..."
            )
        personal |= here
    if personal and not set(names) - personal:
        raise BadInput(
            f"model.personal = {', '.join(patterns)!r} keeps every tensor with the client: nothing"
            " would travel"
        )
    return personal


def convert_to_float32(module: nn.Module) -> nn.Module:
    """The module, or a copy with all that travels in float32; BadInput where that cannot be."""
    owner = type(module).__name__
    _detach_hooked_values(module)
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise BadInput(
            f"{owner} is of torch.jit, whose copies do not train; give the module before it"
        )
    if any(p.is_complex() for p in module.parameters() if p.requires_grad):
        raise BadInput(f"{owner} has complex parameters; hold them as real ones (view_as_complex)")
    dtypes = {x.dtype for _, x, _ in list_model_tensors(module)} - {torch.float32}
    if not dtypes:
        return module
    odd = min(str(dtype).removeprefix("torch.") for dtype in dtypes)
    log.warning("%s has %s parameters or buffers: they train and travel as float32", owner, odd)
    module = copy.deepcopy(module)
    for p in module.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    for part in module.modules():
        for name, b in list(part.named_buffers(recurse=False)):
            if _is_statistic(b):
                part._buffers[name] = b.float()
    return module


def _detach_hooked_values(module: nn.Module) -> None:
    """Older hooks leave tensors with a history, which cannot be copied; each pass makes them
    again.
    """
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                vars(part)[name] = value.detach()


def freeze_parameters(module: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """The module, or a copy of it whose parameters of these names neither train nor travel."""
    if not patterns:
        return module
    module = copy.deepcopy(module)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    for pattern in patterns:
        here = {name for name in names if fnmatchcase(name, pattern)}
        if not here:
            few = ", ".join(names[:6])
            raise BadInput(
                f"no parameter that trains is called {pattern!r} (model.frozen, or a recipe of"
                f" adapters); some are {few}"
            )
        for name, p in module.named_parameters():
            if name in here:
                p.requires_grad_(False)
    if not any(p.requires_grad for p in module.parameters()):
        raise BadInput(
            f"model.frozen = {', '.join(patterns)!r} fixes every parameter: nothing would train"
        )
    return module


def count_frozen_bytes(module: nn.Module) -> int:
    """Bytes of the frozen parameters: of the file they came from, if the module knows it."""
    return get_provision_bytes(module) or sum(
        count_bytes(p) for p in module.parameters() if not p.requires_grad
    )


def fingerprint_frozen_parameters(module: nn.Module) -> str:
    """A hash of some numbers of each frozen parameter; "" without any."""
    digest = hashlib.blake2b(digest_size=16)
    fixed = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    for name, p in fixed:
        step = max(p.numel() // FINGERPRINT_SAMPLES, 1)
        some = p.detach().reshape(-1)[::step].cpu().contiguous()
        digest.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if fixed else ""


def pack_model(module: nn.Module, where: ModelLayout | None = None) -> Tensor:
    """w, a copy of the module's tensors; `where` may leave some of them out."""
    return _copy_to_vector(module, where or make_layout(module))


def pack_personal(module: nn.Module, where: ModelLayout) -> Tensor | None:
    """The personal values before training, which are the module's own; None without any."""
    return _copy_to_vector(module, where.personal_layout) if where.personal else None


def _copy_to_vector(module: nn.Module, where: ModelLayout) -> Tensor:
    tensors = {name: tensor for name, tensor, _ in list_model_tensors(module)}
    parts = [tensors[s.name].detach().reshape(-1).float() for s in where.slots]
    return torch.cat(parts) if parts else torch.empty(0)


def unpack_model(module: nn.Module, w: Tensor, where: ModelLayout | None = None) -> nn.Module:
    """Copy w into the module's tensors; returns the module."""
    views = (where or make_layout(module)).view_tensors(w)
    with torch.no_grad():
        for name, tensor, _ in list_model_tensors(module):
            if name in views:
                tensor.copy_(views[name])
    return module


def bind_to_vector(module: nn.Module, w: Tensor, where: ModelLayout | None = None) -> nn.Module:
    """Make the module live inside w: parameters and buffers become views of w.

    One flat step then updates every tensor at once. `where` is the layout of w, the module's own
    unless given.
    """
    where = where or make_layout(module)
    views = where.view_tensors(w)
    for name, p in module.named_parameters():
        if p.requires_grad:
            p.data, p.grad = views[name], None
    for path, sub in module.named_modules():
        for name, b in list(sub.named_buffers(recurse=False)):
            full = f"{path}.{name}" if path else name
            if b.is_floating_point() and full in views:
                sub._buffers[name] = views[full]
    return module
