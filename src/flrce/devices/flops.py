"""What torch's FLOP counter misses (LSTMs, fused attention), and the traffic of a step."""

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
#: operations that only look at a tensor another way: nothing is computed or moved
VIEW_OPERATIONS = {"alias", "as_strided", "detach", "expand", "permute", "select", "slice"}
VIEW_OPERATIONS |= {"squeeze", "t", "transpose", "unsqueeze", "view"}


#: a whole sequence in one call: all its layers in cuDNN, one layer in oneDNN. Which argument says
#: that the sequence is (N, L, inputs); None: it is (L, N, inputs)
RECURRENT_OPERATIONS = {
    "_cudnn_rnn": 10,
    "_cudnn_rnn_backward": 14,
    "mkldnn_rnn_layer": None,
    "mkldnn_rnn_layer_backward": None,
}


@dataclass(frozen=True)
class StepTraffic:
    """How many operations are launched, and the bytes that they read and write."""

    operations: float = 0.0
    moved_bytes: float = 0.0


NO_TRAFFIC = StepTraffic()


class TrafficCounter(TorchDispatchMode):
    """Counts operations as they are dispatched, and the bytes of their arguments and results. A
    recurrent layer in one call counts as one operation for each step of its sequence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.moved_bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        name = op.__name__.split(".")[0]
        if name not in VIEW_OPERATIONS:
            self.operations += count_launches(name, args)
            moved = [*args, *(out if isinstance(out, tuple | list) else [out])]
            self.moved_bytes += sum(x.nbytes for x in moved if isinstance(x, Tensor))
        return out


def count_launches(name: str, args: Sequence[Any]) -> int:
    """How many launches follow one another in an operation: the steps of a sequence, or one."""
    if name not in RECURRENT_OPERATIONS or args[0].dim() < 3:  # packed sequences are flat
        return 1
    place = RECURRENT_OPERATIONS[name]
    batch_first = place is not None and bool(args[place])
    return int(args[0].shape[1 if batch_first else 0])


@contextmanager
def open_flop_counter(more: Mapping[Any, Any]) -> Iterator[FlopCounterMode]:
    """Torch's counter of FLOPs, `more` operations known to it.

    Its dispatch mode loads torch's compiler, a second or two, only to keep it away from itself.
    Where nothing has loaded the compiler there is nothing to keep away: torch looks that up under
    the name set here.
    """
    mode: Any = getattr(flop_counter, "_FlopCounterMode", FlopCounterMode)
    # None: a version of torch that loads nothing
    kept = getattr(mode.__torch_dispatch__, "__wrapped__", None)
    spared = kept is not None and "torch._dynamo" not in sys.modules
    if spared:
        kept.__dict__["__dynamo_disable"] = kept
    try:
        with FlopCounterMode(display=False, custom_mapping=dict(more)) as counter:
            yield counter
    finally:
        if spared:
            kept.__dict__.pop("__dynamo_disable", None)


def unroll_lstms(net: nn.Module) -> nn.Module:
    """A copy of the net whose LSTMs multiply matrices one by one, where a counter sees them."""
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, nn.LSTM):
            module.forward = _UnrolledLSTM(module)  # type: ignore[method-assign, assignment]
    return net


class _UnrolledLSTM:
    """An LSTM's forward pass in plain products, 8 (inputs + width) width FLOPs a step and layer."""

    def __init__(self, module: nn.LSTM) -> None:
        self.module = module

    def __call__(self, x: Any, hx: Any = None) -> Any:
        lstm = self.module
        if isinstance(x, PackedSequence):  # counted as if all were as long as the longest
            padded, lengths = pad_packed_sequence(x, batch_first=lstm.batch_first)
            out, last = self(padded)
            return pack_padded_sequence(
                out, lengths, batch_first=lstm.batch_first, enforce_sorted=False
            ), last
        steps = x if not lstm.batch_first or x.ndim == 2 else x.transpose(0, 1)
        alone = x.ndim == 2
        steps = steps[:, None] if alone else steps  # (L, N, inputs)
        last_h, last_c = [], []
        for layer in range(lstm.num_layers):
            sides = []
            for side in range(2 if lstm.bidirectional else 1):
                suffix = f"_l{layer}" + ("_reverse" if side else "")
                out, h, c = self._run_direction(steps.flip(0) if side else steps, suffix)
                sides.append(out.flip(0) if side else out)
                last_h.append(h)
                last_c.append(c)
            steps = torch.cat(sides, 2)
        h, c = torch.stack(last_h), torch.stack(last_c)
        if alone:
            return steps[:, 0], (h[:, 0], c[:, 0])
        return steps.transpose(0, 1) if lstm.batch_first else steps, (h, c)

    def _run_direction(self, steps: Tensor, suffix: str) -> tuple[Tensor, Tensor, Tensor]:
        lstm = self.module

        def get_weight(name: str) -> Any:  # None: there may be no bias
            return getattr(lstm, name + suffix, None)

        c = steps.new_zeros(steps.shape[1], lstm.hidden_size)
        h = steps.new_zeros(steps.shape[1], lstm.proj_size or lstm.hidden_size)
        fed = F.linear(steps, get_weight("weight_ih"), get_weight("bias_ih"))  # (L, N, 4 width)
        states = []
        for one in fed:
            gates = one + F.linear(h, get_weight("weight_hh"), get_weight("bias_hh"))
            i, f, g, o = gates.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            if lstm.proj_size:
                h = F.linear(h, get_weight("weight_hr"))
            states.append(h)
        return torch.stack(states), h, c


def _attention_flops(q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))


def _embedding_backward_flops(grad: Any, *rest: Any, **more: Any) -> int:
    """A look-up costs none; each of its gradients is added to a row of the table."""
    return int(torch.Size(grad).numel())


#: operation -> FLOPs from the shapes of its arguments
EXTRA_FLOP_FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    aten.embedding_dense_backward: _embedding_backward_flops,
}
