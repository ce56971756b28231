"""torch's functions for many lanes at once.

A network's own code runs under torch.vmap: it sees one lane. `LaneFunctions` takes its calls of
products, convolutions, embeddings, norms, dropout and attention, and makes each once for all lanes.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flrce.errors import BadInput
from flrce.training.gpu.convolution import ConvolutionGeometry, convolve_lanes
from flrce.training.gpu.norms import batch_norm, group_norm, row_norm
from flrce.training.gpu.operations import (
    MIN_DIRECT_ROWS,
    batched_linear,
    drop_values,
    lookup_embeddings,
)

Tensors = dict[str, Tensor]
AllLanesCall = Callable[..., Any]
CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d}
TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d}
RANDOM_ERROR = "{} draws at random without a layer that says so"


@dataclass
class ForwardContext:
    """What functions read while a network runs once."""

    direct: bool = False  # whether Triton kernels are used
    k: int = 1
    batch: int = 1  # samples of each lane
    count: Tensor = field(default_factory=lambda: torch.ones(1))  # (k,) of them real
    training: bool = True
    # (k,) the lanes' seeds and (1,) the step; None: nothing is dropped
    draw: tuple[Tensor, Tensor] | None = None
    lane: Tensor | None = None  # any tensor that vmap maps over
    draws: int = 0  # calls of dropout in this pass
    # the dimension of samples in what each call drops, noted while `learning`
    sample_dims: dict[int, int] = field(default_factory=dict)
    learning: bool = False


class _AcrossLanes(torch.autograd.Function):
    """Its rule for vmap is the call itself, which autograd follows as any other code."""

    @staticmethod
    def forward(lane: Tensor, call: AllLanesCall, k: int, *given: Tensor | None) -> Any:
        raise RuntimeError("made for calls under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise RuntimeError("made for calls under vmap")

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, lane: Tensor, call: AllLanesCall, k: int, *given: Any
    ) -> tuple[Any, Any]:
        whole = [
            x.movedim(dim, 0) if dim is not None else None if x is None else x.expand(k, *x.shape)
            for x, dim in zip(given, in_dims[3:], strict=True)
        ]
        found = call(*whole)
        if isinstance(found, Tensor):
            return _to_float32(found), 0
        return tuple(map(_to_float32, found)), (0,) * len(found)


def call_across_lanes(now: ForwardContext, call: AllLanesCall, *given: Tensor | None) -> Any:
    """What `call` makes of all lanes' tensors (k, ...), as one lane sees it; a tensor that lanes
    share is expanded.
    """
    return _AcrossLanes.apply(now.lane, call, now.k, *given)


def _to_float32(x: Tensor) -> Tensor:
    """Autocast does not reach code under vmap, which takes one dtype."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def is_lane_tensor(x: Tensor | None) -> bool:
    """Whether each lane has an x of its own; to be asked under vmap."""
    return x is not None and bool(torch._C._functorch.is_batchedtensor(x))


