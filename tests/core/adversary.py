"""A world without time or physics that answers the core's commands in any order it likes.

It keeps the truth about every instance (what is installed, what runs), turns commands into
answers that may be delivered, repeated, lost or overtaken, and can crash, hang and rejoin.
Whoever drives it picks; it decides nothing by itself.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import Length, Placement, Segment


def digest(version: int) -> str:
    return f"digest-{version}"


@dataclass
class Engine:
    """The truth about one incarnation of an instance."""

    incarnation: int
    elastic: bool = False
    asleep: bool = False
    versions: set[int] = field(default_factory=set)
    running: dict[int, "Run"] = field(default_factory=dict)
    parked: dict[int, "Run"] = field(default_factory=dict)

    def find(self, trajectory: int, fence: int) -> "Run | None":
        for place in (self.running, self.parked):
            run = place.get(trajectory)
            if run is not None and run.fence == fence:
                return run
        return None

    def drop(self, trajectory: int, fence: int) -> None:
        for place in (self.running, self.parked):
            run = place.get(trajectory)
            if run is not None and run.fence == fence:
                del place[trajectory]


@dataclass
class Run:
    """A trajectory on an engine: `tokens` holds the version that sampled each of them."""

    fence: int
    version: int
    tokens: list[int]


class Adversary:
    def __init__(self, settings: Settings, observe: Callable[..., None] | None = None) -> None:
        self.core = Orchestrator(settings)
        self.observe = observe
        self.now = 0.0
        self.timer: float | None = None
        self.engines: dict[int, Engine] = {}
        self.incarnations: dict[int, int] = {}
        self.pool: list[ev.Event] = [ev.WeightsPublished(0, digest(0))]
        self.migrations: dict[int, cm.Reserve] = {}
        self.log: list[tuple[float, ev.Event, list[cm.Command]]] = []
        self.trained: list[cm.Train] = []
        self.failed: dict[int, str] = {}
        self.halted: cm.Halt | None = None
        self.deleted: set[int] = set()
        self.training = False
        self.woken = 0

    def send(self, event: ev.Event) -> list[cm.Command]:
        commands = self.core.handle(self.now, event)
        self.log.append((self.now, event, commands))
        if self.observe is not None:
            self.observe(self.now, event, commands)
        for command in commands:
            getattr(self, f"_on_{type(command).__name__}")(command)
        return commands

    # What the driver may do

    def join(
        self,
        name: int,
        slots: int = 4,
        kv: int = 10_000,
        version_slots: int = 1,
        elastic: bool = False,
        lendable: bool = True,
    ) -> None:
        if name in self.engines:
            return
        incarnation = self.incarnations.get(name, -1) + 1
        self.incarnations[name] = incarnation
        self.engines[name] = Engine(incarnation, elastic, asleep=elastic)
        self.send(ev.InstanceJoined(name, incarnation, slots, kv, version_slots, elastic, lendable))

    def crash(self, name: int, *, noticed: bool = True) -> None:
        engine = self.engines.pop(name, None)
        if engine is not None and noticed:
            self.send(ev.InstanceFailed(name, engine.incarnation, "crash"))

    def leave(self, name: int) -> None:
        if name in self.engines:
            self.send(ev.InstanceLeaving(name, self.engines[name].incarnation))

    def deliver(self, index: int, *, keep: bool = False) -> None:
        if self.pool:
            index %= len(self.pool)
            event = self.pool[index] if keep else self.pool.pop(index)
            self.send(event)

    def drop(self, index: int) -> None:
        if self.pool:
            self.pool.pop(index % len(self.pool))

    def generate(self, pick: int, what: str) -> None:
        """Let one running trajectory move on: a token, a pause, the end, a failure."""
        running = [
            (name, trajectory)
            for name, engine in sorted(self.engines.items())
            for trajectory in sorted(engine.running)
        ]
        if not running:
            return
        self.act(*running[pick % len(running)], what)

    def act(self, name: int, trajectory: int, what: str) -> None:
        engine = self.engines[name]
        run = engine.running[trajectory]
        fence, tokens = run.fence, run.tokens
        tokens.append(run.version)
        if what == "pause":
            self.pool.append(ev.TrajectoryPaused(trajectory, fence, len(tokens)))
            self.pool.append(ev.TrajectoryResumed(trajectory, fence, len(tokens)))
        elif what == "finish":
            del engine.running[trajectory]
            self.pool.append(
                ev.TrajectoryFinished(trajectory, fence, len(tokens), _segments(tokens))
            )
        elif what in ("fail", "refuse"):
            del engine.running[trajectory]
            event = ev.TrajectoryFailed if what == "fail" else ev.TrajectoryRefused
            self.pool.append(event(trajectory, fence, "broken"))

    def report(self, name: int, kv_tokens: int = 0) -> None:
        engine = self.engines.get(name)
        if engine is not None:
            lengths = tuple(
                Length(t, run.fence, len(run.tokens)) for t, run in sorted(engine.running.items())
            )
            self.send(ev.InstanceProgressed(name, engine.incarnation, kv_tokens, lengths, lengths))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        if self.timer is not None and self.timer <= self.now:
            self.timer = None
            self.send(ev.TimerFired())

    def save_and_restore(self) -> None:
        saved = json.dumps(self.core.snapshot())
        self.core = Orchestrator.restore(json.loads(saved))
        assert json.dumps(self.core.snapshot()) == saved

    # What commands do

    def _engine(self, name: int, incarnation: int | None = None) -> Engine | None:
        engine = self.engines.get(name)
        if engine is not None and incarnation not in (None, engine.incarnation):
            return None
        return engine

    def _on_FetchPrompts(self, c: cm.FetchPrompts) -> None:
        self.pool.append(ev.PromptsAvailable(c.first, c.count))

    def _on_Start(self, c: cm.Start) -> None:
        engine = self._engine(c.instance)
        if engine is not None:
            assert c.version in engine.versions, f"{c} where {engine.versions} are installed"
            engine.running[c.trajectory] = Run(c.fence, c.version, [c.version] * c.prefix_tokens)

    def _on_Cancel(self, c: cm.Cancel) -> None:
        engine = self._engine(c.instance)
        if engine is not None:
            engine.drop(c.trajectory, c.fence)

    def _on_Install(self, c: cm.Install) -> None:
        engine = self._engine(c.instance, c.incarnation)
        if engine is None:
            return
        assert c.version not in self.deleted
        assert not engine.asleep, f"{c}, but training has the devices"
        engine.versions.discard(-1 if c.evict is None else c.evict)
        engine.versions.add(c.version)
        for run in engine.running.values():
            if run.version == c.evict:
                assert c.carry, f"{c} under running work"
                run.version = c.version
        limit = self.core.settings.version_slots
        assert len(engine.versions) <= limit, f"{c}: {engine.versions} on one instance"
        self.pool.append(
            ev.VersionInstalled(c.instance, c.incarnation, c.version, digest(c.version))
        )

    def _on_Evict(self, c: cm.Evict) -> None:
        engine = self._engine(c.instance, c.incarnation)
        if engine is not None:
            engine.versions.discard(c.version)
            self.pool.append(ev.VersionEvicted(c.instance, c.incarnation, c.version))

    def _on_Sleep(self, c: cm.Sleep) -> None:
        engine = self._engine(c.instance, c.incarnation)
        if engine is not None:
            known = self.core.state.fleet.known(c.instance, c.incarnation)
            assert known is None or not known.residents, f"{c} under running work"
            engine.versions.clear()
            engine.asleep = True
            self.pool.append(ev.InstanceSlept(c.instance, c.incarnation))

    def _on_Wake(self, c: cm.Wake) -> None:
        engine = self._engine(c.instance, c.incarnation)
        if engine is not None:
            assert not (engine.elastic and self.training), f"{c} during a train step"
            engine.asleep = False
            self.woken += 1
            self.pool.append(ev.InstanceWoke(c.instance, c.incarnation))

    def _on_Reserve(self, c: cm.Reserve) -> None:
        self.migrations[c.migration] = c
        self.pool.append(ev.MigrationReserved(c.migration))

    def _on_Transfer(self, c: cm.Transfer) -> None:
        plan = self.migrations[c.migration]
        source, target = self.engines.get(plan.source), self.engines.get(plan.target)
        if source is None or target is None:
            self.pool.append(ev.MigrationFailed(c.migration, "an end is gone"))
            return
        assert plan.version in target.versions
        moved = []
        for trajectory, fence, new_fence in plan.moves:
            run = source.find(trajectory, fence)
            if run is not None:
                target.running[trajectory] = Run(new_fence, run.version, list(run.tokens))
                moved.append(Placement(trajectory, fence))
        self.pool.append(ev.MigrationCompleted(c.migration, tuple(moved)))

    def _on_Release(self, c: cm.Release) -> None:
        self._forget_moves(c.migration, at_source=True)

    def _on_AbortMigration(self, c: cm.AbortMigration) -> None:
        self._forget_moves(c.migration, at_source=False)

    def _forget_moves(self, migration: int, *, at_source: bool) -> None:
        plan = self.migrations[migration]
        engine = self.engines.get(plan.source if at_source else plan.target)
        for trajectory, fence, new_fence in plan.moves if engine is not None else ():
            engine.drop(trajectory, fence if at_source else new_fence)

    def _on_Park(self, c: cm.Park) -> None:
        engine = self._engine(c.instance, c.incarnation)
        if engine is not None:
            parked = []
            for trajectory, fence in c.placements:
                run = engine.running.get(trajectory)
                if run is not None and run.fence == fence:
                    engine.parked[trajectory] = engine.running.pop(trajectory)
                run = engine.parked.get(trajectory)
                if run is not None and run.fence == fence:
                    parked.append(Placement(trajectory, fence))
            self.pool.append(ev.TrajectoriesParked(c.instance, c.incarnation, tuple(parked)))

    def _on_Unpark(self, c: cm.Unpark) -> None:
        engine = self._engine(c.instance, c.incarnation)
        for trajectory, fence in c.placements if engine is not None else ():
            run = engine.parked.get(trajectory)
            if run is not None and run.fence == fence:
                assert run.version in engine.versions
                engine.running[trajectory] = engine.parked.pop(trajectory)

    def _on_Score(self, c: cm.Score) -> None:
        self.pool.append(ev.TrajectoryScored(c.trajectory, c.fence))

    def _on_Judge(self, c: cm.Judge) -> None:
        reason = "no signal" if c.group % 7 == 3 else None
        self.pool.append(ev.GroupJudged(c.group, reason))

    def _on_Fail(self, c: cm.Fail) -> None:
        self.failed[c.trajectory] = c.reason

    def _on_Train(self, c: cm.Train) -> None:
        for name, engine in self.engines.items():
            known = self.core.state.fleet.known(name, engine.incarnation)
            assert known is None or not engine.elastic or engine.asleep, f"{c} on lent devices"
        self.trained.append(c)
        self.training = True
        self.pool.append(ev.BatchTrained(c.step))

    def _on_Publish(self, c: cm.Publish) -> None:
        self.training = False
        self.pool.append(ev.WeightsPublished(c.version, digest(c.version)))

    def _on_Delete(self, c: cm.Delete) -> None:
        for name, engine in self.engines.items():
            known = self.core.state.fleet.known(name, engine.incarnation)
            assert known is None or c.version not in engine.versions
        self.deleted.add(c.version)

    def _on_Expel(self, c: cm.Expel) -> None:
        if self._engine(c.instance, c.incarnation) is not None:
            del self.engines[c.instance]

    def _on_Dismiss(self, c: cm.Dismiss) -> None:
        if self._engine(c.instance, c.incarnation) is not None:
            assert not self.engines.pop(c.instance).running

    def _on_Suspend(self, c: cm.Suspend) -> None:
        pass

    def _on_Resume(self, c: cm.Resume) -> None:
        pass

    def _on_SetTimer(self, c: cm.SetTimer) -> None:
        self.timer = c.at

    def _on_Halt(self, c: cm.Halt) -> None:
        self.halted = c


def stir(world: Adversary, rng: random.Random, steps: int, *, faults: bool) -> None:
    """Let the world do `steps` things by chance."""
    for _ in range(steps):
        if world.halted:
            return
        roll = rng.random()
        if roll < 0.50:
            world.deliver(rng.randrange(1000), keep=faults and rng.random() < 0.05)
        elif roll < 0.85:
            ways = ("token", "finish", "finish", "pause", *(("fail", "refuse") if faults else ()))
            world.generate(rng.randrange(1000), rng.choice(ways))
        elif roll < 0.92:
            for name in sorted(world.engines):
                world.report(name, rng.choice((0, 0, 9_900)))
        elif roll < 0.96 or not faults:
            world.advance(rng.choice((1.0, 5.0, 20.0)))
        elif roll < 0.97:
            world.drop(rng.randrange(1000))
        elif roll < 0.98:
            world.crash(rng.randrange(6), noticed=rng.random() < 0.7)
        elif roll < 0.985:
            world.leave(rng.randrange(6))
        else:
            world.join(rng.randrange(6), slots=rng.randint(1, 5), version_slots=2)


def _segments(versions: list[int]) -> tuple[Segment, ...]:
    runs: list[list[Any]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    return tuple(Segment(version, digest(version), count) for version, count in runs)
