"""Which versions of Flower were tested, and a warning about others."""

import logging
import re
from importlib.metadata import PackageNotFoundError, version

from flrce.flower import SUPPORTED_VERSIONS

log = logging.getLogger("flwr")


def explain_untested_version(installed: str) -> str:
    """What to say about a version of Flower that no test has seen; "" for the others.

    >>> explain_untested_version("1.41.0")
    ''
    """
    least, most = (tuple(map(int, text.split("."))) for text in SUPPORTED_VERSIONS.split(" to "))
    found = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if least <= found <= most:
        return ""
    return (
        f"flwr {installed} was not tested with this version of flrce; tested were"
        f" {SUPPORTED_VERSIONS}: if a run fails, install one of those"
    )


def warn_about_version() -> None:
    """Log a line where the installed Flower was not tested."""
    try:
        problem = explain_untested_version(version("flwr"))
    except PackageNotFoundError:  # a checkout of Flower's own
        return
    if problem:
        log.warning(problem)
