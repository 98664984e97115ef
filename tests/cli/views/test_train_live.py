"""A run's view stays inside the terminal, survives any record, and leaves its last frame; piped, it stays readable."""

import fcntl
import io
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from canzona_cli.cli.views.charts import progress_bar, sparkline
from canzona_cli.cli.views.train import ConsoleView, LiveView, PlainView, make_view
from canzona_cli.cli.views.train_state import TrainState
from canzona_cli.launch.view import EarlierSteps, TrainView
from canzona_cli.records.records import Note, StageEvent, StepMetrics, ValidationLoss
from canzona_cli.records.words import clean, count, duration, milliseconds, predicted_overhead, step_time
from tests.records.runs import CONFIG, CORPUS, LAYOUT, STEPS, metrics
from tests.waiting import PATIENCE_S

RUN_DIR = Path("runs/qwen3-tiny-20260731-101500")
LONG_DIR = Path("/somewhere") / ("deep/" * 40) / "run"


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console(width: int, *, height: int = 40, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=terminal, legacy_windows=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def frame(view: LiveView, width: int, height: int = 40) -> list[str]:
    """The live region as it would be drawn now."""
    out = console(width, height=height)
    out.print(view)
    return text_of(out).splitlines()


def started(width: int, clock: Clock, steps: int = 140) -> LiveView:
    """A live view that has seen start-up, `steps` steps and two validations."""
    view = LiveView(CONFIG, LAYOUT, console(width, terminal=True), clock=clock)
    view.header(run_dir=RUN_DIR, corpus=CORPUS)
    for stage, seconds in (("start workers", 4.0), ("build model", 1.2), ("build data", 2.0), ("train", 0.0)):
        view.stage(StageEvent(stage=stage, time=clock.now))
        clock.now += seconds
    view.validation(ValidationLoss(step=0, loss=9.7213, time=clock.now))
    for record in metrics(steps):
        clock.now += 0.4
        view.step(record)
    view.validation(ValidationLoss(step=steps, loss=4.8121, time=clock.now))
    return view


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_of_the_live_view_exceeds_the_width(width: int) -> None:
    view = started(width, Clock())
    view.header(run_dir=LONG_DIR, corpus=CORPUS)
    lines = frame(view, width)
    view.close()
    assert len(lines) >= 7
    assert max(map(len, lines)) <= width
    assert any("done, 140 steps" in line for line in screen(text_of(view._console), width))


@pytest.mark.parametrize("width", [80, 120])
def test_a_view_reads_as_it_did(width: int) -> None:
    """The frame while it trains; below it what stays: header, finished stages with their times, last frame, closing."""
    view = started(width, Clock())
    lines = frame(view, width)
    view.close()
    shown = "\n".join([*lines, "", *screen(text_of(view._console), width)]) + "\n"
    assert shown == (Path(__file__).parent / f"live-{width}.txt").read_text(encoding="utf-8")


def test_the_stage_under_way_counts_its_seconds() -> None:
    clock = Clock()
    view = LiveView(CONFIG, LAYOUT, console(80), clock=clock)
    view.stage(StageEvent(stage="start workers", detail="4 ranks"))
    clock.now += 4
    shown = frame(view, 80)
    view.close()
    assert len(shown) == 1
    assert "start workers 4 s  4 ranks" in shown[0]


def test_training_and_validation_alternate_without_a_line_each() -> None:
    clock, out, terminal = Clock(), console(80), console(80, terminal=True)
    views: list[TrainView] = [PlainView(CONFIG, LAYOUT, out, clock=clock)]
    views.append(LiveView(CONFIG, LAYOUT, terminal, clock=clock))
    for view in views:
        for stage in ("build data", "train", "validate", "train", "validate", "train", "finish"):
            view.stage(StageEvent(stage=stage))
        view.close()
    assert [line.split()[1] for line in text_of(out).splitlines()] == ["build", "train", "finish", "done,"]
    assert [line for line in screen(text_of(terminal), 80) if "✓" in line] == ["  ✓ build data 0 s"]


def test_the_end_of_a_stage_is_printed_once_though_two_stages_have_its_name() -> None:
    out = console(80)
    view = PlainView(CONFIG, LAYOUT, out, clock=Clock())
    for share in (0.0, 1.0, 1.0):
        view.progress("tokenising", share)
    assert [line.split()[1:] for line in text_of(out).splitlines()] == [["tokenising", "0%"], ["tokenising", "100%"]]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_short_view_leaves_warnings_and_one_line(terminal: bool) -> None:
    clock, out = Clock(), console(80, terminal=terminal)
    made = LiveView if terminal else PlainView
    view = made(CONFIG, LAYOUT, out, clock=clock, short="run 2 of 3: seed=2")
    view.header(run_dir=RUN_DIR, corpus=CORPUS)
    view.progress("tokenising", 0.5)
    for record in metrics(5):
        clock.now += 5
        view.stage(StageEvent(stage="build model"))
        view.stage(StageEvent(stage="train"))
        view.step(record)
    view.note(Note(text="saved step 5"))
    view.note(Note(text="the loss rose", warning=True))
    view.validation(ValidationLoss(step=5, loss=4.25))
    view.close()
    *others, last = [line for line in screen(text_of(out), 80) if line.strip()]
    assert re.fullmatch(r"run 2 of 3: seed=2: done, 5 steps in 25 s, loss \d\.\d{4}, validation 4\.2500", last.strip())
    assert [line for line in others if "rose" not in line] == []


@pytest.mark.parametrize(
    "record",
    [
        StepMetrics(step=5),
        StepMetrics(step=5, loss=math.nan, lr=math.inf, grad_norm=-math.inf, tokens_per_s=0.0, step_s=math.nan),
        StepMetrics(step=5, loss=1.0, tokens_per_s=-1.0, step_s=-1.0, skipped=-1, time=math.nan),
        StepMetrics(step=10**9, loss=1e308, lr=1e308, grad_norm=1e308, tokens_per_s=1e308, step_s=1e9),
    ],
)
@pytest.mark.parametrize("width", [80, 120])
def test_missing_and_non_finite_numbers_are_shown_as_such(record: StepMetrics, width: int) -> None:
    clock = Clock()
    live = started(width, clock, steps=3)
    out = console(width)
    views: list[TrainView] = [live, PlainView(CONFIG, LAYOUT, out, clock=clock)]
    for view in views:
        clock.now += 5
        view.stage(StageEvent(stage=""))
        view.step(record)
        view.validation(ValidationLoss(step=5, loss=record.loss))
    assert max(map(len, frame(live, width))) <= width
    for view in views:
        view.close("failed", "because")
    assert "failed at step" in text_of(out)


def test_a_loss_that_is_not_a_number_is_counted_and_kept_out_of_the_curve() -> None:
    state = TrainState(config=CONFIG, layout=LAYOUT)
    for loss in (5.0, None, math.nan, 4.0):  # the files hold null for NaN
        state.add_step(StepMetrics(step=1, loss=loss))
    assert state.non_finite == 2
    assert state.losses == [5.0, 4.0]
    assert state.smoothed is not None
    assert 4.0 < state.smoothed < 5.0


GUARDED = ("3 steps skipped: gradients not finite", "2 matrix updates needed a fallback: see logs")


def with_guards(view: TrainView, skipped: int, fallbacks: int) -> None:
    norm = None if skipped else 1.0
    view.step(replace(next(metrics(1)), step=150, skipped=skipped, fallbacks=fallbacks, grad_norm=norm))


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_view_shows_what_the_guards_did_where_they_did_something(width: int) -> None:
    view = started(width, Clock())
    with_guards(view, 0, 0)
    healthy = frame(view, width)
    assert not any("replaced" in line or "skipped" in line for line in healthy)
    with_guards(view, 3, 2)
    shown = frame(view, width)
    view.close()
    assert [line.strip() for line in shown[-2:]] == list(GUARDED)
    assert len(shown) == len(healthy) + 2
    assert max(map(len, shown)) <= width
    assert any(re.search(r"gradient norm +-( |$)", line) for line in shown), "a norm that is not finite is a dash"
    assert "; ".join(GUARDED) in " ".join(" ".join(screen(text_of(view._console), width)).split())


def test_plain_lines_tell_what_the_guards_did_once_and_at_the_end() -> None:
    clock, out = Clock(), console(80)
    view = PlainView(CONFIG, LAYOUT, out, clock=clock)
    for skipped, fallbacks in ((0, 0), (1, 0), (1, 0), (3, 2)):
        clock.now += 5
        with_guards(view, skipped, fallbacks)
    view.close("interrupted", "Ctrl-C")
    lines = text_of(out).splitlines()
    assert sum("1 step skipped: gradients not finite" in line for line in lines) == 1
    assert lines[-1].endswith(f"interrupted at step 150 of 300 after 20 s: Ctrl-C; {'; '.join(GUARDED)}")
    assert [sum(said in line for line in lines) for said in GUARDED] == [2, 2]
    rows = [line.split() for line in lines if re.search(r"150/300 +\d", line)]
    assert [row[4] for row in rows] == ["1.000", "-", "-", "-"]


@pytest.mark.parametrize("width", [80, 120])
def test_a_resumed_run_shows_the_curve_it_goes_on_and_its_own_pace(width: int) -> None:
    """Step, validations and loss history go on; time left is judged by the steps of this launch alone."""
    clock, lines = Clock(), [*metrics(31)]
    earlier = EarlierSteps(
        step=30, origin="step-00000030", metrics=lines[:30], validations=[ValidationLoss(step=0, loss=9.7213)]
    )
    out, pipe = console(width, terminal=True), console(200)
    live, plain = LiveView(CONFIG, LAYOUT, out, clock=clock), PlainView(CONFIG, LAYOUT, pipe, clock=clock)
    views: list[ConsoleView] = [live, plain]
    for view in views:
        view.header(run_dir=RUN_DIR, corpus=CORPUS, earlier=earlier)
        view.step(lines[30])
        view.note(Note(text="saved step 31: 13.0 MiB in 21.0 ms, training waited 4.00 ms"))
        view.note(Note(text="rank 2 is a straggler", warning=True))
        view.validation(ValidationLoss(step=31, loss=4.8121, sets={"code": 4.5, "web": None}))
        view.close()
    assert (live.state.step, len(live.state.losses)) == (31, 31)
    assert live.state.validations == [(0, 9.7213), (31, 4.8121)]
    assert live.state.eta == pytest.approx((STEPS - 31) * 0.4)
    shown, told = text_of(out), text_of(pipe)
    for words in ("from step 30", "straggler", "code 4.5000"):
        assert words in shown
        assert words in told
    assert "resumes    from step 30 (step-00000030)" in told
    assert "warning: rank 2 is a straggler" in told
    assert "(from 9.7213, -50.5%)" in told
    assert not re.search(r"^.* 1/300 ", told, re.MULTILINE), "steps of the launch before are not told again"


def test_eta_is_the_pace_by_wall_clock_and_counts_down() -> None:
    clock = Clock()
    state = TrainState(config=CONFIG, layout=LAYOUT, clock=clock)
    for step in range(1, 101):
        clock.now += 1.0
        # Steps take half a second; the other half is validation and data, which time left must contain too.
        state.add_step(StepMetrics(step=step, loss=1.0, step_s=0.5, time=clock.now))
    assert state.eta == pytest.approx(200.0)
    clock.now += 5
    assert state.eta == pytest.approx(195.0)
    assert not state.stalled
    clock.now += 60
    assert state.stalled


def plain_lines(step_s: float, steps: int = STEPS) -> list[str]:
    clock, out = Clock(), console(80)
    view = PlainView(CONFIG, LAYOUT, out, clock=clock)
    view.validation(ValidationLoss(step=0, loss=9.7))
    for record in metrics(steps, step_s):
        clock.now += step_s
        view.step(record)
    view.validation(ValidationLoss(step=steps, loss=4.8))
    view.close()
    return text_of(out).splitlines()


def test_plain_lines_come_at_most_every_two_seconds_but_never_without_the_last_step() -> None:
    fast = [line for line in plain_lines(0.1) if re.search(r"\d/300 +\d", line)]
    assert len(fast) == pytest.approx(STEPS * 0.1 / 2, abs=2)
    assert "300/300" in fast[-1]
    slow = [line for line in plain_lines(5.0, 20) if re.search(r"\d/300 +\d", line)]
    assert len(slow) == 20


def test_plain_lines_have_fixed_columns_and_every_validation() -> None:
    lines = plain_lines(0.1)
    titles = next(line for line in lines if "grad norm" in line)
    rows = [line for line in lines if re.search(r"\d/300 +\d", line)]
    assert {len(row) for row in rows} == {len(titles)}
    assert len(titles) <= 80
    assert any("validation loss 9.7000" in line for line in lines)
    assert any("validation loss 4.8000 (from 9.7000, -50.5%)" in line for line in lines)
    assert lines[-1].strip().endswith("done, 300 steps in 30 s")


def test_an_interrupted_plain_run_still_prints_its_newest_step() -> None:
    lines = plain_lines(0.1, 37)
    assert any("37/300" in line and "grad norm" not in line and "validation" not in line for line in lines)


def test_closing_twice_says_it_once() -> None:
    out = console(80)
    view = PlainView(CONFIG, LAYOUT, out)
    view.close("interrupted", "Ctrl-C")
    view.close("failed", "again")
    assert text_of(out).count("Ctrl-C") == 1
    assert "again" not in text_of(out)


def test_the_view_suits_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_view(CONFIG, LAYOUT, console(80, terminal=True)), LiveView)
    assert isinstance(make_view(CONFIG, LAYOUT, console(80)), PlainView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_view(CONFIG, LAYOUT, console(80, terminal=True)), PlainView)


