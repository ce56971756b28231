"""What the server knows of each device: its pace so far, what its tasks cost, the model it holds.

A device that made the initial model itself is sent a difference to it; any other is sent its first
model whole, with the order of its arrays. Later ones may be differences to a model that it holds,
or encoded whole models. It checks each by a hash, and one that cannot decode its download reports
that and is sent a whole model next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from flrce.core.cost_table import MEASURED_FIELD
from flrce.core.downlink import HeldPart, estimate_download_bytes
from flrce.core.payloads import PER_BYTE, WATTS, fingerprint_model
from flrce.core.tensor_bytes import HASH_BYTES, count_bytes, count_download_bytes
from flrce.core.types import ClientCost, Download, PendingTask, Task
from flrce.devices.costs import DeviceProfile
from flrce.errors import BadInput
from flrce.flower.arrays import ArrayTemplate, count_record_bytes, list_records, to_array_record
from flrce.flower.nodes import ConnectedClient
from flrce.flower.wire import write_piece
from flrce.training.client import ClientRunner
from flrce_client.codecs import read_codec
from flrce_client.errors import MalformedPayload
from flrce_client.wire import (
    BASELESS_KEY,
    DIGEST_KEY,
    DOWNLOAD_KEY,
    DOWNLOAD_RECORD,
    LOST_KEY,
    NAMES_KEY,
    TRAINED_KEY,
)

# times a profile's active watts: no device draws more for as long as a task takes
MAX_POWER_RATIO = 10
DEFAULT_ARRAYS_KEY = "arrays"
LOST_BASE_ERROR = (
    "does not hold the model that its download refers to; it is sent a whole model next"
)


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
            count_record_bytes(arrays)
            for arrays in list_records(message.content, ArrayRecord).values()
        )
        configs = list_records(message.content, ConfigRecord)
        scalars = sum(len(config.deflate()) for config in configs.values())
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


@dataclass
class HeldModelTracker:
    """Which nodes know how the model's arrays are concatenated, and which hold the initial one."""

    template: ArrayTemplate
    arrays_key: str = DEFAULT_ARRAYS_KEY  # under which clients look for the model
    initial: str = ""  # hash of the model that training starts from
    prepared: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)  # nodes that lost what they held

    @property
    def exact(self) -> bool:
        """Whether devices can restore the message that was not sent: arrays of other widths than
        float32 are rounded, and a record of another name is the app's own affair.
        """
        floats = {self.template.dtypes[slot.name] for slot in self.template.layout.slots}
        return floats == {"float32"} and self.arrays_key == DEFAULT_ARRAYS_KEY

    def adapt_download(self, task: Task, client: ConnectedClient) -> Task:
        """A task with the download that its client can decode; None: dense."""
        download = task.download
        if download is None or not client.differences or not task.part.is_whole or not self.exact:
            return replace(task, download=None)
        if download.code is not None and not is_device_code(download.code):
            return replace(task, download=None)
        if download.kind == "first" and not (download.code and self.holds_initial(client)):
            return replace(task, download=Download("full", None, HASH_BYTES))
        return task

    def holds_initial(self, client: ConnectedClient) -> bool:
        """Whether a device holds the initial model although it was never sent."""
        return client.initial == self.initial != "" and client.node not in self.lost

    def is_encoded(self, pending: PendingTask, client: ConnectedClient) -> bool:
        """Whether this download travels as a payload: it needs the arrays' order."""
        download = pending.task.download
        if download is None or download.code is None or pending.payload is None:
            return False
        if download.kind == "full":
            return client.node in self.prepared or self.holds_initial(client)
        return True

    def add_download(
        self, content: dict[str, Any], pending: PendingTask, client: ConnectedClient
    ) -> dict[str, Any]:
        """Entries of the config; an encoded model is put into the content in place of arrays."""
        download = pending.task.download
        if download is None:
            return {}
        if not self.is_encoded(pending, client):
            self.prepared.add(client.node)
            names = [slot.name for slot in self.template.layout.slots]
            return {NAMES_KEY: names, TRAINED_KEY: self.template.layout.trainable}
        assert pending.payload is not None
        content[DOWNLOAD_RECORD] = to_array_record(pending.payload.buffers)
        entries = write_piece("compressor", download.code, DOWNLOAD_KEY)
        entries[DIGEST_KEY] = fingerprint_model(pending.w)
        return entries | ({BASELESS_KEY: True} if download.kind == "full" else {})

    def is_lost(self, reply: Message, client: ConnectedClient) -> bool:
        """Whether a device could not decode what it was sent."""
        echo: Mapping[str, Any] = reply.content.config_records.get("reply", {})
        lost = echo.get(LOST_KEY) is True
        if lost:
            self.prepared.discard(client.node)
            self.lost.add(client.node)
        return lost


def is_device_code(code: Any) -> bool:
    """Whether devices can decode a download: they know the codes of flrce_client."""
    try:
        read_codec(write_piece("compressor", code, DOWNLOAD_KEY), DOWNLOAD_KEY)
    except (BadInput, MalformedPayload):
        return False
    return True


def count_encoded_bytes(content: RecordDict) -> int | None:
    """Bytes of an encoded model in a message; None: it brings arrays."""
    if DOWNLOAD_RECORD not in content.array_records:
        return None
    arrays = content.array_records[DOWNLOAD_RECORD]
    return sum(array.numpy().nbytes for array in arrays.values())
