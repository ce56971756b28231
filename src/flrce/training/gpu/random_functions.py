"""What a network's own code draws by torch under vmap: counted for each lane, as what Dropout drops
is.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flrce.training.gpu.across import call_across_lanes
from flrce.training.gpu.lane_layer import ForwardContext
from flrce.training.gpu.operations import draw_random_integers

NEUTRAL_DRAW = 0.5  # what is drawn while nothing is, to compare with


class LaneRandomFunctions:
    """Stands for torch's functions that draw. `now` None: one lane that draws nothing."""

    def __init__(self, now: ForwardContext | None = None) -> None:
        self.now = now
        self.handled: dict[Any, Callable[..., Tensor]] = {
            torch.rand: self._rand,
            torch.randn: self._randn,
            torch.rand_like: self._rand_like,
            torch.randn_like: self._randn_like,
            torch.bernoulli: self._bernoulli,
            Tensor.bernoulli_: self._bernoulli_,
            Tensor.uniform_: self._uniform_,
            Tensor.normal_: self._normal_,
        }

    def draw_uniform(self, size: Sequence[int], device: torch.device) -> Tensor:
        """Numbers between 0 and 1."""
        now = self.now
        if now is None:
            return torch.full(tuple(size), NEUTRAL_DRAW, device=device)
        assert now.mapped is not None
        return call_across_lanes(
            lambda *_: [self._draw_lanes(now, tuple(size), device)],
            next(iter(now.mapped.values())),
            [],
        )[0]

    def _draw_lanes(
        self, now: ForwardContext, size: tuple[int, ...], device: torch.device
    ) -> Tensor:
        """(k, *size); samples first, so that what is drawn hangs on no padding."""
        place = zlib.crc32(f"torch.rand {now.count_call('torch.rand')}".encode())
        if now.draw is None:
            return torch.full((now.k, *size), NEUTRAL_DRAW, device=device)
        at = size.index(now.samples) if now.samples in size else 0
        first = (*size[at : at + 1], *size[:at], *size[at + 1 :])
        found = (
            draw_random_integers((now.k, *first), *now.draw, place).movedim(1, 1 + at)
            if size
            else draw_random_integers((now.k,), *now.draw, place)
        )
        return (found.float() + 0.5) / (1 << 24)

    def draw_normal(self, size: Sequence[int], device: torch.device) -> Tensor:
        return torch.erfinv(2 * self.draw_uniform(size, device) - 1) * 2**0.5

    def _rand(
        self,
        *size: Any,
        dtype: Any = None,
        device: Any = None,
        requires_grad: bool = False,
        **_: Any,
    ) -> Tensor:
        return self.draw_uniform(_parse_size(size), _resolve_device(device)).to(
            dtype or torch.get_default_dtype()
        )

    def _randn(self, *size: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return self.draw_normal(_parse_size(size), _resolve_device(device)).to(
            dtype or torch.get_default_dtype()
        )

    def _rand_like(self, x: Tensor, dtype: Any = None, **_: Any) -> Tensor:
        return self.draw_uniform(x.shape, x.device).to(dtype or x.dtype)

    def _randn_like(self, x: Tensor, dtype: Any = None, **_: Any) -> Tensor:
        return self.draw_normal(x.shape, x.device).to(dtype or x.dtype)

    def _bernoulli(self, x: Tensor, p: float | None = None) -> Tensor:
        return (self.draw_uniform(x.shape, x.device) < (x if p is None else p)).to(x.dtype)

    def _bernoulli_(self, x: Tensor, p: Any = 0.5) -> Tensor:
        return self._write_draws(x, (self.draw_uniform(x.shape, x.device) < p).to(x.dtype))

    def _uniform_(self, x: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
        return self._write_draws(
            x, (a + (b - a) * self.draw_uniform(x.shape, x.device)).to(x.dtype)
        )

    def _normal_(self, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return self._write_draws(x, (mean + std * self.draw_normal(x.shape, x.device)).to(x.dtype))

    def _write_draws(self, x: Tensor, drawn: Tensor) -> Tensor:
        """x with what was drawn in it; one that is not a lane's own cannot hold it, and must not be
        used any more.
        """
        if self.now is None or torch._C._functorch.is_batchedtensor(x):
            return x.copy_(drawn)
        x.fill_(torch.nan)
        return drawn


def _parse_size(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def _resolve_device(device: Any) -> torch.device:
    return torch.empty(0).device if device is None else torch.device(device)
