"""Convert records to JSON lines of the ledger and back."""

import base64
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch

from flrce.core.record import FLAT_FIELDS, flatten_record
from flrce.core.state_values import RelationshipMap
from flrce.core.types import ClientRecord, Round, RoundRecord

# For at most this many clients, the ledger has the rows of Omega by round (the report's slider).
MAX_MAPPED_CLIENTS = 300


def to_jsonl(rows: Iterable[Any]) -> bytes:
    return b"".join(
        json.dumps(replace_non_finite(row), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        for row in rows
    )


def replace_non_finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_non_finite(item) for key, item in value.items()}
    return (
        [replace_non_finite(item) for item in value] if isinstance(value, list | tuple) else value
    )


def to_round_line(record: RoundRecord) -> dict[str, Any]:
    """The ledger line of a round."""
    return _drop_empty_tables(flatten_record(record))


def to_client_line(client: ClientRecord) -> dict[str, Any]:
    """The ledger line of a client in a round; costs are flat."""
    line = read_fields(client)
    return _drop_empty_tables(line | read_fields(line.pop("spent")))


def read_fields(value: Any) -> dict[str, Any]:
    """A dataclass's fields by name; unlike `asdict`, without copies of what is in them."""
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _drop_empty_tables(line: dict[str, Any]) -> dict[str, Any]:
    """The line without empty tables of costs and figures."""
    return {key: x for key, x in line.items() if x or key not in ("other", "figures")}


def parse_record(row: Mapping[str, Any]) -> RoundRecord:
    """The record of a ledger line. null stands for a number that JSON does not have."""
    values: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in row.items() if key in FLAT_FIELDS
    }
    return RoundRecord(
        **{key: v for key, v in values.items() if v is not None or FLAT_FIELDS[key].default is None}
    )


def to_relation_line(done: Round) -> dict[str, Any]:
    """The changed rows k of the relationship map: H[k], and Omega[k] as int8 in base64."""
    state, k = done.state.server_state.get("selector"), list(done.changed_rows)
    if not k or not isinstance(state, RelationshipMap) or state.H is None:
        return {}
    line: dict[str, Any] = {"t": done.record.t, "k": k, "H": state.H[k].tolist()}
    if state.Omega is not None and len(state.Omega) <= MAX_MAPPED_CLIENTS:
        rows = (state.Omega[k] * 127).round().to(torch.int8)  # (P, M)
        line["Omega"] = base64.b64encode(rows.numpy().tobytes()).decode()
    return line
