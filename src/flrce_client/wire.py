"""Names of what travels between a server of flrce and its devices, in Flower's records."""

import re
from typing import Any

from flrce_client.errors import MalformedPayload

KEY_PREFIX = "flrce."  # of our keys in a ConfigRecord, beside the user's
SAMPLES_KEY = "num-examples"  # what Flower calls n_k
HELLO_QUERY = "query.flrce"  # a client that knows us answers with its name and number of samples
COMPRESSOR_KEY = KEY_PREFIX + "compressor"  # how an upload is encoded
DOWNLOAD_KEY = KEY_PREFIX + "download"  # how a download is encoded; absent: as arrays
DIGEST_KEY = KEY_PREFIX + "model"  # hash of the model that a download decodes to
NAMES_KEY = KEY_PREFIX + "names"  # of the float arrays, in order; sent with models to be held
TRAINED_KEY = KEY_PREFIX + "trained"  # how many floats are trained
BASELESS_KEY = KEY_PREFIX + "whole"  # the download is of the model itself, not of a difference
LOST_KEY = KEY_PREFIX + "lost"  # in a reply: the device does not hold what a difference refers to
DOWNLOAD_RECORD = "download"  # ArrayRecord of an encoded download
CLIENT_STATE_PREFIX = "flrce-carry-"  # record in Context.state: what a compressor keeps, by round
HELD_MODEL_PREFIX = "flrce-model-"  # record in Context.state: a model that the device holds
CLIENT_NAME_PATTERN = re.compile(r"[\w.:@+-]{1,64}")


def validate_client_name(value: Any) -> str:
    """A client's name for itself, checked."""
    if not isinstance(value, str) or not CLIENT_NAME_PATTERN.fullmatch(value):
        shown = " ".join(str(value).split())[:40]
        raise MalformedPayload(
            f"client name {shown!r}: use 1 to 64 letters, digits and . : @ + - _"
        )
    return value
