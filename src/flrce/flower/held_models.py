"""Downloads to devices that decode them: what is sent encoded, and what a device is told to hold.

A device is sent its first model whole, with the order of its arrays. Later ones may be differences
to a model that it holds, or encoded whole models. It checks each by a hash, and one that cannot
decode its download says so and is sent a whole model next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import Message, RecordDict

from flrce.core.payload_bytes import HASH_BYTES
from flrce.core.payloads import fingerprint_model
from flrce.core.types import Download, PendingTask, Task
from flrce.flower.arrays import ArrayTemplate, to_array_record
from flrce.flower.nodes import ConnectedClient
from flrce.flower.wire import write_piece
from flrce_client.wire import (
    BASELESS_KEY,
    DIGEST_KEY,
    DOWNLOAD_KEY,
    DOWNLOAD_RECORD,
    LOST_KEY,
    NAMES_KEY,
    TRAINED_KEY,
)

DEFAULT_ARRAYS_KEY = "arrays"
LOST_BASE_ERROR = (
    "does not hold the model that its download refers to; it is sent a whole model next"
)


@dataclass
class HeldModelTracker:
    """Which nodes were told how the model's arrays are concatenated."""

    template: ArrayTemplate
    arrays_key: str = DEFAULT_ARRAYS_KEY  # under which clients look for the model
    prepared: set[int] = field(default_factory=set)

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
        if download.kind == "first":  # no seed makes a model of the user's: it is sent whole
            return replace(task, download=Download("full", None, HASH_BYTES))
        return task

    def is_encoded(self, pending: PendingTask, client: ConnectedClient) -> bool:
        """Whether this download travels as a payload: it needs the arrays' order."""
        download = pending.task.download
        if download is None or download.code is None or pending.payload is None:
            return False
        return download.kind == "difference" or client.node in self.prepared

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
        return entries | ({} if download.kind == "difference" else {BASELESS_KEY: True})

    def is_lost(self, reply: Message, client: ConnectedClient) -> bool:
        """Whether a device could not decode what it was sent."""
        echo: Mapping[str, Any] = reply.content.config_records.get("reply", {})
        lost = echo.get(LOST_KEY) is True
        if lost:
            self.prepared.discard(client.node)
        return lost


def count_encoded_bytes(content: RecordDict) -> int | None:
    """Bytes of an encoded model in a message; None: it brings arrays."""
    if DOWNLOAD_RECORD not in content.array_records:
        return None
    arrays = content.array_records[DOWNLOAD_RECORD]
    return sum(array.numpy().nbytes for array in arrays.values())