def test_gpu_runs_speak_of_gpus() -> None:
    config = replace(CONFIG, cluster=replace(CONFIG.cluster, device="cuda", name="h100"))
    view = LiveView(config, LAYOUT, console(80), clock=Clock())
    view.header(run_dir=RUN_DIR)
    view.step(next(metrics(1)))
    shown = "\n".join(frame(view, 80))
    view.close()
    assert "per GPU" in shown
    assert "4 GPUs: TP 2 × DP 2 on h100" in text_of(view._console)


SCRIPT = """
import sys, time
from pathlib import Path
from rich.console import Console
from canzona_cli.records.records import StageEvent, ValidationLoss
from canzona_cli.cli.views.train import make_view
from tests.records.runs import CONFIG, CORPUS, LAYOUT, metrics
view = make_view(CONFIG, LAYOUT, Console())
view.header(run_dir=Path("runs/x"), corpus=CORPUS)
view.progress("tokenise", 0.5)
time.sleep(0.3)
view.progress("tokenise", 1.0)
view.stage(StageEvent(stage="start workers"))
view.stage(StageEvent(stage="train"))
view.validation(ValidationLoss(step=0, loss=9.7))
for record in metrics(200):
    view.step(record)
    time.sleep(0.004)
view.close("interrupted", "Ctrl-C")
"""


