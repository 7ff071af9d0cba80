"""A cheap, deterministic world that keeps an orchestrator in steady state.

It answers every command after a fixed delay of virtual time, on instances that never fail and
never slow down. All of it scales with the number of instances (slots, batch, reports), so that
one trajectory gives rise to the same events on 64 instances as on 8,192.
"""

import heapq
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import (
    InstanceId,
    Length,
    MigrationId,
    Placement,
    Segment,
    TrajectoryId,
    Version,
)

SLOTS = 4  # per instance: few, which makes the work per instance weigh the most
GROUP_SIZE = 8
TOKENS_PER_S = 50.0
MEDIAN_TOKENS = 1500
SIGMA = 0.5  # of the lognormal law of lengths
MAX_TOKENS = 4500  # the longest group ends well within K steps: no stalls, a steady state
KV_TOKENS = 1_000_000  # per instance: ample, pressure is not what is measured
REPORT_S = 10.0
TRAIN_S = 15.0
PUBLISH_S = 1.0
INSTALL_S = 2.0
SCORE_S = 0.5
ANSWER_S = 0.05  # prompts, judgements, evictions, reservations, parking
TRANSFER_S = 0.3
START_S = 5.0  # until here, the fleet is filled for the first time
FILTERED = 16  # one group in so many

_LENGTHS = 1 << 14  # distinct lengths; trajectories walk over them by a stride prime to it
_STRIDE = 7919

Happening: TypeAlias = "ev.Event | partial[ev.Event | None]"


