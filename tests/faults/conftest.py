"""Prints the matrix of faults as a table: row, case, what was promised, what was seen."""

import pytest
import torch

torch.set_num_threads(1)  # children are forked from this process
SEEN: dict[str, tuple[object, str, str, str]] = {}


@pytest.fixture
def seen(request):
    """Call it with what was observed; it becomes the row's last column."""
    notes: list[str] = []
    yield notes.append
    request.node.notes = notes


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    row = item.get_closest_marker("row")
    if row and (report.when == "teardown" or not report.passed):
        notes = "; ".join(getattr(item, "notes", []))
        known = getattr(report, "wasxfail", "")
        why = (
            f"KNOWN: {known}"
            if known
            else f"skipped: {report.longrepr[2]}"
            if report.skipped
            else ""
        )
        state = why or ("FAILED" if report.failed else "")
        old = SEEN.get(item.nodeid, (0, "", "", ""))[3]
        SEEN[item.nodeid] = (*row.args, old or state or notes or "as expected")
    return report


def pytest_terminal_summary(terminalreporter):
    if not SEEN:
        return
    terminalreporter.section("faults: row, case, expected, seen")
    merged: dict[tuple[object, str, str], list[str]] = {}
    for number, case, expected, what in SEEN.values():
        merged.setdefault((number, case, expected), []).append(what)
    for (number, case, expected), what in sorted(
        merged.items(), key=lambda item: (item[0][0], item[0][1])
    ):
        bad = [text for text in what if text == "FAILED"]
        shown = f"{len(bad)} of {len(what)} FAILED" if bad else what[0]
        if not bad and len(what) > 1:
            shown = (
                f"{len(what)} x {shown}"
                if len(set(what)) == 1
                else f"{len(what)} cases, first: {shown}"
            )
        terminalreporter.write_line(f"{number!s:>3}  {case:<52.52}  {expected:<34.34}  {shown}")
