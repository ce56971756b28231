"""Flower's log as JSON lines, for collectors: FLRCE_LOG=json in the ServerApp's environment."""

import json
import logging
import os
import time

from flrce.errors import BadInput, format_one_line

LOG_VARIABLE = "FLRCE_LOG"
MAX_LINE_CHARACTERS = 4000


class JsonLineFormatter(logging.Formatter):
    """One record as one JSON object: when, level, logger, message, and the error where there is
    one.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": format_one_line(record.getMessage(), MAX_LINE_CHARACTERS),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def use_json_log_if_asked() -> bool:
    """Give the handlers of Flower's log the JSON formatter where the environment asks for it."""
    kind = os.environ.get(LOG_VARIABLE, "")
    if kind in ("", "text"):
        return False
    if kind != "json":
        raise BadInput(f"{LOG_VARIABLE}={format_one_line(kind, 40)}: use json or text")
    for handler in logging.getLogger("flwr").handlers:
        handler.setFormatter(JsonLineFormatter())
    return True
