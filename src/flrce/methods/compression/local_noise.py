"""Local differential privacy: a client clips its update and adds noise before anybody sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Gt, Lt
from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import PositiveFloat
from flrce.core.pieces import NoCompression, Recipe
from flrce.core.roles import Compressor
from flrce.core.types import Payload, RoundEvent
from flrce.errors import BadInput
from flrce.methods.compression.wrapping import WrappingCompressor
from flrce.methods.privacy_accounting import account_rounds
from flrce_client.layout import TensorSizes


@dataclass(frozen=True)
class ReleaseCounts:
    """How often each client has sent an update."""

    releases: Tensor = field(metadata={"rows": "trained"})  # (M,)


@dataclass(frozen=True)
class LocalNoise(WrappingCompressor):
    """u shortened to `clip`, plus N(0, (noise clip)^2) in each coordinate, then the inner
    compressor.

    Any two updates of a client differ by at most 2 clip, so one release is a Gaussian mechanism of
    noise multiplier noise / 2, whatever the server does with it. Epsilon is reported for `delta`:
    the largest of any client, and each client's own.

    `source`: "seed" draws noise that follows from the run's seed, for reproducible simulations:
    whoever knows the seed can take it off again. "system" draws from the operating system.
    """

    piece: ClassVar[str] = "local-noise"
    inner: Compressor = field(default=NoCompression(), metadata={"piece": True})
    clip: PositiveFloat = 1.0
    noise: PositiveFloat = 1.0
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    source: Literal["seed", "system"] = "seed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.keeps_state:
            raise BadInput(
                "local-noise: its inner compressor may keep nothing between rounds; use topk,"
                " quantize or rotated"
            )

    def check_fleet(self, recipe: Recipe, M: int, d: int, D: int) -> str:
        if d < D:
            return (
                "local-noise: statistics of BatchNorm would travel without noise; use a network"
                ' without them, or model.personal = "norms"'
            )
        account_rounds(1.0, self.noise / 2, 1, self.delta)  # says what to install
        return ""

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        # far ahead in the stream, so that the inner compressor draws what its decoder draws
        draws = (
            Generator(rng.bit_generator.jumped())  # type: ignore[attr-defined]
            if self.source == "seed"
            else np.random.default_rng()
        )
        wide = u.double()
        wide = wide * min(1.0, self.clip / max(float(wide.norm()), 1e-300))
        noise = torch.from_numpy(draws.standard_normal(len(u))).to(wide.device)
        noisy = (wide + self.noise * self.clip * noise).to(u.dtype)
        return self.inner.encode(noisy, layout, rng, client_state)

    def initial_state(self, M: int, d: int, D: int) -> ReleaseCounts:
        return ReleaseCounts(torch.zeros(M))

    def observe(self, state: ReleaseCounts, event: RoundEvent) -> ReleaseCounts:
        """Whoever was asked may have sent: it counts, whatever became of the reply."""
        releases = state.releases.clone()
        releases[list(event.chosen)] += 1
        return ReleaseCounts(releases)

    def report_figures(self, state: ReleaseCounts, event: RoundEvent) -> Mapping[str, float]:
        return {"local_epsilon": self._account(int(state.releases.max()))}

    def report_client_figures(
        self, state: ReleaseCounts, event: RoundEvent
    ) -> Mapping[str, Mapping[int, float]]:
        rows = event.updates.k.tolist()
        return {"local_epsilon": {k: self._account(int(state.releases[k])) for k in rows}}

    def _account(self, releases: int) -> float:
        return account_rounds(1.0, self.noise / 2, releases, self.delta)
