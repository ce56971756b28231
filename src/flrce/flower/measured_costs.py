"""What tasks will cost, by what was measured so far: each client's pace, bytes on their way, joules
by profile.
"""

from dataclasses import dataclass, field, replace
from statistics import median

from flwr.app import Message
from torch import Tensor

from flrce.core.downlink import HeldPart, estimate_download_bytes
from flrce.core.energy_basis import MEASURED_FIELD
from flrce.core.payload_bytes import count_bytes, count_download_bytes
from flrce.core.payloads import PER_BYTE, WATTS
from flrce.core.types import ClientCost, Task
from flrce.devices.costs import DeviceProfile
from flrce.flower.arrays import ArrayTemplate, count_record_bytes
from flrce.flower.held_models import count_encoded_bytes
from flrce.training.client import ClientRunner

# times a profile's active watts: no device draws more for as long as a task takes
MAX_POWER_RATIO = 10


@dataclass
class MeasuredCosts:
    """Clients' paces so far."""

    template: ArrayTemplate
    runner: ClientRunner | None = None
    profile: DeviceProfile | None = None  # models the joules of clients that cannot measure theirs
    # client -> seconds of an epoch, of transfer
    pace: dict[str, tuple[float, float]] = field(default_factory=dict)

    def record_durations(self, task: Task, n: int, compute: float, transfer: float) -> None:
        """How long a client with n samples took for its task."""
        if compute >= 0 and transfer >= 0:
            self.pace[task.client] = (compute / (count_epochs(task, n) * task.part.rate), transfer)

    def estimate(self, task: Task, n: int, up: int) -> ClientCost:
        """A task of a client with n samples that answers with `up` bytes; 0 seconds: nobody's pace
        is known.
        """
        compute, transfer = self._estimate_pace(task.client)
        epochs, batches = count_epochs(task, n), -(-n // max(task.work.batch, 1))
        return self.add_joules(
            ClientCost(
                self.count_downlink_bytes(task),
                up,
                batches=round(epochs * batches),
                compute_seconds=compute * epochs * task.part.rate,
                transfer_seconds=transfer,
            )
        )

    def get_sent_coordinates(self, task: Task) -> Tensor | None:
        """The coordinates that a client receives; None: all."""
        if task.part.rate == 1 or self.runner is None:
            return None
        return self.runner.get_part(task).held

    def count_downlink_bytes(self, task: Task) -> int:
        """Bytes of values that a client receives."""
        if task.download is not None:
            return estimate_download_bytes(task, self._get_whole_part()) + count_bytes(task.tensors)
        return count_download_bytes(
            self.template.nbytes, self.get_sent_coordinates(task), task.tensors
        )

    def _get_whole_part(self) -> HeldPart:
        layout = self.template.layout
        return HeldPart(None, tuple(self.template.names), layout.trainable)

    def compute_sending_cost(self, message: Message, task: Task) -> ClientCost:
        """What sending this message cost."""
        encoded = count_encoded_bytes(message.content)
        if encoded is None:
            down = self.count_downlink_bytes(replace(task, download=None))
        else:
            down = encoded + count_bytes(task.tensors)
        arrays = sum(
            count_record_bytes(arrays) for arrays in message.content.array_records.values()
        )
        scalars = sum(len(config.deflate()) for config in message.content.config_records.values())
        return ClientCost(bytes_down=down, framing=max(arrays - down, 0) + scalars)

    def add_joules(self, spent: ClientCost) -> ClientCost:
        """With joules: those that were measured, as far as a device can draw them, or those of the
        profile.
        """
        profile = self.profile
        if spent.measured:
            watts = WATTS if profile is None else MAX_POWER_RATIO * profile.active_watts
            radio = PER_BYTE * (spent.bytes_up + spent.bytes_down)
            joules = min(spent.joules, watts * spent.seconds + radio)
            return replace(spent, joules=joules, other={**spent.other, MEASURED_FIELD: joules})
        return spent if profile is None else profile.add_joules(spent)

    def _estimate_pace(self, client: str) -> tuple[float, float]:
        """As last measured, or else the others' median."""
        if client in self.pace or not self.pace:
            return self.pace.get(client, (0.0, 0.0))
        compute, transfer = zip(*self.pace.values(), strict=True)
        return median(compute), median(transfer)


def count_epochs(task: Task, n: int) -> float:
    """The epochs of a task for a client with n samples, from its steps where it counts those."""
    if not task.work.steps or not n:
        return max(task.work.epochs, 1)
    return task.work.steps / -(-n // max(task.work.batch, 1))
