"""What attention by compiled code keeps for the way back, counted before a batch is trained."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flrce.models import drawing
from flrce.training.cpu.layers import load_library
from flrce.training.cpu.shortcuts import LONGEST


class Shares(TorchFunctionMode):
    """While it lasts, attention's shares are counted: 4 bytes for each sample, head and pair of
    tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, (_, self.lanes) = 0, load_library()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:  # (..., heads, tokens, numbers)
            query, key = (
                args[i] if len(args) > i else given[name] for i, name in enumerate(("query", "key"))
            )
            self._add(math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2])
        elif func is F.multi_head_attention_forward:  # (tokens, samples, width), and how many heads
            query, key, heads = args[0], args[1], args[4]
            self._add(math.prod(query.shape[1:-1]) * heads, len(query), len(key))
        return func(*args, **given)

    def _add(self, heads: int, L: int, S: int) -> None:
        if max(L, S) <= LONGEST:
            self.nbytes += 4 * heads * S * -(-L // self.lanes) * self.lanes  # whole vectors


def count_attention_bytes(net: nn.Module, x: Tensor) -> int:
    """Bytes for each sample, found by a pass over a few of them; 0 where the network has no
    attention.
    """
    shares = Shares()
    with drawing.preserve_rng_states(torch.device("cpu")), torch.no_grad(), shares:
        copy.deepcopy(net).train()(x)
    return shares.nbytes // len(x)
