"""The audit's own picture of places: instances, the versions that each holds, what is leased.

Built from events and commands alone. It must not look into the orchestrator, and knows of a
trajectory only its id.
"""

from collections import Counter

from dora_rl.core.audit.report import Breaches, Promise
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.types import InstanceId, Length, MigrationId, TrajectoryId, Version

# What an instance has of a version. Plain integers: they are compared for every start.
UNVERIFIED = 0  # asked for, or installed with the wrong digest
READY = 1
GOING = 2  # an eviction was asked for and not confirmed


class Host:
    """One incarnation of an instance; a new incarnation is a new host."""

    __slots__ = (
        "alive",
        "arriving",
        "heard_at",
        "holds",
        "incarnation",
        "instance",
        "lengths",
        "replaces",
        "work",
    )

    def __init__(self, instance: InstanceId, incarnation: int) -> None:
        self.instance = instance
        self.incarnation = incarnation
        self.alive = True
        self.holds: dict[Version, int] = {}
        self.replaces: dict[Version, Version | None] = {}  # by each install under way
        self.work: set[TrajectoryId] = set()
        self.arriving: dict[MigrationId, Version] = {}  # migrations that end here
        self.heard_at = 0.0  # the time of its last report, and who had advanced by then
        self.lengths: tuple[Length, ...] = ()


class Fleet:
    SAVED = ("hosts", "digests", "deleted", "newest", "_asked", "_holders", "_pins")
    WIRED = ("_breaches",)

    def __init__(self, breaches: Breaches) -> None:
        self._breaches = breaches
        self.hosts: dict[InstanceId, Host] = {}
        self.digests: dict[Version, str] = {}
        self.deleted: set[Version] = set()
        self.newest: Version | None = None
        self._asked: set[Version] = set()
        self._holders: Counter[Version] = Counter()
        self._pins: dict[Version, set[str]] = {}

    # Instances

    def known(self, instance: InstanceId, incarnation: int) -> Host | None:
        """The live host, if it is this very incarnation."""
        host = self.hosts.get(instance)
        if host is None or not host.alive or host.incarnation != incarnation:
            return None
        return host

    def joined(self, event: e.InstanceJoined) -> Host | None:
        """Note a new incarnation; returns the host that it supersedes, if that still lived."""
        old = self.hosts.get(event.instance)
        if old is not None and old.incarnation >= event.incarnation:
            return None
        superseded = old if old is not None and old.alive else None
        if superseded is not None:
            self.end(superseded)
        self.hosts[event.instance] = Host(event.instance, event.incarnation)
        return superseded

    def progressed(self, event: e.InstanceProgressed) -> None:
        host = self.hosts.get(event.instance)
        if host is not None and host.incarnation == event.incarnation:
            host.heard_at = self._breaches.now
            host.lengths = event.lengths

    def end(self, host: Host) -> None:
        host.alive = False
        host.lengths = ()
        for version in list(host.holds):
            self._drop(host, version)

    def serves(self, host: Host, version: Version) -> bool:
        return host.alive and host.holds.get(version) == READY

    # Versions on instances

    def install(self, command: c.Install) -> Host | None:
        """Returns the host, where the command may be performed."""
        what = f"Install of version {command.version} on instance {command.instance}"
        self.check_exists(command.version, what)
        host = self.known(command.instance, command.incarnation)
        if host is None:
            self._breaches.add(Promise.PLACEMENT, f"{what}: incarnation not alive")
            return None
        self._set(host, command.version, UNVERIFIED)
        host.replaces[command.version] = command.evict
        if command.evict is not None and command.evict in host.holds and not command.carry:
            host.holds[command.evict] = GOING
        return host

    def installed(self, event: e.VersionInstalled) -> None:
        host = self.known(event.instance, event.incarnation)
        if host is None or event.version not in host.replaces:
            return
        evicted = host.replaces.pop(event.version)
        if evicted is not None and evicted != event.version:
            self._drop(host, evicted)
        if event.digest == self.digests.get(event.version):
            self._set(host, event.version, READY)

    def install_failed(self, event: e.InstallFailed) -> None:
        host = self.known(event.instance, event.incarnation)
        if host is None or event.version not in host.replaces:
            return
        kept = host.replaces.pop(event.version)
        self._drop(host, event.version)
        if kept is not None and kept in host.holds:
            host.holds[kept] = READY

    def evict(self, command: c.Evict) -> Host | None:
        host = self.known(command.instance, command.incarnation)
        if host is not None and command.version in host.holds:
            host.holds[command.version] = GOING
        return host

    def evicted(self, event: e.VersionEvicted) -> None:
        host = self.known(event.instance, event.incarnation)
        if host is not None and host.holds.get(event.version) == GOING:
            self._drop(host, event.version)

    def sleep(self, command: c.Sleep) -> Host | None:
        """All that it holds is going; returns the host, if it lives."""
        host = self.known(command.instance, command.incarnation)
        if host is not None:
            for version in host.holds:
                host.holds[version] = GOING
        return host

    def slept(self, event: e.InstanceSlept) -> None:
        host = self.known(event.instance, event.incarnation)
        if host is not None:
            for version in [v for v, hold in host.holds.items() if hold == GOING]:
                self._drop(host, version)

    def _set(self, host: Host, version: Version, hold: int) -> None:
        if version not in host.holds:
            self._holders[version] += 1
        host.holds[version] = hold

    def _drop(self, host: Host, version: Version) -> None:
        if host.holds.pop(version, None) is not None:
            self._holders[version] -= 1

    # Versions in the store

    def publish(self, command: c.Publish, steps: int) -> None:
        """`steps` is the number of train steps taken: version `steps` is the last there can be."""
        if command.version > steps:
            self._breaches.add(
                Promise.TRAINED_ONCE,
                f"Publish of version {command.version} after {steps} train steps",
            )
        self._asked.add(command.version)

    def published(self, event: e.WeightsPublished) -> None:
        version = event.version
        if version in self.digests or not (version in self._asked or self.newest is None):
            return
        self.digests[version] = event.digest
        self.newest = version if self.newest is None else max(self.newest, version)

    def pinned(self, event: e.VersionPinned) -> None:
        if event.version in self.digests and event.version not in self.deleted:
            self._pins.setdefault(event.version, set()).add(event.holder)

    def unpinned(self, event: e.VersionUnpinned) -> None:
        self._pins.get(event.version, set()).discard(event.holder)

    def delete(self, version: Version) -> None:
        """What holds of instances, pins and being the newest say; work is `Work`'s."""
        if not self.check_exists(version, f"Delete of version {version}"):
            return
        if version == self.newest:
            self._breaches.add(Promise.LEASES, f"Delete of version {version}, the newest")
        if self._holders[version]:
            holder = next(i for i, host in self.hosts.items() if version in host.holds)
            self._breaches.add(
                Promise.LEASES, f"Delete of version {version} while instance {holder} holds it"
            )
        if self._pins.get(version):
            names = ", ".join(sorted(self._pins[version]))
            self._breaches.add(
                Promise.LEASES, f"Delete of version {version} while pinned by {names}"
            )
        self.deleted.add(version)

    def check_exists(self, version: Version, what: str) -> bool:
        if version not in self.digests:
            self._breaches.add(Promise.LEASES, f"{what}: never published")
            return False
        if version in self.deleted:
            self._breaches.add(Promise.LEASES, f"{what}: deleted")
            return False
        return True
