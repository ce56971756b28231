"""A network's own layers, made to hold one set of weights for each lane; samples of all lanes are
one long batch.

Whatever has no weights (sums, activations, pooling, attention) then runs as the module's author
wrote it, and a layer whose weights are fixed runs once over everyone's samples.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import type_before_parametrizations

from flrce.errors import BadInput
from flrce.training.gpu.convolution import ConvolutionGeometry, convolve_lanes
from flrce.training.gpu.lane_layer import LaneLayer
from flrce.training.gpu.norms import batch_norm, group_norm, supports_norm_kernels
from flrce.training.gpu.norms_last import (
    batch_norm_channels_last,
    group_norm_channels_last,
    is_channels_last,
)
from flrce.training.gpu.norms_rows import apply_row_norm
from flrce.training.gpu.norms_rows import supports_row_norm as rows_fit
from flrce.training.gpu.operations import broadcast_channels, lookup_embeddings, normalise_batch
from flrce.training.gpu.sequences import LaneAttention, LaneRecurrent
from flrce.training.gpu.steppers import LaneRecurrentCell
from flrce.training.gpu.transposed import LaneTransposedConv
from flrce.training.gpu.vmap_module import VmapModule


class LaneLinear(LaneLayer):
    def run(self, live: bool, x: Tensor) -> Tensor:
        weight = self.get_lane_tensor("weight")
        assert weight is not None
        return self.merge_lanes(
            self.apply_linear(self.split_lanes(x), weight, self.get_lane_tensor("bias"))
        )


class LaneConv(LaneLayer):
    """Convolutions in one or two dimensions; one of them is two with one row."""

    def run(self, live: bool, x: Tensor) -> Tensor:
        layer, weight = self.layer, self.get_lane_tensor("weight")
        assert weight is not None
        sides = layer._reversed_padding_repeated_twice  # as F.pad takes them, last dimension first
        padding = tuple(sides[::-1][::2])
        if layer.padding_mode != "zeros":
            x, padding = F.pad(x, sides, mode=layer.padding_mode), (0,) * len(padding)
        elif sides[::2] != sides[1::2]:  # not the same on both sides
            x, padding = F.pad(x, sides), (0,) * len(padding)
        shape = (tuple(layer.stride), padding, tuple(layer.dilation))
        x = self.split_lanes(x)
        if weight.dim() == 4:
            x, weight = x.unsqueeze(-2), weight.unsqueeze(-2)
            shape = ((1, *shape[0]), (0, *shape[1]), (1, *shape[2]))
        bias, geometry = self.get_lane_tensor("bias"), ConvolutionGeometry(*shape)
        y = convolve_lanes(x, weight, bias, geometry, layer.groups, self.now.direct)
        return self.merge_lanes(y.squeeze(-2) if isinstance(layer, nn.Conv1d) else y)


class LaneEmbedding(LaneLayer):
    def run(self, live: bool, x: Tensor) -> Tensor:
        weight = self.get_lane_tensor("weight")
        assert weight is not None
        return self.merge_lanes(
            lookup_embeddings(weight, self.split_lanes(x), self.layer.padding_idx)
        )


class LaneEmbeddingBag(LaneLayer):
    """nn.EmbeddingBag of as many words a sample: ids (B, L)."""

    def run(
        self, live: bool, x: Tensor, offsets: None = None, per_sample_weights: None = None
    ) -> Tensor:
        if offsets is not None or per_sample_weights is not None:
            raise BadInput(
                f"{self.path!r} takes bags of its own lengths or weights, which lanes do not follow"
            )
        weight, padding, ids = (
            self.get_lane_tensor("weight"),
            self.layer.padding_idx,
            self.split_lanes(x),
        )  # ids (k, B, L)
        assert weight is not None
        words = lookup_embeddings(weight, ids, padding)  # (k, B, L, D)
        if padding is None:
            return self.merge_lanes(words.mean(2) if self.layer.mode == "mean" else words.sum(2))
        real = (ids != padding).to(words.dtype)[..., None]
        total = (words * real).sum(2)
        return self.merge_lanes(
            total / real.sum(2).clamp(min=1) if self.layer.mode == "mean" else total
        )


INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class LaneSampleNorm(LaneLayer):
    """Norms by statistics of each sample alone (group, instance, layer, RMS): only scale and shift
    are a lane's own.
    """

    @property
    def groups(self) -> int:
        """Groups of channels that have statistics of their own; 0: no channels, but the last
        dimensions.
        """
        layer = self.layer
        if isinstance(layer, INSTANCE_NORMS):
            return int(layer.num_features)
        return int(layer.num_groups) if isinstance(layer, nn.GroupNorm) else 0

    def _supports_kernel(self, x: Tensor) -> bool:
        layer = self.layer
        return (
            bool(self.groups)
            and supports_norm_kernels(x)
            and (layer.weight is None) == (layer.bias is None)
        )

    def supports_relu_fusion(self, x: Tensor) -> bool:
        """Whether `run` takes a ReLU behind it along."""
        return self._supports_kernel(x) and is_channels_last(x)

    def run(self, live: bool, x: Tensor, relu: bool = False) -> Tensor:
        layer = self.layer
        weight = self.get_lane_tensor("weight")
        bias = None if isinstance(layer, nn.RMSNorm) else self.get_lane_tensor("bias")
        if self.supports_relu_fusion(x):
            return self.merge_lanes(
                group_norm_channels_last(
                    self.split_lanes(x), weight, bias, self.groups, layer.eps, relu
                )
            )
        if self._supports_kernel(x):
            return self.merge_lanes(
                group_norm(self.split_lanes(x), weight, bias, self.groups, layer.eps)
            )
        if not self.groups and rows_fit(x, layer.normalized_shape, layer.eps):
            centred = isinstance(layer, nn.LayerNorm)
            return self.merge_lanes(
                apply_row_norm(
                    self.split_lanes(x), layer.normalized_shape, weight, bias, layer.eps, centred
                )
            )
        if self.groups:
            x = F.group_norm(x, self.groups, eps=layer.eps)
        elif isinstance(layer, nn.RMSNorm):
            x = F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
        else:
            x = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        y = self.split_lanes(x)
        y = y if weight is None else y * self._broadcast_affine(weight, y)
        return self.merge_lanes(y if bias is None else y + self._broadcast_affine(bias, y))

    def _broadcast_affine(self, tensor: Tensor, y: Tensor) -> Tensor:
        if self.groups:
            return broadcast_channels(tensor, y)
        shape = self.layer.normalized_shape
        return tensor.reshape(len(tensor), *(1,) * (y.dim() - 1 - len(shape)), *shape)


class LanePReLU(LaneLayer):
    def run(self, live: bool, x: Tensor) -> Tensor:
        slope, y = self.get_lane_tensor("weight"), self.split_lanes(x)
        assert slope is not None
        return self.merge_lanes(torch.where(y > 0, y, y * broadcast_channels(slope, y)))


class LaneBatchNorm(LaneLayer):
    """Statistics of a lane's real samples; running ones move in place."""

    def supports_relu_fusion(self, x: Tensor) -> bool:
        """Whether `run` takes a ReLU behind it along."""
        return self._supports_kernel(self.is_in_train_mode, x) and is_channels_last(x)

    def _supports_kernel(self, live: bool, x: Tensor) -> bool:
        own = live or self.layer.running_mean is None  # statistics of the batch, not running ones
        return (
            own
            and supports_norm_kernels(x)
            and (self.layer.weight is None) == (self.layer.bias is None)
        )

    def run(self, live: bool, x: Tensor, relu: bool = False) -> Tensor:
        layer, count = self.layer, self.now.count
        y = self.split_lanes(x)
        if self._supports_kernel(live, x):
            weight, bias = self.get_lane_tensor("weight"), self.get_lane_tensor("bias")
            if is_channels_last(x):
                y, mean, var = batch_norm_channels_last(y, weight, bias, count, layer.eps, relu)
            else:
                y, mean, var = batch_norm(y, weight, bias, count, layer.eps)
            if live and layer.running_mean is not None:
                n = (count * y[0, 0, 0].numel()).clamp(min=1)[:, None]
                self._update_running_statistics(mean, var * n / (n - 1).clamp(min=1))
            return self.merge_lanes(y)
        if live or layer.running_mean is None:
            y, mean, var, n = normalise_batch(
                y if y.dtype == torch.float64 else y.float(), count, layer.eps
            )
            if live and layer.running_mean is not None:
                self._update_running_statistics(
                    mean.detach(), (var * n / (n - 1).clamp(min=1)).detach()
                )
        else:
            mean, var = self.get_lane_tensor("running_mean"), self.get_lane_tensor("running_var")  # type: ignore[assignment]
            y = (y - broadcast_channels(mean, y)) * broadcast_channels(
                torch.rsqrt(var + layer.eps), y
            )
        weight, bias = self.get_lane_tensor("weight"), self.get_lane_tensor("bias")
        y = y if weight is None else y * broadcast_channels(weight, y)
        return self.merge_lanes(y if bias is None else y + broadcast_channels(bias, y))

    def _update_running_statistics(self, mean: Tensor, var: Tensor) -> None:
        share = self.layer.momentum * (self.now.count > 0).to(mean.dtype)[:, None].expand_as(mean)
        for name, new in (("running_mean", mean), ("running_var", var)):
            running = self.get_lane_tensor(name)
            assert running is not None
            running.lerp_(new, share)


