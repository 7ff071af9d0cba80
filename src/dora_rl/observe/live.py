"""A run on a terminal while it goes: what is known of it, and how that looks.

`Status` keeps the facts, from plain calls that anyone can make; `render` is a function of them;
`LiveDisplay` shows it a few times a second from a thread of its own, so that a long step does
not freeze it. It only reads: a run does not notice that it is watched.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import InstanceId, Version
from dora_rl.observe.placements import Placements

PERIOD_S = 0.25
_WINDOW_S = 10.0  # over which the rate of generation is taken
_RECENT = 10  # steps from which the rest of the run is estimated
_WIDEST = 120  # columns: longer bars say no more
_LABEL = 11  # columns of the names on the left
_PALETTE = ("cyan", "green", "yellow", "magenta", "blue", "red")  # each version takes the next


class Glyphs(NamedTuple):
    """What bars and courses are drawn with."""

    full: str
    rest: str
    levels: str


UNICODE = Glyphs("█", "─", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#", "-", "_.:-=+*#")


class StepLike(Protocol):
    """One train step, as far as it is shown; counted from 1."""

    @property
    def step(self) -> int: ...
    @property
    def step_s(self) -> float: ...
    @property
    def train_s(self) -> float: ...
    @property
    def reward_mean(self) -> float: ...
    @property
    def tokens_per_s(self) -> float: ...
    @property
    def staleness_mean(self) -> float: ...
    @property
    def staleness_max(self) -> int: ...
    @property
    def outstanding(self) -> int: ...
    @property
    def bubble_share(self) -> float: ...
    @property
    def filtered(self) -> int: ...
    @property
    def failed(self) -> int: ...


class Status:
    """What is known of a run. Times are of the run's clock, but for `elapsed_s`: real seconds."""

    def __init__(
        self,
        *,
        title: str,
        steps: int,
        max_staleness: int,
        instances: int,
        slots: int,
        groups_per_step: int,
        placements: Placements,
        resumed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title
        self.steps = steps
        self.max_staleness = max_staleness
        self.instances = instances
        self.slots = slots * instances
        self.groups_per_step = groups_per_step
        self.placements = placements
        self._resumed = resumed  # by this process
        self._clock = clock
        self._began = clock()
        self.stopping = False
        self.rewards: list[float] = []
        self.evaluations: list[tuple[Version, float]] = []
        self.last: StepLike | None = None
        self.version: Version = 0  # the newest that was published
        self.loaded_after_s: float | None = None
        self.activity = "loading the model"
        self._activity_since = self._began
        self.finished = 0
        self.scored = 0
        self.ready = 0  # groups
        self._batch: int | None = None
        self._step_ends: deque[float] = deque([self._began], maxlen=_RECENT + 1)
        self._tokens: dict[InstanceId, int] = {}
        self._generated: deque[tuple[float, int]] = deque()

    # What is told

    def resuming(self, placements: Placements, ready: int) -> None:
        """What follows is told to these placements as well; so many groups are ready."""
        self.placements = placements
        self.finished = self.scored = 0
        self.ready = ready
        self._batch = None

    def resumed(
        self, steps: Sequence[StepLike], evaluations: Sequence[tuple[Version, float]]
    ) -> None:
        """So much had come of the run when it was resumed."""
        self.rewards = [step.reward_mean for step in steps]
        self.last = steps[-1] if steps else None
        self.evaluations = list(evaluations)
        self._turn_to("loading the checkpoint")

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """The core has handled an event, and the placements have been told."""
        match event:
            case e.WeightsPublished():
                if event.version == 0 and not self._resumed:
                    self.loaded_after_s = self.elapsed_s
                self.version = max(self.version, event.version)
                self._ready_to_step()
                self._turn_to(f"waiting for batch {event.version + 1}")
            case e.InstanceJoined():
                self._ready_to_step()
            case e.BatchTrained():
                self._batch = None
                self._turn_to(f"publishing version {event.step + 1}")
            case e.BatchFailed() | e.BatchRejected():
                self._batch = None
                self._turn_to(f"step {event.step + 1} again: {event.reason}")
            case e.TrajectoryFinished():
                self.finished += 1
            case e.TrajectoryScored():
                self.scored += 1
            case e.GroupJudged(filtered=None):
                self.ready += 1
        for command in commands:
            if isinstance(command, c.Train) and command.step != self._batch:
                self._batch = command.step
                self.ready -= len(command.groups)
                self._turn_to(f"training step {command.step + 1}")
            elif isinstance(command, c.Halt):
                self._turn_to("the last checkpoint and evaluation")

    def used(self, now: float, instance: InstanceId, tokens: int) -> None:
        """An instance has sampled so many tokens since it started."""
        self._tokens[instance] = tokens
        self._generated.append((now, sum(self._tokens.values())))
        while self._generated[0][0] < now - _WINDOW_S and len(self._generated) > 2:
            self._generated.popleft()

    def stepped(self, record: StepLike) -> None:
        """A step has been trained."""
        self.last = record
        self.rewards.append(record.reward_mean)
        self._step_ends.append(self._clock())

    def evaluated(self, version: Version, reward: float) -> None:
        """A version has answered the evaluation set."""
        self.evaluations.append((version, reward))

    def _ready_to_step(self) -> None:
        """What was before is not counted into the pace of the steps."""
        if len(self._step_ends) == 1:
            self._step_ends[0] = self._clock()

    def _turn_to(self, activity: str) -> None:
        self.activity = activity
        self._activity_since = self._clock()

    # What follows

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    @property
    def activity_s(self) -> float:
        """How long the trainer has been at what it does."""
        return self._clock() - self._activity_since

    @property
    def steps_done(self) -> int:
        return self.version if self.last is None else max(self.version, self.last.step)

    @property
    def eta_s(self) -> float | None:
        """Real time that the remaining steps take at the pace of the last ones."""
        ends = list(self._step_ends)
        # The first one of a resumed run found a part of its batch complete.
        if len(ends) < (3 if self._resumed else 2):
            return None
        if len(ends) > 2 and len(ends) <= _RECENT:
            ends = ends[1:]  # the first step had no work of others to begin with
        pace_s = (ends[-1] - ends[0]) / (len(ends) - 1)
        return max(0.0, (self.steps - self.steps_done) * pace_s - (self._clock() - ends[-1]))

    @property
    def generated_per_s(self) -> float | None:
        """Sampled tokens a second, of late, whatever becomes of them."""
        samples = list(self._generated)
        if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
            return None
        # A new incarnation counts from 0 again.
        return max(0.0, (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0]))


