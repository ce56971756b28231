"""What an app of the user's own takes from here; none of it imports torch before it is needed."""

import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from flwr.app import Context, Message

from flrce.devices.energy import EnergyMeter, EnergyReading
from flrce_client.codecs import CODECS
from flrce_client.flower import (
    EncodingMod,
    NextCall,
    get_config,
    introduce,
    restore_model,
    write_lost_reply,
)
from flrce_client.wire import COMPRESSOR_KEY

__all__ = ["compressing", "introduce"]
T = TypeVar("T")
_meter_lock = threading.Lock()


@cache
def _get_meter() -> EnergyMeter:
    return EnergyMeter()


def measure_cost(work: Callable[[], T]) -> tuple[T, EnergyReading]:
    """The work's result and cost; joules only where no other client works on this machine at the
    same time.
    """
    if not _meter_lock.acquire(blocking=False):
        start = time.monotonic()
        return work(), EnergyReading(time.monotonic() - start)
    try:
        return _get_meter().measure(work)
    finally:
        _meter_lock.release()


_encode_with_numpy = EncodingMod(measure=measure_cost)


def compressing(message: Message, context: Context, call_next: NextCall) -> Message:
    """A Flower mod: the app's own training, in any framework, then the reply encoded as its task
    says.
    """
    if message.metadata.message_type != "train" or _has_numpy_code(get_config(message)):
        return _encode_with_numpy(message, context, call_next)
    if not restore_model(message, context):
        return Message(write_lost_reply(get_config(message)), reply_to=message)
    from flrce.flower.client import compress_with_torch

    return compress_with_torch(message, context, call_next)


def _has_numpy_code(config: Mapping[str, Any]) -> bool:
    """Whether the task's compressor, and those within it, have a counterpart in numpy."""
    key = COMPRESSOR_KEY
    while config.get(key, "") in CODECS:
        key += ".inner"
    return key not in config
