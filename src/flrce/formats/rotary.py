"""Rotary positions that were stretched for longer texts: what each frequency is divided by."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flrce.errors import BadInput, format_one_line

SUPPORTED_TYPES_TEXT = "read are default, linear, llama3 and yarn"


def rotary_frequencies(head: int, theta: float) -> list[float]:
    """theta ** (-2 i / head) of each pair of a head's numbers (Su et al. 2021)."""
    return [theta ** (-2 * i / head) for i in range(head // 2)]


def compute_rotary_divisors(rope: Any, head: int, theta: float, where: Path) -> tuple[float, ...]:
    """Of the table `rope_scaling` or `rope_parameters` of a config.json; () where nothing is
    stretched.
    """
    if not isinstance(rope, Mapping):
        raise BadInput(
            f"{where} says rope_scaling = {format_one_line(rope, 40)}; it must be a table"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1) != 1:
        raise BadInput(f"{where} rotates only part of each head; use a plain llama model")
    if kind == "default":
        return ()
    if kind == "linear":
        return (_get_positive_number(rope, "factor", where),) * (head // 2)
    if kind == "yarn":
        return _compute_yarn_divisors(rope, head, theta, where)
    if kind != "llama3":
        raise BadInput(
            f"{where} scales its rotary positions by {format_one_line(kind, 30)!r};"
            f" {SUPPORTED_TYPES_TEXT}"
        )
    factor, low, high, context = (
        _get_positive_number(rope, key, where)
        for key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
    )
    if high <= low:
        raise BadInput(
            f"{where} says high_freq_factor = {high:g}, low_freq_factor = {low:g}; the first must"
            " be larger"
        )
    found = []
    for frequency in rotary_frequencies(head, theta):
        turns = (
            context * frequency / (2 * math.pi)
        )  # in the context that the model was first trained with
        kept = min(
            max((turns - low) / (high - low), 0.0), 1.0
        )  # fast pairs stay, slow ones are stretched by factor
        found.append(1 / ((1 - kept) / factor + kept))
    return tuple(found)


def yarn_attention_factor(rope: Any, where: Path) -> float:
    """What YaRN (Peng et al. 2023) multiplies cosines and sines by: 0.1 ln(factor) + 1, unless the
    table says more.
    """
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
        return 1.0
    if rope.get("attention_factor") is not None:
        return _get_positive_number(rope, "attention_factor", where)
    stretch = math.log(max(_get_positive_number(rope, "factor", where), 1.0))
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (
            0.1 * _get_positive_number(rope, key, where) * stretch + 1
            for key in ("mscale", "mscale_all_dim")
        )
        return above / below
    return 0.1 * stretch + 1


def _compute_yarn_divisors(
    rope: Mapping[str, Any], head: int, theta: float, where: Path
) -> tuple[float, ...]:
    """YaRN: pairs that turn more than `beta_fast` times in the first context stay, under
    `beta_slow` all is stretched.

    Between them the share goes by the pair's place, the two ends rounded outwards.
    """
    factor, context = (
        _get_positive_number(rope, key, where)
        for key in ("factor", "original_max_position_embeddings")
    )
    given = {
        **rope,
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
    }

    def find_pair_position(
        turns: float,
    ) -> float:  # where a pair turns so often: context theta^(-2 i / head) = 2 pi turns
        return head * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = (
        find_pair_position(_get_positive_number(given, key, where))
        for key in ("beta_fast", "beta_slow")
    )
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head - 1)
    width = high - low or 0.001
    shares = (min(max((i - low) / width, 0.0), 1.0) for i in range(head // 2))
    return tuple(1 / (share / factor + 1 - share) for share in shares)


def validate_rotary_divisors(values: Sequence[float], head: int, where: Path) -> tuple[float, ...]:
    """Divisors that a file lists one by one."""
    if len(values) != head // 2 or not all(math.isfinite(value) and value > 0 for value in values):
        raise BadInput(
            f"{where} has factors of rotary positions that do not fit heads of {head}; download it"
            " again"
        )
    return tuple(values)


def _get_positive_number(rope: Mapping[str, Any], key: str, where: Path) -> float:
    value = rope.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise BadInput(
            f"{where} says {key} = {format_one_line(value, 30)} of its rotary positions; it must be"
            " a number above 0"
        )
    return float(value)
