"""What joules rest on: a meter, a model of figures that were measured, or an assumption.

Every client's cost books its joules a second time by their basis, as `ClientCost.other` under the
names below; these add up to its joules.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # which imports torch
    from flrce.core.types import ClientCost

MEASURED_FIELD = "joules_measured"  # counted by a meter on the device
MODELLED_FIELD = "joules_modelled"  # by a profile, from figures that were measured or published
#: by a profile, where a figure that it takes is an assumption -> what the joules are spent on
ASSUMED_FIELDS = {
    "joules_assumed_batches": "batch overhead",
    "joules_assumed_work": "computation",
    "joules_assumed_radio": "radio",
    "joules_assumed_waiting": "waiting",
}
BASIS_FIELDS = (MEASURED_FIELD, MODELLED_FIELD, *ASSUMED_FIELDS)
NETWORK_FIELD = "network_joules"  # of networks between devices and server, apart
MIN_NAMED_SHARE = 0.01  # of the joules: parts below it are not named


def add_amounts(other: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Sums by name; names with nothing are left out."""
    names = dict.fromkeys((*other, *more))
    sums = {name: other.get(name, 0.0) + more.get(name, 0.0) for name in names}
    return {name: amount for name, amount in sums.items() if amount}


def replace_basis(other: Mapping[str, float], basis: Mapping[str, float]) -> dict[str, float]:
    """Further costs with another basis of the joules."""
    kept = {name: amount for name, amount in other.items() if name not in BASIS_FIELDS}
    return add_amounts(kept, basis)


def reconcile_basis(spent: "ClientCost", before: "ClientCost") -> "ClientCost":
    """The cost with a basis that adds up to its joules, which something beside the device's profile
    changed: what is more was modelled, what is less is taken from every part. A cost without a
    basis has that of `before`.
    """
    own = _select_basis(spent.other)
    basis = own or _select_basis(before.other)
    booked = sum(basis.values())
    if not booked or (own and abs(booked - spent.joules) <= 1e-9 * booked):
        return spent
    if spent.joules < booked:
        basis = {name: spent.joules / booked * amount for name, amount in basis.items()}
    else:
        basis = add_amounts(basis, {MODELLED_FIELD: spent.joules - booked})
    return replace(spent, other=replace_basis(spent.other, basis))


def _select_basis(other: Mapping[str, float]) -> dict[str, float]:
    return {name: other[name] for name in BASIS_FIELDS if name in other}


def assumed_share(summary: Mapping[str, Any]) -> float | None:
    """The share of a run's joules that is assumed; None where it was not booked."""
    parts = {name: summary.get(name) or 0.0 for name in BASIS_FIELDS}
    joules = summary.get("joules") or 0.0
    # a run that an earlier version began has rounds without a basis
    if not joules or abs(sum(parts.values()) / joules - 1) > 1e-6:
        return None
    return float(sum(parts[name] for name in ASSUMED_FIELDS) / joules)


def describe_basis(summary: Mapping[str, Any]) -> str:
    """Where a run's joules come from, the largest assumption first; "" where it is unknown.

    >>> describe_basis({"joules": 10.0, "joules_modelled": 1.8, "joules_assumed_batches": 8.2})
    '82 % assumed batch overhead, 18 % modelled'
    """
    if assumed_share(summary) is None:
        return ""
    names = {name: f"assumed {part}" for name, part in ASSUMED_FIELDS.items()}
    names |= {MODELLED_FIELD: "modelled", MEASURED_FIELD: "measured"}
    shares = {name: (summary.get(name) or 0.0) / summary["joules"] for name in names}
    order = sorted(names, key=lambda name: (name not in ASSUMED_FIELDS, -shares[name]))
    shown = [name for name in order if shares[name] >= MIN_NAMED_SHARE]
    return ", ".join(f"{100 * shares[name]:.0f} % {names[name]}" for name in shown)


def format_joules(summary: Mapping[str, Any]) -> str:
    """A run's joules with their interval, and whether they are measured or modelled."""
    joules, high = summary["joules"], summary.get("joules_high") or 0.0
    doubt = f" ({summary['joules_low']:.4g} to {high:.4g})" if high > joules else ""
    return f"{joules:.4g} J{doubt} {summary['energy']}"


def describe_joules(summary: Mapping[str, Any]) -> str:
    """The same with what they rest on, in one line."""
    basis = describe_basis(summary)
    plain = basis in ("", f"100 % {summary['energy']}")
    return format_joules(summary) + ("" if plain else f", of which {basis}")
