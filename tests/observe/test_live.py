"""The display: every fact in it, at every width; and how it behaves on a terminal."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import BatchGroup, Segment
from dora_rl.observe.live import ASCII, LiveDisplay, Status, duration, render, sparkline
from dora_rl.observe.placements import Placements


@dataclass
class Step:
    step: int
    step_s: float = 4.0
    train_s: float = 2.5
    reward_mean: float = 0.5
    tokens_per_s: float = 2310.0
    staleness_mean: float = 1.25
    staleness_max: int = 3
    outstanding: int = 38
    bubble_share: float = 0.04
    filtered: int = 5
    failed: int = 0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def status(clock: Clock) -> Status:
    return make_status(clock)


def make_status(clock: Callable[[], float], *, resumed: bool = False) -> Status:
    return Status(
        title="tiny · grpo",
        steps=60,
        max_staleness=3,
        instances=2,
        slots=32,
        groups_per_step=16,
        placements=Placements(),
        resumed=resumed,
        clock=clock,
    )


def tell(status: Status, now: float, event: Event, *commands: Command) -> None:
    status.placements.observe(now, event, commands)
    status.observe(now, event, commands)


def lines(status: Status, width: int = 80, **options: object) -> dict[str, str]:
    """The display as text, by the names on the left."""
    console = Console(record=True, width=width, file=io.StringIO(), color_system="truecolor")
    console.print(render(status, width, **options), end="")  # type: ignore[arg-type]
    text = console.export_text()
    found: dict[str, str] = {}
    for line in text.splitlines():
        assert len(line) <= width
        name, value = line[:11].strip(), line[11:]
        found[name if name else "legend"] = value
    return found


def start(status: Status, counts: dict[int, int]) -> None:
    for name in range(status.instances):
        tell(status, 0.0, e.InstanceJoined(name, 0, 32, 1000, 4))
    fence = 0
    for version, count in counts.items():
        for _ in range(count):
            fence += 1
            tell(status, 1.0, e.TimerFired(), c.Start(fence, fence, 0, version))


def test_before_anything_is_up(status: Status, clock: Clock) -> None:
    clock.now += 3
    shown = lines(status)
    assert "loading the model, 3 s" in shown["trainer"]
    assert "0 of 2 up" in shown["rollout"]
    assert shown["step"].startswith("0/60 ")
    assert "64 of 64 slots idle" in shown["legend"]
    assert "3 s elapsed" in "".join(shown.values())


def test_before_the_first_step(status: Status, clock: Clock) -> None:
    clock.now += 5
    tell(status, 0.0, e.WeightsPublished(0, "d"))
    start(status, {0: 20})
    finished = e.TrajectoryFinished(1, 1, 2, (Segment(0, "d", 2),))
    tell(status, 2.0, finished, c.Score(1, 1))
    tell(status, 2.0, e.TrajectoryScored(1, 1))
    tell(status, 2.0, e.GroupJudged(0))
    tell(status, 2.0, e.GroupJudged(1, "all alike"))
    clock.now += 2
    shown = lines(status)
    assert "waiting for batch 1, 2 s" in shown["trainer"]
    assert "loaded after 5.0 s" in shown["trainer"]
    assert "2 of 2 up" in shown["rollout"] and "1 trajectories finished" in shown["rollout"]
    assert "1 trajectories scored" in shown["reward"]
    assert "1 ready (a batch is 16)" in shown["groups"]
    assert "v0 19" in shown["legend"] and "45 of 64 slots idle" in shown["legend"]


def test_in_the_middle(status: Status, clock: Clock) -> None:
    tell(status, 0.0, e.WeightsPublished(0, "d"))
    start(status, {9: 3, 10: 9, 11: 33})
    for step in range(12):
        clock.now += 4
        status.stepped(Step(step + 1, reward_mean=0.2 + step / 50))
    for group in range(20):
        tell(status, 2.0, e.GroupJudged(group))
    batch = tuple(BatchGroup(group, 11, (group,)) for group in range(16))
    tell(status, 3.0, e.TimerFired(), c.Train(12, batch))
    tell(status, 3.0, e.TimerFired(), c.Train(12, batch))  # the core may repeat itself
    clock.now += 1
    shown = lines(status)
    assert shown["step"].startswith("12/60 ") and "20%" in shown["step"]
    assert "3:11 left" in shown["step"]  # 48 steps of 4 s, and 1 s of the next is over
    assert shown["reward"].startswith("0.420") and "0.200 at first" in shown["reward"]
    assert "v9 3  v10 9  v11 33  19 of 64 slots idle" in shown["legend"]
    assert "mean 1.25, max 3 (K = 3)" in shown["staleness"]
    assert "2,310 trained, bubble 4%" in shown["rollout"]
    assert "training step 13, 1 s  (step 4.0 s, train 2.5 s)" in shown["trainer"]
    assert "4 ready (a batch is 16), 38 outstanding, 5 filtered, 0 failed" in shown["groups"]


def test_every_version_that_runs_is_in_the_bar(status: Status) -> None:
    start(status, {1: 1, 2: 62, 3: 1})
    text = render(status, 79)
    bar = next(line for line in text.split("\n") if line.plain.startswith("versions"))
    colours = {str(span.style) for span in bar.spans} & {"cyan", "green", "yellow", "magenta"}
    assert len(colours) == 3


def test_the_pace_of_late_is_what_counts(status: Status, clock: Clock) -> None:
    assert status.eta_s is None
    clock.now += 1000  # loading
    tell(status, 0.0, e.WeightsPublished(0, "d"))
    clock.now += 30
    status.stepped(Step(1))
    assert status.eta_s == pytest.approx(59 * 30)
    for step in range(2, 32):
        clock.now += 2
        status.stepped(Step(step))
    assert status.eta_s == pytest.approx(29 * 2)


def test_a_resumed_run_begins_where_it_was(clock: Clock) -> None:
    status = make_status(clock, resumed=True)
    status.resuming(Placements(), ready=2)
    status.resumed([Step(step, reward_mean=step / 100) for step in range(1, 41)], [(20, 0.6)])
    shown = lines(status)
    assert shown["step"].startswith("40/60 ") and "left" not in shown["step"]
    assert shown["reward"].startswith("0.400") and "0.010 at first" in shown["reward"]
    assert "0.600 of version 20" in shown["evaluation"]
    assert shown["trainer"].startswith("loading the checkpoint")
    clock.now += 50  # the parts start
    assert "loaded" not in lines(status)["trainer"]
    tell(status, 300.0, e.InstanceJoined(0, 1, 32, 1000, 4))
    clock.now += 1
    status.stepped(Step(41))  # most of its batch was there
    assert lines(status)["step"].startswith("41/60 ")
    assert status.eta_s is None
    clock.now += 3
    status.stepped(Step(42))
    assert status.eta_s == pytest.approx(18 * 3)


def test_a_resume_shows_what_is_ready_and_nothing_that_ran(status: Status) -> None:
    start(status, {0: 20})
    tell(status, 2.0, e.GroupJudged(0))
    status.resuming(Placements(), ready=3)
    shown = lines(status)
    assert shown["groups"].startswith("3 ready")
    assert not status.placements.running


def test_tokens_are_rated_over_the_last_seconds(status: Status) -> None:
    assert status.generated_per_s is None
    for second in range(40):
        status.used(float(second), 0, 100 * second)
        status.used(float(second), 1, 1000 if second > 5 else 0)
    assert status.generated_per_s == pytest.approx(100, rel=0.1)
    assert "100 tokens/s sampled" in lines(status)["rollout"]


def test_a_failed_batch_is_named(status: Status) -> None:
    tell(status, 1.0, e.BatchFailed(3, "out of memory"))
    assert "step 4 again: out of memory" in lines(status)["trainer"]


def test_the_end_is_not_called_a_wait(status: Status) -> None:
    tell(status, 1.0, e.WeightsPublished(60, "d"), c.Halt(True, "60 steps trained"))
    assert "the last checkpoint and evaluation, 0 s" in lines(status)["trainer"]


def test_evaluations_are_the_last_and_the_first(status: Status) -> None:
    assert "evaluation" not in lines(status)
    status.evaluated(0, 0.25)
    assert lines(status)["evaluation"] == "0.250 of version 0"
    status.evaluated(20, 0.3)
    status.evaluated(40, 0.75)
    assert lines(status)["evaluation"] == "0.750 of version 40, 0.250 of version 0"


@given(
    width=st.integers(20, 250),
    counts=st.dictionaries(st.integers(0, 2000), st.integers(1, 40), max_size=9),
    rewards=st.lists(st.floats(-1e3, 1e3), max_size=50),
)
def test_it_fits_wherever_it_is_shown(
    width: int, counts: dict[int, int], rewards: list[float]
) -> None:
    clock = Clock()
    status = make_status(clock)
    start(status, counts)
    for step, reward in enumerate(rewards):
        clock.now += 1
        status.stepped(Step(step, reward_mean=reward, failed=3))
    status.evaluated(3, 0.5)
    status.stopping = True
    text = render(status, width)
    rows = text.plain.split("\n")
    assert len(rows) == 11  # fits 24 lines with room for what stands above
    assert all(len(row) <= max(30, width) for row in rows)
    assert render(status, width, ASCII).plain.isascii() or not status.title.isascii()


def test_ascii_where_the_terminal_knows_no_more(status: Status) -> None:
    start(status, {0: 10})
    status.title = "plain"
    status.stepped(Step(0))
    status.stepped(Step(1, reward_mean=0.9))
    assert render(status, 79, ASCII).plain.isascii()
    assert not render(status, 79).plain.isascii()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 100))
def test_a_sparkline_keeps_order_and_length(values: list[float], cells: int) -> None:
    line = sparkline(values, cells, "01234567")
    assert len(line) == min(cells, len(values))
    if len(values) <= cells and max(values) - min(values) > 1e-3:
        assert line[values.index(min(values))] == "0"
        assert line[values.index(max(values))] == "7"
    if values == sorted(values):
        assert list(line) == sorted(line)


def test_a_flat_course_is_neither_high_nor_low() -> None:
    assert sparkline([0.5] * 3, 10, "01234567") == "444"
    assert sparkline([], 10) == ""


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.9, "0 s"), (59.9, "59 s"), (60, "1:00"), (3725, "1:02:05")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def screen(written: str, width: int) -> list[str]:
    """What a terminal shows of what was written; knows what rich writes, and no more."""
    rows: list[list[str]] = [[]]
    row = column = position = 0
    while position < len(written):
        mark = written[position]
        position += 1
        if mark == "\x1b":
            end = position + 1
            while not written[end].isalpha():
                end += 1
            number, what = written[position + 1 : end], written[end]
            position = end + 1
            if what == "A":
                row = max(0, row - int(number or 1))
            elif what == "K":
                rows[row] = []
            elif what == "J":
                rows, row, column = [[]], 0, 0
            elif what == "H":
                row = column = 0
        elif mark == "\n":
            row, column = row + 1, 0
            if row == len(rows):
                rows.append([])
        elif mark == "\r":
            column = 0
        else:
            assert column < width, "a line was folded"
            line = rows[row]
            line.extend(" " * (column + 1 - len(line)))
            line[column] = mark
            column += 1
    return ["".join(line).rstrip() for line in rows]


def shown(file: io.StringIO, width: int) -> Sequence[str]:
    return [row for row in screen(file.getvalue(), width) if row]


def test_it_is_drawn_over_itself(status: Status) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24)
    with LiveDisplay(status, console) as display:
        for step in range(5):
            status.stepped(Step(step + 1))
            display.refresh()
        status.stopping = True
    rows = shown(file, 80)
    assert len(rows) == 10  # once, however often it was drawn
    assert any("5/60" in row for row in rows)
    assert "stopping: the step is finished" in rows[-1]


def test_a_narrower_terminal_begins_anew(status: Status) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, height=24)
    with LiveDisplay(status, console) as display:
        display.refresh()
        console.width = 60
        written = len(file.getvalue())
        display.refresh()
        after = file.getvalue()[written:]
    rows = [row for row in screen(after, 60) if row]
    assert "\x1b[2J" in after
    assert sum("elapsed" in row for row in rows) == 1
