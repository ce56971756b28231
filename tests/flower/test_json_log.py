"""Flower's log as JSON lines."""

import io
import json
import logging

import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flower_helpers import plain_app, start
from flrce.errors import BadInput
from flrce.flower import FLrce, LocalGrid
from flrce.flower.options import JsonLineFormatter, use_json_log_if_asked


def test_every_line_of_a_run_is_an_object(monkeypatch):
    monkeypatch.setenv("FLRCE_LOG", "json")
    stream, log = io.StringIO(), logging.getLogger("flwr")
    handler = logging.StreamHandler(stream)
    before = [(one, one.formatter) for one in log.handlers]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        FLrce(ask_names=False).start(LocalGrid(plain_app(), 3), start(), 2)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        for one, formatter in before:
            one.setFormatter(formatter)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert sum("committed" in line["message"] for line in lines) == 2
    assert {line["logger"] for line in lines} == {"flwr"}
    assert all(line["time"].endswith("Z") for line in lines)


def test_an_error_and_a_line_feed_stay_on_one_line():
    record = logging.LogRecord("flwr", logging.ERROR, "f", 1, "a\n%s", ("b",), None)
    text = JsonLineFormatter().format(record)
    assert "\n" not in text
    assert json.loads(text)["message"] == "a b"


def test_another_kind_is_refused(monkeypatch):
    monkeypatch.setenv("FLRCE_LOG", "xml")
    with pytest.raises(BadInput, match="FLRCE_LOG=xml: use json or text"):
        use_json_log_if_asked()
    monkeypatch.setenv("FLRCE_LOG", "text")
    assert not use_json_log_if_asked()
