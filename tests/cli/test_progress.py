"""Progress on stderr: what is written, when, and to whom."""

import io
import threading

import pytest

from dora_rl.cli import _progress
from dora_rl.cli._progress import SILENCE_S, STEP_S, Progress
from tests.patience import PATIENCE_S


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def progress(terminal: bool) -> tuple[Progress, Stream, Clock]:
    stream, clock = Stream(terminal), Clock()
    return Progress(stream, clock), stream, clock


def test_every_phase_is_a_plain_line_where_there_is_no_terminal() -> None:
    shown, stream, _ = progress(terminal=False)
    for name in ("loading", "warming up", "measuring"):
        shown.say(name, True)
    shown.clear()
    assert stream.getvalue() == "loading\nwarming up\nmeasuring\n"


def test_plain_lines_of_one_phase_are_seconds_apart() -> None:
    shown, stream, clock = progress(terminal=False)
    shown.say("batch 8", True)
    for number in range(100):
        clock.now += STEP_S / 10
        shown.say(f"batch 8, repeat {number}", False)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 + 10
    assert lines[1] == f"batch 8, repeat 9 ({STEP_S:g} s)"


def test_a_phase_that_says_nothing_is_shown_to_be_alive() -> None:
    shown, stream, clock = progress(terminal=False)
    shown.tick()  # nothing has begun
    shown.say("a long phase", True)
    for _ in range(40):
        clock.now += SILENCE_S / 10
        shown.tick()
    assert stream.getvalue().splitlines() == [
        "a long phase",
        *(f"a long phase ({SILENCE_S * count:.0f} s)" for count in (1, 2, 3, 4)),
    ]
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_on_a_terminal_one_line_is_written_over_and_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    shown, stream, clock = progress(terminal=True)
    shown.say("one", True)
    shown.say("one, a step", False)
    clock.now += 3
    shown.tick()
    shown.say("x" * 50, True)
    shown.clear()
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().split("\r\x1b[K")[1:] == [
        "one",
        "one, a step",
        "one, a step (3 s)",
        "x" * 19,  # a line that wraps could not be written over
        "",
    ]


def test_whoever_cannot_be_written_to_ends_no_measurement() -> None:
    class Gone(Stream):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    shown = Progress(Gone(False))
    shown.say("a phase", True)
    shown.clear()


def test_time_is_kept_by_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ticked = threading.Event()
    monkeypatch.setattr(_progress, "TICK_S", 0.001)
    monkeypatch.setattr(Progress, "tick", lambda self: ticked.set())
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), _progress.shown():
        assert ticked.wait(PATIENCE_S)
        raise KeyboardInterrupt
    assert threading.active_count() == before
