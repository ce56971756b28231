"""A network's own layers, made to hold one set of weights for each lane; samples of all lanes are one long batch.

Whatever has no weights (sums, activations, pooling, attention) then runs as the module's author wrote it, and a layer
whose weights are fixed runs once over everyone's samples.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from flrce.errors import BadInput
from flrce.local.stacked.batched import Convolving, affine_shape, convolve, drop, linear, lookup, normalise_batch
from flrce.local.stacked.cells import GRU, LSTM
from flrce.local.stacked.norms import batch_norm, fits, group_norm
from flrce.local.stacked.norms_last import batch_norm_last, group_norm_last, lies_last

Tensors = dict[str, Tensor]


@dataclass
class Pass:
    """What the leaves read while the network runs once."""

    tensors: Tensors = field(default_factory=dict)  # (k, ...) each
    k: int = 1
    batch: int = 1  # samples of each lane
    count: Tensor = field(default_factory=lambda: torch.ones(1))  # (k,) of them real
    training: bool = True
    convolving: Convolving = "columns"
    frozen: frozenset[str] = frozenset()  # leaves that stand still, in eval mode
    draw: tuple[Tensor, Tensor] | None = None  # (k,) the lanes' seeds and (1,) the step; None: nothing is dropped
    learning: bool = False  # notes which calls get the batch and which get something that all samples share
    calls: dict[tuple[str, int], bool] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)  # calls of each leaf in this pass


class Leaf(nn.Module):
    """In place of a layer. `names`: its tensors' names in w; what is not among them is the same for all lanes."""

    at = 0  # the dimension of an input that counts samples

    def __init__(self, path: str, layer: nn.Module, names: Mapping[str, str], now: Pass) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not as a child: its tensors are not this module's
        self.path, self.names, self.now = path, dict(names), now

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **more: Any) -> Any:
        live = self.now.training and self.path not in self.now.frozen
        with torch.set_grad_enabled(live):
            return self.run(live, *args, **more)

    def run(self, live: bool, *args: Any, **more: Any) -> Any:
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor | None:
        """(k, ...) of this layer, or None where it has none such."""
        if name in self.names:
            return self.now.tensors[self.names[name]]
        shared: Tensor | None = getattr(self.layer, name)
        return None if shared is None else shared[None].expand(self.now.k, *shared.shape)

    def apart(self, x: Tensor) -> Tensor:
        """(k, B, ...) of a long batch, or (k, 1, ...) of what all samples share."""
        now, calls = self.now, self.now.made
        call = calls.get(self.path, 0)
        calls[self.path] = call + 1
        if now.learning:
            now.calls[self.path, call] = x.dim() > self.at and x.shape[self.at] == now.k * now.batch
        if now.calls.get((self.path, call), True):
            x = x.movedim(self.at, 0) if self.at else x
            return x.reshape(now.k, -1, *x.shape[1:])
        return x.expand(now.k, 1, *x.shape)

    def together(self, y: Tensor) -> Tensor:
        """(k B, ...) of (k, B, ...); what samples share is given to each."""
        if y.shape[1] != self.now.batch:
            y = y.expand(y.shape[0], self.now.batch, *y.shape[2:])
        y = y.flatten(0, 1)
        return y.movedim(0, self.at) if self.at else y


class Linear(Leaf):
    def run(self, live: bool, x: Tensor) -> Tensor:
        weight = self.tensor("weight")
        assert weight is not None
        return self.together(linear(self.apart(x), weight, self.tensor("bias")))


class Conv(Leaf):
    """Convolutions in one or two dimensions."""

    def run(self, live: bool, x: Tensor) -> Tensor:
        layer, weight = self.layer, self.tensor("weight")
        assert weight is not None
        sides = layer._reversed_padding_repeated_twice  # as F.pad takes them, last dimension first
        if layer.padding_mode != "zeros":
            x, sides = F.pad(x, sides, mode=layer.padding_mode), [0] * len(sides)
        y = convolve(
            self.apart(x), weight, self.tensor("bias"), layer.stride, sides, layer.dilation, layer.groups,
            self.now.convolving,
        )  # fmt: skip
        return self.together(y)