class LaneFunctions(TorchFunctionMode):
    """While a network runs under vmap."""

    def __init__(self, now: ForwardContext) -> None:
        super().__init__()
        self.now = now
        self.handlers: dict[Any, Callable[..., Any]] = {
            F.linear: self._linear,
            F.embedding: self._embedding,
            F.embedding_bag: self._embedding_bag,
            F.layer_norm: partial(self._row_norm, F.layer_norm, True),
            F.rms_norm: partial(self._row_norm_without_bias, F.rms_norm),
            F.group_norm: self._group_norm,
            F.instance_norm: self._instance_norm,
            F.batch_norm: self._batch_norm,
            F.dropout: self._dropout,
            F.scaled_dot_product_attention: self._attention,
            torch._weight_norm: apply_weight_norm,
            torch.rnn_tanh_cell: partial(self._plain_cell, torch.tanh),
            torch.rnn_relu_cell: partial(self._plain_cell, torch.relu),
            torch.lstm_cell: self._lstm_cell,
            torch.gru_cell: self._gru_cell,
            **{f: partial(self._convolve, f, n) for n, f in CONVOLUTIONS.items()},
            **{f: partial(self._convolve_back, f, n) for n, f in TRANSPOSED.items()},
            **dict.fromkeys(
                (F.dropout1d, F.dropout2d, F.dropout3d), partial(self._dropout, channels=True)
            ),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.handlers.get(func, func)(*args, **(kwargs or {}))

    def _across(self, call: AllLanesCall, *given: Tensor | None) -> Any:
        return call_across_lanes(self.now, call, *given)

    @property
    def _evaluates_one_model(self) -> bool:
        """Whether torch's own functions can do it without a lane dimension."""
        return self.now.k == 1 and not self.now.training

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        least = 1 if self.now.learning else MIN_DIRECT_ROWS  # a verification has few rows
        call = partial(batched_linear, min_direct_rows=least if self.now.direct else None)
        if is_lane_tensor(weight):
            return self._across(call, input, weight, bias)
        own = None if is_lane_tensor(bias) else bias
        y = self._across(lambda x: F.linear(x, weight, own), input)  # one product for all lanes
        return y if own is bias else y + bias

    def _convolve(
        self,
        func: Any,
        dims: int,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if not is_lane_tensor(weight):
            more = (weight, bias, stride, padding, dilation, groups)
            return self._across(lambda x: _run_flat(func, x, *more), input)
        if self._evaluates_one_model and not self.now.direct:
            run = partial(_run_single, func, (stride, padding, dilation, groups))
            return self._across(run, input, weight, bias)
        stride, dilation = _repeat(stride, dims), _repeat(dilation, dims)
        if isinstance(padding, str):
            input, padding = _pad_for_name(input, padding, weight.shape[2:], dilation), 0
        geometry = ConvolutionGeometry(stride, _repeat(padding, dims), dilation)
        return self._convolve_images(input, weight, bias, geometry, groups)

    def _convolve_images(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, groups: int
    ) -> Any:
        """x (B, C, W) or (B, C, H, W) as one lane sees it."""
        if x.dim() == 4:
            call = partial(convolve_lanes, geometry=geometry, groups=groups, direct=self.now.direct)
            return self._across(call, x, weight, bias)
        stride, padding, dilation = geometry
        plane = ConvolutionGeometry((1, *stride), (0, *padding), (1, *dilation))
        y = self._convolve_images(x.unsqueeze(-2), weight.unsqueeze(-2), bias, plane, groups)
        return y.squeeze(-2)

    def _convolve_back(
        self,
        func: Any,
        dims: int,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        """A transposed convolution: one of x with zeros between its pixels, by turned kernels."""
        if self._evaluates_one_model:
            run = partial(_run_single, func, (stride, padding, output_padding, groups, dilation))
            return self._across(run, input, weight, bias)
        stride, dilation = _repeat(stride, dims), _repeat(dilation, dims)
        extra, padding = _repeat(output_padding, dims), _repeat(padding, dims)
        sides: list[int] = []  # as F.pad takes them, last dimension first
        for d in reversed(range(dims)):
            side = dilation[d] * (weight.shape[2 + d] - 1) - padding[d]
            sides += [side, side + extra[d]]
        turned = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        turned = turned.flip(tuple(range(2, 2 + dims)))  # (O, C / groups, ...)
        sizes = [(n - 1) * s + 1 for n, s in zip(input.shape[2:], stride, strict=True)]
        wide = input.new_zeros(*input.shape[:2], *sizes)
        places: list[Any] = [..., *(slice(None, None, s) for s in stride)]
        wide[tuple(places)] = input
        geometry = ConvolutionGeometry(_repeat(1, dims), _repeat(0, dims), dilation)
        return self._convolve_images(F.pad(wide, sides), turned, bias, geometry, groups)

    def _embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        if max_norm is not None:
            raise BadInput("an embedding with max_norm changes its weights as it runs")
        if scale_grad_by_freq or sparse:
            raise BadInput("an embedding with scale_grad_by_freq or sparse gradients")
        if not is_lane_tensor(weight):
            return F.embedding(input, weight, padding_idx)
        return self._across(partial(lookup_embeddings, padding=padding_idx), weight, input)

    def _embedding_bag(
        self,
        input: Tensor,
        weight: Tensor,
        offsets: Tensor | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> Tensor:
        """Bags of as many words a sample: input (B, L)."""
        if offsets is not None or per_sample_weights is not None or mode == "max":
            raise BadInput("bags of words with lengths or weights of their own, or their maximum")
        words = self._embedding(
            input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
        real = torch.ones_like(input) if padding_idx is None else (input != padding_idx)
        real = real.to(words.dtype)[..., None]
        total = cast(Tensor, (words * real).sum(1))
        return total / real.sum(1).clamp(min=1) if mode == "mean" else total

    def _row_norm(
        self,
        func: Any,
        centred: bool,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float | None = 1e-5,
    ) -> Any:
        def run(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            return row_norm(x, normalized_shape, weight, bias, eps, centred, self.now.direct)

        if is_lane_tensor(weight) or is_lane_tensor(bias):
            return self._across(run, input, weight, bias)
        more = (weight, bias) if centred else (weight,)
        return func(input, normalized_shape, *more, eps)

    def _row_norm_without_bias(
        self,
        func: Any,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Any:
        return self._row_norm(func, False, input, normalized_shape, weight, None, eps)

    def _group_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Any:
        call = partial(group_norm, groups=num_groups, eps=eps, direct=self.now.direct)
        return self._across(call, input, weight, bias)

    def _instance_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if running_mean is not None:
            raise BadInput("an instance norm with running statistics")
        return self._group_norm(input, input.shape[1], weight, bias, eps)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        call = partial(
            batch_norm,
            count=self.now.count,
            training=training,
            momentum=momentum,
            eps=eps,
            direct=self.now.direct,
        )
        return self._across(call, input, running_mean, running_var, weight, bias)

    def _dropout(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        channels: bool = False,
    ) -> Any:
        if not training or not p:
            return input
        if not self.now.training:
            raise BadInput(RANDOM_ERROR.format("a dropout in evaluation"))
        return self._across(partial(self._drop_lanes, p=p, channels=channels), input)

    def _drop_lanes(self, x: Tensor, p: float, channels: bool) -> Tensor:
        """x (k, ...); samples are taken first, so that what is dropped hangs on no padding."""
        now, nth = self.now, self.now.draws
        now.draws += 1
        if now.learning:
            now.sample_dims[nth] = 1 + (
                x.shape[1:].index(now.batch) if now.batch in x.shape[1:] else 0
            )
        if now.draw is None:
            return x
        at = now.sample_dims.get(nth, 1)
        place = zlib.crc32(f"dropout {nth}".encode())
        dropped = drop_values(x.movedim(at, 1), p, *now.draw, place, channels, now.direct)
        return dropped.movedim(1, at)

    def _plain_cell(self, turn: Any, x: Tensor, h: Tensor, *weights: Any) -> Any:
        wi, wh, bi, bh = weights
        return turn(self._linear(x, wi, bi) + self._linear(h, wh, bh))

    def _lstm_cell(self, x: Tensor, states: Any, *weights: Any) -> tuple[Tensor, Tensor]:
        gates = self._plain_cell(torch.Tensor.contiguous, x, states[0], *weights)
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def _gru_cell(self, x: Tensor, h: Tensor, *weights: Any) -> Tensor:
        wi, wh, bi, bh = weights
        ir, iz, inner = self._linear(x, wi, bi).chunk(3, -1)
        hr, hz, hidden = self._linear(h, wh, bh).chunk(3, -1)
        z, new = (iz + hz).sigmoid(), (inner + (ir + hr).sigmoid() * hidden).tanh()
        return cast(Tensor, new + z * (h - new))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """query (B, ..., L, E)."""
        if dropout_p and self.now.training:
            if enable_gqa:
                heads = query.shape[-3]
                key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
            weights = compute_attention_weights(query, key, attn_mask, is_causal, scale)
            return self._dropout(weights, dropout_p) @ value
        more = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        if attn_mask is None:
            return self._across(partial(_attend_flat, more=more), query, key, value)
        if is_lane_tensor(attn_mask):
            # (B, heads, L, S) or (L, S), expanded so that lanes and samples are one dimension
            shape = (*query.shape[:-1], key.shape[-2])
            attn_mask = attn_mask.expand(shape)
            return self._across(partial(_attend_flat, more=more), query, key, value, attn_mask)
        whole = attn_mask.dim() < query.dim() or attn_mask.shape[0] == 1
        mask = attn_mask if whole else attn_mask.repeat(self.now.k, *(1,) * (query.dim() - 1))
        call = partial(_attend_flat, more=more | {"attn_mask": mask})
        return self._across(call, query, key, value)


def _attend_flat(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor, more: Any) -> Tensor:
    """All of (k, B, ...): torch's own attention over everyone's samples."""
    parts: list[Any] = [x.flatten(0, 1) for x in (query, key, value, *mask)]
    y: Tensor = F.scaled_dot_product_attention(*parts, **more)
    return cast(Tensor, y.unflatten(0, query.shape[:2]))


def _run_flat(func: Any, x: Tensor, *more: Any) -> Any:
    """A function of everyone's samples x (k, B, ...) with weights that lanes share."""
    return func(x.flatten(0, 1), *more).unflatten(0, x.shape[:2])


def _run_single(
    func: Any, settings: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    """A function of one lane's samples x (1, B, ...) with its weights (1, ...)."""
    return func(x[0], weight[0], None if bias is None else bias[0], *settings)[None]


def _repeat(value: Any, dims: int) -> Any:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))


def _pad_for_name(x: Tensor, name: str, kernel: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """x with the zeros of padding "same" or "valid"."""
    if name == "valid":
        return x
    sides: list[int] = []  # last dimension first
    for size, gap in zip(reversed(kernel), reversed(dilation), strict=True):
        total = gap * (size - 1)
        sides += [total // 2, total - total // 2]
    return F.pad(x, sides)


def apply_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """v with each slice along `dim` scaled to the length g of it; dim -1: v as a whole."""
    over = [d for d in range(v.dim()) if d != dim]
    return v * (g / torch.linalg.vector_norm(v, dim=over, keepdim=True) if over else g / v.abs())


def compute_attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention's weights (..., L, S), as torch's own attention has them; a mask of True says what
    is seen.
    """
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


class DropNothing(TorchFunctionMode):
    """While a module of one lane runs, to compare with lanes that count what they drop."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = kwargs or {}
        if func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d):
            return args[0] if args else more["input"]
        if func is F.scaled_dot_product_attention:
            args, more = (*args[:4], *((0.0,) * (len(args) > 4)), *args[5:]), dict(more)
            if "dropout_p" in more:
                more["dropout_p"] = 0.0
        return func(*args, **more)
