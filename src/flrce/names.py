"""Every piece by role and short name, as experiment files and messages between machines write them."""

from collections.abc import Callable
from typing import Any

from flrce.aggregators.defences import Bucketed, CentredClip, GeometricMedian, Mixed
from flrce.aggregators.fleet import FleetClip
from flrce.aggregators.mean import WeightedMean
from flrce.aggregators.normalised import Normalised
from flrce.aggregators.products import Products
from flrce.aggregators.related import RelatedMean
from flrce.aggregators.robust import ClippedMean, Krum, Median, TrimmedMean
from flrce.aggregators.rooted import RootTrust
from flrce.aggregators.stale import Discounted, Interpolated
from flrce.compressors.feedback import ErrorFeedback
from flrce.compressors.nonzero import Nonzero
from flrce.compressors.quantize import Quantize
from flrce.compressors.sparsify import RandomK, TopK
from flrce.compressors.tensors import DropTensors
from flrce.data import trouble
from flrce.fleet import availability, presence
from flrce.fleet.battery import Phone
from flrce.fleet.traces import Trace
from flrce.local.augment import TRANSFORMS
from flrce.local.census import Census, Counting
from flrce.local.contrast import Contrast
from flrce.local.correction import Corrected
from flrce.local.drift import Correction
from flrce.local.dynamic import Dual, Dynamic
from flrce.local.optimisers import SGD, Adam, Carried, Clip, Drift, Momentum, Prox, WeightDecay
from flrce.local.personal import Mixture, Phases, Second
from flrce.local.probing import Differences, Probing
from flrce.local.pyramid import FewerEpochs, FillTheRound
from flrce.local.scaffold import Controlled, Variate
from flrce.local.schedules import Constant, Cosine, RoundDecay, StepDecay, WarmUp
from flrce.local.sharpness import Sharpness
from flrce.local.workload import Alike, Deadline, Freeze, Proximal
from flrce.pieces import Dense, Full, Last, Never, Step, Synchronous
from flrce.round import pace
from flrce.round.clean import CleanHours
from flrce.round.pace import Buffered, Fastest
from flrce.selectors.budgeted import Budgeted
from flrce.selectors.choice import PowerOfChoice
from flrce.selectors.clean import Cleanest
from flrce.selectors.clustered import Clustered
from flrce.selectors.diverse import DivFL
from flrce.selectors.lecc import Lecc
from flrce.selectors.relationship import ByRelationship
from flrce.selectors.rewarded import Rewarded
from flrce.selectors.rooted import Rooted
from flrce.selectors.tiers import AdaptiveTiers, Tiers
from flrce.selectors.turns import InTurn
from flrce.selectors.uniform import Uniform
from flrce.selectors.utility import ByUtility
from flrce.servers import steps as servers
from flrce.servers.averages import EMA, SWA, GrowingTail, TailMean
from flrce.servers.dynamic import DynamicStep
from flrce.stops.budget import Budget, Patience
from flrce.stops.conflict import Conflicts
from flrce.stops.growth import Growth
from flrce.stops.standstill import Standstill
from flrce.stops.target import Target
from flrce.stops.worth import Worth
from flrce.submodels.units import PrefixUnits, RandomUnits

PIECES: dict[str, dict[str, Callable[..., Any]]] = {
    "selector": {
        "uniform": Uniform,
        "relationship": ByRelationship,
        "lecc": Lecc,
        "in-turn": InTurn,
        "utility": ByUtility,
        "power-of-choice": PowerOfChoice,
        "clustered": Clustered,
        "tiers": Tiers,
        "adaptive-tiers": AdaptiveTiers,
        "rooted": Rooted,
        "cleanest": Cleanest,
        "budgeted": Budgeted,
        "rewarded": Rewarded,
        "divfl": DivFL,
    },
    "trainer": {
        "alike": Alike,
        "sgd": Alike,  # its name in files of version 0.1
        "fill-the-round": FillTheRound,
        "fewer-epochs": FewerEpochs,
        "proximal": Proximal,
        "freeze": Freeze,
        "deadline": Deadline,
        "counting": Counting,
        "corrected": Corrected,
        "scaffold": Controlled,
        "dynamic": Dynamic,
        "probing": Probing,
        "rewarded": Rewarded,
    },
    "submodel": {"full": Full, "random-units": RandomUnits, "prefix-units": PrefixUnits},
    "compressor": {
        "dense": Dense,
        "topk": TopK,
        "randomk": RandomK,
        "quantize": Quantize,
        "drop-tensors": DropTensors,
        "error-feedback": ErrorFeedback,
        "nonzero": Nonzero,
    },
    "aggregator": {
        "mean": WeightedMean,
        "trimmed": TrimmedMean,
        "median": Median,
        "krum": Krum,
        "clipped": ClippedMean,
        "geometric-median": GeometricMedian,
        "centred-clip": CentredClip,
        "fleet-clip": FleetClip,
        "normalised": Normalised,
        "discounted": Discounted,
        "interpolated": Interpolated,
        "mixed": Mixed,
        "bucketed": Bucketed,
        "root-trust": RootTrust,
        "products": Products,
        "related": RelatedMean,
    },
    "server": {
        "step": Step,
        "momentum": servers.Momentum,
        "adam": servers.Adam,
        "yogi": servers.Yogi,
        "adagrad": servers.Adagrad,
        "exp": servers.ExP,
        "dynamic": DynamicStep,
    },
    "pace": {
        "synchronous": Synchronous,
        "fastest": Fastest,
        "deadline": pace.Deadline,
        "buffered": Buffered,
        "clean-hours": CleanHours,
    },
    "stop": {
        "never": Never,
        "conflicts": Conflicts,
        "budget": Budget,
        "growth": Growth,
        "patience": Patience,
        "standstill": Standstill,
        "worth": Worth,
        "target": Target,
    },
    "link": {
        "sgd": SGD,
        "adam": Adam,
        "momentum": Momentum,
        "weight-decay": WeightDecay,
        "clip": Clip,
        "prox": Prox,
        "drift": Drift,
        "correction": Correction,
        "census": Census,
        "carried": Carried,
        "variate": Variate,
        "dual": Dual,
        "contrast": Contrast,
        "phases": Phases,
        "second": Second,
        "mixture": Mixture,
        "sharpness": Sharpness,
        "differences": Differences,
    },
    "schedule": {
        "constant": Constant,
        "step": StepDecay,
        "round-decay": RoundDecay,
        "cosine": Cosine,
        "warm-up": WarmUp,
    },
    "augment": TRANSFORMS,
    "availability": availability.MODELS,
    "trouble": trouble.KINDS,
    "presence": {
        "always": presence.Always,
        "chance": presence.Chance,
        "diurnal": presence.Diurnal,
        "churn": presence.Churn,
        "trace": Trace,
    },
    "average": {"last": Last, "ema": EMA, "tail": TailMean, "growing-tail": GrowingTail, "swa": SWA},
    "battery": {"phone": Phone},
}
