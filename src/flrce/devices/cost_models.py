"""Costs beyond one profile per device: by hour, shared cells, energy of the network."""

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flrce.core.bounds import NonEmptyText
from flrce.core.cost_table import NETWORK_FIELD, add_cost_row, reconcile_basis
from flrce.core.payloads import is_plausible_cost
from flrce.core.types import ClientCost
from flrce.devices.costs import FIGURES, DeviceProfile, read_csv_rows
from flrce.errors import BadInput, format_one_line

SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24


@dataclass(frozen=True)
class ClientLoad:
    """One client's part of a round, to be priced."""

    client: str
    device: DeviceProfile
    cost: ClientCost  # bytes, FLOPs and batches; seconds and joules by the device's profile
    start: float = 0.0  # seconds of the run's clock at which the client begins

    @property
    def hour(self) -> int:
        """0 to 23: the hour of the day in which the client begins; a run begins at midnight."""
        return int(self.start // SECONDS_PER_HOUR) % HOURS_PER_DAY

    def price_on(self, device: DeviceProfile) -> ClientCost:
        """The same work on another device."""
        c, traffic = self.cost, self.device.infer_traffic(self.cost)
        return device.estimate_cost(
            c.bytes_down, c.bytes_up, c.flops, c.batches, c.framing, traffic
        )


class CostModel(ABC):
    """What clients' work costs. A frozen dataclass: its fields are settings of `fleet.costs`."""

    @abstractmethod
    def price(self, loads: Sequence[ClientLoad]) -> Sequence[ClientCost]:
        """The cost of each load, in their order; change `load.cost` with `dataclasses.replace`.

        Loads of one call begin in one round and are done side by side. Amounts beside bytes,
        seconds and joules go into `ClientCost.other` by name. The result must follow from the
        loads alone.
        """


def price_loads(model: CostModel, loads: Sequence[ClientLoad]) -> list[ClientCost]:
    """The loads' costs by the model."""
    if not loads:
        return []
    name, priced = type(model).__name__, list(model.price(loads))
    if len(priced) != len(loads):
        raise BadInput(f"{name}.price gave {len(priced)} costs for {len(loads)} loads; give each")
    for load, cost in zip(loads, priced, strict=True):
        if not is_plausible_cost(cost):
            raise BadInput(
                f"{name}.price gave {format_one_line(cost, 120)} for client {load.client}; return a"
                " ClientCost of finite numbers, 0 or more"
            )
        for other in cost.other:
            if not add_cost_row(other):
                raise BadInput(
                    f"{name}.price: cost {other!r:.60} is no free name of a-z, 0-9 and _; choose"
                    " another"
                )
    return [reconcile_basis(cost, load.cost) for load, cost in zip(loads, priced, strict=True)]


@dataclass(frozen=True)
class TableRow:
    """One line of a cost table: which clients, which hours, what differs."""

    client: str  # name or pattern
    hours: frozenset[int]
    values: Mapping[str, float]


@dataclass(frozen=True)
class CostTable(CostModel):
    """Costs from a csv file: client, hour, and figures in place of those of the profiles.

    `client` is a name or a pattern, `hour` is empty (always), one hour of the day or a range such
    as 22-5. Of the lines that fit, later ones win figure by figure; an empty cell changes nothing.
    The column network_joules has joules per byte that the network spends; they are a cost of their
    own.
    """

    path: NonEmptyText
    rows: tuple[TableRow, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", read_cost_table(self.path))

    def price(self, loads: Sequence[ClientLoad]) -> list[ClientCost]:
        return [self._price_load(load) for load in loads]

    def _price_load(self, load: ClientLoad) -> ClientCost:
        values: dict[str, Any] = _merge_rows(self.rows, load.client, load.hour)
        per_byte = values.pop(NETWORK_FIELD, 0.0)
        cost = load.price_on(replace(load.device, **values)) if values else load.cost
        if not per_byte:
            return cost
        joules = per_byte * (cost.bytes_up + cost.bytes_down)
        return replace(cost, other={**cost.other, NETWORK_FIELD: joules})


def _merge_rows(rows: Sequence[TableRow], client: str, hour: int) -> dict[str, float]:
    """What differs for a client in an hour."""
    merged: dict[str, float] = {}
    for row in rows:
        if hour in row.hours and fnmatch.fnmatchcase(client, row.client):
            merged |= row.values
    return merged


def read_cost_table(path: str) -> tuple[TableRow, ...]:
    """The lines of a cost table."""
    where, remedy = f"fleet.costs {path!r}", "give a csv file with the columns client, hour, ..."
    lines = read_csv_rows(path, where, remedy)
    head = [cell.strip() for cell in lines[0][1]] if lines else []
    columns = ("client", "hour", *FIGURES, NETWORK_FIELD)
    unknown = [name for name in head if name not in columns]
    if "client" not in head or unknown or len(set(head)) < len(head):
        named = f"column {unknown[0]!r:.40} is unknown" if unknown else "the columns are wrong"
        raise BadInput(f"{where}: {named}; use client, hour and some of {', '.join(columns[2:])}")
    return tuple(
        _parse_table_row(dict(zip(head, cells, strict=False)), f"{where} line {number}")
        for number, cells in lines[1:]
    )


def _parse_table_row(cells: Mapping[str, str], where: str) -> TableRow:
    texts = {name: cell.strip() for name, cell in cells.items() if name not in ("client", "hour")}
    try:
        numbers = {name: float(text) for name, text in texts.items() if text}
        hours = _parse_hours(cells.get("hour", "").strip())
    except ValueError as why:
        raise BadInput(f"{where}: {why}; hours are 0 to 23, figures numbers") from why
    for name, value in numbers.items():
        lowest_is_open = name in ("flops", "up_bits", "down_bits")
        if not 0 <= value < float("inf") or (lowest_is_open and not value):
            least = "above 0" if lowest_is_open else "0 or more"
            raise BadInput(f"{where}: {name} = {value:g}: must be {least}")
    return TableRow(cells["client"].strip() or "*", hours, numbers)


def _parse_hours(text: str) -> frozenset[int]:
    """ "", "7" or "22-5" as hours of the day."""
    if not text:
        return frozenset(range(HOURS_PER_DAY))
    first, dash, last = text.partition("-")
    start, end = int(first), int(last if dash else first)
    if not (0 <= start < HOURS_PER_DAY and 0 <= end < HOURS_PER_DAY):
        raise ValueError(f"hour {text}")
    return frozenset((start + i) % HOURS_PER_DAY for i in range((end - start) % HOURS_PER_DAY + 1))
