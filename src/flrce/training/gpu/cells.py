"""LSTM and GRU layers of many networks at once: gates of all lanes as one product a time step.

Of the weights' gradients only the recurrent part needs time; the rest is one product over all
steps. On a GPU the cell is torch's fused one, elsewhere the same formulas in plain operations.
"""

from typing import Any, cast

import torch
from torch import Tensor

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
