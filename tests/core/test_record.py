"""A round's record: three groups, known by flat names too."""

import copy
import pickle
from dataclasses import fields, replace

import pytest

from flrce.core.record import (
    FLAT_FIELDS,
    GROUPS,
    RoundCosts,
    RoundDiagnostics,
    RoundEvaluation,
    RoundRecord,
    flatten_record,
)
from flrce.storage.ledger_lines import parse_record, to_round_line
from flrce.storage.read import validate_round_line


def test_flat_names_are_the_fields_of_groups():
    record = RoundRecord(3, "abandoned", joules=2.0, accuracy=0.5, consensus=0.25, chosen=("a",))
    assert record.costs == RoundCosts(joules=2.0)
    assert record.evaluation == RoundEvaluation(accuracy=0.5)
    assert record.diagnostics == RoundDiagnostics(consensus=0.25)
    assert (record.joules, record.accuracy, record.consensus) == (2.0, 0.5, 0.25)
    assert record == RoundRecord(
        3,
        "abandoned",
        chosen=("a",),
        costs=RoundCosts(joules=2.0),
        evaluation=RoundEvaluation(accuracy=0.5),
        diagnostics=RoundDiagnostics(consensus=0.25),
    )


def test_a_flat_name_replaces_a_field_of_a_group():
    record = replace(RoundRecord(1, joules=2.0, seconds=7.0), joules=3.0)
    assert record.costs == RoundCosts(joules=3.0, seconds=7.0)
    assert replace(record, t=2).costs is record.costs


def test_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="RoundRecord has no field 'joule'"):
        RoundRecord(1, joule=2.0)
    with pytest.raises(AttributeError):
        _ = RoundRecord(1).joule


def test_copies_are_equal():
    record = RoundRecord(1, joules=2.0, why={"a": 1})
    assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record


def test_the_ledger_has_every_field_once():
    """52 columns in the order of version 0.1, and none of them is a group."""
    names = [f.name for kind in (RoundRecord, *GROUPS.values()) for f in fields(kind)]
    assert sorted(FLAT_FIELDS) == sorted(set(names) - set(GROUPS))
    assert len(names) == len(set(names))
    assert list(FLAT_FIELDS)[:6] == ["t", "outcome", "exploit", "chosen", "replied", "holdouts"]
    assert list(flatten_record(RoundRecord(1))) == list(FLAT_FIELDS)


def test_a_line_of_the_ledger_is_the_record_again():
    record = RoundRecord(
        2,
        holdouts=(0.5, None),
        held=(4, 0),
        flagged={"a": "zero update"},
        joules=2.5,
        measured=True,
        shadow=(4.0,),
        metrics={"auc": 0.75},
    )
    line = to_round_line(record)
    assert line["joules"] == 2.5
    assert not GROUPS.keys() & line.keys()
    assert parse_record(line) == validate_round_line(line) == record
