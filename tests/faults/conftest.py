"""Every fault test adds rows to one table, which stands at the end of the tests' output."""

import pytest

from tests.faults.table import FaultRow, RecordFault, table_lines

_ROWS: pytest.StashKey[list[FaultRow]] = pytest.StashKey()


@pytest.fixture
def record_fault(request: pytest.FixtureRequest) -> RecordFault:
    """Call with what was injected and what came of it, after the assertions."""

    def record(*, fault: str, happened: str, exit_code: int | None, lost: str) -> None:
        row = FaultRow(fault=fault, happened=happened, exit_code=exit_code, lost=lost)
        request.config.stash.setdefault(_ROWS, []).append(row)

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if rows:
        terminalreporter.section("faults")
        for line in table_lines(rows):
            terminalreporter.write_line(line)
