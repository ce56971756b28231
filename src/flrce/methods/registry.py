"""Every piece by role and short name, as experiment files and messages between machines write
them.
"""

from collections.abc import Callable
from typing import Any

from flrce.core.downlink import DenseDownload
from flrce.core.pieces import (
    FullModel,
    LastModel,
    NeverStop,
    NoCompression,
    ServerSGD,
    SynchronousPace,
)
from flrce.data import trouble
from flrce.devices import availability
from flrce.devices.battery import PhoneBattery
from flrce.devices.cost_models import CostTable
from flrce.devices.traces import TraceAvailability
from flrce.methods.aggregation.defences import (
    Bucketing,
    CentredClip,
    GeometricMedian,
    NearestNeighbourMixing,
)
from flrce.methods.aggregation.fednova import FedNovaMean
from flrce.methods.aggregation.fleet_clip import FleetClip
from flrce.methods.aggregation.group_mean import GroupMean
from flrce.methods.aggregation.lora_products import LoRAProductMean
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.aggregation.private_mean import PrivateMean
from flrce.methods.aggregation.related_mean import RelatedMean
from flrce.methods.aggregation.robust import ClippedMean, CoordinateMedian, Krum, TrimmedMean
from flrce.methods.aggregation.root_trust import FLTrust
from flrce.methods.aggregation.staleness import FedAsyncMixing, StalenessDiscountedMean
from flrce.methods.client.combined import CombinedTraining
from flrce.methods.client.fedcom import CorrectedTraining, GradientCorrection
from flrce.methods.client.feddyn import DynamicRegularizer, DynamicTraining
from flrce.methods.client.fedkseed import FiniteDifferences, ZerothOrderTraining
from flrce.methods.client.label_census import LabelCensus, LabelReportingTraining
from flrce.methods.client.model_groups import GivenGroup, LowestLossGroup
from flrce.methods.client.moon import ContrastiveTerm
from flrce.methods.client.ordered_freezing import OrderedFreezing
from flrce.methods.client.personalization import APFLMixture, DittoModel, FedRepPhases
from flrce.methods.client.progress_epochs import ProgressEpochs
from flrce.methods.client.pyramidfl import FewerEpochs, PyramidTraining
from flrce.methods.client.sam import SharpnessAwareGradient
from flrce.methods.client.scaffold import ControlVariate, ScaffoldTraining
from flrce.methods.client.workload import (
    DeadlineTraining,
    FrozenBlocksTraining,
    PlainTraining,
    ProximalTraining,
)
from flrce.methods.compression.entropy import EntropyCoded
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.growing_bits import GrowingBits
from flrce.methods.compression.local_noise import LocalNoise
from flrce.methods.compression.nonzero import NonzeroCoordinates
from flrce.methods.compression.qsgd import FixedPointCode
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.compression.skipped_layers import SkippedLayers
from flrce.methods.compression.sparsify import RandomK, TopK
from flrce.methods.compression.tensors import TensorDropout
from flrce.methods.compression.ternary import SparseTernary
from flrce.methods.compression.trained_group import TrainedGroup
from flrce.methods.downlink.chain import ChainedDownload
from flrce.methods.downlink.difference import DifferenceDownload
from flrce.methods.downlink.fitted import FittedDownload
from flrce.methods.downlink.given_group import GivenGroupDownload
from flrce.methods.downlink.quantised import QuantisedDownload
from flrce.methods.pacing import pace
from flrce.methods.pacing.clean_hours import CleanHours
from flrce.methods.pacing.pace import BufferedPace, OverCommitment
from flrce.methods.selection.cleanest import LowCarbonSelector
from flrce.methods.selection.clustered import ClusteredSampling
from flrce.methods.selection.diverse import DivFL
from flrce.methods.selection.fedlecc import FedLECC
from flrce.methods.selection.poisson import PoissonSelector
from flrce.methods.selection.power_of_choice import PowerOfChoice
from flrce.methods.selection.relationship import RelationshipSelector
from flrce.methods.selection.rooted import RootClientSampling
from flrce.methods.selection.tiers import AdaptiveTierSelector, TierSelector
from flrce.methods.selection.turns import RoundRobinSelector
from flrce.methods.selection.uniform import UniformSelector
from flrce.methods.selection.utility import UtilitySelector
from flrce.methods.server import optimizers as servers
from flrce.methods.server.averages import EMA, SWA, GrowingTailMean, TailMean
from flrce.methods.server.feddyn import FedDynStep
from flrce.methods.server.recycled import RecycledUpdate
from flrce.methods.stopping.budget import AnyOf, CostBudget, Patience
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.stopping.no_headway import NoHeadway
from flrce.methods.stopping.privacy_budget import PrivacyBudget
from flrce.methods.stopping.target import TargetMetric
from flrce.methods.submodel.units import PrefixUnits, RandomUnits
from flrce.training.augment import TRANSFORMS
from flrce.training.optimizers import (
    SGD,
    Adam,
    GradientClip,
    GradientShift,
    Momentum,
    PersistentLink,
    ProximalTerm,
    WeightDecay,
)
from flrce.training.schedules import ConstantRate, CosineDecay, RoundDecay, StepDecay, WarmUp

