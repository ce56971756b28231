"""Recurrent layers and attention of many lanes.

`LaneRecurrent` and `LaneAttention` are written as one lane sees them, in functions that
lane_functions.py makes for all lanes. Gates of all lanes are one product a time step. Of the
weights' gradients only the recurrent part needs time; the rest is one product over all steps. On a
GPU the cell is torch's fused one, elsewhere the same formulas in plain operations.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.training.gpu.lane_functions import (
    ForwardContext,
    call_across_lanes,
    compute_attention_weights,
)
from flrce.training.precision import cast_like_autocast

aten = torch.ops.aten


def lstm_cell(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gates from input and state (n, 4H), c (n, H) -> (h', c', the activated gates i f g o)."""
    if x.is_cuda:
        return cast(tuple[Tensor, Tensor, Tensor], aten._thnn_fused_lstm_cell(x, h, c))
    i, f, g, o = (x + h).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * c + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    gh: Tensor, gc: Tensor, c: Tensor, after: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients by h' and c' -> those by the gates before activation (n, 4H) and by c."""
    if gh.is_cuda:
        found = aten._thnn_fused_lstm_cell_backward_impl(gh, gc, c, after, gates, False)
        return found[0], found[1]
    i, f, g, o = gates.chunk(4, 1)
    t = after.tanh()
    gc = gc + gh * o * (1 - t * t)
    parts = (gc * g * i * (1 - i), gc * c * f * (1 - f), gc * i * (1 - g * g), gh * t * o * (1 - o))
    return torch.cat(parts, 1), gc * f


def gru_cell(x: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gates from input and state (n, 3H) -> (h', what the way back needs)."""
    if x.is_cuda:
        return cast(tuple[Tensor, Tensor], aten._thnn_fused_gru_cell(x, h, state))
    (ir, iz, iN), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (iN + r * hn).tanh()
    return n + z * (state - n), torch.cat([r, z, n, state, hn], 1)