@cache
def on_terminal(width: int, **variables: str) -> str:
    """Returns what the script writes to a real pseudo-terminal of that width."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    plain = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}}
    environment = {**plain, "TERM": "xterm-256color", "PYTHONUTF8": "1", **variables}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    received = b""
    try:
        while chunk := os.read(parent, 65536):
            received += chunk
    except OSError:  # Linux says EIO once the other side has closed
        pass
    finally:
        os.close(parent)
    assert process.wait(PATIENCE_S) == 0, received.decode()
    return received.decode()


def screen(received: str, width: int) -> list[str]:
    """The lines a terminal would end up with, for the few control sequences that rich uses."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", received):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.endswith("A") and token.startswith("\x1b["):
            row -= int(token[2:-1] or 1)
        elif token.startswith("\x1b[") and token.endswith("K"):
            lines[row] = ""
        elif not token.startswith("\x1b") and token != "\r":
            lines[row] += token
            assert len(lines[row]) <= width, f"wider than the terminal: {lines[row]!r}"
    return lines


@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.sweep)])
def test_on_a_real_terminal_one_frame_is_redrawn_in_place_and_the_last_one_stays(width: int) -> None:
    received = on_terminal(width)
    shown = screen(received, width)
    assert received.count("tokens/s") > 2, "the frame was redrawn"
    assert sum("tokens/s" in line for line in shown) == 1, "in place"
    assert any("200/300" in line for line in shown)
    assert any("✓ tokenise" in line for line in shown)
    assert any("interrupted at step 200 of 300" in line for line in shown)
    assert received.rfind("\x1b[?25h") > received.rfind("\x1b[?25l"), "the cursor is visible again"


