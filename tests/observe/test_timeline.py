"""The timeline drawn of a stream: short stories, told by hand."""

import json
import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import BatchGroup, Move, Placement, Segment
from dora_rl.observe.placements import Placements
from dora_rl.observe.timeline import Rows, Timeline
from dora_rl.observe.trace import TraceFile


class Story:
    """A timeline that writes into memory, and what stands there at the end."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self.placements = Placements()
        self.timeline = Timeline(TraceFile(self._text.append), "run", self.placements)

    def tell(self, now: float, event: Event, *commands: Command) -> None:
        self.placements.observe(now, event, commands)
        self.timeline.observe(now, event, commands)

    def end(self, now: float) -> None:
        self.timeline.end(now)
        events: list[dict[str, Any]] = json.loads("".join(self._text))
        self.processes = {
            x["pid"]: x["args"]["name"] for x in events if x["name"] == "process_name"
        }
        self.lanes = {
            (x["pid"], x["tid"]): x["args"]["name"] for x in events if x["name"] == "thread_name"
        }
        self.spans: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        self.details: dict[str, str] = {}
        for x in events:
            if x["ph"] == "X":
                start = x["ts"] / 1e6
                where = f"{self.processes[x['pid']]} / {self.lanes[x['pid'], x['tid']]}"
                self.spans[where].append((start, start + x["dur"] / 1e6, x["name"]))
                self.details[x["name"]] = x["args"].get("detail", "")


def up(story: Story, *, instances: int = 1, version_slots: int = 2) -> None:
    story.tell(1.0, e.WeightsPublished(0, "d0"))
    for name in range(instances):
        joined = e.InstanceJoined(name, 0, 4, 1000, version_slots)
        story.tell(1.0, joined, c.Install(name, 0, 0))
        story.tell(2.0, e.VersionInstalled(name, 0, 0, "d0"))


def finish(trajectory: int, fence: int, version: int) -> Event:
    return e.TrajectoryFinished(trajectory, fence, 3, (Segment(version, f"d{version}", 3),))


def test_training_overlaps_with_rollout_of_two_versions() -> None:
    story = Story()
    up(story)
    story.tell(2.0, e.TimerFired(), c.Start(0, 1, 0, 0), c.Start(1, 2, 0, 0))
    story.tell(4.0, finish(0, 1, 0), c.Score(0, 1))
    story.tell(5.0, e.GroupJudged(0), c.Train(0, (BatchGroup(0, 0, (0,)),)))
    story.tell(8.0, e.BatchTrained(0), c.Publish(1))
    story.tell(9.0, e.WeightsPublished(1, "d1"), c.Install(0, 0, 1))
    story.tell(9.5, e.VersionInstalled(0, 0, 1, "d1"), c.Start(2, 3, 0, 1))
    story.tell(11.0, finish(1, 2, 0), c.Score(1, 2))
    story.tell(12.0, finish(2, 3, 1), c.Score(2, 3))
    story.end(12.0)
    assert story.spans["run / trainer"] == [
        (0.0, 1.0, "load v₀"),
        (5.0, 8.0, "train v₀"),
        (8.0, 9.0, "publish v₁"),
    ]
    assert story.spans["instance 0 / versions 1"] == [
        (2.0, 4.0, "v₀ · 2 running"),
        (4.0, 11.0, "v₀ · 1 running"),
    ]
    assert story.spans["instance 0 / versions 2"] == [(9.5, 12.0, "v₁ · 1 running")]
    assert story.spans["run / instance 0 · moves"] == [
        (1.0, 2.0, "install v₀"),
        (9.0, 9.5, "install v₁"),
    ]
    assert story.details["train v₀"] == "1 groups"


def test_a_migration_is_drawn_at_its_target() -> None:
    story = Story()
    up(story, instances=2)
    story.tell(2.0, e.TimerFired(), c.Start(0, 1, 0, 0))
    story.tell(3.0, e.TimerFired(), c.Reserve(0, 0, 1, 0, (Move(0, 1, 2),)))
    story.tell(4.0, e.MigrationReserved(0), c.Transfer(0))
    assert story.placements.running == {(0, 0): 1}
    story.tell(5.0, e.MigrationCompleted(0, (Placement(0, 1),)), c.Release(0))
    assert story.placements.running == {(1, 0): 1}
    story.end(6.0)
    assert (3.0, 5.0, "migrate v₀") in story.spans["run / instance 1 · moves"]
    assert story.details["migrate v₀"] == "1 from instance 0"
    assert story.spans["instance 0 / versions 1"] == [(2.0, 5.0, "v₀ · 1 running")]
    assert story.spans["instance 1 / versions 1"] == [(5.0, 6.0, "v₀ · 1 running")]


def test_a_suspended_rollout_is_not_drawn_as_running() -> None:
    story = Story()
    up(story)
    story.tell(2.0, e.TimerFired(), c.Start(0, 1, 0, 0))
    story.tell(3.0, e.TimerFired(), c.Suspend())
    story.tell(7.0, e.TimerFired(), c.Resume())
    story.end(9.0)
    assert story.spans["run / rollout suspended"] == [(3.0, 7.0, "suspend")]
    assert [span[:2] for span in story.spans["instance 0 / versions 1"]] == [(2.0, 3.0), (7.0, 9.0)]


def test_what_fails_or_never_ends_is_named() -> None:
    story = Story()
    up(story)
    story.tell(3.0, e.GroupJudged(0), c.Train(0, (BatchGroup(0, 0, (0,)),)))
    story.tell(4.0, e.BatchFailed(0, "out of memory"), c.Train(0, (BatchGroup(0, 0, (0,)),)))
    story.tell(5.0, e.TimerFired(), c.Install(0, 0, 1))
    story.tell(6.0, e.InstanceFailed(0, 0, "crash"))
    story.end(7.0)
    assert story.spans["run / trainer"][1:] == [(3.0, 4.0, "train v₀"), (4.0, 7.0, "train v₀")]
    assert story.details["train v₀"] == "1 groups: not ended"
    assert story.details["install v₁"] == "crash"


def test_a_lane_never_overlaps_itself_and_a_file_stays_small() -> None:
    """A storm of short trajectories: rows nest, and seconds bound the number of spans."""
    rng, story, fence = random.Random(0), Story(), 0
    up(story, version_slots=4)
    running: list[tuple[int, int, int]] = []
    now, version = 2.0, 0
    while now < 30.0:
        now += 0.01
        if rng.random() < 0.02:
            version += 1
        if len(running) < 4:
            fence += 1
            running.append((fence, fence, version))
            story.tell(now, e.TimerFired(), c.Start(fence, fence, 0, version))
        else:
            done = running.pop(rng.randrange(4))
            story.tell(now, finish(*done), c.Score(*done[:2]))
    story.end(now)
    rows = {name: spans for name, spans in story.spans.items() if name.startswith("instance 0")}
    assert 2 <= len(rows) <= 4
    for spans in rows.values():
        for before, after in pairwise(spans):
            assert before[1] <= after[0] + 1e-6
    # Each version ends a span of its own; the rest is a matter of the resolution.
    assert sum(map(len, rows.values())) < 4 * 30 / 0.25 + 3 * version


def test_what_changed_is_drawn_as_all_of_it_would_be() -> None:
    """Rows are told of changes alone; had all been compared each time, the file was the same."""
    rng = random.Random(3)
    running: dict[tuple[int, int], int] = {}
    files: list[list[str]] = [[], []]
    whole, changed = (Rows(TraceFile(file.append)) for file in files)
    for now in range(2000):
        key = rng.randrange(6), rng.randrange(3)
        running[key] = running.get(key, 0) + rng.choice((-1, 1, 1))
        if running[key] <= 0:
            del running[key]
        whole.show(now / 4, running)
        changed.change(now / 4, [key], running)
        if now == 1000:  # as after a restore: the numbers of rows are found again
            changed._taken = None
    whole.show(500.0, {})
    changed.show(500.0, {})
    assert len(files[0]) > 500 and files[0] == files[1]
