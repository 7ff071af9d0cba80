"""A run told to an audit by hand, event by event."""

from typing import Any

from dora_rl.core.audit import Audit, AuditReport, Promise
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import BatchGroup, Move, Segment


class Story:
    """Tells an audit a run, event by event; groups of two, batches of one, K = 1."""

    def __init__(self, **settings: Any) -> None:
        values = {"groups_per_step": 1, "group_size": 2, "max_staleness": 1, **settings}
        self.audit = Audit(Settings(**values))
        self.now = 0.0
        self.fence = 0
        self.fences: dict[int, int] = {}

    def see(self, event: e.Event, *commands: c.Command) -> None:
        self.now += 1.0
        self.audit.observe(self.now, event, commands)

    def ask(self, *commands: c.Command) -> None:
        self.see(e.TimerFired(), *commands)

    def host(self, instance: int = 0, version: int = 0, incarnation: int = 0) -> None:
        install = c.Install(instance, incarnation, version)
        self.see(e.InstanceJoined(instance, incarnation, 8, 1000), install)
        self.see(e.VersionInstalled(instance, incarnation, version, f"d{version}"))

    def start(self, trajectory: int, version: int = 0, instance: int = 0) -> int:
        self.fence += 1
        self.fences[trajectory] = self.fence
        self.ask(c.Start(trajectory, self.fence, instance, version))
        return self.fence

    def finish(self, trajectory: int, *segments: tuple[int, int], scored: bool = True) -> None:
        """Segments as (version, tokens); scored right away unless told otherwise."""
        fence = self.fences[trajectory]
        told = tuple(Segment(v, f"d{v}", n) for v, n in segments or ((0, 10),))
        tokens = sum(segment.tokens for segment in told)
        self.see(e.TrajectoryFinished(trajectory, fence, tokens, told), c.Score(trajectory, fence))
        if scored:
            self.see(e.TrajectoryScored(trajectory, fence))

    def ready(self, group: int, version: int = 0, instance: int = 0) -> None:
        """A whole group up to its judgement."""
        members = (2 * group, 2 * group + 1)
        for member in members:
            self.start(member, version, instance)
            self.finish(member, (version, 10 + member))
        self.ask(c.Judge(group, members))
        self.see(e.GroupJudged(group))

    def train(self, step: int, group: int, version: int = 0) -> None:
        self.ask(c.Train(step, (BatchGroup(group, version, (2 * group, 2 * group + 1)),)))

    def trained(self, step: int, publish: bool = True) -> None:
        self.see(e.BatchTrained(step), c.Publish(step + 1))
        if publish:
            self.see(e.WeightsPublished(step + 1, f"d{step + 1}"))

    @property
    def report(self) -> AuditReport:
        return self.audit.report()

    @property
    def broken(self) -> set[Promise]:
        return {check.promise for check in self.report.checks if check.breaches}

    def example(self, promise: Promise) -> str:
        (check,) = [check for check in self.report.checks if check.promise is promise]
        assert check.breaches == 1
        return check.examples[0]


def opened(**settings: Any) -> Story:
    """Version 0 is published and on instance 0."""
    story = Story(**settings)
    story.see(e.WeightsPublished(0, "d0"))
    story.host(0)
    return story


def migrating(story: Story, *, transfer: bool = True) -> None:
    """Trajectory 0 on its way from instance 0 to 1, where it will have fence 90."""
    story.host(1)
    fence = story.start(0)
    story.ask(c.Reserve(5, 0, 1, 0, (Move(0, fence, 90),)))
    if transfer:
        story.see(e.MigrationReserved(5), c.Transfer(5))


def two_versions() -> Story:
    """Version 1 is the newest, and on instance 1; group 1 is under way on version 0."""
    story = opened()
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    story.host(1, version=1)
    story.start(2)
    return story
