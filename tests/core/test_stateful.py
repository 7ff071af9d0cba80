"""Arbitrary legal and illegal orders of events: after every one, every promise holds."""

import random

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dora_rl.core.audit import Audit
from dora_rl.core.audit.invariants import check
from dora_rl.core.history.codec import dumps
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.errors import RefusedEvent
from dora_rl.core.protocol.settings import Elastic, OnFailedMember, ParadigmName, Settings
from dora_rl.core.protocol.types import Length, Placement, Segment
from tests.core.adversary import Adversary, stir

names = st.integers(0, 6)
ELASTIC = (5, 6)
picks = st.integers(0, 10_000)
WAYS = ["token", "finish", "finish", "pause", "fail", "refuse"]
wild = st.integers(-2, 60)

any_event = st.one_of(
    st.builds(ev.PromptsAvailable, wild, wild, st.booleans()),
    st.builds(ev.InstanceJoined, names, wild, wild, wild, wild, st.booleans()),
    st.builds(
        ev.InstanceProgressed,
        names,
        wild,
        wild,
        st.lists(st.builds(Length, wild, wild, wild), max_size=3).map(tuple),
    ),
    st.builds(ev.InstanceLeaving, names, wild),
    st.builds(ev.InstanceFailed, names, wild, st.just("wild")),
    st.builds(ev.InstanceStopped, names, wild),
    st.builds(ev.InstanceSlept, names, wild),
    st.builds(ev.InstanceWoke, names, wild),
    st.builds(ev.VersionInstalled, names, wild, wild, st.just("digest-0")),
    st.builds(ev.InstallFailed, names, wild, wild, st.just("wild")),
    st.builds(ev.VersionEvicted, names, wild, wild),
    st.builds(
        ev.TrajectoryFinished,
        wild,
        wild,
        st.just(1),
        st.builds(lambda v: (Segment(v, f"digest-{v}", 1),), wild),
    ),
    st.builds(ev.TrajectoryPaused, wild, wild, wild),
    st.builds(ev.TrajectoryResumed, wild, wild, wild),
    st.builds(ev.TrajectoryFailed, wild, wild, st.just("wild")),
    st.builds(ev.TrajectoryRefused, wild, wild, st.just("wild")),
    st.builds(ev.TrajectoryScored, wild, wild),
    st.builds(ev.GroupJudged, wild, st.sampled_from([None, "wild"])),
    st.builds(
        ev.TrajectoriesParked,
        names,
        wild,
        st.lists(st.builds(Placement, wild, wild), max_size=3).map(tuple),
    ),
    st.builds(ev.MigrationReserved, wild),
    st.builds(ev.MigrationCompleted, wild, st.just(())),
    st.builds(ev.MigrationFailed, wild, st.just("wild")),
    st.builds(ev.BatchTrained, wild),
    st.builds(ev.BatchFailed, wild, st.just("wild")),
    st.builds(ev.BatchRejected, wild, st.lists(wild, max_size=3).map(tuple), st.just("wild")),
    st.builds(ev.WeightsPublished, wild, st.just("digest-0")),
    st.builds(ev.PublicationFailed, wild, st.just("wild")),
    st.builds(ev.VersionPinned, wild, st.just("holder")),
    st.builds(ev.VersionUnpinned, wild, st.just("holder")),
    st.builds(ev.StepLimitRaised, wild),
    st.just(ev.TimerFired()),
)


