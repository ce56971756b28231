"""A network's own layers, made to hold one set of weights for each lane; samples of all lanes are one long batch.

Whatever has no weights (sums, activations, pooling, attention) then runs as the module's author wrote it, and a layer
whose weights are fixed runs once over everyone's samples.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import type_before_parametrizations

from flrce.errors import BadInput
from flrce.local.stacked.batched import affine_shape, convolve, lookup, normalise_batch
from flrce.local.stacked.leaf import Leaf
from flrce.local.stacked.norms import batch_norm, fits, group_norm
from flrce.local.stacked.norms_last import batch_norm_last, group_norm_last, lies_last
from flrce.local.stacked.norms_rows import fits as rows_fit
from flrce.local.stacked.norms_rows import norm_rows
from flrce.local.stacked.sequences import Attention, Recurrent
from flrce.local.stacked.steppers import Stepper
from flrce.local.stacked.transposed import Transposed
from flrce.local.stacked.units import Unit


class Linear(Leaf):
    def run(self, live: bool, x: Tensor) -> Tensor:
        weight = self.tensor("weight")
        assert weight is not None
        return self.together(self.product(self.apart(x), weight, self.tensor("bias")))


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


class Bag(Leaf):
    """nn.EmbeddingBag of as many words a sample: ids (B, L)."""

    def run(self, live: bool, x: Tensor, offsets: None = None, per_sample_weights: None = None) -> Tensor:
        if offsets is not None or per_sample_weights is not None:
            raise BadInput(f"{self.path!r} takes bags of its own lengths or weights, which lanes do not follow")
        weight, padding, ids = self.tensor("weight"), self.layer.padding_idx, self.apart(x)  # ids (k, B, L)
        assert weight is not None
        words = lookup(weight, ids, padding)  # (k, B, L, D)
        if padding is None:
            return self.together(words.mean(2) if self.layer.mode == "mean" else words.sum(2))
        real = (ids != padding).to(words.dtype)[..., None]
        total = (words * real).sum(2)
        return self.together(total / real.sum(2).clamp(min=1) if self.layer.mode == "mean" else total)


INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class SampleNorm(Leaf):
    """Norms by statistics of each sample alone (group, instance, layer, RMS): only scale and shift are a lane's own."""

    @property
    def groups(self) -> int:
        """Groups of channels that have statistics of their own; 0: no channels, but the last dimensions."""
        layer = self.layer
        if isinstance(layer, INSTANCE):
            return int(layer.num_features)
        return int(layer.num_groups) if isinstance(layer, nn.GroupNorm) else 0

    def _fused(self, x: Tensor) -> bool:
        layer = self.layer
        return bool(self.groups) and fits(x) and (layer.weight is None) == (layer.bias is None)

    def joins(self, x: Tensor) -> bool:
        """Whether `run` takes a ReLU behind it along."""
        return self._fused(x) and lies_last(x)

    def run(self, live: bool, x: Tensor, relu: bool = False) -> Tensor:
        layer = self.layer
        weight = self.tensor("weight")
        bias = None if isinstance(layer, nn.RMSNorm) else self.tensor("bias")
        if self.joins(x):
            return self.together(group_norm_last(self.apart(x), weight, bias, self.groups, layer.eps, relu))
        if self._fused(x):
            return self.together(group_norm(self.apart(x), weight, bias, self.groups, layer.eps))
        if not self.groups and rows_fit(x, layer.normalized_shape, layer.eps):
            centred = isinstance(layer, nn.LayerNorm)
            return self.together(norm_rows(self.apart(x), layer.normalized_shape, weight, bias, layer.eps, centred))
        if self.groups:
            x = F.group_norm(x, self.groups, eps=layer.eps)
        elif isinstance(layer, nn.RMSNorm):
            x = F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
        else:
            x = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        y = self.apart(x)
        y = y if weight is None else y * self._wide(weight, y)
        return self.together(y if bias is None else y + self._wide(bias, y))

    def _wide(self, tensor: Tensor, y: Tensor) -> Tensor:
        if self.groups:
            return affine_shape(tensor, y)
        shape = self.layer.normalized_shape
        return tensor.reshape(len(tensor), *(1,) * (y.dim() - 1 - len(shape)), *shape)


class PReLU(Leaf):
    def run(self, live: bool, x: Tensor) -> Tensor:
        slope, y = self.tensor("weight"), self.apart(x)
        assert slope is not None
        return self.together(torch.where(y > 0, y, y * affine_shape(slope, y)))


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
    if layer.now.mapped is not None:  # how all lanes' values lie is not seen from within one
        return False
    watched = behind._forward_hooks or behind._forward_pre_hooks or behind._backward_hooks
    return not watched and not behind._backward_pre_hooks and layer.joins(x)


class Dropout(Leaf):
    """Masks are counted, not drawn from a generator (batched.drop)."""

    def run(self, live: bool, x: Tensor) -> Tensor:
        return self.dropped(x, self.layer.p, channels=not isinstance(self.layer, nn.Dropout)) if live else x


#: layers with a batched form; anything else that has tensors of its own becomes a Unit
LEAVES: dict[type[nn.Module], type[Leaf]] = {
    nn.Linear: Linear, nn.Conv1d: Conv, nn.Conv2d: Conv, nn.ConvTranspose1d: Transposed,
    nn.ConvTranspose2d: Transposed, nn.Embedding: Embedding, nn.EmbeddingBag: Bag, nn.GroupNorm: SampleNorm,
    nn.LayerNorm: SampleNorm, nn.RMSNorm: SampleNorm, **dict.fromkeys(INSTANCE, SampleNorm),
    nn.PReLU: PReLU, nn.BatchNorm1d: BatchNorm, nn.BatchNorm2d: BatchNorm, nn.BatchNorm3d: BatchNorm,
    nn.RNNCell: Stepper, nn.LSTMCell: Stepper, nn.GRUCell: Stepper,
    nn.RNN: Recurrent, nn.LSTM: Recurrent, nn.GRU: Recurrent, nn.MultiheadAttention: Attention,
    nn.Dropout: Dropout, nn.Dropout1d: Dropout, nn.Dropout2d: Dropout, nn.Dropout3d: Dropout,
}  # fmt: skip


def known(layer: nn.Module) -> type[Leaf]:
    """The leaf for a layer, or BadInput where it would do something else."""
    leaf = LEAVES.get(type_before_parametrizations(layer), Unit)
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats and layer.momentum is None:
        raise BadInput("a BatchNorm without momentum counts its batches, which lanes do not")
    return leaf if _plain(leaf, layer) else Unit


def _plain(leaf: type[Leaf], layer: Any) -> bool:
    """Whether a layer uses nothing that its leaf lacks."""
    if leaf in (Embedding, Bag):
        bare = layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
        return bool(bare and (leaf is Embedding or layer.mode != "max"))
    if isinstance(layer, INSTANCE):
        return not layer.track_running_stats
    if leaf is Recurrent:
        return not layer.proj_size
    if leaf is Attention:
        return bool(layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn)
    return True
