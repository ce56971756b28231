"""Links that would be lost: only a trainer's reach clients."""

from dataclasses import fields, is_dataclass
from typing import Any


def has_links(piece: Any) -> bool:
    """Whether a piece, or one that it is made of, has links for clients' updates."""
    links = getattr(piece, "links", ())  # a name that only trainers declare
    if isinstance(links, list | tuple) and any(_is_link(link) for link in links):
        return True
    inner = [getattr(piece, f.name, None) for f in fields(piece)] if is_dataclass(piece) else []
    parts = [
        part for value in inner for part in (value if isinstance(value, list | tuple) else (value,))
    ]
    return any(has_links(part) for part in parts if is_dataclass(part))


def _is_link(link: Any) -> bool:
    return any(callable(getattr(link, method, None)) for method in ("step", "probe", "loss_term"))
