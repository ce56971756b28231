"""FedAvg, and what the field has made of it: server optimisers, drift, personal parts, asynchrony.

recipes.py has FLrce and what its paper compares it with; `CATALOGUE` there names all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from flrce.core.pieces import Recipe, ServerSGD
from flrce.core.types import LocalWork
from flrce.errors import BadInput
from flrce.methods.aggregation.fednova import FedNovaMean
from flrce.methods.aggregation.group_mean import GroupMean
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.aggregation.staleness import FedAsyncMixing, StalenessDiscountedMean
from flrce.methods.client.feddyn import DynamicRegularizer, DynamicTraining
from flrce.methods.client.label_census import LabelReportingTraining
from flrce.methods.client.model_groups import LowestLossGroup
from flrce.methods.client.moon import ContrastiveTerm
from flrce.methods.client.personalization import APFLMixture, DittoModel, FedRepPhases
from flrce.methods.client.sam import SharpnessAwareGradient
from flrce.methods.client.scaffold import ScaffoldTraining
from flrce.methods.client.workload import PlainTraining, ProximalTraining
from flrce.methods.compression.trained_group import TrainedGroup
from flrce.methods.pacing.pace import BufferedPace
from flrce.methods.selection.fedlecc import FedLECC
from flrce.methods.selection.uniform import UniformSelector
from flrce.methods.server import optimizers
from flrce.methods.server.averages import SWA, TailMean
from flrce.methods.server.feddyn import FedDynStep
from flrce.models.flat import HEAD_KEYWORD, NORMS_KEYWORD
from flrce.models.model_groups import GROUP_TENSOR
from flrce.training.optimizers import SGD, Momentum
from flrce.training.update_chain import UpdateChain


def fedavg(
    P: int = 10,
    epochs: int = 5,
    batch: int = 128,
    lr: float = 0.1,
    update: UpdateChain | None = None,
    augment: Sequence[Any] = (),
) -> Recipe:
    """Federated averaging (McMahan et al. 2017): P at random, E epochs, weighted mean.

    Every recipe takes these: clients go along plain gradients at rate lr, or as the chain `update`
    says.
    """
    return Recipe(
        P,
        selector=UniformSelector(),
        trainer=PlainTraining(),
        aggregator=WeightedMean(),
        work=LocalWork(epochs, batch),
        update=update or UpdateChain((SGD(lr),)),
        augment=tuple(augment),
        name="fedavg",
    )


def fedavgm(beta: float = 0.9, rate: float = 1.0, P: int = 10, **local: Any) -> Recipe:
    """FedAvgM (Hsu et al. 2019): the server goes along with momentum."""
    return replace(fedavg(P, **local), server=optimizers.ServerMomentum(beta, rate), name="fedavgm")


def fedadam(
    rate: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    P: int = 10,
    **local: Any,
) -> Recipe:
    """FedAdam (Reddi et al. 2021): the server's step is Adam's, the mean update its gradient."""
    return replace(
        fedavg(P, **local), server=optimizers.ServerAdam(rate, beta1, beta2, tau), name="fedadam"
    )


def fedyogi(
    rate: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    P: int = 10,
    **local: Any,
) -> Recipe:
    """FedYogi (Reddi et al. 2021): as FedAdam, with second moments that forget no faster than
    needed.
    """
    return replace(
        fedavg(P, **local), server=optimizers.ServerYogi(rate, beta1, beta2, tau), name="fedyogi"
    )


def fedadagrad(
    rate: float = 0.01, beta1: float = 0.0, tau: float = 1e-3, P: int = 10, **local: Any
) -> Recipe:
    """FedAdagrad (Reddi et al. 2021): as FedAdam, with second moments that only grow."""
    return replace(
        fedavg(P, **local), server=optimizers.ServerAdagrad(rate, beta1, tau), name="fedadagrad"
    )


def fedexp(eps: float = 1e-3, P: int = 10, **local: Any) -> Recipe:
    """FedExP (Jhunjhunwala et al. 2023): longer server steps where updates disagree; the last two
    models' mean.
    """
    base = replace(fedavg(P, **local), aggregator=WeightedMean(by="equal"))
    return replace(base, server=optimizers.FedExPStep(eps), average=TailMean(2), name="fedexp")


def fedswa(after: int = 0, every: int = 1, P: int = 10, **local: Any) -> Recipe:
    """FedAvg with stochastic weight averaging on the server (Caldarola et al. 2022): every
    `every`-th model's mean.

    Models of the first `after` rounds are left out: three quarters of the run, say.
    """
    return replace(fedavg(P, **local), average=SWA(after, every), name="fedswa")


def fedlecc(
    groups: int = 10, some: int = 5, classes: int = 10, P: int = 10, **local: Any
) -> Recipe:
    """FedLECC (Jimenez-Gutierrez et al. 2026): groups with like labels, those with the largest loss
    first.

    Clients tell their shares of `classes` labels.
    """
    base = replace(fedavg(P, **local), trainer=LabelReportingTraining(classes))
    return replace(base, selector=FedLECC(groups, some, classes), name="fedlecc")


def scaffold(
    option: Literal["I", "II"] = "II", rate: float = 1.0, P: int = 10, **local: Any
) -> Recipe:
    """SCAFFOLD (Karimireddy et al. 2020): gradients corrected by control variates, which travel as
    well.

    Option I spends one more pass over a client's samples on its variate, option II takes it from
    the client's steps.
    """
    base = replace(fedavg(P, **local), aggregator=WeightedMean(by="equal"))
    return replace(base, trainer=ScaffoldTraining(option), server=ServerSGD(rate), name="scaffold")


def feddyn(alpha: float = 0.1, P: int = 10, **local: Any) -> Recipe:
    """FedDyn (Acar et al. 2021): each client's objective bent so that its optimum is everyone's."""
    base = replace(fedavg(P, **local), aggregator=WeightedMean(by="equal"))
    return replace(base, trainer=DynamicTraining(alpha), server=FedDynStep(), name="feddyn")


def feddc(alpha: float = 0.01, P: int = 10, **local: Any) -> Recipe:
    """FedDC (Gao et al. 2022): SCAFFOLD's corrected gradients, and FedDyn's pull against a client's
    drift so far.
    """
    return replace(
        _prepend_link(scaffold(P=P, **local), DynamicRegularizer(alpha), "feddc"),
        server=FedDynStep(),
    )


def fednova(mu: float = 0.0, P: int = 10, **local: Any) -> Recipe:
    """FedNova (Wang et al. 2020): updates divided by their clients' numbers of steps before they
    are averaged.

    With mu, its proximal form: clients are pulled towards w, and how far their steps go is counted
    accordingly.
    """
    base = fedavg(P, **local)
    beta = next((link.beta for link in base.update.links if isinstance(link, Momentum)), 0.0)
    nova = FedNovaMean(beta, base.update.lr * mu)
    return replace(
        base, trainer=ProximalTraining(mu) if mu else base.trainer, aggregator=nova, name="fednova"
    )


def fedbn(P: int = 10, **local: Any) -> Recipe:
    """FedBN (Li et al. 2021): every client keeps its own normalisation layers; the network must
    have some.
    """
    return replace(fedavg(P, **local), personal=(NORMS_KEYWORD,), name="fedbn")


def fedper(heads: Sequence[str] | None = None, P: int = 10, **local: Any) -> Recipe:
    """FedPer (Arivazhagan et al. 2019): every client keeps its own head: the last layer, or what
    patterns name.
    """
    return replace(
        fedavg(P, **local),
        personal=(HEAD_KEYWORD,) if heads is None else tuple(heads),
        name="fedper",
    )


def fedrep(heads: Sequence[str] | None = None, body: int = 1, P: int = 10, **local: Any) -> Recipe:
    """FedRep (Collins et al. 2021): as FedPer, in turns: the head trains first, then the body for
    `body` epochs.
    """
    return _prepend_link(fedper(heads, P, **local), FedRepPhases(body), "fedrep")


def ditto(strength: float = 0.1, P: int = 10, **local: Any) -> Recipe:
    """Ditto (Li et al. 2021): beside the shared model each client trains one of its own, pulled
    towards the shared.
    """
    return _prepend_link(fedavg(P, **local), DittoModel(strength), "ditto")


def apfl(alpha: float = 0.5, adaptive: bool = False, P: int = 10, **local: Any) -> Recipe:
    """APFL (Deng et al. 2020): each client has a model of its own and is judged by alpha of it and
    the shared one.
    """
    return _prepend_link(fedavg(P, **local), APFLMixture(alpha, adaptive), "apfl")


def moon(mu: float = 1.0, temperature: float = 0.5, P: int = 10, **local: Any) -> Recipe:
    """MOON (Li, He & Song 2021): features kept near the server's model's, and away from the
    client's last one's.
    """
    return _prepend_link(fedavg(P, **local), ContrastiveTerm(mu, temperature), "moon")


def fedsam(rho: float = 0.05, P: int = 10, **local: Any) -> Recipe:
    """FedSAM (Qu et al. 2022): clients go along the gradient at the worst point within rho of where
    they are.
    """
    return _prepend_link(fedavg(P, **local), SharpnessAwareGradient(rho), "fedsam")


def ifca(groups: int = 2, P: int = 10, **local: Any) -> Recipe:
    """IFCA (Ghosh et al. 2020): `groups` global models. A client downloads all, trains the one
    with the lowest loss on its samples, and sends that; each is averaged over its clients.
    """
    return replace(
        _prepend_link(fedavg(P, **local), LowestLossGroup(groups), "ifca"),
        personal=(GROUP_TENSOR,),
        compressor=TrainedGroup(groups),
        aggregator=GroupMean(groups),
    )


def _prepend_link(base: Recipe, link: Any, name: str) -> Recipe:
    """The recipe with a link before its clients' update."""
    return replace(base, update=base.update.prepend_link(link), name=name)


