"""The libraries of the extra `llm`, imported when a language model is opened."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flrce.errors import BadInput, format_one_line


def import_library(name: str) -> Any:
    """A module of the extra; BadInput where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as why:
        package = name.partition(".")[0]
        raise BadInput(
            f'a language model needs the package {package}; pip install "flrce[llm]"'
        ) from why


@contextmanager
def translate_errors(problem: str, remedy: str = "download it again") -> Iterator[None]:
    """Whatever a library raises as it reads a user's file, as BadInput."""
    try:
        yield
    except BadInput:
        raise
    except BaseException as why:
        # a panic of tokenizers is no Exception
        if not isinstance(why, Exception) and type(why).__name__ != "PanicException":
            raise
        reason = format_one_line(str(why).strip().rpartition("\n")[2], 160)
        raise BadInput(f"{problem}: {reason}; {remedy}") from why
