"""What tasks cost the clients of a federation by the profiles of their devices: the simulator's
books, and those of a simulated fleet behind Flower.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from flrce.core.downlink import estimate_download_bytes
from flrce.core.forecast import estimate_upload_bytes
from flrce.core.tensor_bytes import (
    EVALUATION_FIGURES_BYTES,
    REPLY_FIGURES_BYTES,
    count_bytes,
    count_download_bytes,
    count_upload_bytes,
    count_value_bytes,
)
from flrce.core.types import ClientCost, PendingTask, Reply, Task
from flrce.data.federation import Federation
from flrce.devices.cost_models import ClientLoad, CostModel, price_loads
from flrce.devices.costs import DeviceProfile, count_step_traffic, inference_flops, training_flops
from flrce.devices.flops import NO_TRAFFIC, StepTraffic
from flrce.models.low_rank import has_low_rank_layers
from flrce.models.part import copy_for_training
from flrce.training.batches import compute_batch_sizes, count_steps
from flrce.training.client import ClientRunner
from flrce.training.trainer import EVALUATION_CHUNK_SAMPLES

EACH_BATCH = (-2,)  # behind a shape's key: FLOPs of a batch, whatever its samples

#: additions of a fast Hadamard transform of 2^14 floats, and a few operations to scale and to pack;
#: other codes need fewer
CODING_FLOPS_PER_FLOAT = 20


@dataclass(eq=False)
class FleetCostModel:
    """Bytes by what travels, joules and seconds by each client's device and the network's FLOPs, or
    by a cost model.
    """

    runner: ClientRunner
    federation: Federation
    fleet: Mapping[str, DeviceProfile]
    model: CostModel | None = None  # has the last word on costs
    now: float = 0.0  # seconds of the run's clock for which costs are estimated
    flops: dict[tuple[float | int, ...], float] = field(default_factory=dict)  # counted once each
    # likewise: operations of a step, bytes that they move whatever the batch, bytes of a sample
    traffic: dict[tuple[float | int, ...], tuple[float, float, float]] = field(default_factory=dict)

    @property
    def model_bytes(self) -> int:
        """Bytes of the model as clients receive it."""
        return count_value_bytes(self.runner.layout.size)

    def includes_client(self, client: str) -> bool:
        """Whether its costs can be modelled."""
        return client in self.fleet

    def estimate(self, task: Task) -> ClientCost:
        """What a task will cost; its reply counts as dense where its compressor does not know what
        it will weigh.
        """
        return self.estimate_round([task])[0]

    def estimate_round(self, tasks: Sequence[Task]) -> list[ClientCost]:
        """The same of tasks that clients do side by side."""
        return self._price([(task.client, self._estimate_by_profile(task)) for task in tasks])

    def _estimate_by_profile(self, task: Task) -> ClientCost:
        names = self.runner.get_part(task).names
        return self.price_task(
            task, estimate_upload_bytes(task, names, self.runner.layout.trainable)
        )

    def book_costs(self, pending: Sequence[PendingTask], replies: Sequence[Reply]) -> list[Reply]:
        """The replies to these tasks, in the same order, with what they cost.

        Under a buffered pace each is priced alone, as it was when it was sent: only then is its
        time back known beforehand.
        """
        pairs = list(zip(pending, replies, strict=True))
        costs = [self._book(one.task, reply) for one, reply in pairs]
        if self.model is not None:
            loads = [
                ClientLoad(reply.client, self.fleet[reply.client], cost, one.sent)
                for (one, reply), cost in zip(pairs, costs, strict=True)
            ]
            alone = any(one.due for one in pending)
            groups = [[load] for load in loads] if alone else [loads]
            costs = [cost for group in groups for cost in price_loads(self.model, group)]
        return [replace(reply, spent=cost) for reply, cost in zip(replies, costs, strict=True)]

    def _book(self, task: Task, reply: Reply) -> ClientCost:
        buffers = reply.payload.buffers if reply.payload else {}
        up = count_upload_bytes(buffers, reply.extras)
        return self.price_task(task, up, reply.steps)

    def _price(self, costs: Sequence[tuple[str, ClientCost]]) -> list[ClientCost]:
        """The costs of clients that work side by side from now on."""
        if self.model is None:
            return [cost for _, cost in costs]
        loads = [ClientLoad(client, self.fleet[client], cost, self.now) for client, cost in costs]
        return price_loads(self.model, loads)

    def estimate_inquiry(self, client: str, down: int) -> ClientCost:
        """What it costs a client to receive `down` bytes and judge w on its training samples."""
        cost = self._price_evaluation(client, self.count_samples(client), down, 0)
        return self._price([(client, cost)])[0]

    def estimate_evaluation(self) -> list[tuple[str, ClientCost]]:
        """What it costs each client that holds samples back to receive and evaluate the model."""
        held = zip(self.federation.clients, self.federation.held, strict=True)
        costs = [
            (client, self._price_evaluation(client, len(samples), self.model_bytes))
            for client, samples in held
            if len(samples)
        ]
        return list(zip([client for client, _ in costs], self._price(costs), strict=True))

    def _price_evaluation(
        self, client: str, n: int, down: int, framing: int = EVALUATION_FIGURES_BYTES
    ) -> ClientCost:
        flops, batches = n * self.inference_flops, -(-n // EVALUATION_CHUNK_SAMPLES)
        traffic = self._count_evaluation_traffic(client, n)
        return self.fleet[client].estimate_cost(down, 0, flops, batches, framing, traffic)

    def price_task(self, task: Task, bytes_up: int, done: int | None = None) -> ClientCost:
        """A task whose reply has so many bytes; `done`: batches, where the client stopped early."""
        n = self.count_samples(task.client)
        epoch = compute_batch_sizes(n, task.work.batch, self.runner.normalised)
        steps = count_steps(task, len(epoch))
        steps = min(done, steps) if type(done) is int and done > 0 else steps
        epochs, rest = divmod(steps, max(len(epoch), 1))
        passes = 1.0 if task.update is None else task.update.passes_per_step
        # an epoch's last batch is smaller than the others
        samples = float(epochs * epoch.sum() + epoch[:rest].sum())
        work = samples * self.count_training_flops(task) + steps * self.count_batch_flops(task)
        traffic = self._count_training_traffic(task, steps * passes, samples * passes)
        flops, framing = work * passes, REPLY_FIGURES_BYTES
        flops += CODING_FLOPS_PER_FLOAT * self.count_coded_floats(task)
        framing += task.download.framing if task.download else 0
        framing += task.compressor.instruction_bytes if task.compressor is not None else 0
        held = self.count_holdout_samples(task)
        if held:  # the model is judged first
            flops += held * self.inference_flops
            steps += -(-held // EVALUATION_CHUNK_SAMPLES)
            framing += EVALUATION_FIGURES_BYTES
            traffic = add_traffic(traffic, self._count_evaluation_traffic(task.client, held))
        looks = task.update.evaluations if task.update is not None and steps else 0
        for _ in range(looks):  # passes over the samples before the first step
            flops += n * self.inference_flops
            steps += -(-n // EVALUATION_CHUNK_SAMPLES)
            traffic = add_traffic(traffic, self._count_evaluation_traffic(task.client, n))
        device, down = self.fleet[task.client], self.count_download_bytes(task)
        return device.estimate_cost(down, bytes_up, flops, steps, framing, traffic)

    def _count_training_traffic(self, task: Task, steps: float, samples: float) -> StepTraffic:
        """Of all steps; none where the device's profile does not go by it."""
        if not self.fleet[task.client].counts_traffic:
            return NO_TRAFFIC
        key, part = self._make_flops_key(task), self.runner.get_part(task)
        looks, tokens = key[-1], self.federation.source.has_token_ids
        if key not in self.traffic:
            net = part.net if looks else copy_for_training(part, self.runner.shape)
            counts = count_step_traffic(net, self.runner.shape, tokens, not looks)
            one, batch, sample = (max(looks, 1) * count for count in counts)
            self.traffic[key] = one, batch, sample
        operations, batch, sample = self.traffic[key]
        return StepTraffic(steps * operations, steps * batch + samples * sample)

    def _count_evaluation_traffic(self, client: str, n: int) -> StepTraffic:
        if not self.fleet[client].counts_traffic:
            return NO_TRAFFIC
        key = (1.0, -1)
        if key not in self.traffic:
            shape, tokens = self.runner.shape, self.federation.source.has_token_ids
            self.traffic[key] = count_step_traffic(self.runner.net, shape, tokens, False)
        operations, batch, sample = self.traffic[key]
        chunks = -(-n // EVALUATION_CHUNK_SAMPLES)
        return StepTraffic(chunks * operations, chunks * batch + n * sample)

    def count_download_bytes(self, task: Task) -> int:
        if task.download is not None:
            model = estimate_download_bytes(task, self.runner.get_held_part(task))
            return model + count_bytes(task.tensors)
        held = self.runner.get_part(task).held
        return count_download_bytes(self.model_bytes, held, task.tensors)

    def count_coded_floats(self, task: Task) -> int:
        """Floats that a client decodes from its download and encodes for its upload."""
        download, compressor = task.download, task.compressor
        coded = download is not None and (download.coded or download.code is not None)
        decoded = self.runner.get_held_part(task).trained if coded else 0
        if compressor is None:
            return decoded
        names = self.runner.get_part(task).names
        return decoded + int(compressor.count_coded_floats(names))

    def count_samples(self, client: str) -> int:
        return len(self.federation.get_client_samples(client, 1))

    def count_holdout_samples(self, task: Task) -> int:
        """Samples on which a client judges the model it is sent: none where it is sent only a
        part.
        """
        if not task.judge or self.runner.get_part(task).held is not None:
            return 0
        return len(self.federation.held[self.federation.client_indices[task.client]])

    @property
    def inference_flops(self) -> float:
        """FLOPs to judge one sample."""
        key = (1.0, -1)
        if key not in self.flops:
            self._count_flops(key, inference_flops, self.runner.net)
        return self.flops[key]

    def count_batch_flops(self, task: Task) -> float:
        """Training FLOPs of a batch, whatever its samples: weights that are made of factors."""
        self.count_training_flops(task)
        return self.flops.get((*self._make_flops_key(task), *EACH_BATCH), 0.0)

    def count_training_flops(self, task: Task) -> float:
        """Training FLOPs of one sample under this task, counted once per shape."""
        key, part = self._make_flops_key(task), self.runner.get_part(task)
        looks = key[-1]
        if key not in self.flops and looks:
            self._count_flops(key, inference_flops, part.net, looks)
        elif key not in self.flops:
            self._count_flops(key, training_flops, copy_for_training(part, self.runner.shape))
        return self.flops[key]

    def _make_flops_key(self, task: Task) -> tuple[float | int, ...]:
        links = task.update.links if task.update else ()
        looks = sum(link.forward_passes for link in links if link.estimates_gradient)
        return (*self.runner.get_part(task).key, looks)

    def _count_flops(
        self,
        key: tuple[float | int, ...],
        count: Callable[..., float],
        net: nn.Module,
        times: float = 1,
    ) -> None:
        """Note `times` the FLOPs of a sample, and of each batch where the net has low-rank layers:
        those of 2 and of 4 samples are a line.
        """
        shape, tokens = self.runner.shape, self.federation.source.has_token_ids
        per_sample = count(net, shape, tokens=tokens)
        if has_low_rank_layers(net):
            of_two, of_four = 2 * count(net, shape, 2, tokens), 4 * count(net, shape, 4, tokens)
            per_sample = (of_four - of_two) / 2
            self.flops[(*key, *EACH_BATCH)] = times * (of_two - 2 * per_sample)
        self.flops[key] = times * per_sample


def add_traffic(one: StepTraffic, other: StepTraffic) -> StepTraffic:
    return StepTraffic(one.operations + other.operations, one.moved_bytes + other.moved_bytes)