class AnyOrder(RuleBasedStateMachine):
    """An adversary delivers, repeats, loses and invents events; instances come and go."""

    @initialize(
        paradigm=st.sampled_from(ParadigmName),
        batch=st.integers(1, 3),
        size=st.integers(1, 3),
        staleness=st.integers(0, 3),
        version_slots=st.integers(1, 2),
        on_failed=st.sampled_from(OnFailedMember),
        instances=st.integers(1, 4),
        elastic=st.sampled_from(Elastic),
    )
    def begin(
        self, paradigm, batch, size, staleness, version_slots, on_failed, instances, elastic
    ) -> None:
        config = Settings(
            paradigm=paradigm,
            groups_per_step=batch,
            group_size=size,
            max_staleness=staleness,
            version_slots=version_slots,
            on_failed_member=on_failed,
            elastic=elastic,
            elastic_gain=1.0,
            switch_estimate_s=0.0,
            max_retries=1,
            turn_s=15.0,
            heartbeat_timeout_s=60.0,
            trajectory_timeout_s=80.0,
        )
        self.audit = Audit(config)
        self.world = Adversary(config, self.audit.observe)
        for name in range(instances):
            self.world.join(name, slots=2 + name % 2, version_slots=version_slots)
        for name in ELASTIC if self.world.core.state.lending is not None else ():
            self.world.join(name, slots=2, version_slots=version_slots, elastic=True)
        self.world.deliver(0)

    @rule(index=picks)
    def deliver(self, index: int) -> None:
        self.world.deliver(index)

    @rule(index=picks)
    def deliver_more(self, index: int) -> None:
        for offset in range(8):
            self.world.deliver(index + offset)

    @rule(seed=st.integers(0, 2**32 - 1))
    def run_for_a_while(self, seed: int) -> None:
        """Sixty legal steps, so that faults and inventions also meet a deep state."""
        stir(self.world, random.Random(seed), 60, faults=False)

    @rule(index=picks)
    def repeat(self, index: int) -> None:
        self.world.deliver(index, keep=True)

    @rule(index=picks)
    def lose(self, index: int) -> None:
        self.world.drop(index)

    @rule(pick=picks, what=st.sampled_from(WAYS))
    def generate(self, pick: int, what: str) -> None:
        self.world.generate(pick, what)

    @rule()
    def finish_all(self) -> None:
        for pick in range(64):
            self.world.generate(pick, "finish")

    @rule(name=names, noticed=st.booleans())
    def crash(self, name: int, noticed: bool) -> None:
        self.world.crash(name, noticed=noticed)

    @rule(name=names)
    def join(self, name: int) -> None:
        elastic = name in ELASTIC and self.world.core.state.lending is not None
        self.world.join(name, slots=2, version_slots=2, elastic=elastic)

    @rule(name=names)
    def leave(self, name: int) -> None:
        self.world.leave(name)

    @rule(kv=st.sampled_from([0, 9_900]))
    def report(self, kv: int) -> None:
        for name in sorted(self.world.engines):
            self.world.report(name, kv)

    @rule(seconds=st.sampled_from([1.0, 11.0, 30.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(event=any_event)
    def invent(self, event: ev.Event) -> None:
        """A message from nowhere is refused and changes nothing, or is one that could be."""
        if self.world.halted:
            return
        before = dumps(self.world.core.snapshot())
        probe = type(self.world.core).restore(self.world.core.snapshot())
        try:
            probe.handle(self.world.now, event)
        except RefusedEvent as refusal:
            note(f"refused: {refusal}")
            assert type(event).__name__ in str(refusal)
            try:
                self.world.core.handle(self.world.now, event)
                raise AssertionError(f"refused once, accepted then: {event}")
            except RefusedEvent:
                assert dumps(self.world.core.snapshot()) == before
        else:
            check(probe.state)

    @rule()
    def save_and_restore(self) -> None:
        self.world.save_and_restore()

    @invariant()
    def promises_hold(self) -> None:
        check(self.world.core.state)
        report = self.audit.report()
        assert report.ok, report.summary()

    @invariant()
    def staleness_is_bounded(self) -> None:
        core = self.world.core.state
        if core.paradigm.bounded:
            for train in self.world.trained:
                for group in train.groups:
                    assert 0 <= train.step - group.version <= core.staleness


SETTINGS = settings(
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class LongAnyOrder(AnyOrder):
    """The same for longer."""


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(SETTINGS, max_examples=60)
TestLongAnyOrder = pytest.mark.slow(LongAnyOrder.TestCase)
TestLongAnyOrder.settings = settings(SETTINGS, max_examples=200)