def settings_for(instances: int) -> Settings:
    """A train step consumes as many trajectories as there are slots."""
    groups = max(1, instances * SLOTS // GROUP_SIZE)
    return Settings(
        groups_per_step=groups,
        group_size=GROUP_SIZE,
        install_estimate_s=INSTALL_S,
        migration_estimate_s=TRANSFER_S,
        # Shorter than the warm-up, so that timers expire at every size in the same proportion.
        score_timeout_s=30.0,
        heartbeat_timeout_s=30.0,
        install_timeout_s=30.0,
        migration_timeout_s=30.0,
        trajectory_timeout_s=40.0,
    )


def digest(version: Version) -> str:
    return f"digest-{version}"


def draw_lengths(seed: int) -> list[int]:
    rng = random.Random(seed)
    drawn = (int(MEDIAN_TOKENS * rng.lognormvariate(0.0, SIGMA)) for _ in range(_LENGTHS))
    return [min(MAX_TOKENS, max(1, tokens)) for tokens in drawn]


class Run(NamedTuple):
    """One trajectory where it runs."""

    fence: int
    instance: InstanceId
    version: Version
    tokens: int  # when whole
    ends_at: float


class World:
    """Virtual time, and what runs where."""

    def __init__(self, instances: int, seed: int = 0) -> None:
        self.core = Orchestrator(settings_for(instances))
        self.instances = instances
        self.now = 0.0
        self.timer: float | None = None
        self.runs: dict[TrajectoryId, Run] = {}
        self.engines: dict[InstanceId, set[TrajectoryId]] = {i: set() for i in range(instances)}
        self.incarnation = 0
        self.migrations: dict[MigrationId, cm.Reserve] = {}
        self.lengths = draw_lengths(seed)
        self.published = 0
        self._agenda: list[tuple[float, int, Happening]] = []
        self._order = 0
        self._obey: dict[type, Callable[[Any], None]] = {
            cm.FetchPrompts: self._fetch,
            cm.Start: self._start,
            cm.Cancel: self._cancel,
            cm.Install: self._install,
            cm.Evict: self._evict,
            cm.Reserve: self._reserve,
            cm.Transfer: self._transfer,
            cm.Release: self._release,
            cm.AbortMigration: self._abort,
            cm.Park: self._park,
            cm.Unpark: self._ignore,
            cm.Score: self._score,
            cm.Judge: self._judge,
            cm.Train: self._train,
            cm.Publish: self._publish,
            cm.Delete: self._ignore,
            cm.SetTimer: self._set_timer,
        }
        for instance_id in range(instances):
            self._after(0.0, ev.InstanceJoined(instance_id, 0, SLOTS, KV_TOKENS))
            # Reports are spread evenly over the period, as those of a real fleet are.
            self._after(
                REPORT_S * (1 + instance_id / instances), partial(self._report, instance_id)
            )
        self._after(0.0, ev.WeightsPublished(0, digest(0)))

    def next_event(self) -> ev.Event:
        """Go to the next moment at which something is to be reported."""
        while True:
            self.now, _, happening = heapq.heappop(self._agenda)
            event = happening() if isinstance(happening, partial) else happening
            if event is not None:
                return event

    def obey(self, commands: list[cm.Command]) -> None:
        """Perform commands; their answers come later, by `next_event`."""
        for command in commands:
            self._obey[type(command)](command)

    def _after(self, seconds: float, happening: Happening) -> None:
        self._at(self.now + seconds, happening)

    def _at(self, when: float, happening: Happening) -> None:
        self._order += 1
        heapq.heappush(self._agenda, (when, self._order, happening))

    # Trajectories

    def _start(self, c: cm.Start) -> None:
        tokens = self.lengths[c.trajectory * _STRIDE % _LENGTHS]
        if self.now < START_S:
            # As if the run had long been under way: the first wave is caught at random ages.
            tokens = max(1, tokens * (c.trajectory * _STRIDE % 997) // 997)
        # A fraction of a token keeps ends apart that fall on one instant only by rounding.
        fraction = c.trajectory * _STRIDE % 10_007 / 10_007
        seconds = (tokens + fraction - c.prefix_tokens) / TOKENS_PER_S
        self.runs[c.trajectory] = Run(c.fence, c.instance, c.version, tokens, self.now + seconds)
        self.engines[c.instance].add(c.trajectory)
        self._after(seconds, partial(self._finish, c.trajectory))

    def _finish(self, trajectory: TrajectoryId) -> ev.Event | None:
        run = self.runs.get(trajectory)
        if run is None or run.ends_at > self.now:
            return None
        self._drop(trajectory)
        segments = (Segment(run.version, digest(run.version), run.tokens),)
        return ev.TrajectoryFinished(trajectory, run.fence, run.tokens, segments)

    def _cancel(self, c: cm.Cancel) -> None:
        run = self.runs.get(c.trajectory)
        if run is not None and run.fence == c.fence:
            self._drop(c.trajectory)

    def _drop(self, trajectory: TrajectoryId) -> None:
        self.engines[self.runs.pop(trajectory).instance].discard(trajectory)

    def _report(self, instance: InstanceId) -> ev.Event | None:
        self._after(REPORT_S, partial(self._report, instance))
        lengths = []
        for trajectory in self.engines[instance]:
            run = self.runs[trajectory]
            left = int((run.ends_at - self.now) * TOKENS_PER_S)
            lengths.append(Length(trajectory, run.fence, max(0, run.tokens - left)))
        kv_tokens = sum(length.tokens for length in lengths)
        return ev.InstanceProgressed(instance, self.incarnation, kv_tokens, tuple(lengths))

    def _score(self, c: cm.Score) -> None:
        self._after(SCORE_S, ev.TrajectoryScored(c.trajectory, c.fence))

    def _judge(self, c: cm.Judge) -> None:
        filtered = "no signal" if c.group % FILTERED == 0 else None
        self._after(ANSWER_S, ev.GroupJudged(c.group, filtered))

    # Moves

    def _reserve(self, c: cm.Reserve) -> None:
        self.migrations[c.migration] = c
        self._after(ANSWER_S, ev.MigrationReserved(c.migration))

    def _transfer(self, c: cm.Transfer) -> None:
        self._after(TRANSFER_S, partial(self._arrive, c.migration))

    def _arrive(self, migration_id: MigrationId) -> ev.Event | None:
        migration = self.migrations.get(migration_id)
        if migration is None:
            return None
        moved = (
            Placement(move.trajectory, move.fence)
            for move in migration.moves
            if (run := self.runs.get(move.trajectory)) is not None and run.fence == move.fence
        )
        return ev.MigrationCompleted(migration_id, tuple(moved))

    def _release(self, c: cm.Release) -> None:
        migration = self.migrations.pop(c.migration)
        for move in migration.moves:
            run = self.runs.get(move.trajectory)
            if run is not None and run.fence == move.fence:
                self.engines[run.instance].discard(move.trajectory)
                self.engines[migration.target].add(move.trajectory)
                self.runs[move.trajectory] = run._replace(
                    fence=move.new_fence, instance=migration.target
                )

    def _abort(self, c: cm.AbortMigration) -> None:
        self.migrations.pop(c.migration, None)

    def _park(self, c: cm.Park) -> None:
        # Parking stops nothing here: what is parked comes back before its time, or ends.
        self._after(ANSWER_S, ev.TrajectoriesParked(c.instance, c.incarnation, c.placements))

    # Versions, prompts, time

    def _install(self, c: cm.Install) -> None:
        answer = ev.VersionInstalled(c.instance, c.incarnation, c.version, digest(c.version))
        self._after(INSTALL_S, answer)

    def _evict(self, c: cm.Evict) -> None:
        self._after(ANSWER_S, ev.VersionEvicted(c.instance, c.incarnation, c.version))

    def _train(self, c: cm.Train) -> None:
        self._after(TRAIN_S, ev.BatchTrained(c.step))

    def _publish(self, c: cm.Publish) -> None:
        self.published = c.version
        self._after(PUBLISH_S, ev.WeightsPublished(c.version, digest(c.version)))

    def _fetch(self, c: cm.FetchPrompts) -> None:
        self._after(ANSWER_S, ev.PromptsAvailable(c.first, c.count))

    def _set_timer(self, c: cm.SetTimer) -> None:
        self.timer = c.at
        self._at(max(self.now, c.at), partial(self._ring, c.at))

    def _ring(self, at: float) -> ev.Event | None:
        if self.timer != at:
            return None
        self.timer = None
        return ev.TimerFired()

    def _ignore(self, c: cm.Command) -> None:
        pass