def fedbuff(
    size: int = 0, rate: float = 1.0, exponent: float = 0.5, P: int = 10, **local: Any
) -> Recipe:
    """FedBuff (Nguyen et al. 2022): P clients always under way, a step after `size` replies (0:
    half of P).

    A reply that is a rounds old counts 1 / (1 + a)^exponent.
    """
    pace = BufferedPace(size or max(P // 2, 1))
    return replace(
        fedavg(P, **local),
        pace=pace,
        aggregator=StalenessDiscountedMean(exponent),
        server=ServerSGD(rate),
        name="fedbuff",
    )


def fedasync(
    alpha: float = 0.6,
    staleness: Literal["constant", "hinge", "polynomial"] = "polynomial",
    a: float | None = None,
    b: int | None = None,
    mu: float = 0.005,
    decay: float = 1.0,
    after: int | None = None,
    P: int = 10,
    **local: Any,
) -> Recipe:
    """FedAsync (Xie et al. 2019): P clients always under way, every reply mixed in at once, less if
    it is stale.

    a is .5 for polynomial weights and 10 for the hinge unless given, b is 4; from round `after`
    (800) on, `decay` times alpha counts.
    """
    if a is not None and staleness == "constant":
        raise BadInput("recipe.a has no effect with recipe.staleness = 'constant'; drop one")
    if b is not None and staleness != "hinge":
        raise BadInput("recipe.b needs recipe.staleness = 'hinge'; set that, or drop b")
    if after is not None and decay == 1:
        raise BadInput("recipe.after needs recipe.decay below 1; set that, or drop after")
    if a is None:
        a = 10.0 if staleness == "hinge" else 0.5
    mixed = FedAsyncMixing(
        alpha, staleness, a, 4 if b is None else b, decay, 800 if after is None else after
    )
    return replace(
        fedavg(P, **local),
        pace=BufferedPace(1),
        trainer=ProximalTraining(mu),
        aggregator=mixed,
        name="fedasync",
    )


STANDARD_RECIPES: dict[str, Callable[..., Recipe]] = {
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
    "fedexp": fedexp,
    "fedswa": fedswa,
    "fedlecc": fedlecc,
    "scaffold": scaffold,
    "feddyn": feddyn,
    "feddc": feddc,
    "fednova": fednova,
    "fedbn": fedbn,
    "fedper": fedper,
    "fedrep": fedrep,
    "ditto": ditto,
    "apfl": apfl,
    "ifca": ifca,
    "moon": moon,
    "fedsam": fedsam,
    "fedbuff": fedbuff,
    "fedasync": fedasync,
}
