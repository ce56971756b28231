"""What an app of the user's own takes from here; none of it imports torch before it is needed."""

from collections.abc import Mapping
from typing import Any

from flwr.app import Context, Message

from flrce.devices.energy import measure_cost
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