class Embedding(Leaf):
    def run(self, live: bool, x: Tensor) -> Tensor:
        weight = self.tensor("weight")
        assert weight is not None
        return self.together(lookup(weight, self.apart(x), self.layer.padding_idx))


class SampleNorm(Leaf):
    """GroupNorm and LayerNorm: statistics of each sample alone, so that only scale and shift are a lane's own."""

    def run(self, live: bool, x: Tensor) -> Tensor:
        layer = self.layer
        if isinstance(layer, nn.GroupNorm) and fits(x) and (layer.weight is None) == (layer.bias is None):
            weight, bias = self.tensor("weight"), self.tensor("bias")
            norm = group_norm_last if lies_last(x) else group_norm
            return self.together(norm(self.apart(x), weight, bias, layer.num_groups, layer.eps))
        if isinstance(layer, nn.GroupNorm):
            x = F.group_norm(x, layer.num_groups, eps=layer.eps)
        else:
            x = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        y = self.apart(x)
        weight, bias = self.tensor("weight"), self.tensor("bias")
        y = y if weight is None else y * self._wide(weight, y)
        return self.together(y if bias is None else y + self._wide(bias, y))

    def _wide(self, tensor: Tensor, y: Tensor) -> Tensor:
        if isinstance(self.layer, nn.GroupNorm):
            return affine_shape(tensor, y)
        shape = self.layer.normalized_shape
        return tensor.reshape(len(tensor), *(1,) * (y.dim() - 1 - len(shape)), *shape)


class BatchNorm(Leaf):
    """Statistics of a lane's real samples; running ones move in place."""

    def run(self, live: bool, x: Tensor) -> Tensor:
        layer, count = self.layer, self.now.count
        y = self.apart(x)
        own = live or layer.running_mean is None  # statistics of the batch, not running ones
        if own and fits(x) and (layer.weight is None) == (layer.bias is None):
            norm = batch_norm_last if lies_last(x) else batch_norm
            y, mean, var = norm(y, self.tensor("weight"), self.tensor("bias"), count, layer.eps)
            if live and layer.running_mean is not None:
                n = (count * y[0, 0, 0].numel()).clamp(min=1)[:, None]
                self._move(mean, var * n / (n - 1).clamp(min=1))
            return self.together(y)
        if own:
            y, mean, var, n = normalise_batch(y if y.dtype == torch.float64 else y.float(), count, layer.eps)
            if live and layer.running_mean is not None:
                self._move(mean.detach(), (var * n / (n - 1).clamp(min=1)).detach())
        else:
            mean, var = self.tensor("running_mean"), self.tensor("running_var")  # type: ignore[assignment]
            y = (y - affine_shape(mean, y)) * affine_shape(torch.rsqrt(var + layer.eps), y)
        weight, bias = self.tensor("weight"), self.tensor("bias")
        y = y if weight is None else y * affine_shape(weight, y)
        return self.together(y if bias is None else y + affine_shape(bias, y))

    def _move(self, mean: Tensor, var: Tensor) -> None:
        share = self.layer.momentum * (self.now.count > 0).to(mean.dtype)[:, None].expand_as(mean)
        for name, new in (("running_mean", mean), ("running_var", var)):
            running = self.tensor(name)
            assert running is not None
            running.lerp_(new, share)


