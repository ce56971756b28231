"""Every code by its name, and the two that hold another one: error feedback and entropy coding."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from flrce_client import entropy
from flrce_client.codec import Buffers, Codec, DenseCodec, Encoded
from flrce_client.errors import MalformedPayload
from flrce_client.fixed_point import FixedPointCodec, GrowingBitsCodec, SkippedLayersCodec
from flrce_client.layout import FloatArray, TensorSizes, count_floats
from flrce_client.model_groups import TrainedGroupCodec
from flrce_client.quantize import QuantizerCodec
from flrce_client.rotated import RotatedCodec
from flrce_client.sparse import (
    NonzeroCodec,
    RandomKCodec,
    TensorDropoutCodec,
    TernaryCodec,
    TopKCodec,
)

RESIDUAL_KEY = "residual"


@dataclass(frozen=True)
class ErrorFeedbackCodec(Codec):
    """What the inner code left out is added to the next update; the residual stays here."""

    inner: Codec = field(default_factory=DenseCodec)

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return self.inner.symbol_bits

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        residual = client_state.get(RESIDUAL_KEY)
        if residual is not None and residual.shape == u.shape and np.isfinite(residual).all():
            u = u + residual
        there = copy.deepcopy(rng)
        buffers, client_state = self.inner.encode(u, layout, rng, client_state)
        return buffers, {
            **client_state,
            RESIDUAL_KEY: u - self.inner.decode(buffers, layout, there),
        }

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        return self.inner.decode(buffers, layout, rng)


@dataclass(frozen=True)
class EntropyCodec(Codec):
    """The inner code's buffers, each coded by an adaptive range coder where that is shorter."""

    inner: Codec = field(default_factory=DenseCodec)

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        buffers, client_state = self.inner.encode(u, layout, rng, client_state)
        widths = self.inner.symbol_bits
        coded = {
            name: entropy.compress_buffer(values, widths.get(name, 8))
            for name, values in buffers.items()
        }
        return coded, client_state

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        widths = self.inner.symbol_bits
        limit = entropy.limit_buffer_bytes(count_floats(layout), len(layout))
        return self.inner.decode(entropy.restore_buffers(buffers, widths, limit), layout, rng)


#: name of a compressor of flrce -> the code that reads and writes the same buffers
CODECS: dict[str, type[Codec]] = {
    "dense": DenseCodec,
    "topk": TopKCodec,
    "randomk": RandomKCodec,
    "quantize": QuantizerCodec,
    "rotated": RotatedCodec,
    "ternary": TernaryCodec,
    "drop-tensors": TensorDropoutCodec,
    "error-feedback": ErrorFeedbackCodec,
    "entropy": EntropyCodec,
    "nonzero": NonzeroCodec,
    "fixed-point": FixedPointCodec,
    "growing-bits": GrowingBitsCodec,
    "skip-layers": SkippedLayersCodec,
    "trained-group": TrainedGroupCodec,
}
MAX_DEPTH = 4  # codes within codes


def read_codec(config: Mapping[str, Any], key: str, depth: int = 0) -> Codec:
    """The code that a message names under `key`, with its settings under key.setting."""
    name = config.get(key)
    make = CODECS.get(name) if isinstance(name, str) else None
    if make is None or depth > MAX_DEPTH:
        raise MalformedPayload(f"code {str(name)[:40]!r} is not one of {', '.join(sorted(CODECS))}")
    settings: dict[str, Any] = {}
    for setting in fields(make) if make is not DenseCodec else ():  # type: ignore[arg-type]
        inner = f"{key}.{setting.name}"
        if inner in config:
            nested = setting.name == "inner"
            settings[setting.name] = (
                read_codec(config, inner, depth + 1) if nested else config[inner]
            )
    return make(**settings)
