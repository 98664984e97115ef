"""The last words: a user's mistake has no traceback, ours is kept in a file."""

import re
from pathlib import Path

import pytest

from canzona_cli.errors import ConfigError, EnvironmentProblem, Problem
from canzona_cli.report.failure import show_failure


def test_a_users_mistake_gives_its_own_exit_code_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem(key="gpus", value=0, reason="must be at least 1", fix="set gpus=1")
    assert (show_failure(ConfigError(problem)), show_failure(EnvironmentProblem(problem))) == (2, 3)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("set gpus=1") == 2
    assert "Traceback" not in told.err


def test_a_bug_is_one_line_with_the_traceback_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="odd") as caught:
        raise ValueError("odd")
    assert show_failure(caught.value) == 70
    told = capsys.readouterr().err
    assert "bug in canzona: ValueError: odd" in told
    assert "Traceback" not in told
    found = re.search(r"is in (\S+);", told)
    assert found is not None
    kept = Path(found[1])
    assert 'raise ValueError("odd")' in kept.read_text()
    kept.unlink()