class Recurrent(Leaf):
    """nn.LSTM and nn.GRU, layer by layer and, where they are bidirectional, way by way."""

    def __init__(self, path: str, layer: nn.Module, names: Mapping[str, str], now: Pass) -> None:
        super().__init__(path, layer, names, now)
        self.at = 0 if layer.batch_first else 1

    def run(self, live: bool, x: Tensor, state: Any = None) -> Any:
        layer, k = self.layer, self.now.k
        gated = isinstance(layer, nn.GRU)
        x = self.apart(x).transpose(1, 2)  # (k, L, B, I)
        first = self._first(x, (state,) if gated and state is not None else state)
        lasts: list[tuple[Tensor, ...]] = []
        for depth in range(layer.num_layers):
            ways = []
            for way in range(2 if layer.bidirectional else 1):
                end = f"l{depth}" + "_reverse" * way
                at = [each[len(lasts)] for each in first]
                y, last = self._way(x.flip(1) if way else x, end, at)  # y (L, k, B, H)
                ways.append(y.flip(0) if way else y)
                lasts.append(last)
            x = torch.cat(ways, -1).transpose(0, 1)
        out = x.transpose(1, 2).flatten(0, 1)  # (k B, L, H)
        out = out if layer.batch_first else out.transpose(0, 1)
        final = tuple(
            torch.stack(each).reshape(len(lasts), k * self.now.batch, -1) for each in zip(*lasts, strict=True)
        )
        return out, final[0] if gated else final

    def _way(self, x: Tensor, end: str, first: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction: (states (L, k, B, H), the last ones)."""
        (wi, wh), gated = self._weights(end), isinstance(self.layer, nn.GRU)
        bi, bh = (self.tensor(f"bias_{s}h_{end}") if self.layer.bias else None for s in "ih")
        bias = bi if gated or bi is None or bh is None else bi + bh
        gates = linear(x, wi, bias).transpose(0, 1).contiguous()  # (L, k, B, gates)
        wh, first = wh.to(gates.dtype), [each.to(gates.dtype) for each in first]
        if gated:
            bh = wh.new_zeros(wh.shape[:2]) if bh is None else bh.to(gates.dtype)
            y: Any = GRU.apply(gates, wh, bh, first[0])
            return y, (y[-1],)
        y, cell = LSTM.apply(gates, wh, *first)
        return y, (y[-1], cell)

    def _weights(self, end: str) -> tuple[Tensor, Tensor]:
        found = self.tensor(f"weight_ih_{end}"), self.tensor(f"weight_hh_{end}")
        assert found[0] is not None
        assert found[1] is not None
        return found[0], found[1]

    def _first(self, x: Tensor, state: Any) -> list[Tensor]:
        """(layers and ways, k, B, H) for h and, in an LSTM, c."""
        layer = self.layer
        many = layer.num_layers * (2 if layer.bidirectional else 1)
        shape = (many, self.now.k, self.now.batch, layer.hidden_size)
        if state is not None:
            return [each.reshape(shape) for each in state]
        return [x.new_zeros(shape, dtype=torch.float32)] * (1 if isinstance(layer, nn.GRU) else 2)


class Attention(Leaf):
    """nn.MultiheadAttention without weights handed back: torch's own attention over everyone's samples."""

    def __init__(self, path: str, layer: nn.Module, names: Mapping[str, str], now: Pass) -> None:
        super().__init__(path, layer, names, now)
        self.at = 0 if layer.batch_first else 1

    def run(
        self, live: bool, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        layer, k = self.layer, self.now.k
        weight, bias = self.tensor("in_proj_weight"), self.tensor("in_proj_bias")
        assert weight is not None
        weights = weight.chunk(3, 1)
        biases = [None] * 3 if bias is None else bias.chunk(3, 1)
        parts = []
        for x, w, b in zip((query, key, value), weights, biases, strict=True):
            y = linear(self.apart(x), w.contiguous(), b).flatten(0, 1)  # (k B, L, E)
            parts.append(y.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2))
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=parts[0].dtype).masked_fill(mask, -torch.inf)
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (-1, layer.num_heads))
        if key_padding_mask is not None:
            keys = key_padding_mask
            if keys.dtype == torch.bool:
                keys = torch.zeros_like(keys, dtype=parts[0].dtype).masked_fill(keys, -torch.inf)
            mask = keys[:, None, None] + (0 if mask is None else mask)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], mask)
        out = seen.transpose(1, 2).flatten(2).unflatten(0, (k, -1))
        weight, bias = self.mixing()
        return self.together(linear(out, weight, bias)), None

    def mixing(self) -> tuple[Tensor, Tensor | None]:
        """The last projection, a layer of its own within this one."""
        found: list[Any] = []
        for name in ("weight", "bias"):
            own = f"out_proj.{name}"
            shared = getattr(self.layer.out_proj, name)
            if own in self.names:
                found.append(self.now.tensors[self.names[own]])
            else:
                found.append(None if shared is None else shared[None].expand(self.now.k, *shared.shape))
        return found[0], found[1]


class Dropout(Leaf):
    """Masks are counted, not drawn from a generator (batched.drop)."""

    def run(self, live: bool, x: Tensor) -> Tensor:
        call = now_calls(self.now, f"{self.path}!")
        return self.dropped(x, self.layer.p, call, not isinstance(self.layer, nn.Dropout)) if live else x

    def dropped(self, x: Tensor, p: float, call: int, channels: bool) -> Tensor:
        if self.now.draw is None or not p:
            return x
        place = zlib.crc32(f"{self.path} {call}".encode())
        lanes = x.reshape(self.now.k, -1, *x.shape[1:])
        return drop(lanes, p, *self.now.draw, place, channels).reshape(x.shape)


class Unit(Leaf):
    """Any other module with tensors of its own, through torch.func: vmap over the lanes."""

    def run(self, live: bool, *args: Any, **more: Any) -> Any:
        now = self.now
        self.layer.train(live)
        own = {name: now.tensors[full] for name, full in self.names.items()}
        if now.k == 1:
            return functional_call(self.layer, {name: x[0] for name, x in own.items()}, args, more)
        values, spec = pytree.tree_flatten((args, more))
        laned = [isinstance(x, Tensor) and x.dim() > 0 and self._laned(x, i) for i, x in enumerate(values)]
        split = [x.reshape(now.k, -1, *x.shape[1:]) if lane else x for x, lane in zip(values, laned, strict=True)]

        def one(tensors: Tensors, *given: Any) -> Any:
            inside, keys = pytree.tree_unflatten(list(given), spec)
            return functional_call(self.layer, tensors, inside, keys)

        dims = (dict.fromkeys(own, 0), *(0 if lane else None for lane in laned))
        y = torch.vmap(one, dims)(own, *split)
        return pytree.tree_map(lambda out: out.flatten(0, 1) if isinstance(out, Tensor) else out, y)

    def _laned(self, x: Tensor, i: int) -> bool:
        now, key = self.now, (f"{self.path}#{i}", now_calls(self.now, f"{self.path}#{i}"))
        if now.learning:
            now.calls[key] = x.shape[0] == now.k * now.batch
        return now.calls.get(key, True)


def now_calls(now: Pass, path: str) -> int:
    call = now.made.get(path, 0)
    now.made[path] = call + 1
    return call


#: layers with a batched form; anything else that has tensors of its own becomes a Unit
LEAVES: dict[type[nn.Module], type[Leaf]] = {
    nn.Linear: Linear, nn.Conv1d: Conv, nn.Conv2d: Conv, nn.Embedding: Embedding, nn.GroupNorm: SampleNorm,
    nn.LayerNorm: SampleNorm, nn.BatchNorm1d: BatchNorm, nn.BatchNorm2d: BatchNorm, nn.BatchNorm3d: BatchNorm,
    nn.LSTM: Recurrent, nn.GRU: Recurrent, nn.MultiheadAttention: Attention,
    nn.Dropout: Dropout, nn.Dropout1d: Dropout, nn.Dropout2d: Dropout,
}  # fmt: skip


def known(layer: nn.Module) -> type[Leaf]:
    """The leaf for a layer, or BadInput where it would do something else."""
    leaf = LEAVES.get(type(layer), Unit)
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats and layer.momentum is None:
        raise BadInput("a BatchNorm without momentum counts its batches, which lanes do not")
    return leaf if _plain(leaf, layer) else Unit


def _plain(leaf: type[Leaf], layer: Any) -> bool:
    """Whether a layer uses nothing that its leaf lacks."""
    if leaf is Embedding:
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    if leaf is Recurrent:
        return not layer.proj_size and not (layer.dropout and layer.num_layers > 1)
    if leaf is Attention:
        bare = layer.bias_k is None and not layer.add_zero_attn and not layer.dropout
        return bool(layer._qkv_same_embed_dim and bare)
    return True
