"""Every problem of an error reaches the reader whole, literally, and inside the width of the terminal."""

import errno
import os
import re
from pathlib import Path

import pytest

from canzona_cli.cli.views.errors import ErrorView, show_failure
from canzona_cli.core.errors import CanzonaError, ConfigError, DoesNotFit, EnvironmentProblem, Problem
from tests.cli.views.terminal import printed


def shown(error: CanzonaError, width: int, *, terminal: bool = False) -> str:
    return printed(ErrorView(error=error), width, terminal=terminal)


MISTAKES = ConfigError(
    Problem(key="parallel.tp", value=3, reason="16 attention heads do not divide by 3", fix="choose 1, 2, 4, 8 or 16"),
    Problem(
        key="data.path",
        value="/a/rather/long/path/" + "directory/" * 12 + "corpus",
        reason="the index is shorter than its header says, so the file was truncated while it was copied or written",
        fix="prepare it again: canzona data prepare --output /a/rather/long/path INPUT.jsonl --tokenizer byte",
    ),
    Problem(key="recipe", value="[red]x[/red]", reason="there is no recipe named [bold]x[/bold]"),
)


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_exceeds_the_width_and_no_text_is_lost(width: int) -> None:
    out = shown(MISTAKES, width)
    assert max(len(line) for line in out.splitlines()) <= width
    joined = "".join(out.split())
    for problem in MISTAKES.problems:
        for part in (problem.key, str(problem.value), problem.reason, problem.fix):
            assert "".join(part.split()) in joined


def test_headline_counts_problems_only_when_there_are_several() -> None:
    assert shown(MISTAKES, 80).splitlines()[0] == "Bad configuration: 3 problems"
    one = DoesNotFit(Problem(key="gpus", value=1, reason="too large"))
    assert shown(one, 80).splitlines()[0] == "Does not fit in memory"
    assert shown(ConfigError(), 80).splitlines() == ["Bad configuration"]


def test_only_settings_are_configuration() -> None:
    """A missing directory and an option are the command line's."""
    option, argument = (
        Problem(key=key, value="x", reason="there is no such directory") for key in ("--out", "RUN_DIR")
    )
    assert shown(ConfigError(option, argument), 80).startswith("Bad usage: 2 problems\n")
    assert shown(ConfigError(option, MISTAKES.problems[0]), 80).startswith("Bad configuration: 2 problems\n")


def test_one_problem_reads_as_place_reason_and_fix() -> None:
    error = ConfigError(MISTAKES.problems[0])
    assert shown(error, 80).splitlines() == [
        "Bad configuration",
        "",
        "  parallel.tp = 3",
        "    16 attention heads do not divide by 3",
        "    → choose 1, 2, 4, 8 or 16",
    ]


def test_piped_output_has_no_escape_codes_and_no_trailing_spaces() -> None:
    out = shown(MISTAKES, 80)
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_a_terminal_gets_colours() -> None:
    assert "\x1b[" in shown(MISTAKES, 80, terminal=True)


def test_a_reason_may_have_several_lines() -> None:
    out = shown(ConfigError(Problem(key="k", reason="first\nsecond\x1b", fix="a\nb")), 80)
    assert [line.strip() for line in out.splitlines()[3:]] == ["first", "second\\x1b", "→ a", "b"]


def test_control_characters_of_user_text_are_shown_not_obeyed() -> None:
    hostile = "a\x1b[2Jb\rc\nd"
    out = shown(ConfigError(Problem(key=hostile, value=hostile, reason="no", fix="")), 80)
    assert "\x1b" not in out
    assert "\r" not in out
    assert "a\\x1b[2Jb\\rc\\nd = a\\x1b[2Jb\\rc\\nd" in out


def test_an_empty_value_is_visible() -> None:
    assert "run.dir = ''" in shown(ConfigError(Problem(key="run.dir", value="", reason="is empty")), 80)


def test_truth_values_are_written_as_one_types_them() -> None:
    problem = Problem(key="cluster.transformer_engine", value=True, reason="is not installed")
    assert "cluster.transformer_engine = true" in shown(ConfigError(problem), 80)


def test_a_users_mistake_gives_its_own_exit_code_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem(key="gpus", value=0, reason="must be at least 1", fix="set gpus=1")
    assert (show_failure(ConfigError(problem)), show_failure(EnvironmentProblem(problem))) == (2, 3)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("set gpus=1") == 2
    assert "Traceback" not in told.err


def test_a_bug_is_one_line_with_the_traceback_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="odd") as caught:
        raise ValueError("odd") from FileNotFoundError(os.fsdecode(b"caf\xe9"))  # a name that is not UTF-8
    assert show_failure(caught.value) == 70
    told = capsys.readouterr().err
    assert "bug in canzona: ValueError: odd" in told
    assert "Traceback" not in told
    found = re.search(r"is in (\S+);", told)
    assert found is not None
    kept = Path(found[1])
    assert 'raise ValueError("odd")' in kept.read_text()
    assert r"caf\udce9" in kept.read_text()
    kept.unlink()


def test_what_the_system_refuses_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_failure(OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "x" * 300)) == 3
    assert "File name too long" in capsys.readouterr().err
    assert show_failure(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "ours.json")) == 70


def test_what_several_places_have_in_common_is_told_once() -> None:
    same = [
        Problem(key="INPUT", value=f"a.jsonl:{line}", reason="not JSON", fix="take --format text") for line in (1, 2)
    ]
    out = shown(ConfigError(*same, Problem(key="gpus", reason="not JSON")), 80)
    assert [out.count(words) for words in ("a.jsonl:1", "a.jsonl:2", "not JSON", "--format text")] == [1, 1, 2, 1]


def test_a_path_is_not_broken_where_it_can_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/a/rather/long/path/" + "directory/" * 12
    assert show_failure(ConfigError(Problem(key="run.dir", reason=f"there is nothing in {path} to go on from"))) == 2
    assert path in capsys.readouterr().err
