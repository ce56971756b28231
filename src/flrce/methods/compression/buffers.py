"""What compressors share: checks of settings and payloads, and levels of a few bits without
gaps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flrce.core.pieces import MalformedPayload
from flrce.core.types import Payload
from flrce_client import bits as bits_of
from flrce_client import sparse


def require_buffers(payload: Payload, names: set[str]) -> None:
    """Malformed unless the payload's buffers are these."""
    if set(payload.buffers) != names:
        got = ", ".join(map(repr, sorted(payload.buffers)))[:80] or "none"
        raise MalformedPayload(
            f"buffers {got}, not {', '.join(map(repr, sorted(names))) or 'none'}"
        )


def pack_bits(levels: Tensor, bits: int) -> Tensor:
    """Levels (n,) uint8 below 2^bits, one after another without gaps, on the levels' device."""
    if bits == 8:
        return levels
    if levels.device.type != "cpu":
        return pack_bits_with_torch(levels, bits)
    return torch.from_numpy(bits_of.pack_bits(levels.numpy(), bits))


def unpack_bits(packed: Tensor, bits: int, n: int) -> Tensor:
    """The n levels that `pack_bits` packed; Malformed where the padding is not zero."""
    if bits == 8:
        return packed
    if packed.device.type != "cpu":
        levels, rest = unpack_bits_with_torch(packed, bits, n)
        if rest.numel() and bool(rest.any()):  # one number is read back, where bytes have padding
            raise MalformedPayload("bits beyond the last level are not zero")
        return levels
    return torch.from_numpy(bits_of.unpack_bits(packed.numpy(), bits, n))


def pack_bits_with_torch(levels: Tensor, bits: int) -> Tensor:
    """As `pack_bits`, for levels (..., n) on a device: the same bytes."""
    places = torch.arange(bits - 1, -1, -1, dtype=torch.uint8, device=levels.device)
    planes = (levels[..., None] >> places & 1).flatten(-2)
    planes = torch.nn.functional.pad(planes, (0, -planes.shape[-1] % 8)).unflatten(-1, (-1, 8))
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=levels.device)
    packed: Tensor = (planes << places).sum(-1, dtype=torch.uint8)
    return packed


def unpack_bits_with_torch(packed: Tensor, bits: int, n: int) -> tuple[Tensor, Tensor]:
    """(the n levels, the bits of the padding), for bytes on a device."""
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    planes = (packed[:, None] >> places & 1).flatten()
    places = torch.arange(bits - 1, -1, -1, dtype=torch.uint8, device=packed.device)
    levels = (planes[: n * bits].reshape(n, bits) << places).sum(1, dtype=torch.uint8)
    return levels, planes[n * bits :]


def mask_largest(u: Tensor, K: int) -> Tensor:
    """(d,) bool: the K largest magnitudes, NaN above all; among equals the lowest index."""
    return torch.from_numpy(sparse.mask_largest(u.numpy(), K))


def take_spans(u: Tensor, spans: Sequence[slice]) -> Tensor:
    """The floats of these spans, one after another, as float32."""
    if len(spans) == 1:
        return u[spans[0]].float()
    return torch.cat([u.new_empty(0), *(u[span] for span in spans)]).float()


def join_spans(parts: Sequence[tuple[Sequence[slice], Tensor]], size: int) -> Tensor:
    """(size,) the vector whose spans hold these values: the inverse of `take_spans`."""
    u = torch.zeros(size, device=parts[0][1].device)
    for spans, values in parts:
        at = 0
        for span in spans:
            u[span] = values[at : at + span.stop - span.start]
            at += span.stop - span.start
    return u
