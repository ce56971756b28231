"""nn.RNNCell, nn.LSTMCell and nn.GRUCell, one set of weights for each lane: a step of code that
counts time itself.
"""

from typing import Any

import torch
from torch import Tensor, nn

from flrce.training.gpu.lane_layer import LaneLayer


class LaneRecurrentCell(LaneLayer):
    inputs = 3

    def run(self, live: bool, x: Tensor, state: Any = None) -> Any:
        layer, given = self.layer, self.split_lanes(x)  # (k, B, I)
        celled = isinstance(layer, nn.LSTMCell)
        if state is None:
            nothing = given.new_zeros(*given.shape[:2], layer.hidden_size)
            h, c = nothing, nothing
        else:
            h, c = (self.split_lanes(each) for each in (state if celled else (state, state)))
        a, b = (
            self.apply_linear(each, *self._get_weights(side))
            for each, side in ((given, "ih"), (h, "hh"))
        )
        if isinstance(layer, nn.RNNCell):
            return self.merge_lanes(
                torch.tanh(a + b) if layer.nonlinearity == "tanh" else torch.relu(a + b)
            )
        if not celled:
            (ar, az, an), (br, bz, bn) = a.chunk(3, -1), b.chunk(3, -1)
            z, new = torch.sigmoid(az + bz), torch.tanh(an + torch.sigmoid(ar + br) * bn)
            return self.merge_lanes(new + z * (h - new))
        i, f, g, o = (a + b).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return self.merge_lanes(torch.sigmoid(o) * torch.tanh(c)), self.merge_lanes(c)

    def _get_weights(self, side: str) -> tuple[Any, Tensor | None]:
        return self.get_lane_tensor(f"weight_{side}"), self.get_lane_tensor(f"bias_{side}")
