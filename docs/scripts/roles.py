"""Write the tables of docs/pieces.md: every method and property of every base class of pieces.

python docs/scripts/roles.py
"""

import inspect
import re
from pathlib import Path
from typing import Any

from flrce.core.roles import ROLE_CLASSES, Piece
from flrce.devices.cost_models import CostModel
from flrce.training.links import Link

PAGE = Path(__file__).resolve().parents[1] / "pieces.md"
MARK = "<!-- The rest of this page is written by docs/scripts/roles.py. -->\n"
BASES = {"every piece": Piece, **ROLE_CLASSES, "link": Link, "cost model": CostModel}


def describe_base(role: str, base: type) -> str:
    """One section: what the base class says, and a row for each of its own members."""
    about = " ".join((inspect.getdoc(base) or "").split())
    rows = [f"## {role.capitalize()}\n\n`{base.__name__}`: {about}\n\n| name | what it is |"]
    rows.append("|---|---|")
    for name, member in vars(base).items():
        text = summarize_member(member)
        if (name.startswith("_") and name != "__call__") or not text:
            continue
        must = ", required" if name in getattr(base, "__abstractmethods__", ()) else ""
        rows.append(f"| `{format_member(name, member)}`{must} | {text} |")
    return "\n".join(rows) + "\n"


def summarize_member(member: Any) -> str:
    """The first sentence on a method or property; "" of anything else."""
    if not callable(member) and type(member).__name__ not in ("default_property", "property"):
        return ""
    text = " ".join((getattr(member, "__doc__", "") or "").split()).replace("|", "\\|")
    return re.split(r"(?<=\w[.)])\s+(?=[A-Z`])", text)[0]


def format_member(name: str, member: Any) -> str:
    """A method with the names of its arguments, or a property."""
    if not inspect.isfunction(member):
        return name
    return f"{name}({', '.join(list(inspect.signature(member).parameters)[1:])})"


def write_tables() -> str:
    """All sections."""
    return "\n".join(describe_base(role, base) for role, base in BASES.items())


def render_page(text: str) -> str:
    """The page with its tables anew."""
    return text.partition(MARK)[0] + MARK + "\n" + write_tables()


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text()))
    print(f"{PAGE} written")
