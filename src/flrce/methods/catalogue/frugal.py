"""frugal, the default: what was measured to need the fewest bytes for the accuracy of FedAvg.

The composition is `frugal` below, and nothing else; docs/concepts.md says why each piece is there.
"""

from dataclasses import replace
from typing import Any

from flrce.core.downlink import DENSE_DOWNLOAD
from flrce.core.pieces import NoCompression, Recipe
from flrce.core.roles import Compressor, Downlink, StopRule
from flrce.errors import BadInput, suggest_name
from flrce.methods.aggregation.fleet_clip import FleetClip
from flrce.methods.aggregation.mean import DEFAULT_SAMPLE_CAP_RATIO, WeightedMean
from flrce.methods.aggregation.related_mean import RelatedMean
from flrce.methods.catalogue.standard import fedavg
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.downlink.fitted import FittedDownload
from flrce.methods.selection.turns import RoundRobinSelector
from flrce.methods.server.averages import FLRCE_EMA
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.stopping.no_headway import NoHeadway

DENSE_BITS = 32  # float32 values as they are
QUANTISER_BITS = 8  # between minimum and maximum of each tensor
#: what doubling the rounds must gain, in points
PRICES = {"default": 2.0, "accurate": 1.0}
PRESETS = ("default", "accurate", "wary", "hardened", "private", "headway")
#: bits up, down, of a first download: of any run, and of runs of at most so many rounds
LONG_RUN_BITS = (1, 1, 1)
SHORT_RUN_BITS = ((10, (4, 2, 4)), (20, (2, 2, 4)))
#: models with fewer floats travel as float32: their bytes are few, and a bit for each is too coarse
EXACT_BELOW = 1024
#: whose uploads travel as they are: defences were measured with them, and sums cannot be coded
DENSE_PRESETS = ("wary", "hardened", "private")


def frugal(
    preset: str = "default",
    points: float | None = None,
    bits_up: float | None = None,
    bits_down: float | None = None,
    bits_first: float | None = None,
    rounds: int | None = None,
    P: int = 10,
    **local: Any,
) -> Recipe:
    """The default: one bit for each float in both directions, clients in turn, the averaged model,
    a stop with a price.

    `bits_up` are the bits of an uploaded float, `bits_down` of a downloaded one, `bits_first` those
    of a client's first download: 1 to 4, a share of one bit, 8, or 32 (float32). Unless given they
    are 1, and more in runs of at most 20 `rounds`. `points` is what
    doubling the rounds must gain, or training stops: 2 unless given, 1 with `accurate`. `wary`
    gives clients to whom nobody relates less weight, `hardened` clips updates by what the whole
    fleet sent, `private` needs only sums of uploads (these three upload float32). `headway` stops
    as version 0.1 did.
    """
    if preset not in PRESETS:
        raise BadInput(f"recipe.preset = {preset!r}: {suggest_name(preset, PRESETS)}")
    up, down, first = choose_bits(rounds)
    up = DENSE_BITS if preset in DENSE_PRESETS else up
    up, down, first = (
        usual if wanted is None else wanted
        for wanted, usual in ((bits_up, up), (bits_down, down), (bits_first, first))
    )
    base = replace(
        fedavg(P, **local),
        selector=RoundRobinSelector(by="chance"),
        aggregator=WeightedMean(cap=DEFAULT_SAMPLE_CAP_RATIO),
        compressor=make_code(up, "bits_up"),
        downlink=make_downlink(down, first),
        stop=make_stop(preset, points),
        average=FLRCE_EMA,
        holdouts=preset != "headway",
        name="frugal",
    )
    if preset == "wary":
        return replace(base, aggregator=RelatedMean(cap=DEFAULT_SAMPLE_CAP_RATIO))
    if preset == "hardened":
        return replace(base, aggregator=FleetClip())
    if preset == "private":
        return replace(base, aggregator=WeightedMean(), sums=True)
    return base


def choose_bits(rounds: int | None) -> tuple[float, float, float]:
    """(bits up, down, of a first download) for a run of so many rounds.

    One bit has a noise that later rounds average out; a short run has no later rounds, and few
    bytes to save (docs/compression.md has the measurement).
    """
    if rounds is None:
        return LONG_RUN_BITS
    return next((bits for limit, bits in SHORT_RUN_BITS if rounds <= limit), LONG_RUN_BITS)


def make_code(bits: float, setting: str, contractive: bool = False) -> Compressor:
    """The code of so many bits for each float."""
    if bits == DENSE_BITS:
        return NoCompression()
    if bits == QUANTISER_BITS:
        return Quantizer(QUANTISER_BITS)
    try:
        return RotatedCode(bits, "contractive" if contractive else "unbiased", EXACT_BELOW)
    except BadInput:
        raise BadInput(
            f"recipe.{setting} = {bits!r}: must be 1, 2, 3, 4, {QUANTISER_BITS} or {DENSE_BITS}, or"
            " a share between 0 and 1"
        ) from None


def make_downlink(bits: float, first: float) -> Downlink:
    """Differences in so many bits; below one bit they need the contractive scale."""
    if bits == DENSE_BITS:
        return DENSE_DOWNLOAD
    code = make_code(bits, "bits_down", contractive=bits < 1)
    return FittedDownload(code, make_code(first, "bits_first", contractive=first < 1))


def make_stop(preset: str, points: float | None = None) -> StopRule:
    """The stop rule of a preset, at another price where one is given."""
    if preset == "headway":
        if points is not None:
            raise BadInput(
                f"recipe.points = {points:g} is a price, and preset = 'headway' has none; drop one"
            )
        return NoHeadway()
    return MarginalGain(PRICES.get(preset, PRICES["default"]) if points is None else points)
