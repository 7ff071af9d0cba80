"""The fold itself: hands each event and command to the records that it concerns.

What concerns more than one of the records stands here. It must not look into the orchestrator.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dora_rl.core.audit.batches import Batches
from dora_rl.core.audit.devices import Devices
from dora_rl.core.audit.fleet import Fleet, Host
from dora_rl.core.audit.moves import Moves
from dora_rl.core.audit.records import Ends, Group, Member, Migration
from dora_rl.core.audit.report import (
    DONE,
    AuditReport,
    Breaches,
    Check,
    LengthBias,
    Promise,
    Spread,
)
from dora_rl.core.audit.work import Work
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import BatchGroup, Length, Move

# What its parts remember is made of these: see `core.history.snapshots`.
RECORDS: tuple[type, ...] = (Host, Migration, Member, Group, Ends, Promise, c.Train, BatchGroup)
RECORDS += (Move, Length)


class Audit:
    """Feed it every handled event with its commands, in order; ask for a report at any time."""

    SAVED = ("_refused", "_halted")
    WIRED = (
        *("_settings", "_paradigm", "_breaches", "_fleet", "_work", "_moves", "_batches"),
        *("_devices", "_on_event", "_on_answered", "_on_command"),
    )

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._paradigm = PARADIGMS[settings.paradigm]
        self._refused = 0
        self._halted: str | None = None
        self._breaches = Breaches()
        self._fleet = fleet = Fleet(self._breaches)
        self._work = work = Work(settings, fleet, self._breaches)
        self._moves = moves = Moves(fleet, work, self._breaches)
        self._batches = batches = Batches(settings, work, self._breaches)
        self._devices = devices = Devices(self._breaches)
        self._on_event: dict[type, Callable[[Any], object]] = {
            e.InstanceJoined: self._joined,
            e.InstanceProgressed: fleet.progressed,
            e.InstanceFailed: self._gone,
            e.InstanceStopped: self._stopped,
            e.InstanceSlept: self._slept,
            e.VersionInstalled: fleet.installed,
            e.InstallFailed: fleet.install_failed,
            e.VersionEvicted: fleet.evicted,
            e.TrajectoryFailed: work.failed_event,
            e.TrajectoryRefused: work.refused,
            e.TrajectoriesParked: work.parked,
            e.TrajectoryScored: work.scored,
            e.GroupJudged: work.judged,
            e.MigrationFailed: moves.failed,
            e.BatchTrained: batches.trained,
            e.BatchFailed: batches.failed,
            e.BatchRejected: batches.rejected,
            e.WeightsPublished: fleet.published,
            e.VersionPinned: fleet.pinned,
            e.VersionUnpinned: fleet.unpinned,
        }
        # What these did depends on whether the core took them, which its answer shows.
        self._on_answered: dict[type, Callable[[Any, Sequence[c.Command]], object]] = {
            e.TrajectoryFinished: work.finish,
            e.MigrationCompleted: moves.completed,
        }
        self._on_command: dict[type, Callable[[Any], object]] = {
            c.Start: work.start,
            c.Cancel: work.cancel,
            c.Install: self._install,
            c.Evict: self._evict,
            c.Reserve: moves.reserve,
            c.Transfer: moves.transfer,
            c.Release: moves.release,
            c.AbortMigration: moves.abort,
            c.Unpark: work.unpark,
            c.Score: work.score,
            c.Judge: work.judge,
            c.Fail: work.fail,
            c.Train: self._train,
            c.Sleep: self._sleep,
            c.Wake: devices.wake,
            c.Publish: self._publish,
            c.Delete: self._delete,
            c.Expel: self._gone,
            c.Dismiss: self._dismiss,
            c.Halt: self._halt,
        }

    def observe(self, now: float, event: e.Event, commands: Sequence[c.Command]) -> None:
        """One handled event, and the commands that answered it."""
        breaches = self._breaches
        breaches.event += 1
        if isinstance(event, e.StepLimitRaised):
            self._halted = None
        if self._halted is not None:
            return  # the core has ended; nothing that comes changes what it did
        if now > breaches.now:  # as for the core, time does not go back
            breaches.now = now
        kind = type(event)
        handler = self._on_event.get(kind)
        if handler is not None:
            handler(event)
        else:
            answered = self._on_answered.get(kind)
            if answered is not None:
                answered(event, commands)
        for command in commands:
            handler = self._on_command.get(type(command))
            if handler is not None:
                handler(command)

    def observe_refused(self, now: float, event: e.Event) -> None:
        """An event that the core refused: it changed nothing, here neither."""
        self._breaches.event += 1
        self._refused += 1

    def parts(self) -> dict[str, object]:
        """All that remembers something, by name: see `core.history.snapshots`."""
        return {
            "audit": self,
            "audit.breaches": self._breaches,
            "audit.fleet": self._fleet,
            "audit.work": self._work,
            "audit.moves": self._moves,
            "audit.batches": self._batches,
            "audit.devices": self._devices,
        }

    def report(self) -> AuditReport:
        """The verdict so far."""
        work = self._work
        promised = {
            Promise.ONE_VERSION: self._paradigm.pins_version,
            Promise.STALENESS: self._paradigm.bounded,
        }
        return AuditReport(
            paradigm=str(self._settings.paradigm),
            max_staleness=self._batches.max_staleness,
            events=self._breaches.event,
            refused=self._refused,
            steps=self._batches.steps,
            halted=self._halted,
            issued=work.issued,
            trained=work.trained,
            filtered=work.filtered.total(),
            failed=work.failed.total(),
            outstanding=sum(group.left for group in work.groups.values()),
            lost=work.lost,
            filtered_for=dict(work.filtered),
            failed_for=dict(work.failed),
            finished=work.finished,
            never_whole=work.never_whole,
            mixed=work.mixed,
            mixed_trained=work.mixed_trained,
            staleness=Spread.of(self._batches.staleness),
            lengths=LengthBias.of(work.finished_lengths, self._batches.trained_lengths),
            checks=tuple(
                Check(
                    promise,
                    promised.get(promise, True),
                    self._breaches.counts[promise],
                    tuple(self._breaches.examples.get(promise, ())),
                )
                for promise in Promise
            ),
        )

    # What concerns more than one of the records

    def _joined(self, event: e.InstanceJoined) -> None:
        self._devices.joined(event)
        superseded = self._fleet.joined(event)
        if superseded is not None:
            self._lose(superseded)

    def _gone(self, message: e.InstanceFailed | c.Expel) -> None:
        host = self._fleet.known(message.instance, message.incarnation)
        if host is not None:
            self._fleet.end(host)
            self._lose(host)

    def _stopped(self, event: e.InstanceStopped) -> None:
        host = self._fleet.known(event.instance, event.incarnation)
        if host is not None:
            self._fleet.end(host)
            self._lose(host, blame=False)

    def _lose(self, host: Host, *, blame: bool = True) -> None:
        self._devices.gone(host.instance, host.incarnation)
        self._moves.lose(host)
        self._work.lose(host, blame=blame)

    def _dismiss(self, command: c.Dismiss) -> None:
        host = self._fleet.known(command.instance, command.incarnation)
        if host is None:
            return
        if host.work:
            self._breaches.add(
                Promise.PLACEMENT,
                f"Dismiss of instance {host.instance}, which holds {len(host.work)} trajectories",
            )
        self._fleet.end(host)
        self._lose(host)

    def _install(self, command: c.Install) -> None:
        host = self._fleet.install(command)
        if host is not None and command.evict is not None and not command.carry:
            self._check_idle(host, command.evict)

    def _evict(self, command: c.Evict) -> None:
        host = self._fleet.evict(command)
        if host is not None:
            self._check_idle(host, command.version)

    def _sleep(self, command: c.Sleep) -> None:
        self._devices.sleep(command)
        host = self._fleet.sleep(command)
        if host is not None:
            for version in host.holds:
                self._check_idle(host, version)

    def _slept(self, event: e.InstanceSlept) -> None:
        self._devices.slept(event)
        self._fleet.slept(event)

    def _train(self, command: c.Train) -> None:
        self._devices.train(command)
        self._batches.train(command)

    def _check_idle(self, host: Host, version: int) -> None:
        if not self._paradigm.pins_version:
            return
        needing = self._work.running_on(host, version)
        if needing is None:
            needing = self._moves.arriving(host, version)
        if needing is not None:
            self._breaches.add(
                Promise.LEASES,
                f"eviction of version {version} from instance {host.instance}, "
                f"where trajectory {needing} needs it",
            )

    def _publish(self, command: c.Publish) -> None:
        self._fleet.publish(command, self._batches.steps)

    def _delete(self, command: c.Delete) -> None:
        version = command.version
        if self._paradigm.pins_version:
            for group in self._work.by_version.get(version, ()):
                self._breaches.add(
                    Promise.LEASES,
                    f"Delete of version {version} while group {group} is outstanding on it",
                )
        self._fleet.delete(version)

    def _halt(self, command: c.Halt) -> None:
        self._halted = (DONE if command.ok else "failed: ") + command.reason
        if not command.ok:
            return
        for group in self._work.groups.values():
            self._breaches.add(
                Promise.NOTHING_LOST,
                f"the run is done, but group {group.id} of version {group.version} is outstanding",
            )
