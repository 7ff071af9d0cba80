"""Reports that tell nothing stay out of the journal, and nobody is given up for it."""

from dataclasses import replace
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.commands import Expel
from dora_rl.core.protocol.events import InstanceJoined, InstanceProgressed, TimerFired
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import Length
from dora_rl.runtime.control.heartbeats import Heartbeats

SETTINGS = Settings(heartbeat_timeout_s=8.0, trajectory_timeout_s=80.0)


def report(
    kv: int = 5, incarnation: int = 0, *, grown: bool = False, saved: bool = False
) -> InstanceProgressed:
    length = (Length(1, 1, 9),)
    return InstanceProgressed(
        0, incarnation, kv, length if grown else (), saved=length if saved else ()
    )


def test_only_what_changed_or_is_due_is_news() -> None:
    heartbeats = Heartbeats(SETTINGS)
    assert heartbeats.is_news(0.0, report())
    assert not heartbeats.is_news(0.5, report())
    for at, told in (
        (0.6, report(kv=6)),
        (0.7, report(kv=6, grown=True)),
        (0.8, report(kv=6, grown=True)),
        (0.9, report(kv=6, saved=True)),
        (0.9, report(kv=6, incarnation=1)),
    ):
        assert heartbeats.is_news(at, told)
    assert not heartbeats.is_news(1.8, report(kv=6, incarnation=1))
    assert heartbeats.is_news(2.0, report(kv=6, incarnation=1))  # an eighth of 8 s
    assert heartbeats.is_news(1.9, InstanceProgressed(1, 0, 6))  # another instance


def test_a_report_above_the_pressure_is_always_news() -> None:
    """With each one the core tries again to move work away."""
    heartbeats = Heartbeats(replace(SETTINGS, kv_pressure=0.9))
    heartbeats.joined(InstanceJoined(0, 0, 4, 1000))
    for at in (0.0, 0.1, 0.2):
        assert heartbeats.is_news(at, report(kv=900))
    assert heartbeats.is_news(0.3, report(kv=899))
    assert not heartbeats.is_news(0.4, report(kv=899))


@given(
    st.floats(0.5, 60.0),
    st.floats(0.05, 60.0),
    st.lists(st.floats(0.01, 0.874), min_size=1, max_size=60),
)
def test_silence_alone_gives_an_instance_up(
    timeout_s: float, trajectory_s: float, gaps: list[float]
) -> None:
    """Idle and alive, it is not given up while no gap is 7/8 of the timeout; dead, it is."""
    settings = Settings(heartbeat_timeout_s=timeout_s, trajectory_timeout_s=trajectory_s)
    core, heartbeats = Orchestrator(settings), Heartbeats(settings)
    timer: float | None = None
    expelled: float | None = None

    def handle(now: float, event: InstanceJoined | InstanceProgressed | TimerFired) -> None:
        nonlocal timer, expelled
        for command in core.handle(now, event):
            timer = getattr(command, "at", timer)
            if isinstance(command, Expel):
                expelled = now

    def ring_until(now: float) -> None:
        nonlocal timer
        while timer is not None and timer <= now and expelled is None:
            at, timer = timer, None
            handle(at, TimerFired())

    handle(0.0, InstanceJoined(0, 0, 4, 1000))
    last = 0.0
    for last in accumulate(gap * timeout_s for gap in gaps):
        ring_until(last)
        assert expelled is None, "it lived"
        if heartbeats.is_news(last, report(kv=0)):
            handle(last, report(kv=0))
    ring_until(last + 2 * timeout_s)
    assert expelled is not None
    assert 7 / 8 * timeout_s * 0.999 <= expelled - last <= timeout_s * 1.001