def gru_cell_backward(g: Tensor, saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient by h' -> those by the input's gates, the state's gates and the state."""
    if g.is_cuda:
        found = aten._thnn_fused_gru_cell_backward(g, saved, False)
        return found[0], found[1], found[2]
    r, z, n, state, hn = saved.chunk(5, 1)
    gn = g * (1 - z) * (1 - n * n)
    gr, gz = gn * hn * r * (1 - r), g * (state - n) * z * (1 - z)
    return torch.cat([gr, gz, gn], 1), torch.cat([gr, gz, gn * r], 1), g * z


class LSTMFunction(torch.autograd.Function):
    """x (L, k, B, 4H) gates from the input, weight (k, 4H, H), h and c (k, B, H) -> (states (L, k,
    B, H), last c).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        k, B, H = h.shape
        states, cells, gates = [h], [c.reshape(-1, H)], []
        for gate in x:
            own = torch.bmm(states[-1], weight.mT).reshape(k * B, -1)
            new, cell, used = lstm_cell(gate.reshape(k * B, -1), own, cells[-1])
            states.append(new.reshape(k, B, H))
            cells.append(cell)
            gates.append(used)
        ctx.save_for_backward(weight, *states, *cells, *gates)
        return torch.stack(states[1:]), cells[-1].reshape(k, B, H)

    @staticmethod
    def backward(ctx: Any, g: Tensor, gc: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight, *rest = ctx.saved_tensors
        L = len(g)
        states, cells, gates = rest[: L + 1], rest[L + 1 : 2 * L + 2], rest[2 * L + 2 :]
        k, B, H = states[0].shape
        gh, gc = torch.zeros_like(states[0]), gc.reshape(k * B, H)
        grads = []
        for t in reversed(range(L)):
            by_gates, gc = lstm_cell_backward(
                (g[t] + gh).reshape(k * B, H), gc, cells[t], cells[t + 1], gates[t]
            )
            grads.append(by_gates)
            gh = torch.bmm(by_gates.reshape(k, B, -1), weight)
        by_input = torch.stack(grads[::-1]).reshape(L, k, B, -1)
        return by_input, _recurrent_weight_gradient(by_input, states[:-1]), gh, gc.reshape(k, B, H)


class GRUFunction(torch.autograd.Function):
    """x (L, k, B, 3H) gates from the input, weight (k, 3H, H), bias (k, 3H), h (k, B, H) -> states
    (L, k, B, H).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, h: Tensor) -> Tensor:
        k, B, H = h.shape
        states, saved = [h], []
        for gate in x:
            own = torch.baddbmm(bias[:, None], states[-1], weight.mT).reshape(k * B, -1)
            new, kept = gru_cell(gate.reshape(k * B, -1), own, states[-1].reshape(-1, H))
            states.append(new.reshape(k, B, H))
            saved.append(kept)
        ctx.save_for_backward(weight, *states, *saved)
        return torch.stack(states[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight, *rest = ctx.saved_tensors
        L = len(g)
        states, saved = rest[: L + 1], rest[L + 1 :]
        k, B, H = states[0].shape
        gh = torch.zeros_like(states[0])
        inputs, owns = [], []
        for t in reversed(range(L)):
            by_input, by_own, past = gru_cell_backward((g[t] + gh).reshape(k * B, H), saved[t])
            inputs.append(by_input)
            owns.append(by_own)
            gh = torch.baddbmm(past.reshape(k, B, H), by_own.reshape(k, B, -1), weight)
        own = torch.stack(owns[::-1]).reshape(L, k, B, -1)
        by_bias = own.sum((0, 2))
        return (
            torch.stack(inputs[::-1]).reshape(L, k, B, -1),
            _recurrent_weight_gradient(own, states[:-1]),
            by_bias,
            gh,
        )


def _recurrent_weight_gradient(gates: Tensor, states: list[Tensor]) -> Tensor:
    """(k, gates, H) the recurrent weight's gradient; gates (L, k, B, gates), the L states before
    them (k, B, H).
    """
    k = gates.shape[1]
    before = torch.stack(states).transpose(0, 1).reshape(k, -1, states[0].shape[-1])  # (k, L B, H)
    return torch.bmm(gates.transpose(0, 1).reshape(k, len(before[0]), -1).mT, before)


class LaneRecurrent(nn.RNNBase):
    """nn.RNN, nn.LSTM and nn.GRU, layer by layer and, where they are bidirectional, way by way."""

    now: ForwardContext

    def forward(self, x: Tensor, state: Any = None) -> Any:
        has_cell = self.mode == "LSTM"
        x = x.transpose(0, 1) if self.batch_first else x  # (L, B, I)
        first = self._get_initial_states(x, state if has_cell or state is None else (state,))
        lasts: list[tuple[Tensor, ...]] = []
        for depth in range(self.num_layers):
            if depth and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            ways = []
            for way in range(2 if self.bidirectional else 1):
                at = [each[len(lasts)] for each in first]
                names = self._all_weights[len(lasts)]
                y, last = self._run_direction(x.flip(0) if way else x, names, at)
                ways.append(y.flip(0) if way else y)
                lasts.append(last)
            x = torch.cat(ways, -1)
        final = tuple(torch.stack(each) for each in zip(*lasts, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, final if has_cell else final[0]

    def _get_initial_states(self, x: Tensor, state: Any) -> list[Tensor]:
        """(layers and ways, B, H) for h and, in an LSTM, c."""
        if state is not None:
            return list(state)
        ways = 2 if self.bidirectional else 1
        nothing = x.new_zeros(self.num_layers * ways, x.shape[1], self.hidden_size)
        return [nothing, nothing]

    def _run_direction(
        self, x: Tensor, names: list[str], first: list[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction: (states (L, B, H), the last ones)."""
        wi, wh = (getattr(self, name) for name in names[:2])
        bi, bh = (getattr(self, name) for name in names[2:]) if self.bias else (None, None)
        joined = bi if self.mode == "GRU" or bi is None else bi + bh
        gates = F.linear(x, wi, joined)  # (L, B, gates)
        if self.mode == "LSTM":
            y, cell = call_across_lanes(self.now, _run_lstm, gates, wh, *first)
            return y, (y[-1], cell)
        if self.mode == "GRU":
            y = call_across_lanes(self.now, _run_gru, gates, wh, bh, first[0])
            return y, (y[-1],)
        turn = torch.tanh if self.mode == "RNN_TANH" else torch.relu
        states = [first[0]]
        for gate in gates:
            states.append(turn(gate + F.linear(states[-1], wh)))
        return torch.stack(states[1:]), (states[-1],)


def _run_lstm(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """gates (k, L, B, 4H) -> states (k, L, B, H) and the last c (k, B, H)."""
    gates, weight, h, c = cast_like_autocast(gates, weight, h, c)
    y, cell = LSTMFunction.apply(gates.transpose(0, 1).contiguous(), weight, h, c)
    return y.transpose(0, 1), cell


def _run_gru(gates: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor) -> Tensor:
    """gates (k, L, B, 3H) -> states (k, L, B, H)."""
    bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias
    gates, weight, bias, h = cast_like_autocast(gates, weight, bias, h)
    y = GRUFunction.apply(gates.transpose(0, 1).contiguous(), weight, bias, h)
    return cast(Tensor, y).transpose(0, 1)


class LaneAttention(nn.MultiheadAttention):
    """torch's own forward calls functions where no mode sees them."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        bias = self.in_proj_bias
        biases = (None, None, None) if bias is None else bias.chunk(3)
        parts = []
        for x, w, b in zip((query, key, value), self.in_proj_weight.chunk(3), biases, strict=True):
            y = F.linear(x if self.batch_first else x.transpose(0, 1), w, b)  # (B, L, E)
            parts.append(y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        mask = self._join_masks(attn_mask, key_padding_mask, parts[0].dtype)
        weights: Tensor | None = None
        if need_weights:
            weights = compute_attention_weights(parts[0], parts[1], mask)  # (B, heads, L, S)
            weights = F.dropout(weights, self.dropout, self.training)
            seen = weights @ parts[2]
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            dropped = self.dropout if self.training else 0.0
            q, k, v = parts
            seen = F.scaled_dot_product_attention(q, k, v, mask, dropped)
        out = self.out_proj(seen.transpose(1, 2).flatten(2))
        return out if self.batch_first else out.transpose(0, 1), weights

    def _join_masks(
        self, mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """What is added to the scores (B, heads, L, S); True in either mask means hidden."""
        mask, padding = (
            torch.zeros_like(x, dtype=dtype).masked_fill(x, -torch.inf)
            if x is not None and x.dtype == torch.bool
            else x
            for x in (mask, padding)
        )
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (-1, self.num_heads))
        if padding is None:
            return mask
        return padding[:, None, None] + (0 if mask is None else mask)


def replace_sequence_layers(module: nn.Module, now: ForwardContext) -> None:
    """Recurrent layers and attention within a module become those above, where these suffice."""
    for layer in module.modules():
        if type(layer) in (nn.RNN, nn.LSTM, nn.GRU) and not layer.proj_size:
            layer.__class__ = LaneRecurrent
            layer.__dict__["now"] = now
        elif type(layer) is nn.MultiheadAttention and _is_plain_attention(layer):
            layer.__class__ = LaneAttention


def _is_plain_attention(layer: nn.MultiheadAttention) -> bool:
    """Whether it has one projection of queries, keys and values, and no further positions."""
    return layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn
