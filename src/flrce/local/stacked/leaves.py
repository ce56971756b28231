"""A network's own layers, made to hold one set of weights for each lane; samples of all lanes are one long batch.

Whatever has no weights (sums, activations, pooling, attention) then runs as the module's author wrote it, and a layer
whose weights are fixed runs once over everyone's samples.
"""

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from flrce.errors import BadInput
from flrce.local.stacked.batched import affine_shape, convolve, drop, linear, lookup, normalise_batch
from flrce.local.stacked.leaf import Leaf, Tensors
from flrce.local.stacked.norms import batch_norm, fits, group_norm
from flrce.local.stacked.norms_last import batch_norm_last, group_norm_last, lies_last
from flrce.local.stacked.sequences import Attention, Recurrent


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

    def joins(self, x: Tensor) -> bool:
        """Whether `run` takes a ReLU behind it along."""
        layer = self.layer
        plain = isinstance(layer, nn.GroupNorm) and (layer.weight is None) == (layer.bias is None)
        return plain and fits(x) and lies_last(x)

    def run(self, live: bool, x: Tensor, relu: bool = False) -> Tensor:
        layer = self.layer
        if self.joins(x):
            weight, bias = self.tensor("weight"), self.tensor("bias")
            return self.together(group_norm_last(self.apart(x), weight, bias, layer.num_groups, layer.eps, relu))
        if isinstance(layer, nn.GroupNorm) and fits(x) and (layer.weight is None) == (layer.bias is None):
            weight, bias = self.tensor("weight"), self.tensor("bias")
            return self.together(group_norm(self.apart(x), weight, bias, layer.num_groups, layer.eps))
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

    def joins(self, x: Tensor) -> bool:
        """Whether `run` takes a ReLU behind it along."""
        return self._fused(self.live, x) and lies_last(x)

    def _fused(self, live: bool, x: Tensor) -> bool:
        own = live or self.layer.running_mean is None  # statistics of the batch, not running ones
        return own and fits(x) and (self.layer.weight is None) == (self.layer.bias is None)

    def run(self, live: bool, x: Tensor, relu: bool = False) -> Tensor:
        layer, count = self.layer, self.now.count
        y = self.apart(x)
        if self._fused(live, x):
            weight, bias = self.tensor("weight"), self.tensor("bias")
            if lies_last(x):
                y, mean, var = batch_norm_last(y, weight, bias, count, layer.eps, relu)
            else:
                y, mean, var = batch_norm(y, weight, bias, count, layer.eps)
            if live and layer.running_mean is not None:
                n = (count * y[0, 0, 0].numel()).clamp(min=1)[:, None]
                self._move(mean, var * n / (n - 1).clamp(min=1))
            return self.together(y)
        if live or layer.running_mean is None:
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


class Sequence(nn.Sequential):
    """A sequence of layers that runs a norm and the ReLU behind it at once, where the norm's kernel can.

    Each layer alone still does what it did, for code that takes them one by one.
    """

    def forward(self, input: Any) -> Any:
        x, layers = input, list(self)
        while layers:
            layer, *layers = layers
            if layers and joined(layer, layers[0], x):
                x, layers = layer(x, relu=True), layers[1:]
            else:
                x = layer(x)
        return x


def joined(layer: nn.Module, behind: nn.Module, x: Any) -> bool:
    """Whether a norm's kernel takes the ReLU behind it along; not where somebody asked to see what goes through it."""
    if type(behind) is not nn.ReLU or not isinstance(layer, SampleNorm | BatchNorm) or not isinstance(x, Tensor):
        return False
    watched = behind._forward_hooks or behind._forward_pre_hooks or behind._backward_hooks
    return not watched and not behind._backward_pre_hooks and layer.joins(x)


class Dropout(Leaf):
    """Masks are counted, not drawn from a generator (batched.drop)."""

    def run(self, live: bool, x: Tensor) -> Tensor:
        call = self.now.call(f"{self.path}!")
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
        now, key = self.now, (f"{self.path}#{i}", self.now.call(f"{self.path}#{i}"))
        if now.learning:
            now.calls[key] = x.shape[0] == now.k * now.batch
        return now.calls.get(key, True)


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