class LaneSequential(nn.Sequential):
    """A sequence of layers that runs a norm and the ReLU behind it at once, where the norm's kernel
    can.

    Each layer alone still does what it did, for code that takes them one by one.
    """

    def forward(self, input: Any) -> Any:
        x, layers = input, list(self)
        while layers:
            layer, *layers = layers
            if layers and is_relu_fusible(layer, layers[0], x):
                x, layers = layer(x, relu=True), layers[1:]
            else:
                x = layer(x)
        return x


def is_relu_fusible(layer: nn.Module, behind: nn.Module, x: Any) -> bool:
    """Whether a norm's kernel takes the ReLU behind it along; not where somebody asked to see what
    goes through it.
    """
    if (
        type(behind) is not nn.ReLU
        or not isinstance(layer, LaneSampleNorm | LaneBatchNorm)
        or not isinstance(x, Tensor)
    ):
        return False
    if layer.now.mapped is not None:  # how all lanes' values lie is not seen from within one
        return False
    watched = behind._forward_hooks or behind._forward_pre_hooks or behind._backward_hooks
    return not watched and not behind._backward_pre_hooks and layer.supports_relu_fusion(x)


class LaneDropout(LaneLayer):
    """Masks are counted, not drawn from a generator (batched.drop)."""

    def run(self, live: bool, x: Tensor) -> Tensor:
        return (
            self.apply_dropout(x, self.layer.p, channels=not isinstance(self.layer, nn.Dropout))
            if live
            else x
        )


