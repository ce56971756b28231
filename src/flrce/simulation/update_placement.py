"""Where a round's updates are summed and compared: on the device that trained them, or on the host.

They stay on the device where nobody needs them elsewhere: no piece keeps whole ones or looks at
them in a way of its own, every reply is a whole dense update of this round's model, and the device
has room for them.
"""

from dataclasses import dataclass
from typing import Literal

from flrce.core.pieces import Recipe
from flrce.core.tensor_bytes import count_value_bytes
from flrce.errors import BadInput

DEVICE_MEMORY_DIVISOR = 4  # of a device's memory, one in so many is for a round's updates
PlacementSetting = Literal["device", "host"] | None


@dataclass(frozen=True)
class UpdatePlacement:
    """Where updates are; `in_table`: the device makes them in one table, wherever it goes."""

    on_device: bool = False  # they stay on the device
    in_table: bool = False
    why: str = ""  # why they do not stay


HOST_PLACEMENT = UpdatePlacement()


def choose_placement(
    recipe: Recipe, d: int, D: int, room: int, alone: bool, wanted: PlacementSetting = None
) -> UpdatePlacement:
    """For d trained floats of D; `room`: bytes of the device's memory; `alone`: no other run in
    this process uses it.

    BadInput where "device" is `wanted` and cannot be.
    """
    # trained models and updates
    size, apart = (count_value_bytes(D * (2 * recipe.P + 4)), explain_partial_replies(recipe, d))
    if not apart and not alone:
        apart = "several runs share the device"
    if not apart and size > room // DEVICE_MEMORY_DIVISOR:
        apart = (
            f"{size / 1e9:.1f} GB for a round's updates are more than a quarter of the device's"
            " memory"
        )
    why = apart or explain_host_only(recipe)
    if wanted == "device" and why:
        raise BadInput(f"engine.updates = 'device': {why}; leave it out, or set 'host'")
    if wanted == "host":
        why = "engine.updates = 'host'"
    return UpdatePlacement(not why, not apart, why)


def explain_partial_replies(recipe: Recipe, d: int) -> str:
    """Why replies may be something else than whole dense updates of this round's model; "" where
    they are these.
    """
    if recipe.pace.buffer_size is not None:
        return "tasks outlive a round"
    if not recipe.downlink.is_dense:
        return "clients start from models that they decoded"
    if not recipe.compressor.is_dense:
        return f"{type(recipe.compressor).__name__} encodes on the host"
    if recipe.partial_pieces:
        return f"{recipe.partial_pieces} lets replies cover some coordinates only"
    if recipe.personal:
        return "some parameters stay with their clients"
    if recipe.chain is not None and recipe.chain.list_extra_sizes(d):
        return "clients send more than their updates"
    return ""


def explain_host_only(recipe: Recipe) -> str:
    """Which piece wants updates on the host; "" where none does."""
    for role, piece in recipe.iter_pieces():
        sees = role in ("aggregator", "server") or piece.observes_rounds
        if sees and not piece.device_agnostic:
            return f"{type(piece).__name__} ({role}) takes them there"
    return ""


def describe_placement(found: UpdatePlacement, P: int, D: int, device: str) -> str:
    """One line about it, with what crosses to the host in a round."""
    bytes_down = count_value_bytes(D * (1 if found.on_device else P))
    if found.on_device:
        return (
            f"updates are summed and compared on {device}: {bytes_down / 1e9:.2f} GB a round to the"
            " host"
        )
    return f"updates come to the host, {bytes_down / 1e9:.2f} GB a round: {found.why}"