PIECES: dict[str, dict[str, Callable[..., Any]]] = {
    "selector": {
        "uniform": UniformSelector,
        "relationship": RelationshipSelector,
        "lecc": FedLECC,
        "in-turn": RoundRobinSelector,
        "utility": UtilitySelector,
        "power-of-choice": PowerOfChoice,
        "clustered": ClusteredSampling,
        "tiers": TierSelector,
        "adaptive-tiers": AdaptiveTierSelector,
        "rooted": RootClientSampling,
        "cleanest": LowCarbonSelector,
        "divfl": DivFL,
        "poisson": PoissonSelector,
    },
    "trainer": {
        "alike": PlainTraining,
        "sgd": PlainTraining,  # its name in files of version 0.1
        "fill-the-round": PyramidTraining,
        "fewer-epochs": FewerEpochs,
        "proximal": ProximalTraining,
        "freeze": FrozenBlocksTraining,
        "deadline": DeadlineTraining,
        "counting": LabelReportingTraining,
        "corrected": CorrectedTraining,
        "scaffold": ScaffoldTraining,
        "dynamic": DynamicTraining,
        "probing": ZerothOrderTraining,
        "combined": CombinedTraining,
        "ordered-freezing": OrderedFreezing,
        "progress": ProgressEpochs,
    },
    "submodel": {"full": FullModel, "random-units": RandomUnits, "prefix-units": PrefixUnits},
    "compressor": {
        "dense": NoCompression,
        "topk": TopK,
        "randomk": RandomK,
        "quantize": Quantizer,
        "rotated": RotatedCode,
        "ternary": SparseTernary,
        "drop-tensors": TensorDropout,
        "error-feedback": ErrorFeedback,
        "entropy": EntropyCoded,
        "nonzero": NonzeroCoordinates,
        "fixed-point": FixedPointCode,
        "growing-bits": GrowingBits,
        "skip-layers": SkippedLayers,
        "local-noise": LocalNoise,
        "trained-group": TrainedGroup,
    },
    "downlink": {
        "dense": DenseDownload,
        "quantised": QuantisedDownload,
        "difference": DifferenceDownload,
        "chain": ChainedDownload,
        "fitted": FittedDownload,
        "given-group": GivenGroupDownload,
    },
    "aggregator": {
        "mean": WeightedMean,
        "trimmed": TrimmedMean,
        "median": CoordinateMedian,
        "krum": Krum,
        "clipped": ClippedMean,
        "geometric-median": GeometricMedian,
        "centred-clip": CentredClip,
        "fleet-clip": FleetClip,
        "normalised": FedNovaMean,
        "discounted": StalenessDiscountedMean,
        "interpolated": FedAsyncMixing,
        "mixed": NearestNeighbourMixing,
        "bucketed": Bucketing,
        "root-trust": FLTrust,
        "products": LoRAProductMean,
        "related": RelatedMean,
        "private-mean": PrivateMean,
        "group-mean": GroupMean,
    },
    "server": {
        "step": ServerSGD,
        "momentum": servers.ServerMomentum,
        "adam": servers.ServerAdam,
        "yogi": servers.ServerYogi,
        "adagrad": servers.ServerAdagrad,
        "exp": servers.FedExPStep,
        "dynamic": FedDynStep,
        "recycled": RecycledUpdate,
    },
    "pace": {
        "synchronous": SynchronousPace,
        "fastest": OverCommitment,
        "deadline": pace.ReplyDeadline,
        "buffered": BufferedPace,
        "clean-hours": CleanHours,
    },
    "stop": {
        "any": AnyOf,
        "never": NeverStop,
        "conflicts": UpdateConflicts,
        "budget": CostBudget,
        "patience": Patience,
        "standstill": NoHeadway,
        "marginal-gain": MarginalGain,
        "worth": MarginalGain,  # its name in version 0.1
        "target": TargetMetric,
        "privacy-budget": PrivacyBudget,
    },
    "link": {
        "sgd": SGD,
        "adam": Adam,
        "momentum": Momentum,
        "weight-decay": WeightDecay,
        "clip": GradientClip,
        "prox": ProximalTerm,
        "drift": GradientShift,
        "correction": GradientCorrection,
        "census": LabelCensus,
        "carried": PersistentLink,
        "variate": ControlVariate,
        "dual": DynamicRegularizer,
        "contrast": ContrastiveTerm,
        "phases": FedRepPhases,
        "second": DittoModel,
        "mixture": APFLMixture,
        "sharpness": SharpnessAwareGradient,
        "differences": FiniteDifferences,
        "lowest-loss-group": LowestLossGroup,
        "given-group": GivenGroup,
    },
    "schedule": {
        "constant": ConstantRate,
        "step": StepDecay,
        "round-decay": RoundDecay,
        "cosine": CosineDecay,
        "warm-up": WarmUp,
    },
    "augment": TRANSFORMS,
    "trouble": trouble.TROUBLE_KINDS,
    "availability": {
        "always": availability.AlwaysAvailable,
        "chance": availability.BernoulliAvailability,
        "diurnal": availability.DiurnalAvailability,
        "churn": availability.ChurnAvailability,
        "trace": TraceAvailability,
        "by-chance": availability.RandomRoundAvailability,
        "daily": availability.DailyRoundAvailability,
    },
    "average": {
        "last": LastModel,
        "ema": EMA,
        "tail": TailMean,
        "growing-tail": GrowingTailMean,
        "swa": SWA,
    },
    "battery": {"phone": PhoneBattery},
    "costs": {"table": CostTable},
}
