"""Many models evaluated at once on one device, each on its own samples."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flrce.models.flat import ModelLayout
from flrce.training.gpu.chain_net import Tensors
from flrce.training.gpu.lanes import Index
from flrce.training.gpu.recording import record_graph
from flrce.training.gpu.verification import LaneNetwork
from flrce.training.objectives import Objective
from flrce.training.precision import Precision, make_autocast_context

MAX_SHAPES = 4  # of which buffers are kept


class EvaluationBuffers:
    """Static buffers of k models and n samples of each; on a GPU the pass over them is recorded
    when it is needed for the second time.
    """

    def __init__(
        self,
        net: LaneNetwork,
        where: ModelLayout,
        shape: tuple[int, int],
        objective: Objective,
        precision: Precision,
    ) -> None:
        self.net, self.where, self.objective, self.precision = net, where, objective, precision
        self.device = net.samples.x.device
        k, n = shape
        self.models: Tensors = {
            slot.name: torch.zeros(k, *slot.shape, device=self.device) for slot in where.slots
        }
        self.index = torch.zeros(k, n, dtype=torch.int32, device=self.device)
        self.count = torch.full((k,), n, dtype=torch.int32, device=self.device)
        self.scores: Tensors = {}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.passes = 0

    def load_models(self, models: Sequence[Tensor]) -> None:
        """Set the k models (d,)."""
        w = torch.stack([model.to(self.device, torch.float32) for model in models])
        for name, view in self.where.view_tensors(w).items():
            self.models[name].copy_(view)

    def score_samples(self, index: Index) -> Tensors:
        """Loss and metrics (k, n, ...) of samples index (k, n); valid until the next call."""
        self.index.copy_(torch.from_numpy(index.astype(np.int32)))
        self.passes += 1
        if self.graph is None and self.passes == 2 and self.device.type == "cuda":
            self.graph = record_graph(self._run, self.device)
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()
        return self.scores

    def _run(self) -> None:
        shape = self.index.shape
        with make_autocast_context(self.device, self.precision):
            logits = self.net.compute_logits(self.models, self.index, self.count, 0, False)
        out, y = logits.flatten(0, 1).float(), self.net.samples.gather_targets(self.index)
        scores = {"loss": self.objective.losses(out, y)}
        scores |= {metric.name: metric.of(out, y) for metric in self.objective.evaluation_metrics}
        self.scores = {name: x.reshape(*shape, *x.shape[1:]) for name, x in scores.items()}


class LaneEvaluator:
    """Evaluates models, in passes of so many samples, over buffers that later calls use again."""

    def __init__(
        self, net: LaneNetwork, where: ModelLayout, objective: Objective, precision: Precision
    ) -> None:
        self.net, self.where, self.objective, self.precision = net, where, objective, precision
        self.buffers: dict[tuple[int, int], EvaluationBuffers] = {}

    @torch.no_grad()
    def evaluate(
        self, models: Sequence[Tensor], index: Index, samples_per_pass: int, lanes: int
    ) -> Tensors:
        """Loss and metrics (S, N, ...) of S models (d,) on samples index (S, N), at most `lanes`
        models at once.
        """
        S, N = index.shape
        n = plan_pass_samples(N, samples_per_pass)
        padded = np.zeros((S, -(-N // n) * n), index.dtype)  # sample 0 fills the last pass
        padded[:, :N] = index
        scores: Tensors = {}
        for first in range(0, S, lanes):
            group = models[first : first + lanes]
            rows = slice(first, first + len(group))
            buffers = self._get_buffers(len(group), n)
            buffers.load_models(group)
            for begin in range(0, N, n):
                found = buffers.score_samples(padded[rows, begin : begin + n])
                for name, score in found.items():
                    if name not in scores:
                        scores[name] = score.new_zeros(S, N, *score.shape[2:])
                    scores[name][rows, begin : begin + n] = score[:, : N - begin]
        return scores

    def _get_buffers(self, k: int, n: int) -> EvaluationBuffers:
        found = self.buffers.pop((k, n), None)
        if found is None:
            while len(self.buffers) >= MAX_SHAPES:
                del self.buffers[next(iter(self.buffers))]
            shape = (k, n)
            found = EvaluationBuffers(self.net, self.where, shape, self.objective, self.precision)
        self.buffers[k, n] = found  # the latest used last
        return found


def plan_pass_samples(N: int, most: int) -> int:
    """Samples of each pass over N: equal parts of at most `most`; where one pass suffices, N
    rounded up by an eighth at most, so that few shapes are recorded.
    """
    if most < N:
        return -(-N // -(-N // most))
    unit = 1 << max(0, N.bit_length() - 4)
    return -(-N // unit) * unit