#: layers with a batched form; anything else that has tensors of its own becomes a Unit
LANE_LAYERS: dict[type[nn.Module], type[LaneLayer]] = {
    nn.Linear: LaneLinear,
    nn.Conv1d: LaneConv,
    nn.Conv2d: LaneConv,
    nn.ConvTranspose1d: LaneTransposedConv,
    nn.ConvTranspose2d: LaneTransposedConv,
    nn.Embedding: LaneEmbedding,
    nn.EmbeddingBag: LaneEmbeddingBag,
    nn.GroupNorm: LaneSampleNorm,
    nn.LayerNorm: LaneSampleNorm,
    nn.RMSNorm: LaneSampleNorm,
    **dict.fromkeys(INSTANCE_NORMS, LaneSampleNorm),
    nn.PReLU: LanePReLU,
    nn.BatchNorm1d: LaneBatchNorm,
    nn.BatchNorm2d: LaneBatchNorm,
    nn.BatchNorm3d: LaneBatchNorm,
    nn.RNNCell: LaneRecurrentCell,
    nn.LSTMCell: LaneRecurrentCell,
    nn.GRUCell: LaneRecurrentCell,
    nn.RNN: LaneRecurrent,
    nn.LSTM: LaneRecurrent,
    nn.GRU: LaneRecurrent,
    nn.MultiheadAttention: LaneAttention,
    nn.Dropout: LaneDropout,
    nn.Dropout1d: LaneDropout,
    nn.Dropout2d: LaneDropout,
    nn.Dropout3d: LaneDropout,
}


def choose_lane_layer(layer: nn.Module) -> type[LaneLayer]:
    """The leaf for a layer, or BadInput where it would do something else."""
    leaf = LANE_LAYERS.get(type_before_parametrizations(layer), VmapModule)
    if (
        isinstance(layer, nn.modules.batchnorm._BatchNorm)
        and layer.track_running_stats
        and layer.momentum is None
    ):
        raise BadInput("a BatchNorm without momentum counts its batches, which lanes do not")
    return leaf if _supports_layer(leaf, layer) else VmapModule


def _supports_layer(leaf: type[LaneLayer], layer: Any) -> bool:
    """Whether a layer uses nothing that its leaf lacks."""
    if leaf in (LaneEmbedding, LaneEmbeddingBag):
        bare = layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
        return bool(bare and (leaf is LaneEmbedding or layer.mode != "max"))
    if isinstance(layer, INSTANCE_NORMS):
        return not layer.track_running_stats
    if leaf is LaneRecurrent:
        return not layer.proj_size
    if leaf is LaneAttention:
        return bool(layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn)
    return True
