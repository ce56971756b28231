"""Which compressors may encode a download."""

from functools import lru_cache

import numpy as np
import torch

from flrce.core.downlink import make_download_stream
from flrce.core.roles import Compressor

PROBE_LAYOUT = (("probe", 4096),)


def explain_stateful_code(code: Compressor) -> str:
    """Why a code cannot encode downloads because its sender keeps something; "" where it can."""
    if _probe_code(code)[1]:
        return (
            f"{type(code).__name__} keeps a residual with the sender, and a download has no"
            " memory of its own; use the compressor inside it"
        )
    return ""


def explain_growing_error(code: Compressor) -> str:
    """Why the error of repeated differences would grow with this code; "" where it shrinks."""
    name = type(code).__name__
    if code.scaled:
        return (
            f"the unbiased scale of {name} lets the error of difference downloads grow; set scale ="
            ' "contractive" or scaled = false, or send one bit or more'
        )
    error = _probe_code(code)[0]
    if not error < 1:
        return (
            f"{name} has an error of {error:.2g} of the difference that it encodes, so the error of"
            " difference downloads would grow; send more bits"
        )
    return ""


def _probe_code(code: Compressor) -> tuple[float, bool]:
    """(squared error of normal numbers against their squared length, whether the sender keeps
    anything).
    """
    try:
        return _probe_hashable_code(code)
    except TypeError:  # a field that cannot be hashed
        return _probe_uncached(code)


@lru_cache(maxsize=64)
def _probe_hashable_code(code: Compressor) -> tuple[float, bool]:
    return _probe_uncached(code)


def _probe_uncached(code: Compressor) -> tuple[float, bool]:
    u = torch.from_numpy(
        make_download_stream(0, 0, "probe").standard_normal(PROBE_LAYOUT[0][1]).astype(np.float32)
    )
    payload, kept = code.encode(u, PROBE_LAYOUT, make_download_stream(0, 0), {})
    decoded = code.decode(payload, PROBE_LAYOUT, make_download_stream(0, 0))
    return float((u - decoded).square().sum() / u.square().sum()), bool(kept)