def test_no_color_is_honoured() -> None:
    colours = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
    assert colours.search(on_terminal(80))
    assert not colours.search(on_terminal(80, NO_COLOR="1"))


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (duration, 4.2, "4 s"),
        (duration, 125, "2 min 05 s"),
        (duration, 12_000, "3 h 20 min"),
        (duration, 187_200, "2 d 4 h"),
        (duration, math.nan, "-"),
        (count, 999.9, "1 k"),
        (count, 20_480, "20.5 k"),
        (count, 999_999, "1 M"),
        (count, 3.12e10, "31.2 B"),
        (milliseconds, 0.0000412, "0.041"),
        (milliseconds, 1.2041, "1,204"),
        (predicted_overhead, 0.0066, "+1%"),
        (predicted_overhead, -0.134, "-13%"),
        (predicted_overhead, 0.0049, "<1%"),
        (predicted_overhead, None, "-"),
        (step_time, 0.0841, "84.1 ms"),
        (step_time, 2.314, "2.31 s"),
        (clean, "a\x1b[1m\u202eb", "a\\x1b[1m\\u202eb"),
    ],
)
def test_numbers_and_words_read_well(function: Callable[[object], str], value: object, expected: str) -> None:
    assert function(value) == expected


def test_sparkline_and_bar_follow_their_values() -> None:
    assert sparkline([1, 2, 3, 4], 10) == "▁▃▆█"
    assert sparkline([1, 1], 10) == "▅▅"
    assert len(sparkline(range(1000), 30)) == 30
    assert [progress_bar(share, 8).plain for share in (0, 0.5, 1)] == ["────────", "━━━╸────", "━━━━━━━━"]
