"""Replay: identical to the byte, or the first difference with its line."""

import io
from collections.abc import Callable, Sequence

import pytest

from dora_rl.core.history.journal import JournalWriter
from dora_rl.core.history.replay import Decider, replay
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.errors import JournalError, RefusedEvent
from dora_rl.core.protocol.settings import Settings

SETTINGS = Settings(groups_per_step=1, group_size=1)


class Echo:
    """A stand-in for the core: trains step n at its nth call, refuses what it does not know."""

    def __init__(self, settings: Settings) -> None:
        self.calls = 0

    def handle(self, now: float, event: e.Event) -> Sequence[c.Command]:
        if isinstance(event, e.BatchTrained):
            raise RefusedEvent(f"not being trained: `{event.step}`")
        self.calls += 1
        return [c.Train(self.calls, ()), c.SetTimer(now + 1.0)]


class Late(Echo):
    """Decides otherwise from its third event on."""

    def handle(self, now: float, event: e.Event) -> Sequence[c.Command]:
        commands = super().handle(now, event)
        return commands if self.calls < 3 else commands[:1]


class Crashing(Echo):
    def handle(self, now: float, event: e.Event) -> Sequence[c.Command]:
        raise KeyError("lost")


class Lenient(Echo):
    def handle(self, now: float, event: e.Event) -> Sequence[c.Command]:
        return [] if isinstance(event, e.BatchTrained) else super().handle(now, event)


class Vague(Echo):
    def handle(self, now: float, event: e.Event) -> Sequence[c.Command]:
        if isinstance(event, e.BatchTrained):
            raise RefusedEvent("no")
        return super().handle(now, event)


def journal(make: Callable[[Settings], Decider] = Echo) -> list[str]:
    out: list[str] = []
    writer = JournalWriter(out.append, SETTINGS)
    decider = make(SETTINGS)
    for step in range(6):
        event = e.BatchTrained(step) if step == 4 else e.WeightsPublished(step, f"d{step}")
        now = step / 10
        try:
            writer.handled(now, event, decider.handle(now, event))
        except RefusedEvent as error:
            writer.refused(now, event, str(error))
    writer.close("done")
    return out


def test_the_same_core_is_identical() -> None:
    report = replay(journal(), Echo)
    assert report.ok and report.difference is None
    assert (report.records, report.replayed, report.refused) == (6, 6, 1)
    assert report.summary() == ["multi_version: identical, 6 events (1 refused), ended: done"]


def test_the_first_difference_is_shown_with_its_line() -> None:
    report = replay(journal(), Late)
    found = report.difference
    assert not report.ok and found is not None
    assert (found.line, found.now, report.replayed) == (4, 0.2, 3)
    assert found.event == "WeightsPublished(version=2, digest='d2')"
    assert found.expected.endswith('[["Train",3,[]],["SetTimer",1.2]]]')
    assert found.got.endswith('[["Train",3,[]]]]')
    assert report.summary()[0] == "multi_version: DIFFERENT at line 4, event 3 of 6"
    assert report.to_json()["difference"]["line"] == 4


@pytest.mark.parametrize(
    ("make", "line", "got"),
    [
        (Crashing, 2, "KeyError: 'lost'"),
        (Lenient, 6, '[0.4,["BatchTrained",4],[]]'),
        (Vague, 6, '[0.4,["BatchTrained",4],null,"no"]'),
    ],
)
def test_crashes_and_refusals_are_compared_too(
    make: Callable[[Settings], Decider], line: int, got: str
) -> None:
    found = replay(journal(), make).difference
    assert found is not None
    assert (found.line, found.got) == (line, got)


def test_a_long_difference_is_abridged_about_its_place() -> None:
    class Long(Echo):
        last = 0

        def handle(self, now: float, event: e.Event) -> Sequence[c.Command]:
            return [c.Delete(n) for n in range(300)] + [c.Delete(self.last)]

    class Other(Long):
        last = 1

    found = replay(journal(Long), Other).difference
    assert found is not None
    assert len(found.expected) < 500
    assert found.expected.endswith('["Delete",0]]]') and found.got.endswith('["Delete",1]]]')


def test_an_altered_journal_is_refused_not_called_different() -> None:
    lines = journal()
    lines[3] = lines[3].replace('"Train",3', '"Train",4')
    with pytest.raises(JournalError, match="the digest does not match"):
        replay(lines, Echo)
    with pytest.raises(JournalError, match="something follows"):
        replay([*journal(), "[]\n"], Echo)


def test_by_default_the_orchestrator_is_replayed() -> None:
    out = io.StringIO()
    writer = JournalWriter(out.write, SETTINGS)
    core = Orchestrator(SETTINGS)
    for now, event in (
        (0.0, e.WeightsPublished(0, "d0")),
        (1.0, e.InstanceJoined(0, 0, 4, 1000)),
        (2.0, e.VersionInstalled(0, 0, 0, "d0")),
    ):
        writer.handled(now, event, core.handle(now, event))
    writer.close("done")
    assert "Install" in out.getvalue()
    lines = out.getvalue().splitlines(keepends=True)
    assert replay(lines).ok