# How it looks


def render(status: Status, width: int, glyphs: Glyphs = UNICODE) -> Text:
    """The whole display as lines no longer than `width`."""
    width = max(30, min(width, _WIDEST))
    lines = [
        _header(status, width),
        _progress(status, width, glyphs),
        _reward(status, width, glyphs),
        *_versions(status, width, glyphs),
        _named("staleness", _staleness(status)),
        _named("rollout", _rollout(status)),
        _named("trainer", _trainer(status)),
        _named("groups", _groups(status)),
    ]
    if status.evaluations:
        lines.append(_named("evaluation", _evaluation(status)))
    if status.stopping:
        lines.append(
            Text("stopping: the step is finished, all is saved; Ctrl-C again ends at once")
        )
    for line in lines:
        line.truncate(width)
    return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)


def _header(status: Status, width: int) -> Text:
    elapsed = f"{duration(status.elapsed_s)} elapsed"
    title = Text(status.title, style="bold")
    title.truncate(max(0, width - len(elapsed) - 2), overflow="ellipsis")
    title.append(" " * max(2, width - title.cell_len - len(elapsed)))
    return title.append(elapsed, style="not bold dim")


def _progress(status: Status, width: int, glyphs: Glyphs) -> Text:
    done, total = status.steps_done, status.steps
    eta = "" if status.eta_s is None else f"  {duration(status.eta_s)} left"
    count = f"{done}/{total} "
    share = f" {done / total:4.0%}{eta}"
    cells = max(1, width - _LABEL - len(count) - len(share))
    full = round(cells * min(1.0, done / total))
    bar = Text(count).append(glyphs.full * full, style="green")
    bar.append(glyphs.rest * (cells - full), style="bright_black").append(share)
    return _named("step", bar)


def _reward(status: Status, width: int, glyphs: Glyphs) -> Text:
    course = status.rewards
    if not course:
        what = f"{status.scored} trajectories scored" if status.scored else "none yet"
        return _named("reward", Text(f"{what}; the first step is trained at a full batch"))
    span = f"  {course[0]:.3f} at first" if len(course) > 1 else ""
    line = Text(f"{course[-1]:.3f}  ", style="bold")
    cells = max(1, width - _LABEL - line.cell_len - len(span))
    line.append(sparkline(course, cells, glyphs.levels), style="not bold green")
    return _named("reward", line.append(span, style="not bold"))


