"""Layers over positions, one set of weights for each lane: nn.RNN, nn.LSTM, nn.GRU and
nn.MultiheadAttention.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.training.gpu.cells import GRUFunction, LSTMFunction
from flrce.training.gpu.lane_layer import ForwardContext, LaneLayer
from flrce.training.gpu.torch_functions import compute_attention_weights


class LaneRecurrent(LaneLayer):
    """nn.RNN, nn.LSTM and nn.GRU, layer by layer and, where they are bidirectional, way by way."""

    inputs = 3

    def __init__(
        self, path: str, layer: nn.Module, names: Mapping[str, str], now: ForwardContext
    ) -> None:
        super().__init__(path, layer, names, now)
        self.at = 0 if layer.batch_first else 1

    def run(self, live: bool, x: Tensor, state: Any = None) -> Any:
        layer, k = self.layer, self.now.k
        celled = isinstance(layer, nn.LSTM)
        x = self.split_lanes(x).transpose(1, 2)  # (k, L, B, I)
        first = self._get_initial_states(x, state if celled or state is None else (state,))
        lasts: list[tuple[Tensor, ...]] = []
        for depth in range(layer.num_layers):
            if depth and layer.dropout and live:
                x = (
                    self.apply_dropout(x.transpose(1, 2).flatten(0, 1), layer.dropout)
                    .unflatten(0, (k, -1))
                    .transpose(1, 2)
                )
            ways = []
            for way in range(2 if layer.bidirectional else 1):
                end = f"l{depth}" + "_reverse" * way
                at = [each[len(lasts)] for each in first]
                y, last = self._run_direction(x.flip(1) if way else x, end, at)  # y (L, k, B, H)
                ways.append(y.flip(0) if way else y)
                lasts.append(last)
            x = torch.cat(ways, -1).transpose(0, 1)
        out = x.transpose(1, 2).flatten(0, 1)  # (k B, L, H)
        out = out if layer.batch_first else out.transpose(0, 1)
        final = tuple(
            torch.stack(each).reshape(len(lasts), k * self.now.batch, -1)
            for each in zip(*lasts, strict=True)
        )
        return out, final if celled else final[0]

    def find_input_batch_dim(self, i: int) -> int:
        return self.at if i == 0 else 1  # states are (layers, B, H)

    def _run_direction(
        self, x: Tensor, end: str, first: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction: (states (L, k, B, H), the last ones)."""
        (wi, wh), gated = self._get_weights(end), isinstance(self.layer, nn.GRU)
        plain = isinstance(self.layer, nn.RNN)
        bi, bh = (
            self.get_lane_tensor(f"bias_{s}h_{end}") if self.layer.bias else None for s in "ih"
        )
        bias = bi if gated or bi is None or bh is None else bi + bh
        gates = self.apply_linear(x, wi, bias).transpose(0, 1).contiguous()  # (L, k, B, gates)
        wh, first = wh.to(gates.dtype), [each.to(gates.dtype) for each in first]
        if gated:
            bh = wh.new_zeros(wh.shape[:2]) if bh is None else bh.to(gates.dtype)
            y: Any = GRUFunction.apply(gates, wh, bh, first[0])
            return y, (y[-1],)
        if plain:
            turn = torch.tanh if self.layer.nonlinearity == "tanh" else torch.relu
            states = [first[0]]
            for gate in gates:
                states.append(turn(gate + torch.bmm(states[-1], wh.mT)))
            return torch.stack(states[1:]), (states[-1],)
        y, cell = LSTMFunction.apply(gates, wh, *first)
        return y, (y[-1], cell)

    def _get_weights(self, end: str) -> tuple[Tensor, Tensor]:
        found = self.get_lane_tensor(f"weight_ih_{end}"), self.get_lane_tensor(f"weight_hh_{end}")
        assert found[0] is not None
        assert found[1] is not None
        return found[0], found[1]

    def _get_initial_states(self, x: Tensor, state: Any) -> list[Tensor]:
        """(layers and ways, k, B, H) for h and, in an LSTM, c."""
        layer = self.layer
        many = layer.num_layers * (2 if layer.bidirectional else 1)
        shape = (many, self.now.k, self.now.batch, layer.hidden_size)
        if state is not None:
            return [each.reshape(shape) for each in state]
        return [x.new_zeros(shape, dtype=torch.float32)] * (2 if isinstance(layer, nn.LSTM) else 1)


class LaneAttention(LaneLayer):
    """nn.MultiheadAttention: torch's own attention over everyone's samples, unless its weights are
    looked at.
    """

    inputs = 3

    def __init__(
        self, path: str, layer: nn.Module, names: Mapping[str, str], now: ForwardContext
    ) -> None:
        super().__init__(path, layer, names, now)
        self.at = 0 if layer.batch_first else 1

    def run(
        self,
        live: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        layer, k = self.layer, self.now.k
        weight, bias = self.get_lane_tensor("in_proj_weight"), self.get_lane_tensor("in_proj_bias")
        assert weight is not None
        weights = weight.chunk(3, 1)
        biases = [None] * 3 if bias is None else bias.chunk(3, 1)
        parts = []
        for x, w, b in zip((query, key, value), weights, biases, strict=True):
            # (k B, L, E)
            y = self.apply_linear(self.split_lanes(x), w.contiguous(), b).flatten(0, 1)
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
        shares: Tensor | None = None
        if (layer.dropout and live) or (need_weights and self.now.weights):
            shares = compute_attention_weights(parts[0], parts[1], mask)  # (k B, heads, L, S)
            shares = self.apply_dropout(shares, layer.dropout) if live else shares
            seen = shares @ parts[2]
        else:
            seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], mask)
        out = seen.transpose(1, 2).flatten(2).unflatten(0, (k, -1))
        weight, bias = self.get_output_projection()
        if shares is not None and average_attn_weights:
            shares = shares.mean(1)
        return self.merge_lanes(
            self.apply_linear(out, weight, bias)
        ), shares if need_weights and self.now.weights else None

    def find_input_batch_dim(self, i: int) -> int:
        return self.at if i < self.inputs else 0  # masks have samples first

    def find_output_batch_dim(self, i: int) -> int:
        return self.at if i == 0 else 0  # weights have samples first

    def get_output_projection(self) -> tuple[Tensor, Tensor | None]:
        """The last projection, a layer of its own within this one."""
        found: list[Any] = []
        for name in ("weight", "bias"):
            own = f"out_proj.{name}"
            shared = getattr(self.layer.out_proj, name)
            if own in self.names:
                found.append(self.now.tensors[self.names[own]])
            else:
                found.append(
                    None if shared is None else shared[None].expand(self.now.k, *shared.shape)
                )
        return found[0], found[1]
