"""From work and payloads to seconds and joules: device profiles, fleets, FLOPs of a network.

E = P_over T_over + P_act T_work + e_up B_up + e_down B_down + e_tail transfers, and P_idle while
waiting for the round's end, with T_over = a batches + o operations, T_work = FLOPs / R + moved / M.
For nets as small as the paper's the fixed cost `a` of a batch outweighs its FLOPs.
"""

import copy
import csv
import fnmatch
import logging
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn

from flrce.core.cost_table import MODELLED_FIELD, NETWORK_FIELD, reconcile_basis, replace_basis
from flrce.core.files import parse_csv, read_text_limited
from flrce.core.host import run_in_child
from flrce.core.types import ClientCost
from flrce.devices.flops import (
    EXTRA_FLOP_FORMULAS,
    NO_TRAFFIC,
    StepTraffic,
    TrafficCounter,
    open_flop_counter,
    unroll_lstms,
)
from flrce.errors import BadInput, format_one_line, suggest_name
from flrce.rng import make_stream

MAX_PROFILE_BYTES, MAX_CLIENTS_BYTES = 1 << 20, 256 << 20
log = logging.getLogger("flrce")


#: what data costs in networks beyond the device, kWh a GB: fixed access and core, mobile access
NETWORK_KWH_PER_GB = {"device": 0.0, "fixed": 0.03, "mobile": 0.14}
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of device; the files in `profiles/` give each figure's source."""

    name: str
    idle_watts: float
    active_watts: float
    flops: float  # per second, as reached in training
    batch_seconds: float  # fixed cost of a batch: loading, launching
    up_bits: float  # per second
    down_bits: float
    up_joules: float  # per byte
    down_joules: float
    # of its joules: they may be 1 + error times as many, or that many times fewer; 0: not stated
    error: float = 0.0
    # optional figures: power during a batch's fixed cost, where it is not active_watts
    overhead_watts: float = 0.0
    operation_seconds: float = 0.0  # fixed cost of each operation of a batch
    memory_bytes: float = 0.0  # per second, that operations read and write; 0: not counted
    tail_joules: float = 0.0  # of the radio, which stays awake after each transfer
    # not the device's: joules per byte of the network behind it (fleet.network), booked apart
    network_joules: float = 0.0
    assumed: frozenset[str] = frozenset()  # the figures that are assumptions

    def __post_init__(self) -> None:
        for name in (*FIGURES, "network_joules"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number, 0 or more, got {value!r}")
            if name in ("flops", "up_bits", "down_bits") and not value:
                raise ValueError(f"{name} must be above 0")

    @property
    def counts_traffic(self) -> bool:
        """Whether a step's operations and the bytes that they move are needed to predict it."""
        return bool(self.operation_seconds or self.memory_bytes)

    def estimate_cost(
        self,
        bytes_down: int,
        bytes_up: int,
        flops: float,
        batches: int,
        framing: int = 0,
        traffic: StepTraffic = NO_TRAFFIC,
    ) -> ClientCost:
        """The modelled cost of one client's part of a round; `traffic` of all its steps."""
        overhead = self.batch_seconds * batches + self.operation_seconds * traffic.operations
        moving = traffic.moved_bytes / self.memory_bytes if self.memory_bytes else 0.0
        spent = ClientCost(
            bytes_down=bytes_down,
            bytes_up=bytes_up,
            framing=framing,
            flops=flops,
            batches=batches,
            compute_seconds=overhead + flops / self.flops + moving,
            transfer_seconds=8 * bytes_down / self.down_bits + 8 * bytes_up / self.up_bits,
            overhead_seconds=overhead,
        )
        return self.add_joules(spent)

    def add_joules(self, spent: ClientCost) -> ClientCost:
        """With the energy of its training time and of its bytes, modelled or measured."""
        radio = self._count_radio_joules(spent)
        joules = self.active_watts * spent.compute_seconds + radio
        if self.overhead_watts:
            joules -= (self.active_watts - self.overhead_watts) * spent.overhead_seconds
        other = replace_basis(spent.other, self._list_basis(spent, radio))
        if self.network_joules:
            travelled = spent.bytes_up + spent.bytes_down
            other[NETWORK_FIELD] = self.network_joules * travelled
        return replace(
            spent,
            joules=joules,
            idle_watts=self.idle_watts,
            idle_assumed="idle_watts" in self.assumed,
            error=self.error,
            other=other,
        )

    def _count_radio_joules(self, spent: ClientCost) -> float:
        transfers = (spent.bytes_up > 0) + (spent.bytes_down > 0)
        sent = self.up_joules * spent.bytes_up + self.down_joules * spent.bytes_down
        return sent + self.tail_joules * transfers

    def _list_basis(self, spent: ClientCost, radio: float) -> dict[str, float]:
        """The joules by what they rest on: assumed where one of the figures in a product is."""
        over, work = spent.overhead_seconds, spent.compute_seconds - spent.overhead_seconds
        power = "overhead_watts" if self.overhead_watts else "active_watts"
        rates = {"flops"} if spent.flops else set()  # a measured time needs no rate
        rates |= {"memory_bytes"} if self.memory_bytes and spent.flops else set()
        fixed = {name for name in ("batch_seconds", "operation_seconds") if getattr(self, name)}
        basis: dict[str, float] = {}
        for name, joules, figures in (
            ("joules_assumed_batches", getattr(self, power) * over, {power, *fixed}),
            ("joules_assumed_work", self.active_watts * work, {"active_watts", *rates}),
            ("joules_assumed_radio", radio, {"up_joules", "down_joules", "tail_joules"}),
        ):
            field = name if figures & self.assumed else MODELLED_FIELD
            basis[field] = basis.get(field, 0.0) + joules
        return basis

    def truncate_cost(self, spent: ClientCost, seconds: float) -> ClientCost:
        """The part of a cost that a client has spent if it stops after so many seconds."""
        left = max(seconds, 0.0)
        slower = self._compare_transfer_time(spent)
        down_bits, up_bits = self.down_bits / slower, self.up_bits / slower
        down = min(left, 8 * spent.bytes_down / down_bits)
        compute = min(left - down, spent.compute_seconds)
        up = min(left - down - compute, 8 * spent.bytes_up / up_bits)
        part = compute / spent.compute_seconds if spent.compute_seconds else 0.0
        bytes_down, bytes_up = int(down * down_bits / 8), int(up * up_bits / 8)
        stopped = replace(
            spent,
            bytes_down=bytes_down,
            bytes_up=bytes_up,
            flops=part * spent.flops,
            batches=int(part * spent.batches),
            compute_seconds=compute,
            transfer_seconds=down + up,
            overhead_seconds=part * spent.overhead_seconds,
        )
        share = (down + compute + up) / spent.seconds if spent.seconds else 0.0
        beside = spent.joules - self.add_joules(spent).joules  # 0 without a cost model
        further = {name: share * amount for name, amount in spent.other.items()}
        priced = self.add_joules(replace(stopped, other=further))
        joules = max(priced.joules + share * beside, 0.0)
        return reconcile_basis(replace(stopped, joules=joules, other=priced.other), priced)

    def infer_traffic(self, spent: ClientCost) -> StepTraffic:
        """The traffic of steps that cost so much on this device."""
        fixed = spent.overhead_seconds - self.batch_seconds * spent.batches
        moving = spent.compute_seconds - spent.overhead_seconds - spent.flops / self.flops
        operations = fixed / self.operation_seconds if self.operation_seconds else 0.0
        return StepTraffic(max(operations, 0.0), max(moving * self.memory_bytes, 0.0))

    def _compare_transfer_time(self, spent: ClientCost) -> float:
        """How many times as long as by this profile the transfer takes: 1 without a cost model."""
        by_profile = 8 * spent.bytes_down / self.down_bits + 8 * spent.bytes_up / self.up_bits
        return spent.transfer_seconds / by_profile if by_profile and spent.transfer_seconds else 1.0


#: what a profile's file states: figure -> value, source; those with a default may be left out
FIGURES = tuple(
    f.name for f in fields(DeviceProfile) if f.name not in ("name", "network_joules", "assumed")
)


@cache
def list_profile_names() -> tuple[str, ...]:
    """The profiles shipped with the package."""
    files = (resources.files("flrce") / "devices" / "profiles").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def load_profile(name: str, where: str = "fleet.profile") -> DeviceProfile:
    """A shipped profile by name, or a user's TOML file by path. `where`: the setting's name."""
    if name.endswith(".toml"):
        remedy = "give a shipped name or a TOML file"
        text = read_text_limited(name, MAX_PROFILE_BYTES, remedy, where=f"{where} {name!r}")
        return _parse_profile(name, text, where)
    if name not in list_profile_names():
        raise BadInput(
            f"{where} {name!r} is unknown; {suggest_name(name, list_profile_names())}, or a file"
            " name.toml"
        )
    return _load_shipped_profile(name)


@cache  # every experiment names one, and the package's files do not change under it
def _load_shipped_profile(name: str) -> DeviceProfile:
    return _parse_profile(
        name, (resources.files("flrce") / "devices" / "profiles" / f"{name}.toml").read_text()
    )


def _parse_profile(name: str, text: str, where: str = "fleet.profile") -> DeviceProfile:
    try:
        figures = tomllib.loads(text)
        for key in set(figures) & {"name", "network_joules", "assumed"}:
            raise ValueError(f"{key!r} is no figure of a device")
        assumed = frozenset(key for key, figure in figures.items() if is_assumed(figure))
        values = {key: figure["value"] for key, figure in figures.items()}
        return DeviceProfile(name, assumed=assumed, **values)
    except (AttributeError, TypeError, KeyError, ValueError, RecursionError) as why:
        raise BadInput(
            f"{where} {name!r} is malformed ({why}); copy a shipped one and change its values"
        ) from why


def add_network_energy(
    devices: Mapping[str, DeviceProfile], network: str | None
) -> dict[str, DeviceProfile]:
    """The devices with the joules that a byte costs in the network behind them."""
    joules = NETWORK_KWH_PER_GB[network or "device"] * JOULES_PER_KWH / 1e9
    if not joules:
        return dict(devices)
    # clients share the profiles of their kind
    kinds = {id(one): replace(one, network_joules=joules) for one in devices.values()}
    return {client: kinds[id(one)] for client, one in devices.items()}


def is_assumed(figure: Mapping[str, Any]) -> bool:
    """Whether a figure is an assumption: as its `basis` says, or else as its source begins."""
    basis = figure.get("basis")
    if basis not in (None, "measured", "assumed"):
        raise ValueError(f"basis must be measured or assumed, got {basis!r}")
    if basis is not None:
        return bool(basis == "assumed")
    return str(figure.get("source", "")).startswith(("assumed", "not measured here"))


def assign_devices(
    mix: str | Mapping[str, float],
    clients: Sequence[str],
    seed: int,
    by_client: str | Mapping[str, str] | None = None,
) -> dict[str, DeviceProfile]:
    """Each client's device: all alike or a seeded mix, except those named in `by_client`.

    `by_client` maps names or patterns ("phone-*", the last that fits counts) to profiles, or is a
    csv file of them.
    """
    devices = _assign_device_mix(mix, clients, seed)
    if not by_client:
        return devices
    named = read_device_assignments(by_client)
    profiles = {name: load_profile(name) for name in set(named.values())}
    exact = {client: profiles[named[client]] for client in clients if client in named}
    patterns = [name for name in named if any(sign in name for sign in "*?[")]
    first = ", ".join(clients[:3])
    for pattern in patterns:
        fits = fnmatch.filter(clients, pattern)
        if not fits:
            log.warning("fleet.clients: %s fits no client; the first are %s", ascii(pattern), first)
        devices |= dict.fromkeys(fits, profiles[named[pattern]])
    if not exact and not patterns:
        log.warning("fleet.clients names none of the clients; the first are %s", first)
    return devices | exact


def read_device_assignments(by_client: str | Mapping[str, str]) -> dict[str, str]:
    """Client or pattern -> profile, from a table or a csv file with columns client and profile."""
    if not isinstance(by_client, str):
        return dict(by_client)
    remedy = "give a csv file with a header line client,profile"
    where = f"fleet.clients {by_client!r}"
    rows = read_csv_rows(by_client, where, remedy)
    if not rows or [cell.strip().lower() for cell in rows[0][1]] != ["client", "profile"]:
        raise BadInput(f"{where} has no columns client and profile; {remedy}")
    profiles: dict[str, str] = {}
    for number, row in rows[1:]:
        if len(row) != 2 or row[0].strip() in profiles:
            raise BadInput(f"{where} line {number} is no pair, or names a client twice; {remedy}")
        profiles[row[0].strip()] = row[1].strip()
    return profiles


def read_csv_rows(path: str, where: str, remedy: str) -> list[tuple[int, list[str]]]:
    """(line, cells) of a csv file about clients, or BadInput."""
    text = read_text_limited(path, MAX_CLIENTS_BYTES, remedy, expansion=8, where=where)
    try:
        return list(parse_csv(text))
    except csv.Error as why:
        raise BadInput(f"{where} cannot be read: {format_one_line(why, 120)}; {remedy}") from why


def _assign_device_mix(
    mix: str | Mapping[str, float], clients: Sequence[str], seed: int
) -> dict[str, DeviceProfile]:
    if isinstance(mix, str):
        one = load_profile(mix)
        return dict.fromkeys(clients, one)
    total, order = sum(mix.values()), make_stream(seed, "fleet").permutation(len(clients))
    devices: dict[str, DeviceProfile] = {}
    edge = 0.0
    for name, share in mix.items():
        one, start = load_profile(name), round(edge / total * len(clients))
        edge += share
        for i in order[start : round(edge / total * len(clients))]:
            devices[clients[i]] = one
    return devices


def training_flops(
    net: nn.Module, shape: tuple[int, ...], samples: int = 2, tokens: bool = False
) -> float:
    """FLOPs to train on one sample, forward and backward, of the layers with gradients.

    The objective's own are left out: they are few, and torch counts none of them.
    """
    counted = unroll_lstms(net)

    def count_flops() -> float:
        with open_flop_counter(EXTRA_FLOP_FORMULAS) as counter, torch.random.fork_rng(devices=[]):
            _sum_outputs(counted(_make_blank_samples(shape, tokens, samples))).backward()
        return float(counter.get_total_flops())

    # beside a GPU a backward pass begins threads, after which no worker can be forked any more
    total = run_in_child(count_flops) if torch.cuda.is_available() else count_flops()
    if not total:
        log.warning(
            "the FLOPs of %s are unknown: torch counts none of its operations, so that its joules"
            " and seconds hold only the fixed cost of a batch",
            type(net).__name__,
        )
    return total / samples


def inference_flops(
    net: nn.Module, shape: tuple[int, ...], samples: int = 2, tokens: bool = False
) -> float:
    """FLOPs to evaluate one sample."""
    with open_flop_counter(EXTRA_FLOP_FORMULAS) as counter:  # with gradients: no fused layers
        unroll_lstms(net).eval()(_make_blank_samples(shape, tokens, samples))
    return float(counter.get_total_flops()) / samples


def count_step_traffic(
    net: nn.Module, shape: tuple[int, ...], tokens: bool = False, train: bool = True
) -> tuple[float, float, float]:
    """(operations of a batch, bytes moved per batch, bytes per sample), training or evaluating."""
    net, counts = copy.deepcopy(net), []
    for samples in (2, 4):
        x = _make_blank_samples(shape, tokens, samples)
        with TrafficCounter() as counter, torch.random.fork_rng(devices=[]):
            out = _sum_outputs(net(x)) if train else net.eval()(x)
            if train:
                out.backward()
        counts.append(counter)
    of_two, of_four = counts
    sample_bytes = (of_four.moved_bytes - of_two.moved_bytes) / 2
    return of_four.operations, max(of_two.moved_bytes - 2 * sample_bytes, 0.0), sample_bytes


def _sum_outputs(out: Any) -> Tensor:
    """The sum of all outputs of a network: a tensor, or tuples, lists and dicts of tensors."""
    if isinstance(out, Tensor):
        return out.sum()
    if isinstance(out, Mapping):
        out = list(out.values())
    parts = out if isinstance(out, tuple | list) else ()
    return torch.stack([torch.zeros(()), *map(_sum_outputs, parts)]).sum()


def _make_blank_samples(shape: tuple[int, ...], tokens: bool, samples: int) -> Tensor:
    """Samples of the dtype that the network is given; their values do not matter."""
    return torch.zeros(samples, *shape, dtype=torch.int64 if tokens else torch.float32)