def _versions(status: Status, width: int, glyphs: Glyphs) -> list[Text]:
    """Slots as one bar, each version in its colour, and what the colours mean."""
    running = status.placements.versions_running()
    cells, slots = max(1, width - _LABEL), max(status.slots, sum(running.values()), 1)
    bar, legend = Text(), Text()
    drawn = seen = 0
    for version, count in running.items():
        seen += count
        end = max(drawn + 1, round(cells * seen / slots))  # what runs is seen, however little
        bar.append(glyphs.full * (end - drawn), style=_colour(version))
        drawn = end
        legend.append(f"v{version} ", style=_colour(version)).append(f"{count}  ")
    bar.append(glyphs.rest * (cells - drawn), style="bright_black")
    idle = slots - seen
    legend.append(f"{idle} of {slots} slots idle", style="dim" if running else "")
    return [_named("versions", bar), _named("", legend)]


def _staleness(status: Status) -> Text:
    last = status.last
    if last is None:
        return Text(f"none yet (K = {status.max_staleness})")
    return Text(
        f"mean {last.staleness_mean:.2f}, max {last.staleness_max} (K = {status.max_staleness})"
    )


def _rollout(status: Status) -> Text:
    up, last = len(status.placements.instances), status.last
    parts = [f"{up} of {status.instances} up"]
    if status.generated_per_s is not None:
        parts.append(f"{status.generated_per_s:,.0f} tokens/s sampled")
    if last is not None:
        parts.append(f"{last.tokens_per_s:,.0f} trained, bubble {last.bubble_share:.0%}")
    elif status.finished:
        parts.append(f"{status.finished} trajectories finished")
    return Text(", ".join(parts), style="yellow" if up < status.instances else "")


def _trainer(status: Status) -> Text:
    line = Text(f"{status.activity}, {status.activity_s:.0f} s")
    if status.last is not None:
        line.append(f"  (step {status.last.step_s:.1f} s, train {status.last.train_s:.1f} s)")
    elif status.loaded_after_s is not None:
        line.append(f"  (loaded after {status.loaded_after_s:.1f} s)")
    return line


def _groups(status: Status) -> Text:
    ready = f"{max(0, status.ready)} ready (a batch is {status.groups_per_step})"
    last = status.last
    if last is None:
        return Text(ready)
    line = Text(f"{ready}, {last.outstanding} outstanding, {last.filtered} filtered, ")
    return line.append(f"{last.failed} failed", style="bold red" if last.failed else "")


def _evaluation(status: Status) -> Text:
    version, reward = status.evaluations[-1]
    line = Text(f"{reward:.3f}", style="bold").append(f" of version {version}", style="not bold")
    if len(status.evaluations) > 1:
        version, reward = status.evaluations[0]
        line.append(f", {reward:.3f} of version {version}", style="not bold")
    return line


def _named(name: str, value: Text) -> Text:
    return Text(f"{name:<{_LABEL}}", style="dim", end="").append_text(_plain(value))


def _plain(value: Text) -> Text:
    """Free of the dimness of what stands before it."""
    return Text("", style="not dim").append_text(value)


def _colour(version: Version) -> str:
    return _PALETTE[version % len(_PALETTE)]


def sparkline(values: Sequence[float], cells: int, levels: str = UNICODE.levels) -> str:
    """The course of a figure in one line: means of equal parts, between the least and the most."""
    if not values or cells < 1:
        return ""
    parts = min(cells, len(values))
    bounds = [len(values) * part // parts for part in range(parts + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(bounds)]
    least, most = min(means), max(means)
    if most <= least:
        return levels[len(levels) // 2] * parts
    top = len(levels) - 1
    return "".join(levels[round((mean - least) / (most - least) * top)] for mean in means)


def duration(seconds: float) -> str:
    """`45 s`, `3:05`, `1:02:03`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class LiveDisplay:
    """Shows a status on a terminal until the block ends."""

    def __init__(self, status: Status, console: Console) -> None:
        self._status = status
        self._console = console
        self._glyphs = ASCII if console.options.ascii_only else UNICODE
        self._width = console.width
        self._live = self._new()
        self._drawing = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="display", daemon=True)

    def __enter__(self) -> Self:
        self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self.refresh()
        self._live.stop()

    def say(self, line: str) -> None:
        """A line that stays, above the display."""
        with self._drawing:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def refresh(self) -> None:
        """Draw what is known now."""
        with self._drawing:
            width = self._console.width
            if width < self._width:
                # The terminal has folded the longer lines: what was drawn is not where it was.
                self._live.stop()
                self._console.clear()
                self._live = self._new()
                self._live.start()
            self._width = width
            # One column stays free: a line that fills the last one is folded by some terminals.
            self._live.update(render(self._status, width - 1, self._glyphs), refresh=True)

    def _new(self) -> Live:
        return Live(console=self._console, auto_refresh=False, vertical_overflow="crop")

    def _loop(self) -> None:
        while not self._over.wait(PERIOD_S):
            self.refresh()
