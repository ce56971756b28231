"""DP-FedAvg: a mean of clipped updates with Gaussian noise, and what its rounds cost in privacy.

McMahan et al. 2018 (fixed clipping), Andrew et al. 2021 (the clipping length follows a quantile of
the updates' lengths). docs/privacy.md says what is protected, and what is not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from flrce.core.bounds import NonNegativeFloat, PositiveFloat
from flrce.core.pieces import Recipe
from flrce.core.roles import Aggregator
from flrce.core.types import RoundEvent, Updates
from flrce.methods.privacy_accounting import ORDERS, compute_epsilon, compute_round_rdp

COUNT_NOISE_SHARE = 1 / 20  # of the expected replies: noise of the count of short updates


@dataclass(frozen=True)
class PrivateMeanState:
    """The clipping length of the next round, and the privacy that is spent."""

    clip: float
    rdp: Tensor  # (orders,) float64 Renyi divergence of all rounds so far


@dataclass(frozen=True)
class PrivateMean(Aggregator):
    """w + (sum of updates, each shortened to `clip`, + N(0, (noise clip)^2)) / expected replies.

    Every reply counts alike: how many samples a client has is its secret too. With the selector
    `poisson` the expected replies are P, whoever came; a round without replies adds noise alone.
    With any other selector the mean is over the replies, and rounds are accounted without
    amplification by sampling.

    `quantile`: the clipping length follows this quantile of the updates' lengths, by the factor
    exp(-clip_rate (share of updates within it - quantile)) a round. The share is made private with
    noise of its own, and the updates get so much more noise that both cost what `noise` says.
    `noise` 0 clips only and promises nothing. Epsilon is reported for `delta`.
    """

    piece: ClassVar[str] = "private-mean"
    noise: NonNegativeFloat = 1.0
    clip: PositiveFloat = 1.0
    quantile: Annotated[float, Gt(0), Lt(1)] | None = None
    clip_rate: PositiveFloat = 0.2
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    accepts_empty_rounds: ClassVar[bool] = True

    def check_recipe(self, recipe: Recipe) -> str:
        pieces = (recipe.selector, recipe.trainer, recipe.submodel, recipe.server)
        leaking = next((type(piece).__name__ for piece in pieces if piece.reads_clients), "")
        if leaking:
            return (
                f"PrivateMean: its noise does not cover what {leaking} learns from single clients;"
                " use selector poisson, uniform or in-turn by chance, a trainer without state and"
                " server step, momentum, adam, yogi or adagrad"
            )
        if recipe.sums:
            return "PrivateMean clips single updates, and sums = true leaves none; drop one"
        P, pace = recipe.P, recipe.pace
        if (
            pace.buffer_size is not None
            or pace.max_replies(P) is not None
            or pace.cohort_size(P, 0) != P
        ):
            return (
                f"PrivateMean: with {type(pace).__name__} it depends on other clients whether a"
                ' reply counts; use pace = "synchronous" or "deadline"'
            )
        return ""

    def check_fleet(self, recipe: Recipe, M: int, d: int, D: int) -> str:
        if d < D:
            return (
                "PrivateMean: statistics of BatchNorm cannot be clipped with the updates; use a"
                ' network without them, or model.personal = "norms"'
            )
        if self.noise:
            compute_round_rdp(1.0, self.noise)  # says what to install where opacus is missing
        return ""

    def initial_state(self, M: int, d: int, D: int) -> PrivateMeanState:
        return PrivateMeanState(self.clip, torch.zeros(len(ORDERS), dtype=torch.float64))

    def __call__(self, w: Tensor, updates: Updates, state: PrivateMeanState) -> Tensor:
        expected = count_expected_replies(updates)
        if not expected:
            return w  # nobody could be asked, which everybody knows
        total = torch.zeros(len(w), dtype=torch.float64)
        for row in updates.U:  # in the order of clients, so no arrival order shows
            wide = row.double()
            total.add_(wide, alpha=min(1.0, state.clip / max(float(wide.norm()), 1e-300)))
        deviation = self.compute_update_noise(expected) * state.clip
        if deviation:
            noise = updates.make_rng("private-mean").standard_normal(len(w))
            total.add_(torch.from_numpy(noise), alpha=deviation)
        return (w.double() + total / expected).to(w.dtype)

    def observe(self, state: PrivateMeanState, event: RoundEvent) -> PrivateMeanState:
        expected = count_expected_replies(event.updates)
        if not expected:
            return state
        rdp = state.rdp
        if self.noise:
            rate = get_accounted_rate(event.updates)
            rdp = rdp + torch.tensor(compute_round_rdp(rate, self.noise), dtype=torch.float64)
        return PrivateMeanState(self._adapt_clip(state.clip, event, expected), rdp)

    def _adapt_clip(self, clip: float, event: RoundEvent, expected: float) -> float:
        """The next clipping length; the count of short updates is centred, so it has sensitivity
        1/2.
        """
        if self.quantile is None:
            return clip
        lengths = torch.linalg.vector_norm(event.updates.U.double(), dim=1)
        count = float(((lengths <= clip).double() - 0.5).sum())
        noise = float(event.make_rng("private-mean/count").standard_normal())
        share = 0.5 + (count + self.compute_count_noise(expected) * noise) / expected
        return clip * math.exp(-self.clip_rate * (share - self.quantile))

    def compute_count_noise(self, expected: float) -> float:
        """Standard deviation of the noise on the count: at least `noise`, so that small rounds can
        pay for it.
        """
        return max(COUNT_NOISE_SHARE * expected, self.noise) if self.noise else 0.0

    def compute_update_noise(self, expected: float) -> float:
        """Noise multiplier of the updates, so that they and the count together cost what `noise`
        says (Andrew et al. 2021, theorem 1).
        """
        if self.quantile is None or not self.noise:
            return self.noise
        spent = 1 / (2 * self.compute_count_noise(expected)) ** 2
        return float((self.noise**-2 - spent) ** -0.5)

    def report_figures(self, state: PrivateMeanState, event: RoundEvent) -> Mapping[str, float]:
        """The clipping length of the next round; epsilon so far, and after one more such round."""
        figures = {"clip": state.clip}
        if not self.noise:
            return figures
        rate = get_accounted_rate(event.updates)
        rdp = state.rdp + torch.tensor(compute_round_rdp(rate, self.noise), dtype=torch.float64)
        return {
            "epsilon": compute_epsilon(state.rdp.tolist(), self.delta),
            "epsilon_next": compute_epsilon(rdp.tolist(), self.delta),
            **figures,
        }


def get_accounted_rate(updates: Updates) -> float:
    """The chance with which each client was drawn on its own; 1 where the selector has none: no
    amplification.
    """
    return 1.0 if updates.sampling_rate is None else updates.sampling_rate


def count_expected_replies(updates: Updates) -> float:
    """By how much a sum is divided: it must not tell who took part."""
    if updates.sampling_rate is None:
        return float(len(updates))
    return updates.sampling_rate * updates.clients
