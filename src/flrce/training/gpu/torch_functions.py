"""Functions of torch that a network's code may call, as leaves would do it: what drops or draws,
attention, norms.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flrce.training.gpu.lane_layer import ForwardContext, LaneLayer
from flrce.training.gpu.norms_rows import apply_row_norm, supports_row_norm
from flrce.training.gpu.random_functions import LaneRandomFunctions

CHANNEL_DROPOUTS = (F.dropout1d, F.dropout2d, F.dropout3d)
attention = F.scaled_dot_product_attention


class LaneFunctionMode(TorchFunctionMode):
    """While a network of many lanes runs."""

    def __init__(self, now: ForwardContext) -> None:
        super().__init__()
        self.now = now
        self.drop = LaneDropoutFunction("F.dropout", nn.Identity(), {}, now)
        self.attend = LaneAttentionFunction(
            "F.scaled_dot_product_attention", nn.Identity(), {}, now
        )
        self.noise = LaneRandomFunctions(now).handled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = kwargs or {}
        if func is F.dropout or func in CHANNEL_DROPOUTS:
            return self._apply_dropout(func, *args, **more)
        if func is attention:
            return self._apply_attention(*args, **more)
        if func is F.layer_norm:
            return self._apply_layer_norm(*args, **more)
        if self.now.mapped is not None and self.now.training and more.get("generator") is None:
            func = self.noise.get(func, func)
        return func(*args, **more)

    def _apply_layer_norm(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Of a layer that is the same for all lanes: its rows are those of one lane."""
        mixed = any(each is not None and each.dtype != input.dtype for each in (weight, bias))
        if (
            self.now.mapped is not None
            or mixed
            or not supports_row_norm(input, normalized_shape, eps)
        ):
            return F.layer_norm(input, normalized_shape, weight, bias, eps)
        w, b = (None if each is None else each[None] for each in (weight, bias))
        return apply_row_norm(input[None], normalized_shape, w, b, eps, centred=True)[0]

    def _apply_dropout(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not (training and self.now.training):
            return func(input, p, training, inplace)  # type: ignore[no-any-return]
        found: Tensor = self.drop(input, p, func in CHANNEL_DROPOUTS)
        return found

    def _apply_attention(
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
        if dropout_p and self.now.training:
            if enable_gqa:
                key, value = (
                    x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value)
                )
            seen = compute_attention_weights(query, key, attn_mask, is_causal, scale)
            return self.drop(seen, dropout_p) @ value
        run: Any = attention if self.now.mapped is None or attn_mask is not None else self.attend
        more = {
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        return run(query, key, value, attn_mask, **more)


class DeterministicMode(TorchFunctionMode):
    """While a module of one lane runs: its functions drop nothing and draw the same always."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = LaneRandomFunctions().handled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = kwargs or {}
        if func is F.dropout or func in CHANNEL_DROPOUTS:
            return args[0] if args else more["input"]
        if func is attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is attention:
            more = {**more, "dropout_p": 0.0}
        return self.noise.get(func, func)(*args, **more)


class LaneDropoutFunction(LaneLayer):
    def run(self, live: bool, x: Tensor, p: float, channels: bool = False) -> Tensor:
        return self.apply_dropout(x, p, channels)


class LaneAttentionFunction(LaneLayer):
    """Attention over everyone's samples."""

    inputs = 3

    def run(
        self, live: bool, query: Tensor, key: Tensor, value: Tensor, mask: None, **more: Any
    ) -> Tensor:
        return attention(query, key, value, mask, **more)


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
